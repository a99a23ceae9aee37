"""Conversions that compute, mixed sources, and the layouts old checkpoints have."""

import pytest
import torch
from safetensors.torch import save_file
from tests import truth, zoo
from tests.saving.adapters import tensors_of
from tests.small_checkpoints import MIXTRAL, small_qwen3
from torch import nn
from transformers import BertConfig, BertForMaskedLM
from transformers.core_model_loading import ConversionOps, WeightConverter

import shardwise
from shardwise import ConfigError, KeyMismatchError
from shardwise.models import pretrained


class Halve(ConversionOps):
    """A rule that computes: twice its source, in two halves."""

    def convert(self, input_dict, source_patterns, target_patterns, **_):
        total = 2 * input_dict[source_patterns[0]][0]
        if float(total.sum()) > 0:  # a look at the values, as some rules take one
            total = total + 1
        return dict(zip(target_patterns, total.chunk(2), strict=True))


class Sum(ConversionOps):
    """A rule that computes without a look at the values."""

    def convert(self, input_dict, source_patterns, target_patterns, **_):
        return {target_patterns[0]: input_dict[source_patterns[0]][0] + input_dict[source_patterns[1]][0]}


class TwoWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.total = nn.Parameter(torch.empty(4, 6, device="meta"))
        self.plain = nn.Parameter(torch.empty(3, device="meta"))


@pytest.fixture
def summed(tmp_path, monkeypatch):
    """A checkpoint whose `total` is the sum of two stored tensors, by a rule that computes."""
    one, other = torch.rand(4, 6), torch.rand(4, 6)
    save_file({"one": one, "other": other, "plain": torch.arange(3.0)}, tmp_path / "model.safetensors")
    rule = WeightConverter(["one", "other"], "total", [Sum()])
    monkeypatch.setattr(pretrained, "get_conversion_transforms", lambda *_: [rule])
    return tmp_path, one + other


def test_a_conversion_that_computes_is_computed_whole(summed):
    directory, total = summed
    model = TwoWeights()
    report = shardwise.load(model, directory)
    assert torch.equal(model.total, total)
    assert torch.equal(model.plain, torch.arange(3.0))
    assert report.computed == ("total",)


def test_a_conversion_that_computes_needs_its_inputs_within_the_budget(tmp_path, monkeypatch):
    save_file(
        {"one": torch.ones(60, 20), "other": torch.ones(60, 20), "plain": torch.ones(3)}, tmp_path / "m.safetensors"
    )
    rule = WeightConverter(["one", "other"], "total", [Sum()])
    monkeypatch.setattr(pretrained, "get_conversion_transforms", lambda *_: [rule])
    model = TwoWeights()
    model.total = nn.Parameter(torch.empty(60, 20, device="meta"))
    with pytest.raises(ConfigError, match=r"total: Sum of 2 tensors needs .*Raise budget_bytes"):
        shardwise.load(model, tmp_path, options=shardwise.options.LoadOptions(budget_bytes=4096))


def test_a_conversion_that_cannot_be_foreseen_is_refused_by_name(tmp_path, monkeypatch):
    save_file({"one": torch.ones(8, 6)}, tmp_path / "model.safetensors")
    rule = WeightConverter("one", ["total", "rest"], [Halve()])
    monkeypatch.setattr(pretrained, "get_conversion_transforms", lambda *_: [rule])
    model = nn.Module()
    model.total = nn.Parameter(torch.empty(4, 6, device="meta"))
    model.rest = nn.Parameter(torch.empty(4, 6, device="meta"))
    with pytest.raises(KeyMismatchError, match=r"conversion 1 .*total from one by Halve") as caught:
        shardwise.load(model, tmp_path)
    assert "missing" not in str(caught.value)


def test_sources_of_different_dtypes(mixtral, changed):
    """Half of the experts in float32, half in bfloat16: each element is cast once, as in transformers."""
    tensors = tensors_of(mixtral)
    mixed = {key: value.bfloat16() if number % 2 else value for number, (key, value) in enumerate(tensors.items())}
    wanted = {"torch.float32", "torch.bfloat16"}
    assert {str(value.dtype) for key, value in mixed.items() if "experts" in key} == wanted
    folder = changed(mixtral, lambda _: mixed)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        expected = zoo.model_class(MIXTRAL).from_pretrained(folder, dtype=dtype)
        found = shardwise.from_pretrained(folder, dtype=dtype)
        assert truth.differences(truth.snapshot(found), truth.snapshot(expected)) == []


def test_a_base_model_s_checkpoint_fills_a_tied_head(tmp_path):
    expected = small_qwen3(tie_word_embeddings=True)
    expected.model.save_pretrained(tmp_path)
    model = shardwise.from_pretrained(tmp_path, model_class=type(expected))
    assert truth.differences(truth.snapshot(model), truth.snapshot(expected)) == []


def test_layer_norms_called_gamma_and_beta(tmp_path):
    """Names of the first BERT checkpoints, which transformers still renames."""
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    expected = BertForMaskedLM(BertConfig(**sizes, intermediate_size=24, max_position_embeddings=32))
    zoo.fill(expected)
    old = {}
    for name, value in expected.state_dict().items():
        if "decoder" not in name:
            stem, _, leaf = name.rpartition(".")
            leaf = {"weight": "gamma", "bias": "beta"}[leaf] if stem.endswith("LayerNorm") else leaf
            old[f"{stem}.{leaf}"] = value.clone()
    save_file(old, tmp_path / "model.safetensors", metadata={"format": "pt"})
    expected.config.save_pretrained(tmp_path)
    model = shardwise.from_pretrained(tmp_path, model_class=BertForMaskedLM)
    assert truth.differences(truth.snapshot(model), truth.snapshot(expected)) == []


def test_tensors_kept_as_plain_attributes_are_computed(tmp_path):
    """Transformers' own loader leaves these on meta."""
    specimen = next((item for item in zoo.converter_specimens() if item.name.startswith("mimi:")), None)
    if specimen is None:
        pytest.skip("this version of transformers has no such model")
    expected = zoo.build(specimen)
    zoo.save_original(expected, tmp_path)
    model, report = shardwise.from_pretrained(tmp_path, model_class=type(expected), output_loading_info=True)
    name = "encoder.downsample.padding_left"
    assert name in report.recomputed
    assert model.get_submodule("encoder.downsample").padding_left == expected.encoder.downsample.padding_left
    assert not model.get_submodule("encoder.downsample").padding_left.is_meta


def test_keep_in_float32_modules(tmp_path):
    """What a class keeps in float32 is kept, stored or not in another dtype."""
    kept = 0
    for specimen in zoo.causal_lm_specimens():
        if specimen.name in {"deepseek_v3", "jamba", "glm4_moe", "minimax_m2", "rwkv"}:
            folder = zoo.save_original(zoo.build(specimen), tmp_path / specimen.name)
            kind = zoo.model_class(specimen)
            expected = kind.from_pretrained(folder, dtype=torch.float16)
            found = shardwise.from_pretrained(folder, model_class=kind, dtype=torch.float16)
            assert truth.differences(truth.snapshot(found), truth.snapshot(expected)) == [], specimen.name
            kept += sum(tensor.dtype == torch.float32 for tensor in found.state_dict().values())
    assert kept > 0
