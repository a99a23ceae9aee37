"""Bases that fail in a pass, and ranks that run them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tests.bank import banking, on_ranks
from tests.bank.banking import Recipe, no_rows, recipes, rows_for

import shardwise
from shardwise.bank import collective_resync
from shardwise.execution import Timeouts
from shardwise.models.gradients import gather_zeros
from shardwise.models.policies import MinSize

BAD = banking.WORDS - 1
"""A token that a base in trouble does not bear."""
MOST_ROWS = 8
"""That fit into a pass, where there is trouble with memory."""


def members() -> dict[str, Recipe]:
    """Windows of 1 and 2; ``x`` has the rows that are trouble."""
    x = Recipe({"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1}, more={"reduction": "sum"})
    return {**{name: recipes()[name] for name in ("ada", "bob")}, "x": x, "dee": recipes()["dee"]}


def rows_of(name: str, recipe: Recipe, number: int, *, bad: bool = False) -> dict[str, torch.Tensor]:
    batch = rows_for(name, recipe, number)
    ids = batch["input_ids"] % BAD
    if bad:
        ids[-1, 0] = BAD
    return {**batch, "input_ids": ids, "labels": batch["labels"].where(batch["labels"] < 0, ids)}


@contextmanager
def trouble(bank: Any, kind: str) -> Iterator[None]:
    """In the middle of a pass, with layers to come, where a base does not bear what it sees."""
    model = bank._model.model
    is_bad = False

    def look(_module: Any, args: Any, keywords: Any) -> None:
        nonlocal is_bad
        ids = args[0] if args else keywords["input"]
        is_bad = bool((ids == BAD).any()) if kind != "memory" else len(ids) > MOST_ROWS

    def fail(*_: Any) -> None:
        if is_bad:
            raise MemoryError("no more") if kind == "memory" else ValueError("not this token")

    def fail_back(_module: Any, _args: Any, output: Any) -> None:
        output.register_hook(fail)

    def be_finite(_module: Any, _args: Any, output: Any) -> None:
        if not bool(output.isfinite().all()):
            raise ValueError("not a number")

    hook: Callable[..., None] = {"backward": fail_back, "matrices": be_finite}.get(kind, fail)
    handles = [
        model.embed_tokens.register_forward_pre_hook(look, with_kwargs=True),
        (model.norm if kind == "backward" else model.layers[0].mlp).register_forward_hook(hook),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def go(
    bank: Any, number: int, share: Callable[[str, dict[str, Any]], dict[str, Any]] = lambda name, rows: rows
) -> Any:
    """A micro-batch of all, one of the rows of ``x`` bad; steps of all but ``x``."""
    own = members()
    batches = [(name, share(name, rows_of(name, recipe, number, bad=name == "x"))) for name, recipe in own.items()]
    told = bank.forward_backward(batches)
    for name in ("ada", "dee", "x", *(("bob",) if number % 2 else ())):
        bank.optim_step(name)
    return told


# ── on ranks ──────────────────────────────────────────────────────────────────────────────────────


def one_rank_fails(base: Path, groups: str) -> dict[str, Any]:
    """The rows of ``x`` are on the last rank, which fails alone in the middle of passes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sharding = {
        "blocks": shardwise.Sharding(activation_checkpointing=True),
        "every layer": shardwise.Sharding(wrap=MinSize(1)),
        "some ranks gather": shardwise.Sharding(reshard_after_forward=2),
    }[groups]
    quick = Timeouts(heartbeat_interval_s=0.1)
    with mock.patch("shardwise.execution.world.Timeouts", return_value=quick):
        bank, quiet = (on_ranks.bank_of(base, members(), sharding=sharding) for _ in range(2))

    def share(name: str, rows: dict[str, Any]) -> dict[str, Any]:
        if name == "x":
            return rows if rank == size - 1 else no_rows()
        return {key: values[rank::size] for key, values in rows.items()}

    errors, waited_for = {}, set()

    def caught_up(root: Any, gathers: Any) -> None:
        waited_for.update({f"{kind}: {len(gathers)} gathers"} if gathers else {})
        gather_zeros(root, gathers)

    for number, kind in enumerate(("forward", "backward")):
        with trouble(bank, kind), mock.patch.object(collective_resync, "gather_zeros", caught_up):
            errors[kind] = on_ranks.said(lambda number=number: go(bank, number, share))  # type: ignore[misc]
            if kind == "forward":
                alone = [("x", share("x", rows_of("x", members()["x"], number, bad=True)))]
                errors["to look"] = on_ranks.said(lambda alone=alone: bank.compute_logprobs(alone))  # type: ignore[misc]
        for each in (bank, quiet):
            go(each, number, share)

    broken = mock.patch.object(bank._tenants["x"].optimizer, "step", side_effect=ValueError("not this token"))
    with broken if rank == size - 1 else nullcontext():
        errors["step"] = on_ranks.said(lambda: go(bank, 2, share))
    go(quiet, 2, share)
    refused = on_ranks.said(lambda: bank.save("x", "nowhere"))
    bank.delete_adapter("x")
    return {
        "errors": errors,
        "refused": refused,
        "waited for": waited_for,
        "states": [{name: each.state_dict(name) for name in bank.names} for each in (bank, quiet)],
        "gathered": {type(values).__name__ for values in bank._model.parameters()},
    }
