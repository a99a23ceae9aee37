"""The loop: steps, a schedule, evaluation, checkpoints, and what is told about them."""

from __future__ import annotations

import contextlib
import math
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from shardwise.checkpoints.state import TrainState
from shardwise.errors import ConfigError, RankLostError, ShardwiseError, TrainingError
from shardwise.execution.ranks.lost_ranks import naming_the_lost
from shardwise.execution.ranks.world import World
from shardwise.models.accelerators import module_of
from shardwise.models.standing import computing_device
from shardwise.training.accumulation import Accumulation, WholeGradients
from shardwise.training.checkpoints import Checkpointing, Checkpoints, NoCheckpoints, TrainingProgress
from shardwise.training.clipping import reduced
from shardwise.training.data import Batch
from shardwise.training.evaluation import evaluating
from shardwise.training.losses import ChunkedLogits, WholeLogits, prepare_loss
from shardwise.training.options import TrainOptions
from shardwise.training.report import CheckpointFacts, EvaluationFacts, Event, Remark, StepFacts, TrainReport
from shardwise.training.scaling import GradientScaler, Unscaled
from shardwise.training.step import (
    StepGradient,
    StepWork,
    computing_in,
    make_optimizer,
    require_finite,
    require_reached,
)
from shardwise.training.stopping import StopRequest
from shardwise.training.synchronised import require_synchronised

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
_WHOLE_LOGITS, _WHOLE_GRADIENTS = WholeLogits(), WholeGradients()


def train(
    model: nn.Module,
    steps: StepSource,
    options: TrainOptions,
    on_facts: Callable[[Event], object] = lambda facts: None,
    *,
    loss: WholeLogits | ChunkedLogits = _WHOLE_LOGITS,
    accumulation: Accumulation = _WHOLE_GRADIENTS,
    when_ready: Callable[[], object] = lambda: None,
    evaluation: Evaluating = _NOT_EVALUATED,
    checkpoints: Checkpointing = _NOT_KEPT,
    stop: StopRequest | None = None,
    when_stuck: Callable[[RankLostError], object] = lambda error: None,
) -> TrainReport:
    """Train all parameters that require a gradient, by AdamW.

    The loss of a step is the cross entropy of its supervised tokens divided by their number on all ranks and in all
    micro-batches, so that the numbers of ranks and of micro-batches do not change the result. A router's loss that
    the config asks for is added to it ([Note: Router losses] in ``training/router_loss.py``).

    Collective: yes, over the default process group, which must be the ranks of the model's mesh.
    Memory: gradients and two moments for each trained parameter, sharded as it is; between micro-batches what
    ``accumulation`` says.

    Args:
        model: a causal language model, sharded or not; returned to the mode (train, eval) it came in.
        steps: as of :func:`~shardwise.training.data.step_loader`; as many on every rank.
        options: what they say about data is of no concern here.
        on_facts: told about each step, evaluation and checkpoint, on every rank, after it.
        loss: how it is taken; see :func:`~shardwise.training.losses.prepare_loss`.
        accumulation: what is kept of gradients between micro-batches.
        when_ready: called on every rank once the model has its weights, after what may be refused here has been
            looked at, and before the first step.
        evaluation: what else is looked at, and when.
        checkpoints: what is kept, and gone on from.
        stop: asked on any rank, it lets all ranks finish the same step, keep it, and return.
        when_stuck: called on another thread where a rank was lost and this one waits for it in a collective, which
            nothing can call back: there is no more to do than to say so and to end the process.

    Raises:
        TrainingError: the loss or the gradient is not finite; the parameters are those before that step, and no
            checkpoint was taken since. Or the loss of an evaluation is not. Or no parameter gets a gradient.
        ConfigError: nothing requires a gradient, or what does is neither sharded nor averaged; or the schedule
            cannot be made; or the config asks for a router's loss that cannot be counted.
        RankLostError: a rank is lost, or has run out of memory; the same on every rank that is left.
    """
    world = World.current(call="the training's steps")
    world.together(lambda: require_trained(model))
    run = _Training(world, model, steps, options, on_facts, evaluation, checkpoints, stop or StopRequest())
    mode = model.training
    model.train()
    with (
        run.ending_in_order(),
        naming_the_lost(world, run.where, lambda lost: when_stuck(run.with_newest(lost))),
    ):
        run.resume()
        world.together(lambda: require_synchronised(model, world))
        run.prepare(loss, accumulation, when_ready)
        run.go()
    model.train(mode)
    return TrainReport(
        rank=world.rank,
        world_size=world.size,
        trained_parameters=sum(parameter.numel() for parameter in trained_parameters(model)),
        steps=tuple(run.done),
        evaluations=tuple(run.evaluated),
        remarks=tuple(run.remarks),
        is_stopped=run.is_stopped,
        last_step=run.step,
    )


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Those that require a gradient."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def require_trained(model: nn.Module) -> None:
    """Refuse a model of which nothing would be trained.

    Raises:
        ConfigError: nothing requires a gradient.
    """
    if not trained_parameters(model):
        raise ConfigError(f"no parameter of {type(model).__name__} requires a gradient, so none can be trained")


class _Training:
    """One training on its way."""

    work: StepWork

    def __init__(
        self,
        world: World,
        model: nn.Module,
        steps: StepSource,
        options: TrainOptions,
        on_facts: Callable[[Event], object],
        evaluation: Evaluating,
        checkpoints: Checkpointing,
        stop: StopRequest,
    ) -> None:
        self.world = world
        self.model = model
        self.steps = steps
        self.options = options
        self.on_facts = on_facts
        self.evaluation = evaluation
        self.checkpoints = checkpoints
        self.stop = stop
        self.optimizer = make_optimizer(trained_parameters(model), options)
        self.total = len(steps)
        self.schedule = make_schedule(self.optimizer, options, self.total)
        self.scaler = GradientScaler() if options.dtype == "float16" else None
        self.step = 0
        self.best_loss = math.inf
        self.kept_step = 0
        self.evaluated_step = 0
        self.is_stopped = False
        self.failure: Exception | None = None
        self.done: list[StepFacts] = []
        self.evaluated: list[EvaluationFacts] = []
        self.remarks: list[str] = []

    def resume(self) -> None:
        """Go on from a checkpoint, where there is one to go on from. Collective: yes.

        A model on meta gets its weights here, so that nothing before may have kept its parameters.
        """
        if isinstance(self.checkpoints, NoCheckpoints):
            return
        start = time.perf_counter()
        asked = [dict(group) for group in self.optimizer.param_groups]
        restored = self.checkpoints.keeper.restore(self._state())
        if restored is None:
            return
        standing = TrainingProgress.from_dict(restored.user)
        self.step = self.kept_step = standing.step
        self.evaluated_step = standing.evaluated_step
        self.best_loss = standing.best_loss
        for group in self.optimizer.param_groups:  # how it computes depends on these ranks, not on those that saved
            group["foreach"] = self.optimizer.defaults["foreach"]
        self.total = len(self.steps)  # another number where steps are of another size now, or epochs are more
        self.schedule = schedule_from(self.schedule, self.optimizer, self.options, self.total)
        self._tell(CheckpointFacts(self.step, time.perf_counter() - start, "restored", restored.told))
        if note := overruled(asked, self.optimizer.param_groups):
            self.remarks.append(note)
            self._tell(Remark(self.step, note))

    def prepare(
        self, loss: WholeLogits | ChunkedLogits, accumulation: Accumulation, when_ready: Callable[[], object]
    ) -> None:
        """Find out how the loss of this model is taken, and begin. Collective: yes."""
        parameters = trained_parameters(self.model)
        self.device = computing_device(parameters[0])
        prepared = prepare_loss(
            self.world, self.model, loss, lambda: computing_in(self.model, self.device, self.options)
        )
        when_ready()
        if prepared.note:
            self.remarks.append(prepared.note)
            self._tell(Remark(self.step, prepared.note))
        self.work = StepWork(
            world=self.world,
            model=self.model,
            parameters=parameters,
            options=self.options,
            loss=prepared.loss,
            accumulation=accumulation,
            scaling=self.scaler or Unscaled(),
        )

    def go(self) -> None:
        """All steps that are left, or those until somebody asks to stop. Collective: yes."""
        if self._is_due(self.evaluation) and self.evaluated_step < self.step:  # it was stopped before it was done
            self._evaluate()
        start = time.perf_counter()
        for batches in self.steps:
            facts, is_asked = self._step(batches, start)
            self.is_stopped = is_asked and self.step < self.total
            self.done.append(facts)
            self._tell(facts)
            if self.is_stopped:
                break
            if self._is_due(self.evaluation):
                self._evaluate()
            if self._is_due(self.checkpoints):
                self._keep()
            start = time.perf_counter()
        self._raise_failure()
        if isinstance(self.checkpoints, Checkpoints):
            if self.step > self.kept_step and (self.is_stopped or self.checkpoints.every is not None):
                self._keep()
            self.checkpoints.keeper.wait()

    def where(self) -> str:
        """How far this training is."""
        return f"in step {self.step + 1}" if self.step < self.total else f"after step {self.step}, the last"

    @contextlib.contextmanager
    def ending_in_order(self) -> Iterator[None]:
        """Whatever ends it, a checkpoint that is on its way comes to its end, whatever that is, and is told of."""
        try:
            yield
        except ShardwiseError as error:
            if not isinstance(self.checkpoints, Checkpoints):
                raise
            with contextlib.suppress(ShardwiseError):
                self.checkpoints.keeper.wait()
            if not isinstance(error, RankLostError):
                raise
            raise self.with_newest(error) from error

    def with_newest(self, lost: RankLostError) -> RankLostError:
        """The error, and what can be gone on from."""
        if not isinstance(self.checkpoints, Checkpoints):
            return lost
        newest = self.checkpoints.keeper.newest()
        if newest is None:
            return RankLostError(f"{lost}. No checkpoint was kept; the same command begins where this one did")
        return RankLostError(
            f"{lost}. The newest checkpoint is of step {newest}; the same command goes on from there"
        )

    def _step(self, batches: Sequence[Batch], start: float) -> tuple[StepFacts, bool]:
        """One step, and whether somebody has asked to stop after it. Collective: yes."""
        number = self.step + 1
        gradient = self.work.gradient(batches, lambda: (self.stop.is_made, self.failure is not None))
        is_asked, is_failed = gradient.is_heard
        if is_failed:
            self._raise_failure()
        self._require_finite(number, gradient, batches)
        if gradient.grad_norm == 0 and gradient.supervised_tokens:
            self.world.together(lambda: require_reached(self.model, self.work.parameters))
        learning_rate = self.schedule.get_last_lr()[0]
        if self.work.scaling.judge(gradient.grad_norm):
            self.optimizer.step()
            self.schedule.step()
        self.optimizer.zero_grad()
        self.step = number
        facts = StepFacts(
            step=number,
            loss=gradient.loss,
            learning_rate=float(learning_rate),
            grad_norm=gradient.grad_norm,
            tokens=gradient.tokens,
            supervised_tokens=gradient.supervised_tokens,
            seconds=time.perf_counter() - start,
            memory_bytes=peak_memory(self.device),
            epoch=self.steps.epochs_done,
        )
        return facts, is_asked

    def _require_finite(self, number: int, gradient: StepGradient, batches: Sequence[Batch]) -> None:
        """Stop at a step that is no number, and name its rows. A norm that overflowed is a scaler's affair."""
        norm = gradient.grad_norm if isinstance(self.work.scaling, Unscaled) else 0.0
        try:
            require_finite(number, gradient.loss, norm)
        except TrainingError as error:
            raise TrainingError(f"{error}. {self._suspects(batches)}") from error

    def _tell(self, facts: Event) -> None:
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

    def _suspects(self, batches: Sequence[Batch]) -> str:
        """The rows of the micro-batches whose loss is no number, looked at once more; else all of the step.

        Collective: yes; every rank has as many micro-batches.
        """
        with evaluating(self.model), computing_in(self.model, self.device, self.options):
            losses = [float(self.work.loss.summed(self.model, batch.to(self.device))) for batch in batches]
        found = [batch.lines for batch, loss in zip(batches, losses, strict=True) if not math.isfinite(loss)]
        everywhere = self.world.gather((found, [batch.lines for batch in batches]))
        is_found = any(guilty for guilty, _ in everywhere)
        named = []
        for rank, (guilty, every) in enumerate(everywhere):
            lines = sorted(chain.from_iterable(guilty if is_found else every))
            if lines:
                more = ", ..." if len(lines) > _SHOWN_ROWS else ""
                named.append(f"rank {rank}: {self.steps.name_rows(lines[:_SHOWN_ROWS])}{more}")
        what = "The rows where it is" if is_found else "The rows of the step"
        return f"{what} ({'; '.join(named)}); no checkpoint holds it"

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
        loss, tokens = evaluate(self.work, self.evaluation.batches)
        if not math.isfinite(loss):
            raise TrainingError(
                f"the evaluation after step {self.step}: the loss is {loss}; neither a checkpoint nor a model was "
                "saved of it. Lower the learning rate, or look for rows unlike the others"
            )
        self.evaluated_step = self.step
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
        standing = TrainingProgress(self.step, self.evaluated_step, self.best_loss)
        return TrainState(self.model, self.optimizer, self.schedule, self.steps, self.scaler, standing.to_dict())


def make_schedule(optimizer: torch.optim.Optimizer, options: TrainOptions, total_steps: int) -> LambdaLR:
    """transformers' schedule of this name.

    Raises:
        ConfigError: it wants other options.
    """
    try:
        schedule: LambdaLR = get_scheduler(
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


_SETTINGS = {"initial_lr": "learning_rate", "betas": "betas", "eps": "eps", "weight_decay": "weight_decay"}
"""Of an optimizer's groups, what is asked for by these names."""


def overruled(asked: Sequence[Mapping[str, Any]], restored: Sequence[Mapping[str, Any]]) -> str:
    """What a checkpoint's optimizer goes on with although something else is asked for now; "" for nothing."""
    differing = {
        f"{name} {_shown(after[key])} (asked for now: {_shown(before[key])})": None
        for before, after in zip(asked, restored, strict=True)
        for key, name in _SETTINGS.items()
        if key in before and key in after and _shown(before[key]) != _shown(after[key])
    }
    if not differing:
        return ""
    return f"the optimizer goes on with the checkpoint's {', '.join(differing)}; a new run begins with new settings"


def _shown(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_shown, value))})"
    return f"{value:g}" if isinstance(value, float) else str(value)


def schedule_from(
    before: LambdaLR, optimizer: torch.optim.Optimizer, options: TrainOptions, total_steps: int
) -> LambdaLR:
    """A schedule of so many steps at the place of the one before; the optimizer has its learning rate.

    What a checkpoint brings along is the rate of a schedule of as many steps as there were to be then.
    """
    schedule = make_schedule(optimizer, options, total_steps)
    place, base_rates = before.last_epoch, before.base_lrs
    rates = [base * share(place) for base, share in zip(base_rates, schedule.lr_lambdas, strict=True)]
    schedule.load_state_dict({**before.state_dict(), "_last_lr": rates})
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    return schedule


def evaluate(work: StepWork, batches: Iterable[Batch]) -> tuple[float, int]:
    """The mean loss of all supervised tokens of all ranks' batches, in nats, and how many these are.

    Collective: yes; every rank has as many batches.
    """
    device = work.device
    loss = torch.zeros((), dtype=torch.float64, device=device)
    tokens = 0
    with evaluating(work.model), computing_in(work.model, device, work.options):
        for batch in batches:
            loss += work.loss.summed(work.model, batch.to(device))
            tokens += batch.supervised_tokens
    own = torch.stack([loss, torch.tensor(tokens, dtype=torch.float64, device=device)])
    total, count = reduced(own, 2.0, work.world.group).tolist()
    return total / max(count, 1), int(count)


def peak_memory(device: torch.device) -> int:
    """Bytes: the most allocated on an accelerator so far, else the most this process has had resident."""
    if device.type != "cpu":
        return int(module_of(device).max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
