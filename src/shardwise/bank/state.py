"""A tenant's whole state, as plain data and as tensors, and back: strict, and the same for any number of ranks.

[Note: An open window] Of a window that is not over, each rank has the gradient of its own rows. The window's is
their sum; that is what is taken out, with the tokens of all ranks. What goes on from it gives each rank a slice of
the sum, and nothing of the rest: ranks' gradients are summed at the end of the window whatever part each has. On
one rank this is to the bit, on several the order of a sum of floats is another.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from shardwise.bank.facts import HOW_STEPPED, TenantFacts, differences, facts_of
from shardwise.bank.optimizers import gathered
from shardwise.bank.tenant import Tenant, TenantWindow
from shardwise.errors import ConfigError
from shardwise.models.optimizers.optimizer_state import set_group
from shardwise.planning.states.matching import OnFault

StateKey = tuple[str, str]
"""A parameter of a tenant's optimizer by its name, and what is kept of it: ("", "exp_avg")."""

_KEYS: Mapping[str, type | tuple[type, ...]] = {
    "adapter": Mapping,
    "base": Mapping,
    "config": Mapping,
    "optimizer": Mapping,
    "optimizer_class": str,
    "schedule": Mapping,
    "schedule_class": str,
    "max_grad_norm": (int, float),
    "accumulation": int,
    "reduction": str,
    "seed": int,
    "windows": int,
    "steps": int,
    "window": Mapping,
    "gradient": Mapping,
}


# ── taken out ─────────────────────────────────────────────────────────────────────────────────────


def tenant_state(tenant: Tenant, base: Mapping[str, str]) -> dict[str, Any]:
    """A copy of all that a tenant goes on from; ``base`` is what its base is told apart by.

    Collective: where a window is open, or moments are sharded.
    """
    gradient = window_gradient(tenant)
    facts = facts_of(tenant, base)
    moments: dict[int, dict[str, Any]] = {}
    for number, parameter in enumerate(tenant.own.parameters.values()):
        for entry, values in tenant.part.optimizer.state.get(parameter, {}).items():
            moments.setdefault(number, {})[entry] = _whole(tenant, values)
    groups = copy.deepcopy(tenant.part.optimizer.state_dict()["param_groups"])
    return {
        "adapter": {key: values.clone() for key, values in tenant.matrices.items()},
        "base": dict(base),
        "config": dict(facts.config),
        "optimizer": {"state": moments, "param_groups": groups},
        "optimizer_class": facts.optimizer,
        "schedule": copy.deepcopy(facts.schedule_state),
        "schedule_class": facts.schedule,
        "max_grad_norm": facts.max_grad_norm,
        "accumulation": facts.accumulation,
        "reduction": facts.reduction,
        "seed": facts.seed,
        "windows": facts.windows,
        "steps": facts.steps,
        "window": {"micro_batches": facts.micro_batches, "learned_tokens": facts.learned_tokens},
        "gradient": {} if gradient is None else dict(tenant.by_matrix(gradient)),
    }


def _whole(tenant: Tenant, values: Any) -> Any:
    if tenant.has_slices and _is_of_numbers(values):
        return gathered(values, tenant.slices, tenant.world)
    return values.clone() if isinstance(values, torch.Tensor) else copy.deepcopy(values)


def _is_of_numbers(values: Any) -> bool:
    """Whether an optimizer keeps this for each number of a parameter, and not once for all."""
    return isinstance(values, torch.Tensor) and values.ndim > 0


def window_gradient(tenant: Tenant) -> torch.Tensor | None:
    """What all ranks have gathered in the open window, (count,); None between windows. See [Note: An open window].

    Collective: where a window is open, one all-reduce. Memory: a copy of the gradient.
    """
    if not tenant.window.micro_batches:
        return None
    whole = tenant.gradient.clone()
    if tenant.world.size > 1:
        dist.all_reduce(whole, group=tenant.world.group)
    return whole


def moments_of(tenant: Tenant) -> Iterator[tuple[StateKey, torch.Tensor]]:
    """What the optimizer keeps on this rank, as it is.

    Raises:
        ConfigError: something of it is no tensor.
    """
    for name, parameter in tenant.own.parameters.items():
        for entry, values in tenant.part.optimizer.state.get(parameter, {}).items():
            if not isinstance(values, torch.Tensor):
                raise ConfigError(
                    f"{entry} of the optimizer of {tenant.name!r} is a {type(values).__name__}, and only tensors "
                    "are saved; save with state=MatricesOnly()"
                )
            yield (name, entry), values


# ── taken in ──────────────────────────────────────────────────────────────────────────────────────


def room_for_moments(tenant: Tenant, facts: TenantFacts) -> dict[StateKey, torch.Tensor]:
    """Memory for what an optimizer of these settings keeps after so many steps, on this rank; not yet in it."""
    optimizer = tenant.part.optimizer
    settings = {**optimizer.param_groups[0], **_taken_settings(facts.settings)}
    room: dict[StateKey, torch.Tensor] = {}
    for name, parameter in tenant.own.parameters.items():
        for entry, like in _kept_of_one(optimizer, settings, parameter, is_stepped=facts.steps > 0).items():
            size = tuple(parameter.shape) if _is_of_numbers(like) else ()
            room[name, entry] = torch.zeros(size, dtype=like.dtype, device=like.device)
    return room


def _kept_of_one(
    optimizer: Optimizer, settings: Mapping[str, Any], parameter: nn.Parameter, *, is_stepped: bool
) -> dict[str, torch.Tensor]:
    """What an optimizer of this kind keeps of a parameter of one number."""
    single = nn.Parameter(torch.zeros((1,) * parameter.ndim, device=parameter.device))
    kind: Any = type(optimizer)
    made = kind([single], lr=0.1)
    made.param_groups[0].update({key: value for key, value in settings.items() if key != "params"})
    if is_stepped:
        single.grad = torch.zeros_like(single)
        made.step()
    return {entry: values for entry, values in made.state.get(single, {}).items() if values is not None}


def _taken_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in HOW_STEPPED}


def take_facts(tenant: Tenant, facts: TenantFacts) -> None:
    """Have a tenant go on with what is no tensor. If it fails, it is as before.

    Raises:
        ConfigError: its schedule does not take this state.
    """
    schedule = tenant.part.schedule
    before = copy.deepcopy(schedule.state_dict())
    try:
        schedule.load_state_dict(copy.deepcopy(dict(facts.schedule_state)))
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        schedule.load_state_dict(before)
        raise ConfigError(f"this is no state of {tenant.name!r}: its schedule does not take it: {error}") from error
    set_group(tenant.part.optimizer.param_groups[0], _taken_settings(facts.settings))
    tenant.max_grad_norm = float(facts.max_grad_norm)
    tenant.windows, tenant.steps = facts.windows, facts.steps
    tenant.window = TenantWindow(facts.micro_batches, facts.learned_tokens)


def take_moments(tenant: Tenant, room: Mapping[StateKey, torch.Tensor]) -> None:
    """Put filled memory into the optimizer, in place of what it kept."""
    state = tenant.part.optimizer.state
    for name, parameter in tenant.own.parameters.items():
        state.pop(parameter, None)
        own = {entry: values for (whose, entry), values in room.items() if whose == name}
        if own:
            state[parameter] = own


def load_tenant_state(
    tenant: Tenant, state: Mapping[str, Any], base: Mapping[str, str], on_other_base: OnFault
) -> None:
    """Have a tenant go on from a state, whatever it has gathered itself. Collective: yes.

    Raises:
        ConfigError: it is of another adapter, naming what differs; nothing is changed then.
    """

    def check() -> tuple[TenantFacts, dict[StateKey, torch.Tensor]]:
        facts = _facts_in(state)
        if facts is None or (faults := _differences(tenant, facts, state, base, on_other_base)):
            lacks = [key for key, kind in _KEYS.items() if not isinstance(state.get(key), kind)]
            faults = [f"it has no {', '.join(lacks)}"] if facts is None else faults
            raise ConfigError(f"this is no state of {tenant.name!r}:\n  " + "\n  ".join(faults[:20]))
        room = room_for_moments(tenant, facts)
        _fill(tenant, room, state["optimizer"]["state"])
        return facts, room

    facts, room = tenant.world.together(check)
    counts = (facts.windows, facts.steps, facts.micro_batches, facts.learned_tokens)
    tenant.world.require_equal((tenant.name, *counts), "the state that a tenant is given")
    tenant.world.together(lambda: take_facts(tenant, facts))
    take_moments(tenant, room)
    for key, values in tenant.matrices.items():
        values.copy_(state["adapter"][key])
    tenant.gradient.zero_()
    if facts.micro_batches:
        flat = torch.cat([state["gradient"][key].flatten() for key in tenant.shapes])
        tenant.gradient[tenant.own_slice].copy_(flat[tenant.own_slice])


def _facts_in(state: Mapping[str, Any]) -> TenantFacts | None:
    if not all(isinstance(state.get(key), kind) for key, kind in _KEYS.items()):
        return None
    return TenantFacts(
        base=state["base"],
        config=state["config"],
        matrices={key: tuple(values.shape) for key, values in state["adapter"].items()},
        optimizer=state["optimizer_class"],
        settings={key: value for key, value in state["optimizer"]["param_groups"][0].items() if key != "params"},
        schedule=state["schedule_class"],
        schedule_state=state["schedule"],
        max_grad_norm=state["max_grad_norm"],
        accumulation=state["accumulation"],
        reduction=state["reduction"],
        seed=state["seed"],
        windows=state["windows"],
        steps=state["steps"],
        micro_batches=state["window"]["micro_batches"],
        learned_tokens=state["window"]["learned_tokens"],
    )


def _differences(
    tenant: Tenant,
    facts: TenantFacts,
    state: Mapping[str, Any],
    base: Mapping[str, str],
    on_other_base: OnFault,
) -> list[str]:
    if faults := differences(tenant, facts, base, on_other_base):
        return faults
    gradient = {key: tuple(values.shape) for key, values in state["gradient"].items()}
    if facts.micro_batches and gradient != tenant.shapes:
        return ["the gradient of its window is not of its matrices"]
    moments = state["optimizer"]["state"]
    wanted: dict[int, dict[str, tuple[int, ...]]] = {}
    numbers = {name: number for number, name in enumerate(tenant.own.parameters)}
    for (name, entry), room in room_for_moments(tenant, facts).items():
        is_flat = tenant.own.is_flat and _is_of_numbers(room)
        shape = (tenant.trained_count,) if is_flat else tuple(room.shape)
        wanted.setdefault(numbers[name], {})[entry] = shape
    for number in sorted({*wanted, *moments}):
        there = {key: tuple(getattr(own, "shape", ())) for key, own in moments.get(number, {}).items()}
        here = wanted.get(number, {})
        faults += [
            f"the optimizer's {key} is of {there.get(key, 'no')} numbers, and {here.get(key, 'none')} are kept here"
            for key in sorted({*there, *here})
            if there.get(key) != here.get(key)
        ]
    return faults


def _fill(
    tenant: Tenant, room: Mapping[StateKey, torch.Tensor], moments: Mapping[int, Mapping[str, torch.Tensor]]
) -> None:
    numbers = {name: number for number, name in enumerate(tenant.own.parameters)}
    for (name, entry), own in room.items():
        values = moments[numbers[name]][entry]
        own.copy_(values[tenant.own_slice] if tenant.has_slices and own.ndim else values)
