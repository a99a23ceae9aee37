"""Stored forms are decoded and packed on the accelerator during a load, with the bits of the CPU."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.accelerator import checks, simulated
from tests.accelerator.test_ranks import require_same, written
from tests.quantized import quantizing
from tests.quantized.requirements import needs_packed_shards
from tests.truth import unlike

import shardwise
from shardwise.transfer import device_computing, read

pytestmark = pytest.mark.distributed

Fp4, Nf4 = shardwise.options.Fp4, shardwise.options.Nf4
SMALL = shardwise.options.LoadOptions(budget_bytes=checks.BUDGET_BYTES)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The folder of a model, as numbers or in a stored form, made when it is first asked for."""
    made: dict[str, str] = {}

    def folder_of(kind: str) -> str:
        if kind not in made:
            made[kind] = written("llama", tmp_path_factory.mktemp("model"))
            if kind != "numbers":
                quantizing.quantize(Path(made[kind]), kind)
        return made[kind]

    return folder_of


def loads(folder: str, keywords: dict[str, Any]) -> list[str]:
    """What differs from a load on the CPU. Nothing is computed on the host."""
    there_alone = mock.patch.object(read, "evaluate", side_effect=AssertionError("computed on the host"))
    with checks.late_copies(), there_alone:
        there = shardwise.from_pretrained(folder, **keywords)
    here = shardwise.from_pretrained(folder, **keywords, sharding=checks.on_host())
    return unlike(checks.own_values(there), checks.own_values(here))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("fp8 blocks", "bfloat16"),
        ("fp8 blocks", "float32"),
        ("fp8 of a tensor", "bfloat16"),
        ("nvfp4", "bfloat16"),
        ("int4 with zero points", "bfloat16"),
    ],
)
def test_decoding(two_ranks, stored, kind, dtype):
    require_same(two_ranks, loads, stored(kind), {"dtype": dtype, "options": SMALL})


@needs_packed_shards
@pytest.mark.parametrize("form", [Nf4(block_size=32), Fp4(block_size=32)], ids=["nf4", "fp4"])
@pytest.mark.parametrize("kind", ["numbers", "fp8 blocks"])
def test_packing(two_ranks, stored, kind, form):
    require_same(two_ranks, loads, stored(kind), {"dtype": "bfloat16", "quantization": form})


def changed(source: str, folder: Path, name: str, value: int | float) -> str:
    """A copy of a model in which the first element of the first tensor of this kind is another."""
    for file in Path(source).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    files = folder.glob("*.safetensors")
    file, key = min((file, key) for file in files for key in load_file(file) if key.endswith(name))
    tensors = load_file(file)
    changed = tensors[key]
    (changed.view(torch.uint8) if changed.itemsize == 1 else changed).view(-1)[0] = value
    save_file(tensors, file, {"format": "pt"})
    return str(folder)


def blocks_on_the_host(folder: str) -> int:
    with mock.patch.object(read, "evaluate", wraps=read.evaluate) as evaluate:
        there = shardwise.from_pretrained(folder, dtype="bfloat16")
    here = shardwise.from_pretrained(folder, dtype="bfloat16", sharding=checks.on_host())
    assert unlike(checks.own_values(there), checks.own_values(here)) == []
    return evaluate.call_count


def test_weights_that_are_not_numbers_are_decoded_on_the_host(two_ranks, stored, tmp_path):
    """Code 0x7F of F8_E4M3 is NaN, whose bits differ between devices."""
    folder = changed(stored("fp8 blocks"), tmp_path, "q_proj.weight", 0x7F)
    assert sorted(two_ranks.run(blocks_on_the_host, folder)) == [0, 1]


def errors(folder: str) -> list[str]:
    """Messages on the devices and on the CPU."""
    found = []
    for sharding in (shardwise.Sharding(), checks.on_host()):
        try:
            shardwise.from_pretrained(folder, dtype="bfloat16", sharding=sharding)
        except shardwise.FormatError as error:
            found.append(str(error))
    return found


def test_a_scale_that_is_not_finite_is_the_same_error(two_ranks, stored, tmp_path):
    folder = changed(stored("fp8 blocks"), tmp_path, "q_proj.weight_scale_inv", float("inf"))
    for there, here in two_ranks.run(errors, folder):
        assert there == here
        assert "q_proj.weight_scale_inv: dequantizing: a scale is NaN or infinite" in there


def loads_on_another_device(folder: str) -> list[str]:
    """As on a device that flushes subnormal numbers."""
    own = device_computing._results

    def flushed(numbers: torch.Tensor) -> torch.Tensor:
        found = own(numbers)
        return found if numbers.is_cpu else torch.where(found.abs() < 2**-126, 0, found)

    device = torch.device("npu", torch.npu.current_device())
    assert device_computing.matches_cpu_bitwise(device)
    device_computing.matches_cpu_bitwise.cache_clear()
    with mock.patch.object(device_computing, "_results", flushed):
        assert not device_computing.matches_cpu_bitwise(device)
        found = checks.loads(folder, "fp8")
    device_computing.matches_cpu_bitwise.cache_clear()
    return found


def test_a_device_with_other_bits_computes_nothing(two_ranks, stored):
    require_same(two_ranks, loads_on_another_device, stored("fp8 blocks"))


def costs(folder: str) -> dict[str, int]:
    """What the reads of a load take beyond the model, and how they copy and wait."""
    read_into, found = read.ReadExecutor.read_into, dict[str, int]()

    def counted(executor: Any, *given: Any) -> None:
        simulated.native.reset_peaks()
        before = simulated.counters()
        read_into(executor, *given)
        found.update({name: value - before[name] for name, value in simulated.counters().items()})

    with mock.patch.object(read.ReadExecutor, "read_into", counted):
        for _ in range(2):  # the first keeps tables
            shardwise.from_pretrained(folder, dtype="bfloat16", options=SMALL)
    return found


def test_reads_keep_to_the_budget(two_ranks, stored):
    """Each request is one copy from pinned memory, before which its worker may wait for an earlier one."""
    for found in two_ranks.run(costs, stored("fp8 blocks")):
        assert found["pageable_to_device"] == found["pageable_to_host"] == 0
        assert found["pinned_peak"] <= checks.BUDGET_BYTES
        assert found["device_peak"] <= checks.BUDGET_BYTES
        assert found["host_waits"] <= found["pinned_to_device"] + 4
