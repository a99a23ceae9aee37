"""Each adapter of a bank trains as it would alone in PEFT: one process."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig
from tests import zoo
from tests.bank import banking
from tests.bank.banking import STEPS, Recipe, create, distance, logprobs_of, matrices_of, recipes, rows_for, train
from tests.bank.on_ranks import bank_of
from tests.truth import require_equal
from torch.optim.lr_scheduler import ConstantLR
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config

import shardwise
from shardwise import Sharding
from shardwise.bank import kernels
from shardwise.bank.kernels import drop_elements, row_keys
from shardwise.bank.passes import FusedPass, PlacedRequest, PlannedPass
from shardwise.bank.rows import Request, parse_rows
from shardwise.core.errors import TrainingError

MICRO_BATCHES = 3 * STEPS


@pytest.fixture(scope="module")
def begun(base: Path) -> dict[str, dict[str, torch.Tensor]]:
    bank = bank_of(base, recipes())
    return {name: matrices_of(bank, name) for name in recipes()}


@pytest.fixture(scope="module")
def alone(base: Path, begun: dict[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    return {name: banking.alone(base, name, recipe, begun[name], pad_to=16) for name, recipe in recipes().items()}


# ── together as alone ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("backend", "limit"), [("loop", 1e-6), ("auto", 5e-4)], ids=["loop", "grouped"])
def test_each_adapter_comes_out_as_alone(base, begun, alone, backend, limit):
    """Ranks, alphas, targets (tied embeddings, too), optimizers, clips, windows of 1 to 3, lengths: all differ."""
    bank = bank_of(base, recipes(), backend)
    before = [(values.data_ptr(), values.clone()) for values in bank._model.parameters()]
    with mock.patch.object(kernels, "_stack_matrices", wraps=kernels._stack_matrices) as grouped:
        told = train(bank, recipes(), MICRO_BATCHES)
    assert grouped.called == (backend == "auto")
    assert told[0].passes == 1
    found = {name: distance(matrices_of(bank, name), alone[name], begun[name]) for name in recipes()}
    assert max(found.values()) <= limit, found
    assert all(
        pointer == values.data_ptr() and kept.equal(values)
        for (pointer, kept), values in zip(before, bank._model.parameters(), strict=True)
    )


def test_adapters_come_and_go_unnoticed(base, begun, alone):
    """Added late, removed in the middle of a window, added again: neighbors are bitwise as without."""
    members = recipes()
    steady = {name: members[name] for name in ("ada", "dee")}
    quiet = bank_of(base, steady)
    train(quiet, steady, 12)

    bank = bank_of(base, steady)
    pointers = [values.data_ptr() for values in bank._model.parameters()]
    train(bank, steady, 4)
    create(bank, "bob", members["bob"])
    train(bank, {**steady, "bob": members["bob"]}, 3, first=4)  # one of bob's windows, and a half
    assert bank.names == ("ada", "dee", "bob")
    bank.delete_adapter("bob")
    train(bank, steady, 2, first=7)
    create(bank, "bob", members["bob"])
    require_equal(matrices_of(bank, "bob"), begun["bob"])
    train(bank, steady, 3, first=9)
    for name in steady:
        require_equal(matrices_of(bank, name), matrices_of(quiet, name))
    train(bank, {"bob": members["bob"]}, 2 * STEPS)
    assert distance(matrices_of(bank, "bob"), alone["bob"], begun["bob"]) <= 1e-6
    assert pointers == [values.data_ptr() for values in bank._model.parameters()]
    for name in bank.names:
        bank.delete_adapter(name)
    assert not any(module._forward_hooks for module in bank._model.modules())


def test_matrices_begin_as_a_lora_that_is_loaded(base, begun):
    """It depends on seed and name only, not on the other adapters."""
    recipe = recipes()["eve"]
    options = shardwise.options.LoadOptions(seed=recipe.seed)
    model = shardwise.from_pretrained(base, tuning=shardwise.Lora(recipe.lora()), options=options)
    loaded = {
        name.replace(".default", ""): values.detach() for name, values in model.named_parameters() if "lora" in name
    }
    require_equal(loaded, begun["eve"])


# ── weights, and evaluation ───────────────────────────────────────────────────────────────────────


def test_a_sum_with_the_callers_weights(base):
    """Of one micro-batch: the gradient is that of the sum, whatever the tokens are."""
    more = {"reduction": "sum"}
    recipe = replace(recipes()["ada"], more=more, optimizer=lambda own: torch.optim.SGD(own, lr=1.0))
    mean = replace(recipes()["ada"], optimizer=recipe.optimizer)
    bank = bank_of(base, {"sum": recipe, "mean": mean})
    begin = matrices_of(bank, "sum")
    batch = rows_for("ada", recipe, 0)
    weights = torch.full(batch["labels"].shape, 0.5)
    told = bank.forward_backward([("sum", {**batch, "weights": weights}), ("mean", batch)]).adapters
    learned = int((batch["labels"][:, 1:] != -100).sum())
    assert told["sum"].num_supervised_tokens == learned
    assert told["sum"].loss == pytest.approx(0.5 * learned * told["mean"].loss, rel=1e-6)
    steps = bank.optim_step("sum", max_grad_norm=1e9), bank.optim_step("mean")
    assert steps[0].grad_norm == pytest.approx(0.5 * learned * steps[1].grad_norm, rel=1e-5)
    moved = {key: (matrices_of(bank, "sum")[key] - values) / (0.5 * learned) for key, values in begin.items()}
    expected = {key: matrices_of(bank, "mean")[key] - values for key, values in begin.items()}
    torch.testing.assert_close(moved, expected, rtol=1e-4, atol=1e-6)


def test_log_probabilities_with_and_without_an_adapter(base, begun):
    members = {
        name: replace(recipe, config={**recipe.config, "lora_dropout": 0.5}) for name, recipe in recipes().items()
    }
    bank = bank_of(base, members)
    train(bank, members, 6)
    batch = rows_for("dee", members["dee"], 0)
    found = bank.compute_logprobs([(None, batch), ("dee", batch), ("ada", batch), ("dee", batch)])
    with zoo.silenced():
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.testing.assert_close(found[0], logprobs_of(model, batch), rtol=1e-4, atol=1e-5)
    for row in range(len(found[0])):
        assert not torch.allclose(found[1][row], found[0][row], atol=1e-4)
        assert not torch.allclose(found[2][row], found[1][row], atol=1e-4)
        assert found[3][row].equal(found[1][row]), "an evaluation has no dropout"
    assert not any(values.requires_grad for own in found for values in own)


# ── activations computed again ────────────────────────────────────────────────────────────────────


def recompute(model: Any, **how: Any) -> None:
    """As transformers does it, under the name that it has now."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, **how})
    model.train()


def two_in_flight(bank: Any, members: dict[str, Recipe], *, mixed_up: bool = False) -> dict[str, torch.Tensor]:
    """Two micro-batches forward, then both backward, the older one first."""
    adapters = {name: bank._adapters[name] for name in members}
    passes = []
    for number in (0, 1):
        requests, keys = [], []
        for name, adapter in adapters.items():
            rows = parse_rows("", rows_for(name, members[name], number), vocab_size=64, longest=64)
            own = [int(row_keys(number, 10 * len(keys) + place, 1)) for place in range(len(rows))]
            if number:  # in the other order: the second micro-batch has other rows and places than the first
                rows.reverse()
                own.reverse()
            requests.append(PlacedRequest(Request(name, []), adapter, {}, rows))
            keys.append(own)
        places = tuple((request, row) for request, own in enumerate(keys) for row in range(len(own)))
        passes.append(FusedPass(bank._base, PlannedPass(16, 1, places), requests, keys, is_training=True))
    for each in passes:
        each.forward()
    if mixed_up:
        passes[0].route, passes[1].route = passes[1].route, passes[0].route
    for each in passes:
        assert not each.compute_losses()
        each.backward()
        if not mixed_up:
            each.route.require_reached()
    found = {name: adapter.gradient.clone() for name, adapter in adapters.items()}
    for adapter in adapters.values():
        adapter.gradient.zero_()
    return found


def test_activations_computed_again_meet_their_own_rows(base):
    members = {
        name: replace(recipe, config={**recipe.config, "r": 4, "lora_dropout": 0.3}, rows=3)
        for name, recipe in recipes().items()
        if name in ("ada", "dee", "eve")
    }
    plain = two_in_flight(bank_of(base, members), members)
    assert all(gradient.any() for gradient in plain.values())
    bank = bank_of(base, members, sharding=Sharding(activation_checkpointing=True))
    require_equal(two_in_flight(bank, members), plain)
    mixed = two_in_flight(bank, members, mixed_up=True)
    assert not torch.allclose(mixed["ada"], plain["ada"], rtol=1e-2)

    for use_reentrant in (False, True):
        model = shardwise.from_pretrained(base)
        recompute(model, use_reentrant=use_reentrant)
        bank = shardwise.AdapterBank(model, backend="loop")
        for name, recipe in members.items():
            create(bank, name, recipe)
        require_equal(two_in_flight(bank, members), plain)


def test_a_layer_that_the_backward_pass_goes_by_is_named(base):
    """It would be trained on nothing, without a word; and what has been gathered before is kept."""
    recipe = Recipe({"r": 4, "target_modules": ["q_proj", "lm_head"]}, gradient_accumulation_steps=2)
    bank = bank_of(base, {"ada": recipe})
    bank.forward_backward([("ada", rows_for("ada", recipe, 0))])
    before = bank._adapters["ada"].gradient.clone()
    cut = bank._model.model.layers[0].register_forward_hook(lambda module, args, output: output.detach())
    with pytest.raises(TrainingError, match=r"has not reached model.layers.0.self_attn.q_proj: the loss does not"):
        bank.forward_backward([("ada", rows_for("ada", recipe, 1))])
    cut.remove()
    assert bank._adapters["ada"].gradient.equal(before)
    bank.forward_backward([("ada", rows_for("ada", recipe, 1))])
    assert bank.optim_step("ada").is_taken


def test_a_layer_that_returns_no_tensor_is_named(base):
    bank = bank_of(base, {"ada": recipes()["ada"]})
    layer = bank._model.model.layers[0].self_attn.q_proj
    layer.forward = lambda x: (x, x)
    with pytest.raises(TrainingError, match=r"model.layers.0.self_attn.q_proj returns a tuple, not a tensor"):
        bank.forward_backward([("ada", rows_for("ada", recipes()["ada"], 0))])


def test_a_layer_that_cannot_be_trained_is_not_felt_by_others(base):
    """One that the backward pass does not reach, and one that returns a tuple: of an adapter without requests."""
    targets = ["model.layers.0.self_attn.v_proj", "model.layers.0.self_attn.q_proj"]
    bad = {
        name: Recipe({"r": 4, "target_modules": [target, "lm_head"]})
        for name, target in zip("xy", targets, strict=True)
    }
    bob = Recipe({"r": 4, "target_modules": ["lm_head", "o_proj"]})
    gradients = []
    for others in ({}, bad):
        bank = bank_of(base, {"bob": bob, **others})
        attention = bank._model.model.layers[0].self_attn
        attention.v_proj.register_forward_hook(lambda module, args, output: output.detach())
        own_forward = attention.q_proj.forward
        attention.q_proj.forward = lambda x, own_forward=own_forward: (own_forward(x),)
        attention.q_proj.register_forward_hook(lambda module, args, output: output[0])
        bank.forward_backward([("bob", rows_for("bob", bob, 0))])
        gradients.append(bank._adapters["bob"].gradient.clone())
        for name, error in zip(others, ("has not reached .*v_proj", "q_proj returns a tuple"), strict=False):
            with pytest.raises(TrainingError, match=error):
                bank.forward_backward([(name, rows_for(name, bad[name], 0))])
    assert gradients[0].equal(gradients[1])


# ── dropout, and going on ─────────────────────────────────────────────────────────────────────────


def test_dropout_is_an_adapters_own(base):
    """The same alone and together, padded or not; another for each step; and no generator of torch's is moved."""
    members = {
        name: replace(recipe, config={**recipe.config, "lora_dropout": 0.3}) for name, recipe in recipes().items()
    }
    together, single = bank_of(base, members), bank_of(base, {"ada": members["ada"]})
    state = torch.get_rng_state()
    train(together, members, 6)
    train(single, {"ada": members["ada"]}, 6)
    assert torch.get_rng_state().equal(state)
    require_equal(matrices_of(together, "ada"), matrices_of(single, "ada"))
    without = bank_of(base, {"ada": recipes()["ada"]})
    train(without, {"ada": recipes()["ada"]}, 6)
    key = next(key for key in matrices_of(without, "ada") if "lora_B" in key)
    assert not torch.allclose(matrices_of(without, "ada")[key], matrices_of(single, "ada")[key], atol=1e-4)


def test_dropout_is_another_in_each_micro_batch(base):
    """Of a window, and of the next; matrices that stay make it the only difference."""
    config = {**recipes()["ada"].config, "lora_dropout": 0.3}
    recipe = replace(
        recipes()["ada"],
        config=config,
        gradient_accumulation_steps=2,
        optimizer=lambda own: torch.optim.SGD(own, lr=0.0),
    )
    bank = bank_of(base, {"ada": recipe})
    batch, sums = rows_for("ada", recipe, 0), []
    for _ in range(2):
        for _ in range(2):
            bank.forward_backward([("ada", batch)])
            sums.append(bank._adapters["ada"].gradient.clone())
        bank.optim_step("ada")
    found = [sums[0], sums[1] - sums[0], sums[2], sums[3] - sums[2]]
    for number, one in enumerate(found):
        assert all(float((one - other).norm()) > 0.01 * float(one.norm()) for other in found[:number])


def test_dropout_has_the_configured_rate():
    values = torch.ones(8 * 50, 40)
    found = drop_elements(values, row_keys(5, 0, 8), 3, 0.25)
    assert float((found == 0).double().mean()) == pytest.approx(0.25, abs=0.01)
    assert found.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    rows = found.view(8, 50, 40)
    assert not rows[0].equal(rows[1])
    assert drop_elements(values[: 3 * 50], row_keys(5, 2, 3), 3, 0.25).equal(rows[2:5].flatten(0, 1))
    assert not drop_elements(values, row_keys(5, 0, 8), 4, 0.25).equal(found)


class Stubborn(ConstantLR):
    """A schedule that has taken a state when it fails."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self.last_epoch == 7:
            raise KeyError("last_epoch")


def test_a_state_that_fails_half_way_changes_nothing(base):
    recipe = next(iter(recipes().values()))
    bank = shardwise.AdapterBank(shardwise.from_pretrained(base))
    bank.add_adapter("ada", LoraConfig(**recipe.config), schedule=Stubborn)
    bank.forward_backward([("ada", rows_for("ada", recipe, 0))])
    bank.optim_step("ada")
    before = bank.state_dict("ada")
    moved = {**before["facts"], "settings": {**before["facts"]["settings"], "lr": 9.0}}
    changed = {**before["facts"]["schedule_state"], "last_epoch": 7}
    with pytest.raises(shardwise.ConfigError, match="the schedule of 'ada': rejects its state"):
        bank.load_state_dict("ada", {**before, "facts": {**moved, "schedule_state": changed}})
    after = bank.state_dict("ada")
    assert after["facts"]["schedule_state"] == before["facts"]["schedule_state"]
    assert after["facts"]["schedule_state"]["last_epoch"] == 1
    assert after["facts"]["settings"] == before["facts"]["settings"]
    require_equal(after["adapter"], before["adapter"])


# ── other models ──────────────────────────────────────────────────────────────────────────────────


SMALL: dict[str, Any] = {"vocab_size": 64, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


@pytest.mark.parametrize(
    ("config", "targets"),
    [
        (GPT2Config(**SMALL, n_embd=32, n_layer=2, n_head=2, n_positions=64), ["c_attn", "c_proj", "wte"]),
        (
            Gemma3TextConfig(
                **{**banking.SIZES, **SMALL, "pad_token_id": 3},
                query_pre_attn_scalar=16,
                sliding_window=8,
                tie_word_embeddings=True,
            ),
            ["embed_tokens", "k_proj"],
        ),
    ],
    ids=["transposed weights", "scaled embeddings with a token of padding"],
)
def test_layers_of_other_models(tmp_path, config, targets):
    torch.manual_seed(1)
    with zoo.silenced():
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    recipe = Recipe({"r": 4, "target_modules": targets, "fan_in_fan_out": "wte" in targets}, rows=3)
    bank = bank_of(tmp_path, {"ada": recipe, "eve": replace(recipe, seed=1)})
    begin = matrices_of(bank, "ada")
    train(bank, {"ada": recipe, "eve": recipe}, 5)
    assert (
        distance(matrices_of(bank, "ada"), banking.alone(tmp_path, "ada", recipe, begin, steps=5, pad_to=16), begin)
        <= 1e-6
    )


# ── 16 bits ───────────────────────────────────────────────────────────────────────────────────────


def gradients_of(bank: Any, members: dict[str, Recipe]) -> dict[str, torch.Tensor]:
    """After one step, so that no matrix is zero."""
    train(bank, members, 1)
    bank.forward_backward([(name, rows_for(name, recipe, 1)) for name, recipe in members.items()])
    return {name: bank._adapters[name].gradient.clone() for name in members}


def test_a_base_of_16_bits_keeps_matrices_in_32(base):
    """Both backends, and both near to what 32 bits have; ranks of 3 and 4 are one product of 8."""
    members = {name: recipes()[name] for name in ("ada", "dee", "eve")}
    exact = gradients_of(bank_of(base, members), members)
    for backend in ("loop", "auto"):
        bank = bank_of(base, members, backend, dtype=torch.bfloat16)
        found = gradients_of(bank, members)
        told = bank.compute_logprobs([(name, rows_for(name, members[name], 0)) for name in members])
        assert all(own.dtype is torch.float32 for each in told for own in each)
        assert all(
            values.dtype is torch.float32 for name in members for values in bank._adapters[name].matrices.values()
        )
        for name in members:
            away = float((found[name] - exact[name]).norm() / exact[name].norm())
            assert away < 0.1, (backend, name, away)
