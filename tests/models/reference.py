"""Small checkpoints, and what transformers and PEFT make of them in one process."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tests import zoo
from torch import nn
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}


def save_config(folder: Path, config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> Path:
    torch.manual_seed(0)
    with zoo.silenced():
        AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    return folder


def save_tiny(folder: Path, *, tied: bool = True, dtype: torch.dtype = torch.float32, **config: Any) -> Path:
    """A Qwen3 of two layers."""
    sizes = {**SIZES, "head_dim": 12, "tie_word_embeddings": tied}
    return save_config(folder, Qwen3Config(**{**sizes, **config}), dtype)


def save_experts(folder: Path) -> Path:
    """A Mixtral of four experts, stored one by one."""
    return save_config(folder, MixtralConfig(**SIZES, num_local_experts=4, tie_word_embeddings=False))


def stock(folder: Path | str, config: LoraConfig | None, dtype: torch.dtype = torch.float32) -> nn.Module:
    """What transformers and PEFT bring up, in evaluation mode."""
    with zoo.silenced():
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        if config is None:
            return model
        return get_peft_model(model, copy.deepcopy(config)).eval()


def stock_with_adapter(folder: Path | str, adapter: Path | str) -> PeftModel:
    """The base with a saved adapter, as PEFT opens it."""
    with zoo.silenced():
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return PeftModel.from_pretrained(base, adapter, is_trainable=True).eval()


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter by name, whole."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters(remove_duplicate=False)}


def batch(rows: int, seed: int, vocabulary: int = 61) -> torch.Tensor:
    return torch.randint(0, vocabulary, (rows, 10), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    """What a model answers to the same rows everywhere."""
    answer: torch.Tensor = model(input_ids=batch(2, seed=5), use_cache=False).logits
    return answer


def train(
    model: nn.Module,
    steps: int,
    rows: int,
    rank: int = 0,
    world: int = 1,
    *,
    parts: int = 1,
    learning_rate: float = 1e-2,
    after: Callable[[], object] = int,
) -> list[float]:
    """Steps of AdamW, each rank with its part of the rows; the mean loss of this rank's rows, step by step.

    The rows of a step go through the model in so many ``parts`` of one size.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, foreach=False)
    share = rows // world
    losses: list[float] = []
    for step in range(steps):
        tokens = batch(rows, step)[rank * share : (rank + 1) * share]
        mean = 0.0
        for part in tokens.chunk(parts):
            loss = model(input_ids=part, labels=part, use_cache=False).loss / parts
            loss.backward()
            mean += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        after()
        losses.append(mean)
    return losses


def unsettle(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Values for what a LoRA adds, such that every element matters; by name, and the same everywhere."""
    made: dict[str, torch.Tensor] = {}
    for name, value in values.items():
        if "lora_" in name:
            generator = torch.Generator().manual_seed(sum(map(ord, name)))
            noise = torch.rand(value.shape, generator=generator)
            made[name] = value * (1 + 0.2 * noise) if "magnitude" in name else 0.4 * (noise - 0.5)
    return made
