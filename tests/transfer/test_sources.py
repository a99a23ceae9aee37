"""The choice of the rank that sends a tensor, without processes."""

import pytest

from shardwise.core.errors import RankMismatchError
from shardwise.core.tensors import Box
from shardwise.transfer.matching import (
    NO_SOURCES,
    resolve_differences,
    select_dtypes,
    select_sources,
)
from shardwise.transfer.tensor_metadata import TensorMetadata, collect_all_boxes, require_same_tensors


def chosen(live):
    (sources,) = select_sources([[has] for has in live])
    return sources


@pytest.mark.parametrize(
    ("live", "sources"),
    [
        ((0, 0, 0, 0), NO_SOURCES),
        ((1, 1, 1, 1), (0, 1, 2, 3)),
        ((1, 0, 0, 0), (0, 0, 0, 0)),
        ((0, 0, 1, 0), (2, 2, 2, 2)),
        ((1, 0, 0, 1), (0, 0, 0, 3)),
        ((1, 1, 0, 0), (0, 1, 0, 0)),
    ],
)
def test_a_rank_without_values_gets_those_of_the_first_that_has_the_most(live, sources):
    assert chosen(live) == sources


def test_where_values_differ_the_rank_with_the_most_of_the_model_counts():
    names = ["weight", "table"]
    live = [[False, True], [True, True], [True, True]]
    sources = select_sources(live)
    assert sources == [(1, 1, 2), (0, 1, 2)]
    sums = [{"table": 5}, {"weight": 1, "table": 5}, {"weight": 2, "table": 6}]
    settled, taken = resolve_differences(names, sources, sums, [1, 2, 2])
    assert settled == [(1, 1, 1), (1, 1, 1)]
    assert taken == {"weight": 1, "table": 1}
    equal = [{"table": 5}, {"weight": 1, "table": 5}, {"weight": 1, "table": 5}]
    assert resolve_differences(names, sources, equal, [1, 2, 2]) == (sources, {})


@pytest.mark.parametrize("source_ranks", [NO_SOURCES, (0, 0), (1, 1)])
def test_a_tensor_with_one_source_or_none_needs_no_checksum(source_ranks):
    assert resolve_differences(["w"], [source_ranks], [{}, {}], [1, 1]) == ([source_ranks], {})


@pytest.mark.parametrize(
    ("sources", "dtypes"),
    [
        ((0, 1), ("float32", "bfloat16")),
        (NO_SOURCES, ("float32", "bfloat16")),
        ((0, 0), ("float32", "float8_e4m3fn")),
        ((0, 0), ("float32", "int64")),
        ((0, 0, 0), ("float32", "bfloat16", "float16")),
    ],
)
def test_dtypes_without_a_common_choice_are_refused(sources, dtypes):
    with pytest.raises(RankMismatchError, match="w is .*float32 on rank 0"):
        select_dtypes(["w"], [sources], [[dtype] for dtype in dtypes])


def test_ranks_of_a_subgroup_are_shown_as_global_ranks():
    with pytest.raises(RankMismatchError, match="bfloat16 on rank 6, float32 on rank 4"):
        select_dtypes(["w"], [(0, 1)], [["float32"], ["bfloat16"]], (4, 6))


def test_the_order_of_tensors_counts():
    one, other = TensorMetadata((2, 3), "", other_names=("a",)), TensorMetadata((2, 3), "", other_names=("b",))
    with pytest.raises(RankMismatchError, match="order of the tensors on rank 1"):
        require_same_tensors([{"a": one, "b": other}, {"b": other, "a": one}])


def test_tensors_of_one_layout_are_compared_and_hashed_once(monkeypatch):
    compared, hashed = [], []
    compare, hash_box = TensorMetadata.__eq__, Box.__hash__
    monkeypatch.setattr(TensorMetadata, "__eq__", lambda *pair: compared.append(pair) or compare(*pair))
    monkeypatch.setattr(Box, "__hash__", lambda box: hashed.append(box) or hash_box(box))
    boxes = [(Box((4 * rank, 0), (4, 2)),) for rank in range(2)]
    tensors = [TensorMetadata((8, 2), "bfloat16", local) for local in boxes]
    collected = collect_all_boxes([{f"layers.{number}": tensor for number in range(100)} for tensor in tensors])
    assert set(map(id, collected.values())) == {id(collected["layers.0"])}
    assert collected["layers.99"] == tuple(boxes)
    assert len(compared) == 1
    assert len(hashed) <= 4  # of two boxes, to find the layout and to check that it is complete
