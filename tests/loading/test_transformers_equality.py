"""The dtype, the class and the config are those that ``from_pretrained`` of transformers chooses."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import truth, zoo
from tests.files.fake_hub import COMMIT, hub_that_has, snapshot_in
from tests.saving.adapters import tensors_of
from tests.small_checkpoints import small_qwen3
from tests.support.files import change_json
from tests.support.own_code import modules_in
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    Gemma3TextModel,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import shardwise
from shardwise import ConfigError
from shardwise.models import build
from shardwise.options import Ignore


def _without_dtype(folder):
    config = json.loads((folder / "config.json").read_text())
    config.pop("dtype", None)
    (folder / "config.json").write_text(json.dumps(config))


def _mixed(tensors, first):
    """The same in bfloat16, but for the tensors of this beginning, which are in float32."""
    return {name: value if name.startswith(first) else value.bfloat16() for name, value in tensors.items()}


@pytest.mark.parametrize(
    ("float32", "dtype"), [("model.norm", torch.bfloat16), ("lm_head", torch.float32), ("zzz", torch.bfloat16)]
)
def test_a_dtype_that_no_config_names_is_that_of_the_first_key(qwen3, tmp_path, float32, dtype):
    """In a file the tensors of wider dtypes come first; transformers goes by key."""
    folder = tmp_path / "mixed"
    shutil.copytree(qwen3, folder)
    _without_dtype(folder)
    tensors = tensors_of(folder)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file(_mixed(tensors, float32), folder / "model.safetensors", metadata={"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert shardwise.from_pretrained(folder).dtype is theirs.dtype is dtype
    assert shardwise.plan(folder, ranks=2).dtype == str(dtype).removeprefix("torch.")


def test_of_several_files_the_first_counts_or_what_their_index_names(qwen3, tmp_path):
    folder = tmp_path / "several"
    shutil.copytree(qwen3, folder)
    _without_dtype(folder)
    files = sorted(folder.glob("*.safetensors"))
    metadata = {"format": "pt"}
    save_file({name: value.half() for name, value in load_file(files[0]).items()}, files[0], metadata=metadata)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert shardwise.from_pretrained(folder).dtype is theirs.dtype is torch.float16
    change_json(folder / "model.safetensors.index.json", metadata={"dtype": "bfloat16"})
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert shardwise.from_pretrained(folder).dtype is theirs.dtype is torch.bfloat16


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory):
    """A checkpoint of a vision-language model; its config's dtype is in the outer config only."""
    specimen = zoo.Specimen("gemma3", "gemma3", "Gemma3ForConditionalGeneration", "vision-language")
    model = zoo.build(specimen, dtype=torch.bfloat16)
    folder = tmp_path_factory.mktemp("gemma3")
    model.save_pretrained(folder)
    return folder


def test_a_class_that_takes_a_part_of_the_config_gets_it(gemma3):
    common = {"key_mapping": {r"^language_model\.model\.": ""}}
    theirs = Gemma3TextModel.from_pretrained(gemma3, **common)
    common |= {"model_class": Gemma3TextModel, "on_unexpected": Ignore(("vision*", "multi_modal*"))}
    for keywords in ({}, {"config": AutoConfig.from_pretrained(gemma3)}):
        mine = shardwise.from_pretrained(gemma3, **common, **keywords)
        assert isinstance(mine.config, Gemma3TextConfig)
        assert mine.dtype is theirs.dtype
        assert truth.differences(truth.snapshot(mine), truth.snapshot(theirs)) == []


class OwnConfig(Qwen3Config):
    model_type = "own_of_a_user"


class OwnModel(Qwen3ForCausalLM):
    config_class = OwnConfig


class OwnQwen3(Qwen3ForCausalLM):
    """A class of a user's own for a type of model that transformers knows."""


@pytest.fixture
def own(qwen3, tmp_path):
    """A checkpoint of a type that transformers does not know."""
    folder = tmp_path / "own"
    shutil.copytree(qwen3, folder)
    change_json(folder / "config.json", model_type=OwnConfig.model_type, architectures=["OwnModel"])
    return folder


def test_classes_of_a_user_s_own(qwen3, own):
    expected = truth.snapshot(small_qwen3())
    for model_class, folder in ((OwnModel, own), (OwnQwen3, qwen3)):
        model = shardwise.from_pretrained(folder, model_class=model_class)
        assert type(model) is model_class
        assert isinstance(model.config, model_class.config_class)
        assert truth.differences(truth.snapshot(model), expected) == []
        assert shardwise.plan(folder, ranks=2, model_class=model_class).model_class == model_class.__name__


def test_a_class_that_is_registered_is_found_by_its_name(own):
    with pytest.raises(ConfigError, match="no usable config"):
        shardwise.from_pretrained(own)
    AutoConfig.register(OwnConfig.model_type, OwnConfig, exist_ok=True)
    AutoModelForCausalLM.register(OwnConfig, OwnModel, exist_ok=True)
    model = shardwise.from_pretrained(own)
    assert type(model) is OwnModel
    assert truth.differences(truth.snapshot(model), truth.snapshot(small_qwen3())) == []


def test_code_of_a_repository_is_fetched_with_consent_only(qwen3, tmp_path, monkeypatch):
    folder = tmp_path / "coded"
    shutil.copytree(qwen3, folder)
    (folder / "modeling_own.py").write_text(
        "from transformers import Qwen3ForCausalLM\n\n\nclass Coded(Qwen3ForCausalLM):\n    pass\n"
    )
    places = {"AutoModelForCausalLM": "modeling_own.Coded"}
    change_json(folder / "config.json", architectures=["Coded"], auto_map=places)
    place = snapshot_in(tmp_path)
    with hub_that_has({file.name: file.read_bytes() for file in folder.iterdir()}, tmp_path, monkeypatch):
        with pytest.raises(ConfigError, match="contains its own model code"):
            shardwise.from_pretrained("org/name", cache_dir=str(tmp_path))
        assert not (place / "modeling_own.py").exists()
        model = shardwise.from_pretrained("org/name", cache_dir=str(tmp_path), trust_remote_code=True)
    assert (place / "modeling_own.py").exists()
    assert (tmp_path / "models--org--name" / "refs" / "main").read_text() == COMMIT
    assert type(model).__name__ == "Coded"
    assert isinstance(model, PreTrainedModel)


def test_of_several_own_classes_the_one_of_the_config_is_taken(tmp_path):
    places = {auto: f"modeling_own.{auto[4:]}" for auto in ("AutoModel", "AutoModelForCausalLM", "AutoModelForX")}
    (tmp_path / "modeling_own.py").write_text(
        "".join(f"class {place.partition('.')[2]}:\n    pass\n\n\n" for place in places.values())
    )
    for names, taken in ((["ModelForX"], "ModelForX"), (["Model"], "Model"), (["Others"], "ModelForCausalLM")):
        config = Qwen3Config(architectures=names, auto_map=places)
        with modules_in(str(tmp_path / "modules")):
            model_class, _ = build.resolve_class(config, None, tmp_path, trust_remote_code=True)
        assert model_class.__name__ == taken
