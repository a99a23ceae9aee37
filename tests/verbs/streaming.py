"""What ranks do in the tests of going through a model's tensors."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tests import ways, zoo
from torch import nn
from transformers.core_model_loading import revert_weight_conversion

import shardwise
from shardwise.models.view import raw_bytes
from shardwise.planning.sources import FirstRank
from shardwise.verbs.save import InternalNames
from shardwise.verbs.stream import StreamOptions, iter_hf_tensors


def sharded(specimen: zoo.Specimen, mesh: str) -> nn.Module:
    """A model with values on every rank, sharded where there are several."""
    model = zoo.build(specimen)
    if dist.is_initialized():
        ways.MESHES[mesh](model)
    return model


def compare(name: str, folder: str, mesh: str, bucket_bytes: int, to: str) -> list[str] | None:
    """What is not as in the files that transformers has saved; None where the mesh does not apply."""
    specimen = next(item for item in zoo.causal_lm_specimens() if item.name == name)
    saved = {key: value for file in Path(folder).glob("*.safetensors") for key, value in load_file(file).items()}
    whole = zoo.build(specimen)
    order = [key for key in revert_weight_conversion(whole, whole.state_dict()) if key in saved]
    try:
        model = sharded(specimen, mesh)
    except ways.NotApplicable:
        return None
    options = StreamOptions(bucket_bytes=bucket_bytes)
    target = FirstRank() if to == "first" else shardwise.EveryRank()
    keys: list[str] = []
    faults: list[str] = []
    is_target = to == "every" or not dist.is_initialized() or dist.get_rank() == 0
    for key, tensor in iter_hf_tensors(model, to=target, options=options):
        keys.append(key)
        wanted = saved[key]
        if (tensor.shape, tensor.dtype) != (wanted.shape, wanted.dtype):
            faults.append(f"{key} is {tensor.dtype} {tuple(tensor.shape)}")
        elif not is_target:
            faults += [] if tensor.is_meta else [f"{key} has values"]
        elif not torch.equal(raw_bytes(tensor), raw_bytes(wanted)):
            faults.append(f"{key} has other values")
    if keys != order:
        faults.append(f"{len(keys)} keys are not in order, or not those of {len(order)}")
    return faults
