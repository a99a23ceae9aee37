"""Both backends are the sum that they stand for, forward and backward, whatever the parts are."""

import itertools
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.bank.kernels import (
    EmbeddingLoop,
    GroupedProducts,
    LoraWeights,
    RoutedSegment,
    SegmentLoop,
    adapt,
    group_into_runs,
    row_keys,
)
from shardwise.bank.routes import AdapterRows, Route

IN, OUT = 8, 12


@st.composite
def parts_of(draw, dtype=torch.float32):
    """Adapters side by side, some rows of nobody between them, and after."""
    parts, start = [], 0
    for number in range(draw(st.integers(1, 4))):
        start += draw(st.sampled_from([0, 0, 0, 3]))
        rows, rank = draw(st.sampled_from([1, 3, 3, 5])), draw(st.sampled_from([1, 4, 4, 9]))
        generator = torch.Generator().manual_seed(number)
        a = torch.randn(rank, IN, generator=generator, dtype=dtype)
        b = torch.randn(OUT, rank, generator=generator, dtype=dtype)
        dropout = draw(st.sampled_from([0.0, 0.4]))
        scaling = draw(st.sampled_from([0.5, 2.0]))
        pair = LoraWeights(a, b, torch.zeros_like(a), torch.zeros_like(b), scaling, dropout)
        keys = row_keys(number, 0, rows) if dropout else None
        parts.append(RoutedSegment(pair, start, start + rows, keys, site_key=7))
        start += rows
    return parts, start + draw(st.integers(0, 3))


def expected(parts, x, y, weights):
    """By torch's own derivatives, out of place."""
    leaves = [(part.weights.A.clone().requires_grad_(), part.weights.B.clone().requires_grad_()) for part in parts]
    out = y.clone()
    for part, (a, b) in zip(parts, leaves, strict=True):
        delta = torch.zeros_like(y)
        rows = slice(part.start, part.stop)
        factors = part.apply_dropout(torch.ones_like(x[rows]))  # 0 for what is dropped
        delta[rows] = (x[rows] * factors) @ a.T @ b.T * part.weights.scaling
        out = out + delta
    (out * weights).sum().backward()
    return out, [(a.grad, b.grad) for a, b in leaves]


@given(st.data(), st.sampled_from(["loop", "grouped"]), st.booleans())
def test_the_sum_and_its_derivatives(data, kind, twice):
    dtype = torch.float64 if kind == "loop" else torch.float32
    parts, rows = data.draw(parts_of(dtype))
    x, y, weights = (torch.randn(rows, width, dtype=dtype) for width in (IN, OUT, OUT))
    ours, theirs = [(x.clone().requires_grad_(), y.clone().requires_grad_()) for _ in range(2)]
    backend = SegmentLoop() if kind == "loop" else GroupedProducts()
    anchor = torch.zeros((), requires_grad=True)
    for _ in range(1 + twice):  # gradients are added up
        out = adapt(anchor, *ours, parts, backend)
        (out * weights).sum().backward()
    want, gradients = expected(parts, *theirs, weights)
    close = {"rtol": 1e-4, "atol": 1e-4} if kind == "grouped" else {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(out, want, **close)
    for part, (a, b) in zip(parts, gradients, strict=True):
        torch.testing.assert_close(part.weights.a_grad, a * (1 + twice), **close)
        torch.testing.assert_close(part.weights.b_grad, b * (1 + twice), **close)
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own.grad, other.grad * (1 + twice), **close)
    assert anchor.grad is None


@given(parts_of())
def test_runs_leave_nothing_out(drawn):
    parts, _ = drawn
    found = group_into_runs(parts)
    assert [part for run in found for part in run] == parts
    for run in found:
        assert all(one.stop == other.start for one, other in itertools.pairwise(run))
        assert len({(part.weights.rank, part.stop - part.start) for part in run}) == 1


@pytest.mark.parametrize(
    ("choice", "ranks", "dtype", "is_grouped"),
    [
        ("loop", (4, 4), torch.float32, False),
        ("auto", (4, 4), torch.float32, True),
        ("auto", (4, 4), torch.float64, False),
    ],
)
def test_adapters_may_be_grouped_if_input_and_output_have_one_dtype(choice, ranks, dtype, is_grouped):
    adapters, members = [], []
    for number, rank in enumerate(ranks):
        a, b = torch.ones(rank, IN), torch.ones(OUT, rank)
        adapters.append(SimpleNamespace(weights_by_site={"layer": LoraWeights(a, b, a, b, 1.0)}))
        members.append(AdapterRows(adapters[-1], 4 * number, 4 * number + 4, None))
    rows = members[-1].stop
    route = Route(rows, 1, tuple(members), adapters, choice, torch.zeros(()))
    with mock.patch("shardwise.bank.routes.adapt", side_effect=lambda _anchor, _x, y, *_: y) as called:
        route.add_adapters("layer", torch.ones(rows, IN), torch.ones(rows, OUT, dtype=dtype))
    assert isinstance(called.call_args.args[4], GroupedProducts) == is_grouped


def test_tokens_that_recur_give_the_same_bits_on_any_number_of_threads():
    torch.manual_seed(0)
    ids, g = torch.randint(0, 50, (20_000, 1)), torch.randn(20_000, OUT)
    a, b = torch.randn(8, 50), torch.randn(OUT, 8)
    before, grads = torch.get_num_threads(), []
    for threads in (1, 2, 2, 2, 2):
        pair = LoraWeights(a, b, torch.zeros_like(a), torch.zeros_like(b), 2.0, 0.0)
        torch.set_num_threads(threads)
        EmbeddingLoop(1.0).backward_rows([RoutedSegment(pair, 0, len(ids))], ids, [], g, None)
        grads.append(pair.a_grad)
    torch.set_num_threads(before)
    assert all(torch.equal(grad, grads[0]) for grad in grads)
