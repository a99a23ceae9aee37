"""Optimizer steps of adapters: one, or several at once with the same bits."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from shardwise.bank.adapter import AdapterStep, BankAdapter, without_tensors
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
    world: World, adapters: Sequence[BankAdapter], changes: Sequence[Mapping[str, Any]]
) -> dict[str, AdapterStep]:
    """Run :func:`step_together`, and mark adapters whose step failed on any rank: ranks have other values of them.

    Raises:
        ShardwiseError: the same on every rank.
    """
    try:
        with world.collective("step the optimizers"):
            return step_together(world, adapters, changes)
    except RankLostError:
        raise
    except ShardwiseError as error:
        # An optimizer may fail on one rank only, so the ranks exchange the names. If that fails, all of them count.
        failed = {adapter.name for adapter in adapters}
        with suppress(ShardwiseError):  # the first error is the one to raise
            names = world.all_gather_object([adapter.name for adapter in adapters if adapter.failure])
            failed = {name for names_of_rank in names for name in names_of_rank} or failed
        for adapter in adapters:
            adapter.failure = error if adapter.name in failed else None
        raise


def step_together(
    world: World, adapters: Sequence[BankAdapter], changes: Sequence[Mapping[str, Any]]
) -> dict[str, AdapterStep]:
    """Sum the gradients over the ranks, scale them, step adapters whose gradient norm is finite, and clear them.

    ``changes`` are settings of each adapter for this step alone. Bitwise equal to stepping one after the other. The
    host waits for the device once. Collective: yes.

    Raises:
        Exception: the first one of an optimizer or a schedule, after the steps of all. Adapters whose step failed
            have it as their ``failure``.
    """
    if not adapters:
        return {}
    sum_all(world, [adapter.gradient for adapter in adapters])
    for adapter in adapters:
        if adapter.gradient_scale != 1.0:
            adapter.gradient.mul_(adapter.gradient_scale)
    # Norms are of the whole gradients: after the sum over the ranks, before clipping. One transfer has all of them.
    norms = torch.stack([torch.linalg.vector_norm(adapter.gradient) for adapter in adapters])
    outcomes: dict[str, AdapterStep] = {}
    stepping = []
    with ExitStack() as settings:
        for adapter, of_adapter, norm in zip(adapters, changes, norms.tolist(), strict=True):
            settings.enter_context(adapter.changing(of_adapter))
            rate = float(adapter.settings.get("lr", math.nan))  # before the schedule changes it
            outcomes[adapter.name] = AdapterStep(math.isfinite(norm), norm, adapter.num_supervised_tokens, rate)
            if math.isfinite(norm):
                adapter.clip(norm)
                stepping.append(adapter)
        _step_optimizers(stepping)
    # Also without a step: the next window begins with zeros, and with other dropout masks.
    for adapter in adapters:
        adapter.zero_grad()
        adapter.windows += 1
    for adapter in stepping:
        adapter.steps += 1
        try:
            adapter.schedule.step()
        except Exception as error:
            adapter.failure = adapter.failure or error
    if failures := [adapter.failure for adapter in stepping if adapter.failure is not None]:
        raise failures[0]
    return outcomes


def _step_optimizers(adapters: Sequence[BankAdapter]) -> None:
    """Step optimizers. Those of one class with equal settings are stepped by one call, in fewer kernels."""
    groups: dict[str, list[BankAdapter]] = {}
    for adapter in adapters:
        key = f"{type(adapter.optimizer).__name__} {without_tensors(adapter.settings)}"
        groups.setdefault(key, []).append(adapter)
    for group in groups.values():
        first, *others = [adapter.optimizer for adapter in group]
        try:
            with _lend_parameters(first, others):
                for optimizer in (first, *others):  # the others have no parameters, but count their steps
                    optimizer.step()
        except Exception as error:  # on this rank, after any number of parameters: no adapter's values are certain
            for adapter in group:
                adapter.failure = error


@contextmanager
def _lend_parameters(first: Optimizer, others: Sequence[Optimizer]) -> Iterator[None]:
    """Move the parameters and states of others to one optimizer, within the block."""
    parameters = first.param_groups[0]["params"]
    lent = [other.param_groups[0]["params"] for other in others]
    try:
        first.param_groups[0]["params"] = [*parameters, *chain.from_iterable(lent)]
        for other in others:
            first.state.update(other.state)
            other.param_groups[0]["params"] = []
        yield
    finally:
        first.param_groups[0]["params"] = parameters
        for other, their_parameters in zip(others, lent, strict=True):
            other.param_groups[0]["params"] = their_parameters
            # The first step of an optimizer creates its state, so it is moved back, not kept in place.
            other.state.update({each: first.state.pop(each) for each in their_parameters if each in first.state})
