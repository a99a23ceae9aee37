"""What a save, a state written into files, or a merge did."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.report.names import differing_lines, in_bytes, listing


@dataclass(frozen=True, slots=True)
class SaveReport:
    """The facts of one save, as seen by one rank. Sizes in bytes, times in seconds.

    Attributes:
        directory: that was saved to.
        files: of weights, in order, as they are named now.
        tensors: in the files.
        parameters: elements of the model's parameters, tied ones once.
        checkpoint_bytes: of all tensors in the files.
        written_bytes: by this rank, headers not counted.
        dtypes: that were saved, with the number of tensors of each.
        cast: name of a tensor in the files to ("dtype in the model", "dtype saved").
        tied: names that are not saved, with the name under which their tensor is.
        differing_buffers: that have other values on some ranks than on the first, whose values were saved; by their
            names in the model.
        removed: files of the older save that are gone.
        is_verified: everything was read back and compared with memory.
        seconds: by phase, in order: plan, create, write, sync, verify, commit.
    """

    rank: int
    world_size: int
    directory: str
    files: tuple[str, ...]
    tensors: int
    parameters: int
    checkpoint_bytes: int
    written_bytes: int
    dtypes: Mapping[str, int]
    cast: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    tied: Mapping[str, str] = dataclasses.field(default_factory=dict)
    differing_buffers: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    is_verified: bool = False
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {label}" for label, count in self.dtypes.items())
        files = "1 file" if len(self.files) == 1 else f"{len(self.files)} files"
        size = in_bytes(self.checkpoint_bytes)
        phases = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in self.seconds.items())
        lines = [
            f"saved {self.tensors} tensors ({kinds}; {size}) in {files} to {self.directory}",
            f"  rank {self.rank} of {self.world_size} wrote {in_bytes(self.written_bytes)} in {phases}",
        ]
        if self.is_verified:
            lines.append("  read back and compared with memory: equal")
        for pair in dict.fromkeys(self.cast.values()):
            names = [name for name, cast in self.cast.items() if cast == pair]
            lines += listing(f"{pair[0]}→{pair[1]}", names)
        lines += [f"  tied        {name} = {first}" for name, first in self.tied.items()]
        lines += differing_lines(self.differing_buffers)
        lines += listing("removed", self.removed)
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class FilesReport:
    """The facts of one state that was written, as seen by one rank.

    Attributes:
        path: the file or the folder; of files of ranks, this rank's.
        tensors: those written, tied ones once.
        nbytes: of what is at ``path``.
        seconds: in all.
        differing_buffers: that have other values on some ranks than on the first, whose values were written.
    """

    path: str
    tensors: int
    nbytes: int
    seconds: float
    differing_buffers: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        size = in_bytes(self.nbytes)
        lines = [f"{self.path}: {self.tensors} tensors, {size}, {self.seconds:.2f} s"]
        return "\n".join(lines + differing_lines(self.differing_buffers))


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
