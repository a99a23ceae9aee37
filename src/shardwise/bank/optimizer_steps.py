"""Optimizer steps of adapters: one, or several at once, after one exchange of gradients.

[Note: Agreed in the exchange] Gradients of all adapters of a call are summed by one all-reduce. Ranks that pass
other adapters or settings must not sum: their gradients differ in size. So the all-reduce begins with the bytes of
a digest of all settings. Unless their sums are this rank's bytes times the number of ranks, no rank sums or steps.
The first all-reduce has one size, whatever the gradients are, and has all of them if they are small. A rank with
invalid arguments takes part with NaN. Gradients are summed in a copy, so that they do not change if ranks disagree.

The ranks meet once, at the end of the call, where they exchange errors, and the settings if these differ. (Ranks
that are in different calls wait for each other until the process group's timeout.)
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from shardwise.bank.adapter import AdapterStep, BankAdapter, without_tensors
from shardwise.core.errors import RankLostError, ShardwiseError
from shardwise.fsdp.torch_private import copy_all, sent
from shardwise.ranks.call_arguments import comparing_arguments
from shardwise.ranks.world import World, repr_digest

_FIRST_NUMBERS: Final = 1 << 16
"""Numbers of the first all-reduce, 256 KiB: the digest, gradients, and zeros if they are fewer."""


def sum_all(world: World, values: torch.Tensor) -> None:
    """Sum a tensor over the ranks, in place. Collective: one all-reduce.

    Called in a phase of ``world``: if another rank fails or is lost meanwhile, all ranks raise the same error.
    """
    work = dist.all_reduce(values, group=world.group, async_op=True)
    assert work is not None, "this rank is in the group"
    world.wait_for(work, on_host=values.device.type == "cpu")


def _sum_if_agreed(
    world: World, device: torch.device, gradients: Sequence[torch.Tensor], settings: Mapping[str, str] | None
) -> bool:
    """Sum gradients over the ranks, in place, and return True, if all ranks pass the same settings.

    None are settings that differ from all others. Collective: one all-reduce, and another one of what does not fit
    into ``_FIRST_NUMBERS``. Memory: a copy of the gradients. See [Note: Agreed in the exchange].
    """
    if world.size == 1:
        return settings is not None
    world.check()  # or a bank that has ended would wait in the all-reduce
    # Sums of bytes are exact in float32 for up to 65,793 ranks.
    digest = [math.nan] * 32 if settings is None else list(map(float, repr_digest(settings)))
    sizes = [len(digest), *(gradient.numel() for gradient in gradients)]
    values = torch.zeros(max(sum(sizes), _FIRST_NUMBERS), device=device)
    header, *copies = values[: sum(sizes)].split(sizes)
    copy_all([header, *copies], [sent(torch.tensor(digest), device), *gradients])
    sum_all(world, values[:_FIRST_NUMBERS])
    if header.tolist() != [world.size * byte for byte in digest]:
        return False
    if len(values) > _FIRST_NUMBERS:
        sum_all(world, values[_FIRST_NUMBERS:])
    copy_all([*gradients], copies)
    return True


def step_together(
    world: World,
    device: torch.device,
    adapters: Sequence[tuple[BankAdapter, Mapping[str, Any]]],
    arguments: Mapping[str, str] | Exception,
) -> dict[str, AdapterStep]:
    """Take the steps of adapters, if all ranks agree on them. Collective: yes. See [Note: Agreed in the exchange].

    Args:
        world: the ranks.
        device: of the adapters.
        adapters: adapters that step, each with settings for this step alone. None with an error.
        arguments: what ranks must have in common, as text by name. Or the error of this rank's arguments.

    Raises:
        ShardwiseError: the same on every rank. Adapters whose step failed on any rank are marked, since ranks have
            other values of them.
    """
    error = arguments if isinstance(arguments, Exception) else None
    settings = None if isinstance(arguments, Exception) else arguments
    is_agreed: bool | None = None
    """None until the ranks have exchanged their gradients."""
    try:
        with comparing_arguments(world, "step the optimizers") as exchange:
            is_agreed = _sum_if_agreed(world, device, [adapter.gradient for adapter, _ in adapters], settings)
            if error is not None:
                raise error
            exchange.local = {} if is_agreed else settings
            outcomes = _step(adapters) if is_agreed else {}
    except RankLostError:
        raise
    except ShardwiseError as raised:
        if is_agreed is not False:
            reports: list[tuple[bool | None, list[str]]] = []
            with suppress(ShardwiseError):  # the first error is the one to raise
                names = [adapter.name for adapter, _ in adapters if adapter.failure]
                reports = world.all_gather_object((is_agreed, names))
            # An optimizer may fail on one rank only. If no rank knows of an adapter that failed, all of them count.
            failed = {name for _, names_of_rank in reports for name in names_of_rank}
            for adapter, _ in adapters:
                adapter.failure = raised if adapter.name in failed or not failed else None
            if not reports or any(agreed is None for agreed, _ in reports):
                text = f"{raised}. Ranks have left one another in a step, so the bank has ended"
                world.end(RankLostError(f"{text}. Start all ranks again, and resume from the last save"))
        raise
    return outcomes


def _step(adapters: Sequence[tuple[BankAdapter, Mapping[str, Any]]]) -> dict[str, AdapterStep]:
    """Scale summed gradients, step adapters whose gradient norm is finite, and clear the gradients.

    Bitwise equal to stepping one after the other. The host waits for the device once. Collective: no.

    Raises:
        Exception: the first one of an optimizer or a schedule, after the steps of all. Adapters whose step failed
            have it as their ``failure``.
    """
    if not adapters:
        return {}
    for adapter, _ in adapters:
        if adapter.gradient_scale != 1.0:
            adapter.gradient.mul_(adapter.gradient_scale)
    # Norms are of the whole gradients: after the sum over the ranks, before clipping. One transfer has all of them.
    norms = torch.stack([torch.linalg.vector_norm(adapter.gradient) for adapter, _ in adapters])
    outcomes: dict[str, AdapterStep] = {}
    stepping = []
    with ExitStack() as settings:
        for (adapter, changes), norm in zip(adapters, norms.tolist(), strict=True):
            settings.enter_context(adapter.changing(changes))
            rate = float(adapter.settings.get("lr", math.nan))  # before the schedule changes it
            outcomes[adapter.name] = AdapterStep(math.isfinite(norm), norm, adapter.num_supervised_tokens, rate)
            if math.isfinite(norm):
                adapter.clip(norm)
                stepping.append(adapter)
        _step_optimizers(stepping)
    # Also without a step: the next window begins with zeros, and with other dropout masks.
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
