"""Full, freeze and LoRA tuning, against transformers and PEFT in one process."""

import json
import math
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel
from tests import zoo
from tests.conftest import Worlds
from tests.models import on_ranks, reference
from tests.support.world import require_same_error
from tests.truth import require_equal
from transformers import GPT2Config, Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification
from transformers.models.auto import modeling_auto

import shardwise
from shardwise import ConfigError, ExistingLora, Freeze, Full, Lora
from shardwise.core import untrusted
from shardwise.models.tunings import Tuning

ALL_LINEAR = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
NARROW = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], lora_alpha=3, use_rslora=True)
GAUSSIAN = LoraConfig(r=5, target_modules=["k_proj", "embed_tokens"], init_lora_weights="gaussian")
RANDOM_B = LoraConfig(r=3, target_modules=r".*layers\.1.*(q|v)_proj", init_lora_weights=False)
DORA = LoraConfig(r=3, target_modules=["q_proj", "up_proj"], use_dora=True)
COPIES = LoraConfig(r=3, target_modules=["v_proj"], modules_to_save=["embed_tokens", "lm_head"])
PATTERNS = LoraConfig(
    r=2,
    target_modules=["q_proj", "k_proj"],
    rank_pattern={"k_proj": 3},
    alpha_pattern={"layers.1.self_attn.q_proj": 7},
    exclude_modules=["layers.0.self_attn.q_proj"],
)
PATTERNED_LAYERS = LoraConfig(r=2, target_modules=["o_proj"], layers_to_transform=[1], layers_pattern="layers")
EXPERTS = LoraConfig(
    r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
)

KINDS = {
    "all-linear": ALL_LINEAR,
    "rslora": NARROW,
    "gaussian": GAUSSIAN,
    "random B": RANDOM_B,
    "dora": DORA,
    "copies": COPIES,
    "patterns": PATTERNS,
    "layers": PATTERNED_LAYERS,
    "experts": EXPERTS,
}


@pytest.fixture(params=KINDS)
def adapted(request: pytest.FixtureRequest, tied: Path, experts: Path) -> tuple[Path, LoraConfig]:
    """A base, and an adapter of every kind for it."""
    return experts if request.param == "experts" else tied, KINDS[request.param]


def test_the_base_is_that_of_peft_and_the_adapter_has_its_shapes(adapted: tuple[Path, LoraConfig]) -> None:
    folder, config = adapted
    wanted = reference.stock(folder, config)
    model = shardwise.from_pretrained(folder, tuning=Lora(config))
    assert isinstance(model, PeftModel)
    assert [found for found, _ in model.named_parameters()] == [found for found, _ in wanted.named_parameters()]
    mine, theirs = reference.values_of(model), reference.values_of(wanted)
    for key, value in theirs.items():
        drawn = "lora_A" in key or "lora_embedding_B" in key or (config is RANDOM_B and "lora_B" in key)
        assert mine[key].dtype == value.dtype, key
        assert (mine[key].shape == value.shape) if drawn else torch.equal(mine[key], value), key
    assert _trained(model) == _trained(wanted)
    assert not model.training


def _trained(model: torch.nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


@pytest.mark.parametrize("name", ["all-linear", "gaussian", "random B", "dora", "copies", "experts"])
def test_an_adapter_begins_alike_on_every_number_of_ranks(
    name: str, tied: Path, experts: Path, worlds: Worlds
) -> None:
    folder, keywords = str(experts if name == "experts" else tied), {"tuning": Lora(KINDS[name])}
    alone = on_ranks.values_after_load(folder, keywords)
    for values in worlds(3).run(on_ranks.values_after_load, folder, keywords):
        require_equal(values, alone)


def test_seeds_and_names_tell_adapters_apart(tied: Path) -> None:
    def first(seed: int) -> dict[str, torch.Tensor]:
        options = shardwise.options.LoadOptions(seed=seed)
        return on_ranks.values_after_load(str(tied), {"tuning": Lora(ALL_LINEAR), "options": options})

    one, other = first(0), first(1)
    drawn = [key for key in one if "lora_A" in key]
    assert len({one[key].flatten()[0].item() for key in drawn}) == len(drawn)
    assert not any(torch.equal(one[key], other[key]) for key in drawn)


def test_the_distribution_is_that_of_peft_on_the_whole_fan_in(tmp_path: Path) -> None:
    folder = reference.save_tiny(tmp_path / "wide", hidden_size=256, num_hidden_layers=1)
    uniform = LoraConfig(r=64, target_modules=["q_proj"])

    def drawn(config: LoraConfig) -> torch.Tensor:
        found = on_ranks.values_after_load(str(folder), {"tuning": Lora(config)})
        (values,) = [value for name, value in found.items() if "A" in name]
        return values

    normal = LoraConfig(r=64, target_modules=["q_proj"], init_lora_weights="gaussian")
    values = drawn(uniform)
    bound = 1 / math.sqrt(256)  # kaiming_uniform_ with a = sqrt(5)
    assert values.abs().max() <= bound
    assert values.abs().max() > 0.999 * bound
    assert values.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    values = drawn(normal)
    assert values.std().item() == pytest.approx(1 / 64, rel=0.02)
    assert values.abs().max() > 3 / 64


@pytest.mark.parametrize(
    "config", [ALL_LINEAR, PATTERNS, PATTERNED_LAYERS], ids=["all-linear", "patterns", "layers"]
)
def test_a_sharded_model_answers_as_peft_does(config: LoraConfig, tied: Path, worlds: Worlds) -> None:
    """Other kinds: the training below."""
    assert_answers_as_peft(tied, config, worlds(3))


def assert_answers_as_peft(folder: Path, config: LoraConfig, ranks: Any) -> None:
    wanted = reference.stock(folder, config)
    on_ranks.set_values(wanted, reference.unsettle(reference.values_of(wanted)))
    logits = reference.logits(wanted)
    for found in ranks.run(on_ranks.logits, str(folder), {"tuning": Lora(config)}):
        torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-5)


TRAINED: dict[str, tuple[str, Any]] = {
    "full": ("tied", Full()),
    "first attention and head": ("untied", Freeze(-1, ("self_attn",), ("lm_head",))),
    "tied embedding": ("tied", Freeze(extra_modules=("embed_tokens",))),
    "dora": ("tied", Lora(DORA)),
    "copies": ("untied", Lora(COPIES)),
    "embedding": ("tied", Lora(GAUSSIAN)),
    "replicated": ("tied", Lora(NARROW, placement="replicated")),
    "experts": ("experts", Lora(EXPERTS)),
}


@pytest.mark.parametrize("name", TRAINED)
def test_training_is_that_of_one_process(
    name: str, tied: Path, untied: Path, experts: Path, worlds: Worlds
) -> None:
    kind, tuning = TRAINED[name]
    folder = {"tied": tied, "untied": untied, "experts": experts}[kind]
    model = reference.stock(folder, tuning.config if isinstance(tuning, Lora) else None)
    start = on_ranks.values_after_load(str(folder), {"tuning": tuning})
    on_ranks.set_values(model, {**start, **reference.unsettle(start)})
    trained = _trained(shardwise.from_pretrained(folder, tuning=tuning))
    for found, parameter in model.named_parameters():
        parameter.requires_grad_(found in trained)
    wanted = reference.train(model, 3, rows=4)
    values = reference.values_of(model)
    found = worlds(2).run(on_ranks.train, str(folder), {"tuning": tuning}, None, 3, 4)
    together = [sum(losses) / 2 for losses in zip(*(losses for losses, _ in found), strict=True)]
    assert together == pytest.approx(wanted, abs=2e-6)
    for _, after in found:
        torch.testing.assert_close(after, values, rtol=0, atol=2e-4)
        frozen = [key for key in start if key not in trained and "lora_" not in key and "head" not in key]
        assert [key for key in frozen if not torch.equal(after[key], start[key])] == []


@pytest.mark.parametrize("placement", ["sharded", "replicated"])
def test_replicas_of_shards_stay_equal(placement: Any, tied: Path, worlds: Worlds) -> None:
    keywords = {"tuning": Lora(ALL_LINEAR, placement=placement)}
    mesh = {"replicate": 2, "shard": 2}
    _, wanted = on_ranks.train(str(tied), keywords, None, 2, 4)
    for _, values in worlds(4).run(on_ranks.train, str(tied), keywords, mesh, 2, 4):
        torch.testing.assert_close(values, wanted, rtol=0, atol=2e-4)


def test_an_adapter_is_in_its_blocks_group_or_whole(tied: Path, tmp_path: Path, worlds: Worlds) -> None:
    A, B = (f"base_model.model.model.layers.0.self_attn.q_proj.lora_{letter}.default.weight" for letter in "AB")
    sharded = worlds(3).run(on_ranks.what_is_sharded, str(tied), {"tuning": Lora(NARROW)})
    # Two rows on three ranks.
    assert [held[A] for held in sharded] == [f"(Shard(dim=0),) ({rows}, 24)" for rows in (1, 1, 0)]
    assert [held[B] for held in sharded] == [f"(Shard(dim=0),) ({rows}, 2)" for rows in (8, 8, 8)]
    reference.stock(tied, NARROW).save_pretrained(tmp_path)
    for tuning in (Lora(NARROW, placement="replicated"), ExistingLora(tmp_path, placement="replicated")):
        whole = worlds(3).run(on_ranks.what_is_sharded, str(tied), {"tuning": tuning})
        assert [held[A] for held in whole] == ["whole (2, 24)"] * 3
        assert all(("Shard" in value) == ("lora" not in key) for held in whole for key, value in held.items())


def test_only_trained_parameters_are_float32(half: Path, worlds: Worlds) -> None:
    (report, _) = worlds(2).run(on_ranks.report_of, str(half), {"tuning": Lora(ALL_LINEAR)})
    assert set(report["trained"].values()) == {"F32"}
    assert all("lora_" in name for name in report["trained"])
    model = reference.stock(half, ALL_LINEAR, torch.bfloat16)
    trainable, every = model.get_nb_trainable_parameters()
    assert f"trainable params: {trainable:,} || all params: {every:,} || trainable%: " in report["text"]
    assert {
        name: str(p.dtype) for name, p in shardwise.from_pretrained(half, tuning=Freeze(1)).named_parameters()
    } == {
        name: "torch.float32" if "layers.1" in name else "torch.bfloat16"
        for name, _ in reference.stock(half, None).named_parameters()
    }
    as_stored = shardwise.from_pretrained(half, tuning=Full(), trained_dtype="unchanged")
    assert {parameter.dtype for parameter in as_stored.parameters()} == {torch.bfloat16}


def test_magnitudes_are_those_of_the_weights_as_they_are_stored(half: Path) -> None:
    wanted = reference.values_of(reference.stock(half, DORA, torch.bfloat16))
    found = on_ranks.values_after_load(str(half), {"tuning": Lora(DORA)})
    magnitudes = [key for key in wanted if "magnitude" in key]
    assert len(magnitudes) == 4
    assert [key for key in magnitudes if not torch.equal(found[key], wanted[key])] == []


def test_biases_are_trained_as_peft_trains_them(half: Path) -> None:
    for bias in ("all", "lora_only"):
        config = LoraConfig(r=2, target_modules=["q_proj"], bias=bias)
        model = shardwise.from_pretrained(half, tuning=Lora(config), trained_dtype="unchanged")
        assert _trained(model) == _trained(reference.stock(half, config, torch.bfloat16))
        assert any(name.endswith("bias") for name in _trained(model))
    with pytest.raises(ConfigError, match=r"q_proj.* two dtypes .*'unchanged'\. On several ranks, .*mp_policy"):
        shardwise.from_pretrained(half, tuning=Lora(LoraConfig(r=2, target_modules=["q_proj"], bias="all")))


def test_stock_methods_of_peft_work(tied: Path) -> None:
    model: Any = shardwise.from_pretrained(tied, tuning=Lora(RANDOM_B))
    plain = shardwise.from_pretrained(tied)
    tokens = reference.batch(1, 3)
    with torch.no_grad(), model.disable_adapter():
        torch.testing.assert_close(model(input_ids=tokens).logits, plain(input_ids=tokens).logits, rtol=0, atol=0)
    assert not torch.equal(model(input_ids=tokens).logits, plain(input_ids=tokens).logits)
    assert model.peft_config["default"].base_model_name_or_path == str(tied)
    assert RANDOM_B.base_model_name_or_path is None  # the one given is not changed


@pytest.mark.parametrize(
    ("tuning", "message"),
    [
        (Lora(LoraConfig(target_modules=["q_prj"])), r"target_modules: nothing is named 'q_prj'. The nearest are"),
        (Lora(LoraConfig(target_modules="nothing.*")), r"Qwen3ForCausalLM: PEFT cannot add this LoRA, .*not found"),
        (Lora(LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_hed"])), r"modules_to_save.*lm_head"),
        (Lora(LoraConfig(target_modules=[], target_parameters=["mlp.expert.up"])), r"target_parameters: nothing"),
        (Lora(LoraConfig(target_modules=["q_proj"], exclude_modules=["k_prj"])), r"exclude_modules.*k_proj"),
        (
            Lora(LoraConfig(target_modules=["q_proj", "k_proj"], exclude_modules=["k_proj"])),
            r"target_modules: 'k_proj' exists, but PEFT does not adapt it",
        ),
        (Lora(LoraConfig(target_modules=["q_proj"], rank_pattern={"(": 4})), r"PEFT cannot add .* unterminated"),
        (
            Lora(LoraConfig(target_modules=["q_proj"], rank_pattern={"q{9999999999}": 4})),
            r"PEFT cannot add .* large",
        ),
        (
            Lora(LoraConfig(target_modules=["q_proj"], layers_to_transform=[0], layers_pattern=5)),
            r"PEFT cannot add",
        ),
        (Lora(LoraConfig(target_modules=["q_proj"], init_lora_weights="pissa")), r"'pissa': changes the base"),
        (Lora(LoraConfig(target_modules=["q_proj"], init_lora_weights="orthogonal")), r"needs full weights"),
        (Lora(LoraConfig(target_modules=["q_proj"], init_lora_weights="mica")), r"'mica': freezes lora_B"),
        (Lora(LoraConfig(target_modules=["q_proj"], init_lora_weights=False, use_dora=True)), r"with use_dora"),
        (Lora(LoraConfig(target_modules=["q_proj"], modules_to_save="lm_head")), r"'lm_head': is not a list of"),
        (Lora(LoraConfig(target_modules=["embed_tokens"], use_dora=True)), r"embed_tokens: use_dora.*Embedding"),
        (Lora(LoraConfig(target_modules=["q_proj"], trainable_token_indices=[3])), r"trainable_token_indices"),
        (Lora(LoraConfig(target_modules=["q_proj"], layer_replication=[(0, 2), (1, 2)])), r"layer_replication"),
        (Lora(DORA, placement="replicated"), r"use_dora.*sharded"),
        (Freeze(3), r"trainable_layers=3: Qwen3ForCausalLM has 2"),
        (Freeze(extra_modules=("lm_hed",)), r"no module outside of the layers is named 'lm_hed'.*lm_head"),
        (Freeze(extra_modules=("rotary_emb",)), r"trains nothing"),
    ],
)
def test_unmatched_and_unsupported_tunings_are_refused(tuning: Any, message: str, tied: Path) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        shardwise.from_pretrained(tied, tuning=tuning)


def test_a_router_that_no_lora_can_be_added_to_is_refused(tmp_path: Path) -> None:
    zoo.save_original(zoo.causal_lm("llama4_text"), tmp_path)
    said = r"router: is a Llama4Router, .* LoraConfig\(exclude_modules=\['router'\]\)"
    with pytest.raises(ConfigError, match=said):
        shardwise.from_pretrained(tmp_path, tuning=Lora(ALL_LINEAR))
    config = LoraConfig(r=2, target_modules="all-linear", exclude_modules=["router"], task_type="CAUSAL_LM")
    shardwise.from_pretrained(tmp_path, tuning=Lora(config))(input_ids=reference.batch(1, 3))


def test_dropout_is_refused_on_experts_by_their_former_names(experts: Path) -> None:
    names = ["q_proj", "w1", "w2", "w3"]
    config = LoraConfig(r=2, target_modules=names, lora_dropout=0.05)
    with pytest.raises(ConfigError, match=r"PEFT cannot add this LoRA, .* Set lora_dropout=0\.0"):
        shardwise.from_pretrained(experts, tuning=Lora(config))


@pytest.mark.parametrize("model_type", ["qwen2_vl", "mllama"])
def test_layers_are_those_of_the_language_model(model_type: str, tmp_path: Path) -> None:
    class_name = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[model_type]
    zoo.save_original(zoo.build(zoo.Specimen(model_type, model_type, class_name, "")), tmp_path)
    for count, index in ((1, 1), (-1, 0)):
        model = shardwise.from_pretrained(tmp_path, tuning=Freeze(count))
        layer = f"model.language_model.layers.{index}."
        assert _trained(model) == [name for name, _ in model.named_parameters() if name.startswith(layer)] != []


@pytest.mark.parametrize("sizes", [(2, 2), (2, 3)])
def test_lists_of_an_encoder_and_a_decoder_are_named(sizes: tuple[int, int], tmp_path: Path) -> None:
    specimen = zoo.Specimen("bart", "bart", "BartForConditionalGeneration", "")
    config = zoo.tiny_config(specimen)
    config.encoder_layers, config.decoder_layers = sizes
    zoo.save_original(zoo.build(specimen, config=config), tmp_path)
    with pytest.raises(ConfigError, match=r"\(model.encoder.layers, model.decoder.layers\), and none is known"):
        shardwise.from_pretrained(tmp_path, tuning=Freeze(1))


def test_tunings_refuse_invalid_settings() -> None:
    with pytest.raises(ConfigError, match="trains nothing"):
        Freeze()
    with pytest.raises(ConfigError, match=r"extra_modules=\('lm_head',\)"):
        Freeze(extra_modules="lm_head")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="inside of trainable layers"):
        Freeze(0, ("mlp",), ("lm_head",))
    words = r"extra_modules=3 must be a tuple of names: extra_modules=\('lm_head',\)"
    with pytest.raises(ConfigError, match=words):
        Freeze(extra_modules=3)  # type: ignore[arg-type]
    for count in ("2", 1.0, True):
        with pytest.raises(ConfigError, match=r"trainable_layers=.* must be a number of layers"):
            Freeze(count)  # type: ignore[arg-type]
    for placement in ("everywhere", None):
        with pytest.raises(ConfigError, match="is not known. Pass 'sharded' or 'replicated'"):
            Lora(ALL_LINEAR, placement=placement)  # type: ignore[arg-type]
    for name in ("", "a.b", "lora_A", 3):
        with pytest.raises(ConfigError, match="is not a name that can be part of tensor names"):
            Lora(ALL_LINEAR, adapter=name)


def test_an_error_is_the_same_on_every_rank(tied: Path, worlds: Worlds) -> None:
    keywords = {"tuning": Lora(LoraConfig(target_modules=["q_prj"]))}
    require_same_error(worlds(2).run(on_ranks.error_of, str(tied), keywords), "ConfigError")


ENDLESS = r"((\w|\.)+)+!"
"""A regular expression that takes hours to find that it does not match the names of modules."""

PATTERNS_OF_FIELDS: dict[str, Any] = {
    "target_modules": ENDLESS,
    "exclude_modules": ENDLESS,
    "rank_pattern": {"q_proj": 2, ENDLESS: 4},
    "alpha_pattern": {ENDLESS: 4},
    "modules_to_save": [ENDLESS],
    "layers_pattern": [ENDLESS],
}


def end_at_the_last(command: list[str], **keywords: Any) -> subprocess.CompletedProcess[str]:
    """What a process leaves that is ended while it matches the last pattern."""
    patterns, _names = json.loads(keywords["input"])
    return subprocess.CompletedProcess(command, -signal.SIGXCPU, json.dumps(patterns[-1]) + "\n", "")


@pytest.mark.parametrize("field", PATTERNS_OF_FIELDS)
def test_patterns_that_take_too_long_are_refused(field: str, tied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is matched in a process. Of the other fields, that they are among its patterns."""
    if field != "target_modules":
        monkeypatch.setattr(subprocess, "run", end_at_the_last)
    monkeypatch.setattr(untrusted, "_MATCHING_S", 1)
    settings = {"target_modules": ["q_proj"], "layers_to_transform": [0], field: PATTERNS_OF_FIELDS[field]}
    if isinstance(settings["target_modules"], str):
        del settings["layers_to_transform"]
    tuning = Lora(LoraConfig(**settings))
    with pytest.raises(
        ConfigError, match=rf"^{field}='{re.escape(repr(ENDLESS)[1:-1])}': takes more than 1 seconds"
    ):
        shardwise.from_pretrained(tied, tuning=tuning)


@pytest.mark.slow
def test_a_pattern_that_takes_too_long_is_refused_on_every_rank(tied: Path, worlds: Worlds) -> None:
    keywords = {"tuning": Lora(LoraConfig(target_modules=ENDLESS))}
    require_same_error(worlds(2).run(on_ranks.error_of, str(tied), keywords), "ConfigError", "takes more than")


def test_ranks_with_other_tunings_are_distinguished(tied: Path, worlds: Worlds) -> None:
    for name in ("alpha", "layers"):
        told = "what is tuned, and how, on rank 1 is not that of rank 0"
        require_same_error(worlds(2).run(on_ranks.with_other_tunings, str(tied), name), "RankMismatchError", told)


def test_a_tuning_without_a_repr_is_compared_by_its_class() -> None:
    one, other = Tuning(), Tuning()
    assert one.comparable_text({}) == other.comparable_text({}) == "Tuning"


class TwoNames(Qwen3ForCausalLM):
    """A model with its embedding registered twice."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config)
        self.tokens = self.model.embed_tokens


@pytest.mark.parametrize("config", [NARROW, COPIES])
def test_a_module_of_two_names_is_filled_beside_an_adapter(config: LoraConfig, tied: Path) -> None:
    wanted = reference.logits(shardwise.from_pretrained(tied))
    model = shardwise.from_pretrained(tied, model_class=TwoNames, tuning=Lora(config))
    assert torch.equal(reference.logits(model), wanted)


def test_a_sharded_model_with_an_adapter_generates(tied: Path, worlds: Worlds) -> None:
    tuning = {"tuning": Lora(RANDOM_B)}
    alone = on_ranks.generated(str(tied), tuning)
    assert all(torch.equal(found, alone) for found in worlds(2).run(on_ranks.generated, str(tied), tuning))


def test_a_sharded_encoder_and_decoder_generate(tmp_path: Path, worlds: Worlds) -> None:
    sizes = {"d_model": 24, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 61}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0)
    model: Any = transformers.T5ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    alone = model.generate(input_ids=reference.batch(1, seed=2), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert all(torch.equal(found, alone) for found in worlds(2).run(on_ranks.generated, str(tmp_path), {}))


@pytest.mark.parametrize("tuning", [Lora(COPIES), Lora(EXPERTS)])
def test_float32_masters_compute_in_bfloat16(tuning: Any, half: Path, experts: Path, worlds: Worlds) -> None:
    folder = experts if tuning == Lora(EXPERTS) else half
    dtypes, losses = worlds(2).run(on_ranks.train_in_half, str(folder), {"tuning": tuning})[0]
    assert set(dtypes.values()) == {"torch.float32"}
    assert losses[-1] < losses[0]


def test_accumulated_gradients_are_those_of_one_batch(tied: Path, worlds: Worlds) -> None:
    for placement in ("sharded", "replicated"):
        keywords = {"tuning": Lora(NARROW, placement=placement)}
        (whole, parts), *_ = worlds(2).run(on_ranks.accumulated, str(tied), keywords)
        assert whole.keys() == parts.keys()
        torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-7)


def test_a_new_head_and_its_copy_begin_alike(tied: Path, worlds: Worlds) -> None:
    """A head that the checkpoint lacks is initialized with consent, by the name it has in the base."""
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="SEQ_CLS")  # PEFT copies ``score`` by itself
    keywords = {
        "tuning": Lora(config),
        "model_class": Qwen3ForSequenceClassification,
        "on_unexpected": shardwise.options.Ignore(("lm_head.*",)),
        "config_overrides": {"pad_token_id": 0},
    }
    with pytest.raises(shardwise.KeyMismatchError, match="score"):
        shardwise.from_pretrained(tied, **keywords)
    keywords["on_missing"] = shardwise.options.Initialize(only=("score.*",))
    alone = on_ranks.values_after_load(str(tied), keywords)
    copy, original = (
        f"base_model.model.score.{part}.weight" for part in ("modules_to_save.default", "original_module")
    )
    assert torch.equal(alone[copy], alone[original])
    assert alone[copy].std() > 0
    for values in worlds(3).run(on_ranks.values_after_load, str(tied), keywords):
        assert [key for key in alone if not torch.equal(values[key], alone[key])] == []


class OrthogonalHead(Qwen3ForSequenceClassification):
    def _init_weights(self, module: torch.nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, torch.nn.Linear) and module.out_features == self.config.num_labels:
            torch.nn.init.orthogonal_(module.weight)


def test_a_new_head_that_is_drawn_whole_is_copied_too(tied: Path) -> None:
    model = shardwise.from_pretrained(
        tied,
        tuning=Lora(LoraConfig(r=2, target_modules=["q_proj"], task_type="SEQ_CLS")),
        model_class=OrthogonalHead,
        on_unexpected=shardwise.options.Ignore(("lm_head.*",)),
        on_missing=shardwise.options.Initialize(only=("score.*",)),
        config_overrides={"pad_token_id": 0},
    )
    head: Any = model.get_submodule("base_model.model.score")
    copy = head.modules_to_save["default"].weight
    torch.testing.assert_close(copy @ copy.T, torch.eye(2))
    assert torch.equal(copy, head.original_module.weight)


def test_matrices_stored_the_other_way_round(tmp_path: Path, worlds: Worlds) -> None:
    config = GPT2Config(
        vocab_size=61, n_embd=24, n_layer=2, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    reference.save_config(tmp_path, config)
    lora = LoraConfig(r=2, fan_in_fan_out=True, target_modules=["c_attn"])
    assert_answers_as_peft(tmp_path, lora, worlds(2))
    tuning = Lora(LoraConfig(r=2, fan_in_fan_out=True, target_modules=["c_attn"], use_dora=True))
    with pytest.raises(ConfigError, match="c_attn: use_dora of a Conv1D needs norms over the sharded"):
        shardwise.from_pretrained(tmp_path, tuning=tuning)
