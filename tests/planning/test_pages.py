"""In which pages memory is taken, given what each portion would cost."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from shardwise.planning.loads.pages import HugePages, MeasuredPages, Pages, SmallPages, Way, Weighing
from shardwise.report.load_report import LoadReport

PORTION = 2 << 20
THERE, BROUGHT, PIECES = 0.0002, 0.0044, 0.0007
"""Seconds of a huge page whose memory exists, of one that the host has to bring, and of small ones."""

PORTIONS = 430
"""Of a quarter of a model of 1.7 billion parameters."""


def touch(cost: Callable[[int, Way], float], pages: Pages, portions: int = PORTIONS) -> tuple[list[Way], float]:
    """The way of each portion, and the seconds of all."""
    weighing = Weighing(pages)
    ways, total = [], 0.0
    for number in range(portions):
        way = weighing.next()
        seconds = cost(number, way)
        weighing.took(way, PORTION, seconds)
        ways.append(way)
        total += seconds
    return ways, total


def constant(huge: float, small: float) -> Callable[[int, Way], float]:
    return lambda _, way: huge if way is Way.HUGE else small


@pytest.mark.parametrize(("huge", "small"), [(THERE, PIECES), (BROUGHT, PIECES), (BROUGHT, 2 * BROUGHT)])
def test_what_costs_less_is_taken(huge: float, small: float) -> None:
    _, total = touch(constant(huge, small), MeasuredPages())
    first_looks = 2 * (huge + small)
    assert total <= 1.1 * min(huge, small) * PORTIONS + first_looks


@pytest.mark.parametrize("there", [3, 50, 300])
def test_memory_that_exists_is_taken_until_it_ends(there: int) -> None:
    """Huge pages that somebody has freed are there; what lies behind them is not. A probe would be wrong."""
    used = 0

    def cost(_: int, way: Way) -> float:
        nonlocal used
        used += way is Way.HUGE
        return PIECES if way is Way.SMALL else THERE if used <= there else BROUGHT

    ways, total = touch(cost, MeasuredPages())
    assert total <= 1.2 * (there * THERE + (PORTIONS - there) * PIECES) + 3 * BROUGHT
    assert ways[:there].count(Way.HUGE) >= 0.9 * there or there < 10


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
def test_huge_pages_that_are_there_by_chance_do_not_lead_astray(share: float) -> None:
    """Where some are there and most are not, each series of good ones ends with a bad one."""
    drawn = random.Random(0)

    def cost(_: int, way: Way) -> float:
        return PIECES if way is Way.SMALL else THERE if drawn.random() < share else BROUGHT

    _, total = touch(cost, MeasuredPages())
    assert total <= 1.1 * PIECES * PORTIONS + 4 * BROUGHT


def test_the_dearer_way_is_tried_again_and_taken_when_it_has_become_cheap() -> None:
    ways, _ = touch(
        lambda number, way: PIECES if way is Way.SMALL else BROUGHT if number < 100 else THERE, MeasuredPages()
    )
    assert ways[20:100].count(Way.HUGE) <= 3
    assert ways[250:].count(Way.HUGE) > 150


def test_small_pieces_that_end_are_noticed_at_once() -> None:
    ways, _ = touch(
        lambda number, way: BROUGHT if way is Way.HUGE else PIECES if number < 100 else 4 * BROUGHT, MeasuredPages()
    )
    assert ways[110:].count(Way.SMALL) < 0.1 * (PORTIONS - 110)


def test_two_dear_portions_of_many_do_not_drive_away_for_long() -> None:
    """The system was short of small pages for a moment; huge ones were never there."""
    small = 0

    def cost(_: int, way: Way) -> float:
        nonlocal small
        small += way is Way.SMALL
        return BROUGHT if way is Way.HUGE else 2 * BROUGHT if small % 100 in (50, 51) else PIECES

    ways, _ = touch(cost, MeasuredPages())
    assert ways.count(Way.HUGE) <= 0.05 * PORTIONS


@pytest.mark.parametrize("cost", [constant(THERE, PIECES), constant(BROUGHT, PIECES)])
def test_each_way_is_tried_twice_before_one_is_chosen(cost: Callable[[int, Way], float]) -> None:
    ways, _ = touch(cost, MeasuredPages(), 4)
    assert sorted(ways, key=list(Way).index) == [Way.HUGE] * 2 + [Way.SMALL] * 2


@pytest.mark.parametrize(("pages", "way"), [(HugePages(), Way.HUGE), (SmallPages(), Way.SMALL)])
def test_what_was_asked_for_is_kept_whatever_it_costs(pages: Pages, way: Way) -> None:
    ways, _ = touch(constant(BROUGHT, PIECES) if way is Way.HUGE else constant(THERE, PIECES), pages)
    assert set(ways) == {way}


def test_a_report_says_what_was_taken_and_why() -> None:
    assert LoadReport.__dataclass_fields__["pages"]
    weighing = Weighing(MeasuredPages())
    weighing.took(Way.HUGE, 1 << 30, 0.1)
    weighing.took(Way.SMALL, 3 << 30, 0.9)
    assert str(weighing.report()) == (
        "1.00 GiB in huge pages (0.10 s/GiB), 3.00 GiB in small pages (0.30 s/GiB), each time in those "
        "that had cost less of late"
    )
    assert (weighing.report().huge_bytes, weighing.report().small_bytes) == (1 << 30, 3 << 30)
    asked = Weighing(SmallPages())
    asked.took(Way.SMALL, 1 << 30, 0.3)
    assert str(asked.report()).endswith("in small pages (0.30 s/GiB), as asked")
