"""Adapters on a small base: together in a bank, and each alone in plain PEFT, in one process."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from tests import zoo
from tests.models import reference
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

WORDS = 64
STEPS = 20
"""That each adapter takes."""
SIZES = {
    **reference.SIZES,
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "head_dim": 16,
    "initializer_range": 0.2,
}


def save_base(folder: Path, *, tied: bool = True) -> Path:
    return reference.save_tiny(folder, tied=tied, **SIZES)


def save_experts(folder: Path, num_experts: int = 4) -> Path:
    experts = {"num_experts": num_experts, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return reference.save_config(folder, Qwen3MoeConfig(**SIZES, **experts, tie_word_embeddings=False))


@dataclass(frozen=True)
class Recipe:
    """An adapter, as a test has it."""

    config: Mapping[str, Any]
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda own: torch.optim.AdamW(own, lr=1e-2)
    schedule: Callable[[Any], Any] | None = None
    max_grad_norm: float = math.inf
    gradient_accumulation_steps: int = 1
    rows: int = 2
    tokens: int = 7
    seed: int = 0
    more: Mapping[str, Any] = field(default_factory=dict)

    def lora(self) -> LoraConfig:
        return LoraConfig(**self.config)

    def keywords(self) -> dict[str, Any]:
        schedule = {"schedule": self.schedule} if self.schedule else {}
        return {
            "optimizer": self.optimizer,
            "max_grad_norm": self.max_grad_norm,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "seed": self.seed,
            **schedule,
            **self.more,
        }


def adamw(**keywords: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda own: torch.optim.AdamW(own, **keywords)


def sgd(own: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(own, lr=0.05, momentum=0.9, nesterov=True)


def falling(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1 / (1 + step))


def recipes() -> dict[str, Recipe]:
    """Ranks, targets, optimizers, windows, clips, lengths: each has its own."""
    attention = ["q_proj", "v_proj"]
    return {
        "ada": Recipe(
            {"r": 4, "lora_alpha": 8, "target_modules": attention}, adamw(lr=1e-2, weight_decay=0.1), rows=3
        ),
        "bob": Recipe(
            {"r": 8, "target_modules": "all-linear"},
            sgd,
            max_grad_norm=0.3,
            gradient_accumulation_steps=2,
            tokens=12,
        ),
        "cy": Recipe(
            {
                "r": 3,
                "use_rslora": True,
                "target_modules": ["embed_tokens", "lm_head", "o_proj"],
                "rank_pattern": {"o_proj": 5},
            },
            adamw(lr=5e-3),
            schedule=falling,
            gradient_accumulation_steps=3,
            seed=7,
        ),
        "dee": Recipe({"r": 16, "lora_alpha": 4, "target_modules": ["down_proj", *attention]}, tokens=15, rows=4),
        "eve": Recipe({"r": 4, "init_lora_weights": "gaussian", "target_modules": attention}, rows=3, seed=3),
    }


def rows_for(name: str, recipe: Recipe, number: int) -> dict[str, torch.Tensor]:
    """The rows of an adapter's micro-batch, padded at the end; some tokens are not learned."""
    generator = torch.Generator().manual_seed(1000 * number + sum(map(ord, name)))
    ids = torch.randint(0, WORDS, (recipe.rows, recipe.tokens), generator=generator)
    lengths = torch.randint(3, recipe.tokens + 1, (recipe.rows,), generator=generator)
    mask = (torch.arange(recipe.tokens) < lengths.unsqueeze(1)).long()
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, 1] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def no_rows() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.zeros((0, 1), dtype=torch.int64)}


# ── together ──────────────────────────────────────────────────────────────────────────────────────


def create(bank: Any, name: str, recipe: Recipe) -> None:
    bank.add_adapter(name, recipe.lora(), **recipe.keywords())


def train(
    bank: Any,
    members: Mapping[str, Recipe],
    micro_batches: int,
    *,
    first: int = 0,
    began: Mapping[str, int] | None = None,
    rank: int = 0,
    size: int = 1,
    rows: Callable[..., dict[str, torch.Tensor]] = rows_for,
) -> list[Any]:
    """Micro-batches of all members at once; each steps at the end of its own window, until it has ``STEPS``.

    The rows of an adapter are dealt to the ranks one after the other; those of one adapter are all on one rank, in
    turn. ``began`` says with which micro-batch an adapter came; it begins with its own first rows.
    """
    told = []
    for number in range(first, first + micro_batches):
        own = {name: number - (began or {}).get(name, 0) for name in members}
        ready = {
            name: recipe
            for name, recipe in members.items()
            if own[name] < STEPS * recipe.gradient_accumulation_steps
        }
        batches = []
        for name, recipe in ready.items():
            batch = rows(name, recipe, own[name])
            if name == "dee" and size > 1:
                batches.append((name, batch if rank == number % size else no_rows()))
            else:
                half = -(-recipe.rows // size)
                batches.append(
                    (name, {key: values[rank * half : (rank + 1) * half] for key, values in batch.items()})
                )
        told.append(bank.forward_backward(batches))
        for name, recipe in ready.items():
            if (own[name] + 1) % recipe.gradient_accumulation_steps == 0:
                told.append(bank.optim_step(name))
    return told


def matrices_of(bank: Any, name: str) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = bank.state_dict(name)["adapter"]
    return found


# ── alone ─────────────────────────────────────────────────────────────────────────────────────────


def padded(batch: dict[str, torch.Tensor], multiple: int) -> dict[str, torch.Tensor]:
    """Rows cut to the longest of them, and padded to a multiple, as a collator of transformers does it."""
    longest = int(batch["attention_mask"].sum(1).max())
    length = -(-longest // multiple) * multiple
    fills = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {
        key: F.pad(values[:, :longest], (0, length - longest), value=fills[key]) for key, values in batch.items()
    }


def alone(
    base: Path, name: str, recipe: Recipe, begin: Mapping[str, torch.Tensor], *, steps: int = STEPS, pad_to: int
) -> dict[str, torch.Tensor]:
    """Plain PEFT: one process, one adapter, a mean over the tokens of the window."""
    with zoo.silenced():  # of embeddings that are tied
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), recipe.lora())
    set_peft_model_state_dict(model, dict(begin))
    model.eval()  # no dropout
    own = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = recipe.optimizer(own)
    schedule = recipe.schedule(optimizer) if recipe.schedule else None
    for start in range(0, steps * recipe.gradient_accumulation_steps, recipe.gradient_accumulation_steps):
        window = [
            padded(rows_for(name, recipe, start + number), pad_to)
            for number in range(recipe.gradient_accumulation_steps)
        ]
        learned = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in window)
        for batch in window:
            logits = model(batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
            loss = F.cross_entropy(
                logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum", ignore_index=-100
            )
            (loss / learned).backward()
        torch.nn.utils.clip_grad_norm_(own, recipe.max_grad_norm)
        optimizer.step()
        if schedule:
            schedule.step()
        optimizer.zero_grad()
    found = get_peft_model_state_dict(model, save_embedding_layers=False)
    return {key: values.clone() for key, values in found.items()}


def logprobs_of(model: Any, batch: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """By row, of each token but the first; 0 where it is not learned."""
    found = []
    for row, length in enumerate(batch["attention_mask"].sum(1).tolist()):
        ids = batch["input_ids"][row : row + 1, :length]
        expected = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        expected[batch["labels"][row, 1:length] == -100] = 0
        found.append(expected.detach())
    return found


def distance(
    joint: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], begin: Mapping[str, torch.Tensor]
) -> float:
    """‖joint - alone‖ / ‖alone - begin‖, over all matrices."""
    assert joint.keys() == expected.keys() == begin.keys()

    def norm(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
        return math.sqrt(sum(float((one[key].double() - other[key].double()).square().sum()) for key in one))

    return norm(joint, expected) / norm(expected, begin)
