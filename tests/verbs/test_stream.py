"""Going through a model's tensors: those that transformers saves, on every mesh; and what ends it."""

import pytest
import torch
from tests import zoo
from tests.harness.world import require_same_error
from tests.verbs import streaming

from shardwise.conversion.computed import Computed, WholeOperation
from shardwise.conversion.expression import Stored
from shardwise.engines import streaming as stream
from shardwise.engines.streaming import StreamOptions, iter_hf_tensors
from shardwise.errors import ConfigError, KeyMismatchError
from shardwise.models.revert import Output
from shardwise.tensors import DType

NAMES = ("llama", "gpt2", "gpt_neox", "phi3", "qwen3_moe")
"""Plain; transposed and tied; fused qkv; fused gate and up; experts that are split."""

WAYS = [
    ("flat", 2, 4096, "every"),
    ("flat", 3, 1 << 14, "first"),
    ("hsdp", 4, 1 << 15, "every"),
    ("tp", 4, 1 << 26, "first"),
    ("ep", 4, 1 << 14, "every"),
    ("shard1", 2, 1 << 14, "every"),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("streams")
    for specimen in zoo.causal_lm_specimens():
        if specimen.name in NAMES:
            zoo.save_original(zoo.build(specimen), folder / specimen.name)
    return {name: str(folder / name) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_gives_what_transformers_saves(saved, name):
    assert streaming.compare(name, saved[name], "flat", 4096, "every") == []


@pytest.mark.distributed
@pytest.mark.parametrize(("mesh", "size", "bucket", "to"), WAYS)
def test_ranks_give_what_transformers_saves(worlds, saved, mesh, size, bucket, to):
    faults, applied = {}, 0
    for name in NAMES:
        found = worlds(size).run(streaming.compare, name, saved[name], mesh, bucket, to)
        applied += None not in found
        if any(found):
            faults[name] = found
    assert faults == {}
    assert applied >= (1 if mesh == "ep" else 3)


@pytest.mark.distributed
@pytest.mark.parametrize("what", ["dtype", "internal", "own"])
def test_what_is_asked_for_the_tensors_is_so(worlds, what):
    assert worlds(2).run(streaming.options_of, "qwen3_moe", "flat", what) == [[], []]


def test_tensors_without_elements_keep_their_places():
    keys, faults = streaming.odd()
    assert keys == ["first", "scale", "turned", "between", "last", "flags"]
    assert faults == []


@pytest.mark.distributed
@pytest.mark.parametrize("what", ["adapter", "internal", "merged", "rslora"])
def test_tensors_of_a_peft_model_are_as_peft_has_them(worlds, what):
    pytest.importorskip("peft")
    assert worlds(2).run(streaming.adapter, what) == [[], []]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("hub", "the hub has no names for both together; pass only=MergedAdapter()"),
        ("dora", "q_proj is adapted by a variant of LoRA"),
        ("whole", "lm_head is trained whole"),
        ("embedding", "embed_tokens is adapted as Embedding"),
    ],
)
def test_adapters_that_cannot_be_merged_are_refused(what, words):
    pytest.importorskip("peft")
    (message,) = streaming.adapter(what)
    assert words in message


# What ends it


@pytest.mark.distributed
def test_all_ranks_may_leave_after_the_same_tensor(worlds):
    ends = worlds(2).run(streaming.leave_after, "llama", [3, 3], "break")
    assert ends[0] == ends[1]
    assert ends[0][:2] == ("", "")
    assert ends[0][2] > 3


@pytest.mark.distributed
@pytest.mark.parametrize("how", ["break", "raise"])
def test_a_loop_that_ends_on_one_rank_makes_the_others_raise(worlds, how):
    one, other = worlds(2).run(streaming.leave_after, "llama", [None, 3], how)
    assert other == (("", "", 0) if how == "break" else ("LookupError", "the engine does not know this tensor", 3))
    assert one[0] == "RankLostError"
    assert "rank 1" in one[1]
    assert "its loop over the tensors ended before the last one" in one[1]


@pytest.mark.distributed
def test_ranks_must_ask_for_the_same(worlds):
    require_same_error(worlds(2).run(streaming.disagree), "RankMismatchError", "arguments")


def test_what_cannot_be_is_refused_at_once():
    with pytest.raises(ConfigError, match="torch.int8 is not a floating dtype"):
        iter_hf_tensors(streaming.Odd(), dtype=torch.int8)
    with pytest.raises(ConfigError, match="bucket_bytes=1 "):
        StreamOptions(bucket_bytes=1)


def test_a_conversion_that_computes_is_refused(monkeypatch):
    operation = WholeOperation("Twice", ((),), {"scale_twice": ()}, lambda values: {"scale_twice": values[0]}, 8)
    computed = Computed(operation, "scale_twice", (), DType.F32, (Stored("scale", (), DType.F32),))
    outputs = {"scale_twice": Output("scale_twice", DType.F32, computed)}
    monkeypatch.setattr(stream, "revert", lambda *args, **keywords: outputs)
    with pytest.raises(KeyMismatchError, match="scale_twice: transformers computes"):
        next(iter_hf_tensors(streaming.Odd()))
