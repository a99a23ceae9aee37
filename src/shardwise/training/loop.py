"""The loop: the order of steps, its end, evaluations, checkpoints, and what is told about them."""

from __future__ import annotations

import contextlib
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Unpack

import torch
from torch import nn

from shardwise.checkpoints.state import TrainState
from shardwise.errors import RankLostError, ShardwiseError, TrainingError
from shardwise.execution.ranks.collectives import naming_the_lost
from shardwise.execution.ranks.world import World
from shardwise.models.torch_words import module_of
from shardwise.observing.phases import phase
from shardwise.training.checkpoints import (
    Checkpointing,
    Checkpoints,
    NoCheckpoints,
    SettingsAsked,
    TrainingProgress,
    changed,
    ended_early,
    keep_way_of_computing,
    overruled,
    settings_of,
    state_of,
    take_asked,
)
from shardwise.training.data.batches import Batch
from shardwise.training.evaluation_rows import (
    EndEarly,
    Evaluating,
    Evaluation,
    NoEvaluation,
    ToItsEnd,
    TrainingEnd,
    evaluate,
    rows_to_blame,
)
from shardwise.training.optimizing.gradients import GradientScaler, Unscaled
from shardwise.training.optimizing.optimizer_trial import require_synchronised
from shardwise.training.options import is_time
from shardwise.training.parts import Recipe, parts_of, trained_parameters
from shardwise.training.passes.forward import Forward, computing_in
from shardwise.training.passes.losses import prepare_loss
from shardwise.training.report import (
    CheckpointFacts,
    EvaluationFacts,
    Event,
    PartFacts,
    Remark,
    StepFacts,
    TrainReport,
)
from shardwise.training.settings import StepSource, TrainKeywords, TrainSettings
from shardwise.training.step import StepGradient, StepWork
from shardwise.training.stopping import StopRequest


def train(
    model: nn.Module,
    steps: StepSource,
    options: Recipe,
    on_facts: Callable[[Event], object] = lambda facts: None,
    **keywords: Unpack[TrainKeywords],
) -> TrainReport:
    """Train all parameters that require a gradient: by AdamW, or by optimizers of one's own.

    The loss of a step is the cross entropy of its supervised tokens divided by their number on all ranks and in all
    micro-batches, so that the numbers of ranks and of micro-batches do not change the result. A router's loss that
    the config asks for is added to it ([Note: Router losses] in ``training/passes/router_loss.py``).

    Collective: yes, over the default process group, which must be the ranks of the model's mesh.
    Memory: gradients and two moments for each trained parameter, sharded as it is; between micro-batches what
    ``accumulation`` says.

    Args:
        model: a causal language model, sharded or not; returned to the mode (train, eval) it came in.
        steps: as of :func:`~shardwise.training.data.loader.step_loader`; as many on every rank.
        options: of AdamW, of its schedule, and what is computed in; or :class:`OwnParts`. What options say about
            data is of no concern here.
        on_facts: told about each step, evaluation and checkpoint, on every rank, after it.
        keywords: see :class:`TrainKeywords`.

    Raises:
        TrainingError: the loss or the gradient is not finite; the parameters are those before that step, and no
            checkpoint was taken since. Or the loss of an evaluation is not. Or no parameter of a part gets a
            gradient.
        ConfigError: nothing requires a gradient, or what does is neither sharded nor averaged, or is not in one
            part; or the schedule cannot be made; or the config asks for a router's loss that cannot be counted.
        DisagreementError: ranks have different parts.
        RankLostError: a rank is lost, or has run out of memory; the same on every rank that is left.
    """
    settings = TrainSettings(**keywords)
    run = _Training(World.current(call="the training's steps"), model, steps, options, on_facts, settings)
    mode = model.training
    model.train()
    with run.ending_in_order():
        run.resume()
        run.prepare()
        run.go()
    model.train(mode)
    return run.report()


class _Training:
    """One training on its way."""

    work: StepWork

    def __init__(
        self,
        world: World,
        model: nn.Module,
        steps: StepSource,
        recipe: Recipe,
        on_facts: Callable[[Event], object],
        settings: TrainSettings,
    ) -> None:
        self.world = world
        self.model = model
        self.steps = steps
        self.on_facts = on_facts
        self.settings = settings
        self.dtype = recipe.dtype
        self.stop = settings.stop or StopRequest()
        self.total = len(steps)
        self.parts = world.together(lambda: parts_of(recipe, model, self.total))
        described = [part.description(model) for part in self.parts]
        world.require_equal(described, "the list of parts (optimizers, clips, parameters)")
        self.scaler = GradientScaler() if self.dtype == "float16" else None
        self.progress = TrainingProgress()
        self.kept_step = 0
        self.is_stopped = False
        self.failure: Exception | None = None
        self.done: list[StepFacts] = []
        self.evaluated: list[EvaluationFacts] = []
        self.remarks: list[str] = []

    @property
    def step(self) -> int:
        """The last that was done."""
        return self.progress.step

    def resume(self) -> None:
        """Go on from a checkpoint, where there is one to go on from. Collective: yes.

        A model on meta gets its weights here, so that nothing before may have kept its parameters.
        """
        checkpoints = self.settings.checkpoints
        if isinstance(checkpoints, NoCheckpoints):
            return
        start = time.perf_counter()
        asked = settings_of(self.parts)
        with phase("resume"):
            restored = checkpoints.keeper.restore(self._state())
        if restored is None:
            return
        self.progress = TrainingProgress.from_dict(restored.user)
        self.kept_step = self.step
        keep_way_of_computing(self.parts, asked)
        kept = settings_of(self.parts)
        if isinstance(checkpoints.settings, SettingsAsked):
            for part in self.parts:
                take_asked(part, asked)
        self.total = len(self.steps)  # another number where steps are of another size now, or epochs are more
        self.parts = tuple(part.of_length(self.total) for part in self.parts)
        self._tell(CheckpointFacts(self.step, time.perf_counter() - start, "restored", restored.told))
        for part in self.parts:
            self._remark(overruled(part, asked) or changed(part, kept))

    def prepare(self) -> None:
        """Find out how the loss of this model is taken, and begin. Collective: yes."""
        self.world.together(lambda: require_synchronised(self.model, self.world))
        device = Forward(self.model).device
        loss = prepare_loss(
            self.world, self.model, self.settings.loss, lambda: computing_in(self.model, device, self.dtype)
        )
        self.settings.when_ready()
        for text in (*self.settings.remarks, loss.note):
            self._remark(text)
        self.work = StepWork(
            world=self.world,
            forward=Forward(self.model, loss.loss, self.dtype),
            parts=self.parts,
            accumulation=self.settings.accumulation,
            scaling=self.scaler or Unscaled(),
        )

    def go(self) -> None:
        """All steps that are left, or those until somebody asks to stop. Collective: yes."""
        checkpoints, evaluation = self.settings.checkpoints, self.settings.evaluation
        if self._is_over(evaluation):
            self._remark(ended_early(self.progress, self.total))
        if (
            self._is_due(evaluation) and self.progress.evaluated_step < self.step
        ):  # it was stopped before it was done
            self._evaluate()
        start = time.perf_counter()
        for batches in () if self._is_over(evaluation) else self.steps:
            with phase("step"):
                facts, is_asked = self._step(batches, start)
            self.is_stopped = is_asked and self.step < self.total
            self.done.append(facts)
            self._tell(facts)
            if self.is_stopped:
                break
            if self._is_due(evaluation):
                self._evaluate()
            if self._is_over(evaluation):
                break
            if self._is_due(checkpoints):
                self._keep()
            start = time.perf_counter()
        self._raise_failure()
        if isinstance(checkpoints, Checkpoints):
            if self.step > self.kept_step and (self.is_stopped or checkpoints.every is not None):
                self._keep()
            checkpoints.keeper.wait()

    def report(self) -> TrainReport:
        """What it did, as seen by this rank."""
        return TrainReport(
            rank=self.world.rank,
            world_size=self.world.size,
            trained_parameters=sum(parameter.numel() for parameter in trained_parameters(self.model)),
            steps=tuple(self.done),
            evaluations=tuple(self.evaluated),
            remarks=tuple(self.remarks),
            is_stopped=self.is_stopped,
            last_step=self.step,
            precision=self.dtype,
        )

    @contextlib.contextmanager
    def ending_in_order(self) -> Iterator[None]:
        """Whatever ends it, a checkpoint that is on its way comes to its end, whatever that is, and is told of.

        Ranks that are lost meanwhile are named.
        """
        when_stuck = self.settings.when_stuck
        try:
            with naming_the_lost(
                self.world, self._where, lambda lost: when_stuck(self._with_newest(lost)), self.stop.has_come
            ):
                yield
        except ShardwiseError as error:
            checkpoints = self.settings.checkpoints
            if not isinstance(checkpoints, Checkpoints):
                raise
            with contextlib.suppress(ShardwiseError):
                checkpoints.keeper.wait()
            if not isinstance(error, RankLostError):
                raise
            raise self._with_newest(error) from error

    def _where(self) -> str:
        """How far this training is."""
        return f"in step {self.step + 1}" if self.step < self.total else f"after step {self.step}, the last"

    def _with_newest(self, lost: RankLostError) -> RankLostError:
        """The error, and what can be gone on from."""
        checkpoints = self.settings.checkpoints
        if not isinstance(checkpoints, Checkpoints):
            return lost
        newest = checkpoints.keeper.newest()
        if newest is None:
            return RankLostError(f"{lost}. No checkpoint was kept; the same command begins where this one did")
        return RankLostError(
            f"{lost}. The newest checkpoint is of step {newest}; the same command goes on from there"
        )

    def _step(self, batches: Sequence[Batch], start: float) -> tuple[StepFacts, bool]:
        """One step, and whether somebody has asked to stop after it. Collective: yes."""
        number = self.step + 1
        device = self.work.forward.device
        gradient = self.work.gradient(
            batches, lambda: (self.stop.is_made, self.failure is not None), peak_memory(device)
        )
        is_asked, is_failed = gradient.is_heard
        if is_failed:
            self._raise_failure()
        self._require_finite(number, gradient, batches)
        self.work.require_reached(gradient)
        rates = [part.learning_rate for part in self.parts]
        self.work.take(gradient)
        self.progress = replace(self.progress, step=number)
        several = self.parts if len(self.parts) > 1 else ()
        facts = StepFacts(
            step=number,
            loss=gradient.loss,
            learning_rate=rates[0],
            grad_norm=gradient.grad_norm,
            tokens=gradient.tokens,
            supervised_tokens=gradient.supervised_tokens,
            seconds=time.perf_counter() - start,
            memory_bytes=peak_memory(device),
            fullest_bytes=gradient.most,
            epoch=self.steps.epochs_done,
            parts={
                part.name: PartFacts(rate, norm)
                for part, rate, norm in zip(several, rates, gradient.norms, strict=False)
            },
        )
        return facts, is_asked

    def _require_finite(self, number: int, gradient: StepGradient, batches: Sequence[Batch]) -> None:
        """Stop at a step that is no number, and name its rows."""
        try:
            self.work.require_finite(number, gradient)
        except TrainingError as error:
            rows = rows_to_blame(self.world, self.work.forward, batches, self.steps.name_rows)
            raise TrainingError(f"{error}. {rows}; no checkpoint holds it") from error

    def _tell(self, facts: Event) -> None:
        """Tell the listener. What it raises waits for the next sum over ranks: others may have nothing to raise."""
        try:
            self.on_facts(facts)
        except Exception as error:
            self.failure = self.failure or error

    def _remark(self, text: str) -> None:
        """Tell what is worth knowing; nothing where it is nothing."""
        if text:
            self.remarks.append(text)
            self._tell(Remark(self.step, text))

    def _raise_failure(self) -> None:
        """Raise on all ranks what a listener raised on any. Collective: yes."""

        def fail() -> None:
            if self.failure is not None:
                raise self.failure

        self.world.together(fail)

    def _is_due(self, what: Evaluating | Checkpointing) -> bool:
        match what:
            case NoEvaluation() | NoCheckpoints():
                return False
            case Evaluation():
                return self.step == self.total or is_time(what.every, self.step, self.steps.epochs_done)
            case Checkpoints():
                return is_time(what.every, self.step, self.steps.epochs_done)

    @staticmethod
    def _ending(what: Evaluating) -> TrainingEnd:
        return what.ending if isinstance(what, Evaluation) else ToItsEnd()

    def _is_over(self, what: Evaluating) -> bool:
        """Whether evaluations have ended the training before its last step."""
        ending = self._ending(what)
        return isinstance(ending, EndEarly) and self.progress.waited >= ending.patience

    def _evaluate(self) -> None:
        assert isinstance(self.settings.evaluation, Evaluation)
        start = time.perf_counter()
        with phase("evaluate"):
            loss, tokens = evaluate(self.world, self.work.forward, self.settings.evaluation.batches)
        if not math.isfinite(loss):
            raise TrainingError(
                f"the evaluation after step {self.step}: the loss is {loss}; neither a checkpoint nor a model was "
                "saved of it. Lower the learning rate, or look for rows unlike the others"
            )
        is_best = loss < self.progress.best_loss
        ending = self._ending(self.settings.evaluation)
        self.progress = self.progress.evaluated(loss, ending.min_delta if isinstance(ending, EndEarly) else 0.0)
        facts = EvaluationFacts(self.step, loss, tokens, time.perf_counter() - start, is_best)
        self.evaluated.append(facts)
        self._tell(facts)
        if is_best:
            self.settings.evaluation.on_best(facts)
        if self._is_over(self.settings.evaluation):
            self._remark(ended_early(self.progress, self.total))

    def _keep(self) -> None:
        assert isinstance(self.settings.checkpoints, Checkpoints)
        start = time.perf_counter()
        with phase("checkpoint"):
            self.settings.checkpoints.keeper.save(self.step, self._state())
        self.kept_step = self.step
        self._tell(CheckpointFacts(self.step, time.perf_counter() - start, "saved"))

    def _state(self) -> TrainState:
        return state_of(self.model, self.parts, self.steps, self.scaler, self.progress)


def peak_memory(device: torch.device) -> int:
    """Bytes: the most allocated on an accelerator so far, else the most this process has had resident."""
    if device.type != "cpu":
        return int(module_of(device).max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
