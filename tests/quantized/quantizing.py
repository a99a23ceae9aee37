"""Quantized checkpoints of small models, and what they stand for by direct evaluation, element by element."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tests import load_cases
from tests.saving.adapters import tensors_of
from tests.support.files import change_json
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import shardwise

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


@dataclass(frozen=True)
class Made:
    """What is stored in place of a matrix, by what follows its key (without ``weight``), and its numbers."""

    stored: dict[str, torch.Tensor]
    numbers: torch.Tensor


def by_global_index(values: torch.Tensor, scales: torch.Tensor, unit: tuple[int, ...]) -> torch.Tensor:
    """Each element times the scale of its block, in float32."""
    out = torch.empty(values.shape, dtype=torch.float32)
    for place in torch.cartesian_prod(*(torch.arange(size) for size in values.shape)).tolist():
        at = tuple(index // step for index, step in zip(place, unit, strict=True))
        out[tuple(place)] = values[tuple(place)].float() * scales[at].float()
    return out


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _scales(shape: list[int], seed: int) -> torch.Tensor:
    return torch.rand(shape, generator=_generator(seed)) + 0.01


def _counts(shape: torch.Size, unit: tuple[int, ...]) -> list[int]:
    return [-(-size // step) for size, step in zip(shape, unit, strict=True)]


def fp8_blocks(shape: torch.Size, seed: int, name: str = "weight_scale_inv") -> Made:
    values = torch.randn(shape, generator=_generator(seed)).to(torch.float8_e4m3fn)
    scales = _scales(_counts(shape, (16, 24)), seed + 1)
    return Made({"weight": values, name: scales}, by_global_index(values, scales, (16, 24)))


def fp8_ue8m0(shape: torch.Size, seed: int) -> Made:
    values = torch.randn(shape, generator=_generator(seed)).to(torch.float8_e4m3fn)
    exponents = torch.randint(120, 134, _counts(shape, (16, 24)), generator=_generator(seed + 1), dtype=torch.uint8)
    scales = exponents.view(torch.float8_e8m0fnu) if seed % 2 else exponents
    return Made(
        {"weight": values, "weight_scale_inv": scales},
        by_global_index(values, 2.0 ** (exponents.float() - 127), (16, 24)),
    )


def fp8_tensor(shape: torch.Size, seed: int) -> Made:
    values = torch.randn(shape, generator=_generator(seed)).to(torch.float8_e4m3fn)
    scale = _scales([], seed + 1)
    stored = {"weight": values, "qscale_weight": scale, "qscale_act": torch.ones(())}
    return Made(stored, values.float() * scale)


def fp8_rows(shape: torch.Size, seed: int) -> Made:
    values = torch.randn(shape, generator=_generator(seed)).to(torch.float8_e4m3fn)
    scales = _scales([shape[0], 1], seed + 1).bfloat16()
    return Made({"weight": values, "weight_scale": scales}, values.float() * scales.float())


def int8_rows(shape: torch.Size, seed: int) -> Made:
    values = torch.randint(-128, 128, shape, generator=_generator(seed), dtype=torch.int8)
    scales = _scales([shape[0], 1], seed + 1)
    return Made({"weight": values, "weight_scale": scales}, values.float() * scales)


def int8_zeros(shape: torch.Size, seed: int) -> Made:
    values = torch.randint(-128, 128, shape, generator=_generator(seed), dtype=torch.int8)
    zeros = torch.randint(-128, 128, (shape[0], 1), generator=_generator(seed + 2), dtype=torch.int8)
    scales = _scales([shape[0], 1], seed + 1)
    stored = {"weight": values, "weight_scale": scales, "weight_zero_point": zeros}
    return Made(stored, (values.float() - zeros.float()) * scales)


def in_words(numbers: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """Integers along the last dimension in words of 32 bits, counted from the least; zeros fill the last word."""
    count = 32 // bits
    counted = torch.nn.functional.pad(numbers.long() + 2 ** (bits - 1), (0, -numbers.shape[-1] % count))
    words = (counted.unflatten(-1, (-1, count)) << (bits * torch.arange(count))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def int4_groups(shape: torch.Size, seed: int, *, has_zeros: bool = False, in_order: bool = True) -> Made:
    numbers = torch.randint(-8, 8, shape, generator=_generator(seed))
    scales = _scales([shape[0], shape[1] // 8], seed + 1)
    stored = {"weight_packed": in_words(numbers), "weight_scale": scales, "weight_shape": torch.tensor(shape)}
    zeros = torch.zeros(scales.shape)
    if has_zeros:
        zeros = torch.randint(-8, 8, scales.shape, generator=_generator(seed + 2))
        stored["weight_zero_point"] = in_words(zeros.T).T
    groups = torch.arange(shape[1]) // 8
    if not in_order:
        groups = groups[torch.randperm(shape[1], generator=_generator(seed + 3))]
        stored["weight_g_idx"] = groups.int()
    return Made(stored, (numbers.float() - zeros[:, groups].float()) * scales[:, groups])


def _fp4(shape: torch.Size, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.randint(0, 16, shape, generator=_generator(seed), dtype=torch.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), torch.tensor(E2M1)[codes.long()]


def nvfp4(shape: torch.Size, seed: int, *, divides: bool = True) -> Made:
    packed, numbers = _fp4(shape, seed)
    scales = (_scales([shape[0], shape[1] // 8], seed + 1) * 8).to(torch.float8_e4m3fn)
    whole = torch.tensor([3.0])
    factors = scales.float() / whole if divides else scales.float() * whole
    if divides:
        stored = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": whole}
    else:
        stored = {"weight": packed, "weight_scale": scales, "weight_scale_2": whole.view(())}
    return Made(stored, by_global_index(numbers, factors, (1, 8)))


def _compressed(form: str, bits: int, kind: str, strategy: str, **weights: Any) -> dict[str, Any]:
    given = {"symmetric": True, "num_bits": bits, "type": kind, "strategy": strategy, **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": given}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


_FP8 = {"quant_method": "fp8", "weight_block_size": [16, 24]}
_INT4 = ("pack-quantized", 4, "int", "group")
_UNEVEN = {"group_size": 8, "symmetric": False}
KINDS: dict[str, tuple[Callable[[torch.Size, int], Made], dict[str, Any]]] = {
    "fp8 blocks": (fp8_blocks, _FP8),
    "fp8 blocks, scale": (partial(fp8_blocks, name="scale"), _FP8),
    "fp8 blocks, ue8m0": (fp8_ue8m0, _FP8),
    "fp8 of a tensor": (fp8_tensor, {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8 of rows": (fp8_rows, _compressed("float-quantized", 8, "float", "channel")),
    "int8 of rows": (int8_rows, _compressed("int-quantized", 8, "int", "channel")),
    "int8 with zero points": (int8_zeros, _compressed("int-quantized", 8, "int", "channel", symmetric=False)),
    "int4 of groups": (int4_groups, _compressed(*_INT4, group_size=8)),
    "int4 with zero points": (
        partial(int4_groups, has_zeros=True),
        _compressed(*_INT4, **_UNEVEN, actorder="static"),
    ),
    "int4 in any order": (
        partial(int4_groups, has_zeros=True, in_order=False),
        _compressed(*_INT4, **_UNEVEN, actorder="group"),
    ),
    "nvfp4": (nvfp4, _compressed("nvfp4-pack-quantized", 4, "float", "tensor_group", group_size=8)),
}


def is_quantized(key: str, tensor: torch.Tensor) -> bool:
    return tensor.ndim == 2 and key.endswith("proj.weight")


def quantize(folder: Path, kind: str, kinds: Mapping[str, Any] = KINDS) -> dict[str, torch.Tensor]:
    """Rewrite a checkpoint in place; its tensors as numbers. Scales stand in a file of their own."""
    make, config = kinds[kind]
    numbers: dict[str, torch.Tensor] = {}
    scales: dict[str, torch.Tensor] = {}
    where: dict[str, str] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        stored: dict[str, torch.Tensor] = {}
        for key, tensor in load_file(file).items():
            if not is_quantized(key, tensor):
                stored[key] = numbers[key] = tensor
                continue
            made = make(tensor.shape, len(numbers))
            numbers[key] = made.numbers
            for name, part in made.stored.items():
                place = stored if name in ("weight", "weight_packed") else scales
                place[key.removesuffix("weight") + name] = part.contiguous()
        save_file(stored, file, metadata={"format": "pt"})
        where |= dict.fromkeys(stored, file.name)
    save_file(scales, folder / "scales.safetensors", metadata={"format": "pt"})
    where |= dict.fromkeys(scales, "scales.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    change_json(folder / "config.json", quantization_config=config)
    return numbers


def folders_of(
    plain: Path, factory: Any, kinds: Mapping[str, Any]
) -> Callable[[str], tuple[Path, dict[str, torch.Tensor]]]:
    """By kind, a folder and its numbers, made when it is first asked for."""

    @cache
    def of(kind: str) -> tuple[Path, dict[str, torch.Tensor]]:
        folder = shutil.copytree(plain, factory.mktemp("quantized") / "base")
        return folder, quantize(folder, kind, kinds)

    return of


def go_through(folder: str, numbers: dict[str, torch.Tensor], mesh: str, budget_bytes: int, out: str) -> list[str]:
    """Load on these ranks, into a model that is there and from nothing; what is wrong."""
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if dist.is_initialized():
        load_cases.MESHES[mesh](model)
    options = shardwise.options.LoadOptions(budget_bytes=budget_bytes, progress=False)
    report = shardwise.load(model, folder, options=options)
    faults = differing(model, numbers)
    assert report.estimate is not None
    # An estimate counts no gaps between columns, and no groups read twice within a small budget.
    foreseen, most = report.estimate.read_bytes, report.checkpoint_bytes
    if not 0.9 * foreseen - 4096 < report.read_bytes < max(1.1 * foreseen, 3 * most) + 4096:
        faults.append(f"read {report.read_bytes} of {most}, foreseen {foreseen}")
    whole = shardwise.from_pretrained(folder, dtype="bfloat16", options=options)
    faults += differing(whole, {key: tensor.bfloat16() for key, tensor in numbers.items()})
    shardwise.save(whole, out)
    if "quantization_config" in json.loads(Path(out, "config.json").read_text()):
        faults.append("what was saved is said to be quantized")
    saved = tensors_of(Path(out))
    faults += [
        f"{key} is saved otherwise" for key in numbers if not torch.equal(saved[key], numbers[key].bfloat16())
    ]
    return faults


def differing(model: nn.Module, numbers: dict[str, torch.Tensor]) -> list[str]:
    found = dict(shardwise.iter_hf_tensors(model))
    faults = [f"{key} is missing, or too much" for key in found.keys() ^ numbers.keys()]
    return faults + [f"{key} has other values" for key in numbers if not torch.equal(found[key], numbers[key])]
