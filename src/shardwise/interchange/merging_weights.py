"""A checkpoint in parts, written as the hub has it, read back, and removed where that is asked for."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, assert_never

from shardwise.engines import offline
from shardwise.engines.companions import companions_of, config_content, templates_of, write_templates
from shardwise.engines.verifying import verify_files
from shardwise.errors import ConfigError, FormatError, StorageError
from shardwise.execution.ranks.progress import ProgressBar
from shardwise.execution.ranks.world import World
from shardwise.execution.reading.outgoing import Outgoing
from shardwise.execution.reading.renamed_folder import home_of, lists_in
from shardwise.execution.writing.sink import WrittenTensors
from shardwise.execution.writing.torch_out import fingerprints_in, stream_torch_file
from shardwise.formats.checkpoint_index import CheckpointIndex
from shardwise.formats.distributed import METADATA
from shardwise.formats.opening import open_checkpoint
from shardwise.formats.torch_files import holds_optimizer, open_state
from shardwise.interchange.named_outputs import OPTIMIZER_FILE, NamedOutputs, named_outputs, optimizer_outputs
from shardwise.models.torch_words import to_torch
from shardwise.planning.saves.commit import look_at_folder
from shardwise.planning.saves.save_plan import INDEX_FILE
from shardwise.report.names import in_bytes
from shardwise.report.save_report import MergeWeightsReport
from shardwise.storage.contract import StorageReader
from shardwise.storage.names import shown
from shardwise.storage.reading.opening import open_storage
from shardwise.storage.writing.local_writer import LocalWriter
from shardwise.tensors import numel


@dataclass(frozen=True, slots=True)
class KeepSource:
    """The checkpoint stays as it is."""


@dataclass(frozen=True, slots=True)
class RemoveSource:
    """The checkpoint's files are removed once the outcome has been read back and found whole."""


Afterwards: TypeAlias = KeepSource | RemoveSource


@dataclass(frozen=True, slots=True)
class Safetensors:
    """Files of safetensors, with an index where there are several."""


@dataclass(frozen=True, slots=True)
class TorchFile:
    """One file of ``torch.save``."""


Format: TypeAlias = Safetensors | TorchFile


@dataclass(frozen=True, slots=True)
class MergeCall:
    """What :func:`~shardwise.verbs.merge_weights.merge_weights` is asked for."""

    checkpoint: Path
    out: Path
    base: str | os.PathLike[str] | None
    dtype: str | None
    max_shard_bytes: int
    file_format: Format
    afterwards: Afterwards


@dataclass(frozen=True, slots=True)
class PartedCheckpoint:
    """A checkpoint in parts that has been opened: a model, or the state of an optimizer."""

    folder: Path
    reader: StorageReader
    index: CheckpointIndex
    is_optimizer: bool


def carry_out_merge(call: MergeCall) -> MergeWeightsReport:
    """Open, name, write, and do what is asked for afterwards. Collective: no.

    Memory, errors: as of :func:`~shardwise.verbs.merge_weights.merge_weights`.
    """
    start = time.perf_counter()
    with ExitStack() as stack:
        parts = _open(call.checkpoint, stack)
        folder, reader, index = parts.folder, parts.reader, parts.index
        offline.require_other_folder(call.out, [folder, *_folders_of(folder, index)])
        _require_removable(call.afterwards, index)
        placer = stack.enter_context(offline.placer_of(reader, index))
        if parts.is_optimizer:
            named = optimizer_outputs(reader, index, placer, base=call.base, dtype=call.dtype)
        else:
            named = named_outputs(folder, index, placer, base=call.base, dtype=call.dtype)
        file_format = TorchFile() if parts.is_optimizer else call.file_format
        companions = _companions(named, folder, call.dtype)
        streamed, files = _write(named, companions, file_format, call)
        if named.folder is not None:
            write_templates(call.out, templates_of([folder, named.folder]))
    removed = ""
    if isinstance(call.afterwards, RemoveSource):
        _read_back(call.out, streamed, named, file_format)
        removed = _remove(folder, index)
    return MergeWeightsReport(
        checkpoint=str(call.checkpoint),
        out=str(call.out),
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


def _open(checkpoint: Path, stack: ExitStack) -> PartedCheckpoint:
    if not checkpoint.exists():
        raise StorageError(f"{checkpoint}: no such file or folder; check the path")
    if lists_in(home := home_of(checkpoint)):
        raise StorageError(
            f"{home}: its last save was killed when it counted, and before its files had their names; load it with "
            "load_state, load_accelerate_model or load_accelerate_optimizer, and save it again"
        )
    opened = open_storage(checkpoint)
    reader = stack.enter_context(opened.reader)
    is_optimizer = opened.file is None and holds_optimizer(reader)
    index = open_state(reader) if is_optimizer else open_checkpoint(reader, weights_name=opened.file)
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    return PartedCheckpoint(folder, reader, index, is_optimizer)


def _companions(named: NamedOutputs, folder: Path, dtype: str | None) -> dict[str, bytes]:
    """The small files beside the outcome; none where the model is not known."""
    if named.folder is None:
        return {}
    told = _written_dtype(named.outgoing, dtype)
    config = config_content(named.folder, dtype=told, untied=False)
    return {**companions_of(named.folder, folder), "config.json": config}


def _write(
    named: NamedOutputs, companions: Mapping[str, bytes], file_format: Format, call: MergeCall
) -> tuple[WrittenTensors, tuple[str, ...]]:
    """Write the files, and let them count; also their names."""
    with offline.writer_to(call.out) as writer:
        match file_format:
            case Safetensors():
                return offline.write_out(
                    writer,
                    named.outgoing,
                    named.parameters,
                    max_shard_bytes=call.max_shard_bytes,
                    companions=companions,
                    check=lambda _: None,
                    label="Merging",
                )
            case TorchFile():
                return _write_torch_file(writer, named, call.max_shard_bytes, companions), (named.torch_file,)
            case _:
                assert_never(file_format)


def _written_dtype(outgoing: Outgoing, dtype: str | None) -> str | None:
    """What the config is to say: the dtype asked for, else that of most bytes."""
    if dtype is not None:
        return dtype.removeprefix("torch.")
    counts: Counter[str] = Counter()
    for _, stored, shape in outgoing.tensors():
        if stored.kind == "float" and stored.bits >= 16:
            counts[str(to_torch(stored)).removeprefix("torch.")] += numel(shape) * stored.itemsize
    return counts.most_common(1)[0][0] if counts else None


def _write_torch_file(
    writer: LocalWriter, named: NamedOutputs, max_shard_bytes: int, companions: Mapping[str, bytes]
) -> WrittenTensors:
    places = named.places()
    nbytes = sum(numel(shape) * dtype.itemsize for _, dtype, shape in places.values())
    if nbytes > max_shard_bytes:
        raise ConfigError(
            f"{named.torch_file} would have {in_bytes(nbytes)}, and max_shard_size is {in_bytes(max_shard_bytes)}; "
            "a file of torch.save is written in one piece: raise max_shard_size, or write safetensors files"
        )
    if named.torch_file != OPTIMIZER_FILE and (
        others := look_at_folder(writer.list(), writer.read(INDEX_FILE)).weights
    ):
        raise ConfigError(
            f"{writer.root} has {sorted(others)[0]}, which is read before any {named.torch_file}; name "
            "another folder"
        )
    named.outgoing.require_bounded()
    with ProgressBar("Merging", World(0, 1), nbytes, enabled=True) as bar:
        return stream_torch_file(
            writer,
            named.torch_file,
            places,
            named.objects,
            named.outgoing.values,
            companions=companions,
            advance=bar.advance,
        )


def _folders_of(folder: Path, index: CheckpointIndex) -> list[Path]:
    """The folders in which the checkpoint's files lie."""
    return sorted({(folder / file).parent for file in index.files})


def _require_removable(afterwards: Afterwards, index: CheckpointIndex) -> None:
    if isinstance(afterwards, RemoveSource) and index.ignored:
        raise ConfigError(
            f"the checkpoint in {index.root} also holds {', '.join(map(shown, index.ignored[:5]))}, which would be "
            "lost with it; merge it without removing it"
        )


def _remove(folder: Path, index: CheckpointIndex) -> str:
    """Remove the checkpoint's own files, and its folders where nothing else is in them."""
    folders = _folders_of(folder, index)
    files = [folder / file for file in index.files]
    files += [place / METADATA for place in folders if (place / METADATA).is_file()]
    try:
        # What says how the others belong together goes first: the rest is then taken for what it is, a remainder.
        for file in sorted(files, key=lambda file: file.name != METADATA):
            file.unlink()
        for place in folders:
            if not any(place.iterdir()):
                place.rmdir()
    except OSError as error:
        raise StorageError(
            f"{folder}: the outcome is whole, but removing the checkpoint failed, {error.strerror}; remove it "
            "yourself"
        ) from error
    return f"{len(files)} files of {', '.join(map(str, folders))}"


def _read_back(out: Path, streamed: WrittenTensors, named: NamedOutputs, file_format: Format) -> None:
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
        report = verify_files(out)
        damaged, compared = [*report.damaged, *report.damaged_files], report.compared
    if damaged or compared != len(streamed.fingerprints):
        raise StorageError(
            f"{out}: {', '.join(map(shown, damaged[:5])) or 'tensors'} are not read back as they were written, "
            "so the checkpoint they come from was not removed; check the disk"
        )
