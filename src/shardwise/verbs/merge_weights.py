"""``merge_weights``: a checkpoint in parts, of training or of another format, written as the hub has it."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import assert_never

from shardwise.engines import offline
from shardwise.engines.merging_weights import (
    Afterwards,
    Format,
    KeepSource,
    NamedOutputs,
    RemoveSource,
    Safetensors,
    TorchFile,
    _as_optimizer,
    folders_of,
    named_outputs,
    remove_source,
    require_as_stored,
    require_removable,
    write_torch_file,
    written_dtype,
)
from shardwise.engines.save_options import in_bytes_of
from shardwise.errors import FormatError, StorageError
from shardwise.execution.writing.sink import WrittenTensors
from shardwise.execution.writing.torch_out import fingerprints_in
from shardwise.formats.checkpoint_index import holds_optimizer, open_checkpoint, open_state
from shardwise.report.merge_report import MergeWeightsReport
from shardwise.storage.names import shown
from shardwise.storage.reading.opening import open_storage
from shardwise.verbs.reopen import verify

MAX_SHARD_SIZE = "50GB"


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
    start = time.perf_counter()
    given, target = Path(checkpoint).expanduser(), Path(out)
    if not given.exists():
        raise StorageError(f"{given}: no such file or folder; check the path")
    folder = given if given.is_dir() else given.parent
    max_shard_bytes = in_bytes_of(max_shard_size)
    with ExitStack() as stack:
        opened = open_storage(given)
        reader = stack.enter_context(opened.reader)
        is_optimizer = opened.file is None and holds_optimizer(reader)
        index = open_state(reader) if is_optimizer else open_checkpoint(reader, weights_name=opened.file)
        offline.require_other_folder(target, [folder, *folders_of(folder, index)])
        require_removable(afterwards, index)
        placer = stack.enter_context(offline.placer_of(reader, index))
        if is_optimizer:
            require_as_stored(base=base, dtype=dtype)
            named = _as_optimizer(reader, index, placer)
            file_format = TorchFile()
        else:
            named = named_outputs(folder, index, placer, base=base, dtype=dtype)
        companions: dict[str, bytes] = {}
        if named.folder is not None:
            companions = offline.companions_of(named.folder, folder)
            told = written_dtype(named.outgoing, dtype)
            companions["config.json"] = offline.config_content(named.folder, dtype=told, untied=False)
        writer = stack.enter_context(offline.writer_to(target))
        match file_format:
            case Safetensors():
                streamed, files = offline.write_out(
                    writer,
                    named.outgoing,
                    named.parameters,
                    max_shard_bytes=max_shard_bytes,
                    companions=companions,
                    check=lambda _: None,
                    label="Merging",
                )
            case TorchFile():
                streamed = write_torch_file(writer, named, max_shard_bytes, companions)
                files = (named.torch_file,)
            case _:
                assert_never(file_format)
        if named.folder is not None:
            offline.write_templates(target, offline.templates_of([folder, named.folder]))
    removed = ""
    if isinstance(afterwards, RemoveSource):
        _verify(target, streamed, named, file_format)
        removed = remove_source(folder, index)
    return MergeWeightsReport(
        checkpoint=str(given),
        out=str(target),
        layout=index.layout,
        names=named.names,
        tensors=len(streamed.fingerprints),
        nbytes=streamed.nbytes,
        files=files,
        companions=tuple(sorted(companions)),
        verified=len(streamed.fingerprints) if removed else 0,
        removed=removed,
        notes=named.notes,
        seconds=time.perf_counter() - start,
    )


# Names


# Afterwards


def _verify(out: Path, streamed: WrittenTensors, named: NamedOutputs, file_format: Format) -> None:
    """Read everything that was written, as a stranger would.

    Raises:
        StorageError: naming what is not as it was written.
    """
    if isinstance(file_format, TorchFile):
        try:
            found = fingerprints_in(out, named.torch_file, named.places())
        except FormatError:
            found = {}  # not even its directory is
        damaged = [key for key, value in streamed.fingerprints.items() if found.get(key) != value]
        compared = len(found)
    else:
        report = verify(out)
        damaged, compared = list(report.damaged), report.compared
    if damaged or compared != len(streamed.fingerprints):
        raise StorageError(
            f"{out}: {', '.join(map(shown, damaged[:5])) or 'tensors'} are not read back as they were written, "
            "so the checkpoint they come from was not removed; check the disk"
        )
