"""A training of many LoRAs on one base. Adapters take turns, and share a pass if their rows have one length."""

from __future__ import annotations

import json
import math
import operator
import shutil
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from tqdm.auto import tqdm
from transformers import Trainer, TrainerState, get_scheduler

from shardwise.bank.adapter import TenantLoss, TenantStep
from shardwise.bank.adapter_bank import AdapterBank, TenantKeywords
from shardwise.bank.rows import RowTensors
from shardwise.core.errors import ConfigError, FormatError, TrainingError
from shardwise.files.local_writer import open_writer
from shardwise.integrations.trainer_runs import steps_to_remove
from shardwise.ranks.collective_errors import translate_collective_errors
from shardwise.ranks.stop_signals import StopRequest
from shardwise.ranks.world import World
from shardwise.saving.prepare import SaveOptions
from shardwise.training import train_model
from shardwise.training import trl_objects as trl_setup
from shardwise.training.adapter_rows import MicroBatch, StepOrder, TokenBudget, TokenizedRows
from shardwise.training.curves import draw_curves, gather_memory
from shardwise.training.dataset_loading import with_embedded_tokens
from shardwise.training.run_config import RunConfig
from shardwise.training.run_inputs import RunInputs, TrainingRecord, name_adapter, open_inputs

_PAD_TO: Final = 64


def train_adapters(config: RunConfig, local_rank: int) -> train_model.TrlOutcome:
    """Train many LoRAs from a configuration. Collective: yes, over the default process group.

    Returns:
        The outcome. Its ``metrics`` are by adapter, ranked by evaluation loss.

    Raises:
        ShardwiseError: the same on every rank, if the configuration, the data or the base cannot be used.
    """
    begun = time.monotonic()
    world = World.current(call="train")
    with open_inputs(config, local_rank) as inputs:
        output, request = inputs.output, inputs.request
        adapters = _joined(inputs, config.own.tokens_per_pass, world)
        has_stopped, failures, memory = train_in_turns(adapters, config.own.tokens_per_pass, request)
        if world.rank == 0:
            draw_curves(output, {one.name: one.state.log_history for one in adapters}, memory)
    metrics = {
        one.name: {"steps": one.state.global_step, "max_steps": one.state.max_steps, **one.last_logged()}
        | ({"failure": failures[one.name]} if one.name in failures else {})
        for one in adapters
    }
    ranked = dict(sorted(metrics.items(), key=lambda item: train_model.adapter_sort_key(item[1])))
    history = [{"adapter": one.name, **entry} for one in adapters for entry in one.state.log_history]
    steps = sum(one.state.global_step for one in adapters)
    return train_model.TrlOutcome(
        str(output),
        steps,
        has_stopped,
        ranked,
        (*history, *memory),
        tuple(train_model.adapter_summary_lines(ranked, begun)),
    )


def _joined(inputs: RunInputs, tokens_per_pass: int, world: World) -> list[AdapterTraining]:
    """Load the base, and add the adapters to a bank. Collective: yes.

    Raises:
        ConfigError: an adapter cannot be trained. The message has its name.
    """
    first = next(iter(inputs.arguments.values()))
    model = trl_setup.load_base(first)
    if first.training.gradient_checkpointing:
        keywords = {**(first.training.gradient_checkpointing_kwargs or {}), "use_reentrant": False}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=keywords)
        model.train()
    bank = AdapterBank(model, pad_to=_PAD_TO)
    budget = TokenBudget(tokens_per_pass, _PAD_TO, bank.max_length)
    shared = SharedBank(world, bank, budget, inputs.processor, inputs.record)
    for name, data in inputs.data.items():
        with name_adapter(name):
            for part in data:
                if part is not None:
                    with_embedded_tokens(part, inputs.processor, model)
    adapters = []
    for name, arguments in inputs.arguments.items():
        train, test = inputs.data[name]
        held_out = None if test is None else TokenizedRows(test)
        with name_adapter(name):
            adapters.append(AdapterTraining(name, arguments, TokenizedRows(train), held_out, shared))
            adapters[-1].join()
    return adapters


def train_in_turns(
    adapters: Sequence[AdapterTraining], budget: int, request: StopRequest
) -> tuple[bool, dict[str, str], list[dict[str, Any]]]:
    """Train adapters until they are done or a signal requests a stop. Collective: yes.

    The first adapter of the queue and later ones that fit share a pass, and move to the end of the queue. If the
    loss or gradient of an adapter is not finite, it alone ends.

    Args:
        adapters: in the order of their first turns.
        budget: maximum number of tokens of a pass on one rank.
        request: the request to stop.

    Returns:
        Whether a signal ended the training, failures by adapter, and the memory of all ranks since this process
        began, by the sum of the adapters' steps.

    Raises:
        ShardwiseError: a pass failed, or a rank is lost. The newest checkpoints are complete.
    """
    queue, failures, has_stopped = list(adapters), dict[str, str](), False
    memory: list[dict[str, Any]] = []
    num_logged = _num_logged(adapters)
    world = World.current(call="the adapters' passes")
    total = sum(one.state.max_steps - one.state.global_step for one in adapters)
    is_silent = world.rank != 0 or adapters[0].args.disable_tqdm
    with (
        tqdm(total=total, disable=is_silent) as bar,
        translate_collective_errors(world, lambda: "in a pass of adapters"),
    ):
        taken = [one for one in queue if one.is_done]
        while True:
            stepping = [one for one in taken if one.is_at_step]
            steps = stepping[0].bank.optim_steps([one.name for one in stepping]) if stepping else {}
            for one in taken:
                try:
                    one.proceed(steps.get(one.name))
                except TrainingError as error:
                    one.bank.delete_adapter(one.name)
                    failures[one.name] = str(error)
            queue = [one for one in queue if not one.is_done and one.name not in failures]
            if _num_logged(adapters) > num_logged:
                num_logged = _num_logged(adapters)
                memory.append({"step": sum(one.state.global_step for one in adapters), **gather_memory(world)})
            has_stopped = world.all_reduce_object(request.is_made, any)
            waiting = [one for one in queue if one.is_in_step or not has_stopped]
            if not waiting:
                break
            taken = next_pass(waiting, budget)
            queue = [one for one in queue if one not in taken] + taken
            losses = taken[0].bank.forward_backward([(one.name, one.next_tensors()) for one in taken])
            for one in taken:
                one.note_pass(losses.tenants[one.name])
                bar.update(not one.is_in_step)
        for one in queue:
            one.save_checkpoint()
    return has_stopped and bool(queue), failures, memory


def _num_logged(adapters: Sequence[AdapterTraining]) -> int:
    return sum(len(one.state.log_history) for one in adapters)


def next_pass(waiting: Sequence[AdapterTraining], budget: int) -> list[AdapterTraining]:
    """Choose the first adapter and later ones whose rows have the same length and fit into a pass."""
    batches = {one.name: one.next_micro_batch() for one in waiting}
    leader = next((one for one in waiting if batches[one.name].cost), waiting[0])
    taken, left = [], budget
    for one in waiting:
        batch = batches[one.name]
        is_alike = batch.tokens == batches[leader.name].tokens and batch.cost <= left
        if one is leader or not batch.cost or is_alike:
            taken.append(one)
            left -= batch.cost
    return taken


STATE_FILE: Final = "trainer_state.json"
"""State of the Trainer. It is written last, so a checkpoint without it is incomplete."""

_POSITION: Final = "StepOrder"


@dataclass(frozen=True, slots=True)
class SharedBank:
    """Objects that all adapters share."""

    world: World
    bank: AdapterBank
    budget: TokenBudget
    processor: Any
    record: TrainingRecord


class AdapterTraining:
    """The training of one adapter of a bank. Its methods raise the same errors on every rank.

    Args:
        name: name of the adapter.
        arguments: its configuration.
        rows: rows to train on.
        held_out: rows to evaluate on.
        shared: the bank.

    Raises:
        ConfigError: its rows do not fit into a pass.
    """

    def __init__(
        self,
        name: str,
        arguments: trl_setup.TrlArguments,
        rows: TokenizedRows,
        held_out: TokenizedRows | None,
        shared: SharedBank,
    ) -> None:
        self.name, self.bank = name, shared.bank
        self.args: Any = arguments.training
        self.state = TrainerState()
        self._folder = Path(self.args.output_dir)
        self._lora = trl_setup.lora_config(arguments)
        self._rows, self._held_out, self._shared = rows, held_out, shared
        per_rank = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
        self._at_once = min(self.args.per_device_train_batch_size, shared.budget.rows_at_once(rows))
        self._micro_batches = math.ceil(per_rank / self._at_once)
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        self._order = StepOrder(len(rows), per_rank * shared.world.size, seed)
        self._position = (0, 0)
        self._saved_step = 0
        self._left: deque[MicroBatch] = deque()
        self._window: list[TenantLoss] = []
        self._losses: list[float] = []

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
        epochs, max_steps = self.args.num_train_epochs, self.args.max_steps
        self.state.max_steps = (
            max_steps if max_steps > 0 else self.state.global_step + self._order.steps_left(epochs)
        )
        self.state.compute_steps(self.args, self.state.max_steps)
        place = self._folder / f"checkpoint-{steps}"
        if state is None:
            self.bank.add_adapter(self.name, self._lora, **self._keywords())
        elif not (begun := self.bank.load(self.name, place, **self._keywords())).is_resumed:
            raise FormatError(f"{place}: has no state of a training, {begun.reason}. Remove the folder")

    def _restore(self, state: TrainerState) -> None:
        kept: Any = state.stateful_callbacks
        position = kept[_POSITION]
        if position["count"] != self._order.count:
            raise ConfigError(
                f"{self._folder}: has a training on {position['count']} rows, not {self._order.count}. Use the "
                "same datasets, or another output_dir"
            )
        self._position = self._order.epoch, self._order.offset = position["epoch"], position["offset"]
        self.state, self._saved_step = state, state.global_step

    def _keywords(self) -> TenantKeywords:
        args, total = self.args, self.state.max_steps

        def optimizer(parameters: list[Any]) -> Any:
            kind, keywords = Trainer.get_optimizer_cls_and_kwargs(args)
            return kind(parameters, weight_decay=args.weight_decay, **keywords)

        def schedule(optimizer: Any) -> Any:
            warmup = args.get_warmup_steps(total)
            return get_scheduler(args.lr_scheduler_type, optimizer, warmup, total, args.lr_scheduler_kwargs)

        return {
            "optimizer": optimizer,
            "schedule": schedule,
            "max_grad_norm": args.max_grad_norm or math.inf,
            "gradient_accumulation_steps": self._micro_batches,
            "seed": args.seed,
        }

    @property
    def is_done(self) -> bool:
        """True if all steps are taken."""
        return bool(self.state.global_step >= self.state.max_steps)

    @property
    def is_in_step(self) -> bool:
        """True if some, but not all micro-batches of a step have passed."""
        return bool(0 < len(self._window) < self._micro_batches)

    def next_micro_batch(self) -> MicroBatch:
        """Return the rows of the next pass, equal on every rank."""
        if not self._left:
            ranks, at_once = self._shared.world.size, self._at_once
            self._left.extend(
                self._shared.budget.micro_batches(self._rows, self._order.take_step(), at_once, ranks)
            )
            empty = MicroBatch(((),) * ranks, 0)
            self._left.extend([empty] * (self._micro_batches - len(self._left)))
        return self._left[0]

    def next_tensors(self) -> RowTensors:
        """Return the rows of the next pass on this rank."""
        return self._rows.tensors(self.next_micro_batch().rows[self._shared.world.rank])

    def note_pass(self, loss: TenantLoss) -> None:
        """Record that the micro-batch has passed."""
        self._left.popleft()
        self._window.append(loss)

    @property
    def is_at_step(self) -> bool:
        """True if all micro-batches of a step have passed."""
        return bool(self._window) and not self.is_in_step

    def proceed(self, step: TenantStep | None) -> None:
        """Record a step if one was taken. Then log, evaluate and save if due. Collective: yes.

        Raises:
            TrainingError: the loss or the gradient is not finite.
        """
        if step is not None:
            self._note_step(step)
        elif not self.is_done:
            return
        if self._held_out is not None and (self.is_done or self._is_due("eval")):
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

    def _note_step(self, step: TenantStep) -> None:
        tokens = sum(one.num_supervised_tokens for one in self._window)
        loss = sum(one.loss * one.num_supervised_tokens for one in self._window) / max(tokens, 1)
        self._window = []
        if not step.is_taken or not math.isfinite(loss):
            raise TrainingError(
                f"step {self.state.global_step + 1}: the loss is {loss:.4g} and the norm of the gradient "
                f"{step.grad_norm:.4g}. Lower learning_rate, or check the rows"
            )
        self.state.global_step += 1
        self._position = self._order.epoch, self._order.offset
        self.state.epoch = self._order.epochs
        self._losses.append(loss)
        if self.is_done or self.state.global_step % self.state.logging_steps == 0:
            average = math.fsum(self._losses) / len(self._losses)
            self._losses = []
            self._log(loss=average, grad_norm=step.grad_norm, learning_rate=step.learning_rate)

    def _log(self, **metrics: float) -> None:
        self.state.log_history.append({**metrics, "epoch": self.state.epoch, "step": self.state.global_step})

    def last_logged(self) -> dict[str, float]:
        """Return the last loss and evaluation loss that were logged."""
        merged = {key: value for entry in self.state.log_history for key, value in entry.items()}
        return {key: merged[key] for key in ("loss", "eval_loss") if key in merged}

    def _evaluate(self, rows: TokenizedRows) -> None:
        world, budget = self._shared.world, self._shared.budget
        at_once = min(self.args.per_device_eval_batch_size, budget.rows_at_once(rows))
        own = 0.0
        for batch in budget.micro_batches(rows, range(len(rows)), at_once, world.size):
            [logprobs] = self.bank.compute_logprobs([(self.name, rows.tensors(batch.rows[world.rank]))])
            own -= sum(float(values.double().sum()) for values in logprobs)
        self._log(eval_loss=world.all_reduce_object(own, math.fsum) / rows.num_supervised_tokens)

    def save_checkpoint(self) -> None:
        """Save a checkpoint, unless there is one of this step. Collective: yes."""
        step = self.state.global_step
        if step <= self._saved_step:
            return
        place = self._folder / f"checkpoint-{step}"
        self._shared.record.require_on_first_rank(self._shared.world)
        self.bank.save(self.name, place, options=SaveOptions(progress=False))
        with self._shared.world.broadcast("commit the checkpoint"):
            if self._shared.world.rank == 0:
                self._commit(place)
        self._saved_step = step

    def _commit(self, place: Path) -> None:
        """Complete a checkpoint with the state of the Trainer, and remove the oldest checkpoints."""
        epoch, offset = self._position
        position = {_POSITION: {"count": self._order.count, "epoch": epoch, "offset": offset}}
        content = json.dumps({**asdict(self.state), "stateful_callbacks": position}, indent=2, sort_keys=True)
        with open_writer(place) as writer:
            writer.replace(STATE_FILE, content.encode())
        for step in steps_to_remove(_complete_steps(self._folder), self.args.save_total_limit, None):
            old = self._folder / f"checkpoint-{step}"
            (old / STATE_FILE).unlink()
            shutil.rmtree(old)

    def _finish(self) -> None:
        """Save the adapter, and delete it from the bank."""
        tokenizer, options = self._shared.processor, SaveOptions(progress=False)
        self.bank.save(self.name, self._folder, training_state=False, tokenizer=tokenizer, options=options)
        self.bank.delete_adapter(self.name)


def _complete_steps(folder: Path) -> list[int]:
    names = (file.parent.name.removeprefix("checkpoint-") for file in folder.glob(f"checkpoint-*/{STATE_FILE}"))
    return sorted(int(name) for name in names if name.isdecimal())


def _find_latest(folder: Path) -> tuple[int, TrainerState | None]:
    """Return the step and the state of the newest complete checkpoint, or None.

    Raises:
        FormatError: its state is damaged.
    """
    steps = _complete_steps(folder)
    if not steps:
        return 0, None
    file = folder / f"checkpoint-{steps[-1]}" / STATE_FILE
    try:
        state = TrainerState.load_from_json(str(file))
        kept: Any = state.stateful_callbacks
        position = kept[_POSITION]
        count, epoch, offset = (operator.index(position[key]) for key in ("count", "epoch", "offset"))
        if not 0 <= offset < count or not 0 <= epoch <= state.global_step:
            raise ValueError("its position is outside of the rows")
        return steps[-1], state
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise FormatError(f"{file}: cannot be read, {error}. Remove {file.parent}") from error
