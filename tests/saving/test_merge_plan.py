"""Merge plans: the tensors of a base that an adapter changes, and adapters that do not fit."""

from collections.abc import Mapping
from typing import Any

import pytest

from shardwise.core.errors import KeyMismatchError
from shardwise.core.expression import Stored
from shardwise.core.tensors import DType
from shardwise.files.peft_adapter import LoraConfig
from shardwise.saving.merge_plan import (
    LowRank,
    MergePlan,
    MergeTargets,
    Replaced,
    WeightForm,
    find_whole_tensors,
    plan_merge,
)

PREFIX = "base_model.model."
TENSORS: dict[str, tuple[int, ...]] = {
    "embed.weight": (11, 6),
    "q.weight": (4, 6),
    "q.bias": (4,),
    "conv.weight": (6, 4),
    "picture.weight": (5, 3, 2, 2),
    "norm.weight": (6,),
    "experts.gate_up": (3, 8, 6),
    "experts.down": (3, 6, 4),
    "turned.up": (3, 6, 8),
    "head.weight": (11, 6),
}
TARGETS = MergeTargets(
    tensors=TENSORS,
    keys={"experts.0.w1.weight": (4, 6)},
    parameters={"experts": ("gate_up", "down"), "turned": ("up",), "q": ("weight", "bias")},
    columns=frozenset({"conv", "turned"}),
    renamed={
        **{name: name for name in TENSORS},
        "old.weight": "q.weight",
        "old.bias": "q.bias",
        "moe.down": "experts.down",
    }.get,
)


def adapter(**shapes: tuple[int, ...]) -> dict[str, Stored]:
    """Tensors by key, ``__`` in it for a dot."""
    keys = {PREFIX + name.replace("__", "."): shape for name, shape in shapes.items()}
    return {key: Stored(key, shape, DType.F32) for key, shape in keys.items()}


def planned(stored: Mapping[str, Stored], targets: MergeTargets = TARGETS, **settings: Any) -> MergePlan:
    config = LoraConfig(**{"r": 2, "lora_alpha": 6, **settings})
    return plan_merge(config, stored, targets, adapter_name="mine", what="adapter and base")


def refusal(stored: Mapping[str, Stored], **settings: Any) -> str:
    with pytest.raises(KeyMismatchError) as caught:
        planned(stored, **settings)
    lines = str(caught.value).splitlines()
    assert lines[0] == "adapter and base: the adapter does not fit the base"
    assert lines[-1] == "Merge it into the base that it was trained on, saved with the new head if it has one"
    return "\n".join(lines[1:-1])


@pytest.mark.parametrize(
    ("form", "shape", "factors"),
    [
        (WeightForm.ROWS, (4, 6), ((2, 6), (4, 2))),
        (WeightForm.ROWS, (5, 3, 2, 2), ((2, 3, 2, 2), (5, 2, 1, 1))),
        (WeightForm.COLUMNS, (6, 4), ((2, 6), (4, 2))),
        (WeightForm.EXPERTS, (3, 8, 6), ((6, 6), (8, 6))),
        (WeightForm.EXPERT_COLUMNS, (3, 6, 8), ((6, 6), (8, 6))),
    ],
)
def test_shapes_of_factors(form: WeightForm, shape: tuple[int, ...], factors: object) -> None:
    assert form.factors(shape, 2) == factors
    assert form.is_stacked == (len(shape) == 3)


def test_convolutions_and_a_bias_that_is_replaced() -> None:
    stored = adapter(
        picture__lora_A__weight=(2, 3, 2, 2),
        picture__lora_B__weight=(5, 2, 1, 1),
        q__lora_A__weight=(2, 6),
        q__lora_B__weight=(4, 2),
        q__bias=(4,),
    )
    plan = planned(stored)
    a, b, _, _, replaced = stored.values()
    assert plan.tensors["picture.weight"] == (LowRank("picture", WeightForm.ROWS, 2, 3.0, a, b),)
    assert plan.tensors["q.bias"] == (Replaced("q", replaced),)


def test_parameters_under_an_older_name_and_of_two_dimensions() -> None:
    old = planned(adapter(moe__lora_A__weight=(6, 4), moe__lora_B__weight=(6, 6)), target_parameters=("moe.down",))
    assert list(old.tensors) == ["experts.down"]
    flat = planned(adapter(q__lora_A__weight=(2, 6), q__lora_B__weight=(4, 2)), target_parameters=("q.weight",))
    (edit,) = flat.tensors["q.weight"]
    assert isinstance(edit, LowRank)
    assert (edit.form, edit.module) == (WeightForm.ROWS, "q.weight")
    inner = planned(adapter(q__lora_A__weight=(2, 6), q__lora_B__weight=(4, 2)), target_parameters=("eight",))
    assert inner.modules == ("q",), "names are compared part by part"
    assert "names 1 parameters of experts" in refusal(
        adapter(experts__base_layer__lora_A__weight=(6, 6), experts__base_layer__lora_B__weight=(8, 6)),
        target_parameters=("experts.down",),
    )


def test_names_of_tensors_that_are_not_factors() -> None:
    stored = adapter(
        head__modules_to_save__mine__weight=(11, 6),
        norm__modules_to_save__weight=(6,),
        deep__head__base_layer__weight=(1,),
        q__bias=(4,),
        head__lora_A__weight=(2, 6),
        embed__weight=(11, 6),
        embed__modules_to_save__weight=(11, 6),
        embed__original_module__weight=(11, 6),
    )
    names = find_whole_tensors(stored, adapter_name="mine")
    assert {key.removeprefix(PREFIX): name for key, name in names.items()} == {
        "head.modules_to_save.mine.weight": "head.weight",
        "norm.modules_to_save.weight": "norm.weight",
        "deep.head.base_layer.weight": "deep.head.weight",
        "q.bias": "q.bias",
        "embed.weight": "embed.weight",
    }


SOUND = {"q__lora_A__weight": (2, 6), "q__lora_B__weight": (4, 2)}


@pytest.mark.parametrize(
    ("shapes", "settings", "words"),
    [
        ({"q__lora_B__weight": (4, 2)}, {}, ["missing in the adapter: 1", "lora_A of q, beside"]),
        ({"q__lora_A__theirs__weight": (2, 6)}, {}, ["not used: 1", "is of the adapter theirs"]),
        ({**SOUND, "q__lora_A__mine__weight": (2, 6)}, {}, ["stored twice: 1", "q.lora_A.mine.weight and"]),
        (
            {"head__base_layer__weight": (11, 6), "head__modules_to_save__mine__weight": (11, 6)},
            {"modules_to_save": ("head",)},
            ["stored twice: 1", "head.base_layer.weight and base_model.model.head.modules_to_save.mine.weight"],
        ),
        (
            {**SOUND, "old__lora_A__weight": (2, 6), "old__lora_B__weight": (4, 2)},
            {},
            ["stored twice: 1", "q.lora_A.weight and base_model.model.old.lora_A.weight"],
        ),
        (
            {**SOUND, "q__lora_embedding_B": (4, 2)},
            {},
            ["stored twice: 1", "q.lora_B.weight and base_model.model.q.lora_embedding_B"],
        ),
        ({"q__lora_A__weight": (2, 6), "q__lora_B__weight": (2, 4)}, {}, ["(2, 4), but (4, 2) fits r=2"]),
        ({"norm__lora_A__weight": (2, 6), "norm__lora_B__weight": (6, 2)}, {}, ["has norm.weight as (6,)"]),
        (
            {"picture__lora_embedding_A": (2, 5), "picture__lora_embedding_B": (3, 2)},
            {},
            ["the base has picture.weight as (5, 3, 2, 2)"],
        ),
        ({"nothing__weight": (3,)}, {}, ["not used: 1", "the base has no nothing.weight"]),
        ({**SOUND, "q__lora_magnitude_vector": (6,)}, {"use_dora": True}, ["(6,), but (4,) is wanted"]),
        ({**SOUND, "q__lora_magnitude_vector": (2, 4)}, {"use_dora": True}, ["(2, 4), but (4,) is wanted"]),
        ({**SOUND, "q__lora_magnitude_vector": ()}, {"use_dora": True}, ["(), but (4,) is wanted"]),
        ({**SOUND, "q__lora_A__bias": (2,)}, {}, ["q.lora_A.bias: lora_bias is not set"]),
        ({**SOUND, "q__lora_B__bias": (4,)}, {}, ["not used: 1", "q.lora_B.bias: lora_bias is not set"]),
    ],
)
def test_an_adapter_that_does_not_fit(shapes: Any, settings: Any, words: list[str]) -> None:
    message = refusal(adapter(**shapes), **settings)
    assert all(word in message for word in words), message
    assert len(message.splitlines()) == 2, message


def test_every_fault_at_once_and_long_lists_cut() -> None:
    shapes = {f"n{chr(97 + number)}__weight": (1,) for number in range(23)}
    message = refusal(adapter(**shapes, q__lora_A__weight=(2, 6))).splitlines()
    assert message[0] == "  tensors that are not used: 23"
    assert len([line for line in message if "the base has no n" in line]) == 20
    assert message[21] == "    ... and 3 more"
    assert message[22] == "  tensors that are missing in the adapter: 1"
    whole = refusal(adapter(**{f"n{number}__weight": (1,) for number in range(20)}))
    assert "more" not in whole
