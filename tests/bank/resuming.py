"""Trainings of adapters that are saved in the middle of a window and resumed."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tests.bank import banking
from tests.bank.banking import Recipe, recipes, train
from tests.bank.on_ranks import bank_of, here
from tests.support.world import said

import shardwise
from shardwise.bank.adapter import constant_lr

WINDOWS, HALF, ALL = 3, 7, 12
"""Micro-batches of a window, after which it is saved (in the third window), and of a training."""


def members() -> dict[str, Recipe]:
    """Windows of three micro-batches, a schedule, dropout, a clip; optimizers that keep other things."""
    found = {name: recipes()[name] for name in ("ada", "bob", "cy", "eve")}
    found["ada"] = replace(found["ada"], schedule=banking.falling, max_grad_norm=0.5)
    found["eve"] = replace(found["eve"], optimizer=torch.optim.Adagrad)
    return {
        name: replace(own, gradient_accumulation_steps=WINDOWS, config={**own.config, "lora_dropout": 0.2})
        for name, own in found.items()
    }


def where() -> dict[str, int]:
    return here() if torch.distributed.is_initialized() else {}


def losses_of(told: list[Any], name: str) -> list[float]:
    return [each.adapters[name].loss for each in told if hasattr(each, "passes")]


def everything(bank: Any, name: str) -> dict[str, torch.Tensor]:
    """Matrices, what the optimizer keeps, and the gradient of an open window."""
    state = bank.state_dict(name)
    return {**state["adapter"], **state["training"]}


def told_of(bank: Any, adapters: Mapping[str, Recipe], told: list[Any]) -> dict[str, Any]:
    return {
        "all": {name: everything(bank, name) for name in adapters},
        "losses": {name: losses_of(told, name) for name in adapters},
    }


ON_RANKS = ("ada", "eve")
"""Those that several ranks train; the others differ in what is the same on any number of them."""


def begin(base: Path, folder: Path) -> dict[str, Any]:
    """The first half of a training, saved in the middle of a window; then the other half."""
    adapters = {name: own for name, own in members().items() if name in ON_RANKS}
    bank = bank_of(base, adapters)
    told = train(bank, adapters, HALF, **where())
    for name in adapters:
        bank.save(name, folder / name, options=shardwise.options.SaveOptions(progress=False))
    half = told_of(bank, adapters, told)
    told = train(bank, adapters, ALL - HALF, first=HALF, **where())
    return {"half": half, **told_of(bank, adapters, told)}


def go_on(base: Path, folder: Path) -> dict[str, Any]:
    """The other half, by a bank that has only the files."""
    bank = bank_of(base, {})
    adapters = {name: own for name, own in members().items() if name in ON_RANKS}
    started = {
        name: bank.load(name, folder / name, optimizer=own.optimizer, schedule=own.schedule or constant_lr)
        for name, own in adapters.items()
    }
    half = told_of(bank, adapters, [])
    told = train(bank, adapters, ALL - HALF, first=HALF, **where())
    return {"half": half, "started": started, **told_of(bank, adapters, told)}


def differing(base: Path, folder: Path) -> dict[str, Any]:
    """What ranks ask for that is not the same, or does not fit; the errors, and who is there afterwards."""
    adapters = {name: members()[name] for name in ON_RANKS}
    bank = bank_of(base, adapters)
    train(bank, adapters, HALF, **where())
    rank = where()["rank"]
    modes = (True, False)
    before = bank.state_dict("ada")
    train(bank, adapters, 1, first=HALF, **where())
    after = bank.state_dict("ada")
    bank.save("ada", folder)

    def load(**keywords: Any) -> Any:
        return bank.load("x", folder, **{"schedule": banking.falling, **keywords})

    return {
        "state": said(lambda: bank.save("ada", folder, training_state=modes[rank])),
        "name": said(lambda: bank.state_dict(ON_RANKS[rank])),
        "given": said(lambda: bank.load_state_dict("ada", (before, after)[rank])),
        "no mode": said(lambda: load(training_state=(modes[0], "no")[rank])),
        "seed of one rank": said(lambda: load(seed=rank)),
        "another optimizer": said(lambda: load(optimizer=banking.sgd)),
        "names": bank.names,
    }
