"""Optimizer steps of tenants: one, or several at once with the same bits."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from shardwise.bank.tenant import Tenant, TenantWindow
from shardwise.execution.world import World


def sum_all(world: World, tensors: Sequence[torch.Tensor]) -> None:
    """Sum each tensor over the ranks, in place. Collective: yes, once for each.

    Each has a sum of its own: in a joint one, the order of its ranks would depend on the others. Called in a phase
    of ``world``: if another rank fails or is lost meanwhile, all ranks raise the same error.
    """
    if world.size > 1:
        works = [dist.all_reduce(values, group=world.group, async_op=True) for values in tensors]
        for work in works:
            assert work is not None, "this rank is in the group"
            world.wait_for(work)


def step_together(tenants: Sequence[Tenant], scales: Sequence[float]) -> list[tuple[bool, float]]:
    """Step each tenant with its gradient times its scale, unless that is not finite. Then clear the gradients.

    The same bits as one after the other. The host waits for the device once.

    Returns, for each, whether it was taken, and the norm before it was clipped.

    Raises:
        Exception: as raised by the schedule of a tenant, after the steps of all.
    """
    for tenant, scale in zip(tenants, scales, strict=True):
        if scale != 1.0:
            tenant.gradient.mul_(scale)
    found = [torch.nn.utils.get_total_norm(list(tenant.gradients.values())) for tenant in tenants]
    norms: list[float] = torch.stack(found).tolist()
    stepping = [tenant for tenant, norm in zip(tenants, norms, strict=True) if math.isfinite(norm)]
    for tenant, norm in zip(tenants, norms, strict=True):
        if math.isfinite(norm):
            tenant.clip(norm)
    _step_all([tenant.optimizer for tenant in stepping])
    for tenant in tenants:
        tenant.gradient.zero_()
        tenant.window = TenantWindow()
        tenant.windows += 1
    _step_schedules(stepping)
    return [(math.isfinite(norm), norm) for norm in norms]


def _step_schedules(tenants: Sequence[Tenant]) -> None:
    """Step the schedule of each tenant, and then raise the first error: it changes no other tenant."""
    failures: list[Exception] = []
    for tenant in tenants:
        tenant.steps += 1
        try:
            tenant.schedule.step()
        except Exception as error:
            failures.append(error)
    if failures:
        raise failures[0]


def _step_all(optimizers: Sequence[Optimizer]) -> None:
    """Step optimizers, those of one class with equal settings by one call.

    On an accelerator, torch steps all parameters of an optimizer by a few kernels.
    """
    alike: dict[str, list[Optimizer]] = {}
    for optimizer in optimizers:
        settings = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
        alike.setdefault(f"{type(optimizer).__name__} {settings}", []).append(optimizer)
    for first, *others in alike.values():
        with _lent(first, others):
            for optimizer in (first, *others):  # the others have nothing to step, and count
                optimizer.step()


@contextmanager
def _lent(first: Optimizer, others: Sequence[Optimizer]) -> Iterator[None]:
    """Give one optimizer the parameters and states of others, in the block."""
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
