"""Optimizer steps of tenants: one, or several at once with the same bits."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from shardwise.bank.adapter import Tenant, TenantWindow
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


def step_and_mark(world: World, tenants: Sequence[Tenant], scales: Sequence[float]) -> list[tuple[bool, float]]:
    """Run :func:`step_together`, and mark tenants whose step failed on any rank: ranks have other values of them.

    Raises:
        ShardwiseError: the same on every rank.
    """
    try:
        with world.collective("step the optimizers"):
            return step_together(world, tenants, scales)
    except RankLostError:
        raise
    except ShardwiseError as error:
        failed = {tenant.name for tenant in tenants}
        with suppress(ShardwiseError):  # this error came first
            told = world.all_gather_object([tenant.name for tenant in tenants if tenant.failure])
            failed = {name for found in told for name in found} or failed
        for tenant in tenants:
            tenant.failure = error if tenant.name in failed else None
        raise


def step_together(world: World, tenants: Sequence[Tenant], scales: Sequence[float]) -> list[tuple[bool, float]]:
    """Sum the gradients over the ranks, scale them, step each tenant whose gradient norm is finite, and clear them.

    Bitwise equal to stepping one after the other. The host waits for the device once. Collective: yes.

    Returns:
        For each tenant whether its step was taken, and the norm of its gradient before it was clipped.

    Raises:
        Exception: the first one of an optimizer or a schedule, after the steps of all. Tenants whose step failed
            have it as their ``failure``.
    """
    if not tenants:
        return []
    sum_all(world, [tenant.gradient for tenant in tenants])
    for tenant, scale in zip(tenants, scales, strict=True):
        if scale != 1.0:
            tenant.gradient.mul_(scale)
    found = [torch.nn.utils.get_total_norm(list(tenant.gradients.values())) for tenant in tenants]
    norms: list[float] = torch.stack(found).tolist()
    stepping = [tenant for tenant, norm in zip(tenants, norms, strict=True) if math.isfinite(norm)]
    for tenant, norm in zip(tenants, norms, strict=True):
        if math.isfinite(norm):
            tenant.clip(norm)
    _step_all(stepping)
    for tenant in tenants:
        tenant.gradient.zero_()
        tenant.window = TenantWindow()
        tenant.windows += 1
    _step_schedules(stepping)
    if failures := [tenant.failure for tenant in stepping if tenant.failure is not None]:
        raise failures[0]
    return [(math.isfinite(norm), norm) for norm in norms]


def _step_schedules(tenants: Sequence[Tenant]) -> None:
    for tenant in tenants:
        tenant.steps += 1
        try:
            tenant.schedule.step()
        except Exception as error:
            tenant.failure = tenant.failure or error


def _step_all(tenants: Sequence[Tenant]) -> None:
    """Step optimizers. Those of one class with equal settings are stepped by one call, in fewer kernels."""
    alike: dict[str, list[Tenant]] = {}
    for tenant in tenants:
        settings = [
            (key, value.tolist() if isinstance(value, torch.Tensor) else value)
            for key, value in tenant.optimizer.param_groups[0].items()
            if key != "params"
        ]
        alike.setdefault(f"{type(tenant.optimizer).__name__} {settings}", []).append(tenant)
    for group in alike.values():
        first, *others = [tenant.optimizer for tenant in group]
        try:
            with _lent(first, others):
                for optimizer in (first, *others):  # the others have no parameters, but count their steps
                    optimizer.step()
        except Exception as error:  # of some of them, on this rank alone: nobody knows which values are new
            for tenant in group:
                tenant.failure = error


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
