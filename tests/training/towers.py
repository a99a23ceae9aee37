"""A model of two halves that share nothing, so that each can be trained beside the other or alone, to the bit."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from tests.quiet import quieten
from tests.training import tiny
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import get_scheduler

from shardwise.checkpoints.checkpointer import Checkpointer
from shardwise.errors import ShardwiseError
from shardwise.execution.ranks.world import World
from shardwise.models.replicated import average_replicated_gradients
from shardwise.models.wrapping import wrap
from shardwise.training.checkpoints import Checkpoints, KeptInFolders
from shardwise.training.data.batches import IGNORED, Batch, EvaluationBatches, Padded, evaluation_batches
from shardwise.training.data.loader import StepLoader, step_loader
from shardwise.training.data.read_once import read_data
from shardwise.training.evaluation_rows import Evaluation, evaluate
from shardwise.training.loop import train
from shardwise.training.options import Steps, TrainOptions
from shardwise.training.parts import OwnParts, TrainedPart
from shardwise.training.passes.forward import Forward
from shardwise.training.report import Event, TrainReport
from shardwise.training.stopping import StopRequest

STEPS = 6
RATE, DECAY, CLIP = 1e-2, 0.01, 0.05


class Tower(nn.Module):
    """With a parameter that has no dimensions and so stays whole on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(260, 16)
        self.norm = nn.LayerNorm(16)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(16, 260)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.scale * self.norm(self.embedding(input_ids)))
        return logits


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.towers = nn.ModuleList([Tower(), Tower()])

    def forward(self, input_ids: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        left, right = (tower(input_ids) for tower in self.towers)
        return {"left": left, "right": right}


class OfBoth:
    """A loss of one's own: the cross entropies of both halves."""

    def summed(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        following = F.pad(batch.labels[:, 1:], (0, 1), value=IGNORED).flatten()
        total = torch.zeros(())
        for logits in model(**batch.inputs()).values():
            total = total + F.cross_entropy(
                logits.flatten(0, 1).float(), following, reduction="sum", ignore_index=IGNORED
            )
        return total

    def count(self, batch: Batch) -> int:
        return batch.supervised_tokens


class OfRows(OfBoth):
    """The mean over rows of the mean over their tokens."""

    def summed(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        following = batch.labels[:, 1:]
        losses = torch.zeros(following.shape)
        for logits in model(**batch.inputs()).values():
            losses = losses + F.cross_entropy(
                logits[:, :-1].transpose(1, 2).float(), following, reduction="none", ignore_index=IGNORED
            )
        return (losses.sum(1) / (following != IGNORED).sum(1).clamp(min=1)).sum()

    def count(self, batch: Batch) -> int:
        return len(batch.lines)


def built(*frozen: int) -> Towers:
    """The model, with some of its halves frozen; sharded where there are ranks to shard it over."""
    model, mesh = Towers(), wrap.default_mesh()
    for number in frozen:
        model.towers[number].requires_grad_(False)
    if mesh is not None:
        wrap.wrap(model, wrap.Sharding(mesh=mesh))
        average_replicated_gradients(model, mesh)
    return model


def left(model: Towers, **changes: Any) -> TrainedPart:
    """What options with these numbers ask for."""
    mine = list(model.towers[0].parameters())
    groups = [
        {"params": [parameter for parameter in mine if parameter.ndim >= 2], "weight_decay": DECAY},
        {"params": [parameter for parameter in mine if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    is_mixed = len({isinstance(parameter, DTensor) for parameter in mine}) > 1
    optimizer = torch.optim.AdamW(groups, lr=RATE, foreach=False if is_mixed else None)
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=STEPS)
    return TrainedPart(
        **{"name": "left", "optimizer": optimizer, "schedule": schedule, "max_grad_norm": CLIP} | changes
    )


def right(model: Towers, **changes: Any) -> TrainedPart:
    optimizer = torch.optim.SGD(model.towers[1].parameters(), lr=0.5, momentum=0.9, foreach=False)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    part = {"name": "right", "optimizer": optimizer, "schedule": schedule, "max_grad_norm": 0.01}
    return TrainedPart(**part | {"norm_type": math.inf} | changes)


def loader(file: str) -> StepLoader:
    """Of two micro-batches; of the last step of an epoch, the last rank has fewer rows."""
    data = read_data(file, tiny.tokenizer(), max_length=64)
    size = World.current().size
    options = TrainOptions(duration=Steps(STEPS), batch_size=2 // size, gradient_accumulation_steps=2)
    return step_loader(data, options)


def everything(file: str, batch_size: int) -> EvaluationBatches:
    data = read_data(file, tiny.tokenizer(), max_length=64)
    return evaluation_batches(data, Padded(), batch_size)


def weights(model: nn.Module, number: int) -> dict[str, torch.Tensor]:
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value.clone()
        for name, value in model.towers[number].state_dict().items()
    }


def together(file: str, make: Callable[[Towers], Sequence[TrainedPart]], **more: Any) -> tuple[Towers, TrainReport]:
    model = built()
    return model, train(model, loader(file), OwnParts(make(model)), loss=OfBoth(), **more)


def error_of(function: Callable[[], object]) -> str:
    try:
        function()
    except ShardwiseError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def compared(file: str) -> dict[str, Any]:
    """Both halves trained together, and each alone beside the other, which is frozen."""
    model, both = together(file, lambda model: [left(model), right(model)])
    alone = built(1)
    options = TrainOptions(
        learning_rate=RATE, schedule="linear", warmup=Steps(2), weight_decay=DECAY, max_grad_norm=CLIP
    )
    of_left = train(alone, loader(file), options, loss=OfBoth())
    other = built(0)
    of_right = train(other, loader(file), OwnParts([right(other)]), loss=OfBoth())
    return {
        "weights": [weights(model, 0), weights(model, 1)],
        "expected": [weights(alone, 0), weights(other, 1)],
        "begun": [weights(built(), number) for number in (0, 1)],
        "parts": [
            [(step.parts[name].learning_rate, step.parts[name].grad_norm) for step in both.steps]
            for name in ("left", "right")
        ],
        "expected parts": [
            [(step.learning_rate, step.grad_norm) for step in report.steps] for report in (of_left, of_right)
        ],
        "norms": both.grad_norms,
        "rates": [step.learning_rate for step in both.steps],
        "losses": both.losses,
        "json": both.to_dict()["steps"][0]["parts"],
        "json of one": "parts" in of_left.to_dict()["steps"][0],
    }


def by_rows(file: str) -> dict[str, Any]:
    """A training by a loss that counts rows, and what that is on all of them before and afterwards."""
    model, looked_at = built(), everything(file, 2)
    before = evaluate(World.current(), Forward(model, OfRows()), looked_at)
    parts = OwnParts([left(model), right(model)])
    report = train(model, loader(file), parts, loss=OfRows(), evaluation=Evaluation(looked_at))
    return {
        "before": before,
        "losses": report.losses,
        "norm": report.grad_norms[0],
        "evaluated": report.evaluations[0].loss,
        "weights": [weights(model, number) for number in (0, 1)],
    }


def gone_on(file: str, folder: str) -> dict[str, Any]:
    """Both halves, stopped and gone on with, whichever is named first; and with parts of other names."""
    model, whole = together(file, lambda model: [left(model), right(model)])
    stop = StopRequest()

    def ask(facts: Event) -> None:
        if facts.step == 3:
            stop.number = signal.SIGTERM

    checkpointer = Checkpointer(folder)
    begun = Checkpoints(KeptInFolders(checkpointer, None))
    going = Checkpoints(KeptInFolders(checkpointer, checkpointer))
    _, first = together(file, lambda model: [left(model), right(model)], on_facts=ask, stop=stop, checkpoints=begun)
    errors = [
        error_of(
            lambda: together(file, lambda model: [left(model), right(model, name="wrong")], checkpoints=going)
        ),
        error_of(
            lambda: together(
                file, lambda model: [left(model, name="right"), right(model, name="left")], checkpoints=going
            )
        ),
    ]
    again, rest = together(file, lambda model: [right(model), left(model)], checkpoints=going)
    return {
        "first": first.last_step,
        "losses": [*first.losses, *rest.losses],
        "rates": [
            {name: part.learning_rate for name, part in step.parts.items()} for step in (*first.steps, *rest.steps)
        ],
        "weights": [weights(again, number) for number in (0, 1)],
        "expected losses": whole.losses,
        "expected rates": [{name: part.learning_rate for name, part in step.parts.items()} for step in whole.steps],
        "expected weights": [weights(model, number) for number in (0, 1)],
        "errors": errors,
    }


def refused(file: str) -> list[str]:
    """What is said where ranks have other parts, and where one half's gradient is no number."""
    rank = World.current().rank

    def poison(_module: nn.Module, _given: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * math.nan)

    def spoil(model: Towers) -> list[TrainedPart]:
        if rank == 1:
            model.towers[1].norm.register_forward_hook(poison)
        return [left(model), right(model)]

    return [
        error_of(lambda: together(file, lambda model: [left(model), right(model, max_grad_norm=0.01 + rank)])),
        error_of(lambda: together(file, lambda model: [left(model), right(model)][:: 1 - 2 * rank])),
        error_of(lambda: together(file, spoil)),
    ]


def on_rank(file: str, folder: str) -> dict[str, Any]:
    quieten()
    return {
        "compared": compared(file),
        "rows": by_rows(file),
        "gone on": gone_on(file, folder),
        "refused": refused(file),
    }
