"""What setting the state of a model or of optimizers did, on one rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.report.names import listing
from shardwise.report.sizes import in_bytes


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
