"""Functions that ranks run in tests of a bank."""

import math
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from peft import LoraConfig
from tests.bank import banking
from tests.bank.banking import STEPS, Recipe, create, matrices_of, recipes, rows_for, train
from tests.support.world import said
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import shardwise
from shardwise.fsdp.policies import MinSize
from shardwise.ranks.world import World

LATE = 4
"""Micro-batches before the adapter ``eve`` comes."""


def bank_of(base: Path, members: Mapping[str, Recipe], backend: Any = None, **keywords: Any) -> Any:
    bank = shardwise.AdapterBank(shardwise.from_pretrained(base, **keywords), backend=backend or "loop")
    for name, recipe in members.items():
        create(bank, name, recipe)
    return bank


def here() -> dict[str, int]:
    return {"rank": dist.get_rank(), "size": dist.get_world_size()}


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Collectives of torch's that are called in the block, and meetings of ranks."""
    calls: Counter[str] = Counter()
    own, reduce = dist.all_reduce, World._reduce

    def all_reduce(*args: Any, **keywords: Any) -> Any:
        calls["all_reduce"] += 1
        return own(*args, **keywords)

    def meet(*args: Any, **keywords: Any) -> Any:
        calls["meetings"] += 1
        return reduce(*args, **keywords)

    with mock.patch.object(dist, "all_reduce", all_reduce), mock.patch.object(World, "_reduce", meet):
        yield calls


def together(base: Path, kind: str) -> dict[str, Any]:
    """All adapters, one of them added late, on a base sharded by FSDP2, with activations computed again."""
    members = recipes() if kind == "loop" else {name: recipes()[name] for name in ("ada", "dee", "eve")}
    micro_batches = {"loop": 3 * STEPS, "grouped": STEPS + LATE}[kind]
    late = members.pop("eve")
    backend = "auto" if kind == "grouped" else "loop"
    sharding = shardwise.Sharding(activation_checkpointing=True)
    bank = bank_of(base, members, backend, sharding=sharding)
    begin = {name: matrices_of(bank, name) for name in members}
    assert isinstance(bank._model, FSDPModule)
    shards = [(values.to_local().data_ptr(), values.to_local().clone()) for values in bank._model.parameters()]
    with counted() as calls:
        told = train(bank, members, LATE, **here())
        create(bank, "eve", late)
        begin["eve"] = matrices_of(bank, "eve")
        more = {**members, "eve": late}
        told += train(bank, more, micro_batches - LATE, first=LATE, began={"eve": LATE}, **here())
    base_is_same = all(
        values.to_local().data_ptr() == pointer and values.to_local().equal(kept)
        for values, (pointer, kept) in zip(bank._model.parameters(), shards, strict=True)
    )
    return {
        "adapters": {name: matrices_of(bank, name) for name in begin},
        "begin": begin,
        "steps": [(step.is_taken, step.grad_norm) for step in told if hasattr(step, "is_taken")],
        "all_reduces": calls["all_reduce"],
        "base is same": base_is_same,
        "losses": told[0].adapters["ada"].loss,
    }


def steps_at_once(base: Path) -> dict[str, Any]:
    """Of adapters with other sizes: together, and one after the other."""
    members = {name: replace(recipes()[name], gradient_accumulation_steps=1) for name in ("ada", "cy", "dee")}
    banks = {kind: bank_of(base, members) for kind in ("together", "alone")}
    calls, rank = {}, here()["rank"]
    for kind, bank in banks.items():
        for number in range(2):
            bank.forward_backward([(name, rows_for(name, own, 2 * number + rank)) for name, own in members.items()])
            with counted() as calls[kind]:
                if kind == "alone":
                    for name in members:
                        bank.optim_step(name, lr=0.1)
                else:
                    bank.optim_step({name: {"lr": 0.1} for name in members})
        # Other adapters on each rank, whose gradients are of other sizes, and one with an invalid setting.
        bank.forward_backward([(name, rows_for(name, own, 9)) for name, own in members.items()])
        before = {name: bank._adapters[name].gradient.clone() for name in members}
        errors = [
            said(lambda bank=bank: bank.optim_step({name: {} for name in list(members)[rank:]})),
            said(lambda bank=bank: bank.optim_step({"dee": {"lr": -1.0} if rank else {}})),
            said(lambda bank=bank: bank.optim_step({"ada": {}, "cy": {"betas": (0.1, rank / 10)}})),
        ]
        after = {name: bank._adapters[name].gradient.clone() for name in members}
        bank.optim_step({name: {} for name in members})
    return {
        "calls": calls,
        "errors": errors,
        "gradients": (before, after),
        "adapters": {kind: {name: bank.state_dict(name) for name in members} for kind, bank in banks.items()},
    }


def other_groups(base: Path, kind: str) -> dict[str, Any]:
    """Every layer a group of FSDP2's, adapted ones among them; or computed in 16 bits."""
    members = {name: recipes()[name] for name in ("ada", "bob", "cy")}
    sharding = {
        "every layer": shardwise.Sharding(wrap=MinSize(1)),
        "16 bits": shardwise.Sharding(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    }[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bank = bank_of(base, members, sharding=sharding)
        begin = {name: matrices_of(bank, name) for name in members}
        told = train(bank, members, 6, **here())
    return {
        "adapters": {name: matrices_of(bank, name) for name in members},
        "begin": begin,
        "losses": [own.loss for each in told if hasattr(each, "passes") for own in each.adapters.values()],
        "groups": sum(isinstance(module, FSDPModule) for module in bank._model.modules()),
    }


def outputs_in_16_bits(base: Path) -> dict[str, list[torch.Tensor]]:
    """Log probabilities by a base whose output FSDP2 casts, and by one whose it does not."""
    ada, results = recipes()["ada"], {}
    for dtype in (None, torch.bfloat16):
        sharding = shardwise.Sharding(mp_policy=MixedPrecisionPolicy(output_dtype=dtype))
        bank = bank_of(base, {"ada": ada}, sharding=sharding)
        with torch.inference_mode():  # FSDP2's first gather is in here, and a backward pass follows
            [logprobs] = bank.compute_logprobs([("ada", rows_for("ada", ada, 1))])
            [losses] = bank.forward_backward([("ada", rows_for("ada", ada, here()["rank"]))]).adapters.values()
        results[str(dtype)] = [*losses.logprobs, *logprobs]
    return results


def faults(base: Path) -> dict[str, Any]:
    """What is wrong on one rank, or differs, is one error on both; and then all goes on."""
    members = {name: recipes()[name] for name in ("ada", "dee", "bob")}
    bank, quiet = bank_of(base, members), bank_of(base, members)
    rank = dist.get_rank()
    ada, good = members["ada"], rows_for("ada", members["ada"], 0)
    bad = {**good, "input_ids": good["input_ids"] + 100 * rank}
    errors = {
        "rows of one rank": said(lambda: bank.forward_backward([("ada", bad)])),
        "no rows of one rank": said(lambda: bank.forward_backward([("ada", (good, ["no", "rows"])[rank])])),
        "no rows": said(lambda: bank.forward_backward("no")),
        "other adapters": said(lambda: bank.forward_backward([(("ada", "dee")[rank], good)])),
        "another config": said(lambda: bank.add_adapter("x", LoraConfig(**{**ada.config, "r": 4 + rank}))),
        "another rate": said(lambda: bank.add_adapter("x", ada.lora(), optimizer=banking.adamw(lr=0.1 + rank))),
        "another seed": said(lambda: bank.add_adapter("x", ada.lora(), seed=rank)),
    }
    assert bank.names == ("ada", "dee", "bob")

    def raises(*_: Any) -> None:
        raise RuntimeError("half way")

    # Before FSDP2 has seen a pass at all.
    handle = bank._model.register_forward_pre_hook(raises, prepend=True)
    errors["not begun"] = said(lambda: bank.forward_backward([("ada", good)]))
    handle.remove()
    train(bank, members, 2, **here())
    bank.forward_backward([("ada", good), ("dee", good)])
    errors["another step"] = said(lambda: bank.optim_step(("ada", "dee")[rank]))
    errors["other changes"] = said(lambda: bank.optim_step("ada", lr=0.1 + rank))
    bank.optim_step("ada")
    bank.optim_step("dee")

    train(quiet, members, 2, **here())
    quiet.forward_backward([("ada", good), ("dee", good)])
    quiet.optim_step("ada")
    quiet.optim_step("dee")

    # An exception in the forward pass of all ranks, between two gathers.
    layer = bank._model.model.layers[1].mlp
    batch = [(name, rows_for(name, recipe, 5)) for name, recipe in members.items()]
    for where, hook in (
        ("half way", raises),
        ("half way back", lambda _m, _a, output: output.register_hook(raises) and None),
    ):
        handle = layer.register_forward_hook(hook)
        errors[where] = said(lambda: bank.forward_backward(batch))
        handle.remove()
    kinds = {type(values).__name__ for values in bank._model.parameters()}

    # Not a number in what one rank has: nobody steps, and the others are as without.
    for each in (bank, quiet):
        each.forward_backward(batch)
    verdicts = []
    if rank == 1:
        bank._adapters["ada"].gradient[3] = math.nan
    for name in ("ada", "dee"):
        verdicts.append(bank.optim_step(name).is_taken)
        quiet.optim_step(name)
    return {
        "errors": errors,
        "verdicts": verdicts,
        "kinds": kinds | {type(values).__name__ for values in bank._model.parameters()},
        "dee": (matrices_of(bank, "dee"), matrices_of(quiet, "dee")),
        "ada": (matrices_of(bank, "ada"), matrices_of(quiet, "ada")),
    }
