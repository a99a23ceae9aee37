"""Whose rows go through the base next: within the budget, nobody starves, everybody's order is its own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardwise.tenants.turns import Waiting, next_pass, queue_after

BUDGET = 512
LENGTHS = st.sampled_from([64, 128, 192, 512])


@st.composite
def portions(draw: st.DrawFn) -> tuple[int, int]:
    """Rows and padded tokens that fit into a pass; or none."""
    tokens = draw(LENGTHS)
    rows = draw(st.integers(0, BUDGET // tokens))
    return rows, tokens if rows else 0


TENANTS = st.lists(st.lists(portions(), min_size=1, max_size=6), min_size=1, max_size=7)


def passes(tenants: list[list[tuple[int, int]]]) -> list[list[Waiting]]:
    """All passes until everybody's portions are gone."""
    queue = [f"t{number}" for number in range(len(tenants))]
    left = {name: list(own) for name, own in zip(queue, tenants, strict=True)}
    gone = []
    while queue:
        waiting = [Waiting(name, *left[name][0]) for name in queue]
        taken = next_pass(waiting, BUDGET)
        assert taken, "somebody is always first"
        gone.append([each for each in waiting if each.name in taken])
        queue = queue_after(queue, taken)
        for name in taken:
            left[name].pop(0)
        queue = [name for name in queue if left[name]]
    return gone


@given(TENANTS)
def test_a_pass_has_one_length_and_keeps_the_budget(tenants):
    for each in passes(tenants):
        assert len({member.tokens for member in each if member.cost}) <= 1
        assert sum(member.cost for member in each) <= BUDGET
        assert len({member.name for member in each}) == len(each)


@given(TENANTS)
def test_everybody_gets_all_its_portions_in_its_own_order(tenants):
    found: dict[str, list[tuple[int, int]]] = {}
    for each in passes(tenants):
        for member in each:
            found.setdefault(member.name, []).append((member.rows, member.tokens))
    assert [found[f"t{number}"] for number in range(len(tenants))] == tenants


@given(TENANTS)
def test_nobody_waits_for_more_passes_than_there_are_others(tenants):
    for number, own in enumerate(tenants):
        gaps = _gaps(f"t{number}", passes(tenants))
        assert len(gaps) == len(own)
        assert max(gaps) < len(tenants)


def _gaps(name: str, gone: list[list[Waiting]]) -> list[int]:
    """How many passes went by before each of a tenant's portions, since the one before."""
    places = [number for number, each in enumerate(gone) if name in {member.name for member in each}]
    return [place - before - 1 for before, place in zip([-1, *places], places, strict=False)]


def test_short_rows_do_not_wait_for_long_ones_to_be_padded():
    queue = [Waiting("long", 1, 512), Waiting("a", 2, 64), Waiting("b", 4, 64), Waiting("c", 4, 64)]
    assert next_pass(queue, 512) == ["long"]
    assert next_pass(queue[1:], 512) == ["a", "b"], "c does not fit beside them, and is first then"
    assert next_pass(queue[1:], 1024) == ["a", "b", "c"]


def test_a_portion_without_rows_goes_along_with_any_pass():
    queue = [Waiting("none", 0, 0), Waiting("long", 1, 512), Waiting("short", 1, 64)]
    assert next_pass(queue, 512) == ["none", "long"]
    assert next_pass(queue[:1], 512) == ["none"]
