"""Bad input of one adapter is one clear error, and the others stay as they are, to the bit."""

import json
import math
import os
import signal
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tests.bank import banking, failing
from tests.bank.banking import Recipe, adamw, create, matrices_of, no_rows, recipes, rows_for, train
from tests.bank.on_ranks import bank_of, here
from tests.bank.test_isolation import QUIET, X, everything, members_with
from tests.faults.fault_injection import Doomed, Seat
from tests.support.world import said
from tests.truth import require_equal
from transformers import AutoModelForCausalLM, Qwen3Config

from shardwise.core.errors import ConfigError, FormatError, KeyMismatchError, ShardwiseError

BATCH = rows_for("x", X, 9)


@pytest.fixture(scope="module")
def calm(base: Path) -> dict[str, Any]:
    """What the others are where nothing is wrong."""
    bank = bank_of(base, members_with(X))
    train(bank, members_with(X), 4)
    return {name: everything(bank, name) for name in QUIET}


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of PEFT's: of another rank than its config says, of a base with more layers."""
    folder = tmp_path_factory.mktemp("adapters")

    def saved(name: str, r: int = 4, **changes: Any) -> Path:
        config = Qwen3Config(**{**banking.SIZES, **changes})
        model = get_peft_model(
            AutoModelForCausalLM.from_config(config), LoraConfig(r=r, target_modules=["q_proj", "v_proj"])
        )
        with warnings.catch_warnings():  # PEFT 0.20 looks for the config of a base that has no name
            warnings.filterwarnings("ignore", message="Could not find a config file in  - will assume")
            model.save_pretrained(folder / name)
        return folder / name

    config = saved("rank") / "adapter_config.json"
    config.write_text(config.read_text().replace('"r": 4', '"r": 8'))
    saved("layers", num_hidden_layers=3)
    return folder


def refused(call: Callable[[Any, Path], object], match: str, error: type[Exception] = ConfigError) -> Any:
    return lambda bank, folder: _refused(lambda: call(bank, folder), match, error)


def _refused(call: Callable[[], object], match: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=match):
        call()


def lora(**config: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "target_modules": ["q_proj"], **config})


def in_removed(bank: Any, folder: Path) -> None:
    create(bank, "gone", X)
    bank.delete_adapter("gone")
    for call in (
        lambda: bank.forward_backward([("gone", BATCH)]),
        lambda: bank.compute_logprobs([("gone", BATCH)]),
        lambda: bank.optim_step("gone"),
        lambda: bank.state_dict("gone"),
        lambda: bank.save("gone", folder),
        lambda: bank.delete_adapter("gone"),
    ):
        _refused(call, "no adapter named 'gone'. Adapters: ada, x, dee, eve", ConfigError)


def in_save(bank: Any, folder: Path) -> None:
    """Where a file is, no folder can be."""
    taken = folder / "taken"
    taken.write_text("")
    with pytest.raises(ShardwiseError, match="taken"):
        bank.save("x", taken)


def in_evaluation(bank: Any, folder: Path) -> None:
    bad = {**BATCH, "input_ids": BATCH["input_ids"].clone()}
    bad["input_ids"][0, 0] = failing.BAD
    with (
        failing.trouble(bank, "forward"),
        pytest.raises(ShardwiseError, match="ValueError: not this token") as told,
    ):
        bank.compute_logprobs([("ada", rows_for("ada", recipes()["ada"], 0)), ("x", bad), (None, BATCH)])
    assert told.value.__notes__[-1:] == ["This was a pass of 'ada', 'x', the base; all of it is discarded."]
    assert len(bank.compute_logprobs([("ada", rows_for("ada", recipes()["ada"], 0)), ("x", BATCH)])) == 2


def with_facts(state: dict[str, Any], **facts: Any) -> dict[str, Any]:
    return {**state, "facts": {**state["facts"], **facts}}


def with_matrix(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "adapter": {**state["adapter"], 5: torch.ones(2)}}


def with_rows(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "adapter": {key: values[:1] for key, values in state["adapter"].items()}}


def on_meta(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "adapter": {key: values.to("meta") for key, values in state["adapter"].items()}}


REFUSALS = {
    "a name twice": refused(lambda bank, _: create(bank, "x", X), "the adapter 'x' exists already"),
    "a name that is none": refused(lambda bank, _: bank.delete_adapter(["x"]), r"no adapter named \['x'\]"),
    "a list for a dict": refused(
        lambda bank, _: bank.optim_step(["x"]), r"steps=\['x'\]: is not a dict of settings"
    ),
    "removed": in_removed,
    "a target that is not there": refused(
        lambda bank, _: bank.add_adapter("y", lora(target_modules=["q_prj"])), "nothing is named 'q_prj'"
    ),
    "rank 0": refused(lambda bank, _: bank.add_adapter("y", lora(r=0)), "`r` should be a positive integer"),
    "a file of another rank": refused(
        lambda bank, folder: bank.load("y", folder / "rank"), r"lora_A.*\(4, 32\)", KeyMismatchError
    ),
    "a file of another base": refused(lambda bank, at: bank.load("y", at / "layers"), "layers.2", KeyMismatchError),
    "a token beyond the vocabulary": refused(
        lambda bank, _: bank.forward_backward([("x", {"input_ids": torch.tensor([[0, banking.WORDS]])})]),
        "'x': input_ids are from 0 to 64. The model has 64 tokens",
    ),
    "data that are not finite": refused(
        lambda bank, _: bank.forward_backward(
            [("x", {**BATCH, "weights": torch.full(BATCH["labels"].shape, math.inf)})]
        ),
        "'x': weights are not all finite",
    ),
    "an exception in a save": in_save,
    "an exception in an evaluation": in_evaluation,
    "a state of another shape": refused(
        lambda bank, _: bank.load_state_dict("x", with_rows(bank.state_dict("x"))), "is not a state of 'x'"
    ),
    "a state without tensors": refused(
        lambda bank, _: bank.load_state_dict("x", {"adapter": {"a": 1}, "training": {}, "facts": {}}),
        "a: is a int, not a tensor",
    ),
    "a state of another clip": refused(
        lambda bank, _: bank.load_state_dict("x", with_facts(bank.state_dict("x"), max_grad_norm=math.nan)),
        "max_grad_norm=nan: is not a number of at least 0",
        FormatError,
    ),
    "facts under numbers": refused(
        lambda bank, _: bank.load_state_dict("x", {**bank.state_dict("x"), "facts": {1: 2}}),
        "1, base, config.*: missing or unknown",
        FormatError,
    ),
    "a matrix under a number": refused(
        lambda bank, _: bank.load_state_dict("x", with_matrix(bank.state_dict("x"))),
        "5: .* not there in the adapter",
    ),
    "a state on meta": refused(
        lambda bank, _: bank.load_state_dict("x", on_meta(bank.state_dict("x"))), "is a Tensor of .* on meta"
    ),
}


def test_refused_calls_change_nothing(base, calm, adapters):
    """Between two steps, and in the middle of windows: matrices, moments and gradients are as without."""
    members = members_with(X)
    bank = bank_of(base, members)
    for number in range(4):
        for what, refuse in REFUSALS.items():
            refuse(bank, adapters)
            assert bank.names == tuple(members), what
        train(bank, members, 1, first=number)
    for name in QUIET:
        require_equal(everything(bank, name), calm[name])
    assert bank.state_dict("x")["facts"]["steps"] == 4


def times(factor: float) -> Callable[..., dict[str, torch.Tensor]]:
    def rows(name: str, recipe: Recipe, number: int) -> dict[str, torch.Tensor]:
        batch = rows_for(name, recipe, number)
        weights = {"weights": torch.full(batch["labels"].shape, factor)} if name == "x" else {}
        return {**batch, **weights}

    return rows


@pytest.mark.parametrize("what", ["decay", "clip", "tokens", "loss of 1e6 times", "loss that is not finite"])
def test_who_is_idle_is_not_felt_and_does_not_feel(base, what):
    """Adapters take turns; one decays, clips, learns many tokens, or none that count."""
    members = {
        "x": {
            "decay": replace(X, optimizer=adamw(lr=1.0, weight_decay=0.9)),
            "clip": replace(X, max_grad_norm=1e-6),
            "tokens": replace(X, rows=10, tokens=60),
        }.get(what, X),
        "ada": recipes()["ada"],
    }
    rows = times({"loss of 1e6 times": 1e6, "loss that is not finite": 3e38}.get(what, 1.0))
    alone, bank = bank_of(base, {"ada": members["ada"]}), bank_of(base, members)
    for number in range(4):
        before = everything(bank, "ada"), everything(alone, "ada")
        told = train(bank, {"x": members["x"]}, 1, first=number, rows=rows)
        require_equal(*before)
        assert told[1].is_taken == (what != "loss that is not finite")
        other = everything(bank, "x")
        for each in (bank, alone):
            train(each, {"ada": members["ada"]}, 1, first=number)
        require_equal(everything(bank, "x"), other)
        require_equal(everything(bank, "ada"), everything(alone, "ada"))


def test_a_batch_of_no_rows(base, calm):
    """Of one adapter: it has a step of its own to take, by a gradient of 0. Of all: there is no pass."""
    members = members_with(replace(X, optimizer=adamw(lr=0.1, weight_decay=0.0)))
    bank = bank_of(base, members)
    before = matrices_of(bank, "x")
    train(
        bank, members, 4, rows=lambda name, own, number: no_rows() if name == "x" else rows_for(name, own, number)
    )
    for name in QUIET:
        require_equal(everything(bank, name), calm[name])
    require_equal(matrices_of(bank, "x"), before)
    told = bank.forward_backward([(name, no_rows()) for name in members])
    assert (told.passes, told.adapters["x"].logprobs) == (0, [])
    assert {name: own.num_supervised_tokens for name, own in told.adapters.items()} == dict.fromkeys(members, 0)
    assert bank.compute_logprobs([("x", no_rows())]) == [[]]


# ── on ranks ──────────────────────────────────────────────────────────────────────────────────────


def comes_and_goes(base: Path) -> list[dict[str, Any]]:
    """Rows of ``x`` are on rank 0 alone, then on both ranks in turn, then nowhere."""
    rank, size = here().values()
    members = members_with(X)
    found = []
    for trouble in (False, True):
        bank = bank_of(base, members)
        if trouble:
            bank._adapters["x"].matrices[next(iter(bank._adapters["x"].matrices))][0, 0] = math.nan
        for number in range(6):
            is_here = (rank == 0, rank == number % size, False)[number // 2]
            batches = [
                (name, {key: values[rank::size] for key, values in rows_for(name, own, number).items()})
                for name, own in members.items()
            ]
            batches[1] = ("x", rows_for("x", X, number) if is_here else no_rows())
            bank.forward_backward(batches)
            verdicts = [bank.optim_step(name).is_taken for name in members]
            assert verdicts == [True, number >= 4 or not trouble, True, True], "no rows, no trouble"
        found.append({name: everything(bank, name) for name in QUIET})
    return found


def test_absent_on_some_ranks_for_whole_steps_or_on_alternating_ranks(worlds, base):
    """In turn on one rank, or on none; the others are alike on all ranks, whatever is wrong with it."""
    first, second = worlds(2).run(comes_and_goes, base)
    for name in QUIET:
        require_equal(first[0][name], first[1][name])
        require_equal(first[0][name], second[0][name])
        require_equal(first[0][name], second[1][name])


def of_rank_3(name: str) -> Recipe:
    own = recipes()[name]
    return replace(own, config={**own.config, "r": 3})


def states_and_files(base: Path, folder: Path) -> dict[str, Any]:
    """An adapter whose rank no number of ranks divides, trained, saved, loaded and given its own state."""
    members = {name: of_rank_3(name) for name in ("cy", "eve")}
    bank = bank_of(base, members)
    train(bank, members, 6, **here())
    bank.save("eve", folder)
    bank.load("again", folder, optimizer=members["eve"].optimizer)
    create(bank, "twin", members["cy"])
    state = bank.state_dict("cy")
    bank.load_state_dict("twin", state)
    missing = {**state, "adapter": dict(list(state["adapter"].items())[1:])}
    before = matrices_of(bank, "twin")
    with pytest.raises(ConfigError) as refusal:
        bank.load_state_dict("twin", missing)
    require_equal(matrices_of(bank, "twin"), before)
    return {
        "adapters": {name: matrices_of(bank, name) for name in bank.names},
        "refusal": str(refusal.value),
        "first": next(iter(state["adapter"])),
    }


@pytest.fixture(scope="module")
def saved(worlds: Any, base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Any, Path]:
    folder = tmp_path_factory.mktemp("saved") / "eve"
    first, second = worlds(2).run(states_and_files, base, folder)
    return first, second, folder


def test_tensors_of_an_adapter_are_whole_and_the_same_on_all_ranks(saved, base):
    """Rank 3 on two ranks: every row of A and every column of B are in the file, and come back."""
    first, second, folder = saved
    for name in ("cy", "eve"):
        shapes = {key: own.shape for key, own in matrices_of(bank_of(base, {name: of_rank_3(name)}), name).items()}
        for each in (first, second):
            assert {type(own) for own in each["adapters"][name].values()} == {torch.Tensor}
            assert {key: own.shape for key, own in each["adapters"][name].items()} == shapes
    stored = load_file(folder / "adapter_model.safetensors")
    assert {len(values) for key, values in stored.items() if "lora_A" in key} == {3}
    require_equal(first["adapters"]["eve"], stored)
    for each in (first, second):
        require_equal(each["adapters"]["twin"], first["adapters"]["cy"])
        require_equal(each["adapters"]["again"], stored)


def test_an_incomplete_state_dict_is_refused_whole(saved, base, tmp_path):
    first, second, folder = saved
    assert first["refusal"] == second["refusal"]
    assert f"{first['first']}: not there in the state" in first["refusal"]
    stored = load_file(folder / "adapter_model.safetensors")
    lost = sorted(stored)[0]
    (tmp_path / "adapter_config.json").write_text((folder / "adapter_config.json").read_text())
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 3
    save_file(
        {key: values for key, values in stored.items() if key != lost}, tmp_path / "adapter_model.safetensors"
    )
    bank = bank_of(base, {"ada": recipes()["ada"]})
    with pytest.raises(KeyMismatchError, match=lost.removesuffix(".weight").rpartition("model.")[2]):
        bank.load("x", tmp_path)
    assert bank.names == ("ada",)


# ── a rank that is gone ───────────────────────────────────────────────────────────────────────────


def killed(seat: Seat, base: str) -> dict[str, Any]:
    """Rank 1 is killed in the middle of a pass."""
    members = {name: recipes()[name] for name in ("ada", "bob")}
    bank = bank_of(Path(base), members)
    bank.forward_backward([("bob", rows_for("bob", members["bob"], 0))])
    before = bank._adapters["bob"].gradient.clone()

    def die(*_: Any) -> None:
        if seat.rank == 1:
            seat.tell()
            os.kill(os.getpid(), signal.SIGKILL)

    bank._model.model.layers[0].register_forward_hook(die)
    try:
        bank.forward_backward([(name, rows_for(name, own, 1)) for name, own in members.items()])
    except ShardwiseError as error:
        told = f"{type(error).__name__}: {error}"
    is_as_before = bank._adapters["bob"].gradient.equal(before)
    return {"told": told, "as before": is_as_before, "later": said(lambda: bank.state_dict("ada"))}


@pytest.mark.distributed
def test_a_rank_that_is_killed_in_a_pass_is_named(base):
    with Doomed(2) as world:
        outcome = world.run(killed, str(base))
    found = outcome.ends[0].value
    assert found["told"].startswith("RankLostError: rank 1 (host ")
    assert "is lost: its process has ended" in found["told"]
    assert found["as before"]
    assert found["later"].startswith("RankLostError: rank 1 (host "), "nobody is waited for again"
