"""Functions that ranks run on experts in four bits, compared with bitsandbytes."""

from collections.abc import Iterator
from typing import Any

import torch
from peft import LoraConfig
from tests.loading.on_ranks import attempt
from tests.peers import use_peers
from tests.quantized.four_bits import answers_of, draw, local_of, our_model, stock_model, whole
from tests.saving.merged import merge_in_one_process

import shardwise
from shardwise.options import MergedAdapter

STACKS = ("gate_up_proj", "down_proj")


def stacks_of(model: Any) -> Iterator[tuple[str, Any, str]]:
    for name, module in model.named_modules():
        if hasattr(module, "packings"):
            yield from ((name, module, local) for local in module.packings)


def with_experts_quantized(folder: str, form: str, dtype: torch.dtype, **settings: Any) -> Any:
    """As transformers has it in one process, with experts that were put into four bits and back, one by one."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    stock = stock_model(folder, form, dtype, **settings)
    stock.set_experts_implementation("eager")
    for name, module in stock.named_modules():
        if name.endswith(".experts"):
            for local in STACKS:
                stack = getattr(module, local).data
                for number, weight in enumerate(stack):
                    packed, state = quantize_4bit(weight, quant_type=form)
                    stack[number] = dequantize_4bit(packed, state)
    return stock


def differing(folder: str, mesh: str, form: str, scales: str, out: str) -> list[str]:
    """Bytes, answers and files that are not those of bitsandbytes; refusals that do not come."""
    use_peers("bitsandbytes")
    from bitsandbytes.functional import quantize_4bit

    found: list[str] = []
    kind = scales == "nested"
    for dtype in (torch.bfloat16, torch.float32):
        stock = with_experts_quantized(folder, form, dtype, bnb_4bit_use_double_quant=scales == "nested")
        ours = our_model(folder, form, dtype, mesh, kind)
        plain = stock_model(folder, form, dtype)
        count = 0
        for name, module, local in stacks_of(ours):
            count += 1
            numbers = getattr(plain.get_submodule(name), local).data
            bytes_of = {key: getattr(module, key) for key in (local, f"{local}_scales")}
            mine = [whole(item).view(len(numbers), -1) for item in bytes_of.values()]
            for expert, weight in enumerate(numbers):
                packed, state = quantize_4bit(weight, quant_type=form)
                for theirs, own in zip((packed, state.absmax), mine, strict=True):
                    if not torch.equal(theirs.view(-1).view(torch.uint8), own[expert]):
                        found.append(f"{dtype} {name}.{local} {expert}")
            for key, item in bytes_of.items():
                if local_of(item).numel() != shard_numel(item):
                    found.append(f"{name}.{key}: {tuple(local_of(item).shape)} of {tuple(item.shape)}")
        if count != 4:
            found.append(f"{count} stacks of 4 are in four bits")
        first, second = answers_of(stock), answers_of(ours)
        found += [f"{dtype}: {what}" for what in first if not torch.equal(first[what], second[what])]

        saved = f"{out}/{str(dtype).removeprefix('torch.')}"
        shardwise.save(ours, saved, names="internal")
        again = our_model(saved, form, dtype, mesh, kind)
        third = answers_of(again)
        found += [f"{dtype}: {what} read again" for what in first if not torch.equal(first[what], third[what])]
        other = "fp4" if form == "nf4" else "nf4"
        found += lacking("the checkpoint has bytes of", our_model, saved, other, dtype, mesh, kind)
        found += lacking("experts are in four bits", shardwise.save, ours, f"{out}/hub")
        found += lacking("experts are in four bits", lambda ours=ours: next(iter(shardwise.iter_hf_tensors(ours))))
    with torch.no_grad():
        for _, module, local in stacks_of(again):
            local_of(getattr(module, local)).zero_()
    for place in (saved, folder):
        shardwise.load(again, place)
        last = answers_of(again)
        found += [
            f"{what} put into a model that is there" for what in first if not torch.equal(first[what], last[what])
        ]
    return found


def wrongly_merged(folder: str, mesh: str) -> list[str]:
    """Tensors of a base in four bits with a LoRA on its experts that are not those of one process."""
    config = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=STACKS)
    model = our_model(folder, "nf4", torch.float32, mesh, False, tuning=shardwise.Lora(config))
    draw([parameter for parameter in model.parameters() if parameter.requires_grad], 0.1)
    wanted = merge_in_one_process(model, folder, config)
    found = dict(shardwise.iter_hf_tensors(model, only=MergedAdapter()))
    faults = [f"{key} is in one only" for key in found.keys() ^ wanted.keys()]
    return faults + [key for key in wanted if not torch.allclose(found[key], wanted[key], rtol=1e-5, atol=1e-5)]


def lacking(words: str, call: Any, *given: Any) -> list[str]:
    """A fault where a call does not raise a ConfigError of these words."""
    kind, text = attempt(call, *given)
    return [] if kind == "ConfigError" and words in text else [f"{kind or 'nothing'} in place of: {words}. {text}"]


def shard_numel(item: Any) -> int:
    """Of the part of this rank."""
    count = item.shape[item.placements[-1].dim]
    part = -(-count // item.device_mesh.size(-1))
    start = min(count, part * item.device_mesh.get_local_rank(-1))
    return int(item.numel() // count * (min(count, start + part) - start))
