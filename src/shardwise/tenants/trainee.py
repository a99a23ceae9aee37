"""One tenant on its way: its rows, its optimizer, how far it has come, what it keeps and tells."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from shardwise.bank.adapter_bank import AdapterBank, TenantKeywords
from shardwise.bank.optimizers import Moments
from shardwise.bank.results import TenantLoss
from shardwise.bank.rows import RowTensors
from shardwise.engines.save_options import CompareWithMemory, MatricesOnly, SaveOptions
from shardwise.errors import TrainingError
from shardwise.execution.ranks.world import World
from shardwise.report.save_report import SaveReport
from shardwise.tenants.keeping import KeptProgress, TenantKeeper
from shardwise.tenants.recipe import OwnOptimizer
from shardwise.tenants.report import Ended, TenantReport
from shardwise.tenants.turns import (
    OwnSteps,
    PassBudget,
    Portion,
    Waiting,
    evaluation_portions,
    learned_in,
    tensors_of,
)
from shardwise.training.checkpoints import TrainingProgress, changed, ended_early, overruled, settings_of
from shardwise.training.configuration.config_sections import TrainConfig
from shardwise.training.configuration.config_values import every_of, on_other_base_of, tuning_of
from shardwise.training.data.read_once import TrainData
from shardwise.training.loop import peak_memory
from shardwise.training.optimizing.gradients import reduced
from shardwise.training.options import is_time
from shardwise.training.report import (
    CheckpointFacts,
    EvaluationFacts,
    Event,
    Remark,
    StepFacts,
    TrainReport,
)
from shardwise.tuning.modes import ExistingLora, Lora

_SHOWN_ROWS = 20


class TenantListener(Protocol):
    """Who is told of a tenant; of :class:`~shardwise.training.metrics.MetricsFile`, and of the console."""

    def tell(self, facts: Event) -> object: ...

    def close(self) -> object: ...


@dataclass(frozen=True, slots=True)
class CommonGround:
    """What all tenants of a bank are trained on.

    Attributes:
        world: the ranks.
        device: of the base.
        budget: of a pass.
        moments: on which ranks is what optimizers keep.
        tokenizer: saved with each.
    """

    world: World
    device: torch.device
    budget: PassBudget
    moments: Moments
    tokenizer: Any


class Trainee:
    """A tenant of a bank that is trained as its configuration says.

    Whatever concerns it is counted by its own steps. Methods raise the same on every rank.

    Raises:
        ConfigError: its rows do not fit into a pass.
    """

    def __init__(
        self,
        name: str,
        config: TrainConfig,
        data: TrainData,
        held_out: TrainData | None,
        keeper: TenantKeeper,
        ground: CommonGround,
    ) -> None:
        self.name = name
        self.config = config
        self.options = config.options()
        self.data = data
        self.held_out = held_out
        self.keeper = keeper
        self.world = ground.world
        self.ground = ground
        ranks, budget = self.world.size, ground.budget
        self.steps = OwnSteps(data, self.options, ranks=ranks, budget=budget)
        size = config.evaluation.batch_size or config.training.batch_size
        self._looked_at = (
            [] if held_out is None else evaluation_portions(held_out, size, ranks=ranks, budget=budget)
        )
        self.progress = TrainingProgress()
        self.kept_step = 0
        self.total = 0
        self.trained_count = 0
        self._position = self.steps.state_dict()
        self._next_step = iter(self.steps)
        self._left: deque[Portion] = deque()
        self._window: list[tuple[Portion, TenantLoss]] = []
        self._done: list[StepFacts] = []
        self._evaluated: list[EvaluationFacts] = []
        self._remarks: list[str] = []
        self._began = 0.0
        self._listeners: tuple[TenantListener, ...] = ()
        self._early: list[Event] = []
        """Before anybody listened."""
        self.failure: Exception | None = None
        """What a listener has raised on this rank."""

    @property
    def step(self) -> int:
        """The last that was done."""
        return self.progress.step

    @property
    def is_done(self) -> bool:
        return self.step >= self.total or self._is_over

    @property
    def _is_over(self) -> bool:
        """Whether its evaluations have ended it before its last step."""
        patience = self.config.evaluation.patience
        return patience is not None and self.progress.waited >= patience

    @property
    def is_in_window(self) -> bool:
        """Whether it is in the middle of a step."""
        return bool(self._window)

    @property
    def _tuning(self) -> dict[str, Any]:
        return self.config.tuning.model_dump(mode="json", exclude={"placement"})

    @property
    def output(self) -> Path:
        return Path(self.config.output.directory)

    # ── its beginning ─────────────────────────────────────────────────────────────────────────────

    def join(self, bank: AdapterBank, source: Path | None) -> None:
        """Become a tenant, and go on from a checkpoint where there is one. Collective: yes.

        Raises:
            ShardwiseError: it cannot be as configured, or the checkpoint is another's; then there is none.
        """
        start = time.perf_counter()
        kept = None if source is None else self.keeper.read(self.world, source)
        if kept is not None:
            kept.require_tuning(self.name, self._tuning)
            self.world.together(lambda: self.steps.load_state_dict(kept.position))
            self.progress, self._position = kept.progress, self.steps.state_dict()
        self.kept_step, self.total = self.step, len(self.steps)
        self._next_step = iter(self.steps)
        own = OwnOptimizer(self.name, self.options, self.total)
        base = ""
        if source is None:
            self._begin(bank, own)
        else:
            permission = on_other_base_of(self.config.checkpoints)
            base = self.keeper.restore(bank, self.name, source, self._keywords(own), permission)
        self.trained_count = bank.trained_counts()[self.name]
        self._began = time.perf_counter()
        if source is not None:
            self._tell(
                CheckpointFacts(self.step, self._began - start, "restored", f"restored {source}; base: {base}")
            )
            before = settings_of([own.part])
            if self.config.checkpoints.optimizer_settings == "config":
                own.take_asked()
            self._remark(overruled(own.part, own.asked) or changed(own.part, before))

    def _begin(self, bank: AdapterBank, own: OwnOptimizer) -> None:
        """Become a tenant with a new LoRA, or one that is there. Collective: yes."""
        tuning = self.world.together(lambda: tuning_of(self.config.tuning))
        if isinstance(tuning, ExistingLora):
            bank.load(self.name, tuning.directory, state=MatricesOnly(), **self._keywords(own))
        else:
            assert isinstance(tuning, Lora)
            bank.create(self.name, tuning.config, **self._keywords(own))

    def _keywords(self, own: OwnOptimizer) -> TenantKeywords:
        return {
            "optimizer": own.optimizer_of,
            "schedule": own.schedule_of,
            "max_grad_norm": self.options.max_grad_norm,
            "accumulation": self.steps.portions_per_step,
            "seed": self.options.seed,
            "optimizer_state": self.ground.moments,
        }

    # ── its steps ─────────────────────────────────────────────────────────────────────────────────

    def waiting(self) -> Waiting:
        """What it would take through the base next."""
        if not self._left:
            self._left.extend(next(self._next_step))
        return Waiting(self.name, self._left[0].most_rows, self._left[0].tokens)

    def rows(self) -> RowTensors:
        """This rank's rows of its next portion."""
        return tensors_of(self.data, self._left[0].rows[self.world.rank])

    def note(self, loss: TenantLoss) -> None:
        """Its portion has been through the base."""
        self._window.append((self._left.popleft(), loss))

    @property
    def is_due(self) -> bool:
        """Whether its window is full."""
        return len(self._window) == self.steps.portions_per_step

    def take_step(self, bank: AdapterBank) -> None:
        """Step, and do what is due after it. Collective: yes.

        Raises:
            TrainingError: its loss or gradient is not finite; or the loss of its evaluation is not.
            StorageError: what is due cannot be written.
        """
        window, number = self._window, self.step + 1
        learned = sum(loss.learned_tokens for _, loss in window)
        loss = sum(loss.loss * loss.learned_tokens for _, loss in window) / max(learned, 1)
        taken = bank.optim_step(self.name)
        if not taken.is_taken or not math.isfinite(loss):
            numbers = [row for portion, _ in window for own in portion.rows for row in own]
            more = ", ..." if len(numbers) > _SHOWN_ROWS else ""
            raise TrainingError(
                f"step {number}: the loss is {loss:.4g}, and the norm of the gradient {taken.grad_norm:.4g}; lower "
                "optimizer.learning_rate, or look for rows unlike the others. The rows of the step: "
                f"{self.steps.name_rows(numbers[:_SHOWN_ROWS])}{more}; no checkpoint holds it"
            )
        self._window = []
        self._position = self.steps.state_dict()
        self.progress = replace(self.progress, step=number)
        now = time.perf_counter()
        facts = StepFacts(
            step=number,
            loss=loss,
            learning_rate=taken.learning_rate,
            grad_norm=taken.grad_norm,
            tokens=sum(portion.own_tokens for portion, _ in window),
            supervised_tokens=learned,
            seconds=now - self._began,
            memory_bytes=peak_memory(self.ground.device),
            epoch=self.steps.epochs_done,
        )
        self._began = now
        self._done.append(facts)
        self._tell(facts)
        self.catch_up(bank)
        is_due = is_time(every_of(self.config.checkpoints.every), number, self.steps.epochs_done)
        if self.is_done or is_due:
            self.keep(bank)

    def catch_up(self, bank: AdapterBank) -> None:
        """The evaluation that is due, if one is: after this step, or of a training that was stopped before it.

        Collective: yes.

        Raises:
            TrainingError: its loss is not finite.
        """
        every = every_of(self.config.evaluation.every)
        is_due = self.is_done or is_time(every, self.step, self.steps.epochs_done)
        if not self._looked_at or not is_due or self.progress.evaluated_step >= self.step:
            return
        start = time.perf_counter()
        loss, tokens = self._evaluate(bank)
        if not math.isfinite(loss):
            raise TrainingError(
                f"the evaluation after step {self.step}: the loss is {loss}; neither a checkpoint nor an adapter "
                "was saved of it. Lower optimizer.learning_rate, or look for rows unlike the others"
            )
        best = self.progress.best_loss
        self.progress = self.progress.evaluated(loss, self.config.evaluation.min_delta)
        facts = EvaluationFacts(self.step, loss, tokens, time.perf_counter() - start, loss < best)
        self._evaluated.append(facts)
        self._tell(facts)
        if facts.is_best and self.config.evaluation.keep_best:
            self._save(bank, "best")
        if self._is_over:
            self._remark(ended_early(self.progress, self.total))

    def _evaluate(self, bank: AdapterBank) -> tuple[float, int]:
        """The mean loss of its held-out rows, and of how many tokens."""
        assert self.held_out is not None
        own = torch.zeros(2, dtype=torch.float64)
        for portion in self._looked_at:
            rows = tensors_of(self.held_out, portion.rows[self.world.rank])
            [logprobs] = bank.forward([(self.name, rows)])
            own[0] -= sum(float(values.double().sum()) for values in logprobs)
            own[1] += learned_in(rows)
        total, tokens = reduced(own, 2.0, self.world.group).tolist()
        return total / max(tokens, 1), int(tokens)

    # ── what is kept ──────────────────────────────────────────────────────────────────────────────

    def keep(self, bank: AdapterBank) -> None:
        """Keep its state, where it has come further than what is kept. Collective: yes."""
        if self.step <= self.kept_step:
            return
        start = time.perf_counter()
        self.keeper.save(self.world, bank, self.name, KeptProgress(self.progress, self._position, self._tuning))
        self.kept_step = self.step
        self._tell(CheckpointFacts(self.step, time.perf_counter() - start, "saved"))

    def leave(self, bank: AdapterBank) -> SaveReport:
        """Save the adapter, and have the bank forget it. Collective: yes."""
        saved = self._save(bank, "last")
        bank.remove(self.name)
        return saved

    def _save(self, bank: AdapterBank, name: str) -> SaveReport:
        return bank.save(
            self.name,
            self.output / name,
            state=MatricesOnly(),
            tokenizer=self.ground.tokenizer,
            dtype=self.config.output.dtype,
            verify=CompareWithMemory(),
            options=SaveOptions(progress=False),
        )

    # ── what is told ──────────────────────────────────────────────────────────────────────────────

    def begin_telling(self, *listeners: TenantListener) -> None:
        """Have listeners be told of its steps, evaluations and checkpoints, and of what has been before."""
        self._listeners = listeners
        for facts in self._early:
            self._tell(facts)

    def close(self) -> None:
        """There is no more to be told."""
        for listener in self._listeners:
            listener.close()

    def report(self, ended: Ended, cause: str = "", saved: SaveReport | None = None) -> TenantReport:
        """What it did, as seen by this rank; there is no more to be told."""
        self.close()
        trained = TrainReport(
            rank=self.world.rank,
            world_size=self.world.size,
            trained_parameters=self.trained_count,
            steps=tuple(self._done),
            evaluations=tuple(self._evaluated),
            remarks=tuple(self._remarks),
            is_stopped=ended is Ended.STOPPED,
            last_step=self.step,
        )
        return TenantReport(self.name, ended, cause, trained, saved)

    def _remark(self, text: str) -> None:
        if text:
            self._remarks.append(text)
            self._tell(Remark(self.step, text))

    def _tell(self, facts: Event) -> None:
        """Tell the listeners. What one raises waits until all ranks meet: others may have nothing to raise."""
        if not self._listeners:
            self._early.append(facts)
        for listener in self._listeners:
            try:
                listener.tell(facts)
            except Exception as error:
                self.failure = self.failure or error
