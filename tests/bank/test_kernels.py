"""Both backends are the sum that they stand for, forward and backward, whatever the parts are."""

import itertools
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.bank import kernels
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
from shardwise.fsdp.torch_private import fake_mode
from shardwise.models.activations import _LiveBytes

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


def mask_at_once(keys, site_key, probability, positions, width):
    """What :func:`drop_elements` keeps, by Python's integers."""
    kept = []
    for key, position in zip(keys.tolist(), positions.tolist(), strict=True):
        for column in range(width):
            number = ((key ^ site_key) + (position * width + column) * 0x9E3779B97F4A7C15) % (1 << 64)
            number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
            number = (number ^ number >> 27) * 0x94D049BB133111EB % (1 << 64)
            kept.append(((number ^ number >> 31) >> 33) >= int(probability * (1 << 31)))
    return torch.tensor(kept).view(-1, width)


def test_dropout_is_the_same_in_parts(monkeypatch):
    """Of whole rows, and of tokens of any rows, as of the positions of an output layer."""
    monkeypatch.setattr(kernels, "_NUMBERS_AT_ONCE", 7 * IN)
    keys, positions = row_keys(5, 0, 3), torch.arange(10)
    values = torch.randn(30, IN, dtype=torch.bfloat16)
    of_tokens = keys.repeat_interleave(10), positions.repeat(3)
    kept = mask_at_once(of_tokens[0], 3, 0.25, of_tokens[1], IN)
    found = kernels.drop_elements(values, keys, 3, 0.25)
    assert found.equal(torch.where(kept, values / 0.75, 0.0))
    some = torch.tensor([3, 11, 12, 29])
    by_position = kernels.drop_elements(values[some], of_tokens[0][some], 3, 0.25, of_tokens[1][some])
    assert by_position.equal(found[some])


def test_dropout_needs_memory_for_a_part_alone():
    with fake_mode(), _LiveBytes(()) as live:
        values, keys = torch.empty(8192, 14336, dtype=torch.bfloat16), torch.empty(8, dtype=torch.int64)
        kernels.drop_elements(values, keys, 3, 0.25)
    assert live.peak < 2 * values.nbytes + (100 << 20)


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
