"""What has been merged."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from shardwise.report.names import listing
from shardwise.report.sizes import in_bytes


@dataclass(frozen=True, slots=True)
class MergeAdapterReport:
    """An adapter folded into its base. ``unchanged`` are modules of it whose tensors came out as they were."""

    base: str
    adapter: str
    out: str
    model_class: str
    dtype: str
    modules: int
    unchanged: tuple[str, ...]
    tensors: int
    nbytes: int
    files: tuple[str, ...]
    companions: tuple[str, ...]
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        merged = self.modules - len(self.unchanged)
        lines = [
            f"merged {merged} of {self.modules} modules of {self.adapter}",
            f"  into        {self.model_class} {self.dtype} of {self.base}",
            *_written(self.out, self.tensors, self.nbytes, self.files, self.companions, self.seconds),
        ]
        lines += listing("unchanged", self.unchanged)
        return "\n".join([*lines, *(f"  note        {note}" for note in self.notes)])


@dataclass(frozen=True, slots=True)
class MergeWeightsReport:
    """A checkpoint written as one. ``names`` says under which names its tensors are now."""

    checkpoint: str
    out: str
    layout: str
    names: str
    tensors: int
    nbytes: int
    files: tuple[str, ...]
    companions: tuple[str, ...]
    verified: int
    removed: str = ""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        lines = [
            f"merged {self.checkpoint} ({self.layout})",
            *_written(self.out, self.tensors, self.nbytes, self.files, self.companions, self.seconds),
            f"  names       {self.names}",
        ]
        if self.removed:
            lines.append(f"  verified    {self.verified} tensors, read back from {self.out}")
            lines.append(f"  removed     {self.removed}")
        return "\n".join([*lines, *(f"  note        {note}" for note in self.notes)])


def _written(
    out: str, tensors: int, nbytes: int, files: tuple[str, ...], companions: tuple[str, ...], seconds: float
) -> list[str]:
    several = f"{len(files)} files" if len(files) > 1 else files[0]
    lines = [f"  written     {tensors} tensors, {in_bytes(nbytes)} in {several} in {out}, in {seconds:.1f} s"]
    return lines + ([f"  besides     {', '.join(companions)}"] if companions else [])
