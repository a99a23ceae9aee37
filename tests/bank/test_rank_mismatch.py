"""Ranks that pass different values for an adapter, or are lost: one error on all ranks."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from tests import zoo
from tests.bank import banking
from tests.bank.banking import create, matrices_of, recipes, rows_for, train
from tests.bank.on_ranks import bank_of, here
from tests.faults.fault_injection import Doomed, Seat, through_rank_0
from tests.support.world import agreed, said
from tests.truth import require_equal
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM

import shardwise
from shardwise.bank import optimizer_steps
from shardwise.bank.adapter import AdapterStart
from shardwise.ranks import control_channel

ADA = recipes()["ada"]


# ── states and settings ───────────────────────────────────────────────────────────────────────────


def given_other_states(base: Path) -> dict[str, str]:
    """Each of what a state has is another number on rank 1: names, counts and shapes are the same."""
    bank = bank_of(base, {"ada": ADA})
    train(bank, {"ada": ADA}, 2, **here())
    rank = here()["rank"]

    def given(change: Callable[[Any], None]) -> str:
        state = bank.state_dict("ada")
        if rank:
            change(state)
        before = matrices_of(bank, "ada")
        told = said(lambda: bank.load_state_dict("ada", state))
        require_equal(matrices_of(bank, "ada"), before)
        return told

    def of_peft() -> str:
        state = {key: values + rank for key, values in matrices_of(bank, "ada").items()}
        return said(lambda: bank.load_state_dict("ada", state))

    return {
        "matrices": given(lambda state: next(iter(state["adapter"].values()))[0, 0].add_(1e-3)),
        "moments": given(lambda state: state["training"]["optimizer.exp_avg_sq"][5:6].mul_(1.5)),
        "rate": given(lambda state: state["facts"]["settings"].update(lr=0.02)),
        "clip": given(lambda state: state["facts"].update(max_grad_norm=2.0)),
        "of PEFT": of_peft(),
        "the same": said(lambda: bank.load_state_dict("ada", bank.state_dict("ada"))),
    }


def test_ranks_are_given_one_state(worlds, base):
    first = agreed(worlds(2), given_other_states, base)
    assert first.pop("the same") == ""
    expected = "RankMismatchError: the state that 'ada' is given on rank 1 is not that of rank 0"
    assert first == dict.fromkeys(first, expected)


def slower_on_rank_1(optimizer: Any) -> LambdaLR:
    """From the second step on, for which it has to be asked."""
    return LambdaLR(optimizer, lambda step: 0.5 if step and here()["rank"] else 1.0)


def other_settings(base: Path) -> dict[str, Any]:
    members = {
        "ada": replace(ADA, schedule=slower_on_rank_1),
        "bob": replace(recipes()["bob"], gradient_accumulation_steps=1),
    }
    bank = bank_of(base, members)
    rank = here()["rank"]
    train(bank, members, 1, **here())
    batches = [(name, rows_for(name, own, 1)) for name, own in members.items()]
    bank.forward_backward(batches)
    before = matrices_of(bank, "ada")
    told = {"schedule": said(lambda: bank.optim_step("ada"))}
    require_equal(matrices_of(bank, "ada"), before)
    bank._adapters["bob"].optimizer.param_groups[0]["momentum"] = 0.9 - rank / 10
    told["momentum"] = said(lambda: bank.optim_step("bob"))
    bank._adapters["bob"].optimizer.param_groups[0]["momentum"] = 0.9
    told["goes on"] = said(lambda: bank.optim_step("bob"))
    told["bank"] = said(lambda: shardwise.AdapterBank(bank._model, max_tokens_per_pass=64 + rank))
    kinds = (banking.falling, lambda optimizer: LambdaLR(optimizer, lambda step: 1.0))
    told["at once"] = said(lambda: create(bank, "x", replace(ADA, schedule=kinds[rank])))
    return told


def test_ranks_step_alike(worlds, base):
    first = agreed(worlds(2), other_settings, base)
    assert first["schedule"] == (
        "RankMismatchError: the list of arguments on rank 1 is not that of rank 0: lr of 'ada' (0.005 against "
        "0.01). Give every rank the same"
    )
    assert "on rank 1 is not that of rank 0: momentum of 'bob' (0.8 against 0.9)" in first["momentum"]
    assert first["goes on"] == ""
    assert "on rank 1 is not that of rank 0: max_tokens_per_pass (65 against 64)" in first["bank"]


def called_by_rank_0_alone(base: Path) -> dict[str, list[str]]:
    """One method has several meetings, the other one has one, after which the first rank is done."""
    told = {}
    for method in ("state_dict", "offload"):
        bank = bank_of(base, {"ada": ADA})
        if here()["rank"] == 0:
            said(lambda: getattr(bank, method)("ada"))  # noqa: B023 - called here
        told[method] = [said(lambda: train(bank, {"ada": ADA}, 1, **here())) for _ in range(2)]  # noqa: B023
    return told


def test_ranks_in_different_methods_are_named(worlds, base):
    told = agreed(worlds(2), called_by_rank_0_alone, base)
    for method, phase in {"state_dict": "find the adapter", "offload": "move an adapter to the host"}.items():
        one, later = told[method]
        assert one == later
        assert one.startswith(
            f"RankMismatchError: rank 0 is in AdapterBank.{method} ({phase}), and rank 1 is in "
            "AdapterBank.forward_backward (check the rows): a call was skipped"
        )


# ── matrices of PEFT's ────────────────────────────────────────────────────────────────────────────


def test_a_state_dict_of_pefts_begins_anew(base):
    """It has matrices alone, and with adapters on embeddings those of the base, which stay as they are."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with zoo.silenced():
        model = get_peft_model(model, LoraConfig(**recipes()["cy"].config))
    for name, own in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(own)
    state = get_peft_model_state_dict(model, save_embedding_layers=True)
    members = {"cy": recipes()["cy"]}
    bank = bank_of(base, members)
    own = matrices_of(bank, "cy")
    assert state.keys() > own.keys()
    train(bank, members, 4)
    assert bank.load_state_dict("cy", state) == AdapterStart(reason="the state has matrices alone")
    require_equal(matrices_of(bank, "cy"), {key: state[key] for key in own})
    fresh = bank_of(base, members)
    fresh.load_state_dict("cy", {key: state[key] for key in own})
    for each in (bank, fresh):
        train(each, members, 3)
    require_equal(matrices_of(bank, "cy"), matrices_of(fresh, "cy"))
    assert fresh.load_state_dict("cy", bank.state_dict("cy")) == AdapterStart(1, 1, 0, 0)


def test_other_state_dicts_are_refused_by_name(base):
    bank = bank_of(base, {"ada": ADA})
    own = matrices_of(bank, "ada")
    first = sorted(own)[0]
    for state, match in {
        "more": ({**own, "lm_head.weight": own[first]}, r"lm_head.weight: \(4, 32\) in the state, not there"),
        "less": ({key: values for key, values in own.items() if key != first}, f"{first}: not there in the state"),
        "shape": ({**own, first: own[first][1:]}, rf"{first}: \(3, 32\) in the state, \(4, 32\) in the adapter"),
        "numbers": ({**own, first: own[first].int()}, rf"{first}: is a Tensor of torch.int32 on cpu; a whole"),
        "nothing": ({}, "it has no adapter, .*; nor is it matrices alone"),
        "list": ([], "the state of 'ada': is a list. Pass the result of state_dict"),
    }.values():
        with pytest.raises(shardwise.ConfigError, match=match):
            bank.load_state_dict("ada", state)
        require_equal(matrices_of(bank, "ada"), own)


# ── rows ──────────────────────────────────────────────────────────────────────────────────────────

ROWS = rows_for("ada", ADA, 0)
NO_PAIRS = r"requests: is not a list of \(name, rows\)"
NO_TENSORS = "'ada': the rows are not a dict of tensors of one shape"
NO_ROWS: dict[str, tuple[Any, str]] = {
    "a dict of batches": ({"ada": ROWS}, NO_PAIRS),
    "a text": ("ada", NO_PAIRS),
    "a number": (3, NO_PAIRS),
    "names alone": ([("ada", ROWS), "ada"], NO_PAIRS),
    "no name": ([(3, ROWS)], NO_PAIRS),
    "a list of rows": ([("ada", [ROWS])], NO_TENSORS),
    "a tensor": ([("ada", ROWS["input_ids"])], NO_TENSORS),
    "nothing": ([("ada", None)], NO_TENSORS),
    "lists in it": ([("ada", {"input_ids": [[1, 2]]})], NO_TENSORS),
    "labels of text": ([("ada", {**ROWS, "labels": ["x"]})], NO_TENSORS),
    "tensors on meta": ([("ada", {key: values.to("meta") for key, values in ROWS.items()})], NO_TENSORS),
    "sparse tensors": ([("ada", {key: values.to_sparse() for key, values in ROWS.items()})], NO_TENSORS),
    "labels in floats": ([("ada", {**ROWS, "labels": ROWS["labels"].float()})], NO_TENSORS),
    "other keys": ([("ada", {**ROWS, 3: 4, "x": 5})], NO_TENSORS),
}


@pytest.mark.parametrize("call", ["forward_backward", "compute_logprobs"])
def test_rows_that_are_none_are_refused_by_name(base, call):
    bank = bank_of(base, {"ada": ADA})
    for batches, match in NO_ROWS.values():
        with pytest.raises(shardwise.ConfigError, match=f"^{match}"):
            getattr(bank, call)(batches)


# ── ranks that fail in a step, or are gone ────────────────────────────────────────────────────────


def step_with(seat: Seat, base: str, how: str) -> dict[str, Any]:
    """Rank 1 is killed in its step; or fails, and the first rank, which has the store, leaves with its error."""
    members = {"ada": ADA}
    bank = bank_of(Path(base), members)
    train(bank, members, 1, rank=seat.rank, size=seat.size)
    bank.forward_backward([("ada", rows_for("ada", ADA, 1))])
    own = optimizer_steps.sum_all

    def struck(world: Any, values: Any) -> Any:
        if seat.rank == 1 and how == "killed":
            seat.tell()
            os.kill(os.getpid(), signal.SIGKILL)
        if seat.rank == 1:
            raise ValueError("struck")
        return own(world, values)

    seat.leaves = seat.rank == 0 and how == "the store goes"
    late = how == "the store goes" and seat.rank == 1
    with (
        mock.patch.object(optimizer_steps, "sum_all", struck),
        mock.patch.object(control_channel, "_FIRST_POLL_S", 0.3 if late else 0.0001),
        mock.patch.object(control_channel, "_LAST_POLL_S", 0.3 if late else 0.05),
    ):
        return {"told": said(lambda: bank.optim_step("ada"))}


@pytest.mark.distributed
def test_a_rank_that_is_killed_in_a_step_is_named(base):
    with Doomed(2) as world:
        outcome = world.run(step_with, str(base), "killed")
    told = outcome.ends[0].value["told"]
    assert told.startswith("RankLostError: rank 1 (host ")
    assert "is lost: its process has ended" in told


@pytest.mark.distributed
def test_a_rank_that_fails_in_a_step_has_its_own_error(base):
    """Also where the others, and the store with them, are gone as soon as they have it."""
    with Doomed(2, meet=through_rank_0) as world:
        outcome = world.run(step_with, str(base), "the store goes")
    wanted = ["CheckpointError: rank 1: ValueError: struck"] * 2
    assert [end.value["told"] for _, end in sorted(outcome.ends.items())] == wanted
