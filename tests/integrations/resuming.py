"""Functions that ranks run on checkpoints of the Trainer."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tests.integrations.trading import Theirs
from tests.loading.on_ranks import attempt
from tests.small_checkpoints import small_qwen3
from tests.state.optimizing import differences
from torch import nn
from torch.optim import AdamW, lr_scheduler
from torch.optim.lr_scheduler import LambdaLR, StepLR
from transformers import Trainer, TrainerCallback, TrainingArguments, get_scheduler

import shardwise


def optimizer_for(model: nn.Module, lr: float = 1e-3) -> AdamW:
    """Grouped as the Trainer does it: matrices, and what has no decay."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    plain = [p for name, p in named if "norm" in name or name.endswith("bias")]
    decayed = [p for name, p in named if not ("norm" in name or name.endswith("bias"))]
    return AdamW([{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}], lr=lr)


def schedule_for(optimizer: AdamW) -> LambdaLR:
    return get_scheduler("linear", optimizer, num_warmup_steps=1, num_training_steps=6)


def train(folder: Path, is_named: bool) -> None:
    """A run of the real Trainer on one process, stopped after two of six steps."""

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == 2

    torch.manual_seed(3)
    model = small_qwen3()
    tokens = torch.randint(0, model.config.vocab_size, (12, 6), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = TrainingArguments(
        str(folder), max_steps=6, save_steps=2, per_device_train_batch_size=2, learning_rate=1e-3, warmup_steps=1,
        weight_decay=0.01, use_cpu=True, report_to="none", disable_tqdm=True, logging_steps=1,
    )  # fmt: skip
    optimizer = optimizer_for(model)
    if is_named:
        names = {p: name for name, p in model.named_parameters()}
        groups = [{**group, "params": [(names[p], p) for p in group["params"]]} for group in optimizer.param_groups]
        optimizer = AdamW(groups, lr=1e-3)
    given = (optimizer, schedule_for(optimizer))
    Trainer(model, arguments, train_dataset=rows, optimizers=given, callbacks=[Stop()]).train()


def sharded(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = small_qwen3()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    if dist.is_initialized():
        shardwise.shard(model)
    return model


def resume(folder: str, by_position: bool) -> tuple[list[str], dict[str, Any]]:
    """What is then other than in the files, and the report."""
    model = sharded(5)
    optimizer = optimizer_for(model, lr=7.0)
    schedule = schedule_for(optimizer)
    order = "position" if by_position else "name"
    report = shardwise.load_trainer_checkpoint(model, folder, optimizer=optimizer, scheduler=schedule, order=order)
    wanted = load_file(Path(folder, "model.safetensors"))
    state = shardwise.get_model_state_dict(model, "full_on_all_ranks")
    faults = differences({name: state[name] for name in wanted}, wanted, "model")
    found = shardwise.get_optimizer_state_dict(model, optimizer, "full_on_all_ranks")
    saved = torch.load(Path(folder, "optimizer.pt"), weights_only=True)
    names = [name for group in found["param_groups"] for name in group["params"]]
    by_name = {names[number]: entries for number, entries in saved["state"].items()}
    faults += differences(found["state"], by_name, "optimizer")
    if [group["lr"] for group in found["param_groups"]] != [group["lr"] for group in saved["param_groups"]]:
        faults.append("other learning rates")
    if schedule.last_epoch != 2 or schedule.get_last_lr()[0] != optimizer.param_groups[0]["lr"]:
        faults.append(f"the schedule is at {schedule.last_epoch}")
    told = report.to_dict()
    return faults, {key: told[key] for key in ("step", "epoch", "restored", "not_restored", "trainer_state")}


def write_fsdp(folder: str, form: str) -> None:
    """A folder as the Trainer writes it under FSDP."""
    model = sharded(1)
    optimizer = optimizer_for(model)
    step(model, optimizer)
    theirs = Theirs(form)
    theirs.save_model(model, folder)
    theirs.save_optimizer(model, optimizer, folder)
    if dist.get_rank() == 0:
        Path(folder, "trainer_state.json").write_text(json.dumps({"global_step": 1, "epoch": 0.5}))
    torch.save({}, Path(folder, f"rng_state_{dist.get_rank()}.pth"))


def step(model: nn.Module, optimizer: AdamW) -> None:
    tokens = torch.arange(12).reshape(2, 6)
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def resume_fsdp(folder: str) -> tuple[list[str], dict[str, Any]]:
    source, model = sharded(1), sharded(2)
    before = optimizer_for(source)
    step(source, before)
    optimizer = optimizer_for(model, lr=3.0)
    report = shardwise.load_trainer_checkpoint(model, folder, optimizer=optimizer)
    wanted, found = (shardwise.get_model_state_dict(item, "full_on_all_ranks") for item in (source, model))
    faults = [name for name in wanted if not torch.allclose(wanted[name], found[name], atol=1e-6)]
    state = shardwise.get_optimizer_state_dict(model, optimizer, "full_on_all_ranks")["state"]
    faults += [name for name, entries in state.items() if entries["step"] != 1]
    return faults, report.to_dict()


def refused(folder: str, how: str) -> tuple[str, str]:
    model = sharded(5)
    optimizer = optimizer_for(model)
    before = shardwise.get_model_state_dict(model, "full_on_all_ranks")
    keywords: dict[str, Any] = {"optimizer": optimizer}
    if how == "scheduler":
        keywords = {"scheduler": StepLR(optimizer, 3)}
    if how == "groups":
        keywords = {"optimizer": AdamW(model.parameters()), "order": "position"}
    if how == "shapes":
        groups = [{"params": group["params"][::-1]} for group in optimizer.param_groups]
        keywords = {"optimizer": AdamW(groups), "order": "position"}
    found = attempt(lambda: shardwise.load_trainer_checkpoint(model, folder, **keywords))
    after = shardwise.get_model_state_dict(model, "full_on_all_ranks")
    if how in ("scheduler", "state") and differences(after, before):
        return "the model was changed", found[1]
    return found


class Falling:
    """A factor with a state, which torch keeps."""

    def __init__(self, **of: float) -> None:
        vars(self).update(of)

    def __call__(self, step: int) -> float:
        return float(sum(vars(self).values()) / (1 + step))


def _chained(optimizer: Any) -> Any:
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.9)], optimizer
    )


def _in_turn(optimizer: Any, second: Any = lr_scheduler.CosineAnnealingLR, *given: Any) -> Any:
    first = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    return lr_scheduler.SequentialLR(optimizer, [first, second(optimizer, *(given or (5,)))], [2])


def _cyclic(optimizer: Any, **keywords: Any) -> Any:
    return lr_scheduler.CyclicLR(optimizer, 0.01, 0.3, 3, cycle_momentum=False, **keywords)


MADE: dict[str, Any] = {
    "lambda": lambda o: LambdaLR(o, [Falling(a=2.0), Falling(a=3.0)]),
    "functions": lambda o: LambdaLR(o, lambda step: 1 / (1 + step)),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 5]),
    "in turn": _in_turn,
    "chained": _chained,
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, min_lr=[0.001, 0.002]),
    "cyclic": _cyclic,
    "own cycle": lambda o: _cyclic(o, scale_fn=Falling(a=0.5)),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=9, cycle_momentum=False),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 8, 2.0),
}
"""Schedules of torch's, for an optimizer of two groups."""


def two_groups(net: nn.Module) -> Any:
    return torch.optim.SGD([{"params": [p], "lr": 0.1 * (n + 1)} for n, p in enumerate(net.parameters())], lr=0.1)


def rates(optimizer: Any, schedule: Any, steps: range) -> list[list[float]]:
    found = []
    for step in steps:
        optimizer.step()
        schedule.step(*([5.0 - 3 * (step == 1)] if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else []))
        found.append([float(group["lr"]) for group in optimizer.param_groups])
    return found


def trainers_folder(folder: Path, net: nn.Module, schedule: Any) -> None:
    """As much of a checkpoint of the Trainer's as there has to be."""
    save_file(net.state_dict(), folder / "model.safetensors", {"format": "pt"})
    (folder / "trainer_state.json").write_text('{"global_step": 3}')
    torch.save(schedule if isinstance(schedule, dict) else schedule.state_dict(), folder / "scheduler.pt")


def schedule_goes_on(folder: Path, made: Any) -> tuple[list[list[float]], list[list[float]]]:
    """The rates after three steps: of a run that went on, and of one that has taken its state from a folder."""
    net = nn.Linear(2, 3)
    optimizer = two_groups(net)
    schedule = made(optimizer)
    rates(optimizer, schedule, range(3))
    trainers_folder(folder, net, schedule)
    other = two_groups(net)
    again = made(other)
    for group, now in zip(other.param_groups, optimizer.param_groups, strict=True):
        group["lr"] = now["lr"]  # which are the optimizer's state
    shardwise.load_trainer_checkpoint(net, folder, scheduler=again)
    return rates(optimizer, schedule, range(3, 8)), rates(other, again, range(3, 8))


def schedules_refused(folder: str) -> dict[str, tuple[str, str]]:
    """Of states that are of other schedules: what is said, if nothing was changed."""
    place, net = Path(folder), nn.Linear(2, 3)
    optimizer = two_groups(net)
    fewer = torch.optim.SGD(net.parameters(), lr=0.1)
    state = {name: make(two_groups(net)).state_dict() for name, make in MADE.items()}
    pairs: dict[str, tuple[dict[str, Any], Any]] = {
        **{f"fewer: {name}": (state[name], None) for name in ("functions", "milestones", "chained", "cyclic")},
        "lambda": (state["lambda"], LambdaLR(optimizer, lambda step: 1.0)),
        "attributes": (state["lambda"], LambdaLR(optimizer, [Falling(b=1.0), Falling(b=1.0)])),
        "function": (state["own cycle"], _cyclic(optimizer)),
        "inner": (state["in turn"], _in_turn(optimizer, lr_scheduler.MultiStepLR, [3])),
        "more": (state["in turn"] | {"_schedulers": state["in turn"]["_schedulers"][:1]}, _in_turn(optimizer)),
        "damaged": (state["milestones"] | {"last_epoch": "3"}, MADE["milestones"](optimizer)),
        "rates": (state["milestones"] | {"base_lrs": ["1", "2"]}, MADE["milestones"](optimizer)),
        "mode": (state["plateau"] | {"mode": "mean"}, MADE["plateau"](optimizer)),
        "no state": ({"functions": 1}, MADE["functions"](optimizer)),
    }
    found = {}
    for name, (stored, schedule) in pairs.items():
        with_fewer = MADE[name.removeprefix("fewer: ")] if schedule is None else None
        there = schedule if with_fewer is None else with_fewer(fewer)
        if dist.get_rank() == 0:
            trainers_folder(place, net, stored)
        dist.barrier()
        before = repr(there.state_dict())
        found[name] = attempt(lambda there=there: shardwise.load_trainer_checkpoint(net, place, scheduler=there))
        if repr(there.state_dict()) != before and name != "mode":
            found[name] = ("the schedule was changed", found[name][1])
        dist.barrier()
    return found
