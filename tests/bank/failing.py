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
from shardwise.bank import passes
from shardwise.bank.memory import estimate_pass
from shardwise.core.reports import Available
from shardwise.fsdp.policies import MinSize
from shardwise.ranks.timeouts import Timeouts

QUICK = Timeouts(heartbeat_interval_s=0.1)
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
        ids[-1, 0] = ids[-1, 2] = BAD
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


def share(name: str, rows: dict[str, Any]) -> dict[str, Any]:
    """Of this rank: the rows of ``x`` are on the last one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if name == "x":
        return rows if rank == size - 1 else no_rows()
    return {key: values[rank::size] for key, values in rows.items()}


def batches(number: int, *, bad: bool = True) -> list[tuple[str, dict[str, Any]]]:
    """A micro-batch of all, one of the rows of ``x`` bad."""
    rows = {name: rows_of(name, recipe, number, bad=bad and name == "x") for name, recipe in members().items()}
    return [(name, share(name, own)) for name, own in rows.items()]


def gradients(bank: Any) -> dict[str, torch.Tensor]:
    return {name: bank._adapters[name].gradient.clone() for name in bank.names}


# ── on ranks ──────────────────────────────────────────────────────────────────────────────────────


def one_rank_fails(base: Path, kind: str, groups: str) -> dict[str, Any]:
    """The last rank fails alone in the middle of a pass, and the others wait for it in a gather."""
    sharding = {
        "blocks": shardwise.Sharding(activation_checkpointing=True),
        "every layer": shardwise.Sharding(wrap=MinSize(1)),
        "some ranks gather": shardwise.Sharding(reshard_after_forward=2),
    }[groups]
    with mock.patch("shardwise.ranks.world.Timeouts", return_value=QUICK):
        bank = on_ranks.bank_of(base, members(), sharding=sharding)
    bank.forward_backward([batches(0, bad=False)[1]])
    before = gradients(bank)
    with trouble(bank, kind):
        error = on_ranks.said(lambda: bank.forward_backward(batches(1)))
    later = {
        "forward_backward": on_ranks.said(lambda: bank.forward_backward(batches(2, bad=False))),
        "optim_step": on_ranks.said(lambda: bank.optim_step("ada")),
        "compute_logprobs": on_ranks.said(lambda: bank.compute_logprobs(batches(2, bad=False))),
        "state_dict": on_ranks.said(lambda: bank.state_dict("ada")),
        "save": on_ranks.said(lambda: bank.save("ada", "nowhere")),
        "load": on_ranks.said(lambda: bank.load("eve", "nowhere")),
        "add_adapter": on_ranks.said(lambda: bank.add_adapter("eve", recipes()["eve"].lora())),
    }
    return {"error": error, "later": later, "gradients": (before, gradients(bank))}


def leave_alone(base: str, store: str, rank: int) -> None:
    """The same in a process that then ends in order. Called in a process of its own."""
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    print(one_rank_fails(Path(base), "forward", "blocks")["error"])


def one_loss_raises(base: Path) -> dict[str, Any]:
    """The loss of ``x`` raises, on the last rank; before, there is not enough memory for the logits."""
    rank, size = dist.get_rank(), dist.get_world_size()
    bank, quiet = (on_ranks.bank_of(base, members(), sharding=shardwise.Sharding()) for _ in range(2))
    for each in (bank, quiet):
        each.forward_backward([batches(0, bad=False)[1]])
    errors = {}
    before = gradients(bank)
    if rank == size - 1:
        little = mock.patch.object(passes, "available_memory", return_value=Available(None, 10_000))
    else:
        little = nullcontext()
    with little:
        errors["memory"] = on_ranks.said(lambda: bank.forward_backward(batches(1)))
    unchanged = gradients(bank)
    with losses_raise():
        errors["loss"] = on_ranks.said(lambda: bank.forward_backward(batches(1)))
        errors["to look"] = on_ranks.said(lambda: bank.compute_logprobs(batches(1)))
    quiet.forward_backward(batches(1))
    after = gradients(bank), gradients(quiet)
    after[1].pop("x")
    full = on_ranks.said(lambda: bank.optim_step("x"))
    for each in (bank, quiet):
        each.optim_step("ada")
        each.optim_step("bob")
    needed = []
    for gathered in (bank._base.gathered_bytes, 0):
        bank._base.gathered_bytes = gathered
        needed.append(estimate_pass(bank._base, [], 1, 8, 8, 1, free=None))
    return {
        "gathered": needed[0] - needed[1],
        "parameters": sum(parameter.numel() * 4 for parameter in bank._model.parameters()),
        "errors": errors,
        "before": (before, unchanged),
        "x": ({"x": before["x"]}, {"x": after[0].pop("x")}),
        "others": after,
        "full": full,
        "adapters": [{name: each.state_dict(name)["adapter"] for name in ("ada", "bob")} for each in (bank, quiet)],
    }


@contextmanager
def losses_raise() -> Iterator[None]:
    """Of rows with the bad token."""
    compute_loss = passes.FusedPass._compute_loss

    def look(fused: Any, placed: Any, rows: slice, leaf: torch.Tensor) -> torch.Tensor:
        if any(bool((each.row.targets == BAD).any()) for each in fused.rows[rows]):
            raise ValueError("not this token")
        return compute_loss(fused, placed, rows, leaf)

    with mock.patch.object(passes.FusedPass, "_compute_loss", look):
        yield


def one_step_fails(base: Path) -> dict[str, Any]:
    """The optimizer of ``x``, on the last rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    bank = on_ranks.bank_of(base, members(), sharding=shardwise.Sharding())
    bank.forward_backward(batches(0))
    broken = mock.patch.object(bank._adapters["x"].optimizer, "step", side_effect=ValueError("not this token"))
    with broken if rank == size - 1 else nullcontext():
        error = on_ranks.said(lambda: bank.optim_step("x"))
    refused = on_ranks.said(lambda: bank.save("x", "nowhere"))
    bank.delete_adapter("x")
    bank.optim_step("ada")
    return {"error": error, "refused": refused}
