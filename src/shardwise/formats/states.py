"""States of trainings in files of torch: all tensors, an optimizer's too, under whole paths."""

from __future__ import annotations

from shardwise.formats.adding import add_tensors
from shardwise.formats.checkpoint_index import CheckpointIndex
from shardwise.formats.contract import IndexSoFar
from shardwise.formats.distributed import METADATA, DistributedMetadata, read_distributed, read_metadata
from shardwise.formats.faults import FormatFaults
from shardwise.formats.torch_file import read_torch_file
from shardwise.formats.wrappers import WrapperChoice, choose_model
from shardwise.storage.contract import StorageReader


def open_state(
    reader: StorageReader, file: str | None = None, metadata: DistributedMetadata | None = None
) -> CheckpointIndex:
    """All tensors of a folder of ``torch.distributed.checkpoint``, an optimizer's too, under whole paths.

    Or those of one ``file`` of ``torch.save``. The folder's ``metadata`` are read where they are not given.
    Raises as :func:`open_checkpoint`.
    """
    faults, found = FormatFaults(reader.root), IndexSoFar()
    if file is not None:
        saved = read_torch_file(reader, file)
        found.files[saved.file] = saved.file_nbytes
        add_tensors(saved.tensors, WrapperChoice((), ()), found, faults)
        faults.raise_if_any()
        return CheckpointIndex(reader.root, found.files, found.entries, {}, "torch file", found.composed)
    metadata = read_metadata(reader) if metadata is None else metadata
    contents = read_distributed(reader, choose=lambda _: WrapperChoice((), ()), metadata=metadata)
    assert contents is not None
    found.files.update(contents.files)
    for place in metadata.objects.values():
        found.files.setdefault(place.file, reader.size(place.file))
    add_tensors(contents.tensors, contents.choice, found, faults)
    faults.raise_if_any()
    layout = "torch distributed checkpoint"
    return CheckpointIndex(reader.root, found.files, found.entries, {}, layout, found.composed)


def holds_optimizer(reader: StorageReader) -> bool:
    """Whether a folder of ``torch.distributed.checkpoint`` has an optimizer's state and no model."""
    if METADATA not in reader.list():
        return False
    tensors = read_metadata(reader).tensors
    return bool(tensors) and choose_model(tensors) is None
