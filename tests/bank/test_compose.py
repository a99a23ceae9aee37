"""Passes are composed of all rows, each once, and cost no more than others that could be."""

import random
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.bank.compose import LENGTH_MULTIPLE, ComposedPass, Unit, compose_passes, pad_length

LONGEST = 250
LENGTHS = st.one_of(st.integers(1, LONGEST), st.sampled_from([1, 16, 17, 250]))
LENGTHS_OF_RANKS = st.lists(st.lists(LENGTHS, max_size=9), min_size=1, max_size=4)


def compose(units: list[list[Unit]], most: int, overhead: int) -> list[ComposedPass]:
    return compose_passes(units, longest=LONGEST, max_tokens=most, overhead=overhead)


def rows_of(units: list[list[Unit]], plan: ComposedPass) -> int:
    """The most rows of a rank: kinds have columns of their own, as wide as their widest unit."""
    return max(sum(units[rank][unit].num_rows for unit in own) for rank, own in enumerate(plan.units))


@given(LENGTHS_OF_RANKS, st.integers(1, 2000), st.integers(0, 300))
def test_every_row_is_in_one_pass_that_is_long_enough_and_within_the_budget(lengths, most, overhead):
    units = [[Unit(length) for length in own] for own in lengths]
    plans = compose(units, most, overhead)
    for rank, own in enumerate(units):
        assert sorted(unit for plan in plans for unit in plan.units[rank]) == list(range(len(own)))
        for plan in plans:
            assert all(own[unit].length <= plan.tokens for unit in plan.units[rank])
    for plan in plans:
        rows = rows_of(units, plan)
        assert rows, "no pass is empty on all ranks"
        assert rows * plan.tokens <= most or rows == 1
        assert plan.tokens == LONGEST or plan.tokens % LENGTH_MULTIPLE == 0


@given(LENGTHS_OF_RANKS, st.integers(1, 2000), st.integers(0, 300), st.data())
def test_no_pass_for_each_adapter_costs_less(lengths, most, overhead, data):
    """Whosever the rows are, and however they are on the ranks; if these passes are within the budget."""
    units = [[Unit(length) for length in own] for own in lengths]
    owners = [data.draw(st.lists(st.integers(0, 3), min_size=len(own), max_size=len(own))) for own in lengths]
    alone = []
    for adapter in range(4):
        rows = [
            [length for length, owner in zip(own, of, strict=True) if owner == adapter]
            for own, of in zip(lengths, owners, strict=True)
        ]
        if any(rows):
            longest = max(length for own in rows for length in own)
            alone.append(max(map(len, rows)) * pad_length(longest, longest=LONGEST))
    cost = sum(rows_of(units, plan) * plan.tokens + overhead for plan in compose(units, most, overhead))
    if all(tokens <= most for tokens in alone):
        assert cost <= sum(alone) + overhead * len(alone)


UNITS = st.builds(Unit, LENGTHS, st.integers(1, 3))


@given(st.lists(UNITS, min_size=1, max_size=30), st.integers(1, 4000), st.integers(0, 300))
def test_passes_are_those_of_a_search_through_all_cuts(units, most, overhead):
    """The cheapest, of these with the fewest passes, and of these the one whose last pass begins first."""
    order = sorted(range(len(units)), key=lambda number: (-units[number].length, number))
    best: list[tuple[int, int, list[int]]] = [(0, 0, [])]  # cost, passes, and starts from the last pass on
    for stop in range(1, len(order) + 1):
        choices = []
        for start in range(stop):
            tokens = pad_length(units[order[start]].length, longest=LONGEST)
            tokens *= sum(units[number].num_rows for number in order[start:stop])
            if tokens <= most or start == stop - 1:
                cost, passes, starts = best[start]
                choices.append((cost + tokens + overhead, passes + 1, [start, *starts]))
        best.append(min(choices))
    starts = best[-1][2][::-1]
    expected = [tuple(order[start:stop]) for start, stop in zip(starts, [*starts[1:], len(order)], strict=True)]
    assert [plan.units[0] for plan in compose([units], most, overhead)] == expected


def test_as_many_cuts_are_compared_as_there_are_lengths():
    units = [Unit(length) for length in range(1, 65)] * 4
    with mock.patch("shardwise.bank.compose.min", wraps=min, create=True) as smallest:
        compose([units], 1 << 20, 256)
    choices = [call.args[0] for call in smallest.call_args_list if len(call.args) == 1]
    assert len(choices) == len(units)
    assert max(map(len, choices)) == 64 // LENGTH_MULTIPLE


@given(st.lists(st.lists(st.tuples(LENGTHS, st.sampled_from([1, 2, 3])), max_size=6), min_size=1, max_size=3))
def test_rows_of_a_group_share_a_pass(drawn):
    units = [[Unit(length, size, (size,)) for length, size in own] for own in drawn]
    plans = compose(units, 600, 64)
    for rank, own in enumerate(units):
        assert sorted(unit for plan in plans for unit in plan.units[rank]) == list(range(len(own)))
    for plan in plans:
        columns = max(len(own) for own in plan.units)
        assert rows_of(units, plan) * plan.tokens <= 600 or columns == 1


def test_passes_are_composed_as_the_docstring_says():
    units = [[Unit(7), Unit(60), Unit(9), Unit(62)]]
    assert compose(units, 4096, 64) == [ComposedPass(64, ((3, 1),)), ComposedPass(16, ((2, 0),))]
    assert compose(units, 4096, 128) == [ComposedPass(64, ((3, 1, 2, 0),))]
    assert compose([[], []], 4096, 64) == []
    assert compose([[Unit(9)], []], 4096, 64) == [ComposedPass(16, ((0,), ()))]


@pytest.mark.parametrize(("rows", "most_passes"), [(4, 7.5), (16, 16)])
def test_rows_of_chats_are_dense(rows, most_passes):
    """Eight adapters with rows of lognormal lengths: most of what is computed are tokens, in few passes."""
    filled, passes = 0.0, 0
    for seed in range(10):
        generator = random.Random(seed)
        lengths = [min(max(round(generator.lognormvariate(5.3, 0.9)), 2), 2048) for _ in range(8 * rows)]
        plans = compose_passes([[Unit(length) for length in lengths]], longest=2048, max_tokens=8192)
        filled += sum(lengths) / sum(len(plan.units[0]) * plan.tokens for plan in plans) / 10
        passes += len(plans)
    assert filled >= 0.85
    assert passes / 10 <= most_passes
