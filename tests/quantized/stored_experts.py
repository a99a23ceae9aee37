"""Experts that come up as they are stored, beside the same experts as numbers: on ranks, and alone."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from tests import zoo
from tests.files.test_four_bit_blocks import quantized
from tests.files.test_nested_scales import nested_scales
from tests.quantized.four_bits import answers_of, draw, local_of, whole
from tests.saving.adapters import tensors_of
from tests.support.files import change_json
from transformers import AutoModelForCausalLM, GptOssConfig

import shardwise
from shardwise.models.four_bit.config import Packing, to_transformers
from shardwise.models.four_bit.files import ABSMAX, build_metadata
from shardwise.options import LoadOptions, Nf4

EXPERTS = 4
STACKS = ("gate_up_proj", "down_proj")


def packed_for_files(key: str, numbers: torch.Tensor, quantization: Nf4) -> dict[str, torch.Tensor]:
    """A matrix (out, in) as files have it, with plain scales."""
    rows, columns = numbers.shape
    packing = Packing(quantization.form, quantization.block_size, numbers.dtype)
    codes, scales = quantized(numbers.detach().contiguous(), packing.block_size, quantization.form)
    constants = build_metadata(packing, (rows, columns), None)
    beside = {f"{key}.{name}": tensor for name, tensor in constants.items()}
    return {key: codes.view(-1, 1), f"{key}.{ABSMAX}": scales.view(-1), **beside}


def make_gpt_oss(folder: Path) -> None:
    """A small gpt-oss, its experts in MXFP4."""
    sizes = {"vocab_size": 260, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    config = GptOssConfig(**sizes, **heads, num_local_experts=EXPERTS, dtype="bfloat16")
    model = AutoModelForCausalLM.from_config(config).bfloat16()
    zoo.fill(model)
    zoo.save_original(model, folder, max_shard_size="1GB")
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(folder / "model.safetensors")
    for key in [key for key in tensors if key.endswith(STACKS)]:
        experts, columns, rows = tensors.pop(key).shape
        shape = (experts, rows, columns // 32)
        tensors[f"{key}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{key}_scales"] = torch.randint(116, 125, shape, generator=generator, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    told = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens", "lm_head"]}
    change_json(folder / "config.json", quantization_config=told)


def make_packed_one_by_one(plain: Path, folder: Path, *, is_nested: bool) -> dict[str, torch.Tensor]:
    """A mixture as bitsandbytes stored it when each expert was a module of its own; the tensors of the files."""
    stored: dict[str, torch.Tensor] = {}
    for key, numbers in tensors_of(plain).items():
        if key.endswith("_proj.weight"):
            stored |= _nested(key, numbers) if is_nested else dict(packed_for_files(key, numbers, Nf4()))
        else:
            stored[key] = numbers
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    asked = Nf4(double_quant=is_nested)
    shutil.copy(plain / "config.json", folder)
    told = to_transformers(asked, ("lm_head",), torch.bfloat16)
    change_json(folder / "config.json", quantization_config=told)
    return stored


def _nested(key: str, numbers: torch.Tensor) -> dict[str, torch.Tensor]:
    plain = dict(packed_for_files(key, numbers, Nf4()))
    codes, nested, offset = nested_scales(plain[f"{key}.absmax"])
    constants = build_metadata(Packing(Nf4.form, 64, numbers.dtype), numbers.shape, float(offset))
    beside = {"absmax": codes, "nested_absmax": nested, **constants}
    return {key: plain[key]} | {f"{key}.{name}": tensor for name, tensor in beside.items()}


def opened(folder: str, quantization: Any, **keywords: Any) -> Any:
    options = LoadOptions(progress=False, budget_bytes=1 << 16)
    return shardwise.from_pretrained(
        folder, quantization=quantization, experts_implementation="eager", options=options, **keywords
    )


def packed_stacks(model: Any) -> dict[str, Any]:
    """Bytes and scales of experts in four bits, by name."""
    return {
        f"{name}.{local}": getattr(module, local)
        for name, module in model.named_modules()
        for stack in getattr(module, "packings", ())
        for local in (stack, f"{stack}_scales")
    }


def differing(folder: str, wanted: Mapping[str, Any], out: str) -> list[str]:
    """What on these ranks is not, bit for bit, as alone: bytes, answers, files; and how many bytes ranks hold."""
    found: list[str] = []
    model = opened(folder, "as_stored", dtype=torch.bfloat16)
    stacks = packed_stacks(model)
    if stacks.keys() != wanted["stacks"].keys():
        found.append(f"{sorted(stacks)} are in four bits")
    size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    held = sum(local_of(item).nbytes for item in stacks.values())
    nbytes = sum(item.nbytes for item in wanted["stacks"].values())
    most_uneven = sum(item.nbytes // item.shape[0] for item in wanted["stacks"].values())
    if not (nbytes / size - most_uneven <= held <= nbytes / size + most_uneven):
        found.append(f"{held} bytes of {nbytes} on one of {size}")
    found += [name for name, item in stacks.items() if not torch.equal(whole(item), wanted["stacks"][name])]
    answers = answers_of(model)
    found += [what for what, values in wanted["answers"].items() if not torch.equal(answers[what], values)]
    names = "internal" if wanted["internally"] else "hub"
    shardwise.save(model, out, names=names)
    again = opened(out, "as_stored", dtype=torch.bfloat16)
    answers = answers_of(again)
    return found + [
        f"{what} again" for what in wanted["answers"] if not torch.equal(answers[what], wanted["answers"][what])
    ]


LORA = {
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "v_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}


def learned(folder: str, quantization: Any) -> dict[str, torch.Tensor]:
    """The loss of a LoRA on a base, of attention and of experts, and its gradients."""
    model = opened(folder, quantization, dtype=torch.float32, tuning=shardwise.Lora(LoraConfig(**LORA)))
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    draw(list(trained.values()), 0.1)
    tokens = torch.arange(24).view(2, 12)
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: whole(parameter.grad) for name, parameter in trained.items()}}


def distance(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    """The largest, of what is compared, beside what is wanted."""
    assert found.keys() == wanted.keys()
    return max(float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted)


def far_from(folder: str, wanted: Mapping[str, torch.Tensor]) -> float:
    return distance(learned(folder, "as_stored"), wanted)


def as_alone(folder: str) -> dict[str, Any]:
    """What one process has with numbers in the place of bytes."""
    return {"answers": answers_of(opened(folder, "dequantize", dtype=torch.bfloat16))}
