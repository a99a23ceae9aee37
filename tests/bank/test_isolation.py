"""An adapter, whatever it does, leaves the bits of the others as they are."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tests import zoo
from tests.bank import banking
from tests.bank.banking import Recipe, adamw, create, recipes, rows_for, train
from tests.bank.on_ranks import bank_of
from tests.truth import require_equal
from transformers import AutoModelForCausalLM, GPT2Config, Qwen3Config, ResNetConfig, ResNetForImageClassification

import shardwise
from shardwise.bank.batch import RequestCounts, require_equal_requests
from shardwise.bank.sampling import Sample
from shardwise.core.errors import ConfigError, RankMismatchError, TrainingError


def everything(bank: Any, name: str) -> dict[str, torch.Tensor]:
    """Matrices and moments."""
    state = bank.state_dict(name)
    moments = {key: values for key, values in state["training"].items() if key != "gradient"}
    return {**state["adapter"], **moments}


QUIET = ("ada", "dee", "eve")


def members_with(troubled: Recipe) -> dict[str, Recipe]:
    return {"ada": recipes()["ada"], "x": troubled, "dee": recipes()["dee"], "eve": recipes()["eve"]}


X = Recipe({"r": 4, "target_modules": ["q_proj", "v_proj"]}, max_grad_norm=1.0, rows=3, more={"reduction": "sum"})


@pytest.fixture(scope="module")
def calm(base: Path) -> dict[str, dict[str, Any]]:
    """What the others are without any trouble, by backend."""
    found = {}
    for backend in ("loop", "auto"):
        bank = bank_of(base, members_with(X), backend)
        train(bank, members_with(X), 4)
        found[str(backend)] = {name: everything(bank, name) for name in (*QUIET, "x")}
    return found


def poisoned(bank: Any, value: float) -> None:
    bank._adapters["x"].matrices[next(iter(bank._adapters["x"].matrices))][0, 0] = value


@pytest.mark.parametrize("backend", ["loop", "auto"], ids=["loop", "grouped"])
@pytest.mark.parametrize("trouble", ["nan", "inf", "weights", "rows", "decay", "learning rate"])
def test_others_are_what_they_were_to_the_bit(base, calm, backend, trouble):
    if (trouble, backend) == ("rows", "auto"):
        pytest.skip("the number of rows decides what is computed in one product")
    recipe = X
    if trouble == "decay":
        recipe = replace(X, optimizer=adamw(lr=1.0, weight_decay=0.9))
    if trouble == "learning rate":
        recipe = replace(X, optimizer=adamw(lr=1e9))
    if trouble == "rows":
        recipe = replace(X, rows=20)
    members = members_with(recipe)
    bank = bank_of(base, members, backend)
    if trouble in ("nan", "inf"):
        poisoned(bank, float(trouble))

    def rows(name, own, number):
        batch = rows_for(name, own, number)
        weights = {"weights": torch.full(batch["labels"].shape, 1e6)} if (name, trouble) == ("x", "weights") else {}
        return {**batch, **weights}

    before = everything(bank, "x")
    told = train(bank, members, 4, rows=rows)
    for name in QUIET:
        require_equal(everything(bank, name), calm[str(backend)][name])
    if trouble in ("nan", "inf"):
        require_equal(everything(bank, "x"), before)
        steps = [step for step in told if hasattr(step, "is_taken")]
        assert [step.is_taken for step in steps] == [True, False, True, True] * 4
        assert bank.state_dict("x")["facts"]["steps"] == 0
        assert bank.state_dict("x")["facts"]["windows"] == 4


def test_who_is_idle_stays_as_it_is(base):
    """A schedule is moved by an adapter's own steps alone, and settings are its own (decay, moments: bad input)."""
    members = dict.fromkeys(("a", "b"), replace(recipes()["ada"], schedule=banking.falling))
    bank = bank_of(base, members)
    train(bank, members, 2)
    before = dict(bank._adapters["b"].optimizer.param_groups[0])
    bank.forward_backward([("a", rows_for("a", members["a"], 0))])
    bank.optim_step("a", weight_decay=0.5)
    assert bank._adapters["b"].optimizer.param_groups[0] == before
    assert bank._adapters["a"].optimizer.param_groups[0]["weight_decay"] == before["weight_decay"]


def test_a_mismatch_of_requests_names_global_ranks():
    """The ranks of a group are 4 and 6 in the default group."""
    first, second = RequestCounts("'a' (ppo)", 1, (7, 9), (6, 8), 1), RequestCounts("'a' (ppo)", 1, (40,), (39,), 4)
    require_equal_requests([[first], [second]], [4, 6])
    other = replace(second, description="'a' (cispo)")
    with pytest.raises(
        RankMismatchError, match=r"rank 6 has rows of 'a' \(cispo\), and rank 4 of 'a' \(ppo\)\. Name"
    ):
        require_equal_requests([[first], [other]], [4, 6])
    with pytest.raises(RankMismatchError, match=r"rank 6 has rows of none, and rank 4 of 'a' \(ppo\)\. Name"):
        require_equal_requests([[first], []], [4, 6])


# ── refused by name ───────────────────────────────────────────────────────────────────────────────


def tiny(**changes: Any) -> Any:
    return AutoModelForCausalLM.from_config(Qwen3Config(**{**banking.SIZES, **changes}))


def test_bases_that_couple_adapters_are_refused(base):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(ConfigError, match="rotary_emb has dynamic rotary embeddings, which depend on the longest"):
        shardwise.AdapterBank(tiny(rope_parameters=rope))
    routed = tiny()
    routed.config.output_router_logits = True
    with pytest.raises(ConfigError, match="config.output_router_logits is true"):
        shardwise.AdapterBank(routed)
    images = ResNetForImageClassification(
        ResNetConfig(embedding_size=4, hidden_sizes=[4], depths=[1], layer_type="basic")
    )
    words = "normalization is a BatchNorm2d, which normalizes over all adapters' rows"
    with pytest.raises(ConfigError, match=words):
        shardwise.AdapterBank(images)
    with pytest.raises(ConfigError, match="Qwen3Model has no language model head"):
        shardwise.AdapterBank(tiny().model)
    compiled = bank_of(base, {"x": X})
    compiled._model.model.layers[0].compile(backend="eager")
    for call in (
        lambda: shardwise.AdapterBank(compiled._model),
        lambda: compiled.compute_logprobs([("x", rows_for("x", X, 0))]),
        lambda: compiled.generate([Sample("x", [3], max_tokens=1)]),
    ):
        with pytest.raises(ConfigError, match=r"model.layers.0 is compiled without adapters"):
            call()
    with pytest.raises(ConfigError, match="is not a transformers model without adapters"):
        shardwise.AdapterBank(
            shardwise.from_pretrained(base, tuning=shardwise.Lora(LoraConfig(target_modules=["q_proj"])))
        )
    for most in (0, "64", 1.5):
        with pytest.raises(ConfigError, match=f"max_tokens_per_pass={most!r}: is not"):
            shardwise.AdapterBank(tiny(), max_tokens_per_pass=most)


def test_dropout_of_the_base_is_refused_in_training_mode():
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=32)
    bank = shardwise.AdapterBank(AutoModelForCausalLM.from_config(config))
    create(bank, "x", Recipe({"r": 4, "target_modules": ["c_attn"], "fan_in_fan_out": True}))
    batch = rows_for("x", X, 0)
    bank._model.train()
    with pytest.raises(TrainingError, match=r"drawn random numbers \(dropout in training mode"):
        bank.forward_backward([("x", batch)])
    bank._model.eval()
    assert bank.forward_backward([("x", batch)]).adapters["x"].num_supervised_tokens
    assert bank.optim_step("x").is_taken


@pytest.fixture(scope="module")
def bank(base: Path) -> Any:
    """A bank with an adapter, beside which calls of several tests are refused."""
    return bank_of(base, {"ada": recipes()["ada"]})


@pytest.mark.parametrize("name", ["", "x" * 129, 5, "a\n", "\x00", "a\x7f", "\x85", "\ud800"])
def test_names_that_are_none(bank, name):
    with pytest.raises(ConfigError, match="is not a valid adapter name"):
        bank.add_adapter(name, recipes()["ada"].lora())
    assert bank.names == ("ada",)


def refused(bank: Any, match: str, config: Any = None, **keywords: Any) -> None:
    with pytest.raises(ConfigError, match=match):
        bank.add_adapter("x", LoraConfig(**{"target_modules": ["q_proj"], **(config or {})}), **keywords)
    assert bank.names == ("ada",)
    assert sum(len(module._forward_hooks) for module in bank._model.modules()) == 4


@pytest.mark.parametrize(
    ("match", "config"),
    [
        ("use_dora=True needs norms of whole weights", {"use_dora": True}),
        ("bias='all' trains the base", {"bias": "all"}),
        (r"modules_to_save \(lm_head\) are copies", {"modules_to_save": ["lm_head"]}),
        ("init_lora_weights='pissa': changes the base", {"init_lora_weights": "pissa"}),
        ("nothing is named 'q_prj'. The nearest are q_proj", {"target_modules": ["q_prj", "v_proj"]}),
    ],
)
def test_configs_that_are_no_pairs_of_matrices(bank, match, config):
    refused(bank, match, config)


@pytest.mark.parametrize(
    ("match", "keywords"),
    [
        ("LBFGS is not known to be elementwise", {"optimizer": torch.optim.LBFGS}),
        ("Adafactor is not known to be", {"optimizer": torch.optim.Adafactor}),
        ("Own is not known to be", {"optimizer": lambda own: type("Own", (torch.optim.SGD,), {})(own)}),
        (
            "must have the given parameter in one group",
            {"optimizer": lambda own: torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])},
        ),
        ("accumulation_steps=0: pass 1 or more", {"gradient_accumulation_steps": 0}),
        ("optimizer=5: is not a function", {"optimizer": 5}),
        ("schedule: returned a NoneType. Return an LRScheduler", {"schedule": lambda optimizer: None}),
        ("ReduceLROnPlateau needs a metric", {"schedule": torch.optim.lr_scheduler.ReduceLROnPlateau}),
        ("cannot be made, Invalid learning rate", {"optimizer": lambda own: torch.optim.SGD(own, lr=-1)}),
        ("schedule: cannot be made, ", {"schedule": torch.optim.lr_scheduler.LambdaLR}),
        ("unexpected keyword argument 'sed'. Did you mean 'seed'", {"sed": 1}),
        ("max_grad_norm=-1: is not a number of at least 0", {"max_grad_norm": -1}),
        ("max_grad_norm=None: is not a number of at least 0", {"max_grad_norm": None}),
        ("seed=1.5: is not an integer", {"seed": 1.5}),
        ("reduction='all': pass 'mean'", {"reduction": "all"}),
    ],
)
def test_invalid_options_are_refused(bank, match, keywords):
    refused(bank, match, **keywords)


def test_a_row_longer_than_a_multimodal_base_has_positions():
    """Its length is in a part of its config."""
    specimen = zoo.Specimen("gemma3", "gemma3", "Gemma3ForConditionalGeneration", "vision-language")
    config = zoo.tiny_config(specimen)
    config.text_config.max_position_embeddings = 12
    bank = shardwise.AdapterBank(zoo.build(specimen, config=config))
    assert bank.max_length == 12
    with pytest.raises(ConfigError, match="rows have 13 to 13 tokens. They may have 2 to 12"):
        bank.compute_logprobs([(None, {"input_ids": torch.ones((1, 13), dtype=torch.int64)})])


def test_invalid_calls_are_refused(base):
    members = {"ada": recipes()["ada"], "bob": recipes()["bob"], "cy": replace(recipes()["cy"], more={})}
    bank = bank_of(base, members)
    batch = rows_for("ada", members["ada"], 0)
    ids = batch["input_ids"]

    def require(match: str, *batches: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            bank.forward_backward(list(batches))

    require(r"labels are from -5 to", ("ada", {**batch, "labels": torch.full_like(ids, -5)}))
    require("not a dict of tensors of one shape", ("ada", {**batch, "labels": ids[:1]}))
    require("not a dict of tensors of one shape", ("ada", {**batch, "token_type_ids": ids}))
    turned = {**batch, "attention_mask": batch["attention_mask"].flip(1)}
    require("padding elsewhere than at the end of rows", ("ada", turned))
    long = {"input_ids": torch.zeros((1, 65), dtype=torch.int64)}
    require("rows have 65 to 65 tokens. They may have 2 to 64", ("ada", long))
    require("weights need reduction=", ("ada", {**batch, "weights": torch.ones(ids.shape)}))
    require("None is the base, which is not trained", (None, batch))
    with pytest.raises(ConfigError, match="adapter 'ada': has accumulated 0 of 1 micro-batches"):
        bank.optim_step("ada")
    bank.forward_backward([("ada", batch)])
    require("adapter 'ada': has accumulated all of its 1 micro-batches", ("bob", batch), ("ada", batch))
    assert not bank._adapters["bob"].micro_batches
    for changes, match in (
        ({"lrate": 1.0}, "lrate: AdamW has .*lr.*max_grad_norm"),
        ({"lr": float("nan")}, "lr=nan is not a valid value"),
        ({"lr": "1"}, "lr='1' is not a valid value"),
        ({"lr": float("inf")}, "lr=inf is not a valid value"),
        ({"betas": 0.5}, "betas=0.5 is not a valid value"),
        ({"betas": (0.9, 0.9, 0.9)}, r"betas=\(0.9, 0.9, 0.9\) is not a valid value"),
        ({"max_grad_norm": (1.0,)}, "max_grad_norm=.* is not a valid value"),
        ({"max_grad_norm": -1}, "max_grad_norm=-1 is not a valid value"),
    ):
        with pytest.raises(ConfigError, match=match):
            bank.optim_step("ada", **changes)
    for number in range(3):
        bank.forward_backward([("cy", rows_for("cy", members["cy"], number))])
    assert bank.optim_step("cy", lr=1.0).learning_rate == 1.0, "in place of the schedule's"
    assert bank._adapters["cy"].settings["lr"] == pytest.approx(5e-3 / 2)
    assert bank.optim_step("ada", lr=0.5).learning_rate == 0.5
    assert bank._adapters["ada"].settings["lr"] == 1e-2, "for this step alone"
