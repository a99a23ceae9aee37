"""Arguments: unknown keywords, values of other types, and ranks that pass different ones."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import IA3Config, LoraConfig
from tests import truth
from tests.small_checkpoints import small_qwen3
from tests.support.world import agreed, attempt, require_same_error
from torch import nn

import shardwise
from shardwise import ConfigError, Sharding
from shardwise.options import HubOptions, LoadOptions
from shardwise.ranks.call_arguments import get_world


def _ask(directory: str, common: dict[str, Any], own: dict[str, Any], where: int) -> tuple[str, str]:
    keywords = {**common, **(own if dist.get_rank() == where else {})}
    return attempt(lambda: shardwise.from_pretrained(directory, **keywords))


def one_rank_asks_otherwise(directory: str, asked: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[Any]:
    """The outcome of each pair of keywords: those of all ranks, and what the second rank has beside."""
    return [_ask(directory, common, own, 1) for common, own in asked]


def one_rank_shards_with_nonsense(directory: str) -> tuple[str, str]:
    policy: Any = ("Block",) if dist.get_rank() == 1 else "whole_model"
    return attempt(lambda: shardwise.shard(nn.Linear(4, 4), shardwise.Sharding(wrap=policy)))


def one_rank_loads_otherwise(directory: str) -> list[tuple[str, str]]:
    """``load`` with a budget, and with another kind of checkpoint, on one rank alone."""
    rank = dist.get_rank()

    def load(checkpoint: Any, options: Any) -> None:
        with torch.device("meta"):
            model = nn.Linear(4, 4)
        shardwise.load(model, checkpoint, options=options)

    budget = shardwise.options.LoadOptions(budget_bytes=1 << (20 + rank))
    plain: Any = shardwise.options.LoadOptions() if rank else {"budget_bytes": 5000}
    return [
        attempt(load, directory, budget),
        attempt(load, directory if rank else "https://host/name", shardwise.options.LoadOptions()),
        attempt(load, directory, plain),
    ]


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"shardin": 1}, r"from_pretrained\(\) got an unexpected keyword argument 'shardin'. Did you mean 'shardi"),
        ({"use_cache": 1}, "Attributes of the config go into config_overrides"),
        ({"device_map": "auto"}, r"'device_map'. Pass sharding=Sharding\(mesh="),
        ({"quantization_config": {"load_in_8bit": True}}, "load_in_8bit is not known here"),
        ({"load_in_8bit": True}, "8-bit weights are not supported"),
        ({"tp_plan": "auto"}, "shardwise.load"),
        ({"max_memory": {0: "1GB"}}, "shardwise.plan"),
        ({"offload_folder": "x"}, "CPUOffloadPolicy"),
        ({"distributed_config": object()}, "Sharding"),
        ({"ignore_mismatched_sizes": True}, "on_mismatched=Initialize"),
        ({"add_pooling_layer": False}, "on_missing=Initialize"),
        ({"gguf_file": "model.gguf"}, "Convert it to safetensors"),
        ({"low_cpu_mem_usage": False}, "Leave it out"),
        ({"dtype": "float32", "torch_dtype": torch.bfloat16}, "two names of one argument"),
        ({"revision": "v2", "hub": HubOptions(revision="v1")}, "revision: is given twice"),
    ],
)
def test_unsupported_keywords_of_transformers_name_the_alternative(qwen3, keywords, said):
    with pytest.raises(ConfigError, match=said):
        shardwise.from_pretrained(qwen3, **keywords)
    with pytest.raises(ConfigError, match=said.replace("from_pretrained", "plan")):
        shardwise.plan(qwen3, ranks=2, **keywords)


@pytest.mark.parametrize(
    ("keyword", "said"),
    [
        ("gradient_checkpointing", r"Pass sharding=Sharding\(activation_checkpointing=True\)"),
        ("peft_config", r"Pass tuning=Lora\(config\)"),
        ("variant", r"Pass the path of the file or of the index, such as model\.fp16\.safetensors"),
    ],
)
def test_keywords_that_belong_elsewhere_are_answered_with_the_place(qwen3, keyword, said):
    with pytest.raises(ConfigError, match=said):
        shardwise.from_pretrained(qwen3, **{keyword: 1})


def test_keywords_of_transformers_that_are_honoured(qwen3, tmp_path):
    def load(**keywords):
        return shardwise.from_pretrained(qwen3, **keywords)

    assert load(torch_dtype="bfloat16").dtype is torch.bfloat16
    assert load(torch_dtype=torch.bfloat16, dtype="bfloat16").dtype is torch.bfloat16
    assert load(attn_implementation="eager").config._attn_implementation == "eager"
    assert load(attn_implementation="sdpa").config._attn_implementation == "sdpa"
    assert load(low_cpu_mem_usage=True, device_map=None, revision=None, token=None).dtype is torch.float32
    (tmp_path / "inner").symlink_to(qwen3)
    model = shardwise.from_pretrained(tmp_path, subfolder="inner", local_files_only=True, cache_dir="nowhere")
    assert truth.differences(truth.snapshot(model), truth.snapshot(small_qwen3())) == []
    with pytest.raises(ConfigError, match="cannot be built"):
        load(attn_implementation="nonsense")


def test_the_file_or_the_index_of_a_variant_is_named(tmp_path):
    plain, other = small_qwen3(), small_qwen3()
    for parameter in other.parameters():
        parameter.data += 1
    plain.save_pretrained(tmp_path)
    other.save_pretrained(tmp_path, variant="fp16", max_shard_size="30KB")
    index = tmp_path / "model.safetensors.index.fp16.json"
    found = shardwise.from_pretrained(index)
    assert truth.differences(truth.snapshot(found), truth.snapshot(other)) == []
    found = shardwise.from_pretrained(tmp_path)
    assert truth.differences(truth.snapshot(found), truth.snapshot(plain)) == []
    other.save_pretrained(tmp_path, variant="small")
    found = shardwise.from_pretrained(tmp_path / "model.small.safetensors")
    assert truth.differences(truth.snapshot(found), truth.snapshot(other)) == []


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"sharding": ("fsdp",)}, r"sharding is \('fsdp',\), of type tuple. Pass Sharding"),
        ({"sharding": Sharding}, r"sharding is the class Sharding. Pass an object of it: sharding=Sharding\(\.\."),
        ({"sharding": Sharding(wrap=("Block",))}, r"sharding.wrap is \('Block',\), of type tuple. Pass .*Classes"),
        ({"sharding": Sharding(mp_policy=torch.bfloat16)}, "sharding.mp_policy is .* Pass MixedPrecisionPolicy"),
        ({"tuning": shardwise.Lora}, "tuning is the class Lora"),
        ({"tuning": LoraConfig(r=4)}, r"LoraConfig. Pass Lora or .*, as in tuning=Lora\(LoraConfig\(...\)\)"),
        ({"sharding": Sharding(wrap="Qwen3Layer")}, r"Classes\(names=\('Qwen3Layer',\)\)"),
        ({"tuning": "lora"}, "tuning is 'lora', of type str. Pass Lora or Full or Freeze or ExistingLora or"),
        ({"on_missing": ("score.*",)}, "on_missing is .*, of type tuple. Pass Initialize"),
        ({"hub": {"revision": "v1"}}, "hub is .*, of type dict. Pass HubOptions"),
        ({"dtype": {"text_config": "bfloat16"}}, "dtype={'text_config': 'bfloat16'}: .* Pass one for the whole"),
        ({"options": LoadOptions(shared_reads="often")}, "options.shared_reads='often' is not known"),
        ({"trained_dtype": "bfloat16"}, "is not known. Pass one of 'unchanged', a dtype such as torch.float32"),
        ({"options": LoadOptions(device="cuda")}, "options.device is 'cuda', of type str. Pass device"),
        ({"tuning": shardwise.Lora({"r": 4})}, "config: is of type dict. Pass a peft.LoraConfig"),
        ({"tuning": shardwise.Lora(IA3Config())}, "IA3Config. .*call peft.get_peft_model on the whole model"),
    ],
)
def test_values_of_another_kind_than_is_meant(qwen3, keywords, said):
    with pytest.raises(ConfigError, match=said):
        shardwise.from_pretrained(qwen3, **keywords)
    if keywords.keys() <= {"sharding", "tuning", "on_missing", "hub"}:
        with pytest.raises(ConfigError, match=said):
            shardwise.plan(qwen3, ranks=2, **keywords)


def test_so_for_the_other_verbs(qwen3, tmp_path):
    model = nn.Linear(4, 4)
    asked = [
        (lambda: shardwise.shard(model, ("Block",)), "sharding is .*, of type tuple"),
        (lambda: shardwise.shard(model, options=LoadOptions()), "options is LoadOptions.*. Pass StateOptions"),
        (lambda: shardwise.shard("model"), "model is 'model', of type str. Pass Module"),
        (lambda: shardwise.load(model, qwen3, options=shardwise.options.StateOptions()), "options is StateOptions"),
        (lambda: shardwise.load(model, 5), "checkpoint is 5, of type int"),
        (lambda: shardwise.save(model, tmp_path / "out", options=LoadOptions()), "options is LoadOptions"),
        (lambda: shardwise.from_pretrained(nn.Linear(1, 1)), "name_or_path is a Linear"),
        (lambda: shardwise.plan(qwen3, ranks="2"), "ranks='2': is not a number of ranks"),
        (lambda: LoadOptions(budget_bytes="1GB"), "budget_bytes='1GB' is not a whole number of bytes"),
        (lambda: LoadOptions(budget_bytes=1e9), "budget_bytes=1000000000.0 is not a whole number of bytes"),
    ]
    for ask, said in asked:
        with pytest.raises(ConfigError, match=said):
            ask()


def test_a_token_is_not_shown():
    assert "hf_secret" not in repr(HubOptions(token="hf_secret"))


def test_processes_without_a_process_group_are_warned_once(monkeypatch, caplog):
    get_world(LoadOptions(), "load")
    monkeypatch.setenv("WORLD_SIZE", "4")
    get_world(shardwise.options.SaveOptions(), "save")  # of the first process alone
    assert not caplog.messages
    get_world(LoadOptions(), "from_pretrained")
    get_world(LoadOptions(), "load")
    [warned] = caplog.messages
    assert warned.startswith("WORLD_SIZE=4: there are several processes and no process group")


def test_differing_arguments_of_ranks_are_named(worlds, qwen3):
    whole = {"sharding": Sharding(wrap="whole_model")}
    asked = [
        (whole, {"sharding": Sharding(wrap="auto")}, "arguments on rank 1 is not that of rank 0: sharding.wrap ("),
        ({}, {"options": LoadOptions(budget_bytes=1 << 20)}, ": options.budget_bytes ("),
        ({}, {"options": LoadOptions(seed=1)}, "rank 1 is not that of rank 0: options.seed (1 against 0)"),
        ({}, {"options": LoadOptions(shared_reads="never")}, ": options.shared_reads ("),
        ({}, {"options": LoadOptions(check_memory=False)}, ": options.check_memory ("),
        ({}, {"dtype": "bfloat16"}, "rank 1 is not that of rank 0: dtype ('bfloat16' against left out)"),
        ({}, {"on_missing": shardwise.options.Initialize(("x",))}, ": on_missing ("),
        ({}, {"load_weights": False}, ": load_weights ("),
        ({}, {"tuning": shardwise.ExistingLora("/nowhere")}, ": tuning ("),
        ({}, {"key_mapping": {"a": "b"}}, ": key_mapping ("),
        ({}, {"attn_implementation": "eager"}, ": attn_implementation ("),
        ({}, {"experts_implementation": "eager"}, ": experts_implementation ("),
        ({}, {"config_overrides": {"hidden_act": "gelu"}}, "config on rank 1 is not that of rank 0: hidden_act"),
        ({}, {"shardin": 1}, "rank 1: from_pretrained() got an unexpected keyword argument 'shardin'"),
        ({}, {"sharding": Sharding(wrap="Block")}, "rank 1: sharding.wrap='Block' is not known"),
        ({}, {"device_map": "auto"}, "rank 1: from_pretrained() got an unexpected keyword argument 'device_map'"),
    ]
    pairs = [(common, own) for common, own, _ in asked]
    mine = agreed(worlds(2), one_rank_asks_otherwise, str(qwen3), pairs)
    for (kind, text), (*_, said) in zip(mine, asked, strict=True):
        assert said in text
        assert kind == ("ConfigError" if text.startswith("rank 1: ") else "RankMismatchError")


def test_so_for_shard_and_load(worlds, qwen3):
    ends = worlds(2).run(one_rank_shards_with_nonsense, "")
    require_same_error(ends, "ConfigError", "rank 1: sharding.wrap is ('Block',), of type tuple")
    budget, kind, options = zip(*worlds(2).run(one_rank_loads_otherwise, str(qwen3)), strict=True)
    require_same_error(budget, "RankMismatchError", "rank 1 is not that of rank 0: options.budget_bytes (")
    require_same_error(kind, "RankMismatchError", "rank 1 is not that of rank 0: the kind of checkpoint (")
    require_same_error(options, "ConfigError")
