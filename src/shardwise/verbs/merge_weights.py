"""``merge_weights``: a checkpoint in parts, of training or of another format, written as the hub has it."""

from __future__ import annotations

import os
from pathlib import Path

from shardwise.engines.save_options import MAX_SHARD_SIZE
from shardwise.interchange.merging_weights import (
    Afterwards,
    Format,
    KeepSource,
    MergeCall,
    Safetensors,
    carry_out_merge,
)
from shardwise.report.save_report import MergeWeightsReport
from shardwise.tensors.byte_sizes import in_bytes_of


def merge_weights(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    dtype: str | None = None,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    file_format: Format = Safetensors(),  # noqa: B008
    afterwards: Afterwards = KeepSource(),  # noqa: B008
) -> MergeWeightsReport:
    """Write a checkpoint as safetensors files under the names of the hub.

    Whatever :func:`~shardwise.formats.open_checkpoint` reads: a folder of ``torch.distributed.checkpoint``, or one
    that has one for a model (accelerate's, a trainer's), files of ``torch.save``, safetensors. A folder with an
    optimizer's state becomes one file of ``torch.save``, ``optimizer.bin``.

    Args:
        checkpoint: a folder or a file.
        out: a folder, made where it is not there. A model in it is replaced once all is written.
        base: a folder, or hub id in the cache, with the model's config; by default the nearest ``config.json`` in
            the checkpoint's folder and the two above it. Its names are those of the outcome, if it has weights.
        dtype: of the outcome; by default each tensor keeps its own.
        max_shard_size: as in ``"5GB"``: of one file's tensors.
        file_format: ``TorchFile()`` writes ``pytorch_model.bin``.
        afterwards: whether the checkpoint is removed.

    Collective: no.
    Memory: about half a GiB beyond what importing torch and transformers takes, however large the model is.

    Raises:
        ConfigError: an argument or the config cannot be honoured.
        CoverageError: the checkpoint and the model of the config do not cover each other.
        FormatError, StorageError: a file contradicts its format, or cannot be read or written; or the outcome,
            read back, is not what was written.
    """
    given, max_shard_bytes = Path(checkpoint).expanduser(), in_bytes_of(max_shard_size)
    return carry_out_merge(MergeCall(given, Path(out), base, dtype, max_shard_bytes, file_format, afterwards))
