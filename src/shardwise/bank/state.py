"""A tenant's whole state, as plain data and as tensors, and back: strict, and the same for any number of ranks.

[Note: An open window] Of a window that is not over, each rank has the gradient of its own rows. The window's is
their sum; that is what is taken out, with the tokens of all ranks. What goes on from it gives the first rank the
sum, and the others nothing: ranks' gradients are summed at the end of the window whatever part each has. On one
rank this is to the bit, on several the order of a sum of floats is another.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.bank.facts import HOW_STEPPED, TenantFacts, differences, differing_shapes, facts_of, sound_facts
from shardwise.bank.tenant import Tenant, TenantStart, TenantWindow, summed
from shardwise.checkpoints.facts import digest_of
from shardwise.errors import ConfigError
from shardwise.execution.replicas import checksums
from shardwise.models.optimizer_state import set_group
from shardwise.planning.load_plan import Ignore, allows
from shardwise.planning.matching import OnFault

_KEYS = ("adapter", "optimizer", "facts", "gradient")


# ── taken out ─────────────────────────────────────────────────────────────────────────────────────


def tenant_state(tenant: Tenant, base: Mapping[str, str]) -> dict[str, Any]:
    """A copy of all that a tenant goes on from; ``base`` is what its base is told apart by.

    Collective: where a window is open, or moments are sharded.
    """
    gradient = window_gradient(tenant)
    facts = facts_of(tenant, base)
    moments = copy.deepcopy(dict(tenant.optimizer.state.get(tenant.flat, {})))
    return {
        "adapter": {key: values.clone() for key, values in tenant.matrices.items()},
        "optimizer": {"state": {0: moments} if moments else {}},
        "facts": {field.name: copy.deepcopy(getattr(facts, field.name)) for field in fields(facts)},
        "gradient": {} if gradient is None else dict(tenant.by_matrix(gradient)),
    }


def window_gradient(tenant: Tenant) -> torch.Tensor | None:
    """What all ranks have gathered in the open window, (count,); None between windows. See [Note: An open window].

    Collective: where a window is open, one all-reduce. Memory: a copy of the gradient.
    """
    if not tenant.window.micro_batches:
        return None
    return summed(tenant.world, tenant.gradient.clone())


def moments_of(tenant: Tenant) -> dict[str, torch.Tensor]:
    """What the optimizer keeps on this rank, as it is.

    Raises:
        ConfigError: something of it is no tensor.
    """
    found = dict(tenant.optimizer.state.get(tenant.flat, {}))
    for entry, values in found.items():
        if not isinstance(values, torch.Tensor):
            raise ConfigError(
                f"{entry} of the optimizer of {tenant.name!r} is a {type(values).__name__}, and only tensors "
                "are saved; save with training_state=False"
            )
    return found


# ── taken in ──────────────────────────────────────────────────────────────────────────────────────


def room_for_moments(tenant: Tenant, facts: TenantFacts) -> dict[str, torch.Tensor]:
    """Memory for what an optimizer of these settings keeps after so many steps; not yet in it."""
    single = nn.Parameter(torch.zeros(1, device=tenant.flat.device))
    kind: Any = type(tenant.optimizer)
    made = kind([single], lr=0.1)
    settings = {**tenant.optimizer.param_groups[0], **_taken_settings(facts.settings)}
    made.param_groups[0].update({key: value for key, value in settings.items() if key != "params"})
    if facts.steps > 0:
        single.grad = torch.zeros_like(single)
        made.step()
    return {
        entry: torch.zeros(tenant.flat.shape if like.ndim else (), dtype=like.dtype, device=like.device)
        for entry, like in made.state.get(single, {}).items()
        if like is not None
    }


def _taken_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in HOW_STEPPED}


def require_on_fault(on_not_finite: object) -> None:
    """Raises ConfigError for what is no such mode."""
    if on_not_finite != "error" and not isinstance(on_not_finite, Ignore):
        raise ConfigError(f"on_not_finite={on_not_finite!r}: pass 'error' or Ignore()")


def not_finite(tensors: Mapping[str, torch.Tensor], allowed: OnFault) -> list[str]:
    """A sentence for each tensor that has values that are not finite, unless that is allowed."""
    return [
        f"{key} has {count} values of {values.numel()} that are not finite; take them by on_not_finite=Ignore()"
        for key, values in tensors.items()
        if not allows(allowed, key) and (count := int((~values.isfinite()).sum()))
    ]


def take_facts(tenant: Tenant, facts: TenantFacts) -> None:
    """Have a tenant go on with what is no tensor. If it fails, it is as before.

    Raises:
        ConfigError: its schedule does not take this state.
    """
    schedule = tenant.schedule
    before = copy.deepcopy(schedule.state_dict())
    try:
        schedule.load_state_dict(copy.deepcopy(dict(facts.schedule_state)))
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        schedule.load_state_dict(before)
        raise ConfigError(f"this is no state of {tenant.name!r}: its schedule does not take it: {error}") from error
    set_group(tenant.optimizer.param_groups[0], _taken_settings(facts.settings))
    tenant.max_grad_norm = float(facts.max_grad_norm)
    tenant.windows, tenant.steps = facts.windows, facts.steps
    tenant.window = TenantWindow(facts.micro_batches, facts.learned_tokens)


def take_moments(tenant: Tenant, room: Mapping[str, torch.Tensor]) -> None:
    """Put filled memory into the optimizer, in place of what it kept."""
    tenant.optimizer.state.pop(tenant.flat, None)
    if room:
        tenant.optimizer.state[tenant.flat] = dict(room)


@dataclass(frozen=True, slots=True)
class AllowedFaults:
    """What a state may have: another base than the one that is there; values that are not finite."""

    other_base: OnFault
    not_finite: OnFault


GivenState: TypeAlias = tuple[TenantFacts | None, Mapping[str, torch.Tensor]]
"""A state that fits a tenant: its facts, and memory filled with moments; neither where it is matrices alone."""


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
        room: dict[str, torch.Tensor] = {}
        facts = None
        if _is_of_peft(given):
            faults = _misfits_of_peft(tenant, given, names_of_peft)
        elif lacks := [key for key in _KEYS if not isinstance(given.get(key), Mapping)]:
            faults = [f"it has no {', '.join(lacks)}; nor is it matrices alone, by PEFT's names"]
        else:
            shapes = {key: tuple(values.shape) for key, values in given["adapter"].items()}
            facts = replace(sound_facts(given["facts"], f"the state of {tenant.name!r}"), matrices=shapes)
            faults = _differences(tenant, facts, given, base, allowed.other_base)
        if facts is not None and not faults:
            room = room_for_moments(tenant, facts)
            for entry, values in room.items():
                values.copy_(given["optimizer"]["state"][0][entry])
        if faults := faults or not_finite(_kept_in(given), allowed.not_finite):
            raise ConfigError(f"this is no state of {tenant.name!r}:\n  " + "\n  ".join(faults[:20]))
        return facts, room

    facts, room = tenant.world.together(check)
    values = [getattr(facts, field.name) for field in fields(facts)] if facts else []
    told = tenant.world.together(lambda: (digest_of([tenant.name, *values]), _sums(state)))
    tenant.world.require_equal(told, f"the state that {tenant.name!r} is given")
    return facts, room


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
    faults = differing_shapes(found, tenant.shapes)
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
    tenant: Tenant, state: Mapping[str, Any], facts: TenantFacts, room: Mapping[str, torch.Tensor]
) -> TenantStart:
    """Have a tenant go on from an agreed state, whatever it has gathered itself. Collective: yes.

    Raises:
        ConfigError: its schedule does not take this state; nothing is changed then.
    """
    tenant.world.together(lambda: take_facts(tenant, facts))
    take_moments(tenant, room)
    for key, values in tenant.matrices.items():
        values.copy_(state["adapter"][key])
    tenant.gradient.zero_()
    if facts.micro_batches and tenant.world.rank == 0:
        flat = torch.cat([state["gradient"][key].flatten() for key in tenant.shapes])
        tenant.gradient.copy_(flat)
    return went_on(tenant)


def went_on(tenant: Tenant, base: str = "") -> TenantStart:
    """Where a tenant is in its training; ``base`` says how its base compares with that of the state."""
    window = tenant.window
    return TenantStart(tenant.steps, tenant.windows, window.micro_batches, window.learned_tokens, base)


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
    there = {key: tuple(getattr(own, "shape", ())) for key, own in moments.get(0, {}).items()}
    here = {key: tuple(own.shape) for key, own in room_for_moments(tenant, facts).items()}
    faults += [
        f"the optimizer's {key} is of {there.get(key, 'no')} numbers, and {here.get(key, 'none')} are kept here"
        for key in sorted({*there, *here})
        if there.get(key) != here.get(key)
    ]
    return faults
