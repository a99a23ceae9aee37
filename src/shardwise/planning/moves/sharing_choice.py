"""Weighs whether ranks that need the same bytes each read them, or one reads and sends them.

The arithmetic. A group of ranks needs M bytes, of which each rank reading on its own would read ``factor * M`` in
all: as many times as there are replicas, and what is read over between strided pieces. One machine reads B bytes
per second; the network brings it N. Reading alone takes ``factor * M / B``; reading once and sending every replica
its copy takes ``M / B + replicas * M / N``. So sharing pays when ``(factor - 1) * N > replicas * B``.

A local disk is not asked twice: what one rank of a machine has read is in its page cache, and other machines have
disks of their own.

Reading in intervals is weighed against nothing: what it saves is files opened, and what an open costs, a rank or
the server that many ranks ask at once, is not known of a storage. Who wants it says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from shardwise.conversion import Expression, copies
from shardwise.errors import ConfigError
from shardwise.formats.checkpoint_index import CheckpointIndex
from shardwise.layout import LocalBox
from shardwise.planning.loads.schedule import segments_of
from shardwise.storage.contract import ReadPolicy


@dataclass(frozen=True, slots=True)
class Weighed:
    """What the arithmetic says.

    ``network_bytes_per_s``: of one machine; None: what is usual for the mesh's device.
    """

    network_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        given = self.network_bytes_per_s
        if given is not None and not (math.isfinite(given) and given > 0):
            raise ConfigError(f"network_bytes_per_s={given} is not a positive number of bytes per second")


@dataclass(frozen=True, slots=True)
class Alone:
    """Every rank reads what it needs."""


@dataclass(frozen=True, slots=True)
class OncePerGroup:
    """What several ranks need is read once and shared, whatever the storage."""


@dataclass(frozen=True, slots=True)
class InIntervals:
    """Every rank reads one interval of the checkpoint, and hands it to the ranks that hold it.

    So the files that are opened, over all ranks, are at most files and ranks together, not files times ranks; but
    nearly all that is read crosses the network. See :mod:`shardwise.planning.moves.intervals`.
    """


SharedReads: TypeAlias = Weighed | Alone | OncePerGroup | InIntervals

ETHERNET_BYTES_PER_S = 2.5e9
"""What is assumed of the network between machines without accelerators: 25 gigabit."""

FABRIC_BYTES_PER_S = 12.5e9
"""What is assumed of the network between accelerators: 100 gigabit for each machine at least."""


def times_read(
    expression: Expression,
    boxes: Iterable[LocalBox],
    index: CheckpointIndex,
    policy: ReadPolicy,
    *,
    size: int,
    replicas: int,
) -> float:
    """How often a needed byte would be read by ``size`` ranks, each on its own; ``replicas`` hold the same boxes.

    A request counts as what could be read in its time (the gap that the storage rather reads over).
    """
    needed = cost = 0
    for part in boxes:
        for copy in copies(expression, part.box, part.local):
            entry = index.entries[copy.leaf.key]
            needed += copy.numel * entry.dtype.itemsize
            for segment in segments_of(
                copy, 0, entry, needs_staging=False, policy=policy, block_bytes=policy.request_bytes
            ):
                cost += segment.bytes.nbytes + (policy.max_gap_bytes if len(copy.source.sizes) > 1 else 0)
    return replicas * min(size / replicas, cost / needed) if needed else 1.0


@dataclass(frozen=True, slots=True)
class SharingChoice:
    """What was chosen, and why, in words."""

    is_shared: bool
    reason: str


def choose(
    mode: SharedReads, policy: ReadPolicy, *, replicas: int, factor: float, network_bytes_per_s: float
) -> SharingChoice:
    """Whether a tensor is read once per group.

    Args:
        mode: what the user wants.
        policy: of the storage.
        replicas: how many ranks of the group hold each element.
        factor: how often a needed byte would be read, if every rank read alone.
        network_bytes_per_s: what is assumed where ``mode`` does not say.
    """
    match mode:
        case Alone():
            return SharingChoice(is_shared=False, reason="as asked")
        case OncePerGroup() | InIntervals():
            return SharingChoice(is_shared=True, reason="as asked")
        case Weighed(given):
            if not policy.is_remote:
                return SharingChoice(
                    is_shared=False, reason="a local disk: the page cache serves the second reader"
                )
            network = given or network_bytes_per_s
            pays = (factor - 1) * network > replicas * policy.bytes_per_s
            weighed = (
                f"{factor:.3g} reads of each byte at {policy.bytes_per_s / 1e9:.3g} GB/s against one, and "
                f"{replicas} x over a network of {network / 1e9:.3g} GB/s"
            )
            return SharingChoice(pays, weighed)
