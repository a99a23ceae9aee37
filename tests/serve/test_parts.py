"""What train_attn, train_mlp and train_unembed train of every causal language model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from tests import zoo
from tests.bank.test_architectures import rows

from shardwise import AdapterBank
from shardwise.ranks.world import World
from shardwise.serve.engine import Engine
from shardwise.serve.operations import CreateModel, Refusal, Turn

ALL = frozenset(("attn", "mlp", "unembed"))
SHARED = ("gate_proj", "up_proj", "down_proj")
REFUSED = {"git": "its head is named output, as is a part of each layer"}
OTHER_ROWS = {"blt", "cpmant", "deepseek_v4", "prophetnet", "reformer", "xlnet"}
"""Some of their linear layers have other inputs or outputs than rows of tokens, or no gradient."""


def create(model: Any, parts: frozenset[str] = ALL) -> tuple[AdapterBank, object]:
    """Create the model "ada" as a server does. Return its bank, and the outcome."""
    bank = AdapterBank(model)
    engine = Engine(World.current(call="test"), bank, model)
    return bank, engine.run(Turn((CreateModel("create", "ada", 4, 7, parts),)))["create"]


def get_sites(bank: AdapterBank) -> set[str]:
    """The adapted places, each with its rank checked."""
    sites = bank._adapters["ada"].sites
    assert {site.r for site in sites} == {4}
    return {f"{site.module}.{getattr(site, 'parameter', '')}".removesuffix(".") for site in sites}


def find_failures(specimens: list[Any]) -> tuple[int, dict[str, str]]:
    """Create each model with all parts and run one pass. Return how many ran, and the failures."""
    num_models, failures = 0, {}
    for specimen in specimens:
        try:
            model = zoo.build(specimen)
            with torch.no_grad():
                model(rows()[0]["input_ids"][None], use_cache=False)
            AdapterBank(model)
        except Exception:  # a model that needs other inputs, or is refused by name
            continue
        bank, outcome = create(model)
        if isinstance(outcome, Refusal):
            failures[specimen.name] = outcome.text
        elif specimen.name not in OTHER_ROWS:
            get_sites(bank)
            bank.forward_backward([("ada", rows()[:2])])
            assert bank._adapters["ada"].gradient.isfinite().all()
            num_models += 1
    return num_models, failures


def test_models_with_layers_that_cannot_have_adapters() -> None:
    names = ("deepseek_v32", "falcon_h1", "llama4_text", "longcat_flash")
    specimens = [each for each in zoo.causal_lm_specimens() if each.name in names]
    assert find_failures(specimens) == (len(specimens), {})


@pytest.mark.slow
def test_every_causal_model_is_created_with_all_parts() -> None:
    num_models, failures = find_failures(zoo.causal_lm_specimens())
    assert failures.keys() <= REFUSED.keys(), failures
    assert num_models >= 100


def test_attention_has_no_indexer() -> None:
    bank, _ = create(zoo.causal_lm("deepseek_v32"), frozenset({"attn"}))
    words = {name.rpartition(".")[2] for name in get_sites(bank)}
    assert words == {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}


def test_an_mlp_has_dense_layers_and_shared_experts_and_opens_in_peft(tmp_path: Path) -> None:
    model = zoo.causal_lm("deepseek_v3").eval()
    bank, _ = create(model, frozenset({"mlp"}))
    layers = {f"model.layers.0.mlp.{word}" for word in SHARED}
    layers |= {f"model.layers.1.mlp.shared_experts.{word}" for word in SHARED}
    assert get_sites(bank) == layers | {
        f"model.layers.1.mlp.experts.{key}" for key in ("gate_up_proj", "down_proj")
    }
    with torch.no_grad():
        bank._adapters["ada"].flat.normal_(std=0.1)
    row = rows()[0]
    expected = bank.compute_logprobs([("ada", [row])])[0][0]
    bank.save("ada", tmp_path / "ada", training_state=False)
    bank.load("again", tmp_path / "ada", training_state=False)
    assert torch.equal(bank.compute_logprobs([("again", [row])])[0][0], expected)
    assert (bank.compute_logprobs([(None, [row])])[0][0] - expected).abs().max() > 1e-2
    opened = PeftModel.from_pretrained(model, tmp_path / "ada")
    with torch.no_grad():
        logprobs = opened(row["input_ids"][None]).logits[0].log_softmax(-1)
    torch.testing.assert_close(logprobs.gather(1, row["targets"][:, None])[:, 0], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["hunyuan_v1_moe", "zaya", "jetmoe", "dbrx"])
def test_an_mlp_has_no_router(name: str) -> None:
    try:
        bank, outcome = create(zoo.causal_lm(name), frozenset({"mlp"}))
    except StopIteration:
        pytest.skip("not in this version of transformers")
    if isinstance(outcome, Refusal):
        assert "the base has none of the parts mlp" in outcome.text
        assert name in ("jetmoe", "dbrx")
    else:
        assert not [site for site in get_sites(bank) if {"gate", "router"} & set(site.split("."))]
