"""What writing a state into files did, on one rank."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from shardwise.report.names import differing_lines
from shardwise.report.sizes import in_bytes


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
