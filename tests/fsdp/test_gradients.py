"""Gradients of parameters of every placement: their norm, clipped; and those that ranks would not share."""

import math
from typing import Any

import pytest
import torch
from tests.models import stepping
from torch import nn

from shardwise.fsdp.gradients import clip_gradients

TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


def require_close(found: Any, expected: Any, **more: Any) -> None:
    torch.testing.assert_close(found, expected, **TOLERANCE | more)


@pytest.mark.parametrize("max_norm", [1.0, math.inf])
def test_the_norm_over_every_placement_is_that_of_one_process(worlds, max_norm):
    expected = stepping.norms(max_norm)
    model = stepping.Mixed()
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape) * 1.5
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    require_close(expected["norm"], norm.item())
    require_close(expected["gradients"], stepping.gradients(model))
    for found in worlds(4).run(stepping.norms, max_norm):
        require_close(found["norm"], norm.item())
        require_close(found["gradients"], expected["gradients"])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_gradients_that_are_not_finite_are_unchanged(value):
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([value, 5.0])
    assert not math.isfinite(clip_gradients([parameter], 1.0))
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


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_of_whole_parameters_are_averaged_in_one_bucket(worlds, reentrant):
    """A pass within a pass has its own."""
    found = worlds(2).run(stepping.averaged, reentrant)
    means = [(one + other) / 2 for one, other in zip(found[0][2], found[1][2], strict=True)]
    for sums, gradients, _ in found:
        assert sums == (4 if reentrant else 2)
        torch.testing.assert_close(gradients, [2 * mean for mean in means])


@pytest.mark.parametrize("divided", [["", "blocks.0"], ["blocks.1"]])
def test_a_divisor_of_one_s_own_counts_for_whole_parameters_of_its_group_too(worlds, divided):
    """FSDP2's: a sum over ranks and passes, of a loss that is divided by all tokens already."""
    found = worlds(2).run(stepping.summed, divided)
    model = stepping.Scaled()
    model(stepping.batch().input_ids).logits.sum().backward()
    for name, value in stepping.gradients(model).items():
        group = name.rpartition(".linear")[0] or name.rpartition(".scale")[0]
        for each in found:  # over two passes the sum divided by 0.5, or the mean
            require_close(each[name], (4 if group in divided else 1) * value)


def test_ranks_may_use_different_parameters(worlds):
    """Of the mean over both ranks one has no part. What neither uses has no gradient, so that it is not stepped."""
    for first, second, third, fourth in worlds(2).run(stepping.averaged_experts):
        assert first.tolist() == [[0.5, 0.5]] * 2
        assert second.tolist() == [[1.5, 1.5]] * 2
        assert third.tolist() == [[1.0, 1.0]] * 2
        assert fourth is None


def test_parameters_that_would_drift_apart_are_refused_by_name(worlds):
    added, plain, part, split, frozen = worlds(2).run(stepping.unsynchronized)[1]
    assert added.startswith("model.layers.{0..2}.mlp.adapter: trained, but neither sharded nor averaged over the 2")
    assert "average_replicated_gradients" in added
    assert plain.startswith("model.embed_tokens.weight, model.layers.{0..2}.self_attn.q_proj.weight")
    assert part.startswith("model.embed_tokens.weight, ")
    assert "FSDP2 averages over fewer than the 2 ranks that get rows of their own" in part
    assert split == frozen == part, "under tensor parallelism all parameters may be on one mesh of all ranks"


@pytest.mark.parametrize(("after", "kept"), [(True, "(4,)"), (False, "whole"), (2, "(2, 2)")])
def test_which_parameters_stay_gathered_between_the_passes(worlds, after, kept):
    model = stepping.qwen3()
    given = stepping.batch(4)
    model(input_ids=given.input_ids, labels=given.labels).loss.backward()
    for found in worlds(4).run(stepping.resharded, after):
        assert found["kept"] == kept
        require_close(found["gradients"], stepping.gradients(model))


@pytest.mark.parametrize("after", [1, 3, 8])
def test_a_number_that_the_ranks_cannot_be_dealt_to(worlds, after):
    said = worlds(4).run(stepping.refused_reshard, after)
    assert set(said) == {said[0]}
    assert said[0].startswith(f"ShardingError: reshard_after_forward={after}: is not a number of ranks")
    assert "divides the 4 of the mesh. Pass one of [2, 4], True or False" in said[0]
