"""An independent path to the values a load must give: whole tensors, transformers' own conversions, one at a time.

Nothing here uses expressions, boxes or this package's readers, so that a fault in those cannot hide. What is shared
with the loader is which key goes where (transformers' renames), and the dtype of each tensor, which is the model's.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from transformers import PreTrainedModel

from shardwise.models import transformers_compat as compat
from shardwise.models.conversions.key_conversions import assign_keys


class WholeTensors:
    """The tensors of a checkpoint's files by key, through the libraries that wrote them: safetensors and torch.

    ``wrapper`` is where in a nest of dicts the model is.
    """

    def __init__(self, files: Sequence[Path], wrapper: str = "") -> None:
        self._readers: dict[str, Callable[[], torch.Tensor]] = {}
        self._readers.update(_of_safetensors([file for file in files if file.suffix == ".safetensors"]))
        for file in files:
            if file.suffix not in (".safetensors", ".distcp"):
                self._readers.update(_of_torch_file(file, wrapper))
        for folder in dict.fromkeys(file.parent for file in files if file.suffix == ".distcp"):
            self._readers.update(_of_folder(folder, wrapper))
        self.keys = list(self._readers)

    def __getitem__(self, key: str) -> torch.Tensor:
        return self._readers[key]()


def _of_safetensors(files: Sequence[Path]) -> dict[str, Callable[[], torch.Tensor]]:
    found: dict[str, Callable[[], torch.Tensor]] = {}
    parts: dict[str, list[tuple[list[int], Any]]] = {}
    for file in files:
        handle: Any = safe_open(file, framework="pt")
        sharding = json.loads((handle.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
        for key in list(handle.keys()):
            if key in sharding:
                parts.setdefault(key, []).append((sharding[key]["saved_offsets"], handle))
            else:
                found[key] = partial(handle.get_tensor, key)
    return found | {key: partial(_joined, key, handles) for key, handles in parts.items()}


def _joined(key: str, handles: Sequence[tuple[list[int], Any]]) -> torch.Tensor:
    parts = [(offsets, handle.get_tensor(key)) for offsets, handle in handles]
    ends = [[start + size for start, size in zip(offsets, part.shape, strict=True)] for offsets, part in parts]
    whole: torch.Tensor = parts[0][1].new_empty([max(column) for column in zip(*ends, strict=True)])
    for offsets, part in parts:
        whole[tuple(slice(start, start + size) for start, size in zip(offsets, part.shape, strict=True))] = part
    return whole


def _of_torch_file(file: Path, wrapper: str) -> dict[str, Callable[[], torch.Tensor]]:
    content = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    for name in filter(None, wrapper.split(".")):
        content = content[name]
    return {key: partial(lambda value: value, item) for key, item in content.items() if torch.is_tensor(item)}


def _of_folder(folder: Path, wrapper: str) -> dict[str, Callable[[], torch.Tensor]]:
    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata

    def read(name: str, item: TensorStorageMetadata) -> torch.Tensor:
        made = {name: torch.empty(item.size, dtype=item.properties.dtype)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that every rank loads by itself
            load_distributed(made, storage_reader=FileSystemReader(folder), no_dist=True)
        return made[name]

    prefix = f"{wrapper}." if wrapper else ""
    return {
        name.removeprefix(prefix): partial(read, name, item)
        for name, item in metadata.items()
        if isinstance(item, TensorStorageMetadata) and name.startswith(prefix)
    }


def reference_values(
    model: nn.Module,
    files: Sequence[Path],
    transforms: Sequence[Any],
    dtypes: Mapping[str, torch.dtype],
    wrapper: str = "",
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole value) of every tensor the checkpoint holds, in the dtype the model has it in.

    ``dtypes`` are the model's saved tensors by canonical name, ``wrapper`` is that of :class:`WholeTensors`.
    Memory: the sources and outcome of one conversion.
    """
    stored = WholeTensors(files, wrapper)
    assignment = assign_keys(model, stored.keys, dtypes, transforms)
    for name, keys in assignment.plain.items():
        yield name, stored[keys[0]].to(dtypes[name])
    for conversion in assignment.conversions.values():
        dtype = dtypes[conversion.target]
        sources = {pattern: [stored[key].to(dtype) for key in keys] for pattern, keys in conversion.sources.items()}
        for name, value in compat.convert(conversion.converter, conversion.target, sources, model).items():
            if name in dtypes:
                yield name, value.to(dtypes[name])


def reference_buffers(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The non-persistent buffers as the constructor of the model's class computes them, on the CPU."""
    return dict(compat.built_without_weights(model).named_non_persistent_buffers())
