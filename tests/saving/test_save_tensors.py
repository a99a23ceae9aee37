"""Tensors that are hard to save, casts, and what is refused."""

from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import torch
from safetensors.torch import load_file
from tests import zoo
from tests.saving import hard_models
from tests.saving.adapters import tensors_of
from tests.saving.hard_models import OPTIONS, Odd, expected
from tests.small_checkpoints import MIXTRAL, small_qwen3
from tests.support.files import contents
from tests.support.world import require_same_error
from tests.truth import unlike
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import shardwise

DTYPES = [None, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", ["1GB", "100B"])
def test_every_dtype_and_shape_is_saved_by_one_process(tmp_path, size, dtype):
    model = Odd()
    report = shardwise.save(model, tmp_path, max_shard_size=size, dtype=dtype, options=OPTIONS)
    assert unlike(tensors_of(tmp_path), expected(model, dtype)) == []
    assert report.tied == {"head.weight": "embedding.weight"}
    assert shardwise.verify(tmp_path).compared == len(expected(model, dtype))
    again = Odd(1)
    if dtype is None:
        shardwise.load(again, tmp_path)
        assert unlike(expected(again, None), expected(model, None)) == []


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_dtype_and_shape_is_saved_by_ranks(worlds, tmp_path, ranks, dtype):
    """On three ranks, uneven parts of some tensors, and empty ones of others."""
    worlds(ranks).run(hard_models.save_odd, str(tmp_path), "100B", dtype)
    assert unlike(tensors_of(tmp_path), expected(Odd(), dtype)) == []
    worlds(ranks).run(hard_models.save_odd, str(tmp_path), "1GB", dtype)
    assert unlike(tensors_of(tmp_path), expected(Odd(), dtype)) == []
    assert shardwise.verify(tmp_path).compared == len(expected(Odd(), dtype))


def with_odd_tensors(model):
    odd = Odd()
    for name in ("scalar", "tiny", "empty", "short", "narrow"):
        model.register_parameter(name, getattr(odd, name))
    for name in ("scale", "steps", "flags", "codes", "precise", "nothing"):
        model.register_buffer(name, getattr(odd, name))
    return model


def require_same_files(root, *names):
    for name in names:
        found, wanted = (root / folder / name for folder in ("shardwise", "transformers"))
        assert found.read_bytes() == wanted.read_bytes(), name


@pytest.mark.parametrize("tied", [False, True])
def test_a_transformers_model_with_odd_tensors_is_the_file_that_transformers_saves(tmp_path, tied):
    model = with_odd_tensors(small_qwen3(tie_word_embeddings=tied))
    model.save_pretrained(tmp_path / "transformers")
    shardwise.save(model, tmp_path / "shardwise")
    require_same_files(tmp_path, "model.safetensors", "config.json", "generation_config.json")


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_a_transformers_model_sharded_by_hand(worlds, tmp_path, dtype):
    model = small_qwen3(tie_word_embeddings=True)
    worlds(3).run(hard_models.save_by_hand, str(tmp_path / "shardwise"), dtype)
    with zoo.silenced():
        (model if dtype is None else model.to(dtype)).save_pretrained(tmp_path / "transformers")
    require_same_files(tmp_path, "model.safetensors", "config.json")


def tokenizer(**keywords):
    made = Tokenizer(models.WordLevel({"[UNK]": 0, "one": 1, "two": 2}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", **keywords)


def test_the_tokenizer_is_put_beside(tmp_path):
    made = tokenizer(chat_template="{{ messages }}")
    made.save_pretrained(tmp_path / "alone")
    shardwise.save(small_qwen3(), tmp_path / "saved", tokenizer=made)
    beside = sorted(path.name for path in (tmp_path / "alone").iterdir())
    assert len(beside) > 2
    for name in beside:
        assert (tmp_path / "saved" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()


def test_a_tokenizer_with_several_templates_is_put_beside(tmp_path):
    made = tokenizer(chat_template={"default": "{{ messages }}", "tools": "{{ tools }}"})
    made.save_pretrained(tmp_path / "alone")
    shardwise.save(small_qwen3(), tmp_path / "saved", tokenizer=made)
    beside, saved = contents(tmp_path / "alone"), contents(tmp_path / "saved")
    assert "additional_chat_templates/tools.jinja" in beside
    assert {name: saved[name] for name in beside} == beside
    assert shardwise.verify(tmp_path / "saved").is_sound


def test_templates_of_a_new_tokenizer_take_the_place_of_the_older_ones(tmp_path):
    """Not beside the new default one, by which transformers would render chats without tools alone."""
    model, extra = small_qwen3(), tmp_path / "saved" / "additional_chat_templates"
    shardwise.save(model, tmp_path / "saved", tokenizer=tokenizer(chat_template={"default": "a", "tools": "b"}))
    (extra / "notes.txt").touch()
    shardwise.save(model, tmp_path / "saved")
    assert {path.name for path in extra.iterdir()} == {"tools.jinja", "notes.txt"}
    shardwise.save(model, tmp_path / "saved", tokenizer=tokenizer(chat_template="c"))
    assert {path.name for path in extra.iterdir()} == {"notes.txt"}


def test_a_tokenizer_that_writes_folders_is_refused_before_anything_is_written(tmp_path):
    made = SimpleNamespace(save_pretrained=lambda folder: Path(folder, "voices").mkdir())
    with pytest.raises(
        shardwise.ConfigError, match="the tokenizer or the model's code writes a folder, voices.*Leave tokenizer"
    ):
        shardwise.save(small_qwen3(), tmp_path / "saved", tokenizer=made)
    assert not (tmp_path / "saved").exists()


def test_an_object_that_is_not_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(shardwise.ConfigError, match="tokenizer='gpt2' has no save_pretrained"):
        shardwise.save(nn.Linear(2, 2), tmp_path / "saved", tokenizer="gpt2")


IN_TWO = (6000, "6000", "6KB", "6 kb", "5.9KiB", 6000.0)


@pytest.mark.parametrize(("size", "files"), [*((size, 2) for size in IN_TWO), ("1GB", 1), ("0.5 MiB", 1), (1, 4)])
def test_sizes_of_files(tmp_path, size, files):
    model = nn.Sequential(nn.Linear(4, 300), nn.Linear(300, 4))
    report = shardwise.save(model, tmp_path, max_shard_size=size)
    assert len(report.files) == files
    assert unlike(tensors_of(tmp_path), dict(model.state_dict())) == []


@pytest.mark.parametrize(
    "size", [0, -5, "", "many", "5PB", "GB", "0.5B", "1e9", "-1GB", None, True, "9" * 400, "1 2"]
)
def test_sizes_that_are_none(tmp_path, size):
    with pytest.raises(shardwise.ConfigError, match="is not a size of at least one byte"):
        shardwise.save(nn.Linear(2, 2), tmp_path, max_shard_size=size)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.int8, "int64", "float8_e4m3fn", "nonsense", "load", torch.complex64, 16])
def test_dtypes_that_cannot_be_cast_to(tmp_path, dtype):
    with pytest.raises(shardwise.ConfigError, match="is not a floating dtype of 16 bits or more"):
        shardwise.save(nn.Linear(2, 2), tmp_path, dtype=dtype)
    assert list(tmp_path.iterdir()) == []


def test_internal_names_are_the_modules_own(tmp_path):
    model = zoo.build(MIXTRAL)
    shardwise.save(model, tmp_path / "own", names="internal")
    shardwise.save(model, tmp_path / "hub")
    own, hub = tensors_of(tmp_path / "own"), tensors_of(tmp_path / "hub")
    assert unlike(own, {name: tensor.detach() for name, tensor in model.state_dict().items()}) == []
    assert len(hub) > len(own)


def test_a_model_on_meta_is_refused(tmp_path):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(shardwise.ShardingError, match=r"bias on meta: without values.*Load the model first"):
        shardwise.save(model, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_dtype_that_no_file_holds_is_refused(tmp_path):
    model = nn.Linear(2, 2)
    model.register_buffer("waves", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(shardwise.ShardingError, match=r"waves is torch.complex128, which safetensors cannot hold"):
        shardwise.save(model, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", hard_models.UNEQUAL)
def test_ranks_at_odds_are_refused(worlds, tmp_path, what):
    found = worlds(2).run(hard_models.save_unequal, str(tmp_path), what)
    wanted = {"meta": "ShardingError", "nonsense": "ConfigError"}
    named = {"cast": "dtype (torch.bfloat16 against None)", "verify": "verify (True against False)"}
    require_same_error(found, wanted.get(what, "RankMismatchError"), named.get(what, ""))
    assert list(tmp_path.iterdir()) == []


def test_a_model_with_an_adapter_has_no_names_on_the_hub(qwen3, tmp_path):
    model = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(qwen3), peft.LoraConfig(target_modules=["q_proj"])
    )
    with pytest.raises(shardwise.ConfigError, match="has PEFT adapters.*save_adapter"):
        shardwise.save(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    shardwise.save(model, tmp_path / "all", names="internal")
    assert any("lora_A" in name for name in load_file(tmp_path / "all" / "model.safetensors"))
    shardwise.save(model.merge_and_unload(), tmp_path / "merged")
    AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
