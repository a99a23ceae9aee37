"""The plan of a save: each tensor's location in the files, equal on every rank, and this rank's write requests."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from huggingface_hub import split_state_dict_into_shards_factory

from shardwise.core.computed import Copy, copies_from_shards
from shardwise.core.expression import Expression, Stored
from shardwise.core.tensors import Box, DType, Strided, numel
from shardwise.files.checkpoint_index import TensorEntry
from shardwise.files.peft_adapter import TRAINING_KEY, training_file
from shardwise.files.safetensors_files import NewFile, lay_out
from shardwise.files.storage import ReadPolicy, WritePolicy
from shardwise.transfer.file_requests import FileRequest, Segment, iter_segments, plan_requests
from shardwise.transfer.move_plan import Move, full_on_ranks

MODEL = "model"
ADAPTER = "adapter_model"
"""Stems: what the names of a save's files begin with."""

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

TensorToSave: TypeAlias = tuple[str, DType, tuple[int, ...]]
"""Key, dtype and shape of a tensor that is saved."""


@dataclass(frozen=True, slots=True)
class SavedTraining:
    """The state of an adapter's training: its tensors, and all other values as JSON text."""

    tensors: Sequence[TensorToSave]
    text: str


@dataclass(frozen=True)
class SavePlan:
    """The files to write, the final name of each, and the index if there is one.

    ``save_id`` distinguishes this save from any other.
    """

    save_id: str
    files: tuple[NewFile, ...]
    names: tuple[str, ...]
    index: bytes | None
    stem: str = MODEL

    @property
    def single_file(self) -> str:
        """The name of the file of weights if there is only one."""
        return f"{self.stem}.safetensors"

    @property
    def index_file(self) -> str:
        """The name of the index of several files."""
        return f"{self.single_file}.index.json"

    @property
    def entries(self) -> dict[str, TensorEntry]:
        """The location of each tensor in the files, by key."""
        return {entry.key: entry for file in self.files for entry in file.entries}

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors, without headers."""
        return sum(entry.nbytes for file in self.files for entry in file.entries)


def plan_save(
    tensors: Sequence[TensorToSave],
    *,
    max_shard_bytes: int,
    parameters: int,
    save_id: str,
    stem: str = MODEL,
    training: SavedTraining | None = None,
) -> SavePlan:
    """Assign tensors to files in order, as huggingface_hub does, and lay the files out.

    Args:
        tensors: the tensors in the order in which transformers saves them.
        max_shard_bytes: the maximum of one file's tensors. A larger tensor has a file of its own.
        parameters: number of parameters of the model, for the index.
        save_id: the part of the file names that distinguishes them from those of any other save.
        stem: prefix of the file names.
        training: training state of an adapter, which is saved to a separate file, or None.

    Raises:
        FormatError: a tensor cannot be stored in a safetensors file.
    """
    by_key = {item[0]: item for item in tensors}
    split = split_state_dict_into_shards_factory(
        by_key, get_storage_size=_nbytes, filename_pattern="{suffix}", max_shard_size=max_shard_bytes
    )
    groups = [[by_key[key] for key in keys] for keys in split.filename_to_tensors.values()] or [[]]
    metadata = {"format": "pt"}
    # One file: committed by its rename. Several files: committed by the index.
    if len(groups) == 1:
        files: tuple[NewFile, ...] = ()
        if training is not None:
            files = (lay_out(training_file(save_id), training.tensors, {**metadata, TRAINING_KEY: training.text}),)
            metadata[TRAINING_KEY] = files[0].name
        # The weights are written under a temporary name, and renamed by the commit. The training file has its final
        # name from the start, because only the weights that refer to it make it valid.
        files = (lay_out(f"{stem}.{save_id}.incomplete", groups[0], metadata), *files)
        return SavePlan(save_id, files, (f"{stem}.safetensors", *(file.name for file in files[1:])), None, stem)
    # Several files have names of this save only. The index that lists them makes them valid.
    count = len(groups)
    names = [f"{stem}-{save_id}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    files = tuple(lay_out(name, group, metadata) for name, group in zip(names, groups, strict=True))
    total = sum(_nbytes(item) for item in tensors)
    weight_map = {entry.key: file.name for file in files for entry in file.entries}
    content = {"metadata": {"total_parameters": parameters, "total_size": total}, "weight_map": weight_map}
    index = json.dumps(content, indent=2, sort_keys=True).encode() + b"\n"
    return SavePlan(save_id, files, tuple(names), index, stem)


def _nbytes(tensor: TensorToSave) -> int:
    _, dtype, shape = tensor
    return numel(shape) * dtype.itemsize


WrittenBoxes: TypeAlias = Mapping[str, Sequence[tuple[Box, Strided]]]
"""Boxes of each tensor of the model that this rank writes, with their location in its memory, by name."""


def arrange_writes(
    saved: Iterable[tuple[TensorEntry, Expression]],
    local_boxes: WrittenBoxes,
    indices: Mapping[str, int],
    staged: Collection[str],
    policy: WritePolicy,
    staging_bytes: int,
) -> list[FileRequest]:
    """Return this rank's write requests: contiguous runs in the order of the files and of the bytes in them.

    In a segment, ``copy.source`` is the location in the saved tensor, and ``copy.target`` that in the rank's
    memory.

    Args:
        saved: the location of each tensor in the files, and its expression.
        local_boxes: the boxes that this rank writes.
        indices: indices into this rank's tensors, by name. They become the ``target`` of a segment.
        staged: names of tensors that need staging, because they are cast or on an accelerator.
        policy: write policy of the storage.
        staging_bytes: staging memory of one worker.
    """
    # Requests are planned as for reads, but without gaps: a gap would overwrite bytes of other ranks.
    read_policy = ReadPolicy(
        max_gap_bytes=0, request_bytes=policy.request_bytes, concurrency=policy.concurrency, is_remote=False
    )
    segments: list[tuple[str, Segment]] = []
    for entry, expression in saved:
        leaf = Stored(entry.key, entry.shape, entry.dtype)
        # From shards to the saved tensor. A segment goes from a file to memory, so source and target change places.
        for piece in copies_from_shards(expression, local_boxes):
            name = piece.leaf.key
            tensor_segments = iter_segments(
                Copy(leaf, source=piece.target, target=piece.source),
                indices[name],
                entry,
                needs_staging=name in staged,
                policy=read_policy,
                block_bytes=staging_bytes,
            )
            segments += ((entry.file, segment) for segment in tensor_segments)
    return plan_requests(segments, read_policy, staging_bytes=staging_bytes)


def assign_owners(files: Sequence[NewFile], size: int) -> tuple[int, ...]:
    """Return the rank that writes each file.

    The largest files are assigned first, each to the rank with the fewest bytes so far. If there are fewer files
    than ranks, the owners are spread over all ranks, and so over machines.
    """
    # 3 files on 8 ranks: the owners are ranks 0, 2 and 5, which are on different machines of 4 ranks.
    count = min(len(files), size)
    load = {number * size // count: 0 for number in range(count)}
    owners = [0] * len(files)
    for number in sorted(range(len(files)), key=lambda item: -files[item].nbytes):
        owner = min(load, key=lambda rank: (load[rank], rank))
        owners[number] = owner
        load[owner] += files[number].nbytes
    return tuple(owners)


def plan_moves_to_owners(
    files: Sequence[NewFile], owners: Sequence[int], expressions: Mapping[str, Expression], size: int
) -> list[list[Move]]:
    """Return for every rank the tensors of its files, in file order."""
    moves: list[list[Move]] = [[] for _ in range(size)]
    for file, owner in zip(files, owners, strict=True):
        for entry in file.entries:
            ranks = full_on_ranks((owner,), entry.shape, size)
            moves[owner].append(Move(entry.key, expressions[entry.key], entry.dtype.itemsize, ranks))
    return moves
