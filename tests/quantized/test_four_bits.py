"""A base in four bits: each rank's rows alone, and bit for bit what bitsandbytes has in one process."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from tests import zoo
from tests.quantized import four_bits, quantizing
from tests.quantized.requirements import needs_packed_shards
from tests.saving.adapters import save_adapter, tensors_of
from tests.small_checkpoints import small_qwen3
from tests.support.files import change_json
from tests.support.world import run_forked
from tests.truth import require_equal
from transformers import AutoConfig, BitsAndBytesConfig, Qwen3ForCausalLM

import shardwise
from shardwise.models.four_bit.config import from_transformers
from shardwise.options import Fp4, Nf4

SIZES = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "dtype": "bfloat16"}


def written(folder: Path, **changes: object) -> Path:
    return zoo.save_original(small_qwen3(**SIZES | changes).bfloat16(), folder, max_shard_size="60KB")


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    return written(tmp_path_factory.mktemp("plain"))


@needs_packed_shards
@pytest.mark.parametrize(
    ("mesh", "size", "form", "scales"),
    [
        ("flat", 2, "nf4", "plain"),
        pytest.param("flat", 3, "nf4", "nested", marks=pytest.mark.slow),
        pytest.param("flat", 1, "fp4", "nested", marks=pytest.mark.slow),
        pytest.param("hsdp", 4, "nf4", "nested", marks=pytest.mark.slow),
    ],
)
def test_bytes_answers_gradients_and_files(worlds, plain, tmp_path, mesh, size, form, scales):
    base = plain if size != 3 else written(tmp_path / "tied", tie_word_embeddings=True)
    how = (str(base), mesh, form, scales, str(tmp_path))
    assert run_forked(size, four_bits.differing, *how) == [[]] * size
    assert worlds(size).run(four_bits.differing_alone, *how) == [[]] * size


@needs_packed_shards
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("mesh", "size", "placement"),
    [
        ("flat", 2, "in blocks"),
        pytest.param("flat", 3, "replicated", marks=pytest.mark.slow),
    ],
)
def test_a_lora_learns_as_on_bitsandbytes(plain, mesh, size, placement):
    for told in run_forked(size, four_bits.trained_alike, str(plain), mesh, placement):
        assert told["same names"], told
        assert told["kinds"] == ["Linear4bit"], told
        assert told["falls"], told
        assert told["losses"] < 1e-6, told
        assert told["gradients"] < 1e-5, told


@needs_packed_shards
@pytest.mark.parametrize("is_nested", [False, True], ids=["plain", "nested"])
def test_a_live_model_in_four_bits_is_sharded(worlds, plain, tmp_path, is_nested):
    live = four_bits.our_model(str(plain), "nf4", torch.bfloat16, "flat", is_nested)
    torch.save(live, tmp_path / "live")
    assert worlds(2).run(four_bits.sharded_live, str(tmp_path / "live"), str(plain), is_nested) == [[]] * 2


@needs_packed_shards
@pytest.mark.parametrize(("mesh", "size", "scales"), [("flat", 3, "plain"), ("hsdp", 4, "nested")])
def test_a_lora_is_merged_into_the_numbers(worlds, plain, mesh, size, scales):
    for told in worlds(size).run(four_bits.merged, str(plain), mesh, scales):
        assert told["numbers"] < 1e-7, told
        assert told["answers"] < 1e-5, told


def changed(plain: Path, folder: Path, key: str, change) -> str:
    """A copy of the checkpoint in one file, in which a tensor has been changed."""
    folder.mkdir()
    shutil.copy(plain / "config.json", folder)
    tensors = tensors_of(plain)
    change(tensors, key)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite(plain, tmp_path, value):
    def spoil(tensors, key):
        tensors[key][3, 5] = value

    folder = changed(plain, tmp_path / "bad", UP, spoil)
    with pytest.raises(shardwise.FormatError, match=r"up_proj\.weight.*row 3 has values that are not finite"):
        shardwise.from_pretrained(folder, quantization=Nf4())


def test_packed_from_eight_bits(plain, tmp_path):
    """What is stored in FP8 goes straight into four bits: as its numbers would."""
    folder = tmp_path / "fp8"
    shutil.copytree(plain, folder)
    numbers = quantizing.quantize(folder, "fp8 blocks")
    rounded = {key: value.bfloat16() for key, value in numbers.items()}
    whole = changed(plain, tmp_path / "whole", UP, lambda tensors, _: tensors.update(rounded))
    wanted, found = (
        shardwise.from_pretrained(str(place), quantization=Nf4()).state_dict() for place in (whole, folder)
    )
    require_equal(found, wanted)


def test_modules_that_are_not_quantized_are_named(plain):
    quantization = Nf4(block_size=128, skip_modules=("v_proj",))
    model, report = shardwise.from_pretrained(str(plain), quantization=quantization, output_loading_info=True)
    assert "192 columns, not a multiple of block_size=128" in str(report.notes)
    assert "v_proj is not quantized: as requested" in str(report.notes)
    assert "lm_head is not quantized: it is the output layer" in str(report.notes)
    assert model.model.layers[0].mlp.down_proj.weight.is_floating_point()
    assert not model.model.layers[0].mlp.up_proj.weight.is_floating_point()


def test_names_of_transformers_may_match_nothing(plain):
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=["v_proj", "vision_tower"]
    )
    model, report = shardwise.from_pretrained(str(plain), quantization_config=config, output_loading_info=True)
    assert "names modules that the model does not have: vision_tower" in str(report.notes)
    assert model.model.layers[0].self_attn.v_proj.weight.is_floating_point()
    assert not model.model.layers[0].self_attn.q_proj.weight.is_floating_point()


def lora(**settings: object) -> shardwise.Lora:
    return shardwise.Lora(LoraConfig(r=2, **settings))


NOT_TRAINED = [
    (Nf4(), shardwise.Full(), "keeps them in four bits"),
    (Fp4(), shardwise.Freeze(1), r"tuning=Freeze\(\.\.\.\): trains weights of the base"),
    (Nf4(), lora(modules_to_save=["up_proj"]), "modules_to_save trains .*up_proj whole, which is in four bits"),
    (Nf4(), lora(use_dora=True), "needs norms of rows, but .* is in four bits. Leave out use_dora"),
    (
        Nf4(),
        lora(target_modules=[], target_parameters=["q_proj.weight"]),
        r"target_parameters: the weight of model\.layers\.0\.self_attn\.q_proj is in four bits. Name the layer",
    ),
    ("nf4", shardwise.Full(), "quantization"),
]
NO_CONFIG = [
    ({"quant_method": "gptq", "bits": 4}, "gptq is not known"),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "load_in_8bit is not known"),
    ("nf4", r"quantization_config is 'nf4', and neither .*. Pass BitsAndBytesConfig"),
    (Nf4, "quantization_config is <class .*, and neither"),
    (Nf4(), r"quantization_config is Nf4\(.*, and neither"),
    ({}, "a config without quant_method is not known"),
    ({"load_in_4bit": True, "llm_int8_skip_modules": "lm_head"}, "skip_modules='lm_head': is a tuple"),
    ({"load_in_4bit": True, "bnb_4bit_compute_dtype": "float23"}, "compute_dtype='float23': is one of"),
]


@pytest.mark.parametrize(
    ("keywords", "told"),
    [
        *(({"quantization": given, "tuning": tuning}, told) for given, tuning, told in NOT_TRAINED),
        *(({"quantization_config": given}, told) for given, told in NO_CONFIG),
        ({"quantization": Nf4(skip_modules=("qq_proj",))}, r"skip_modules=\['qq_proj'\] matches no linear"),
        ({"load_in_4bit": True}, r"Pass quantization=Nf4\(\)"),
    ],
)
def test_unsupported_quantization_is_refused(plain, keywords, told):
    with pytest.raises(shardwise.ConfigError, match=told):
        shardwise.from_pretrained(str(plain), **keywords)


@pytest.mark.slow
def test_a_pattern_of_a_checkpoint_that_takes_too_long_is_refused(plain, tmp_path):
    shutil.copytree(plain, tmp_path / "model")
    skipped = {"llm_int8_skip_modules": [r"((\w|\.)+)+!"]}
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, **skipped}
    change_json(tmp_path / "model/config.json", quantization_config=config)
    with pytest.raises(shardwise.ConfigError, match="skip_modules='.*!': takes more than 2 seconds"):
        shardwise.from_pretrained(tmp_path / "model")


def test_invalid_settings_are_refused():
    with pytest.raises(shardwise.ConfigError, match="block_size=48"):
        Nf4(block_size=48)
    with pytest.raises(shardwise.ConfigError, match="compute_dtype"):
        Nf4(compute_dtype=torch.int8)
    with pytest.warns(UserWarning, match="codes are kept and sharded as uint8"):
        from_transformers(
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"}
        )


@pytest.fixture(scope="module")
def stored(plain, tmp_path_factory) -> Path:
    """A checkpoint that is in four bits, its scales nested."""
    folder = tmp_path_factory.mktemp("stored")
    shardwise.save(shardwise.from_pretrained(str(plain), quantization=Nf4(double_quant=True)), folder)
    return folder


def drop(end):
    return lambda tensors, key: tensors.pop(f"{key}.{end}")


def put(end, value):
    return lambda tensors, key: tensors.__setitem__(f"{key}.{end}", value(tensors[f"{key}.{end}"]))


def told_otherwise(**changes):
    def change(text):
        told = json.loads(bytes(text.tolist())) | changes
        return torch.frombuffer(bytearray(json.dumps(told).encode()), dtype=torch.uint8)

    return put("quant_state.bitsandbytes__nf4", change)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (drop("nested_absmax"), "their nested_absmax, nested_quant_map or bytes are missing"),
        (drop("nested_quant_map"), "their nested_absmax, nested_quant_map or bytes are missing"),
        (drop("absmax"), "it has no absmax"),
        (drop("quant_map"), "quant_map is missing, or differs from"),
        (drop("quant_state.bitsandbytes__nf4"), "belongs to packed bytes that are missing or incomplete"),
        (put("quant_map", lambda found: found * 2), "or differs from that of bitsandbytes"),
        (put("absmax", lambda found: found[:-1].clone()), "scales, and .* in blocks of 64"),
        (put("absmax", lambda found: found.half()), "nested_quant_map or bytes are missing"),
        (put("nested_absmax", lambda found: found.double()), "its nested_absmax is F64"),
        (told_otherwise(blocksize=128), "absmax has .* scales"),
        (told_otherwise(blocksize=7), "blocks of 7"),
        (told_otherwise(shape=[192, 64]), "and its quant_state the shape"),
        (told_otherwise(shape=[-1, 64]), "has the shape"),
        (told_otherwise(quant_type="fp4"), "has the type 'fp4', not nf4"),
        (told_otherwise(nested_offset="1"), "has the nested_offset"),
        (told_otherwise(nested_blocksize=64), "nested in blocks of 64, not 256"),
        (put("quant_state.bitsandbytes__nf4", lambda found: found[:9].clone()), "not valid JSON"),
    ],
)
def test_tensors_beside_packed_bytes_are_compared_with_them(stored, tmp_path, change, told):
    folder = changed(stored, tmp_path / "bad", UP, change)
    with pytest.raises(shardwise.FormatError, match=rf"up_proj\.weight.*{told}"):
        shardwise.from_pretrained(folder)


def test_a_text_model_stays_in_the_form_that_the_whole_config_names(stored, tmp_path):
    folder = tmp_path / "whole"
    shutil.copytree(stored, folder)
    text = json.loads((folder / "config.json").read_text())
    whole = {"model_type": "llava", "quantization_config": text.pop("quantization_config"), "text_config": text}
    (folder / "config.json").write_text(json.dumps(whole))
    wanted = shardwise.from_pretrained(stored).state_dict()
    for keywords in ({}, {"config": AutoConfig.from_pretrained(folder), "quantization": "as_stored"}):
        model = shardwise.from_pretrained(folder, model_class=Qwen3ForCausalLM, **keywords)
        require_equal(model.state_dict(), wanted)


def test_weights_are_dequantized_from_the_stored_tensors(stored):
    first = shardwise.from_pretrained(str(stored))
    second = shardwise.from_pretrained(str(stored), quantization="dequantize")
    tokens = torch.arange(12).view(1, 12)
    assert torch.equal(first(tokens).logits, second(tokens).logits)
    assert not hasattr(second.config, "quantization_config")
    name = UP.removesuffix(".weight")
    assert torch.equal(first.get_submodule(name).dequantize(), second.get_submodule(name).weight)


def test_the_plan_counts_packed_bytes(plain):
    tuning = shardwise.Lora(LoraConfig(r=2))
    made = shardwise.plan(str(plain), ranks=2, quantization=Nf4(), tuning=tuning, device="cpu")
    whole = shardwise.plan(str(plain), ranks=2, tuning=shardwise.Lora(LoraConfig(r=2)), device="cpu")
    layers = 2 * (128 * (128 + 64 + 64 + 128) + 3 * 128 * 192)
    saved = layers * 2 - layers // 2 - layers // 64 * 4
    assert sum(rank.shard_bytes for rank in whole.ranks) - sum(rank.shard_bytes for rank in made.ranks) == saved


@pytest.mark.parametrize("scales", [False, True])
def test_loaded_later(plain, tmp_path, scales):
    quantization = Nf4(double_quant=scales)
    wanted = shardwise.from_pretrained(str(plain), quantization=quantization)
    shardwise.save(wanted, tmp_path / "internal", names="internal")
    for source in (plain, tmp_path / "internal"):
        found = shardwise.from_pretrained(str(plain), quantization=quantization, load_weights=False)
        with torch.device("meta"):
            shardwise.load(found, source)
        require_equal(found.state_dict(), wanted.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("tuning", [None, lora(target_modules=["q_proj"])])
def test_restored_into_what_was_not_loaded(plain, tmp_path, tuning):
    def build(quantization: object, *, is_loaded: bool) -> torch.nn.Module:
        return shardwise.from_pretrained(
            str(plain), quantization=quantization, tuning=tuning, load_weights=is_loaded
        )

    nested = Nf4(double_quant=True)
    saved, restored = build(nested, is_loaded=True), build(nested, is_loaded=False)
    checkpointer = shardwise.Checkpointer(tmp_path)
    checkpointer.save(1, shardwise.TrainState(saved))
    checkpointer.restore(shardwise.TrainState(restored))
    require_equal(restored.state_dict(), saved.state_dict())
    other = build(Fp4(double_quant=True), is_loaded=False)
    with pytest.raises(shardwise.KeyMismatchError, match=r"base\.quant_types was \['NF4'\], is \['FP4'\]"):
        checkpointer.restore(shardwise.TrainState(other))
    with pytest.raises(shardwise.ConfigError, match=r"q_proj.*weight: the checkpoint has codes of nf4, and .* fp4"):
        shardwise.load(other, tmp_path / "step-1")
    again = build(nested, is_loaded=False)
    shardwise.load(again, tmp_path / "step-1")
    require_equal(again.state_dict(), saved.state_dict())


def test_the_form_that_is_stored_counts(plain, stored, tmp_path):
    """Another one is asked for, FP4 by default. Codes are not read as those of another form."""
    asked = BitsAndBytesConfig(load_in_4bit=True)
    model, report = shardwise.from_pretrained(stored, quantization_config=asked, output_loading_info=True)
    assert model.config.quantization_config["bnb_4bit_quant_type"] == "nf4"
    assert "(NF4, blocks of 64)" in str(report.notes)
    shardwise.save(model, tmp_path, names="internal")
    again = shardwise.from_pretrained(tmp_path)
    tokens = torch.arange(12).view(1, 12)
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    other = shardwise.from_pretrained(plain, quantization=Fp4(), load_weights=False)
    with pytest.raises(shardwise.ConfigError, match=r"q_proj\.weight: the checkpoint has codes of nf4, and .* fp4"):
        shardwise.load(other, tmp_path)


ROUTERS = ["afmoe", "dbrx", "gemma4_text", "hunyuan_v1_moe", "jetmoe", "longcat_flash", "zaya"]


@pytest.mark.parametrize(
    "name", [name if name == "longcat_flash" else pytest.param(name, marks=pytest.mark.slow) for name in ROUTERS]
)
def test_no_layer_of_a_router_is_quantized(tmp_path, name):
    specimen = next(item for item in zoo.causal_lm_specimens() if item.name == name)
    config = zoo.tiny_config(specimen)
    if name == "gemma4_text":
        experts = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
        config.update({"enable_moe_block": True, **experts})
    base = zoo.save_original(zoo.build(specimen, config=config), tmp_path)
    how = {"quantization": Nf4(block_size=32), "model_class": zoo.model_class(specimen)}
    model, report = shardwise.from_pretrained(base, output_loading_info=True, **how)
    assert "is the router of experts" in str(report.notes)
    packed = [layer for layer, _ in four_bits.layers_of(model)]
    assert packed
    # HunYuan and Zaya name it "gate", Zaya with layers inside.
    assert not [layer for layer in packed if not {"router", "gate"}.isdisjoint(layer.split("."))]
    assert model(torch.arange(3, 11).view(1, 8), use_cache=False).logits.isfinite().all()


def test_an_adapter_is_merged_into_stored_bytes(stored, tmp_path):
    numbers = tmp_path / "numbers"
    shardwise.save(shardwise.from_pretrained(str(stored), quantization="dequantize"), numbers)
    adapter = save_adapter(numbers, tmp_path / "adapter", r=4, target_modules=["q_proj", "down_proj"])
    for base, out in ((numbers, "wanted"), (stored, "found")):
        shardwise.merge_adapter(base, adapter, tmp_path / out)
    require_equal(*(load_file(tmp_path / out / "model.safetensors") for out in ("wanted", "found")))
    assert "quantization_config" not in json.loads((tmp_path / "found" / "config.json").read_text())
