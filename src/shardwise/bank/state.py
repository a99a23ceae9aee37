"""A tenant's whole state, as plain data and as tensors, and back: strict, and the same for any number of ranks.

[Note: An open window] Of a window that is not over, each rank has the gradient of its own rows. The window's is
their sum; that is what is taken out, with the tokens of all ranks. What goes on from it gives each rank a slice of
the sum, and nothing of the rest: ranks' gradients are summed at the end of the window whatever part each has. On
one rank this is to the bit, on several the order of a sum of floats is another.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.bank.facts import HOW_STEPPED, TenantFacts, differences, facts_of
from shardwise.bank.optimizers import gathered, wait_for
from shardwise.bank.results import GoesOn
from shardwise.bank.tenant import Tenant, TenantWindow
from shardwise.checkpoints.facts import digest_of
from shardwise.errors import ConfigError
from shardwise.execution.states.checksum import checksums
from shardwise.models.optimizers.optimizer_state import set_group
from shardwise.planning.loads.load_plan import Ignore, Refuse
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
        wait_for(tenant.world, dist.all_reduce(whole, group=tenant.world.group, async_op=True))
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


def require_on_fault(on_not_finite: object) -> None:
    """Raises ConfigError for what is no such mode."""
    if not isinstance(on_not_finite, Refuse | Ignore):
        raise ConfigError(f"on_not_finite={on_not_finite!r}: pass Refuse() or Ignore()")


def not_finite(tensors: Mapping[str, torch.Tensor], allowed: OnFault) -> list[str]:
    """A sentence for each tensor that has values that are not finite, unless that is allowed."""
    return [
        f"{key} has {count} values of {values.numel()} that are not finite; take them by on_not_finite=Ignore()"
        for key, values in tensors.items()
        if not allowed.covers(key) and (count := int((~values.isfinite()).sum()))
    ]


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


@dataclass(frozen=True, slots=True)
class AllowedFaults:
    """What a state may have: another base than the one that is there; values that are not finite."""

    other_base: OnFault
    not_finite: OnFault


@dataclass(frozen=True, slots=True)
class GivenState:
    """A state that fits a tenant: its facts, and memory filled with moments; neither where it is matrices alone."""

    facts: TenantFacts | None
    room: Mapping[StateKey, torch.Tensor]


def agreed_state(
    tenant: Tenant,
    state: Mapping[str, Any],
    allowed: AllowedFaults,
    base: Mapping[str, str],
    names_of_peft: Callable[[], Collection[str]],
) -> GivenState:
    """A state that all ranks are given alike, and that fits; the tenant is as before. Collective: yes.

    Args:
        tenant: that is to take it.
        state: a tenant's, or matrices by PEFT's names.
        allowed: whether values may be infinite, or no numbers; whether the base may be another.
        base: what the base is told apart by.
        names_of_peft: gives the names of all tensors that PEFT saves of the tenant, with embeddings of the base.

    Raises:
        ConfigError: it is of another adapter, naming what differs; or has values that are not finite.
        DisagreementError: ranks are given other values.
    """

    def check() -> GivenState:
        require_on_fault(allowed.not_finite)
        given: object = state
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"the state of {tenant.name!r} is a {type(given).__name__}; pass what state_dict gave"
            )
        room: dict[StateKey, torch.Tensor] = {}
        facts = None if _is_of_peft(given) else _facts_in(given)
        if facts is not None:
            faults = _differences(tenant, facts, given, base, allowed.other_base)
        elif _is_of_peft(given):
            faults = _misfits_of_peft(tenant, given, names_of_peft)
        else:
            lacks = [key for key, kind in _KEYS.items() if not isinstance(given.get(key), kind)]
            faults = [f"it has no {', '.join(lacks)}; nor is it matrices alone, by PEFT's names"]
        if facts is not None and not faults:
            room = room_for_moments(tenant, facts)
            _fill(tenant, room, given["optimizer"]["state"])
        if faults := faults or not_finite(_kept_in(given), allowed.not_finite):
            raise ConfigError(f"this is no state of {tenant.name!r}:\n  " + "\n  ".join(faults[:20]))
        return GivenState(facts, room)

    def told() -> tuple[str, list[tuple[str, int]]]:
        facts = [getattr(given.facts, field.name) for field in fields(given.facts)] if given.facts else []
        return digest_of([tenant.name, *facts]), _sums(state)

    given = tenant.world.together(check)
    tenant.world.require_equal(tenant.world.together(told), f"the state that {tenant.name!r} is given")
    return given


def _is_of_peft(state: Mapping[str, Any]) -> bool:
    """Whether it is tensors by name, and nothing else."""
    return bool(state) and all(isinstance(values, torch.Tensor) for values in state.values())


def _misfits_of_peft(
    tenant: Tenant, state: Mapping[str, torch.Tensor], names_of_peft: Callable[[], Collection[str]]
) -> list[str]:
    found = {key: tuple(values.shape) for key, values in state.items()}
    if found.keys() - tenant.shapes.keys():  # embeddings of the base, which PEFT saves beside adapters on them
        of_base = set(names_of_peft()) - tenant.shapes.keys()
        found = {key: shape for key, shape in found.items() if key not in of_base}
    faults = [
        f"{key}: {found.get(key, 'not there')} in the state, {tenant.shapes.get(key, 'not there')} in the adapter"
        for key in sorted({*found, *tenant.shapes})
        if found.get(key) != tenant.shapes.get(key)
    ]
    for key in found:
        values = state[key]
        if isinstance(values, DTensor) or values.is_meta or not values.is_floating_point():
            kind = f"{type(values).__name__} of {values.dtype} on {values.device}"
            faults.append(f"{key}: is a {kind}; a whole tensor of floating-point numbers is needed")
    return faults


def _kept_in(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Matrices and moments, by names for messages."""
    if _is_of_peft(state):
        return dict(state)
    moments = state["optimizer"]["state"]
    return {
        **state["adapter"],
        **{
            f"optimizer.{number}.{entry}": values
            for number, entries in moments.items()
            for entry, values in entries.items()
            if isinstance(values, torch.Tensor)
        },
    }


def _sums(state: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Every tensor with a number that tells its values apart."""
    gradient = {} if _is_of_peft(state) else state["gradient"]
    tensors = {**_kept_in(state), **{f"gradient of {key}": values for key, values in gradient.items()}}
    return list(zip(tensors, checksums(list(tensors.values())), strict=True))


def go_on(
    tenant: Tenant, state: Mapping[str, Any], facts: TenantFacts, room: Mapping[StateKey, torch.Tensor]
) -> GoesOn:
    """Have a tenant go on from an agreed state, whatever it has gathered itself. Collective: yes.

    Raises:
        ConfigError: its schedule does not take this state; nothing is changed then.
    """
    tenant.world.together(lambda: take_facts(tenant, facts))
    take_moments(tenant, room)
    for key, values in tenant.matrices.items():
        values.copy_(state["adapter"][key])
    tenant.gradient.zero_()
    if facts.micro_batches:
        flat = torch.cat([state["gradient"][key].flatten() for key in tenant.shapes])
        tenant.gradient[tenant.own_slice].copy_(flat[tenant.own_slice])
    return went_on(tenant)


def went_on(tenant: Tenant, base: str = "") -> GoesOn:
    """Where a tenant is in its training; ``base`` says how its base compares with that of the state."""
    window = tenant.window
    return GoesOn(tenant.steps, tenant.windows, window.micro_batches, window.learned_tokens, base)


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
