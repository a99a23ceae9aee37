"""Going through a model's tensors: those that transformers saves, on every mesh; and what ends it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from tests import load_cases, zoo
from tests.saving.adapters import tensors_of
from tests.saving.merged import tensors_to_save
from tests.support.world import attempt, require_same_error
from torch import nn
from transformers.core_model_loading import ConversionOps, WeightConverter, revert_weight_conversion

import shardwise
from shardwise.core.errors import ConfigError, KeyMismatchError
from shardwise.fsdp.named_tensors import raw_bytes
from shardwise.models.selection import MergedAdapter
from shardwise.ranks.timeouts import Timeouts
from shardwise.saving.stream import StreamOptions, iter_hf_tensors


def sharded(name: str, mesh: str) -> nn.Module:
    """A model with values on every rank, sharded where there are several."""
    model = zoo.causal_lm(name)
    if dist.is_initialized():
        load_cases.MESHES[mesh](model)
    return model


def compare(name: str, folder: str, mesh: str, bucket_bytes: int, to: str) -> list[str]:
    """What is not as in the files that transformers has saved."""
    saved, whole = tensors_of(Path(folder)), zoo.causal_lm(name)
    order = [key for key in revert_weight_conversion(whole, whole.state_dict()) if key in saved]
    model = sharded(name, mesh)
    options = StreamOptions(bucket_bytes=bucket_bytes)
    target = "first_rank" if to == "first" else "all_ranks"
    keys: list[str] = []
    faults: list[str] = []
    is_target = to == "every" or not dist.is_initialized() or dist.get_rank() == 0
    given = iter_hf_tensors(model, to=target, options=options)
    faults += differences(given, keys, saved, is_target=is_target)
    if keys != order:
        faults.append(f"{len(keys)} keys are not in order, or not those of {len(order)}")
    return faults


def differences(
    given: Iterator[tuple[str, torch.Tensor]], keys: list[str], saved: dict[str, torch.Tensor], *, is_target: bool
) -> list[str]:
    """What is given in another way than it was saved. Every tensor is written to, which concerns nobody else."""
    faults: list[str] = []
    for key, tensor in given:
        keys.append(key)
        wanted = saved[key]
        if (tensor.shape, tensor.dtype) != (wanted.shape, wanted.dtype):
            faults.append(f"{key} is {tensor.dtype} {tuple(tensor.shape)}")
        elif not is_target:
            faults += [] if tensor.is_meta else [f"{key} has values"]
        elif not torch.equal(raw_bytes(tensor), raw_bytes(wanted)):
            faults.append(f"{key} has other values")
        raw_bytes(tensor).fill_(255)
    return faults


def options_of(name: str, mesh: str, what: str) -> list[str]:
    """What is wrong about the tensors when something is asked for them."""
    whole, model = zoo.causal_lm(name), sharded(name, mesh)
    options = StreamOptions(bucket_bytes=1 << 15)
    faults: list[str] = []
    if what == "dtype":
        plain = dict(iter_hf_tensors(model, options=options))
        for key, tensor in iter_hf_tensors(model, dtype=torch.bfloat16, options=options):
            wanted = plain[key].to(torch.bfloat16) if plain[key].is_floating_point() else plain[key]
            if tensor.dtype != wanted.dtype or not torch.equal(raw_bytes(tensor), raw_bytes(wanted)):
                faults.append(key)
    elif what == "internal":
        values = {key: tensor.clone() for key, tensor in whole.state_dict().items()}
        found = dict(iter_hf_tensors(model, names="internal", options=options))
        faults += [key for key, tensor in found.items() if not torch.equal(tensor, values[key])]
        faults += [f"{key} is missing" for key in values.keys() - found.keys()]
    elif what == "own":
        kept = list(iter_hf_tensors(model, options=options))
        again = dict(iter_hf_tensors(model, options=options))
        faults += [key for key, tensor in kept if not torch.equal(tensor, again[key])]
    return faults


class Odd(nn.Module):
    """Tensors without elements first, between and last; a scalar; columns held transposed; shared names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.empty(0, 3))
        self.scale = nn.Parameter(torch.tensor(3.0))
        self.turned = nn.Parameter(torch.arange(35.0).view(5, 7).t())
        self.between = nn.Parameter(torch.empty(4, 0))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.last = nn.Parameter(torch.empty(0))


def odd() -> tuple[list[str], list[str]]:
    """(keys in order, those with other values)."""
    model = Odd()
    wanted = model.state_dict()
    found = list(iter_hf_tensors(model))
    faults = [key for key, tensor in found if not torch.equal(tensor, wanted[key]) or not tensor.is_contiguous()]
    return [key for key, _ in found], faults


def leave_after(name: str, counts: list[int | None], how: str) -> tuple[str, str, int]:
    """A loop that every rank leaves, by a break or an exception, after so many tensors; how the call ended."""
    model = sharded(name, "flat")
    count = counts[dist.get_rank()]
    timeouts = Timeouts(heartbeat_interval_s=0.1, heartbeat_timeout_s=3600, join_timeout_s=3600)
    options = StreamOptions(bucket_bytes=1 << 14, timeouts=timeouts)
    seen = 0
    try:
        for _, _ in iter_hf_tensors(model, options=options):
            seen += 1
            if seen == count:
                if how == "break":
                    break
                raise LookupError("the engine does not know this tensor")
    except Exception as error:
        return type(error).__name__, str(error), seen
    # All is in order again: the tensors can be gone through another time.
    whole = sum(1 for _ in iter_hf_tensors(model, options=options)) if counts[0] == counts[1] else 0
    return "", "", whole


def disagree() -> tuple[str, str]:
    """The ranks ask for different things."""
    model = Odd()
    return attempt(lambda: list(iter_hf_tensors(model, dtype=torch.bfloat16 if dist.get_rank() else None)))


def ask_for_integers() -> tuple[str, str]:
    """On rank 1 alone."""
    dtype = torch.int8 if dist.get_rank() else None
    return attempt(lambda: list(iter_hf_tensors(Odd(), dtype=dtype)))


def adapted(what: str) -> nn.Module:
    """A tiny model with a LoRA whose numbers are all other than zero."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"use_dora": what == "dora", "use_rslora": what == "rslora"}
    if what == "whole":
        options["modules_to_save"] = ["lm_head"]
    modules = ["q_proj", "embed_tokens"] if what == "embedding" else ["q_proj", "down_proj"]
    model = get_peft_model(zoo.causal_lm("llama"), LoraConfig(r=4, target_modules=modules, **options))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_()
    return model


def adapter(what: str) -> list[str]:
    """What is not as PEFT has it in the tensors of an adapted, sharded model; or the error."""
    model = adapted(what)
    everything = {key: value.clone() for key, value in model.state_dict().items()}
    wanted: dict[str, torch.Tensor] = get_peft_model_state_dict(model) if what == "adapter" else everything
    wanted = {key: value.clone() for key, value in wanted.items()}
    if dist.is_initialized():
        load_cases.shard(model, load_cases._mesh("cpu", (dist.get_world_size(),)), load_cases.by_rows)
    options = StreamOptions(bucket_bytes=1 << 14)
    if what == "adapter":
        found = dict(iter_hf_tensors(model, only=shardwise.options.AdapterOnly(), options=options))
    elif what == "internal":
        found = dict(iter_hf_tensors(model, names="internal", options=options))
    elif what in ("merged", "rslora"):
        found = dict(iter_hf_tensors(model, only=MergedAdapter(), options=options))
        wanted = adapted(what).merge_and_unload().state_dict()  # type: ignore[operator]
        for key in found.keys() & wanted.keys():  # products are summed up in another order
            if "q_proj" in key or "down_proj" in key:
                torch.testing.assert_close(found[key], wanted[key])
                found[key] = wanted[key]
    else:
        try:
            list(iter_hf_tensors(model, only=None if what == "hub" else MergedAdapter()))
        except shardwise.ConfigError as error:
            return [str(error)]
        return []
    faults = [f"{key} is in one only" for key in found.keys() ^ wanted.keys()]
    return faults + [key for key in found.keys() & wanted.keys() if not torch.equal(found[key], wanted[key])]


def merged_experts(name: str) -> list[str]:
    """What is not as PEFT has it in the tensors of a sharded model with a LoRA on fused experts, by their names."""

    def adapted() -> nn.Module:
        torch.manual_seed(0)
        parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        config = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=parameters)
        model = get_peft_model(zoo.causal_lm(name), config)
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                parameter.data.normal_()
        return model

    model = adapted()
    load_cases.shard(model, load_cases._mesh("cpu", (dist.get_world_size(),)), load_cases.by_rows)
    found = dict(iter_hf_tensors(model, only=MergedAdapter(), options=StreamOptions(bucket_bytes=1 << 14)))
    wanted = tensors_to_save(adapted().merge_and_unload())  # type: ignore[operator]
    faults = [f"{key} is in one only" for key in found.keys() ^ wanted.keys()]
    return faults + [key for key in wanted if not torch.allclose(found[key], wanted[key], rtol=1e-4, atol=1e-4)]


NAMES = ("llama", "gpt2", "gpt_neox", "phi3", "qwen3_moe")
"""Plain; transposed and tied; fused qkv; fused gate and up; experts that are split."""

WAYS = [
    ("flat", 2, 4096, "every", ("gpt2", "phi3", "qwen3_moe")),
    ("flat", 3, 1 << 14, "first", ("gpt2", "qwen3_moe")),
    pytest.param("hsdp", 4, 1 << 15, "every", ("gpt_neox", "qwen3_moe"), marks=pytest.mark.slow),
    ("tp", 4, 1 << 26, "first", ("llama", "qwen3_moe")),
    ("ep", 4, 1 << 14, "every", ("qwen3_moe",)),
    pytest.param("shard1", 2, 1 << 14, "every", ("phi3", "gpt2"), marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("streams")
    return {name: str(zoo.save_original(zoo.causal_lm(name), folder / name)) for name in NAMES}


@pytest.mark.parametrize("name", ["gpt2", "qwen3_moe"])
def test_one_rank_gives_what_transformers_saves(saved, name):
    assert compare(name, saved[name], "flat", 4096, "every") == []


@pytest.mark.parametrize(("mesh", "size", "bucket", "to", "names"), WAYS)
def test_ranks_give_what_transformers_saves(worlds, saved, mesh, size, bucket, to, names):
    for name in names:
        assert worlds(size).run(compare, name, saved[name], mesh, bucket, to) == [[]] * size, name


@pytest.mark.parametrize("what", ["dtype", "internal", "own"])
def test_tensor_options_are_applied(worlds, what):
    assert worlds(2).run(options_of, "qwen3_moe", "flat", what) == [[], []]


def test_tensors_without_elements_keep_their_places():
    keys, faults = odd()
    assert keys == ["first", "scale", "turned", "between", "last", "flags"]
    assert faults == []


@pytest.mark.parametrize("what", ["adapter", "internal", "merged", "rslora"])
def test_tensors_of_a_peft_model_are_as_peft_has_them(worlds, what):
    pytest.importorskip("peft")
    assert worlds(2).run(adapter, what) == [[], []]


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_a_lora_on_fused_experts_is_merged(worlds, name):
    """Stacked as (experts, out, in) and as (experts, in, out)."""
    pytest.importorskip("peft")
    assert worlds(2).run(merged_experts, name) == [[], []]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("hub", "the hub has no names for base and adapter together. Pass only=MergedAdapter()"),
        ("dora", "q_proj is adapted by a variant of LoRA"),
        ("whole", "lm_head is in modules_to_save, which cannot be merged here. Save the adapter with shardwise."),
        ("embedding", "embed_tokens is an adapted Embedding"),
    ],
)
def test_adapters_that_cannot_be_merged_are_refused(what, words):
    pytest.importorskip("peft")
    (message,) = adapter(what)
    assert words in message


# What ends it


def test_all_ranks_may_leave_after_the_same_tensor(worlds):
    ends = worlds(2).run(leave_after, "llama", [3, 3], "break")
    assert ends[0] == ends[1]
    assert ends[0][:2] == ("", "")
    assert ends[0][2] > 3


@pytest.mark.parametrize("how", ["break", "raise"])
def test_a_loop_that_ends_on_one_rank_makes_the_others_raise(worlds, how):
    one, other = worlds(2).run(leave_after, "llama", [None, 3], how)
    assert other == (("", "", 0) if how == "break" else ("LookupError", "the engine does not know this tensor", 3))
    assert one[0] == "RankLostError"
    assert "rank 1" in one[1]
    assert "its loop over the tensors ended before the last one" in one[1]


def test_ranks_must_ask_for_the_same(worlds):
    require_same_error(worlds(2).run(disagree), "RankMismatchError", "arguments")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dtype": torch.int8}, "torch.int8 is not a floating dtype"),
        ({"to": "rank0"}, "to='rank0' is not known. Pass one of 'all_ranks', 'first_rank'"),
        ({"names": "hubb"}, "names='hubb' is not known"),
        ({"only": "adapter"}, "only is 'adapter'"),
        ({"options": None}, "options is None"),
    ],
)
def test_invalid_arguments_are_refused(arguments, words):
    with pytest.raises(ConfigError, match=words):
        next(iter_hf_tensors(Odd(), **arguments))


def test_invalid_arguments_of_one_rank_end_the_call_on_all(worlds):
    require_same_error(worlds(2).run(ask_for_integers), "ConfigError", "rank 1: dtype=torch.int8")


def test_buckets_have_a_smallest_size():
    with pytest.raises(ConfigError, match="bucket_bytes=1 "):
        StreamOptions(bucket_bytes=1)


class Doubled(ConversionOps):
    """Doubles a tensor, both when it is loaded and when it is saved."""

    reverse_op = property(lambda self: self)

    def convert(self, input_dict, source_patterns, target_patterns, **_):
        (tensors,) = input_dict.values()
        return {target_patterns[0]: tensors[0] * 2}


def test_a_conversion_that_computes_is_refused(tmp_path):
    model = zoo.causal_lm("llama")
    model._weight_conversions = [WeightConverter("model.norm.scale", "model.norm.weight", [Doubled()])]
    said = r"LlamaForCausalLM: transformers computes a tensor .* \(aten.mul.Tensor of model.norm.weight\)"
    with pytest.raises(KeyMismatchError, match=said):
        next(iter_hf_tensors(model))
    with pytest.raises(KeyMismatchError, match=said):
        shardwise.save(model, tmp_path / "hub")
    shardwise.save(model, tmp_path / "internal", names="internal")
    assert torch.equal(tensors_of(tmp_path / "internal")["model.norm.weight"], model.model.norm.weight)
