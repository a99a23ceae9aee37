"""Functions that ranks run on bases in four bits, compared with bitsandbytes."""

from collections.abc import Iterator
from typing import Any

import torch
from safetensors.torch import load_file
from tests.peers import use_peers
from tests.truth import whole
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM

import shardwise
from shardwise.fsdp.named_tensors import local_tensor as local_of
from shardwise.options import Fp4, LoadOptions, MergedAdapter, Nf4

FORMS = {"nf4": Nf4, "fp4": Fp4}
STEPS = 20


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


def our_model(folder: str, form: str, dtype: torch.dtype, mesh: str, nested: bool = False, **keywords: Any) -> Any:
    options = LoadOptions(progress=False, budget_bytes=1 << 16)
    quantization = FORMS[form](compute_dtype=dtype, double_quant=nested)
    sharding = sharding_on(mesh)
    return shardwise.from_pretrained(
        folder, quantization=quantization, dtype=dtype, sharding=sharding, options=options, **keywords
    )


def layers_of(model: Any) -> Iterator[tuple[str, Any]]:
    return ((name, module) for name, module in model.named_modules() if hasattr(module, "packing"))


def differing(folder: str, mesh: str, form: str, scales: str, out: str) -> list[str]:
    """Layers, answers and files that are not bit for bit those of bitsandbytes."""
    use_peers("bitsandbytes")
    found: list[str] = []
    is_nested = scales == "nested"
    for dtype in (torch.bfloat16, torch.float32):
        stock = stock_model(folder, form, dtype, bnb_4bit_use_double_quant=is_nested)
        ours = our_model(folder, form, dtype, mesh, is_nested)
        saved = f"{out}/{str(dtype).removeprefix('torch.')}"
        shardwise.save(ours, saved)
        again = our_model(saved, form, dtype, mesh, is_nested)
        for name, layer in layers_of(ours):
            weight = stock.get_submodule(name).weight
            other = again.get_submodule(name)
            state = weight.quant_state
            wanted = {"weight": weight.data, "weight_scales": state.absmax}
            if is_nested:
                wanted |= {"weight_nested_scales": state.state2.absmax, "weight_nested_offset": state.offset}
            for local, values in wanted.items():
                for what, module in (("", layer), (" read again", other)):
                    mine = whole(getattr(module, local)).view(-1)
                    mine = mine.view(values.dtype) if mine.dtype != values.dtype else mine
                    if not torch.equal(mine, values.view(-1)):
                        found.append(f"{dtype} {name}: {local}{what}")
            held = sum(local_of(item).nbytes for item in (layer.weight, layer.weight_scales))
            rows, columns = len(local_of(layer.weight)), layer.in_features
            if held != rows * (columns // 2 + (1 if is_nested else 4) * columns // 64):
                found.append(f"{name}: {held} bytes for {rows} rows")
        first, second = answers_of(stock), answers_of(ours)
        found += [f"{dtype}: {what}" for what in first if not torch.equal(first[what], second[what])]
        if torch.distributed.get_rank() == 0:
            torch.save(first, f"{saved}.answers")
            opened = stock_model(saved, form, dtype)  # by transformers and bitsandbytes alone
            third = answers_of(opened)
            found += [f"{dtype}: {what} as opened" for what in first if not torch.equal(first[what], third[what])]
        torch.distributed.barrier()
    return found


def differing_alone(folder: str, mesh: str, form: str, scales: str, out: str) -> list[str]:
    """What is otherwise where bitsandbytes is not installed."""
    found: list[str] = []
    for dtype in (torch.bfloat16, torch.float32):
        saved = f"{out}/{str(dtype).removeprefix('torch.')}"
        wanted = torch.load(f"{saved}.answers")
        for what, place in (("packed here", folder), ("read", saved)):
            ours = our_model(place, form, dtype, mesh, scales == "nested")
            answers = answers_of(ours)
            found += [f"{dtype} {what}: {name}" for name in wanted if not torch.equal(answers[name], wanted[name])]
            found += [name for name, layer in layers_of(ours) if type(layer).__name__ != "LinearInFourBits"]
        shardwise.save(ours, f"{saved}-again")
        if torch.distributed.get_rank() == 0:
            first, second = (load_file(f"{place}/model.safetensors") for place in (saved, f"{saved}-again"))
            if first.keys() != second.keys() or not all(torch.equal(first[key], second[key]) for key in first):
                found.append(f"{dtype}: files")
    return found


def answers_of(model: Any) -> dict[str, torch.Tensor]:
    tokens = torch.arange(24).view(2, 12)
    rows = whole(model.get_input_embeddings().weight).detach()[tokens].requires_grad_()
    logits = model(inputs_embeds=rows).logits
    logits.float().square().mean().backward()
    assert rows.grad is not None
    return {"logits": logits.detach(), "gradients": rows.grad}


def lora_config(**settings: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": True, **settings}
    )


def _kind_of_pefts(layer: object) -> str:
    """The class of PEFT's own that a layer is."""
    return next(kind.__name__ for kind in type(layer).__mro__ if kind.__module__.startswith("peft."))


def trained_alike(folder: str, mesh: str, placement: str) -> dict[str, Any]:
    """Losses and gradients of a LoRA on a base in four bits, beside those of PEFT and bitsandbytes alone."""
    use_peers("bitsandbytes")
    from peft import get_peft_model, prepare_model_for_kbit_training

    placed = {"in blocks": "sharded", "replicated": "replicated"}[placement]
    stock = stock_model(folder, "nf4", torch.float32)
    stock = get_peft_model(prepare_model_for_kbit_training(stock, use_gradient_checkpointing=False), lora_config())
    ours = our_model(folder, "nf4", torch.float32, mesh, tuning=shardwise.Lora(lora_config(), placement=placed))
    mine = {name: parameter for name, parameter in ours.named_parameters() if parameter.requires_grad}
    theirs = {name: parameter for name, parameter in stock.named_parameters() if parameter.requires_grad}
    draw([mine[name] for name in theirs])
    draw(list(theirs.values()))
    tokens = torch.arange(48).view(4, 12)
    losses: dict[str, list[float]] = {"stock": [], "ours": []}
    first: dict[str, torch.Tensor] = {}
    gradients = 0.0
    layers = [ours.get_submodule(name.rpartition(".lora_A")[0]) for name in mine if "lora_A" in name]
    kinds = [_kind_of_pefts(layer) for layer in layers]
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


@torch.no_grad()
def draw(parameters: list[torch.Tensor], scale: float = 0.2) -> None:
    """Values that do not depend on how parameters are sharded."""
    generator = torch.Generator().manual_seed(1)
    for parameter in parameters:
        values = scale * (torch.rand(parameter.shape, generator=generator) - 0.5)
        if isinstance(parameter, DTensor):
            values = distribute_tensor(values, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.copy_(values)


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-30))


def merged(folder: str, mesh: str, scales: str) -> dict[str, Any]:
    """How far the numbers of a base in four bits with a LoRA merged in are from those by hand."""
    tuning = shardwise.Lora(lora_config(target_modules=["q_proj", "down_proj"]))
    ours = our_model(folder, "nf4", torch.float32, mesh, scales == "nested", tuning=tuning)
    draw([parameter for parameter in ours.parameters() if parameter.requires_grad])
    wanted = {}
    for name, layer in layers_of(ours):
        scales_of_it = layer.get_scales(whole(layer.weight_scales), 0)
        wanted[name] = layer.packing.dequantize(whole(layer.weight), scales_of_it, torch.float32)
    for name, parameter in list(ours.named_parameters()):
        if ".lora_A." in name:
            base = name.partition(".lora_A.")[0]
            product = whole(ours.get_parameter(name.replace("lora_A", "lora_B"))) @ whole(parameter)
            wanted[f"{base}.base_layer"] += 2.0 * product.detach()
    tensors = dict(shardwise.iter_hf_tensors(ours, only=MergedAdapter()))
    bare = {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): values for name, values in wanted.items()
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    model.load_state_dict(tensors)
    tokens = torch.arange(12).view(1, 12)
    with torch.no_grad():
        answers = [item.eval()(input_ids=tokens).logits for item in (ours, model)]
    return {
        "numbers": max(relative(tensors[f"{name}.weight"], values) for name, values in bare.items()),
        "answers": relative(answers[0], answers[1]),
    }


def sharded_live(path: str, folder: str, is_nested: bool) -> list[str]:
    """Names of tensors and answers that differ between a model live on the first rank and one that is read."""
    live = torch.load(path, weights_only=False)
    if torch.distributed.get_rank():
        live = live.to("meta")
    shardwise.shard(live)
    found = [name for name, layer in layers_of(live) if not isinstance(layer.weight, DTensor)]
    models = (our_model(folder, "nf4", torch.bfloat16, "flat", is_nested), live)
    wanted, told = ({**model.state_dict(), **answers_of(model)} for model in models)
    assert wanted.keys() == told.keys()
    return found + [name for name in wanted if not torch.equal(whole(wanted[name]), whole(told[name]))]
