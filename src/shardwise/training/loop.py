"""The loop: steps, a schedule, evaluation, checkpoints, and what is told about them."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn
from transformers import get_scheduler

from shardwise.errors import ConfigError, TrainingError
from shardwise.execution.world import World
from shardwise.training.checkpoints import Checkpointing, Checkpoints, NoCheckpoints, TrainState
from shardwise.training.data import Batch
from shardwise.training.options import TrainOptions
from shardwise.training.report import CheckpointFacts, EvaluationFacts, Facts, StepFacts, TrainReport
from shardwise.training.step import (
    backward,
    clip_gradients,
    computing_in,
    parameter_groups,
    require_finite,
    sum_over_ranks,
    summed_loss,
)
from shardwise.training.stopping import StopRequest

_SHOWN_ROWS = 20


class StepSource(Protocol):
    """The micro-batches of each step, from a position on; see :class:`~shardwise.training.data.StepLoader`."""

    def __iter__(self) -> Iterator[Sequence[Batch]]: ...

    def __len__(self) -> int:
        """Steps in all, those before the position among them."""
        ...

    @property
    def epochs_done(self) -> float: ...

    def name_rows(self, lines: Sequence[int]) -> str:
        """Rows by their places, as a reader finds them."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class NoEvaluation:
    """Nothing but the training data is looked at."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Rows that are not learned, looked at every so many steps and after the last one.

    ``every`` None: only after the last one. ``on_best`` is called, on every rank, whenever the loss is lower than
    before.
    """

    batches: Iterable[Batch]
    every: int | None = None
    on_best: Callable[[EvaluationFacts], object] = lambda facts: None


Evaluating: TypeAlias = NoEvaluation | Evaluation

_NOT_EVALUATED, _NOT_KEPT = NoEvaluation(), NoCheckpoints()


def train(
    model: nn.Module,
    steps: StepSource,
    options: TrainOptions,
    on_facts: Callable[[Facts], object] = lambda facts: None,
    *,
    evaluation: Evaluating = _NOT_EVALUATED,
    checkpoints: Checkpointing = _NOT_KEPT,
    stop: StopRequest | None = None,
) -> TrainReport:
    """Train all parameters that require a gradient, by AdamW.

    The loss of a step is the cross entropy of its supervised tokens divided by their number on all ranks and in all
    micro-batches, so that the numbers of ranks and of micro-batches do not change the result.

    Collective: yes, over the default process group, which must be the ranks of the model's mesh.
    Memory: gradients and two moments for each trained parameter, sharded as it is. With several micro-batches on
    several ranks also one unsharded gradient of the model until the last of them, which spares the ranks an
    exchange for each of the others.

    Args:
        model: a causal language model, sharded or not; returned to the mode (train, eval) it came in.
        steps: as of :func:`~shardwise.training.data.step_loader`; as many on every rank.
        options: what they say about data is of no concern here.
        on_facts: told about each step, evaluation and checkpoint, on every rank, after it.
        evaluation: what else is looked at, and when.
        checkpoints: what is kept, and gone on from.
        stop: asked on any rank, it lets all ranks finish the same step, keep it, and return.

    Raises:
        TrainingError: the loss or the gradient is not finite; the parameters are those before that step, and no
            checkpoint was taken since.
        ConfigError: nothing requires a gradient, or the schedule cannot be made.
    """
    world = World.current()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ConfigError(f"no parameter of {type(model).__name__} requires a gradient, so none can be trained")
    run = _Run(world, model, parameters, steps, options, on_facts, evaluation, checkpoints, stop or StopRequest())
    mode = model.training
    model.train()
    run.resume()
    run.go()
    model.train(mode)
    return TrainReport(
        rank=world.rank,
        world_size=world.size,
        trained_parameters=sum(parameter.numel() for parameter in parameters),
        steps=tuple(run.done),
        evaluations=tuple(run.evaluated),
        is_stopped=run.is_stopped,
        last_step=run.step,
    )


class _Run:
    """One training on its way."""

    def __init__(
        self,
        world: World,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        steps: StepSource,
        options: TrainOptions,
        on_facts: Callable[[Facts], object],
        evaluation: Evaluating,
        checkpoints: Checkpointing,
        stop: StopRequest,
    ) -> None:
        self.world = world
        self.model = model
        self.parameters = parameters
        self.device = parameters[0].device
        self.steps = steps
        self.options = options
        self.on_facts = on_facts
        self.evaluation = evaluation
        self.checkpoints = checkpoints
        self.stop = stop
        self.optimizer = torch.optim.AdamW(
            parameter_groups(parameters, options.weight_decay),
            lr=options.learning_rate,
            betas=options.betas,
            eps=options.eps,
        )
        self.total = len(steps)
        self.schedule = make_schedule(self.optimizer, options, self.total)
        self.step = 0
        self.best_loss = math.inf
        self.kept_step = 0
        self.is_stopped = False
        self.failure: Exception | None = None
        self.done: list[StepFacts] = []
        self.evaluated: list[EvaluationFacts] = []

    def resume(self) -> None:
        """Go on from a checkpoint, where there is one to go on from. Collective: yes."""
        if isinstance(self.checkpoints, NoCheckpoints):
            return
        start = time.perf_counter()
        known = self.checkpoints.keeper.restore(self._state())
        if known is None:
            return
        self.step = self.kept_step = int(known["step"])
        self.best_loss = math.inf if known["best_loss"] is None else float(known["best_loss"])
        if len(self.steps) != self.total:  # the steps are of another size now, and so of another number
            self.total = len(self.steps)
            state = self.schedule.state_dict()
            self.schedule = make_schedule(self.optimizer, self.options, self.total)
            self.schedule.load_state_dict(state)
        self._tell(CheckpointFacts(self.step, time.perf_counter() - start, "restored"))

    def go(self) -> None:
        """All steps that are left, or those until somebody asks to stop. Collective: yes."""
        for batches in self.steps:
            facts, self.is_stopped = self._step(batches)
            self.done.append(facts)
            self._tell(facts)
            if self.is_stopped:
                break
            if self._is_due(self.evaluation):
                self._evaluate()
            if self._is_due(self.checkpoints):
                self._keep()
        self._raise_failure()
        if isinstance(self.checkpoints, Checkpoints):
            if self.step > self.kept_step and (self.is_stopped or self.checkpoints.every is not None):
                self._keep()
            self.checkpoints.keeper.wait()

    def _step(self, batches: Sequence[Batch]) -> tuple[StepFacts, bool]:
        """One step, and whether somebody has asked to stop after it. Collective: yes."""
        start = time.perf_counter()
        number = self.step + 1
        tokens, supervised_tokens = sum_over_ranks(
            self.world,
            self.device,
            sum(batch.tokens for batch in batches),
            sum(batch.supervised_tokens for batch in batches),
        )
        weight = self.world.size / max(supervised_tokens, 1)
        share = backward(self.world, self.model, batches, self.device, self.options, scale=weight)
        total, asked, failed = sum_over_ranks(
            self.world, self.device, share, self.stop.is_made, self.failure is not None
        )
        if failed:
            self._raise_failure()
        loss = total / max(supervised_tokens, 1)
        grad_norm = clip_gradients(self.parameters, self.options.max_grad_norm)
        try:
            require_finite(number, loss, grad_norm)
        except TrainingError as error:
            raise TrainingError(f"{error}. {self._suspects(batches, share)}") from error
        learning_rate = self.schedule.get_last_lr()[0]
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.step = number
        facts = StepFacts(
            step=number,
            loss=loss,
            learning_rate=float(learning_rate),
            grad_norm=grad_norm,
            tokens=int(tokens),
            supervised_tokens=int(supervised_tokens),
            seconds=time.perf_counter() - start,
            memory_bytes=peak_memory(self.device),
            epoch=self.steps.epochs_done,
        )
        return facts, asked > 0

    def _tell(self, facts: Facts) -> None:
        """Tell the listener. What it raises waits for the next sum over ranks: others may have nothing to raise."""
        try:
            self.on_facts(facts)
        except Exception as error:
            self.failure = self.failure or error

    def _raise_failure(self) -> None:
        """Raise on all ranks what a listener raised on any. Collective: yes."""

        def fail() -> None:
            if self.failure is not None:
                raise self.failure

        self.world.together(fail)

    def _suspects(self, batches: Sequence[Batch], share: float) -> str:
        """The rows of a step that is no number: of the ranks whose loss is none, else of all. Collective: yes."""
        lines = sorted(line for batch in batches for line in batch.lines)
        told = self.world.gather((math.isfinite(share), lines))
        guilty = [rank for rank, (is_finite, _) in enumerate(told) if not is_finite] or list(range(len(told)))
        named = [
            f"rank {rank}: {self.steps.name_rows(told[rank][1][:_SHOWN_ROWS])}"
            + (", ..." if len(told[rank][1]) > _SHOWN_ROWS else "")
            for rank in guilty
            if told[rank][1]
        ]
        return f"The step took these rows ({'; '.join(named)}); no checkpoint holds it"

    def _is_due(self, what: Evaluating | Checkpointing) -> bool:
        match what:
            case NoEvaluation() | NoCheckpoints():
                return False
            case Evaluation():
                is_last = self.step == self.total
                return is_last or (what.every is not None and self.step % what.every == 0)
            case Checkpoints():
                return what.every is not None and self.step % what.every == 0

    def _evaluate(self) -> None:
        assert isinstance(self.evaluation, Evaluation)
        start = time.perf_counter()
        loss, tokens = evaluate(self.model, self.evaluation.batches, self.device, self.options)
        is_best = loss < self.best_loss
        self.best_loss = min(loss, self.best_loss)
        facts = EvaluationFacts(self.step, loss, tokens, time.perf_counter() - start, is_best)
        self.evaluated.append(facts)
        self._tell(facts)
        if is_best:
            self.evaluation.on_best(facts)

    def _keep(self) -> None:
        assert isinstance(self.checkpoints, Checkpoints)
        start = time.perf_counter()
        self.checkpoints.keeper.save(self.step, self._state())
        self.kept_step = self.step
        self._tell(CheckpointFacts(self.step, time.perf_counter() - start, "saved"))

    def _state(self) -> TrainState:
        user = {"step": self.step, "best_loss": self.best_loss if self.best_loss < math.inf else None}
        return TrainState(self.model, self.optimizer, self.schedule, self.steps, user)


def make_schedule(
    optimizer: torch.optim.Optimizer, options: TrainOptions, total_steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """transformers' schedule of this name.

    Raises:
        ConfigError: it wants other options.
    """
    try:
        schedule: torch.optim.lr_scheduler.LRScheduler = get_scheduler(
            "constant_with_warmup" if options.schedule == "constant" else options.schedule,
            optimizer,
            num_warmup_steps=options.warmup_steps(total_steps),
            num_training_steps=total_steps,
            scheduler_specific_kwargs=dict(options.schedule_options),
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the schedule {options.schedule!r} cannot be made with the options "
            f"{dict(options.schedule_options)} ({error})"
        ) from error
    return schedule


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterable[Batch], device: torch.device, options: TrainOptions
) -> tuple[float, int]:
    """The mean loss of all supervised tokens of all ranks' batches, in nats, and how many these are.

    Collective: yes; every rank has as many batches.
    """
    world = World.current()
    mode = model.training
    model.eval()
    loss = torch.zeros((), dtype=torch.float64, device=device)
    tokens = 0
    for batch in batches:
        with computing_in(model, device, options):
            loss += summed_loss(model, batch.to(device))
        tokens += batch.supervised_tokens
    model.train(mode)
    total, count = sum_over_ranks(world, device, float(loss), tokens)
    return total / max(count, 1), int(count)


def peak_memory(device: torch.device) -> int:
    """Bytes: the most allocated on a CUDA device so far, else the most this process has had resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
