"""``verify``: a checkpoint on disk, opened again."""

from __future__ import annotations

import os

from shardwise.engines.reopening import reopened
from shardwise.report.reopen_report import ReopenReport


def verify(directory: str | os.PathLike[str]) -> ReopenReport:
    """Open a checkpoint again, and compare it with what was recorded when it was saved.

    The headers and the index must agree, every tensor that the model of ``config.json`` needs must be there, and
    the fingerprints of the tensors' bytes must be those in ``model.fingerprints.json``, which ``save`` writes (of
    an adapter ``adapter_model.fingerprints.json``). Without a config the second is passed over; without recorded
    fingerprints the third. Small files beside the weights that are not what was saved are told as changed.

    Collective: no. Memory: a few blocks of 8 MiB.

    Raises:
        FormatError: the files contradict their format or each other.
        CoverageError: the model needs other tensors.
        StorageError: bytes could not be read.
    """
    return reopened(directory)
