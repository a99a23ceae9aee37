"""An independent path to the values a load must give: whole tensors, transformers' own conversions, one at a time.

Nothing here uses expressions, boxes or this package's readers, so that a fault in those cannot hide. What is shared
with the loader is which key goes where (transformers' renames), and the dtype of each tensor, which is the model's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from shardwise.models import transformers_compat as compat
from shardwise.models.rules import assign_keys


class WholeTensors:
    """The tensors of safetensors files by key, through the safetensors library."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._handles: dict[Path, Any] = {file: safe_open(file, framework="pt") for file in files}
        self.files = {key: file for file, handle in self._handles.items() for key in list(handle.keys())}

    def __getitem__(self, key: str) -> torch.Tensor:
        tensor: torch.Tensor = self._handles[self.files[key]].get_tensor(key)
        return tensor


def reference_values(
    model: nn.Module, files: Sequence[Path], transforms: Sequence[Any], dtypes: Mapping[str, torch.dtype]
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole value) of every tensor the checkpoint holds, in the dtype the model has it in.

    ``dtypes`` are the model's saved tensors by canonical name. Memory: the sources and outcome of one conversion.
    """
    stored = WholeTensors(files)
    assignment = assign_keys(list(stored.files), dtypes, transforms, compat.base_model_prefix(model))
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
