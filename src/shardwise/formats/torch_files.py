"""Checkpoints, and states of trainings, in files that ``torch.save`` has written: one, or several with an index."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from shardwise.formats.checkpoint_index import CheckpointIndex
from shardwise.formats.contract import CheckpointFormat, FileSelection, FormatFaults, IndexSoFar, listed
from shardwise.formats.distributed import METADATA, DistributedMetadata, read_distributed, read_metadata
from shardwise.formats.distributed_folders import no_model
from shardwise.formats.joining import add_ignored, add_tensors, read_each, select_indexed
from shardwise.formats.nested_dicts import WrapperChoice, choose_model
from shardwise.formats.torch_file import TorchFileContents, read_torch_file
from shardwise.storage.contract import StorageReader
from shardwise.storage.names import shown


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


_WEIGHTS: Final = (".bin", ".pt", ".pth")
_INDEX: Final = ".bin.index.json"
_INDEXES = re.compile(r".*\.bin\.index(\.[^./]+)?\.json")
"""Index files by name, those of a variant too."""
_OF_ONE_RANK = re.compile(r"pytorch_model_fsdp.*_rank\d+\.bin")


class _TorchFiles:
    usual = ("pytorch_model.bin", "pytorch_model.bin.index.json")
    probed = ()
    endings = (*_WEIGHTS, _INDEX)
    looked_for = ()

    def is_named(self, name: str) -> bool:
        return name.endswith(_WEIGHTS) or _INDEXES.fullmatch(name) is not None

    def select(self, reader: StorageReader, name: str, faults: FormatFaults) -> FileSelection:
        if _INDEXES.fullmatch(name):
            return select_indexed(reader, name, _WEIGHTS[0], "indexed torch files", faults)
        return FileSelection("torch file", [name])

    def find(
        self,
        reader: StorageReader,  # noqa: ARG002 - as any format
        names: Sequence[str],  # noqa: ARG002
        faults: FormatFaults,  # noqa: ARG002
    ) -> FileSelection | None:
        return None  # what has no usual name may be an optimizer's, or anything

    def hints(self, names: Sequence[str]) -> list[str]:
        found: list[str] = []
        of_ranks = [name for name in names if _OF_ONE_RANK.fullmatch(name)]
        if of_ranks:
            found.append(
                f"{listed(map(shown, of_ranks))}: what each rank held, without a word of what belongs where. "
                "load_accelerate_model loads them on as many ranks, and so does accelerate; for any other number, "
                "load them so and save in another form (use_dcp=True)."
            )
        files = [name for name in names if name.endswith(_WEIGHTS) and name not in of_ranks]
        if files:
            found.append(
                f"{listed(map(shown, files))}: if one of them holds the model, pass its path, or its name as "
                "weights_name."
            )
        return found

    def read(
        self, reader: StorageReader, selection: FileSelection, found: IndexSoFar, faults: FormatFaults
    ) -> None:
        files = selection.files
        contents: list[TorchFileContents] = read_each(reader, files, read_torch_file, faults)
        choice = choose_model([tensor.path for item in contents for tensor in item.tensors])
        if choice is None:
            raise no_model(reader, " and ".join(map(shown, files)))
        for item in contents:
            found.files[item.file] = item.file_nbytes
            add_ignored(item.others, choice, found)
            found.held[item.file] = add_tensors(item.tensors, choice, found, faults)


FORMAT: Final[CheckpointFormat] = _TorchFiles()
