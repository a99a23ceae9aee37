"""Compares the copies of a checkpoint that ranks open, where they do not open the same files.

[Note: One checkpoint] The first rank reads the headers, and its places of tensors are everybody's. A rank on
another machine may have another file under the same path, and would read wrong numbers at these places without a
word. So every rank tells which file it opens: boot of the machine, device, inode, size and time of change. Ranks
of which these are equal read the same bytes, and host names prove nothing. Where there are several copies, each is
looked at once, by all the ranks that have it together, and the sums of what they find are compared.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardwise.errors import DisagreementError
from shardwise.execution.ranks.world import World
from shardwise.execution.reading.place import identities_of
from shardwise.execution.reading.workers import Workers
from shardwise.formats.checkpoint_index import CheckpointIndex
from shardwise.planning.loads.comparing import BLOCK_BYTES, CompareCopies, ComparedBytes, portions
from shardwise.report.names import shown_ranks
from shardwise.storage.contract import FilePlaces, StorageReader
from shardwise.storage.machine import process_space
from shardwise.storage.names import shown

_DIGEST_BYTES = 16
_WORD = 1 << (8 * _DIGEST_BYTES)
_MOST_READ_BYTES = 1 << 20
_REMEDY = (
    "copy the checkpoint anew to the machines of these ranks, or put it on a file system that all machines share"
)


@dataclass(frozen=True, slots=True)
class Copies:
    """How many copies of a checkpoint the ranks read, and what was read to compare them, on this rank.

    ``identities`` are those of this rank's files when they were looked at; none where they are the same everywhere.
    """

    count: int = 1
    compared_bytes: int = 0
    identities: Mapping[str, str] = field(default_factory=dict)

    @property
    def notes(self) -> tuple[str, ...]:
        """For the report."""
        if self.count == 1:
            return ()
        note = (
            f"the ranks read {self.count} copies of the checkpoint, which were compared and are equal; this rank "
            f"looked at {self.compared_bytes:,} bytes of its own"
        )
        return (note,)


def require_one_checkpoint(
    world: World, reader: StorageReader, index: CheckpointIndex, compare: CompareCopies, budget_bytes: int
) -> Copies:
    """Raise when ranks that do not open the same files have files that differ. See [Note: One checkpoint].

    Collective: yes.
    Memory: at most ``budget_bytes``.

    Raises:
        DisagreementError: naming a file, a tensor of it, and the ranks.
        StorageError: a file is not there, or cannot be read.
    """
    files = sorted(index.files)
    identities: dict[str, str] = {}

    def place() -> bytes:
        if isinstance(reader, FilePlaces):
            identities.update({file: reader.identity(file) for file in files})
        return _digest("\n".join(place_of(reader, file) for file in files).encode(errors="surrogatepass"))

    told = world.each(place)
    first_with = {digest: rank for rank, digest in reversed(list(enumerate(told)))}
    if len(first_with) == 1:
        return Copies(identities=identities)
    members: dict[int, list[int]] = {}
    for rank, digest in enumerate(told):
        members.setdefault(first_with[digest], []).append(rank)
    leader = first_with[told[world.rank]]
    _require_sizes(world, reader, index, members, identities)
    mine = portions(index, compare)[members[leader].index(world.rank) :: len(members[leader])]
    found: dict[ComparedBytes, int] = {}

    def unequal(sums: Sequence[int]) -> list[int]:
        totals = {first: sum(sums[rank] for rank in ranks) % _WORD for first, ranks in members.items()}
        return [first for first in members if totals[first] != totals[0]]

    if others := world.all_reduce(lambda: _sum(world, reader, mine, budget_bytes, found), unequal):
        _refuse(world, index, {first: members[first] for first in (0, *others)}, leader, found)
    compared_bytes = sum(stop - start for portion in mine for start, stop in portion.ranges)
    return Copies(len(members), compared_bytes, identities)


def place_of(reader: StorageReader, file: str) -> str:
    """A text that two ranks have in common only where they read the same bytes.

    Of a remote storage that is its root: the identities of its files, which mean the same on every rank, are
    compared with those that the first rank saw whenever something is read.
    """
    if isinstance(reader, FilePlaces):
        return reader.place(file)
    if reader.policy.is_remote:
        return f"at {reader.root}"
    return f"in process {os.getpid()} of {process_space()}"


def _require_sizes(
    world: World,
    reader: StorageReader,
    index: CheckpointIndex,
    members: Mapping[int, Sequence[int]],
    identities: dict[str, str],
) -> None:
    """Raise when copies have files of other sizes; notes identities that are not known yet. Collective: yes."""
    files = sorted(index.files)

    def look() -> list[int] | None:
        if not identities:
            identities.update(identities_of(reader, files, world.check))
        return [reader.size(file) for file in files] if world.rank in members else None

    told = world.each(look)
    for number, file in enumerate(files):
        sizes = {first: (told[first] or [])[number] for first in members}
        if others := [first for first in members if sizes[first] != sizes[0]]:
            ranks = sorted(rank for first in others for rank in members[first])
            raise DisagreementError(
                f"{shown(file)} has {sizes[others[0]]:,} bytes on rank {shown_ranks(ranks)}, and {sizes[0]:,} on "
                f"rank 0 (in {index.root}): they are not copies of one file; {_REMEDY}"
            )


def _sum(
    world: World,
    reader: StorageReader,
    mine: Sequence[ComparedBytes],
    budget_bytes: int,
    found: dict[ComparedBytes, int],
) -> int:
    """The sum of the digests of this rank's portions, whatever their order; each of them into ``found``."""
    count = max(1, min(reader.policy.concurrency, budget_bytes // BLOCK_BYTES))
    nbytes = min(_MOST_READ_BYTES, budget_bytes // count)
    lock = threading.Lock()

    def look(portion: ComparedBytes, buffer: bytearray) -> None:
        digest = hashlib.blake2b(
            f"{portion.file}\n{portion.key}\n".encode(errors="surrogatepass"), digest_size=_DIGEST_BYTES
        )
        for start, stop in portion.ranges:
            for begin in range(start, stop, nbytes):
                part = memoryview(buffer)[: min(nbytes, stop - begin)]
                reader.read_into(portion.file, begin, part)
                digest.update(part)
        with lock:
            found[portion] = int.from_bytes(digest.digest())

    if mine:
        Workers(look, [bytearray(nbytes) for _ in range(min(count, len(mine)))], world.check).run(mine)
    return sum(found.values()) % _WORD


def _refuse(
    world: World,
    index: CheckpointIndex,
    members: Mapping[int, Sequence[int]],
    leader: int,
    found: Mapping[ComparedBytes, int],
) -> None:
    """Raise what the first copy that differs has otherwise than the first rank's. Collective: yes."""
    other = next(first for first in members if first != 0)

    def refuse(told: Sequence[Mapping[ComparedBytes, int]]) -> None:
        raise _difference(index, members, other, told)

    world.all_reduce(lambda: dict(found) if leader in (0, other) else {}, refuse)


def _difference(
    index: CheckpointIndex,
    members: Mapping[int, Sequence[int]],
    other: int,
    told: Sequence[Mapping[ComparedBytes, int]],
) -> DisagreementError:
    here, there = ({p: d for rank in members[first] for p, d in told[rank].items()} for first in (0, other))
    differing = [portion for portion in here if here[portion] != there[portion]]
    ranks = shown_ranks(sorted(rank for first, copy in members.items() if first != 0 for rank in copy))
    tensors = sorted({portion.key for portion in differing if portion.key})
    files = sorted({portion.file for portion in differing})
    headers = sorted({portion.file for portion in differing if not portion.key})
    what = (
        f"{len(tensors)} tensors that were looked at have other values, {shown(tensors[0])} first"
        if tensors
        else ""
    )
    if headers:
        what = f"the header of {shown(headers[0])} is another" + (f", and {what}" if what else "")
    return DisagreementError(
        f"{', '.join(map(shown, files[:5]))}: on rank {ranks} not what it is on rank 0 (in {index.root}): {what}; "
        f"{_REMEDY}"
    )


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()
