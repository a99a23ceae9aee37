"""Plans of loads, and everything that can be wrong with one, without files or processes."""

import pytest

from shardwise.core.consents import Consent, Ignore, Initialize
from shardwise.core.errors import ConfigError, KeyMismatchError
from shardwise.core.expression import Bindings, Stored, slice_dim, stack
from shardwise.core.layout import LocalBox, ModelLayout, Origin, TensorKind, TensorLayout
from shardwise.core.tensors import Box, DType, Strided, numel
from shardwise.files.checkpoint_index import CheckpointIndex, TensorEntry
from shardwise.files.stored_tensors import stored_tensors
from shardwise.loading.plan import FromCheckpoint, Init, Keep, ModelRules, Recompute, Tie, plan_load


def tensor(name, *shape, kind=TensorKind.PARAMETER, dtype=DType.F32, origin=Origin.INIT_WEIGHTS, aliases=()):
    whole = Box.whole(shape)
    return TensorLayout(
        names=(name, *aliases),
        kind=kind,
        shape=shape,
        dtype=dtype,
        boxes=(LocalBox(whole, Strided.contiguous(shape)),),
        placement="whole",
        requires_grad=True,
        origin=origin,
    )


def index_of(**stored):
    entries = {
        key: TensorEntry(key, dtype, shape, "model.safetensors", 0, numel(shape) * dtype.bits // 8)
        for key, (shape, dtype) in stored.items()
    }
    return CheckpointIndex("somewhere", {"model.safetensors": 1000}, entries, {}, "single file")


def plan(tensors, stored, *, matched=None, unmatched=None, faults=(), rules=None, consent=None):
    index = index_of(**stored)
    leaves = stored_tensors(index)
    offered = {key: (leaf,) for key, leaf in leaves.items() if key in {n for t in tensors for n in t.names}}
    bindings = Bindings(matched or offered, {}, unmatched or {}, dict.fromkeys(faults, ()))
    return plan_load(index, ModelLayout(tuple(tensors)), bindings, rules or ModelRules(), consent or Consent())


F32, I64, F4 = DType.F32, DType.I64, DType.F4


def test_every_tensor_has_one_fill():
    tensors = [
        tensor("embed", 4, 2, aliases=("head",)),
        tensor("score", 2, 2),
        tensor("inv_freq", 3, kind=TensorKind.NON_PERSISTENT_BUFFER),
        tensor("cache", 3, kind=TensorKind.NON_PERSISTENT_BUFFER, origin=Origin.AS_IT_IS),
    ]
    made = plan(tensors, {"embed": ((4, 2), F32)}, consent=Consent(missing=Initialize(("score*",))))
    assert made.fills == {
        "embed": FromCheckpoint(Stored("embed", (4, 2), F32)),
        "head": Tie("embed"),
        "score": Init(Origin.INIT_WEIGHTS),
        "inv_freq": Recompute(Origin.INIT_WEIGHTS),
        "cache": Keep(),
    }
    assert made.missing_keys == ("score",)


def test_two_keys_for_one_tensor_are_refused():
    one, other = Stored("norm", (2,), F32), Stored("model.norm", (2,), F32)
    with pytest.raises(KeyMismatchError, match=r"norm: stored more than once, as norm, model\.norm"):
        plan([tensor("norm", 2)], {"norm": ((2,), F32), "model.norm": ((2,), F32)}, matched={"norm": (one, other)})


def test_keys_that_the_model_class_ignores_need_no_consent():
    rules = ModelRules(ignore_missing=(r"\.bias$",), ignore_unexpected=(r"^mtp\.",))
    made = plan(
        [tensor("a.bias", 2)], {"mtp.0": ((1,), F32)}, matched={}, unmatched={"mtp.0": "mtp.0"}, rules=rules
    )
    assert made.fills == {"a.bias": Init(Origin.INIT_WEIGHTS)}
    assert made.ignored_keys == ("mtp.0",)
    assert made.missing_keys == made.unexpected_keys == ()


def test_tensors_added_by_tuning_need_no_consent_and_are_not_missing():
    made = plan([tensor("a", 2), tensor("a.lora_A", 2, origin=Origin.TUNING)], {"a": ((2,), F32)})
    assert made.fills["a.lora_A"] == Init(Origin.TUNING)
    assert made.missing_keys == ()


def test_types_smaller_than_a_byte_are_refused():
    with pytest.raises(KeyMismatchError, match="without its quantizer"):
        plan([tensor("a", 4)], {"a": ((4,), F4)})


@pytest.mark.parametrize("consent", [Initialize, Ignore])
def test_a_glob_alone_is_no_tuple_of_globs(consent):
    """Its letters would be globs: "*" among them would consent to everything."""
    with pytest.raises(ConfigError, match=r"only=\('score\.\*',\)"):
        consent("score.*")


def test_the_digest_differs_between_plans_and_not_by_order():
    leaf = Stored("w", (6, 2), F32)
    experts = [tensor("a", 3, 2), tensor("b", 3, 2)]
    halves = {"a": (slice_dim(leaf, 0, 0, 3),), "b": (slice_dim(leaf, 0, 3, 3),)}
    stored = {"w": ((6, 2), F32)}
    one = plan(experts, stored, matched=halves)
    other = plan(experts[::-1], stored, matched=halves)
    swapped = plan(experts, stored, matched={"a": halves["b"], "b": halves["a"]})
    assert one.digest == other.digest
    assert one.digest != swapped.digest
    assert one.fingerprints.keys() == swapped.fingerprints.keys()


def test_computed_shapes_are_compared_too():
    experts = stack([Stored(f"e.{i}", (2, 2), F32) for i in range(3)], 0)
    stored = {f"e.{i}": ((2, 2), F32) for i in range(3)}
    with pytest.raises(KeyMismatchError, match=r"stored \(3, 2, 2\) as Stack"):
        plan([tensor("experts", 4, 2, 2)], stored, matched={"experts": (experts,)})


PREFIX = r'Pass key_mapping={r"\^net\\\.": ""}, as the names differ by net\. .*--key-mapping .\^net\\\.. .*\)\.$'


@pytest.mark.parametrize(
    ("names", "keys", "advice"),
    [
        (("a.w", "b.w", "b.stacked"), ("net.a.w", "net.b.w", "net.b.0", "loss"), PREFIX),
        (("net.a.w", "net.b.w"), ("a.w", "b.w"), r'Pass key_mapping={r"\^": "net\."}'),
        (("a.w",), ("base_model.model.a.lora_A.default.weight",), "with lora_ are those of a PEFT model"),
        (("a.w", "b.w", "c.w"), ("net.a.w", "b", "c"), "Pass on_missing=Initialize.* on_unexpected=Ignore"),
        (("net.a.w", "b.w", "c.w"), ("a.w", "d.w"), "Pass on_missing=Initialize.* on_unexpected=Ignore"),
    ],
    ids=["prefix of keys", "prefix of the model", "adapter", "other names", "a head of others"],
)
def test_names_that_differ_by_a_prefix_are_to_be_renamed(names, keys, advice):
    stored = dict.fromkeys(keys, ((2,), F32))
    with pytest.raises(KeyMismatchError, match=advice):
        plan([tensor(name, 2) for name in names], stored, unmatched={key: key for key in keys})


def test_consents_do_not_leave_out_the_whole_checkpoint():
    tensors, stored, unmatched = [tensor("a.w", 2)], {"net.a.w": ((2,), F32)}, {"net.a.w": "net.a.w"}
    consent = Consent(missing=Initialize(("*",)), unexpected=Ignore())
    with pytest.raises(KeyMismatchError, match="(?s)none of the checkpoint's tensors has.*Pass key_mapping="):
        plan(tensors, stored, unmatched=unmatched, consent=consent)
    other = {"d.w": ((2,), F32)}  # a part of a model that has new tensors only
    assert plan(tensors, other, unmatched={"d.w": "d.w"}, consent=consent).missing_keys == ("a.w",)
    made = plan([*tensors, tensor("b.w", 2)], {**stored, "b.w": ((2,), F32)}, unmatched=unmatched, consent=consent)
    assert made.missing_keys == ("a.w",)
