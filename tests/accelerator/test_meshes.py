"""Meshes of context and tensor parallelism, on simulated devices: the same bits as on the CPU."""

import pytest
import torch
from tests.accelerator import checks
from tests.accelerator.ranks import simulated_ranks
from tests.accelerator.test_ranks import written
from tests.truth import unlike
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, LlamaForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

import shardwise

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def flattened(folder: str) -> list[str]:
    """A model on an axis that is made of two."""
    mesh = init_device_mesh("npu", (1, 2), mesh_dim_names=("dp_shard", "cp"))
    sharding = shardwise.Sharding(mesh=mesh["dp_shard", "cp"]._flatten("dp_shard_cp"))
    with checks.late_copies():
        there, here = checks.both(folder, sharding=sharding)
    return unlike(checks.own_values(there), checks.own_values(here))


def by_plans(folder: str) -> list[str]:
    """A model that transformers' plans split, beside the whole one."""
    given, _, meshes = LlamaForCausalLM.prepare_distribute_model(DistributedConfig(tp_size=2))
    with torch.device("meta"):
        model = LlamaForCausalLM(AutoConfig.from_pretrained(folder))
    model = LlamaForCausalLM.maybe_distribute_model(model, given, meshes)
    with checks.late_copies():
        shardwise.load(model, folder)
    whole = shardwise.from_pretrained(folder, dtype="float32", sharding=checks.on_host())
    states = [shardwise.get_model_state_dict(each, "full_on_all_ranks") for each in (model, whole)]
    return unlike(*states)


@pytest.mark.parametrize("check", [flattened, by_plans], ids=lambda check: check.__name__)
def test_loads(library, tmp_path, check):
    with simulated_ranks(2) as ranks:
        for differing in ranks.run(checks.told, check, written("llama", tmp_path)):
            assert not differing, "\n".join(differing)
