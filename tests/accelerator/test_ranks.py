"""Loads, saves, checkpoints and training on simulated devices have the bits of the CPU.

One device: ``test_gpu_suite.py``, and here in the slow suite.
"""

from pathlib import Path

import pytest
import torch
from tests import zoo
from tests.accelerator import checks
from tests.accelerator.ranks import simulated_ranks
from tests.integrations import runs
from tests.integrations.requirements import require_patched_names
from tests.quantized import quantizing
from tests.quantized.requirements import needs_packed_shards
from tests.truth import unlike

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module", params=[2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 4))])
def ranks(request, library):
    with simulated_ranks(request.param) as found:
        yield found


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> str:
    return written("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory) -> str:
    return written("mixtral", tmp_path_factory.mktemp("mixtral"))


@pytest.fixture(scope="module")
def fp8(tmp_path_factory) -> str:
    folder = written("llama", tmp_path_factory.mktemp("fp8"))
    quantizing.quantize(Path(folder), "fp8 blocks")
    return folder


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
def test_loads(ranks, llama, fp8, what):
    require_same(ranks, checks.loads, fp8 if what == "fp8" else llama, what)


def test_loads_of_experts(ranks, mixtral):
    require_same(ranks, checks.loads, mixtral, "float32")


def test_a_load_that_does_not_wait_is_found_out(ranks, llama):
    assert all(ranks.run(checks.loads_without_a_wait, llama))


def test_a_model_of_the_host_is_sharded(ranks):
    require_same(ranks, checks.shards)


def test_saves_and_streams(ranks, mixtral, tmp_path):
    require_same(ranks, checks.saves, mixtral, str(tmp_path))


def test_steps_and_states(ranks, llama):
    require_same(ranks, checks.steps, llama)


def test_offloaded_parameters(ranks, llama):
    require_same(ranks, checks.offloads, llama)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_checkpoints(ranks, llama, tmp_path, mode):
    require_same(ranks, checks.checkpoints, llama, str(tmp_path), mode)


def test_a_checkpoint_that_does_not_wait_is_found_out(ranks, llama, tmp_path):
    require_same(ranks, checks.checkpoints_without_a_wait, llama, str(tmp_path))


def test_a_bank(ranks, llama):
    require_same(ranks, checks.banks, llama)


@pytest.mark.slow
def test_a_trainer(ranks, worlds, tmp_path):
    """With an optimizer of one operation a parameter, whose sums are alike on every device."""
    require_patched_names()
    folder = runs.write(tmp_path)
    run = runs.Run(str(folder), arguments={"optim": "sgd"})
    here = worlds(ranks.size).run(checks.trainer, run.but(arguments={**run.arguments, "output_dir": f"{folder}/1"}))
    there = ranks.run(
        checks.trainer, run.but(arguments={**run.arguments, "output_dir": f"{folder}/2", "use_cpu": False})
    )
    for one, other in zip(there, here, strict=True):
        assert unlike(one, other) == []


def test_values_between_device_and_files_are_not_copied_through_pageable_memory(ranks, llama, fp8, tmp_path):
    require_same(ranks, checks.copies_through_pageable_memory, llama, fp8, str(tmp_path))


def test_a_backend_whose_first_collective_fails_is_named(ranks):
    for told in ranks.run(checks.a_first_collective_that_fails):
        assert told.startswith("hccl: the first collective failed on rank")
        assert "Duplicate GPU detected" in told
