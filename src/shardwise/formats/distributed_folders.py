"""Checkpoints of ``torch.distributed.checkpoint``: folders with a ``.metadata``, here or one level down."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from shardwise.errors import FormatError
from shardwise.formats.contract import LISTED, CheckpointFormat, FileSelection, FormatFaults, IndexSoFar, listed
from shardwise.formats.distributed import METADATA, SUFFIX, read_distributed
from shardwise.formats.joining import add_ignored, add_tensors
from shardwise.storage.contract import FilePlaces, StorageReader
from shardwise.storage.names import shown

_LAYOUT: Final = "torch distributed checkpoint"
_MODEL_FOLDERS = ("pytorch_model_fsdp_*", "model", "distributed_checkpoint")
_OPTIMIZER_FOLDERS = "optim*"


class _DistributedFolders:
    usual = ()
    probed = (METADATA,)
    endings = ()
    looked_for = (METADATA,)

    def is_named(self, name: str) -> bool:
        return name.rpartition("/")[2] == METADATA

    def select(
        self,
        reader: StorageReader,  # noqa: ARG002 - as any format
        name: str,
        faults: FormatFaults,  # noqa: ARG002
    ) -> FileSelection:
        return FileSelection(_LAYOUT, [], folder=name.removesuffix(METADATA))

    def find(
        self,
        reader: StorageReader,
        names: Sequence[str],
        faults: FormatFaults,  # noqa: ARG002 - as any format
    ) -> FileSelection | None:
        if METADATA in names:
            return FileSelection(_LAYOUT, [])
        models = [
            folder
            for folder in distributed_folders(names)
            if any(fnmatchcase(folder, pattern) for pattern in _MODEL_FOLDERS)
        ]
        if len(models) == 1:
            return FileSelection(_LAYOUT, [], folder=f"{models[0]}/")
        chunks = [name for name in names if name.endswith(SUFFIX) and name.count("/") <= 1]
        if not chunks and not distributed_folders(names):
            return None
        if any("/" not in name for name in chunks):
            text = (
                f"{reader.root}: there are {sum('/' not in name for name in chunks)} {SUFFIX} files, but no "
                f"{METADATA}, which says what is in them and is written last, by rank 0"
            )
            remedy = f"copy {METADATA} here from the machine of rank 0, or take a save that was completed"
        else:
            text = f"{reader.root}: no weights found, but folders of torch.distributed.checkpoint"
            remedy = f"the folders with {SUFFIX} files lack their {METADATA}: take a save that was completed"
        raise FormatError(f"{text}\n{where_models_are(reader, names) or remedy}")

    def hints(self, names: Sequence[str]) -> list[str]:  # noqa: ARG002 - as any format
        return []

    def read(
        self, reader: StorageReader, selection: FileSelection, found: IndexSoFar, faults: FormatFaults
    ) -> None:
        contents = read_distributed(reader, selection.folder)
        if contents is None:
            raise no_model(reader, f"{selection.folder}{METADATA}")
        found.files.update(contents.files)
        add_ignored(contents.others, contents.choice, found)
        add_tensors(contents.tensors, contents.choice, found, faults)


FORMAT: Final[CheckpointFormat] = _DistributedFolders()


def no_model(reader: StorageReader, what: str) -> FormatError:
    """What was saved is an optimizer; where the model may be."""
    where = where_models_are(reader) or "pass the folder or the file of the model, which is saved apart"
    return FormatError(f"{what} in {reader.root}: holds the state of an optimizer, not a model; {where}")


def distributed_folders(names: Iterable[str]) -> list[str]:
    """Folders, one level down, that hold a distributed checkpoint."""
    found = (name.removesuffix(f"/{METADATA}") for name in names if name.endswith(f"/{METADATA}"))
    return sorted(folder for folder in found if "/" not in folder)


def where_models_are(reader: StorageReader, names: Iterable[str] = ()) -> str:
    """A sentence on the distributed checkpoints inside the folder and beside it; empty when there are none."""
    folders = [f"{reader.root}/{folder}" for folder in distributed_folders(names)] + _beside(reader)
    optimizers = [folder for folder in folders if fnmatchcase(Path(folder).name, _OPTIMIZER_FOLDERS)]
    models = [folder for folder in folders if folder not in optimizers]
    if models:
        also = f" ({listed(map(shown, optimizers))}: an optimizer's state)" if optimizers else ""
        return f"pass the folder of the model: {' or '.join(map(shown, models[:LISTED]))}{also}"
    if optimizers:
        return (
            f"{listed(map(shown, optimizers))}: an optimizer's state; the model's folder is not beside it. That "
            "path works for merge_weights (optimizer.bin), and for load_accelerate_optimizer"
        )
    return ""


def _beside(reader: StorageReader) -> list[str]:
    """Folders beside a local one that hold a distributed checkpoint."""
    if not isinstance(reader, FilePlaces):
        return []
    root = Path(reader.root).absolute()
    try:
        return sorted(
            str(place) for place in root.parent.iterdir() if place != root and (place / METADATA).is_file()
        )
    except OSError:
        return []
