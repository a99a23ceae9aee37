"""A state and its places: every fault at once, and what is tolerated is told."""

import pytest

from shardwise.core.consents import Consent, Ignore
from shardwise.core.errors import KeyMismatchError, RankMismatchError
from shardwise.core.tensors import Box, DType
from shardwise.transfer.matching import SourceTensor, StateSlot, collect_sources, match, match_groups

WHOLE = SourceTensor((4, 2), DType.F32, (Box.whole((4, 2)),))

STRICT = Consent()


def place(*names, shape=(4, 2), dtype=DType.F32):
    return StateSlot(names, shape, dtype)


def test_a_tensor_is_found_under_any_of_its_names():
    (taken,) = match([place("a", "b")], collect_sources([{"b": WHOLE}, {}]), STRICT).tensors
    assert (taken.name, taken.slot.names[0]) == ("b", "a")
    assert taken.source_boxes == ((Box.whole((4, 2)),), ())


def test_ranks_of_a_subgroup_are_shown_as_global_ranks():
    with pytest.raises(
        RankMismatchError,
        match="ranks 4 and 6 provide different states:\n  a is not on rank 6\n  b is not on rank 4",
    ):
        match([], collect_sources([{"a": WHOLE}, {"b": WHOLE}]), STRICT, (4, 6))
    with pytest.raises(KeyMismatchError, match="on rank 6, expected"):
        match([place("a", shape=(3, 2))], collect_sources([{}, {"a": WHOLE}]), STRICT, (4, 6))


def test_all_faults_are_in_one_error():
    places = [place("a"), place("b"), place("c", shape=(3, 2)), place("d", dtype=DType.I32)]
    with pytest.raises(KeyMismatchError) as caught:
        match(places, collect_sources([{"a": WHOLE, "c": WHOLE, "d": WHOLE, "e": WHOLE}]), STRICT)
    *lines, ways = str(caught.value).splitlines()
    assert lines == [
        "the state does not fit:",
        "  mismatched 2     c: (4, 2) F32 on rank 0, expected (3, 2) F32",
        "                   d: (4, 2) F32 on rank 0, expected (4, 2) I32",
        "  missing 1        b",
        "  unexpected 1     e",
    ]
    assert ways.startswith("Pass on_mismatched=Ignore(only=...) for what may keep its values; on_missing=Ignore(")


def test_a_tied_name_with_another_shape_is_a_fault_of_its_own():
    other = SourceTensor((2, 2), DType.F32, (Box.whole((2, 2)),))
    with pytest.raises(KeyMismatchError, match=r"b: \(2, 2\)"):
        match([place("a", "b")], collect_sources([{"a": WHOLE, "b": other}]), STRICT)


# Groups


def test_empty_groups_are_paired_in_order():
    assert match_groups([[], ["a"], []], [[], ["a"], []], [], STRICT).source_groups == (0, 1, 2)


def test_tolerated_parameters_do_not_distinguish_groups():
    consent = Consent(missing=Ignore(only=("b",)), unexpected=Ignore(only=("old*",)))
    found = match_groups([["a", "b"], ["b2"], ["c"]], [["c", "old"], ["a"], ["b2"]], ["old2"], consent)
    assert found.source_groups == (1, 2, 0)
    assert (found.missing, found.unexpected) == (("b",), ("old", "old2"))


def test_a_group_of_which_nothing_is_known_keeps_its_settings():
    found = match_groups([["a"], ["b"], []], [["a"], ["old"]], [], Consent(missing=Ignore(), unexpected=Ignore()))
    assert found.source_groups == (0, None, None)


@pytest.mark.parametrize(
    ("given", "stateful", "text"),
    [
        ([["a"], ["b", "c"]], [], r"no group of the state has the parameters of group 0 \(a, b\)"),
        ([["a", "b", "c"]], [], "there they are in group 0"),
        ([["a", "b"], ["c"]], ["e"], "unexpected 1     e"),
    ],
)
def test_groups_without_their_like_are_refused(given, stateful, text):
    with pytest.raises(KeyMismatchError, match=text):
        match_groups([["a", "b"], ["c"]], given, stateful, STRICT)
