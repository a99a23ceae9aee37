"""A step's work: the same on one process and on several, however parameters and gradients are placed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.training import stepping
from torch import nn

from shardwise.errors import ConfigError
from shardwise.execution.ranks.world import World
from shardwise.training.optimizing.gradients import GradientScaler, Unscaled, clip_gradients
from shardwise.training.optimizing.optimizer_trial import require_synchronised

TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


def require_close(found: Any, expected: Any, **more: Any) -> None:
    torch.testing.assert_close(found, expected, **TOLERANCE | more)


# ── accumulation ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "ranks", "mesh", "reduce_scatters"),
    [("whole", 2, "line", 1), ("sharded", 2, "line", 3), ("whole", 4, "hsdp", 1), ("sharded", 4, "hsdp", 3)],
)
def test_accumulated_gradients_are_exchanged_as_often_as_asked(worlds, kind, ranks, mesh, reduce_scatters):
    """In three groups (two blocks and the root); two scales are replicated."""
    expected = stepping.accumulated(kind, "line")
    for found in worlds(ranks).run(stepping.accumulated, kind, mesh):
        require_close(found["gradients"], expected["gradients"])
        require_close(found["facts"], expected["facts"])
        assert found["calls"]["_reduce_scatter_base_"] == 3 * reduce_scatters
        axes = 2 if mesh == "hsdp" else 1
        replicas = 3 if mesh == "hsdp" else 0
        # Once for each scale and axis, and once for each group with replicas; tokens; loss and norm.
        assert found["calls"]["allreduce_"] == 2 * axes + replicas + 2


# ── clipping ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.distributed
@pytest.mark.parametrize(("norm_type", "max_norm"), [(2.0, 1.0), (2.0, math.inf), (math.inf, 1.0)])
def test_the_norm_over_every_placement_is_that_of_one_process(worlds, norm_type, max_norm):
    expected = stepping.norms(norm_type, max_norm)
    model = stepping.Mixed()
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape) * 3 / 2
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    require_close(expected["norm"], norm.item())
    require_close(expected["gradients"], stepping.gradients(model))
    for found in worlds(4).run(stepping.norms, norm_type, max_norm):
        require_close(found["norm"], norm.item())
        require_close(found["gradients"], expected["gradients"])


@pytest.mark.distributed
def test_the_norm_under_tensor_parallelism_is_that_of_one_process(worlds):
    expected = stepping.tensor_parallel()
    assert expected["norm"] > 0.5
    for found in worlds(4).run(stepping.tensor_parallel):
        require_close(found["norm"], expected["norm"])
        require_close(found["gradients"], expected["gradients"])


def test_other_norms_are_refused():
    with pytest.raises(
        ConfigError, match=r"norm_type=1.0: gradients are clipped by their norm of type 2 or infinity"
    ):
        clip_gradients([nn.Parameter(torch.ones(2))], 1.0, norm_type=1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_what_is_not_finite_is_left_as_it_is(value, norm_type):
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([value, 5.0])
    assert not math.isfinite(clip_gradients([parameter], 1.0, norm_type=norm_type))
    assert parameter.grad[1] == 5.0


def test_gradients_of_16_bits_are_measured_in_32():
    parameter = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    parameter.grad = torch.full((4096,), 1.0, dtype=torch.bfloat16)
    other = nn.Parameter(torch.ones(1))
    other.grad = torch.ones(1)
    assert clip_gradients([parameter, other], math.inf) == pytest.approx(math.sqrt(4097), rel=1e-6)


def test_there_may_be_no_gradient():
    assert clip_gradients([nn.Parameter(torch.ones(2))], 1.0) == 0.0
    assert clip_gradients([], 1.0) == 0.0


# ── precision and scaling ─────────────────────────────────────────────────────────────────────────


@pytest.mark.distributed
@pytest.mark.parametrize(("poisoned_rank", "poisoned"), [(0, "sharded"), (1, "sharded"), (1, "replicated")])
def test_one_verdict_for_all_ranks(worlds, poisoned_rank, poisoned):
    exact = stepping.work_on(stepping.Scaled()).gradient([stepping.batch(4)])
    first, second = worlds(2).run(stepping.scaled_in_float16, poisoned_rank, poisoned)
    assert first["verdicts"] == [True, False, True]
    assert first["scales"] == [1024.0, 512.0, 512.0]
    assert not math.isfinite(first["norms"][1])
    assert first["norms"][0] == pytest.approx(exact.grad_norm, rel=0.01)
    assert first["clipped"] == pytest.approx(0.05, rel=1e-3)
    assert first["state"] == {"scale": 512.0, "good_steps": 1}
    torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)


def test_the_scale_goes_up_and_down():
    scaler = GradientScaler(8.0, factor=2.0, patience=2)
    assert [scaler.judge(norm) for norm in (1.0, 1.0, math.inf, 1.0, math.nan)] == [True, True, False, True, False]
    assert scaler.state_dict() == {"scale": 4.0, "good_steps": 0}
    other = GradientScaler()
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict()
    assert Unscaled().judge(math.nan)


@pytest.mark.parametrize("state", [{}, {"scale": math.nan, "good_steps": 0}, {"scale": 0.0, "good_steps": 0}])
def test_what_is_not_the_state_of_a_scaler(state):
    scaler = GradientScaler(8.0)
    with pytest.raises(ConfigError, match="is not the state of a gradient scaler"):
        scaler.load_state_dict(state)
    assert scaler.scale == 8.0


def test_a_scaler_that_finds_no_scale_says_so():
    assert "even where the loss is scaled by 3.05176e-05; train in bfloat16" in stepping.scaler_gives_up()


@pytest.mark.parametrize("wrong", [{"scale": 0.0}, {"factor": 1.0}, {"patience": 0}, {"scale": math.nan}])
def test_a_scaler_that_cannot_be(wrong):
    with pytest.raises(ConfigError, match="the scale must be greater than 0"):
        GradientScaler(**wrong)


@pytest.mark.distributed
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("offload", [False, True], ids=["device", "offload"])
def test_offload_and_mixed_precision(worlds, dtype, offload):
    """Without an accelerator, where memory cannot be pinned."""
    exact = stepping.work_on(stepping.qwen3()).gradient([stepping.batch(4)])
    tolerance = 1e-5 if dtype == "float32" else 0.03
    for found in worlds(2).run(stepping.in_precision, dtype, offload):
        assert found["loss"] == pytest.approx(exact.loss, rel=tolerance)
        assert (found["loss"] == exact.loss) <= (dtype == "float32")
        assert found["norm"] == pytest.approx(exact.grad_norm, rel=tolerance)
        assert found["dtypes"] == found["grads"] == {"torch.float32"}


# ── what is trained ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.distributed
def test_what_is_frozen_has_neither_gradient_nor_state(worlds):
    for found in worlds(2).run(stepping.frozen):
        assert found["gradients"] == found["states"] == found["wanted"]
        assert len(found["wanted"]) == 11


@pytest.mark.distributed
def test_what_would_drift_apart_is_refused_by_name(worlds):
    added, plain, part = worlds(2).run(stepping.unsynchronised)[1]
    assert added.startswith(
        "model.layers.{0..2}.mlp.adapter are trained, but neither sharded nor averaged over the 2"
    )
    assert "average_replicated_gradients" in added
    assert plain.startswith("model.embed_tokens.weight, model.layers.{0..2}.self_attn.q_proj.weight")
    assert part.startswith("model.embed_tokens.weight, ")
    assert "on a mesh that has not all of the 2 ranks" in part


def test_one_process_drifts_from_nobody():
    require_synchronised(stepping.qwen3(), World(0, 1))


@pytest.mark.distributed
@pytest.mark.parametrize(("after", "kept"), [(True, "(4,)"), (False, "whole"), (2, "(2, 2)")])
def test_what_is_gathered_between_the_passes(worlds, after, kept):
    model = stepping.qwen3()
    stepping.WholeLogits().summed(model, stepping.batch(4)).backward()
    for found in worlds(4).run(stepping.resharded, after):
        assert found["kept"] == kept
        gradients = {name: gradient * 4 for name, gradient in found["gradients"].items()}
        require_close(gradients, stepping.gradients(model))


@pytest.mark.distributed
@pytest.mark.parametrize("after", [1, 3, 8])
def test_a_number_that_the_ranks_cannot_be_dealt_to(worlds, after):
    said = worlds(4).run(stepping.refused_reshard, after)
    assert set(said) == {said[0]}
    assert said[0].startswith(f"PlacementError: reshard_after_forward={after}: a number is that of ranks to which")
    assert "divides the 4 that it is sharded over: one of [2, 4], or True or False" in said[0]
