"""Trains many LoRAs on one base. Each call of the bank has the rows of a step of each adapter."""

from __future__ import annotations

import json
import logging
import math
import operator
import shutil
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn.functional import logsigmoid
from tqdm.auto import tqdm
from transformers import Trainer, TrainerState, get_scheduler
from transformers.trainer import TRAINER_STATE_NAME

from shardwise.bank.adapter import AdapterLoss, AdapterOptions, AdapterStep
from shardwise.bank.adapter_bank import AdapterBank
from shardwise.bank.rows import Request, RowTensors
from shardwise.core.errors import ConfigError, FormatError, TrainingError
from shardwise.core.formatting import table_lines
from shardwise.files.local_writer import open_writer
from shardwise.integrations.trainer_checkpoints import steps_to_remove
from shardwise.ranks.collective_errors import translate_collective_errors
from shardwise.ranks.stop_signals import StopRequest
from shardwise.ranks.world import World
from shardwise.saving.prepare import SaveOptions
from shardwise.training import train_model, trl_objects
from shardwise.training.adapter_rows import StepOrder, TokenizedRows, require_rows_fit
from shardwise.training.curves import draw_curves, gather_memory
from shardwise.training.dataset_preparation import require_embedded_tokens
from shardwise.training.preference_pairs import compute_dpo_loss, compute_margins
from shardwise.training.run_config import RunConfig
from shardwise.training.run_inputs import RunInputs, TrainingRecord, honor_timeout, name_adapter, open_inputs
from shardwise.training.run_outcome import TrlOutcome

_log = logging.getLogger(__name__)

_ROWS_AT_ONCE: Final = 1024
"""Rows of an evaluation in one call, on all ranks. The bank cuts them into passes."""


def train_adapters(config: RunConfig, local_rank: int) -> TrlOutcome:
    """Train many LoRAs from a configuration. Collective: yes, over the default process group.

    Returns:
        The outcome. Its ``metrics`` are by adapter, ranked by evaluation loss, those with pairs after the others.

    Raises:
        ShardwiseError: the same on every rank, if the configuration, the data or the base cannot be used.
    """
    start_s = time.monotonic()
    with open_inputs(config, local_rank) as inputs:
        world = World.current(call="train")  # after open_inputs(), which sets ddp_timeout
        output, request = inputs.output, inputs.request
        adapters = _add_adapters(inputs, config, world)
        has_stopped, failures, memory = train_together(adapters, request)
        if world.rank == 0 and not has_stopped:
            draw_curves(output, {adapter.name: adapter.state.log_history for adapter in adapters}, memory)
    # By adapter: steps, the last losses, and the failure of one that has failed.
    metrics: dict[str, dict[str, Any]] = {}
    history: list[Mapping[str, Any]] = []
    for adapter in adapters:
        name, state = adapter.name, adapter.state
        metrics[name] = {"steps": state.global_step, "max_steps": state.max_steps, **adapter.last_logged()}
        if name in failures:
            metrics[name]["failure"] = failures[name]
        history += [{"adapter": name, **entry} for entry in state.log_history]
    with_pairs = {adapter.name for adapter in adapters if adapter.has_pairs}
    ranked = dict(sorted(metrics.items(), key=lambda item: (item[0] in with_pairs, _sort_key(item[1]))))
    return TrlOutcome(
        output_dir=str(output),
        steps=_total_steps(adapters),
        has_stopped=has_stopped,
        metrics=ranked,
        history=(*history, *memory),
        summary=tuple(_summary_lines(ranked, with_pairs, start_s)),
    )


def _sort_key(metrics: Mapping[str, Any]) -> tuple[bool, bool, float]:
    """Return a sort key: adapters by evaluation loss, then those without one by loss, then failures."""
    eval_loss: float | None = metrics.get("eval_loss")
    loss: float = metrics.get("loss", 0.0) if eval_loss is None else eval_loss
    return "failure" in metrics, eval_loss is None, math.inf if math.isnan(loss) else loss


def _summary_lines(
    ranked: Mapping[str, Mapping[str, Any]], with_pairs: Collection[str], start_s: float
) -> list[str]:
    """Format the closing table of adapters. Losses of pairs have ranks of their own."""
    rows: list[tuple[str, ...]] = []
    ranks = Counter[bool]()
    for name, metrics in ranked.items():
        ranks[name in with_pairs] += 1
        losses = (f"{metrics[key]:.4f}" if key in metrics else "-" for key in ("loss", "eval_loss"))
        rows.append((str(ranks[name in with_pairs]), name, f"{metrics['steps']}/{metrics['max_steps']}", *losses))
    lines = table_lines(("", "adapter", "steps", "loss", "evaluation loss"), rows)
    lines += [f"{name}: failed in {metrics['failure']}" for name, metrics in ranked.items() if "failure" in metrics]
    return [*lines, f"{len(ranked)} adapters in {time.monotonic() - start_s:.1f} s, {train_model.peak_line()}"]


def _add_adapters(inputs: RunInputs, config: RunConfig, world: World) -> list[AdapterTraining]:
    """Load the base, and add the adapters to a bank. Collective: yes.

    Raises:
        ConfigError: an adapter cannot be trained. The message has its name.
    """
    first = next(iter(inputs.arguments.values()))
    tokens_per_pass = config.own.tokens_per_pass
    model = trl_objects.load_base(first)
    honor_timeout(config, first)  # again, for the process groups of the base's mesh, which are new
    bank = AdapterBank(model, max_tokens_per_pass=tokens_per_pass)
    shared = SharedBank(world, bank, tokens_per_pass, inputs.processor, inputs.record)
    # All rows are checked before the first adapter is added, so that a bad row ends the run before any training.
    # Adapters with the same settings of rows have one dataset.
    rows_by_dataset: dict[int, TokenizedRows] = {}
    for name, splits in inputs.data.items():
        with name_adapter(name):
            for dataset in splits:
                if dataset is not None and id(dataset) not in rows_by_dataset:
                    require_embedded_tokens(dataset, inputs.processor, model)
                    rows_by_dataset[id(dataset)] = TokenizedRows(dataset, inputs.arguments[name].own.method)
    adapters = []
    for name, arguments in inputs.arguments.items():
        rows = [None if dataset is None else rows_by_dataset[id(dataset)] for dataset in inputs.data[name]]
        with name_adapter(name):
            adapters.append(AdapterTraining(name, arguments, rows, shared))
            adapters[-1].join()
    return adapters


def train_together(
    adapters: Sequence[AdapterTraining], stop_request: StopRequest
) -> tuple[bool, dict[str, str], list[dict[str, Any]]]:
    """Train adapters until they are done or a signal requests a stop. Collective: yes.

    All adapters that are not done take a step at once. If the loss or gradient of one is not finite, it alone ends.

    Returns:
        Whether a signal ended the training, failures by adapter, and the memory of all ranks since this process
        began, by the sum of the adapters' steps.

    Raises:
        ShardwiseError: a pass failed, or a rank is lost. The newest checkpoints are complete.
    """
    failures, has_stopped = dict[str, str](), False
    memory: list[dict[str, Any]] = []
    num_logged = _num_logged(adapters)
    world = World.current(call="the adapters' passes")
    total = sum(adapter.state.max_steps for adapter in adapters) - _total_steps(adapters)
    is_silent = world.rank != 0 or adapters[0].args.disable_tqdm
    with (
        tqdm(total=total, disable=is_silent) as bar,
        translate_collective_errors(world, lambda: "in a pass of adapters"),
    ):
        # ``waiting`` have steps left, and ``in_step`` have just taken one. Before the first step, the latter are
        # the adapters that resume from their last step, and may not have saved their matrices.
        steps: dict[str, AdapterStep] = {}
        in_step, waiting = [adapter for adapter in adapters if adapter.is_done], list(adapters)
        while True:
            # Only after a step is it known whether an adapter is done, or has failed.
            for adapter in in_step:
                step = steps.get(adapter.name)
                failure = None if step is None else adapter.find_failure(step)
                if failure is None:
                    adapter.proceed(step, stop_request)
                else:  # its values are equal on all ranks, so all delete it
                    adapter.bank.delete_adapter(adapter.name)
                    failures[adapter.name] = failure
            waiting = [adapter for adapter in waiting if not adapter.is_finished and adapter.name not in failures]
            if _num_logged(adapters) > num_logged:
                num_logged = _num_logged(adapters)
                memory.append({"step": _total_steps(adapters), **gather_memory(world)})
            has_stopped = _is_stop_requested(world, stop_request)
            if has_stopped or not waiting:
                break
            in_step, bank = waiting, waiting[0].bank
            requests = [request for adapter in in_step for request in adapter.next_requests()]
            try:
                output = bank.forward_backward(requests)
            except TrainingError as error:
                if error.output is None:
                    raise
                output = error.output  # losses that are not finite are NaN, and end their adapters alone
            # In the order of the requests. Each adapter takes as many as it has made.
            outcomes = iter(output.requests)
            for adapter in in_step:
                adapter.note_outcomes(outcomes)
            steps = bank.optim_step({adapter.name: adapter.step_settings for adapter in in_step})
            bar.update(len(in_step))
        # Adapters that are left after a signal. Those that are finished have saved themselves.
        for adapter in waiting:
            adapter.save_checkpoint()
    return has_stopped and bool(waiting), failures, memory


def _is_stop_requested(world: World, stop_request: StopRequest) -> bool:
    # A signal may have reached one rank only.
    return world.all_reduce_object(stop_request.is_made, any)


def _total_steps(adapters: Sequence[AdapterTraining]) -> int:
    return sum(adapter.state.global_step for adapter in adapters)


def _num_logged(adapters: Sequence[AdapterTraining]) -> int:
    return sum(len(adapter.state.log_history) for adapter in adapters)


_POSITION: Final = "StepOrder"


@dataclass(frozen=True, slots=True)
class SharedBank:
    """Objects that all adapters share."""

    world: World
    bank: AdapterBank
    tokens_per_pass: int
    processor: Any
    record: TrainingRecord


class AdapterTraining:
    """The training of one adapter of a bank. Its methods raise the same errors on every rank.

    Args:
        name: name of the adapter.
        arguments: its configuration.
        splits: rows to train on, and to evaluate on or None.
        shared: the bank.

    Raises:
        ConfigError: its rows do not fit into a pass.
    """

    def __init__(
        self,
        name: str,
        arguments: trl_objects.TrlArguments,
        splits: Sequence[TokenizedRows | None],
        shared: SharedBank,
    ) -> None:
        self.name, self.bank = name, shared.bank
        self.args: Any = arguments.training
        self.state = TrainerState()
        self._folder = Path(self.args.output_dir)
        self._lora = trl_objects.lora_config(arguments)
        if getattr(self.args, "disable_dropout", False):  # of DPOConfig
            self._lora.lora_dropout = 0.0
        rows, self._held_out = splits
        assert rows is not None
        self._rows, self._shared = rows, shared
        # A row that does not fit is an error before the training, not within it.
        for split in filter(None, splits):
            require_rows_fit(split, self.bank.max_length, shared.tokens_per_pass)
        self.has_pairs = rows.size > 1
        self._pairs: list[RowTensors] = []
        """Rows of this rank of the step that is taken, with log probabilities of the base."""
        self._references: list[torch.Tensor] | None = None
        """Log probabilities of the base for the rows of the next step."""
        self._margins: list[float] = []
        """Of this rank's pairs since the last log entry."""
        # As in the Trainer, a step has the rows of all ranks and of all of their micro-batches.
        per_rank = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        self._order = StepOrder(len(rows), per_rank * shared.world.size, seed)
        self._position = (0, 0)
        """Epoch and offset after the last step, as saved: ``_order`` is ahead of it within a step."""
        self._saved_step = 0
        self.is_finished = False
        """True if it is done, evaluated and saved, and the bank no longer has it."""
        self._loss = math.nan
        """Of the step that is taken."""
        self._losses: list[float] = []
        """Losses of the steps since the last log entry."""

    def join(self) -> None:
        """Add the adapter to the bank, from the newest checkpoint if there is one. Collective: yes.

        Raises:
            ShardwiseError: the configuration is invalid, or the checkpoint belongs to another training.
        """
        with self._shared.world.broadcast("find the latest checkpoint") as exchange:
            if self._shared.world.rank == 0:
                exchange.local = _find_latest(self._folder)
        steps, state = exchange.result
        if state is not None:
            self._restore(state)
        # After the position is restored: the steps left depend on it. Before keywords: the schedule needs them.
        self.state.max_steps = self.args.max_steps
        if self.args.max_steps <= 0:
            self.state.max_steps = self.state.global_step + self._order.steps_left(self.args.num_train_epochs)
        self.state.compute_steps(self.args, self.state.max_steps)
        if state is None:
            self.bank.add_adapter(self.name, self._lora, **self._keywords())
            return
        self._require_equal_steps(state)
        checkpoint = self._folder / f"checkpoint-{steps}"
        start = self.bank.load(self.name, checkpoint, **self._keywords())
        if not start.is_resumed:
            raise FormatError(f"{checkpoint}: has no state of a training, {start.reason}. Remove the folder")

    def _restore(self, state: TrainerState) -> None:
        callbacks: Any = state.stateful_callbacks
        position = callbacks[_POSITION]
        if position["count"] != self._order.count:
            raise ConfigError(
                f"{self._folder}: has a training on {position['count']} rows, not {self._order.count}. Use the "
                "same datasets, or another output_dir"
            )
        if position["seed"] != self._order.seed:
            raise ConfigError(
                f"{self._folder}: has a training whose rows are shuffled with seed {position['seed']}, not "
                f"{self._order.seed}. Keep data_seed (without one, seed), or use another output_dir"
            )
        self._position = self._order.epoch, self._order.offset = position["epoch"], position["offset"]
        self.state, self._saved_step = state, state.global_step

    def _require_equal_steps(self, state: TrainerState) -> None:
        callbacks: Any = state.stateful_callbacks
        now = self._order.rows_per_step
        saved = callbacks[_POSITION]["rows_per_step"]
        if saved != now and not self.is_done:
            raise ConfigError(
                f"{self._folder}: has a training with {saved} rows in a step, not {now} "
                "(per_device_train_batch_size * gradient_accumulation_steps * ranks). Keep the number of rows in a "
                "step, or use another output_dir"
            )

    def _keywords(self) -> AdapterOptions:
        args, total = self.args, self.state.max_steps

        # As the Trainer makes them. The bank calls both, with the parameters of the adapter.
        def optimizer(parameters: list[Any]) -> Any:
            kind, keywords = Trainer.get_optimizer_cls_and_kwargs(args)
            return kind(parameters, weight_decay=args.weight_decay, **keywords)

        def schedule(optimizer: Any) -> Any:
            warmup = args.get_warmup_steps(total)
            return get_scheduler(args.lr_scheduler_type, optimizer, warmup, total, args.lr_scheduler_kwargs)

        return {
            "optimizer": optimizer,
            "schedule": schedule,
            # Of pairs whose loss is not finite, a window has none.
            "gradient_accumulation_steps": None if self.has_pairs else 1,
            "reduction": "sum" if self.has_pairs else "mean",
            "seed": args.seed,
        }

    @property
    def step_settings(self) -> dict[str, float]:
        """Settings of a step that are those of the configuration, and not of the checkpoint."""
        return {"max_grad_norm": max(self.args.max_grad_norm or 0.0, 0.0)}  # 0 or less: no limit, as in the Trainer

    @property
    def is_done(self) -> bool:
        """True if all steps are taken."""
        return bool(self.state.global_step >= self.state.max_steps)

    def _take(self, rows: TokenizedRows, indices: Sequence[int]) -> list[RowTensors]:
        """Return this rank's share of rows or pairs."""
        return rows.take(indices[self._shared.world.rank :: self._shared.world.size])

    def next_requests(self) -> list[Request]:
        """Return requests with the rows of the next step on this rank. Collective: yes."""
        # Indices of all ranks' rows. ``rows`` are those of this rank.
        step = self._order.take_step()
        rows = self._take(self._rows, step)
        if not self.has_pairs:
            return [Request(self.name, rows)]
        # The base is not trained, so the call of a step also computes its log probabilities for the next step.
        if self._references is None:
            [self._references] = self.bank.compute_logprobs([Request(None, rows)])
        self._pairs = []
        for row, logprobs in zip(rows, self._references, strict=True):
            self._pairs.append({**row, "logprobs": logprobs})
        is_last = self.state.global_step + 1 >= self.state.max_steps
        # A copy takes the next step, so that the position stays behind this one.
        upcoming = [] if is_last else replace(self._order).take_step()
        config = {"beta": self.args.beta, "num_pairs": len(step)}
        return [
            Request(self.name, self._pairs, compute_dpo_loss, config, group_size=2),
            Request(None, self._take(self._rows, upcoming), backward=False),
        ]

    def note_outcomes(self, outcomes: Iterator[AdapterLoss]) -> None:
        """Record the outcomes of ``next_requests``: a mean over supervised tokens, or over pairs, of all ranks."""
        outcome = next(outcomes)
        self._loss = outcome.loss
        if self.has_pairs:
            references = [row["logprobs"] for row in self._pairs]
            self._margins += map(float, compute_margins(outcome.logprobs, references, self.args.beta))
            self._references = next(outcomes).logprobs

    def find_failure(self, step: AdapterStep) -> str | None:
        """Return why a step ends the training of this adapter alone, or None if it does not."""
        if step.is_taken and math.isfinite(self._loss):
            return None
        remedy = "Lower learning_rate, or check the rows"
        if self._saved_step:  # it resumes with the learning rate of the checkpoint
            checkpoints = f"checkpoint-* of {self._folder}, which keep the old one"
            remedy = f"Lower learning_rate and remove {checkpoints}, or check the rows"
        return (
            f"step {self.state.global_step + 1}: the loss is {self._loss:.4g} and the norm of the gradient "
            f"{step.grad_norm:.4g}. {remedy}"
        )

    def proceed(self, step: AdapterStep | None, stop_request: StopRequest) -> None:
        """Record a step if one was taken. Then log, evaluate and save if due. Collective: yes.

        If a stop is requested, nothing is evaluated: an adapter that is done is evaluated when it resumes.

        Raises:
            TrainingError: an evaluation does not fit into the memory of a rank.
        """
        if step is not None:
            self._note_step(step)
        elif not self.is_done:
            return
        if self._held_out is not None and (self.is_done or self._is_due("eval")):
            if _is_stop_requested(self._shared.world, stop_request):
                return  # before a save: train_together() saves all that are left
            self._evaluate(self._held_out)
        if self.is_done or self._is_due("save"):
            self.save_checkpoint()
        if self.is_done:
            self._finish()

    def _is_due(self, kind: str) -> bool:
        strategy = getattr(self.args, f"{kind}_strategy")
        if strategy == "epoch":
            return self._order.offset == 0
        steps = getattr(self.state, f"{kind}_steps")
        return strategy == "steps" and steps > 0 and not self.state.global_step % steps

    def _note_step(self, step: AdapterStep) -> None:
        self.state.global_step += 1
        self._position = self._order.epoch, self._order.offset
        self.state.epoch = self._order.epochs
        self._losses.append(self._loss)
        if self.is_done or self.state.global_step % self.state.logging_steps == 0:
            # Means over the steps since the last entry.
            average = math.fsum(self._losses) / len(self._losses)
            rewards = self._measure_rewards(self._margins)
            self._losses, self._margins = [], []
            self._log(loss=average, grad_norm=step.grad_norm, learning_rate=step.learning_rate, **rewards)

    def _measure_rewards(self, margins: Sequence[float], prefix: str = "") -> dict[str, float]:
        """Return TRL's metrics of the pairs of all ranks, nothing without pairs. Collective: yes."""
        if not self.has_pairs:
            return {}
        # (pairs, sum of margins, pairs whose chosen answer is preferred) of each rank, then of all.
        sums = len(margins), math.fsum(margins), sum(margin > 0 for margin in margins)
        count, total, correct = map(math.fsum, zip(*self._shared.world.all_gather_object(sums), strict=True))
        return {f"{prefix}rewards/margins": total / count, f"{prefix}rewards/accuracies": correct / count}

    def _log(self, **metrics: float) -> None:
        self.state.log_history.append({**metrics, "epoch": self.state.epoch, "step": self.state.global_step})

    def last_logged(self) -> dict[str, float]:
        """Return the last loss and evaluation loss that were logged."""
        merged = {key: value for entry in self.state.log_history for key, value in entry.items()}
        return {key: merged[key] for key in ("loss", "eval_loss") if key in merged}

    def _evaluate(self, rows: TokenizedRows) -> None:
        # A sum over the supervised tokens of this rank, or over its pairs, of which ``num_terms`` is the number.
        local_sum, margins = 0.0, list[float]()
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            batch = self._take(rows, range(start, min(start + _ROWS_AT_ONCE, len(rows))))
            requests = [Request(self.name, batch)]
            if self.has_pairs:
                requests.append(Request(None, batch))
            # For each row (tokens,), 0 for ignored targets. A rank without rows passes, too.
            logprobs, *references = self.bank.compute_logprobs(requests)
            if references:
                margins += map(float, compute_margins(logprobs, references[0], self.args.beta))
            else:
                local_sum -= sum(float(values.double().sum()) for values in logprobs)
        local_sum -= float(logsigmoid(torch.tensor(margins, dtype=torch.float64)).sum())
        loss = self._shared.world.all_reduce_object(local_sum, math.fsum) / rows.num_terms
        self._log(eval_loss=loss, **self._measure_rewards(margins, "eval_"))

    def save_checkpoint(self) -> None:
        """Save a checkpoint, unless there is one of this step. Collective: yes."""
        step = self.state.global_step
        if step <= self._saved_step:
            return
        # First the adapter, and at last the state of the Trainer, without which the folder is no checkpoint.
        checkpoint = self._folder / f"checkpoint-{step}"
        self._shared.record.require_on_first_rank(self._shared.world)
        self.bank.save(self.name, checkpoint, options=SaveOptions(progress=False))
        with self._shared.world.broadcast("commit the checkpoint"):
            if self._shared.world.rank == 0:
                self._commit(checkpoint)
        self._saved_step = step

    def _commit(self, checkpoint: Path) -> None:
        """Complete a checkpoint with the state of the Trainer, and remove the oldest checkpoints."""
        epoch, offset = self._position
        order = self._order
        data = {"count": order.count, "rows_per_step": order.rows_per_step, "seed": order.seed}
        position = {_POSITION: {**data, "epoch": epoch, "offset": offset}}
        content = json.dumps({**asdict(self.state), "stateful_callbacks": position}, indent=2, sort_keys=True)
        with open_writer(checkpoint) as writer:
            writer.replace(TRAINER_STATE_NAME, content.encode())
        for step in steps_to_remove(_complete_steps(self._folder), self.args.save_total_limit, None):
            old = self._folder / f"checkpoint-{step}"
            try:
                if old.is_symlink():  # to a checkpoint that may be another training's
                    old.unlink()
                    continue
                (old / TRAINER_STATE_NAME).unlink()  # first: without it the rest does not count as a checkpoint
                shutil.rmtree(old)
            except OSError as error:
                _log.warning("%s: cannot be removed, %s. Remove it yourself", old, error)

    def _finish(self) -> None:
        """Save the adapter, and delete it from the bank."""
        tokenizer, options = self._shared.processor, SaveOptions(progress=False)
        self.bank.save(self.name, self._folder, training_state=False, tokenizer=tokenizer, options=options)
        self.bank.delete_adapter(self.name)
        self.is_finished = True


def _complete_steps(folder: Path) -> list[int]:
    names = (
        file.parent.name.removeprefix("checkpoint-") for file in folder.glob(f"checkpoint-*/{TRAINER_STATE_NAME}")
    )
    return sorted(int(name) for name in names if name.isdecimal())


def _find_latest(folder: Path) -> tuple[int, TrainerState | None]:
    """Return the step and the state of the newest complete checkpoint, or None.

    Raises:
        FormatError: its state is damaged.
    """
    steps = _complete_steps(folder)
    if not steps:
        return 0, None
    file = folder / f"checkpoint-{steps[-1]}" / TRAINER_STATE_NAME
    try:
        state = TrainerState.load_from_json(str(file))
        # Checked here, where an error names the file: the position is used as an index later.
        callbacks: Any = state.stateful_callbacks
        position = callbacks[_POSITION]
        keys = ("count", "epoch", "offset", "rows_per_step", "seed")
        count, epoch, offset, *_ = (operator.index(position[key]) for key in keys)
        if not 0 <= offset < count or not 0 <= epoch <= state.global_step:
            raise ValueError("its position is outside of the rows")
        return steps[-1], state
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise FormatError(f"{file}: cannot be read, {error}. Remove {file.parent}") from error
