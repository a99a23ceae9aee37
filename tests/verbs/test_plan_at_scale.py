"""Plans at the shapes of large models: balance, tiling, files and time."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.verbs.real_shapes import Shapes, deepseek_v3, qwen3_235b, sixty_layers_of_experts

from shardwise.engines.forecasting import forecast
from shardwise.engines.outline import Outline, outline
from shardwise.layout import MeshShape, Origin
from shardwise.models import transformers_compat as compat
from shardwise.models.initialize import Initialisers
from shardwise.models.view import look_inside
from shardwise.models.wrapping.forecast_layout import foresee
from shardwise.models.wrapping.policies import Automatic
from shardwise.planning.forecasts.footprint import Footprints, Reading
from shardwise.planning.forecasts.own_forecast import Homes, forecast_rank
from shardwise.planning.loads.load_plan import Consent, ModelRules, plan_load
from shardwise.planning.moves.exchange import WantedBoxes
from shardwise.planning.moves.intervals import handed_over, intervals
from shardwise.planning.moves.sharing_choice import InIntervals
from shardwise.storage.policies import LOCAL

NOWHERE = Path("/nowhere")


def forecast_of(shapes, mesh, **more):
    options = {"model_class": shapes.model_class, "dtype": "bfloat16", **more}
    return forecast(NOWHERE, shapes.config, shapes.index(), mesh, LOCAL, options)


def assert_sound(made, shapes, mesh):
    """What must be true of a plan on any mesh that shards only, whatever the model."""
    assert made.held_imbalance <= 1.1
    assert made.read_imbalance <= 1.1
    assert made.checkpoint_files == shapes.files
    assert sum(rank.needed_bytes for rank in made.ranks) == pytest.approx(made.checkpoint_bytes, rel=1e-4)
    assert shapes.files <= made.file_opens <= shapes.files * mesh.ranks
    assert not made.notes or all("ranges of" in note for note in made.notes)


@pytest.mark.parametrize("ranks", [16, 64])
@pytest.mark.parametrize("shapes", [qwen3_235b(4), deepseek_v3(5)], ids=["qwen3", "deepseek"])
def test_a_few_layers_are_dealt_evenly(shapes, ranks):
    mesh = MeshShape.flat(ranks)
    assert_sound(forecast_of(shapes, mesh), shapes, mesh)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("shapes", "seconds"), [(qwen3_235b(), 60), (deepseek_v3(), 60)], ids=["qwen3-235b", "deepseek-v3"]
)
def test_whole_models_on_a_thousand_ranks(shapes, seconds):
    mesh = MeshShape.flat(1024)
    start = time.process_time()
    made = forecast_of(shapes, mesh)
    assert time.process_time() - start < seconds
    assert_sound(made, shapes, mesh)
    # Fewer experts than ranks: each has rows of every matrix, so it opens every file.
    assert made.file_opens > 0.99 * shapes.files * mesh.ranks


@pytest.mark.parametrize("ranks", [16, 96])
@pytest.mark.parametrize("shapes", [qwen3_235b(4), deepseek_v3(5)], ids=["qwen3", "deepseek"])
def test_intervals_of_a_few_layers(shapes, ranks):
    assert_read_in_intervals(shapes, MeshShape.flat(ranks))


def test_intervals_where_there_are_replicas():
    assert_read_in_intervals(qwen3_235b(4), MeshShape(("replicate", "shard"), (4, 8)))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("shapes", "seconds"), [(qwen3_235b(), 60), (deepseek_v3(), 60)], ids=["qwen3-235b", "deepseek-v3"]
)
def test_intervals_of_whole_models_on_a_thousand_ranks(shapes, seconds):
    start = time.process_time()
    assert_read_in_intervals(shapes, MeshShape.flat(1024))
    assert time.process_time() - start < seconds


def assert_read_in_intervals(shapes, mesh):
    made = forecast_of(shapes, mesh, shared_reads=InIntervals())
    assert made.file_opens <= shapes.files + mesh.ranks - 1
    assert made.read_bytes == made.checkpoint_bytes
    assert made.read_imbalance < 1.02
    assert not any("ranges of" in note for note in made.notes)
    assert set(made.read_once) == set(built_of(shapes, shapes.index()).model.state_dict())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_of_a_thousand_ranks_knows_soon_what_it_hands_over():
    """Of tens of millions of parcels it writes down its own, and the rounds are nearly full."""
    shapes, mesh, budget = qwen3_235b(), MeshShape.flat(1024), 64 << 20
    index = shapes.index()
    plan, world = plan_of(built_of(shapes, index), index, mesh)
    reads = {name: read.expression for name, read in plan.reads().items()}
    boxes = {
        spread: tuple(tuple(part.box for part in held) for held in spread.boxes)
        for spread in world.spreads.values()
    }
    wanted = [WantedBoxes(name, 2, boxes[world.spreads[name]]) for name in reads]
    start = time.process_time()
    rounds = handed_over(wanted, intervals(reads, index, mesh.ranks), budget, rank=511)
    assert time.process_time() - start < 30
    assert sum(len(items.parcels) for items in rounds) < 100_000
    taken = sum(p.nbytes for items in rounds for p in items.parcels if p.targets == (511,) or p.source != 511)
    assert taken == pytest.approx(index.nbytes / mesh.ranks, rel=0.02)
    assert len(rounds) < 1.3 * 2 * index.nbytes / (mesh.ranks * budget)


@pytest.mark.parametrize(("shapes", "ranks"), [(qwen3_235b(2), 96), (qwen3_235b(2), 8), (deepseek_v3(4), 48)])
def test_every_stored_byte_is_read_by_one_rank(shapes, ranks):
    """The ranges of all ranks lie side by side, from the first byte of every tensor to the last."""
    assert_tiled(shapes, ranks)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("shapes", [qwen3_235b(2), deepseek_v3(4)], ids=["qwen3", "deepseek"])
def test_every_stored_byte_is_read_by_one_of_a_thousand_ranks(shapes):
    assert_tiled(shapes, 1024)


def assert_tiled(shapes: Shapes, ranks: int) -> None:
    index = shapes.index()
    built = built_of(shapes, index)
    plan, world = plan_of(built, index, MeshShape.flat(ranks))
    # Persistent buffers are whole on every rank.
    sharded = {name: read for name, read in plan.reads().items() if world.first.by_name[name].placement != "whole"}
    wanted = [
        Reading(read.expression, world.spreads[name], world.first.by_name[name].dtype, on_device=True)
        for name, read in sharded.items()
    ]
    footprints = Footprints(
        MeshShape.flat(ranks), index, wanted, replace(LOCAL, max_gap_bytes=0), budget_bytes=1 << 28
    )
    found = [footprints.segments(position, on_device=True) for position in range(ranks)]
    starts = np.concatenate([item.starts for item in found])
    stops = np.concatenate([item.stops for item in found])
    order = np.argsort(starts)
    assert (stops[order][:-1] <= starts[order][1:]).all()
    buffers = sum(index.entries[name].nbytes for name in plan.reads() if name not in sharded)
    assert int((stops - starts).sum()) == index.nbytes - buffers


@pytest.mark.slow
def test_one_rank_plans_sixty_layers_of_experts_in_a_blink():
    shapes = sixty_layers_of_experts()
    index = shapes.index()  # also imports the model's module
    mesh = MeshShape.flat(64)
    times = []
    for _ in range(3):
        start = time.process_time()
        built = built_of(shapes, index)
        plan, world = plan_of(built, index, mesh)
        here = replace(plan, layout=world.at(5))
        found = forecast_rank(here, index, 5, Homes("cuda", 1 << 28), LOCAL)
        times.append(time.process_time() - start)
    assert found.read_bytes == pytest.approx(index.nbytes / 64, rel=0.01)
    assert min(times) < 1.5


def built_of(shapes: Shapes, index) -> Outline:
    options = {"model_class": shapes.model_class, "dtype": torch.bfloat16}
    built = outline(NOWHERE, shapes.config, index, options)
    built.tie(set())
    return built


def plan_of(built: Outline, index, mesh):
    held = look_inside(built.model)
    Initialisers(built.model, held).buffers({}, seed=0)
    world = foresee(built.model, Automatic(), mesh, lambda item: Origin.INIT_WEIGHTS)
    rules = ModelRules(*compat.ignore_patterns(built.model))
    return plan_load(index, world.first, built.bindings, rules, Consent()), world
