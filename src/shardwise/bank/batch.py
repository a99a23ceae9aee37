"""Calls with rows of many adapters: checks them, plans passes, runs them, or rolls back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

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


@dataclass(frozen=True)
class RowCall:
    """A call with rows. An entry is an adapter's name with its rows, and each list has one item for each entry.

    Attributes:
        base: the base.
        rows: rows of this rank.
        adapters: the adapter of each entry. None is the base without an adapter.
        counts: counts of the rows of each entry on all ranks.
        plans: the passes, equal on all ranks.
        backends: number of adapted layer calls, by how they were computed.
        logprobs: log probabilities of this rank's rows, by entry number.
    """

    base: SharedBase
    rows: list[list[UnpaddedRow]]
    adapters: list[BankAdapter | None]
    counts: list[RowCounts]
    plans: list[PassPlan]
    backends: Counter[str] = field(default_factory=Counter)
    logprobs: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def accumulate_gradients(self) -> PassSums:
        """Accumulate the gradients of the adapters by forward and backward passes. Collective: yes.

        An adapter whose loss raises has the gradient from before the call, and those of the others are accumulated.

        Raises:
            ShardwiseError: the same on every rank. A note names the adapters. Gradients are restored.
            RankLostError: see :meth:`_run`. Gradients are restored.
        """
        copies: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # by entry: training has none of the base
        for adapter in self.adapters:
            assert adapter is not None, "the base is not trained"
            # A window without micro-batches has a gradient of zeros, of which no copy is needed.
            copies.append((adapter.gradient, adapter.gradient.clone() if adapter.micro_batches else None))
        # The backward pass adds to the gradients in place, so after a failure on any rank all of them are restored.
        restored: Collection[int] = range(len(copies))
        try:
            sums = self._run(is_training=True)
            restored = sums.failures
        finally:
            for number in restored:
                gradient, values = copies[number]
                if values is None:
                    gradient.zero_()
                else:
                    gradient.copy_(values)
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
            f"the loss of {_describe(self.counts[number].name)} raised, {text}" for number, text in failures.items()
        )

    def _run(self, *, is_training: bool) -> PassSums:
        """Run passes on all ranks, and sum their results.

        Raises:
            RankLostError: a rank is lost, or has left the others in a gather. See [Note: Left in a gather] in
                ``bank/gathers.py``.
        """
        base = self.base
        gathers = CountedGather(base.world)
        try:
            with base.world.all_reduce("compute the pass", self._sum) as exchange:
                if base.world.size > 1:
                    gathers.install(base.model)
                exchange.local = self._run_passes(is_training=is_training)
            sums: PassSums = exchange.result
            return sums
        except BaseException as error:
            base.recover()
            if not isinstance(error, ShardwiseError):
                raise
            names = ", ".join(_describe(entry.name) for entry in self.counts if sum(entry.rows))
            if isinstance(error, RankLostError):
                error.add_note(f"This was a pass of {names}.")
                raise
            # All ranks are here: the block has raised one error on all of them.
            if not are_in_step(base.world.global_ranks, base.world.all_gather_object(gathers.counts)):
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

    def _run_passes(self, *, is_training: bool) -> PassSums:
        """Run the passes with the rows of this rank. Collective: as the base is."""
        base = self.base
        passes = [
            FusedPass(base, plan, self.adapters, self.counts, self.rows, is_training=is_training)
            for plan in self.plans
        ]
        sums = PassSums(num_passes=len(passes))
        scales = {}
        for number, (adapter, entry) in enumerate(zip(self.adapters, self.counts, strict=True)):
            is_scaled = adapter is not None and adapter.scales_before_backward
            # The divisor counts the tokens of all ranks, since the gradients of all ranks are summed.
            scales[number] = 1 / max(entry.num_supervised_tokens, 1) if is_scaled else 1.0
        with no_random_numbers(base.device) if is_training else _evaluating(base.model):
            for fused in passes:
                fused.forward(base.model, base.switch)
                # A loss that raises must not keep this rank from the backward pass, in which the others gather.
                sums.failures |= fused.compute_losses(scales if is_training else None)
                if is_training:
                    fused.backward(base.switch)
                    # Polls, so that the failure of another rank ends the wait. sum_losses() would block.
                    base.wait_for_device()
                    sums.losses |= fused.sum_losses()
                self._collect(fused)
        # Only now: a rank that raises alone between two gathers would leave the others waiting in the next.
        if is_training:
            for fused in passes:
                fused.route.require_reached()
        return sums

    def _collect(self, fused: FusedPass) -> None:
        """Keep what a pass has computed, without its padding."""
        self.backends.update(fused.route.backends)
        for number, span in fused.spans.items():
            logprobs = fused.logprobs[span]  # (rows of the entry, padded tokens - 1)
            lengths = [len(row.input_ids) for row in self.rows[number]]
            self.logprobs[number] = [row[: length - 1] for row, length in zip(logprobs, lengths, strict=True)]


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
    with base.world.all_reduce("check the rows", partial(_combine, base.world.global_ranks)) as exchange:
        _require_pairs(batches)
        members = [None if name is None else get_adapter(adapters, name) for name, _ in batches]
        if is_training:
            _require_trainable(members)
        rows = []
        for adapter, (name, batch) in zip(members, batches, strict=True):
            has_weights = adapter is None or adapter.options["reduction"] == "sum"
            limits = {"vocab_size": base.vocab_size, "longest": base.max_length}
            rows.append(parse_batch(_describe(name), batch, **limits, may_have_weights=has_weights))
        local = [
            summarize_rows(name, rows_of_entry) for (name, _), rows_of_entry in zip(batches, rows, strict=True)
        ]
        exchange.local = local, base.free_bytes()
    counts, free_bytes = exchange.result
    lora_ranks = {adapter.name: adapter.rank for adapter in members if adapter is not None}
    plans = plan_passes(counts, lora_ranks, multiple=base.pad_to, longest=base.max_length)
    for plan in plans:
        _require_memory(
            base, plan, [counts[number] for number in plan.entries], free_bytes, is_training=is_training
        )
    return RowCall(base, rows, members, counts, plans)


def _combine(
    global_ranks: Sequence[int], summaries: Sequence[tuple[list[RowCounts], int | None]]
) -> tuple[list[RowCounts], list[int | None]]:
    """Combine the counts of all ranks, and list their free memory by rank."""
    return combine_counts([counts for counts, _ in summaries], global_ranks), [free for _, free in summaries]


def _require_memory(
    base: SharedBase,
    plan: PassPlan,
    entries: Sequence[RowCounts],
    free_bytes: Sequence[int | None],
    *,
    is_training: bool,
) -> None:
    """Check that the logits of a pass fit into the free memory of each rank. Collective: no.

    The check is a lower bound: 2 bytes for each logit, again for its gradient, and for the entry with the most
    rows a copy and the log-softmax in float32. On the CPU each rank is compared with the whole free memory of
    the host, which ranks share. Unknown memory is not checked.

    Raises:
        TrainingError: they do not fit. The same on every rank.
    """
    logits_per_row = plan.tokens * base.vocab_size
    for rank, free in enumerate(free_bytes):
        rows = [entry.rows[rank] for entry in entries]
        needed = logits_per_row * (sum(rows) * (4 if is_training else 2) + max(rows) * 8)
        if free is not None and needed > free:
            names = ", ".join(_describe(entry.name) for entry in entries)
            raise TrainingError(
                f"a pass of {names}: the logits of {sum(rows)} rows of {plan.tokens} tokens need at least "
                f"{in_bytes(needed)} on rank {base.world.global_ranks[rank]}, where {in_bytes(free)} is free. Pass "
                "fewer rows in a call"
            )


def _require_pairs(batches: object) -> None:
    if not isinstance(batches, list | tuple) or not all(
        isinstance(entry, list | tuple) and len(entry) == 2 and isinstance(entry[0], str | None)
        for entry in batches
    ):
        raise ConfigError("batches: is not a list of (name, rows). Pass one, with None as the name of the base")


def _describe(name: str | None) -> str:
    return "the base" if name is None else repr(name)


def get_adapter(adapters: Mapping[str, BankAdapter], name: object) -> BankAdapter:
    """Return the adapter of this name, or raise ConfigError if there is none or its last step failed."""
    adapter = find_adapter(adapters, name)
    if adapter.state is AdapterState.FAILED:
        raise ConfigError(f"{name!r}: a step failed, {adapter.failure}. Call load_state_dict, or delete it")
    return adapter


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
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{', '.join(map(repr, repeated))}: is named twice. Pass an adapter's rows as one batch")
    for adapter in adapters:
        if adapter is not None and adapter.state is AdapterState.FULL:
            raise ConfigError(
                f"adapter {adapter.name!r}: has accumulated all of its {adapter.micro_batches} micro-batches. Call "
                f"optim_step({adapter.name!r}) before forward_backward"
            )
