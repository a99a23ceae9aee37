"""A model of codes and scales alone, loaded from a checkpoint of weights in bfloat16, on some ranks."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tests.verbs import scaling
from torch import nn
from torch.distributed.fsdp import fully_shard

import shardwise
from shardwise.conversion.expression import Expression, stack
from shardwise.conversion.four_bit import dequantize_rows, quantize_rows, scales_in
from shardwise.conversion.packed import quantized
from shardwise.errors import FormatError
from shardwise.formats.contract import CheckpointIndex
from shardwise.planning.load_memory import stored_tensors
from shardwise.tensors import DType, Form4

BLOCK = 64
SHAPES = {"linear": (37, 192), "experts": (5, 24, 128)}


class CodesAndScales(nn.Module):
    """Of each weight ``name.packed`` and ``name.absmax``, as bytes."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            held = nn.Module()
            for part, width in (("packed", shape[-1] // 2), ("absmax", 4 * shape[-1] // BLOCK)):
                empty = torch.empty(*shape[:-1], width, dtype=torch.uint8, device="meta")
                held.register_parameter(part, nn.Parameter(empty, requires_grad=False))
            self.add_module(name, held)


def store(folder: Path, bad: tuple[str, int] | None = None) -> None:
    """Weights, those of the experts each by itself; one row of one not finite."""
    generator = torch.Generator().manual_seed(0)
    tensors = {"linear.weight": torch.randn(*SHAPES["linear"], generator=generator).bfloat16()}
    count, *shape = SHAPES["experts"]
    for number in range(count):
        tensors[f"experts.{number}.weight"] = torch.randn(*shape, generator=generator).bfloat16()
    if bad is not None:
        tensors[bad[0]][bad[1], 3] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def in_four_bits(index: CheckpointIndex) -> dict[str, Expression]:
    found = stored_tensors(index)
    experts = [found[f"experts.{number}.weight"] for number in range(SHAPES["experts"][0])]
    made = {}
    for name, weight in (("linear", found["linear.weight"]), ("experts", stack(experts, 0))):
        made[f"{name}.packed"], made[f"{name}.absmax"] = quantized(weight, BLOCK, Form4.NF4, DType.BF16)
    return made


@contextlib.contextmanager
def understood() -> Iterator[None]:
    """Every verb takes weights for codes and scales."""
    with patch.object(scaling, "with_scales", in_four_bits), scaling.understood():
        yield


def go_through(folder: str, budget_bytes: int) -> list[str]:
    """Load on these ranks; what is not as the weights whole, quantized at once, or not as foreseen."""
    model = CodesAndScales()
    if dist.is_initialized():
        fully_shard(model)
    options = shardwise.options.LoadOptions(budget_bytes=budget_bytes, progress=False)
    with understood():
        report = shardwise.load(model, folder, options=options)
    assert report.estimate is not None
    is_read_once = abs(report.read_bytes - report.estimate.read_bytes) <= 0.1 * report.estimate.read_bytes + 4096
    faults = [] if is_read_once else ["read other bytes than foreseen"]
    stored = load_file(Path(folder, "model.safetensors"))
    experts = torch.stack([stored[f"experts.{number}.weight"] for number in range(SHAPES["experts"][0])])
    state = {
        name: tensor.full_tensor() if dist.is_initialized() else tensor
        for name, tensor in model.state_dict().items()
    }
    for name, weight in (("linear", stored["linear.weight"]), ("experts", experts)):
        packed, raw = (torch.empty_like(state[f"{name}.{part}"]) for part in ("packed", "absmax"))
        quantize_rows(weight, BLOCK, Form4.NF4, packed, scales_in(raw))
        for part, wanted in (("packed", packed), ("absmax", raw)):
            if not torch.equal(state[f"{name}.{part}"], wanted):
                faults.append(f"{name}.{part}")
        numbers = torch.empty(weight.shape)
        dequantize_rows(state[f"{name}.packed"], scales_in(state[f"{name}.absmax"]), BLOCK, Form4.NF4, numbers)
        if (numbers - weight).abs().max() > 0.16 * weight.abs().max():
            faults.append(f"{name} is far from what it was")
    return faults


def fault_of(folder: str) -> str:
    """What a load says on this rank that cannot be."""
    try:
        go_through(folder, 1 << 22)
    except FormatError as error:
        return str(error)
    return "nothing"
