"""Calls with rows of many adapters: checks them, composes passes, runs them, or rolls back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from shardwise.bank.adapter import AdapterState, BankAdapter
from shardwise.bank.compose import ComposedPass, Unit, compose_passes, pad_length
from shardwise.bank.gathers import CountedGather, are_in_step
from shardwise.bank.kernels import row_keys, stable_key
from shardwise.bank.losses import LOSSES, complete_config
from shardwise.bank.memory import estimate_pass
from shardwise.bank.passes import FusedPass, PlacedRequest, PlannedPass, SharedBase
from shardwise.bank.rows import Request, UnpaddedRow, no_random_numbers, parse_rows, require_not_compiled
from shardwise.core.errors import ConfigError, RankLostError, RankMismatchError, ShardwiseError, TrainingError
from shardwise.core.formatting import in_bytes
from shardwise.fsdp.named_tensors import reshard
from shardwise.ranks.outcomes import at_phase
from shardwise.ranks.world import Exchange
from shardwise.transfer.memory import trim_heap


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """What a rank tells the others of a request.

    Attributes:
        description: adapter, loss and settings, which must be equal on all ranks, as text.
        group_size: rows that share a pass. None for all of a rank.
        lengths: tokens of each row.
        num_targets: positions of each row with a target that counts.
        width: targets of a position (K), the most of any row.
    """

    description: str
    group_size: int | None
    lengths: tuple[int, ...]
    num_targets: tuple[int, ...]
    width: int


@dataclass
class PassSums:
    """Results of the passes of a call, of one rank or of all.

    Attributes:
        losses: sums of the losses by request.
        failures: errors of losses that raised, by request.
        logprobs: by request and row, log probabilities of the rows of this rank, or of all on the first.
    """

    losses: dict[int, float] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    logprobs: list[list[torch.Tensor]] = field(default_factory=list)


@dataclass(frozen=True)
class RowCall:
    """The rows of one call of the bank, checked, and cut into passes that all ranks run together.

    Attributes:
        base: the base.
        requests: the requests, with the rows of this rank.
        counts: counts of the rows by rank and request.
        passes: the passes, as many and as long on all ranks.
        logprobs: by request and number of row, log probabilities of this rank's rows.
        num_top: number of the most probable tokens that are returned for each position, too.
        top: their log probabilities and ids, (positions, num_top) each.
    """

    base: SharedBase
    requests: list[PlacedRequest]
    counts: Sequence[Sequence[RequestCounts]]
    passes: list[PlannedPass]
    logprobs: list[dict[int, torch.Tensor]] = field(default_factory=list)
    num_top: int = 0
    top: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def trained_requests(self) -> dict[str, list[int]]:
        """Return the requests with a backward pass by adapter."""
        numbers: dict[str, list[int]] = {}
        for number, placed in enumerate(self.requests):
            if placed.request.backward and placed.adapter is not None:
                numbers.setdefault(placed.adapter.name, []).append(number)
        return numbers

    def count_targets(self, numbers: Iterable[int]) -> int:
        """Return the number of positions of requests with a target that counts, on all ranks."""
        return sum(sum(of_rank[number].num_targets) for of_rank in self.counts for number in numbers)

    def describe(self, failures: Mapping[int, str]) -> str:
        """Describe losses that raised, by request."""
        return "; ".join(
            f"the loss of {describe_adapter(self.requests[number].request.adapter)} raised, {text}"
            for number, text in failures.items()
        )

    def run(self, *, gather: bool = False) -> PassSums:
        """Run passes on all ranks, sum their results, and accumulate gradients. Collective: yes.

        An adapter with a loss that raises has the gradient from before the call, and those of the others are
        accumulated.

        Args:
            gather: True for the log probabilities of all ranks' rows on the first rank, and none on the others.

        Raises:
            ShardwiseError: the same on every rank. A note names the adapters. Gradients are restored.
            RankLostError: see :func:`collective_passes`. Gradients are restored.
        """
        adapters = {placed.adapter.name: placed.adapter for placed in self.requests if placed.adapter is not None}
        trained = self.trained_requests()
        copies: dict[str, torch.Tensor] = {}
        to_restore: Collection[str] = ()
        names = []
        for number, placed in enumerate(self.requests):
            if any(of_rank[number].lengths for of_rank in self.counts):
                names.append(placed.request.adapter)
        try:
            with collective_passes(self.base, "compute the pass", names, self._sum) as exchange:
                # A window without micro-batches has a gradient of zeros, of which no copy is needed.
                copies.update(
                    (name, adapters[name].gradient.clone()) for name in trained if adapters[name].micro_batches
                )
                # The backward pass adds to the gradients in place, so after a failure on any rank all of them are
                # restored. Not before all copies exist.
                to_restore = trained
                exchange.local = self._run_passes()
            sums: PassSums = exchange.result
            sums.logprobs = self._collect_logprobs(gather=gather)
            to_restore = [name for name, numbers in trained.items() if sums.failures.keys() & numbers]
        finally:
            for name in to_restore:
                if name in copies:
                    adapters[name].gradient.copy_(copies[name])
                else:
                    adapters[name].gradient.zero_()
        return sums

    def _collect_logprobs(self, *, gather: bool) -> list[list[torch.Tensor]]:
        """Return log probabilities by request and row: passes have other orders. Collective: with ``gather``."""
        logprobs = [[of_request[row] for row in sorted(of_request)] for of_request in self.logprobs]
        if not gather:
            return logprobs
        by_rank: list[list[list[torch.Tensor]]] = []
        with self.base.world.all_reduce("gather the outputs", by_rank.extend) as exchange:
            exchange.local = [[values.cpu() for values in of_request] for of_request in logprobs]
        # Of each request, the rows of rank 0, then those of rank 1. ``by_rank`` is empty on all but the first.
        gathered: list[list[torch.Tensor]] = [[] for _ in logprobs]
        for of_rank in by_rank:
            for of_request, values_of_rank in zip(gathered, of_rank, strict=True):
                of_request += values_of_rank
        return gathered

    def _sum(self, results: Sequence[PassSums]) -> PassSums:
        """Sum the losses of all ranks by request."""
        sums = PassSums()
        for rank, result in zip(self.base.world.global_ranks, results, strict=True):
            for number, value in result.losses.items():
                sums.losses[number] = sums.losses.get(number, 0.0) + value
            # Of a request whose loss raised on several ranks, the first one's error stands for all.
            for number, text in result.failures.items():
                if len(results) > 1:
                    text = f"rank {rank}: {text}"
                sums.failures.setdefault(number, text)
        return sums

    def _run_passes(self) -> PassSums:
        """Run the passes with the rows of this rank. Collective: as the base is."""
        base, is_training = self.base, bool(self.trained_requests())
        keys = self._dropout_keys()
        self.logprobs.extend({} for _ in self.requests)
        sums, routes = PassSums(), []
        with no_random_numbers(base.device) if is_training else evaluating(base.model):
            for planned in self.passes:
                with torch.device("cpu"):  # not the caller's default
                    fused = FusedPass(
                        base, planned, self.requests, keys, is_training=is_training, num_top=self.num_top
                    )
                fused.forward()
                # A loss that raises must not keep this rank from the backward pass, in which the others gather.
                sums.failures |= fused.compute_losses()
                if is_training:
                    fused.backward()
                # Polls, so that the failure of another rank ends the wait. sum_losses() would block.
                base.wait_for_device()
                # Partial sums of this rank: all_reduce adds those of the others.
                losses, not_finite = fused.sum_losses()
                for number, loss in losses.items():
                    sums.losses[number] = sums.losses.get(number, 0.0) + loss
                sums.failures |= dict.fromkeys(not_finite, "FloatingPointError: its gradient is not finite")
                for placed_row, logprobs in fused.collect_logprobs():
                    self.logprobs[placed_row.request_number][placed_row.row_number] = logprobs
                if self.num_top:
                    self.top.update(fused.collect_top())
                routes.append(fused.route)
        # Only now: a rank that raises alone between two gathers would leave the others waiting in the next.
        if is_training:
            for route in routes:
                route.require_reached()
        return sums

    def _dropout_keys(self) -> list[list[int | None]]:
        """Return the key of each row of this rank, by request. None without a backward pass.

        It depends on the place of the row among all rows of the adapter in this call, on all ranks. So masks do not
        depend on the number of ranks, or on the passes.
        """
        rank = self.base.world.rank
        keys: list[list[int | None]] = []
        num_rows: Counter[str] = Counter()
        for number, placed in enumerate(self.requests):
            adapter = placed.adapter
            if adapter is None or not placed.request.backward:
                keys.append([None] * len(placed.rows))
                continue
            by_rank = [len(of_rank[number].lengths) for of_rank in self.counts]
            # 4 rows of the adapter are in earlier requests, and ranks have 2 and 3 of this one: those of rank 1 are
            # numbers 4 + 2 = 6 to 8.
            first = num_rows[adapter.name] + sum(by_rank[:rank])
            num_rows[adapter.name] += sum(by_rank)
            key = stable_key(adapter.options["seed"], adapter.windows, adapter.micro_batches)
            keys.append(list[int | None](row_keys(key, first, by_rank[rank]).tolist()))
        return keys


@contextmanager
def collective_passes(
    base: SharedBase, what: str, names: Sequence[str | None], reduce_fun: Callable[[list[Any]], object]
) -> Iterator[Exchange]:
    """Return a block in which all ranks make the same passes through the base. Its exchange has the results.

    Collective: yes. After an error the base can be used again, unless the bank has ended.

    Args:
        base: the base.
        what: name of the phase.
        names: adapters of the passes, for errors.
        reduce_fun: of the results of all ranks.

    Raises:
        RankLostError: a rank is lost, or has left the others in a gather. See [Note: Left in a gather] in
            ``bank/gathers.py``.
        ShardwiseError: the same on every rank. A note names the adapters.
    """
    gathers = CountedGather(base.world)
    try:
        with base.world.all_reduce(what, reduce_fun) as exchange:
            if base.world.size > 1:
                gathers.install(base.model)
            yield exchange
    except BaseException as error:
        base.recover()
        # Ctrl-C, which is not exchanged.
        if not isinstance(error, ShardwiseError):
            raise
        listed = ", ".join(dict.fromkeys(map(describe_adapter, names)))
        if isinstance(error, RankLostError):
            error.add_note(f"This was a pass of {listed}.")
            raise
        # All ranks are here: the block has raised one error on all of them.
        if not are_in_step(base.world.global_ranks, base.world.all_gather_object(gathers.counts)):
            text = f"{error}. It left a pass of {listed} in which other ranks wait for it, so the bank has ended"
            ended = RankLostError(f"{text}. Start all ranks again, and resume from the last save")
            base.world.fail_later_phases(ended)
            raise at_phase(ended, error.phase) from error
        error.add_note(f"This was a pass of {listed}; all of it is discarded.")
        raise


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode without gradients. Afterwards restore each module's mode, and reshard.

    Not in the caller's inference mode: FSDP2's first gather would create buffers that no backward pass can use (so
    the calls that train leave it, too).
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.inference_mode(mode=False), torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        reshard(model)


def plan_call(
    base: SharedBase, requests: object, adapters: Mapping[str, BankAdapter], *, is_training: bool, num_top: int = 0
) -> RowCall:
    """Return a call with the rows of this rank, checked, counted and planned on all ranks. Collective: yes.

    Args:
        base: the base.
        requests: a list of (name, rows) or of :class:`~shardwise.bank.rows.Request`.
        adapters: all adapters of the bank.
        is_training: False without backward passes, whatever the requests say.
        num_top: number of the most probable tokens that are returned for each position, too.

    Raises:
        ConfigError, RankMismatchError, TrainingError: the same on every rank.
    """
    # Each rank checks and counts its own rows.
    with base.world.all_gather("check the rows") as exchange:
        require_not_compiled(base.model)
        placed, counts_here = [], []
        for request in _require_requests(requests):
            request = request if is_training else replace(request, backward=False)
            adapter = None if request.adapter is None else get_usable_adapter(adapters, request.adapter)
            if request.backward:
                _require_trainable(adapter)
            config = _require_loss(request, adapter)
            rows = _parse_request(base, request, adapter)
            placed.append(PlacedRequest(request, adapter, config, rows))
            counts_here.append(_count_rows(base, request, rows))
        exchange.local = counts_here, base.free_bytes()
    # From here on each rank computes the same from what was exchanged, so all have the same passes, and the same
    # errors.
    counts = [of_rank for of_rank, _ in exchange.result]
    free_bytes: Sequence[int | None] = [free for _, free in exchange.result]
    require_equal_requests(counts, base.world.global_ranks)
    units_by_rank = [_group_into_units(of_rank) for of_rank in counts]
    units = [[unit for unit, _ in of_rank] for of_rank in units_by_rank]
    passes = []
    for plan in compose_passes(units, longest=base.max_length, max_tokens=base.max_tokens_per_pass):
        by_rank: list[list[tuple[int, int]]] = []  # (request, row) of each row of the pass
        num_targets: list[int] = []
        widths: list[int] = []
        for of_rank, units_of_rank, numbers in zip(counts, units_by_rank, plan.units, strict=True):
            rows_of_rank = [row for number in numbers for row in units_of_rank[number][1]]
            by_rank.append(rows_of_rank)
            num_targets.append(sum(of_rank[request].num_targets[row] for request, row in rows_of_rank))
            widths.append(max((of_rank[request].width for request, _ in rows_of_rank), default=1))
        free_bytes = _require_memory(base, plan, placed, by_rank, num_targets, widths, free_bytes)
        # As many as the rank with the most targets needs: FSDP2 may gather the output layer for each chunk.
        num_chunks = max(-(-max(num_targets) // base.chunk_positions), 1)
        passes.append(PlannedPass(plan.tokens, num_chunks, tuple(by_rank[base.world.rank])))
    call = RowCall(base, placed, counts, passes, num_top=num_top)
    for requests_of_adapter in call.trained_requests().values():
        adapter = placed[requests_of_adapter[0]].adapter
        assert adapter is not None
        if adapter.scales_before_backward:
            # The divisor counts the targets of all ranks, since the gradients of all ranks are summed.
            scale = 1 / max(call.count_targets(requests_of_adapter), 1)
            for number in requests_of_adapter:
                placed[number] = replace(placed[number], scale=scale)
    return call


def _require_requests(requests: object) -> list[Request]:
    """Return requests, from their short form too. Raise ConfigError unless they are a list of them."""
    if not isinstance(requests, list | tuple) or not all(map(_is_request, requests)):
        raise ConfigError(
            "requests: is not a list of (name, rows). Pass one, with None as the name of the base, or a list of "
            "Requests"
        )
    return [entry if isinstance(entry, Request) else Request(*entry) for entry in requests]


def _is_request(entry: object) -> bool:
    if isinstance(entry, Request):
        return True
    return isinstance(entry, list | tuple) and len(entry) == 2 and isinstance(entry[0], str | None)


def _require_loss(request: Request, adapter: BankAdapter | None) -> dict[str, Any]:
    """Return the settings of a request's loss. Raise ConfigError if the request is invalid."""
    who, size = describe_adapter(request.adapter), request.group_size
    backward, config = request.backward, request.loss_config
    if not isinstance(backward, bool) or not isinstance(config, Mapping):  # type: ignore[redundant-expr]
        raise ConfigError(f"{who}: backward={backward!r} is not a bool, or loss_config not a dict")
    if size is not None and (type(size) is not int or size < 1):
        raise ConfigError(f"{who}: group_size={size!r}: pass 1 or more, or None for all rows")
    if isinstance(request.loss, str):
        return complete_config(who, request.loss, request.loss_config)
    if not callable(request.loss):
        raise ConfigError(f"{who}: loss={request.loss!r}: is not a name or a function. Use {', '.join(LOSSES)}")
    if request.backward and adapter is not None and adapter.options["reduction"] != "sum":
        raise ConfigError(f"{who}: a loss of your own needs reduction='sum'. Its results are summed over groups")
    return dict(request.loss_config)


def _parse_request(base: SharedBase, request: Request, adapter: BankAdapter | None) -> list[UnpaddedRow]:
    # Rows have weights and what a named loss needs. A loss of the caller's own gets whatever they have.
    who = describe_adapter(request.adapter)
    rows = parse_rows(
        who,
        request.rows,
        vocab_size=base.vocab_size,
        longest=base.max_length,
        may_have_weights=adapter is None or adapter.options["reduction"] == "sum",
        loss=request.loss if isinstance(request.loss, str) else None,
    )
    if request.group_size is not None and len(rows) % request.group_size:
        raise ConfigError(f"{who}: {len(rows)} rows are not groups of {request.group_size}. Pass whole groups")
    return rows


def _count_rows(base: SharedBase, request: Request, rows: Sequence[UnpaddedRow]) -> RequestCounts:
    """Count the rows of a request on this rank. Raise ConfigError if a group does not fit into a pass."""
    lengths = tuple(len(row.input_ids) for row in rows)
    num_targets = tuple(len(row.positions) for row in rows)
    width = max((row.targets[0].numel() for row in rows), default=1)
    # Ranks cannot compare functions, so a loss of the caller's own counts by its name.
    loss = request.loss if isinstance(request.loss, str) else getattr(request.loss, "__qualname__", "")
    settings = f"{loss} {sorted(request.loss_config.items())} {request.backward} {request.group_size}"
    description = f"{describe_adapter(request.adapter)} ({settings})"
    counts = RequestCounts(description, request.group_size, lengths, num_targets, width)
    # Here, before ranks meet, so that the error is raised on all. Rows that fit a pass alone may be in any.
    for unit, _ in _group_into_units([counts]):
        tokens = pad_length(unit.length, longest=base.max_length)
        if unit.num_rows * tokens > base.max_tokens_per_pass:
            raise ConfigError(
                f"{describe_adapter(request.adapter)}: {unit.num_rows} rows of up to {unit.length} tokens, which "
                f"must share a pass, have {unit.num_rows * tokens} with padding. A pass has at most "
                f"{base.max_tokens_per_pass}. Pass shorter rows, or a larger max_tokens_per_pass"
            )
    return counts


def _group_into_units(counts: Sequence[RequestCounts]) -> list[tuple[Unit, list[tuple[int, int]]]]:
    """Return the units of a rank, each with (request, row) of its rows."""
    # A request with 4 rows in groups of 2 has the units [(0, 0), (0, 1)] and [(0, 2), (0, 3)]. With ``group_size``
    # None it has one, or none without rows.
    units = []
    for request, entry in enumerate(counts):
        size = entry.group_size or max(len(entry.lengths), 1)
        # Groups of one size may be in one column, whosever they are. A whole request has its own.
        kind = (0, request) if entry.group_size is None else (size,)
        for start in range(0, len(entry.lengths), size):
            unit = Unit(max(entry.lengths[start : start + size]), size, kind)
            units.append((unit, [(request, row) for row in range(start, start + size)]))
    return units


def require_equal_requests(counts: Sequence[Sequence[RequestCounts]], global_ranks: Sequence[int]) -> None:
    """Check that ranks have the same requests.

    Args:
        counts: by rank and request.
        global_ranks: the ranks in the default group, for errors.

    Raises:
        RankMismatchError: ranks name different adapters, name them in a different order, or pass different losses
            or settings.
    """
    requests = [[entry.description for entry in of_rank] for of_rank in counts]
    for rank, of_rank in zip(global_ranks, requests, strict=True):
        if of_rank != requests[0]:
            listed, first = (", ".join(each) or "none" for each in (of_rank, requests[0]))
            raise RankMismatchError(
                f"rank {rank} has rows of {listed}, and rank {global_ranks[0]} of {first}. Name the same adapters "
                "in the same order on every rank, with the same losses, settings, backward and group_size, if "
                "needed with a batch of no rows"
            )


def _require_memory(
    base: SharedBase,
    plan: ComposedPass,
    requests: Sequence[PlacedRequest],
    by_rank: Sequence[Sequence[tuple[int, int]]],
    num_targets: Sequence[int],
    widths: Sequence[int],
    free_bytes: Sequence[int | None],
) -> Sequence[int | None]:
    """Check that a pass fits into the free memory of each rank, as estimated by :func:`estimate_pass`.

    On the CPU each rank is compared with the whole free memory of the host, which ranks share. Unknown memory is
    not checked. Collective: on the CPU, if the pass does not fit: all ranks then return freed memory to the system,
    and measure again.

    Returns:
        The free memory, measured again if freed memory was returned.

    Raises:
        TrainingError: they do not fit. The same on every rank.
    """
    # Of all ranks: one with rows of the base alone has the backward pass of the others.
    trained = [requests[number] for rows in by_rank for number in {request for request, _ in rows}]
    adapters = [each.adapter for each in trained if each.request.backward and each.adapter is not None]
    needed_bytes = []
    for rank, free in enumerate(free_bytes):
        rows = len(by_rank[rank])
        needed_bytes.append(estimate_pass(base, adapters, rows, plan.tokens, num_targets[rank], widths[rank], free))
    shortage = _find_shortage(needed_bytes, free_bytes)
    if shortage is not None and base.device.type == "cpu":
        free_bytes = _return_freed_memory(base)
        shortage = _find_shortage(needed_bytes, free_bytes)
    if shortage is None:
        return free_bytes
    rank, free = shortage
    rows = len(by_rank[rank])
    names = ", ".join(
        dict.fromkeys(describe_adapter(requests[number].request.adapter) for number, _ in by_rank[rank])
    )
    raise TrainingError(
        f"a pass of {names} has {rows * plan.tokens} positions ({rows} rows of {plan.tokens} tokens) and needs "
        f"about {in_bytes(needed_bytes[rank])} on rank {base.world.global_ranks[rank]}, where {in_bytes(free)} is "
        f"free. Pass fewer rows in a call, or less than max_tokens_per_pass={base.max_tokens_per_pass}"
    )


def _find_shortage(needed_bytes: Sequence[int], free_bytes: Sequence[int | None]) -> tuple[int, int] | None:
    """Return the first rank that needs more memory than is free, and its free bytes. None if all have enough."""
    for rank, (needed, free) in enumerate(zip(needed_bytes, free_bytes, strict=True)):
        if free is not None and needed > free:
            return rank, free
    return None


def _return_freed_memory(base: SharedBase) -> Sequence[int | None]:
    """Return freed memory that glibc keeps to the system, and then the free bytes of each rank. Collective: yes."""
    with base.world.collective("return freed memory"):
        trim_heap()
    # Once all ranks have, because those of one host share its memory.
    with base.world.all_gather("measure the free memory") as exchange:
        exchange.local = base.free_bytes()
    result: Sequence[int | None] = exchange.result
    return result


def describe_adapter(name: str | None) -> str:
    return "the base" if name is None else repr(name)


def get_usable_adapter(adapters: Mapping[str, BankAdapter], name: object) -> BankAdapter:
    """Return the adapter of this name, or raise ConfigError if there is none or its last step failed."""
    adapter = find_adapter(adapters, name)
    if adapter.state is AdapterState.FAILED:
        raise ConfigError(f"{name!r}: a step failed, {adapter.failure}. Call load_state_dict, or delete it")
    adapter.bring_back()
    return adapter


def find_adapter(adapters: Mapping[str, BankAdapter], name: object) -> BankAdapter:
    """Return the adapter of this name, or raise ConfigError."""
    if not isinstance(name, str) or name not in adapters:
        raise ConfigError(f"no adapter named {name!r}. Adapters: {', '.join(adapters) or 'none'}")
    return adapters[name]


def _require_trainable(adapter: BankAdapter | None) -> None:
    """Raise ConfigError for the base, for a copy for sampling, and for an adapter whose window is full."""
    if adapter is None:
        raise ConfigError("None is the base, which is not trained. Name an adapter, or pass backward=False")
    adapter.require_trained()
    if adapter.state is AdapterState.FULL:
        raise ConfigError(
            f"adapter {adapter.name!r}: has accumulated all of its {adapter.micro_batches} micro-batches. Call "
            f"optim_step({adapter.name!r}) before forward_backward"
        )
