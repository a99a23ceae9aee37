"""Optimizer steps of adapters: one, or several at once with the same bits."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from shardwise.bank.adapter import AccumulationWindow, BankAdapter
from shardwise.core.errors import RankLostError, ShardwiseError
from shardwise.ranks.world import World


def sum_all(world: World, tensors: Sequence[torch.Tensor]) -> None:
    """Sum each tensor over the ranks, in place. Collective: one all-reduce for each tensor.

    In one all-reduce of all, the order of a tensor's summands would depend on the other tensors. Called in a phase
    of ``world``: if another rank fails or is lost meanwhile, all ranks raise the same error.
    """
    if world.size > 1:
        works = [dist.all_reduce(values, group=world.group, async_op=True) for values in tensors]
        for work in works:
            assert work is not None, "this rank is in the group"
            world.wait_for(work)


def step_and_mark(
    world: World, adapters: Sequence[BankAdapter], scales: Sequence[float]
) -> list[tuple[bool, float]]:
    """Run :func:`step_together`, and mark adapters whose step failed on any rank: ranks have other values of them.

    Raises:
        ShardwiseError: the same on every rank.
    """
    try:
        with world.collective("step the optimizers"):
            return step_together(world, adapters, scales)
    except RankLostError:
        raise
    except ShardwiseError as error:
        failed = {adapter.name for adapter in adapters}
        with suppress(ShardwiseError):  # this error came first
            told = world.all_gather_object([adapter.name for adapter in adapters if adapter.failure])
            failed = {name for found in told for name in found} or failed
        for adapter in adapters:
            adapter.failure = error if adapter.name in failed else None
        raise


def step_together(
    world: World, adapters: Sequence[BankAdapter], scales: Sequence[float]
) -> list[tuple[bool, float]]:
    """Sum the gradients over the ranks, scale them, step adapters whose gradient norm is finite, and clear them.

    Bitwise equal to stepping one after the other. The host waits for the device once. Collective: yes.

    Returns:
        For each adapter whether its step was taken, and the norm of its gradient before it was clipped.

    Raises:
        Exception: the first one of an optimizer or a schedule, after the steps of all. Adapters whose step failed
            have it as their ``failure``.
    """
    if not adapters:
        return []
    sum_all(world, [adapter.gradient for adapter in adapters])
    for adapter, scale in zip(adapters, scales, strict=True):
        if scale != 1.0:
            adapter.gradient.mul_(scale)
    found = [torch.nn.utils.get_total_norm(list(adapter.gradients.values())) for adapter in adapters]
    norms: list[float] = torch.stack(found).tolist()
    stepping = [adapter for adapter, norm in zip(adapters, norms, strict=True) if math.isfinite(norm)]
    for adapter, norm in zip(adapters, norms, strict=True):
        if math.isfinite(norm):
            adapter.clip(norm)
    _step_all(stepping)
    for adapter in adapters:
        adapter.gradient.zero_()
        adapter.window = AccumulationWindow()
        adapter.windows += 1
    _step_schedules(stepping)
    if failures := [adapter.failure for adapter in stepping if adapter.failure is not None]:
        raise failures[0]
    return [(math.isfinite(norm), norm) for norm in norms]


def _step_schedules(adapters: Sequence[BankAdapter]) -> None:
    for adapter in adapters:
        adapter.steps += 1
        try:
            adapter.schedule.step()
        except Exception as error:
            adapter.failure = adapter.failure or error


def _step_all(adapters: Sequence[BankAdapter]) -> None:
    """Step optimizers. Those of one class with equal settings are stepped by one call, in fewer kernels."""
    alike: dict[str, list[BankAdapter]] = {}
    for adapter in adapters:
        settings = [
            (key, value.tolist() if isinstance(value, torch.Tensor) else value)
            for key, value in adapter.optimizer.param_groups[0].items()
            if key != "params"
        ]
        alike.setdefault(f"{type(adapter.optimizer).__name__} {settings}", []).append(adapter)
    for group in alike.values():
        first, *others = [adapter.optimizer for adapter in group]
        try:
            with _lent(first, others):
                for optimizer in (first, *others):  # the others have no parameters, but count their steps
                    optimizer.step()
        except Exception as error:  # of some of them, on this rank alone: nobody knows which values are new
            for adapter in group:
                adapter.failure = error


@contextmanager
def _lent(first: Optimizer, others: Sequence[Optimizer]) -> Iterator[None]:
    """Move the parameters and states of others to one optimizer, within the block."""
    parameters = first.param_groups[0]["params"]
    lent = [other.param_groups[0]["params"] for other in others]
    try:
        for other, own in zip(others, lent, strict=True):
            first.param_groups[0]["params"] = [*first.param_groups[0]["params"], *own]
            first.state.update(other.state)
            other.param_groups[0]["params"] = []
        yield
    finally:
        first.param_groups[0]["params"] = parameters
        for other, own in zip(others, lent, strict=True):
            other.param_groups[0]["params"] = own
            other.state.update({each: first.state.pop(each) for each in own if each in first.state})
