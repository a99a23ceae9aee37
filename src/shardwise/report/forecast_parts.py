"""What a forecast is made of: what is foreseen of one rank, of a group, of tensors that are computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.report.names import in_bytes


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts ``start <= i < stop`` of ``total`` that a rank holds; ``is_cut`` where only a part of each."""

    start: int
    stop: int
    total: int
    is_cut: bool

    @property
    def count(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        if not self.count:
            return f"none of {self.total}"
        part = "a part of each of " if self.is_cut else ""
        if self.count == self.total:
            return f"{part or 'all '}{self.total}"
        span = f"{self.start}" if self.count == 1 else f"{self.start}..{self.stop - 1}"
        return f"{part}{self.count} of {self.total} ({span})"


@dataclass(frozen=True, slots=True)
class RankForecast:
    """What a load will take on one rank. Everything in bytes, but for counts.

    ``shard_bytes`` are those of the elements this rank holds (parameters and persistent buffers), ``padded_bytes``
    the memory they get: FSDP2 pads every rank's shards to the size of the first. ``device_bytes`` and
    ``host_bytes`` are the peak of bringing the model up, nothing of training included; ``host_bytes`` has
    staging in it. ``needed_bytes`` are the stored bytes that the shards are made of, ``read_bytes``
    those that are asked for, gaps included, in ``reads`` requests to ``files`` files; headers are not counted.
    ``experts`` is by stack of experts, equal layers under one pattern.
    """

    rank: int
    shard_bytes: int
    padded_bytes: int
    device_bytes: int
    host_bytes: int
    needed_bytes: int
    read_bytes: int
    reads: int
    files: int
    experts: Mapping[str, Experts] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainingForecast:
    """What training with AdamW takes on one rank in the steady state, in bytes; activations are not counted.

    ``weight_bytes`` is the memory of parameters and persistent buffers, padding included; gradients and the two
    moments are those of what is trained, in its dtype. ``gathered_bytes`` is the largest group, gathered.
    ``accumulated_bytes``, which are not in the total, are the whole gradient of what is trained, in the dtype that
    it is summed in over ranks: a step of several micro-batches keeps that on every rank, unless gradients are dealt
    to their shards after each.
    """

    rank: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    gathered_bytes: int
    accumulated_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes + self.gathered_bytes

    @property
    def _accumulated(self) -> str:
        if not self.accumulated_bytes:
            return ""
        return (
            f", and {in_bytes(self.accumulated_bytes)} where steps add up whole gradients of several micro-batches"
        )

    def __str__(self) -> str:
        return (
            f"{in_bytes(self.total_bytes)}: weights {in_bytes(self.weight_bytes)}, gradients "
            f"{in_bytes(self.gradient_bytes)}, AdamW {in_bytes(self.optimizer_bytes)}, largest group "
            f"{in_bytes(self.gathered_bytes)}; activations come on top{self._accumulated}"
        )


@dataclass(frozen=True, slots=True)
class BankForecast:
    """What an ``AdapterBank`` takes on one rank, in bytes; activations are not counted.

    ``weight_bytes`` is the base, as it is held. ``trained`` numbers of each tenant take ``tenant_bytes`` together:
    16 for each, with AdamW, whole on every rank. A pass takes ``gathered_bytes`` (the largest group),
    ``packed_bytes`` (of tenants of like rank, the matrices of one layer side by side) and, where there are most,
    ``logits_bytes`` for its ``tokens``.
    """

    rank: int
    trained: tuple[int, ...]
    weight_bytes: int
    tenant_bytes: int
    gathered_bytes: int
    packed_bytes: int
    logits_bytes: int
    tokens: int

    @property
    def total_bytes(self) -> int:
        passing = self.gathered_bytes + self.packed_bytes + self.logits_bytes
        return self.weight_bytes + self.tenant_bytes + passing

    @property
    def told_tenants(self) -> str:
        least, most = min(self.trained), max(self.trained)
        each = f"{most:,}" if least == most else f"{least:,} to {most:,}"
        return (
            f"{len(self.trained)}, each training {each} numbers: {in_bytes(self.tenant_bytes)} on every rank "
            "(float32, gradients, AdamW)"
        )

    def __str__(self) -> str:
        return (
            f"{in_bytes(self.total_bytes)}: base {in_bytes(self.weight_bytes)}, tenants "
            f"{in_bytes(self.tenant_bytes)}, and for a pass largest group {in_bytes(self.gathered_bytes)}, packed "
            f"{in_bytes(self.packed_bytes)}, logits of {self.tokens:,} tokens {in_bytes(self.logits_bytes)}; "
            "activations come on top"
        )


@dataclass(frozen=True, slots=True)
class GroupForecast:
    """A ``fully_shard`` group: its modules ("" for the root), what they hold, and what gathering them takes.

    ``gathered_bytes`` is the output of the all-gather, padding included, in the dtype that is gathered.
    """

    modules: tuple[str, ...]
    dtype: str
    tensors: int
    parameters: int
    gathered_bytes: int

    @property
    def name(self) -> str:
        return " + ".join(module or "(root)" for module in self.modules)


@dataclass(frozen=True, slots=True)
class ComputedForecast:
    """Tensors made by a conversion that computes: it reads its inputs whole, on every rank that holds a part.

    ``budget_bytes`` is what a load must be allowed for it.
    """

    names: tuple[str, ...]
    conversion: str
    input_bytes: int
    budget_bytes: int
