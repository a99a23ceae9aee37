"""What ranks do with bases in four bits, beside bitsandbytes itself in each of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tests.peers import use_peers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import shardwise
from shardwise.options import Fp4, InBlocks, LoadOptions, Nf4, Replicated

FORMS = {"nf4": Nf4, "fp4": Fp4}
STEPS = 20


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharding_on(mesh: str, **policies: Any) -> shardwise.Sharding:
    if mesh == "hsdp":
        size = torch.distributed.get_world_size()
        made = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
        return shardwise.Sharding(mesh=made, **policies)
    return shardwise.Sharding(**policies)


def stock_model(folder: str, form: str, dtype: torch.dtype, **settings: Any) -> Any:
    """As transformers has it in one process."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=form, bnb_4bit_compute_dtype=dtype, **settings
    )
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=dtype)


def our_model(folder: str, form: str, dtype: torch.dtype, mesh: str, **keywords: Any) -> Any:
    options = LoadOptions(progress=False, budget_bytes=1 << 16)
    quantization = FORMS[form](compute_dtype=dtype)
    sharding = sharding_on(mesh)
    return shardwise.from_pretrained(
        folder, quantization=quantization, dtype=dtype, sharding=sharding, options=options, **keywords
    )


def layers_of(model: Any) -> Iterator[tuple[str, Any]]:
    return ((name, module) for name, module in model.named_modules() if hasattr(module, "packing"))


def differing(folder: str, mesh: str, form: str = "nf4") -> list[str]:
    """Layers and answers that are not bit for bit those of bitsandbytes."""
    use_peers()
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        stock, ours = stock_model(folder, form, dtype), our_model(folder, form, dtype, mesh)
        for name, layer in layers_of(ours):
            weight = stock.get_submodule(name).weight
            if not torch.equal(whole(layer.weight).view(-1), weight.data.view(-1)):
                found.append(f"{dtype} {name}: bytes")
            scales = whole(layer.weight_scales).view(torch.float32)
            if not torch.equal(scales.view(-1), weight.quant_state.absmax.view(-1)):
                found.append(f"{dtype} {name}: scales")
            local = layer.weight.to_local() if isinstance(layer.weight, DTensor) else layer.weight
            rows, columns = len(local), 2 * local.shape[1]
            scales = layer.weight_scales
            held = (scales.to_local() if isinstance(scales, DTensor) else scales).nbytes
            if local.nbytes + held != rows * (columns // 2 + 4 * columns // 64):
                found.append(f"{name}: {local.nbytes + held} bytes for {rows} rows")
        tokens = torch.arange(24).view(2, 12)
        answers = []
        for model in (stock, ours):
            embedded = model.get_input_embeddings().weight
            rows = whole(embedded).detach()[tokens].requires_grad_()
            logits = model(inputs_embeds=rows).logits
            logits.float().square().mean().backward()
            answers.append((logits.detach(), rows.grad))
        found += [
            f"{dtype}: {what}"
            for what, first, second in zip(("logits", "gradients"), *answers, strict=True)
            if not torch.equal(first, second)
        ]
    return found


def lora_config(**settings: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": True, **settings}
    )


def trained_alike(folder: str, mesh: str, placement: str) -> dict[str, Any]:
    """Losses and gradients of a LoRA on a base in four bits, beside those of PEFT and bitsandbytes alone."""
    use_peers()
    from peft import get_peft_model, prepare_model_for_kbit_training

    placed = {"in blocks": InBlocks(), "replicated": Replicated()}[placement]
    stock = stock_model(folder, "nf4", torch.float32)
    stock = get_peft_model(prepare_model_for_kbit_training(stock, use_gradient_checkpointing=False), lora_config())
    ours = our_model(folder, "nf4", torch.float32, mesh, tuning=shardwise.Lora(lora_config(), adapters=placed))
    mine = {name: parameter for name, parameter in ours.named_parameters() if parameter.requires_grad}
    theirs = {name: parameter for name, parameter in stock.named_parameters() if parameter.requires_grad}
    generator = torch.Generator().manual_seed(1)
    for name, parameter in theirs.items():
        values = 0.2 * (torch.rand(parameter.shape, generator=generator) - 0.5)
        parameter.data.copy_(values)
        own = mine[name]
        if isinstance(own, DTensor):
            own.data.copy_(distribute_tensor(values, own.device_mesh, own.placements, src_data_rank=None))
        else:
            own.data.copy_(values)
    tokens = torch.arange(48).view(4, 12)
    losses: dict[str, list[float]] = {"stock": [], "ours": []}
    first: dict[str, torch.Tensor] = {}
    gradients = 0.0
    kinds = [type(ours.get_submodule(name.rpartition(".lora_A")[0])).__name__ for name in mine if "lora_A" in name]
    for kind, model in (("stock", stock), ("ours", ours)):
        model.train()
        optimizer = torch.optim.AdamW([item for item in model.parameters() if item.requires_grad], lr=1e-3)
        for step in range(STEPS):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            losses[kind].append(loss.item())
            if kind == "ours" and step == 0:
                gradients = max(relative(whole(mine[name].grad), first[name]) for name in mine)
            if kind == "stock" and step == 0:
                first = {name: parameter.grad.clone() for name, parameter in theirs.items()}
            optimizer.step()
            optimizer.zero_grad()
    return {
        "same names": mine.keys() == theirs.keys(),
        "kinds": sorted(set(kinds)),
        "losses": max(abs(a - b) / abs(a) for a, b in zip(losses["stock"], losses["ours"], strict=True)),
        "falls": losses["ours"][-1] < 0.9 * losses["ours"][0],
        "gradients": gradients,
    }


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-30))
