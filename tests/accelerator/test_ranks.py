"""Loads, saves, checkpoints, training and computing on two simulated devices have the bits of the CPU.

One device: ``test_gpu_suite.py``. All tests are in one file, whose ranks are started once.
"""

import contextlib
import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tests import zoo
from tests.accelerator import checks, simulated
from tests.accelerator.ranks import simulated_ranks
from tests.integrations import runs
from tests.integrations.accelerating import launched
from tests.integrations.requirements import require_patched_names
from tests.quantized import bitsandbytes_files, quantizing
from tests.quantized.requirements import needs_packed_shards
from tests.support.world import run_forked as run_world
from tests.training import on_ranks
from tests.truth import unlike
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, LlamaForCausalLM, TrainerCallback
from transformers.distributed.configuration_utils import DistributedConfig

import shardwise
from shardwise.core.computed import ComputeTask
from shardwise.ranks.world import World
from shardwise.serve.engine import Engine
from shardwise.serve.operations import CreateModel, OffloadModels, Refusal, Turn
from shardwise.transfer import device_computing, read

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> str:
    return written("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory) -> str:
    return written("mixtral", tmp_path_factory.mktemp("mixtral"))


def written(name: str, folder: Path) -> str:
    (specimen,) = (item for item in zoo.causal_lm_specimens() if item.name == name)
    torch.manual_seed(0)
    zoo.save_original(zoo.build(specimen), folder)
    return str(folder)


def require_same(ranks, check, *args) -> None:
    for differing in ranks.run(checks.told, check, *args):
        assert not differing, "\n".join(differing)


@pytest.mark.parametrize(
    "what",
    [pytest.param(what, marks=[needs_packed_shards] if "nf4" in what else []) for what in checks.LOADS],
)
def test_loads(two_ranks, llama, stored, what):
    require_same(two_ranks, checks.loads, stored("fp8 blocks") if what == "fp8" else llama, what)


def test_loads_of_experts(two_ranks, mixtral):
    require_same(two_ranks, checks.loads, mixtral, "float32")


def test_a_load_that_does_not_wait_is_found_out(two_ranks, llama):
    assert all(two_ranks.run(checks.loads_without_a_wait, llama))


def test_a_model_of_the_host_is_sharded(two_ranks):
    require_same(two_ranks, checks.shards)


def test_saves_and_streams(two_ranks, mixtral, tmp_path):
    require_same(two_ranks, checks.saves, mixtral, str(tmp_path))


def test_saves_and_streams_by_a_group_that_moves_no_tensors_of_the_host(two_ranks, llama, tmp_path):
    require_same(two_ranks, checks.saves_by_the_device_alone, llama, str(tmp_path))


@pytest.mark.parametrize("backend", ["cpu:gloo,npu:hccl", "hccl"])
def test_ranks_that_neither_send_nor_receive_are_in_the_others_collective(two_ranks, backend):
    assert two_ranks.run(checks.moves_of_ranks_without_bytes, backend) == [1, 1]


def test_steps_and_states(two_ranks, llama):
    require_same(two_ranks, checks.steps, llama)


def test_offloaded_parameters(two_ranks, llama):
    require_same(two_ranks, checks.offloads, llama)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_checkpoints(two_ranks, llama, tmp_path, mode):
    require_same(two_ranks, checks.checkpoints, llama, str(tmp_path), mode)


def test_a_checkpoint_that_does_not_wait_is_found_out(two_ranks, llama, tmp_path):
    require_same(two_ranks, checks.checkpoints_without_a_wait, llama, str(tmp_path))


def test_a_bank(two_ranks, llama):
    require_same(two_ranks, checks.banks, llama)


def idles(folder: str) -> list[Any]:
    """A server's outcomes of moving a model to the host, where rank 1 lacks memory for a tensor, and of a pass."""
    model: Any = shardwise.from_pretrained(folder, dtype="float32")
    bank = shardwise.AdapterBank(model)
    engine = Engine(World.current(call="test"), bank, model)
    engine.run(Turn((CreateModel("create", "ada", 4, 7, frozenset(("attn",))),)))
    bank.forward_backward([("ada", checks.rows(0, 0))])
    copies = mock.patch.object(torch.Tensor, "cpu", side_effect=[torch.zeros(1), RuntimeError("no memory")])
    with copies if dist.get_rank() == 1 else contextlib.nullcontext():
        outcomes = engine.run(Turn((OffloadModels("offload", ("ada",)),)))
    size = bank._adapters["ada"].flat.untyped_storage().nbytes()
    loss = bank.forward_backward([("ada", checks.rows(0, 1))]).requests[0].loss
    return [outcomes["offload"], size > 0, loss]


def test_a_server_whose_host_has_no_memory_for_an_idle_model_goes_on(two_ranks, llama):
    first, second = two_ranks.run(idles, llama)
    refusal = Refusal("CheckpointError on the server, whose log has the reason", is_users=False)
    assert first == [refusal, False, second[2]]
    assert second == [refusal, True, first[2]]


@pytest.mark.slow
def test_a_trainer(two_ranks, worlds, tmp_path):
    """With an optimizer of one operation a parameter, whose sums are alike on every device."""
    require_patched_names()
    folder = runs.write(tmp_path)
    run = runs.Run(str(folder), arguments={"optim": "sgd"})
    here = worlds(2).run(checks.trainer, run.but(arguments={**run.arguments, "output_dir": f"{folder}/1"}))
    there = two_ranks.run(
        checks.trainer, run.but(arguments={**run.arguments, "output_dir": f"{folder}/2", "use_cpu": False})
    )
    for one, other in zip(there, here, strict=True):
        assert unlike(one, other) == []


@pytest.mark.slow
def test_a_teacher_whose_parameters_are_offloaded(library, tmp_path):
    """TRL reads its head on the device. Ranks of their own, because a training ends their process group."""
    require_patched_names()
    folder = on_ranks.prepare(tmp_path)
    values = {"method": "distillation", "model_name_or_path": str(folder / "model"), "max_completion_length": 8}
    values |= {"dataset_name": str(folder / "prompts.jsonl"), "max_length": None, "optim": "sgd"}
    values |= {"teacher_model_name_or_path": str(on_ranks.write_teacher(folder)), "attn_implementation": "eager"}
    with simulated_ranks(1) as rank:
        [(_, losses)] = rank.run(on_ranks.train, {**values, "cpu_offload": True, "output_dir": f"{folder}/1"})
    [(_, expected)] = run_world(1, on_ranks.train, {**values, "output_dir": f"{folder}/2"})
    assert len(losses) == 3
    assert losses == pytest.approx(expected, abs=1e-5)


def test_values_between_device_and_files_are_not_copied_through_pageable_memory(two_ranks, llama, stored, tmp_path):
    require_same(two_ranks, checks.copies_through_pageable_memory, llama, stored("fp8 blocks"), str(tmp_path))


def test_a_backend_whose_first_collective_fails_is_named(two_ranks):
    for told in two_ranks.run(checks.a_first_collective_that_fails):
        assert told.startswith("hccl: the first collective failed on rank")
        assert "Duplicate GPU detected" in told


# Stored forms are decoded and packed on the accelerator

Fp4, Nf4 = shardwise.options.Fp4, shardwise.options.Nf4
SMALL = shardwise.options.LoadOptions(budget_bytes=checks.BUDGET_BYTES)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The folder of a model, as numbers or in a stored form, made when it is first asked for."""
    made: dict[str, str] = {}

    def folder_of(kind: str) -> str:
        if kind not in made:
            made[kind] = written("llama", tmp_path_factory.mktemp("model"))
            if kind == "bitsandbytes":
                bitsandbytes_files.pack(made[kind], bitsandbytes_files.by_hand)
                made[kind] += "-packed"
            elif kind != "numbers":
                quantizing.quantize(Path(made[kind]), kind)
        return made[kind]

    return folder_of


def computes(folder: str, keywords: dict[str, Any]) -> list[str]:
    """What differs from a load on the CPU. Nothing is computed on the host."""
    there_alone = mock.patch.object(ComputeTask, "evaluate", side_effect=AssertionError("computed on the host"))
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
        ("bitsandbytes", "bfloat16"),
    ],
)
def test_decoding(two_ranks, stored, kind, dtype):
    require_same(
        two_ranks, computes, stored(kind), {"dtype": dtype, "quantization": "dequantize", "options": SMALL}
    )


@needs_packed_shards
@pytest.mark.parametrize("form", [Nf4(block_size=32), Fp4(block_size=32)], ids=["nf4", "fp4"])
@pytest.mark.parametrize("kind", ["numbers", "fp8 blocks"])
def test_packing(two_ranks, stored, kind, form):
    require_same(two_ranks, computes, stored(kind), {"dtype": "bfloat16", "quantization": form})


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
    with mock.patch.object(ComputeTask, "evaluate", autospec=True, side_effect=ComputeTask.evaluate) as evaluate:
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


# Meshes of context and tensor parallelism


def flattened(folder: str) -> list[str]:
    """A model on an axis that is made of two."""
    mesh = init_device_mesh("npu", (1, 2), mesh_dim_names=("dp_shard", "cp"))
    sharding = shardwise.Sharding(mesh=mesh["dp_shard", "cp"]._flatten("dp_shard_cp"))
    with checks.late_copies():
        there, here = checks.both(folder, sharding=sharding)
    return unlike(checks.own_values(there), checks.own_values(here))


def by_plans(folder: str) -> list[str]:
    """A model that transformers' plans split, beside the whole one."""
    with launched():  # or else this rank would take the first device
        given, _, meshes = LlamaForCausalLM.prepare_distribute_model(DistributedConfig(tp_size=2))
    with torch.device("meta"):
        model = LlamaForCausalLM(AutoConfig.from_pretrained(folder))
    model = LlamaForCausalLM.maybe_distribute_model(model, given, meshes)
    with checks.late_copies():
        shardwise.load(model, folder)
    whole = shardwise.from_pretrained(folder, dtype="float32", sharding=checks.on_host())
    states = [shardwise.get_model_state_dict(each, "full_on_all_ranks") for each in (model, whole)]
    return unlike(*states)


@pytest.mark.slow
@pytest.mark.parametrize("check", [flattened, by_plans], ids=lambda check: check.__name__)
def test_loads_on_meshes(two_ranks, llama, check):
    require_same(two_ranks, check, llama)


# How often the host waits in a step of the Trainer, and in a pass of experts

WITHOUT_MASKS = mock.patch("transformers.masking_utils.find_packed_sequence_indices", return_value=None)
"""transformers looks for packed rows in the positions, and waits for the answer, in each forward pass."""

WAITS = ("host_waits", "pageable_to_device", "pageable_to_host")


class _Marks(TrainerCallback):
    """Counters at the beginnings of steps, and where losses are logged."""

    def __init__(self) -> None:
        self.found: list[tuple[str, dict[str, int]]] = []

    def on_step_begin(self, *_given: Any, **_others: Any) -> None:
        self.found.append(("step", simulated.counters()))

    def on_log(self, *_given: Any, **_others: Any) -> None:
        self.found.append(("log", simulated.counters()))


def steps(folder: str, out: str, by: str, model: str = "whole") -> dict[str, list[list[int]]]:
    """Waits between two marks, without those of the first step. Every third loss is logged."""
    arguments = {
        "output_dir": out,
        "use_cpu": False,
        "max_steps": 6,
        "logging_steps": 3,
        "logging_nan_inf_filter": False,
        "gradient_accumulation_steps": 1,
    }
    with launched(), WITHOUT_MASKS:
        trainer = runs.made(runs.Run(folder, model=model, by=by, arguments=arguments))
        trainer.add_callback(marks := _Marks())
        trainer.train()
    found: dict[str, list[list[int]]] = {}
    for (one, before), (other, after) in itertools.pairwise(marks.found[1:]):
        found.setdefault(f"{one} to {other}", []).append([after[name] - before[name] for name in WAITS])
    return found


def test_steps_of_the_trainer(two_ranks, tmp_path):
    require_patched_names()
    folder = str(runs.write(tmp_path / "models"))
    ours, theirs = (two_ranks.run(steps, folder, str(tmp_path / by), by)[0] for by in ("shardwise", "patches"))
    assert ours["step to step"] == [[0, 0, 0]] * 3
    assert ours["log to step"] == [[0, 0, 0]]
    assert ours["step to log"] == theirs["step to log"]
    assert [waits for waits, *_ in theirs["step to step"]] == [2] * 3, "for batches that are not in pinned memory"
    averaged = two_ranks.run(steps, folder, str(tmp_path / "lora"), "shardwise", "replicated lora")[0]
    assert averaged["step to step"] == [[0, 0, 0]] * 3


def experts(folder: str) -> dict[str, list[int]]:
    """Waits in a forward pass of two layers, after a first one."""
    model: Any = shardwise.from_pretrained(folder, dtype="bfloat16")
    tokens, found = torch.randint(0, 60, (2, 8)).to("npu"), {}
    for implementation in ("grouped_mm", "batched_mm"):
        model.set_experts_implementation(implementation)
        for _ in range(2):
            with simulated.counting() as counts, torch.no_grad(), WITHOUT_MASKS:
                model(input_ids=tokens, use_cache=False)
        found[implementation] = [counts[name] for name in WAITS]
    return found


def test_a_pass_of_experts(two_ranks, mixtral):
    """torch's grouped product waits twice in a layer, for the rows of each expert, where it has no kernel."""
    expected = {"grouped_mm": [4, 0, 4], "batched_mm": [0, 0, 0]}
    assert two_ranks.run(experts, mixtral) == [expected] * 2
