"""Models inside of nested dicts, and views of one storage."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.tensors import Strided
from shardwise.files.join_entries import WrapperChoice, choose_model, find_strided_obstacle


def paths(*names: str) -> list[tuple[str, ...]]:
    return [tuple(name.split("/")) for name in names]


@pytest.mark.parametrize(
    ("names", "wrapper", "others"),
    [
        (("a", "b"), (), ()),
        (("model/a", "model/b"), ("model",), ()),
        (("app/model/a", "app/model/b"), ("app", "model"), ()),
        (("model/a", "optimizer/a"), ("model",), (("optimizer",),)),
        (("model/a", "Optim_1/a", "optim_0/a"), ("model",), (("Optim_1",), ("optim_0",))),
        (("x/model/a", "x/optimizer/a"), ("x", "model"), (("x", "optimizer"),)),
        (("a/w", "b/w"), (), ()),
        (("model/a", "b"), (), ()),
        (("optimizer", "model/a"), (), ()),
        (("model/layer/w", "model/b"), ("model",), ()),
        (("state/x", "param_groups/y", "model/a"), (), ()),
        ((), (), ()),
    ],
)
def test_where_the_model_is(names: tuple[str, ...], wrapper: tuple[str, ...], others: tuple[object, ...]) -> None:
    assert choose_model(paths(*names)) == WrapperChoice(wrapper, others)


@pytest.mark.parametrize(
    "names",
    [
        ("state/0/exp_avg", "state/1/exp_avg"),
        ("state/a", "param_groups/0"),
        ("optimizer/state/0/exp_avg",),
        ("optim/a",),
    ],
)
def test_where_there_is_none(names: tuple[str, ...]) -> None:
    assert choose_model(paths(*names)) is None


def test_keys_of_the_model() -> None:
    choice = WrapperChoice(("model",), (("optimizer",), ("model", "optim")))
    assert choice.model_key(("model", "a", "weight")) == "a.weight"
    assert choice.model_key(("optimizer", "a")) is None
    assert choice.model_key(("model", "optim", "a")) is None
    assert choice.model_key(("model", "optimal")) == "optimal"


views = st.integers(0, 3).flatmap(
    lambda dims: st.builds(
        Strided, st.integers(0, 4), st.tuples(*[st.integers(0, 3)] * dims), st.tuples(*[st.integers(0, 9)] * dims)
    )
)


@given(views, st.integers(0, 40))
def test_a_view_sees_each_of_its_elements_once_and_no_others(view: Strided, available: int) -> None:
    """What is accepted is so; what is refused for its strides may be sound, where dimensions interleave."""
    seen = [
        view.offset + sum(index * stride for index, stride in zip(indices, view.strides, strict=True))
        for indices in itertools.product(*map(range, view.sizes))
    ]
    fault = find_strided_obstacle(view, available)
    if fault is None:
        assert len(set(seen)) == len(seen)
        assert not seen or max(seen) < available
    elif "reaches" in fault:
        assert fault == f"it reaches to element {max(seen) + 1} of a storage of {available}"
        assert max(seen) >= available
    else:
        ordered = sorted((stride, size) for stride, size in zip(view.strides, view.sizes, strict=True) if size > 1)
        assert any(stride <= sum(s * (n - 1) for s, n in ordered[:at]) for at, (stride, _) in enumerate(ordered))
