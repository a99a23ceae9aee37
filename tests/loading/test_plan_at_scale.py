"""Plans at the shapes of large models: balance, reads and time."""

import time

import pytest
from peft import LoraConfig
from tests.loading import real_shapes
from tests.loading.real_shapes import deepseek_v3, in_float8, qwen3_235b
from tests.support.speed import slowness

from shardwise.core.layout import MeshShape
from shardwise.models.tunings import Lora


def forecast_of(shapes, mesh, *, index=None, **more):
    options = {"model_class": shapes.model_class, "dtype": "bfloat16", **more}
    return real_shapes.forecast_of(shapes.config, index or shapes.index(), mesh, **options)


def assert_sound(made, shapes, mesh):
    """Every stored byte is read once, and ranks hold and read alike."""
    held = [rank.shard_bytes for rank in made.ranks]
    assert max(held) <= 1.1 * sum(held) / mesh.ranks
    assert max(rank.read_bytes for rank in made.ranks) <= 1.1 * made.read_bytes / mesh.ranks
    assert made.read_bytes == pytest.approx(made.checkpoint_bytes, rel=1e-4)


@pytest.mark.parametrize("shapes", [qwen3_235b(4), deepseek_v3(5)], ids=["qwen3", "deepseek"])
def test_a_few_layers_are_dealt_evenly(shapes):
    mesh = MeshShape.flat(64)
    assert_sound(forecast_of(shapes, mesh), shapes, mesh)


def test_codes_and_their_scales_are_read_once():
    shapes = deepseek_v3(5)
    made = forecast_of(shapes, MeshShape.flat(16), index=in_float8(shapes.index()))
    assert made.read_bytes == pytest.approx(made.checkpoint_bytes, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("shapes", [qwen3_235b(), deepseek_v3()], ids=["qwen3-235b", "deepseek-v3"])
def test_whole_models_on_a_thousand_ranks(shapes):
    mesh = MeshShape.flat(1024)
    start = time.process_time()
    made = forecast_of(shapes, mesh)
    assert time.process_time() - start < 30 * slowness()
    assert_sound(made, shapes, mesh)


@pytest.mark.slow
def test_training_of_a_thousand_ranks():
    """Blocks that are alike run once, so that layers cost little."""
    step = {"per_device_train_batch_size": 1, "max_length": 4096, "gradient_checkpointing": True}
    tuning = Lora(LoraConfig(r=16, target_modules=["q_proj", "v_proj"]))
    abbreviate, more = (
        forecast_of(qwen3_235b(layers), MeshShape.flat(1024), tuning=tuning, **step).training for layers in (2, 4)
    )
    kept = [made.phases[1].device["activations"] for made in (abbreviate, more)]
    layer = 4096 * 4096 * 2
    assert kept[1] - kept[0] == pytest.approx(2 * layer, rel=0.01)
