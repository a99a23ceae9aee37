"""Calls with rows of many adapters: checks them, plans passes, runs them, or rolls back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwise.bank.adapter import AdapterState, BankAdapter
from shardwise.bank.gathers import CountedGather, are_in_step
from shardwise.bank.passes import FusedPass, SharedBase
from shardwise.bank.rows import (
    PassPlan,
    RowCounts,
    RowTensors,
    UnpaddedRow,
    combine_counts,
    no_random_numbers,
    parse_batch,
    plan_passes,
    summarize_rows,
)
from shardwise.core.errors import ConfigError, RankLostError, ShardwiseError, TrainingError
from shardwise.core.formatting import in_bytes
from shardwise.ranks.outcomes import at_phase


@dataclass
class PassSums:
    """Results of the passes of a call, of one rank or of all.

    Attributes:
        losses: sums of the weighted losses by entry.
        num_passes: equal on all ranks.
        failures: errors of losses that raised, by entry.
    """

    losses: dict[int, float] = field(default_factory=dict)
    num_passes: int = 0
    failures: dict[int, str] = field(default_factory=dict)


@dataclass
class RowCall:
    """A call with rows. An entry is an adapter's name with its rows, and each list has one item for each entry.

    Attributes:
        base: the base.
        rows: rows of this rank.
        adapters: the adapter of each entry. None is the base without an adapter.
        agreed: counts of the rows of each entry on all ranks.
        plans: the passes, equal on all ranks.
        chosen: number of adapted layer calls, by how they were computed.
        logprobs: log probabilities of this rank's rows, by entry number.
    """

    base: SharedBase
    rows: list[list[UnpaddedRow]] = field(default_factory=list)
    adapters: list[BankAdapter | None] = field(default_factory=list)
    agreed: list[RowCounts] = field(default_factory=list)
    plans: list[PassPlan] = field(default_factory=list)
    chosen: Counter[str] = field(default_factory=Counter)
    logprobs: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def check(
        self,
        batches: Sequence[tuple[str | None, RowTensors]],
        adapters: Mapping[str, BankAdapter],
        *,
        is_training: bool,
    ) -> list[RowCounts]:
        """Check the batches of this rank. Return counts of their rows.

        Raises:
            ConfigError: a batch or an adapter is invalid.
        """
        _require_pairs(batches)
        self.adapters = [None if name is None else get_adapter(adapters, name) for name, _ in batches]
        if is_training:
            _require_trainable(self.adapters)
        for adapter, (name, batch) in zip(self.adapters, batches, strict=True):
            has_weights = adapter is None or adapter.options["reduction"] == "sum"
            limits = {"vocab_size": self.base.vocab_size, "longest": self.base.max_length}
            self.rows.append(parse_batch(_shown(name), batch, **limits, may_have_weights=has_weights))
        return [summarize_rows(name, own) for (name, _), own in zip(batches, self.rows, strict=True)]

    def plan(self, free_bytes: Sequence[int | None], *, is_training: bool) -> None:
        """Plan the passes, and check that their logits fit into the free memory of each rank. Collective: no.

        The check is a lower bound: 2 bytes for each logit, again for its gradient, and for the entry with the most
        rows a copy and the log-softmax in float32. On the CPU each rank is compared with the whole free memory of
        the host, which ranks share. Unknown memory is not checked.

        Raises:
            TrainingError: they do not fit. The same on every rank.
        """
        base = self.base
        ranks = {adapter.name: adapter.rank for adapter in self.adapters if adapter is not None}
        self.plans = plan_passes(self.agreed, ranks, multiple=base.pad_to, longest=base.max_length)
        for plan in self.plans:
            entries = [self.agreed[number] for number in plan.entries]
            for rank, free in enumerate(free_bytes):
                rows = [entry.rows[rank] for entry in entries]
                logit_bytes = sum(rows) * (4 if is_training else 2) + max(rows) * 8  # of one token and word
                need = logit_bytes * plan.tokens * base.vocab_size
                if free is not None and need > free:
                    names = ", ".join(_shown(entry.name) for entry in entries)
                    number = base.world.global_ranks[rank]
                    raise TrainingError(
                        f"a pass of {names}: the logits of {sum(rows)} rows of {plan.tokens} tokens take at least "
                        f"{in_bytes(need)} on rank {number}, where {in_bytes(free)} is free. Pass fewer rows in a "
                        "call"
                    )

    def accumulate_gradients(self) -> PassSums:
        """Accumulate the gradients of the adapters by forward and backward passes. Collective: yes.

        An adapter whose loss raises has the gradient from before the call, and those of the others are accumulated.

        Raises:
            ShardwiseError: the same on every rank. A note names the adapters. Gradients are restored.
            RankLostError: see :meth:`_run`. Gradients are restored.
        """
        before = [  # by entry. A window without micro-batches has a gradient of zeros
            (adapter.gradient, adapter.gradient.clone() if adapter.window.micro_batches else None)
            for adapter in self.adapters
            if adapter is not None
        ]
        # All, unless the passes succeed on every rank. Numbers are those of entries: training has none of the base.
        restored: Collection[int] = range(len(before))
        try:
            sums = self._run(is_training=True)
            restored = sums.failures
        finally:
            for number in restored:
                gradient, values = before[number]
                gradient.zero_() if values is None else gradient.copy_(values)
        return sums

    def evaluate(self) -> None:
        """Run forward passes only. Collective: yes.

        Raises:
            TrainingError: a loss raised. The message names the adapters.
            ShardwiseError: the same on every rank. A note names the adapters.
            RankLostError: see :meth:`_run`.
        """
        if failures := self._run(is_training=False).failures:
            raise TrainingError(self.describe(failures))

    def describe(self, failures: Mapping[int, str]) -> str:
        """Describe losses that raised, by entry."""
        return "; ".join(
            f"the loss of {_shown(self.agreed[number].name)} raised, {text}" for number, text in failures.items()
        )

    def _run(self, *, is_training: bool) -> PassSums:
        """Run passes on all ranks, and sum their results.

        Raises:
            RankLostError: a rank is lost, or has left the others in a gather. See [Note: Left in a gather].
        """
        base = self.base
        gathers = CountedGather(base.world)
        try:
            # _sum runs on the first rank.
            with base.world.all_reduce("compute the pass", self._sum) as exchange:
                if base.world.size > 1:
                    gathers.install(base.model)
                exchange.local = self._forward_backward() if is_training else self._evaluate()
            sums: PassSums = exchange.result
            return sums
        except BaseException as error:
            base.recover()
            if not isinstance(error, ShardwiseError):
                raise
            names = ", ".join(_shown(entry.name) for entry in self.agreed if sum(entry.rows))
            if isinstance(error, RankLostError):
                error.add_note(f"This was a pass of {names}.")
                raise
            # All ranks are here: the block has raised one error on all of them.
            if not are_in_step(base.world.global_ranks, base.world.all_gather_object(gathers.begun)):
                text = f"{error}. It left a pass of {names} in which other ranks wait for it, so the bank has ended"
                ended = RankLostError(f"{text}. Start all ranks again, and resume from the last save")
                base.world.end(ended)
                raise at_phase(ended, error.phase) from error
            error.add_note(f"This was a pass of {names}; all of it is discarded.")
            raise

    def _sum(self, results: Sequence[PassSums]) -> PassSums:
        """Sum the losses of all ranks by entry. The number of passes is equal on all."""
        sums = PassSums(num_passes=results[0].num_passes)
        for rank, result in zip(self.base.world.global_ranks, results, strict=True):
            for number, value in result.losses.items():
                sums.losses[number] = sums.losses.get(number, 0.0) + value
            for number, text in result.failures.items():
                sums.failures.setdefault(number, f"rank {rank}: {text}" if len(results) > 1 else text)
        return sums

    def _evaluate(self) -> PassSums:
        passes = self._passes(is_training=False)
        sums = PassSums(num_passes=len(passes))
        with _evaluating(self.base.model):
            for each in passes:
                each.forward(self.base.model, self.base.switch)
                sums.failures |= each.compute_losses()
                self._collect(each)
        return sums

    def _forward_backward(self) -> PassSums:
        base = self.base
        # A mean over one micro-batch is divided here. Over several, sums accumulate, and optim_step divides them.
        scales = {
            number: 1 / max(entry.num_supervised_tokens, 1) if scales_before_backward(adapter) else 1.0
            for number, (adapter, entry) in enumerate(zip(self.adapters, self.agreed, strict=True))
        }
        passes = self._passes(is_training=True)
        sums = PassSums(num_passes=len(passes))
        with no_random_numbers(base.device):
            for each in passes:
                each.forward(base.model, base.switch)
                # A loss that raises must not keep this rank from the backward pass, in which the others gather.
                sums.failures |= each.compute_losses(scales)
                each.backward(base.switch)
                # Polls, so that the failure of another rank ends the wait. sum_losses() would block.
                base.wait_for_device()
                sums.losses |= each.sum_losses()
                self._collect(each)
        # Only now: a rank that raises alone between two gathers would leave the others waiting in the next.
        for each in passes:
            each.route.require_reached()
        return sums

    def _passes(self, *, is_training: bool) -> list[FusedPass]:
        return [
            FusedPass(self.base, plan, self.adapters, self.agreed, self.rows, is_training=is_training)
            for plan in self.plans
        ]

    def _collect(self, done: FusedPass) -> None:
        self.chosen.update(done.route.chosen)
        for number, span in done.spans.items():
            self.logprobs[number] = [
                values[: len(row.input_ids) - 1]
                for values, row in zip(done.logprobs[span], self.rows[number], strict=True)
            ]


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode without gradients. Afterwards restore each module's mode, and reshard.

    FSDP2 keeps the root group unsharded after a forward pass for the backward pass, which does not follow here.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
            if isinstance(module, FSDPModule):
                module.reshard()


def open_call(
    base: SharedBase,
    batches: Sequence[tuple[str | None, RowTensors]],
    adapters: Mapping[str, BankAdapter],
    *,
    is_training: bool,
) -> RowCall:
    """Return a call with the rows of this rank, checked, counted and planned on all ranks. Collective: yes.

    Raises:
        ConfigError, RankMismatchError, TrainingError: the same on every rank.
    """
    call = RowCall(base)
    with base.world.all_reduce("check the rows", _combine) as exchange:
        exchange.local = call.check(batches, adapters, is_training=is_training), base.free_bytes()
    call.agreed, free_bytes = exchange.result
    call.plan(free_bytes, is_training=is_training)
    return call


def _combine(
    facts: Sequence[tuple[list[RowCounts], int | None]],
) -> tuple[list[RowCounts], list[int | None]]:
    """Combine the counts of all ranks, and list their free memory by rank."""
    return combine_counts([counts for counts, _ in facts]), [free for _, free in facts]


def _require_pairs(batches: object) -> None:
    """Raise ConfigError unless ``batches`` is a list of (name, rows)."""
    if not isinstance(batches, Sequence) or isinstance(batches, str):
        raise ConfigError(f"batches: is a {type(batches).__name__}, not a list of (name, rows). Pass one")
    for number, entry in enumerate(batches):
        if not isinstance(entry, tuple | list) or len(entry) != 2:
            raise ConfigError(f"batches[{number}]: is a {type(entry).__name__}, not a pair (name, rows). Pass one")
        if not isinstance(entry[0], str | None):
            kind = type(entry[0]).__name__
            raise ConfigError(
                f"batches[{number}]: its name is a {kind}, not a string, or None for the base. Pass one"
            )


def _shown(name: str | None) -> str:
    return "the base" if name is None else repr(name)


def get_adapter(adapters: Mapping[str, BankAdapter], name: object) -> BankAdapter:
    """Return the adapter of this name, or raise ConfigError if there is none or its last step failed."""
    found = find_adapter(adapters, name)
    if found.state is AdapterState.FAILED:
        raise ConfigError(f"{name!r}: a step failed, {found.failure}. Call load_state_dict, or delete it")
    return found


def find_adapter(adapters: Mapping[str, BankAdapter], name: object) -> BankAdapter:
    """Return the adapter of this name, or raise ConfigError."""
    if not isinstance(name, str) or name not in adapters:
        raise ConfigError(f"no adapter named {name!r}. Adapters: {', '.join(adapters) or 'none'}")
    return adapters[name]


def _require_trainable(adapters: Sequence[BankAdapter | None]) -> None:
    """Raise ConfigError for the base, for an adapter that is named twice, and for one whose window is full."""
    names = [adapter.name for adapter in adapters if adapter is not None]
    if len(names) < len(adapters):
        raise ConfigError("None is the base, which is not trained. Name an adapter")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{', '.join(map(repr, twice))} is named twice. Pass an adapter's rows as one batch")
    for adapter in adapters:
        if adapter is not None and adapter.state is AdapterState.FULL:
            raise ConfigError(
                f"the window of {adapter.name!r} is full ({adapter.window.micro_batches} micro-batches). "
                f"Call optim_step({adapter.name!r}) first"
            )


def scales_before_backward(adapter: BankAdapter | None) -> bool:
    """Return whether an adapter's loss is divided by its number of supervised tokens before the backward pass.

    That is possible for a mean over a window of one micro-batch. Otherwise the gradient is divided at the end.
    """
    return (
        adapter is not None
        and adapter.options["reduction"] == "mean"
        and adapter.options["gradient_accumulation_steps"] == 1
    )
