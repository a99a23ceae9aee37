"""Optimizer steps of adapters: one, or several at once with the same bits.

A step has two meetings of the ranks. In the first they compare names and settings, so that ranks in different
calls, or with gradients of different sizes, find out before anything is summed. At the end of the second, they have
summed and stepped, or one of them has failed.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from shardwise.bank.adapter import AdapterStep, BankAdapter, without_tensors
from shardwise.core.errors import RankLostError, RankMismatchError, ShardwiseError
from shardwise.ranks.world import World


def sum_all(world: World, tensors: Sequence[torch.Tensor]) -> None:
    """Sum each tensor over the ranks, in place. Collective: one all-reduce for each tensor, all in flight at once.

    In one all-reduce of all, the order of a tensor's summands would depend on the other tensors. Called in a phase
    of ``world``: if another rank fails or is lost meanwhile, all ranks raise the same error.
    """
    if world.size == 1:
        return
    works = [dist.all_reduce(values, group=world.group, async_op=True) for values in tensors]
    for work, values in zip(works, tensors, strict=True):
        assert work is not None, "this rank is in the group"
        world.wait_for(work, on_host=values.device.type == "cpu")


def step_together(
    world: World, adapters: Sequence[tuple[BankAdapter, Mapping[str, Any]]]
) -> dict[str, AdapterStep]:
    """Sum the gradients of adapters over the ranks, and take their steps. Collective: yes.

    Args:
        world: the ranks, which have compared names and settings.
        adapters: adapters that step, each with settings for this step alone.

    Raises:
        ShardwiseError: the same on every rank. Adapters whose step failed on any rank are marked, since ranks have
            other values of them. ``output`` of the error has the outcomes of the others.
    """
    has_summed = False
    outcomes: dict[str, AdapterStep] = {}
    try:
        with world.collective("step the optimizers"):
            sum_all(world, [adapter.gradient for adapter, _ in adapters])
            has_summed = True
            _step(adapters, outcomes)
    except (RankLostError, RankMismatchError):
        raise
    except ShardwiseError as raised:
        reports: list[tuple[bool, list[str]]] = []
        with suppress(ShardwiseError):  # the first error is the one to raise
            # Each rank knows its own failures only. The error itself names one of them.
            names = [adapter.name for adapter, _ in adapters if adapter.failure]
            reports = world.all_gather_object((has_summed, names))
        # An optimizer may fail on one rank only. If no rank knows of an adapter that failed, all of them count.
        failed = {name for _, names_of_rank in reports for name in names_of_rank}
        for adapter, _ in adapters:
            adapter.failure = raised if adapter.name in failed or not failed else None
        raised.output = {name: outcome for name, outcome in outcomes.items() if failed and name not in failed}
        if not reports or not all(has_summed for has_summed, _ in reports):
            # Sums may be in flight, which the next collective would meet.
            text = f"{raised}. Ranks have left one another in a step, so the bank has ended"
            world.fail_later_phases(RankLostError(f"{text}. Start all ranks again, and resume from the last save"))
        raise
    return outcomes


def _step(adapters: Sequence[tuple[BankAdapter, Mapping[str, Any]]], outcomes: dict[str, AdapterStep]) -> None:
    """Scale summed gradients, step adapters whose gradient norm is finite, and clear the gradients. Set outcomes.

    Bitwise equal to stepping one after the other. The host waits for the device once. Collective: no.

    Raises:
        Exception: the first one of an optimizer or a schedule, after the steps of all. Adapters whose step failed
            have it as their ``failure``.
    """
    if not adapters:
        return
    for adapter, _ in adapters:
        # Not before the sum: every rank divides by the tokens of all ranks, so a mean is of all rows, and not of
        # means.
        if adapter.gradient_scale != 1.0:
            adapter.gradient.mul_(adapter.gradient_scale)
    # Norms are of the whole gradients: after the sum over the ranks, before clipping. One transfer has all of them.
    norms = torch.stack([torch.linalg.vector_norm(adapter.gradient) for adapter, _ in adapters])
    stepping = []
    # Ends before schedules step: restoring lr afterwards would undo what a schedule has set.
    with ExitStack() as settings:
        for (adapter, changes), norm in zip(adapters, norms.tolist(), strict=True):
            settings.enter_context(adapter.changing(changes))
            rate = float(adapter.settings.get("lr", math.nan))  # before the schedule changes it
            outcomes[adapter.name] = AdapterStep(math.isfinite(norm), norm, adapter.num_supervised_tokens, rate)
            if math.isfinite(norm):
                adapter.clip(norm)
                stepping.append(adapter)
        _step_optimizers(stepping)
    # Even without a step: the next window begins with zeros, and with other dropout masks.
    for adapter, _ in adapters:
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


def _step_optimizers(adapters: Sequence[BankAdapter]) -> None:
    """Step optimizers. Those of one class with equal settings are stepped by one call, in fewer kernels."""
    # Steps are elementwise, so one call over several parameters has the bits of one call for each.
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
        # The settings of all are equal, so those of the first one's group are theirs.
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
