"""What a sharding did, and what setting the state of a model or of optimizers did, on one rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.report.names import in_bytes, listing


@dataclass(frozen=True, slots=True)
class StateReport:
    """The facts of one state that was set, as seen by one rank. Sizes in bytes, times in seconds.

    Attributes:
        set_names: tensors that got values; of an optimizer as in "layer.weight: exp_avg". Tied ones once.
        missing: what the state lacks and has kept its values; of optimizers also parameters, which have kept the
            settings of their group.
        unexpected: what the state has beside, and has been left out.
        mismatched: names in the state of another shape or kind of number; the tensors have kept their values.
        cast: name to ("dtype brought", "dtype now").
        afresh: of optimizers, parameters that are without state now, as before their first step.
        on_meta: of models, tensors that still have no values.
        recomputed: of models that were on meta, buffers and attributes that no state has, computed again.
        brought_by: the ranks that had the state.
        read_bytes: read from files by this rank.
        sent_bytes, received_bytes: to and from other ranks.
        kept_bytes: of values that this rank had itself.
        seconds: by phase, in order: agree, exchange, finish.
    """

    rank: int
    world_size: int
    set_names: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    cast: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    afresh: tuple[str, ...] = ()
    on_meta: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = ()
    brought_by: tuple[int, ...] = ()
    read_bytes: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    kept_bytes: int = 0
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        read = f"read {in_bytes(self.read_bytes)}, " if self.read_bytes else ""
        moved = f"{read}sent {in_bytes(self.sent_bytes)}, received {in_bytes(self.received_bytes)}"
        lines = [
            f"set {len(self.set_names)} tensors, rank {self.rank} of {self.world_size}",
            f"  {moved}, kept {in_bytes(self.kept_bytes)}",
            "  " + ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in self.seconds.items()),
        ]
        for pair in dict.fromkeys(self.cast.values()):
            names = [name for name, cast in self.cast.items() if cast == pair]
            lines += listing(f"{pair[0]}→{pair[1]}", names)
        lines += listing("missing", self.missing)
        lines += listing("unexpected", self.unexpected)
        lines += listing("mismatched", self.mismatched)
        lines += listing("afresh", self.afresh)
        lines += listing("recomputed", self.recomputed)
        lines += listing("on meta", self.on_meta)
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class ShardReport:
    """The facts of one sharding, as seen by one rank. Sizes in bytes, times in seconds.

    Attributes:
        mesh: its axes and their sizes, as in "fsdp=8"; "" where nothing was sharded.
        was_sharded: the model was sharded before, and has been left alone.
        groups: modules that ``fully_shard`` was applied to, without the root.
        parameters: elements of all parameters, tied ones once.
        placed_bytes: of this rank's parameters and buffers that have values.
        sent_bytes, received_bytes: to and from other ranks.
        kept_bytes: of values that this rank had itself.
        on_meta: tensors without values on any rank, which ``load`` fills.
        awaiting_load: parameters that have memory, because an optimizer holds them, but no values (they are NaN).
        cast: name to ("dtype before", "dtype now"); all of what was trained and upcast, and of what the source had
            in another dtype than this rank's model.
        differed: name to the rank whose values were taken where ranks had different ones.
        replicated: parameters that are whole on every rank.
        tied: further names of shared parameters, with the first name.
        rebound: for each optimizer, how many parameters and values of state it was bound to.
        notes: what was put into four bits, and what stays as it is, in sentences.
        seconds: by phase, in order: agree, compare, wrap, exchange, finish.
    """

    rank: int
    world_size: int
    mesh: str
    was_sharded: bool
    parameters: int
    placed_bytes: int
    groups: tuple[str, ...] = ()
    sent_bytes: int = 0
    received_bytes: int = 0
    kept_bytes: int = 0
    staging_bytes: int = 0
    on_meta: tuple[str, ...] = ()
    awaiting_load: tuple[str, ...] = ()
    cast: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    differed: Mapping[str, int] = dataclasses.field(default_factory=dict)
    replicated: tuple[str, ...] = ()
    tied: Mapping[str, str] = dataclasses.field(default_factory=dict)
    rebound: tuple[tuple[int, int], ...] = ()
    notes: tuple[str, ...] = ()
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        place = f"rank {self.rank} of {self.world_size}"
        if self.was_sharded:
            return f"left alone, {place}: the model was sharded before"
        moved = f"sent {in_bytes(self.sent_bytes)}, received {in_bytes(self.received_bytes)}"
        lines = [
            f"sharded on {self.mesh}" if self.mesh else "not sharded: there is no process group",
            f"  {place}: holds {in_bytes(self.placed_bytes)}; {self.parameters:,} parameters in all",
            f"  {moved}, kept {in_bytes(self.kept_bytes)}; staging {in_bytes(self.staging_bytes)}",
            "  " + ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in self.seconds.items()),
        ]
        lines += [f"  {note}" for note in self.notes]
        for rank in sorted(set(self.differed.values())):
            names = [name for name, other in self.differed.items() if other == rank]
            lines += listing(f"of rank {rank}", names)
        for pair in dict.fromkeys(self.cast.values()):
            names = [name for name, cast in self.cast.items() if cast == pair]
            lines += listing(f"{pair[0]}→{pair[1]}", names)
        lines += [f"  tied        {name} = {first}" for name, first in self.tied.items()]
        lines += listing("replicated", self.replicated)
        lines += listing("on meta", self.on_meta)
        lines += listing("to be loaded", self.awaiting_load)
        for index, (parameters, values) in enumerate(self.rebound):
            lines.append(f"  optimizer {index}: {parameters} parameters, {values} values of state")
        return "\n".join(lines)
