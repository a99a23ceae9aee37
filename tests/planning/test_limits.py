"""The last case that a rule of planning takes, and the first that it does not."""

from __future__ import annotations

import numpy as np
import pytest
from tests.conversion.random_expressions import view
from tests.planning.test_intervals import model
from tests.planning.test_load_plan import F32, plan, tensor
from tests.planning.test_matching import STRICT, WHOLE, place
from tests.planning.test_pages import PORTIONS, constant, touch

from shardwise.conversion import Copy, Expression, Stored, copies
from shardwise.errors import CoverageError, DisagreementError
from shardwise.formats.checkpoint_index import CheckpointIndex, Composed, Joined, TensorEntry, View, Whole
from shardwise.layout import LocalBox, MeshShape, Origin, Spread
from shardwise.planning.forecasts.forecast import FetchingPeers, peers_on
from shardwise.planning.loads.load_plan import Consent, Init, Initialize, Read, Tie
from shardwise.planning.loads.pages import MeasuredPages, Way
from shardwise.planning.loads.schedule import schedule, segments_of
from shardwise.planning.loads.stored import stored_tensors
from shardwise.planning.moves.assembly import own_share
from shardwise.planning.moves.exchange import WantedBoxes, dealt
from shardwise.planning.moves.intervals import handed_over, intervals
from shardwise.planning.states.matching import match
from shardwise.planning.states.sources import NOBODY, FirstRank, choose_sources, settle_dtypes
from shardwise.storage.contract import ReadPolicy
from shardwise.tensors import Box, DType, Strided, numel


def policy(gap: int = 0, request: int = 1 << 20) -> ReadPolicy:
    return ReadPolicy(gap, request, 1, is_remote=False, bytes_per_s=1e9)


def flat(start: int, count: int, dtype: DType = DType.U8) -> tuple[Copy, TensorEntry]:
    leaf = Stored("key", (9000,), dtype)
    nbytes = 9000 * dtype.itemsize
    return Copy(leaf, Strided(start, (count,), (1,)), Strided(0, (count,), (1,))), TensorEntry(
        "key", dtype, (9000,), "f", 0, nbytes
    )


# Schedules


def requests(
    runs: list[tuple[int, int]], rules: ReadPolicy, *, staging: int, needs_staging: bool
) -> list[tuple[int, int]]:
    segments = []
    for start, count in runs:
        copy, entry = flat(start, count)
        segments += [
            ("f", segment)
            for segment in segments_of(copy, 0, entry, needs_staging=needs_staging, policy=rules, block_bytes=4096)
        ]
    return [(item.bytes.start, item.bytes.stop) for item in schedule(segments, rules, staging_bytes=staging)]


def test_gaps_are_a_64th_of_a_request_at_most() -> None:
    assert requests([(0, 30), (31, 33)], policy(9), staging=4096, needs_staging=False) == [(0, 64)]
    assert requests([(0, 30), (31, 32)], policy(9), staging=4096, needs_staging=False) == [(0, 30), (31, 63)]


def test_what_is_read_into_place_takes_no_staging() -> None:
    runs = [(10 * number, 10) for number in range(100)]
    assert requests(runs, policy(), staging=64, needs_staging=False) == [(0, 1000)]
    assert requests(runs, policy(), staging=64, needs_staging=True) == [(start, start + 10) for start, _ in runs]
    assert requests(runs[:4], policy(), staging=128, needs_staging=True) == [(0, 20), (20, 40)]


def test_gaps_are_counted_in_bytes() -> None:
    leaf = Stored("key", (4, 10), DType.F32)
    entry = TensorEntry("key", DType.F32, (4, 10), "f", 0, 160)
    (copy,) = copies(leaf, Box((0, 0), (4, 8)))  # two elements of four bytes are left out of every row
    for gap, count in ((7, 4), (8, 1)):
        found = list(segments_of(copy, 0, entry, needs_staging=True, policy=policy(gap), block_bytes=999))
        assert len(found) == count


# Intervals and exchanges


def test_a_block_is_an_eighth_of_the_budget_at_most() -> None:
    reads, index = model(hidden=8, width=6)
    shapes = {name: expression.shape for name, expression in reads.items()}
    ranks = 3
    wanted = [WantedBoxes(name, 2, ((Box.whole(shape),),) * ranks) for name, shape in shapes.items()]
    made = intervals(reads, index, ranks)
    budget = 8 * ranks * 2 * 7
    found = [handed_over(wanted, made, budget, rank) for rank in range(ranks)]
    blocks = [parcel.block for rounds in found for items in rounds for parcel in items.parcels]
    assert max(block.numel for block in blocks) == 7


@pytest.mark.parametrize(("nbytes", "shares"), [(1 << 16, [1, 0]), ((1 << 16) + 2, [1, 1])])
def test_what_is_of_64_kib_is_given_whole(nbytes: int, shares: list[int]) -> None:
    box = Box((0,), (nbytes // 2,))
    given = [own_share(box, replica, 2, 0, 2) for replica in range(2)]
    assert [len(parts) for parts in given] == shares
    assert sum(part.numel for parts in given for part in parts) == box.numel


def test_rows_that_are_wanted_alike_are_one_band() -> None:
    """The first two rows as two columns; those after them, of two ranks, as three."""
    boxes = (Box((0, 0), (2, 2)), Box((2, 0), (2, 3)), Box((4, 0), (2, 3)))
    item = WantedBoxes("w", 1 << 15, tuple((box,) for box in boxes))
    found = dealt([item], [0, 1, 2], 1 << 30)
    elements = {}
    for parcel in found:
        for rank in parcel.targets:
            elements.setdefault(rank, []).append(parcel.box)
    assert sorted(elements) == [0, 1, 2]
    for rank, box in enumerate(boxes):
        assert sum(part.numel for part in elements[rank]) == box.numel
        assert all(part.intersect(box) == part for part in elements[rank])


def test_a_last_rank_that_holds_nothing_has_peers() -> None:
    def local(box: Box) -> tuple[LocalBox, ...]:
        return (LocalBox(box, Strided.contiguous(box.sizes)),)

    spread = Spread((local(Box((0, 0), (2, 6))), local(Box((2, 0), (1, 6))), ()), 12)
    mesh = MeshShape(("replicate", "shard"), (2, 3))
    assert peers_on(mesh, spread, (3, 6), is_sharded=True) == FetchingPeers(False, 2, 2)


# Loads


def test_of_two_keys_for_one_tensor_nothing_else_is_told() -> None:
    one, two = Stored("a", (2,), F32), Stored("b", (3,), F32)
    with pytest.raises(CoverageError) as caught:
        plan([tensor("w", 2)], {"a": ((2,), F32), "b": ((3,), F32)}, offers={"w": (one, two)})
    assert "ambiguous 1" in str(caught.value)
    assert "mismatched" not in str(caught.value)


def test_names_by_what_fills_them() -> None:
    tensors = [tensor("a", 2, aliases=("c",)), tensor("b", 2), tensor("d", 2)]
    made = plan(tensors, {"a": ((2,), F32), "d": ((2,), F32)}, consent=Consent(missing=Initialize(("b",))))
    assert (made.names(Read), made.names(Tie), made.names(Init)) == (("a", "d"), ("c",), ("b",))
    assert made.fills["b"] == Init(Origin.INIT_WEIGHTS)
    assert list(made.reads()) == ["a", "d"]


def test_tensors_that_are_composed() -> None:
    def entry(key: str, shape: tuple[int, ...], start: int) -> TensorEntry:
        return TensorEntry(key, F32, shape, "f", start, start + 4 * numel(shape))

    entries = {
        "a": entry("a", (2, 3), 0),
        "b": entry("b", (1, 3), 24),
        "s": entry("s", (6,), 36),
        "p": entry("p", (2,), 60),
    }
    composed = {
        "ab": Composed(F32, (3, 3), Joined((Whole("a"), Whole("b")), 0)),
        "t": Composed(F32, (3, 2), View("s", Strided(0, (3, 2), (1, 3)))),
    }
    found = stored_tensors(CheckpointIndex("here", {"f": 68}, entries, {}, "single file", composed))
    assert list(found) == ["p", "ab", "t"]
    assert found["p"] == Stored("p", (2,), F32)

    def evaluated(expression: Expression) -> list[object]:
        values = {"a": np.arange(6), "b": np.arange(6, 9), "s": np.arange(6), "p": np.arange(2)}
        made = np.full(expression.shape, -1)
        for copy in copies(expression, Box.whole(expression.shape)):
            view(made.reshape(-1), copy.target)[...] = view(values[copy.leaf.key], copy.source)
        return made.tolist()

    assert evaluated(found["ab"]) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert evaluated(found["t"]) == [[0, 3], [1, 4], [2, 5]]


def test_a_place_that_is_missing_is_called_by_its_first_name() -> None:
    with pytest.raises(CoverageError, match="missing 1 +first\n"):
        match([place("a"), place("first", "second")], [{"a": WHOLE}], STRICT)


# Sources


@pytest.mark.parametrize("count", [7, 8, 9])
def test_of_many_ranks_the_first_are_named(count: int) -> None:
    live = [[False]] * count + [[True]]
    with pytest.raises(DisagreementError) as caught:
        choose_sources(["w"], live, FirstRank(), ["a"] * len(live))
    assert f"ranks {', '.join(map(str, range(min(count, 8))))}" in str(caught.value)
    assert (", ...: w" in str(caught.value)) is (count > 8)


def test_nobodys_tensor_has_the_dtype_that_all_have() -> None:
    assert settle_dtypes(["w"], [NOBODY], [["int32"], ["int32"]]) == ["int32"]


# Pages


@pytest.mark.parametrize("more", [1.1, 1.5])
def test_the_dearer_way_is_looked_at_as_often_as_it_may_be(more: float) -> None:
    """What is lost by looking is a twentieth of the time: no look more, and none less."""
    for huge, small, dearer in ((1.0, more, Way.SMALL), (more, 1.0, Way.HUGE)):
        ways, total = touch(constant(huge, small), MeasuredPages())
        lost = (more - 1) * ways.count(dearer)
        assert len(ways) == PORTIONS
        assert total / 20 - 1 < lost <= total / 20 + 2 * (more - 1)
