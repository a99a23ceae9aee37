"""What a verification found, and what was found when a checkpoint was opened again."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from shardwise.report.names import collapse, in_bytes, listing


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The outcome on all ranks together.

    ``elements`` counts what was compared over all ranks, replicas counted on each. ``unequal`` has a sentence for
    each tensor and rank that differs. ``initialized`` are tensors that no checkpoint holds, so that there is
    nothing to compare them with.
    """

    checkpoint: str
    model_class: str
    dtype: str
    world_size: int
    tensors: int
    buffers: int
    elements: int
    unequal: tuple[str, ...] = ()
    initialized: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def is_equal(self) -> bool:
        return not self.unequal

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return {**dataclasses.asdict(self), "is_equal": self.is_equal}

    def __str__(self) -> str:
        verdict = "bitwise equal" if self.is_equal else f"{len(self.unequal)} DIFFER"
        lines = [
            f"{self.model_class} {self.dtype} on {self.world_size} ranks: {verdict}",
            f"  {self.tensors} tensors and {self.buffers} buffers, {self.elements:,} elements, compared",
            f"  with whole tensors converted by transformers, in {self.seconds:.1f} s",
        ]
        lines += [f"  differs      {pattern}" for pattern, _ in collapse(self.unequal)[:20]]
        lines += [f"  not compared {pattern} (initialized)" for pattern, _ in collapse(self.initialized)[:20]]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class ReopenReport:
    """The facts of one look at a checkpoint on disk. Sizes in bytes, times in seconds.

    Attributes:
        checkpoint: the folder.
        files: of weights.
        tensors: in them.
        nbytes: of these tensors.
        model_class: whose tensors are all there, and no others; "" where there is no config to tell.
        compared: tensors whose fingerprint was recorded when they were saved; of a training's checkpoint runs of
            bytes: chunks of tensors, values, and what lies around them.
        damaged: those that have another one now.
        seconds: all of it took.
        holds: what it is, where it is no model: a training's checkpoint, or an adapter.
        changed: small files beside the weights (configs, tokenizers) that are not what was saved: edited since, or
            damaged; weights are not affected.
        damaged_files: headers of files, records of fingerprints, and configs of adapters, that are not what was
            saved.
    """

    checkpoint: str
    files: int
    tensors: int
    nbytes: int
    model_class: str
    compared: int
    damaged: tuple[str, ...]
    seconds: float
    holds: str = ""
    changed: tuple[str, ...] = ()
    damaged_files: tuple[str, ...] = ()

    @property
    def is_sound(self) -> bool:
        """Whether nothing is known to be damaged. Small files may have been edited, and count for nothing here."""
        return not self.damaged and not self.damaged_files

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return dataclasses.asdict(self) | {"is_sound": self.is_sound}

    def __str__(self) -> str:
        files = "1 file" if self.files == 1 else f"{self.files} files"
        lines = [
            f"{self.checkpoint}: {self.tensors} tensors, {in_bytes(self.nbytes)} in {files}, {self.seconds:.1f} s",
            "  structure   sound: headers, index and sizes agree",
            self._coverage,
        ]
        if self.compared:
            word = "DAMAGED" if self.damaged else "equal to what was saved"
            lines.append(
                f"  values      {self.compared - len(self.damaged)} of {self.compared} fingerprints {word}"
            )
        else:
            why = (
                "what was recorded is damaged"
                if self.damaged_files
                else "no fingerprints were recorded for these files"
            )
            lines.append(f"  values      not compared: {why}")
        lines += listing("damaged", self.damaged)
        lines += [f"  damaged     {each}" for each in self.damaged_files]
        lines += [f"  changed     {name}: edited since it was saved, or damaged" for name in self.changed]
        return "\n".join(lines)

    @property
    def _coverage(self) -> str:
        if self.holds:
            return f"  holds       {self.holds}"
        if self.model_class:
            return f"  coverage    all that {self.model_class} needs, and nothing else"
        return "  coverage    not known: there is no config.json"
