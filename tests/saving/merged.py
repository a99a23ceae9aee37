"""A sharded model with its adapter merged in, by transformers and PEFT in one process."""

import itertools
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from tests.saving.adapters import tensors_of
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from shardwise.models.four_bit.layers import get_packings, get_scales, scales_name


def merge_in_one_process(model: Any, folder: str, config: LoraConfig | None) -> dict[str, torch.Tensor]:
    """The tensors that transformers saves of a model from a folder, with a LoRA of a config. On all ranks."""
    whole = {}
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        value = tensor.detach()
        whole[name] = value.full_tensor() if isinstance(value, DTensor) else value.clone()
    for owner, module in model.named_modules():
        for local, packing in get_packings(module).items():
            scales = get_scales(module, local, whole.pop(f"{owner}.{scales_name(local)}"), 0)
            whole[f"{owner}.{local}"] = packing.dequantize(whole[f"{owner}.{local}"], scales, packing.dtype)
    stock: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if config is not None:
        stock = get_peft_model(stock, config)
    missing, unexpected = stock.load_state_dict(whole, strict=False)
    assert all("rotary_emb" in name for name in unexpected)  # buffers that are not saved
    assert all(name.endswith("lm_head.weight") for name in missing)  # which may be tied
    return tensors_to_save(stock if config is None else stock.merge_and_unload())


def tensors_to_save(model: Any) -> dict[str, torch.Tensor]:
    """What transformers saves of a model that each rank has whole. On all ranks; only the first one saves."""
    with tempfile.TemporaryDirectory() as place:
        model.save_pretrained(place)
        saved = [tensors_of(Path(place))]
    if dist.is_initialized():
        dist.broadcast_object_list(saved, src=0)
    return saved[0]
