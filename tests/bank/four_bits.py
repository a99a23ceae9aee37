"""Functions that ranks run on a bank with a base in four bits, compared with a LoRA and with its numbers."""

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import PeftModel, get_peft_model_state_dict
from tests import truth, zoo
from tests.bank.banking import Recipe, create, distance, matrices_of, padded, rows_for
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM

import shardwise
from shardwise.options import Nf4

STEPS = 5
PACKED = Nf4()
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def adamw(own: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(own, lr=2e-3)


MEMBERS = {
    "ada": Recipe({"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}, adamw, rows=4),
    "bob": Recipe(
        {"r": 8, "lora_alpha": 32, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
        adamw,
        rows=2,
        tokens=12,
    ),
}
ADAPTS_EXPERTS = Recipe(
    {"r": 2, "lora_alpha": 8, "target_modules": [], "target_parameters": STACKS}, adamw, rows=2, tokens=12
)


def learned(folder: str, out: str) -> dict[str, Any]:
    bank = shardwise.AdapterBank(base(folder, Nf4()), backend="loop")
    for name, recipe in MEMBERS.items():
        create(bank, name, recipe)
    begin = {name: matrices_of(bank, name) for name in MEMBERS}
    losses = trained(bank, MEMBERS)
    found: dict[str, Any] = {"losses": 0.0, "adapters": 0.0, "opened": 0.0, "falls": True}
    for name, recipe in MEMBERS.items():
        own, end = alone(folder, name, recipe, begin[name])
        mine = [each[name] for each in losses]
        found["losses"] = max(found["losses"], *(abs(a - b) / b for a, b in zip(mine, own, strict=True)))
        found["adapters"] = max(found["adapters"], distance(matrices_of(bank, name), end, begin[name]))
        found["falls"] &= own[-1] < own[0]
        bank.save(name, os.path.join(out, name))
        with zoo.silenced():
            plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            opened = get_peft_model_state_dict(PeftModel.from_pretrained(plain, os.path.join(out, name)))
        kept = matrices_of(bank, name)
        same = opened.keys() == kept.keys() and all(torch.equal(opened[key], kept[key]) for key in kept)
        found["opened"] = max(found["opened"], 0.0 if same else 1.0)
    return found


def experts_learned(folder: str) -> dict[str, Any]:
    """Adapters of experts in four bits, beside those of experts whose numbers are the same."""
    packed, plain = base(folder, Nf4()), base(folder, Nf4(skip_modules=("experts",)))
    give_numbers(packed, plain)
    ends, losses, begin = [], [], {}
    for model in (packed, plain):
        bank = shardwise.AdapterBank(model, backend="loop")
        create(bank, "eve", ADAPTS_EXPERTS)
        begin = matrices_of(bank, "eve")
        losses.append([each["eve"] for each in trained(bank, {"eve": ADAPTS_EXPERTS})])
        ends.append(matrices_of(bank, "eve"))
    return {
        "losses": max(abs(a - b) / b for a, b in zip(*losses, strict=True)),
        "falls": losses[0][-1] < losses[0][0],
        "adapters": distance(ends[0], ends[1], begin),
    }


def stored_experts_learned(folder: str) -> dict[str, Any]:
    """An adapter on attention and on experts that stay as they are stored, beside a LoRA on the same base."""
    recipe = Recipe({**ADAPTS_EXPERTS.config, "target_modules": ["q_proj"]}, adamw, rows=2, tokens=12)
    bank = shardwise.AdapterBank(base(folder, "as_stored"), backend="loop")
    create(bank, "eve", recipe)
    begin = matrices_of(bank, "eve")
    mine = [each["eve"] for each in trained(bank, {"eve": recipe})]
    own, end = alone(folder, "eve", recipe, begin, "as_stored")
    return {
        "losses": max(abs(a - b) / b for a, b in zip(mine, own, strict=True)),
        "adapters": distance(matrices_of(bank, "eve"), end, begin),
        "falls": own[-1] < own[0],
    }


def base(folder: str, quantization: Any, **keywords: Any) -> Any:
    return shardwise.from_pretrained(folder, quantization=quantization, dtype=torch.float32, **keywords)


@torch.no_grad()
def put(into: torch.Tensor, values: torch.Tensor) -> None:
    if isinstance(into, DTensor):
        values = distribute_tensor(values, into.device_mesh, into.placements, src_data_rank=None)
    into.copy_(values)


def give_numbers(packed: Any, plain: Any) -> None:
    for name, module in packed.named_modules():
        for local, packing in getattr(module, "packings", {}).items():
            scales = truth.whole(getattr(module, f"{local}_scales")).contiguous().view(torch.float32)
            numbers = packing.dequantize(truth.whole(getattr(module, local)).contiguous(), scales, torch.float32)
            put(getattr(plain.get_submodule(name), local), numbers)


def trained(bank: Any, members: dict[str, Recipe]) -> list[dict[str, float]]:
    """Losses of each step; rows are dealt to the ranks."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    told = []
    for step in range(STEPS):
        rows = {name: rows_for(name, recipe, step % 2) for name, recipe in members.items()}
        batches = [
            (name, {key: values[rank::size] for key, values in batch.items()}) for name, batch in rows.items()
        ]
        told.append({name: each.loss for name, each in bank.forward_backward(batches).adapters.items()})
        for name in members:
            bank.optim_step(name)
    return told


def alone(
    folder: str, name: str, recipe: Recipe, begin: dict[str, torch.Tensor], quantization: Any = PACKED
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """By ``tuning=Lora``: losses of each step, and the end. Every rank has all rows."""
    model = base(folder, quantization, tuning=shardwise.Lora(recipe.lora()))
    parameters = {
        key.replace(".default", ""): values for key, values in model.named_parameters() if values.requires_grad
    }
    for key, values in begin.items():
        put(parameters[key], values)
    optimizer = recipe.optimizer(list(parameters.values()))
    losses = []
    for step in range(STEPS):
        batch = padded(rows_for(name, recipe, step % 2), 64)
        count = int((batch["labels"][:, 1:] != -100).sum())
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")
        (loss / count).backward()
        losses.append(loss.item() / count)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {key: truth.whole(values).clone() for key, values in parameters.items()}
