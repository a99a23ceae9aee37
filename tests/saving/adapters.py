"""Adapters as PEFT makes and saves them, and what PEFT itself makes of them."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tests import zoo
from transformers import AutoModelForCausalLM, PreTrainedModel


def save_adapter(
    base: Path | PreTrainedModel,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    vocab_size: int | None = None,
    **config: Any,
) -> Path:
    """A trained adapter: every factor random, what is saved whole somewhat changed."""
    with zoo.silenced():
        model = _resized(base, vocab_size) if isinstance(base, Path) else base
        tuned = get_peft_model(model, LoraConfig(**config))
        generator = torch.Generator().manual_seed(1)
        for name, parameter in tuned.named_parameters():
            if "lora_magnitude" in name:
                parameter.data *= 1.0 + 0.2 * torch.rand(parameter.shape, generator=generator)
            elif "lora_" in name:
                parameter.data.copy_(0.3 * (torch.rand(parameter.shape, generator=generator) - 0.5))
            elif "modules_to_save" in name or (name.endswith("bias") and parameter.requires_grad):
                parameter.data += 0.1 * torch.rand(parameter.shape, generator=generator)
        tuned.save_pretrained(folder)
    if dtype != torch.float32:
        change(folder, lambda tensors: {key: value.to(dtype) for key, value in tensors.items()})
    return folder


def merged_by_peft(base: Path, adapter: Path, *, vocab_size: int | None = None) -> PreTrainedModel:
    """The base, in float32, with the adapter merged."""
    adapted = adapted_by_peft(base, adapter, vocab_size=vocab_size)
    with zoo.silenced():
        return adapted.merge_and_unload()


def adapted_by_peft(base: Path, adapter: Path, *, vocab_size: int | None = None) -> PeftModel:
    """The base, in float32, with the adapter beside it."""
    with zoo.silenced():
        return PeftModel.from_pretrained(_resized(base, vocab_size), adapter)


def _resized(base: Path, vocab_size: int | None) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if vocab_size is not None:
        model.resize_token_embeddings(vocab_size)
    return model


def change(folder: Path, function: Any) -> None:
    """Pass the tensors of an adapter through a function."""
    file = folder / "adapter_model.safetensors"
    save_file({key: value.contiguous() for key, value in function(load_file(file)).items()}, file)


def tensors_of(folder: Path, pattern: str = "*") -> dict[str, torch.Tensor]:
    """All tensors of a saved model, under the keys of its files, by the safetensors library alone."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob(f"{pattern}.safetensors")):
        found |= load_file(file)
    return found


def ulps_apart(one: torch.Tensor, other: torch.Tensor) -> int:
    """How many representable numbers lie between two tensors of one dtype, at most."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}

    def ordered(tensor: torch.Tensor) -> torch.Tensor:
        bits = tensor.contiguous().view(kinds[tensor.element_size()]).to(torch.int64)
        half = 1 << (8 * tensor.element_size() - 1)
        return torch.where(bits < 0, -half - bits, bits)

    assert one.dtype == other.dtype
    assert one.shape == other.shape
    return int((ordered(one) - ordered(other)).abs().max()) if one.numel() else 0
