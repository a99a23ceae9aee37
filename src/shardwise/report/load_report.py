"""What a load did, on one rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.report.forecast_parts import RankForecast
from shardwise.report.names import in_bytes, listing, trainable_in_words

_BRIEF_LINES = 10


@dataclass(frozen=True, slots=True)
class TouchedPages:
    """In which pages fresh host memory was taken: bytes, processor seconds that the first touches took, and why so.

    The ends of blocks, less than a huge page each, are not counted.
    """

    huge_bytes: int = 0
    small_bytes: int = 0
    huge_seconds: float = 0.0
    small_seconds: float = 0.0
    reason: str = ""

    def __str__(self) -> str:
        kinds = (("huge", self.huge_bytes, self.huge_seconds), ("small", self.small_bytes, self.small_seconds))
        parts = [
            f"{in_bytes(nbytes)} in {kind} pages ({seconds / nbytes * (1 << 30):.2f} s/GiB)"
            for kind, nbytes, seconds in kinds
            if nbytes
        ]
        return f"{', '.join(parts)}, {self.reason}"


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The facts of one load, as seen by one rank. Sizes in bytes, times in seconds.

    ``tied`` maps each tied name to the name that holds the values; ``cast`` maps a name to
    ("stored dtype", "dtype in the model"); ``ignored_keys`` are checkpoint keys that nothing was made of, with
    consent or because the model ignores them on purpose; ``read_once`` and ``read_alone`` are tensors of which
    several ranks need the same bytes, with the reason why one rank read for all, or each for itself; ``replicated``
    are parameters that are whole on every rank of a sharded model. ``wrapper`` is where in a nest of dicts the
    checkpoint has the model, as in "model"; ``not_loaded`` is what it has beside the model's tensors.
    """

    checkpoint: str
    rank: int
    world_size: int
    parameters: int
    """Elements of all parameters of the model, tied ones once."""
    checkpoint_bytes: int
    read_bytes: int
    """Bytes this rank read from the checkpoint's tensors, over-read of strided boxes included."""
    placed_bytes: int
    """Bytes of parameters and persistent buffers that this rank holds."""
    files_opened: int
    reads: int
    """Read system calls (or requests) of this rank."""
    seconds: Mapping[str, float]
    """Seconds by phase, in order: index, plan, materialize, read, share, fill, audit."""
    loaded: int
    """Tensors filled from the checkpoint."""
    forecast: RankForecast
    """What was foreseen for this rank, every rank reading for itself; what is held and read can be compared."""
    files: tuple[str, ...]
    """Names of the checkpoint's files, relative to ``checkpoint``."""
    tied: Mapping[str, str] = dataclasses.field(default_factory=dict)
    initialized: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    cast: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    ignored_keys: tuple[str, ...] = ()
    missing_keys: tuple[str, ...] = ()
    unexpected_keys: tuple[str, ...] = ()
    mismatched_keys: tuple[str, ...] = ()
    computed: tuple[str, ...] = ()
    read_once: Mapping[str, str] = dataclasses.field(default_factory=dict)
    read_alone: Mapping[str, str] = dataclasses.field(default_factory=dict)
    replicated: tuple[str, ...] = ()
    wrapper: str = ""
    not_loaded: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """Sentences to be read."""
    resized: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    """Tensors that got rows the checkpoint lacks: (rows stored, rows)."""
    trainable_parameters: int = 0
    """Elements of the parameters that are trained, tied ones once."""
    trained: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Where a tuning was asked for, what is trained, with the dtype it is kept in."""
    pages: TouchedPages = TouchedPages()
    """In which pages the memory of this rank's shards was taken."""

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return dataclasses.asdict(self)

    def _foreseen(self) -> str:
        """Forecast and fact in words; the fact only where it differs."""
        pairs = (
            ("read", self.forecast.read_bytes, self.read_bytes),
            ("held", self.forecast.shard_bytes, self.placed_bytes),
        )
        return ", ".join(
            f"{word} {in_bytes(foreseen)}" + ("" if fact == foreseen else f" (was {in_bytes(fact)})")
            for word, foreseen, fact in pairs
        )

    def brief(self) -> str:
        """The report in ten lines at the most: counts in place of names."""
        lines = str(self).splitlines()[:5]
        counts = {
            "tied": len(self.tied),
            "initialized": len(self.initialized),
            "recomputed": len(self.recomputed),
            "kept": len(self.kept),
            "cast": len(self.cast),
            "computed": len(self.computed),
            "read once": len(self.read_once),
            "resized": len(self.resized),
            "replicated": len(self.replicated),
            "ignored": len(self.ignored_keys),
            "not loaded": len(self.not_loaded),
        }
        if told := ", ".join(f"{count:,} {word}" for word, count in counts.items() if count):
            lines.append(f"  tensors     {told}")
        if self.trained:
            lines.append(f"  {trainable_in_words(self.trainable_parameters, self.parameters)}")
        room = _BRIEF_LINES - len(lines)
        shown = self.notes if len(self.notes) <= room else self.notes[: room - 1]
        lines += [f"  note        {note}" for note in shown]
        if len(shown) < len(self.notes):
            lines.append(f"  ... and {len(self.notes) - len(shown)} more notes")
        return "\n".join(lines)

    def __str__(self) -> str:
        rate = self.read_bytes / max(self.seconds.get("read", 0.0), 1e-9)
        read = f"{in_bytes(self.read_bytes)} of {in_bytes(self.checkpoint_bytes)}"
        effort = f"{self.reads} reads, {self.files_opened} files"
        lines = [
            f"loaded {self.checkpoint}",
            f"  rank {self.rank} of {self.world_size}: read {read} ({in_bytes(int(rate))}/s, {effort})",
            f"  holds {in_bytes(self.placed_bytes)}; {self.loaded} tensors, {self.parameters:,} parameters in all",
            "  " + ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in self.seconds.items()),
            f"  foreseen    {self._foreseen()}",
        ]
        if self.pages.huge_bytes or self.pages.small_bytes:
            lines.append(f"  memory      {self.pages}")
        lines += [f"  tied        {name} = {source}" for name, source in self.tied.items()]
        lines += listing("initialized", self.initialized)
        lines += listing("recomputed", self.recomputed)
        lines += listing("kept", self.kept)
        for pair in dict.fromkeys(self.cast.values()):
            names = [name for name, cast in self.cast.items() if cast == pair]
            lines += listing(f"{pair[0]}→{pair[1]}", names)
        lines += listing("computed", self.computed)
        for word, reasons in (("read once", self.read_once), ("read alone", self.read_alone)):
            for reason in dict.fromkeys(reasons.values()):
                names = [name for name, found in reasons.items() if found == reason]
                lines += [f"  {word:<11} {len(names)} tensors: {reason}"]
        lines += [
            f"  resized     {name}: {stored:,} rows to {rows:,}" for name, (stored, rows) in self.resized.items()
        ]
        if self.trained:
            lines.append(f"  {trainable_in_words(self.trainable_parameters, self.parameters)}")
        for dtype in dict.fromkeys(self.trained.values()):
            names = [name for name, found in self.trained.items() if found == dtype]
            lines += listing(f"in {dtype}", names)
        lines += listing("replicated", self.replicated)
        lines += listing("ignored", self.ignored_keys)
        if self.wrapper:
            lines.append(f"  taken from  {self.wrapper}")
        lines += listing("not loaded", self.not_loaded)
        lines += [f"  note        {note}" for note in self.notes]
        return "\n".join(lines)
