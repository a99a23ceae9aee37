"""A tenant's state as plain data, and back: strict, and the same for any number of ranks."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from shardwise.bank.tenant import Tenant
from shardwise.errors import ConfigError
from shardwise.models.optimizer_kind import class_name

_KEYS = (
    "adapter",
    "config",
    "optimizer",
    "optimizer_class",
    "schedule",
    "max_grad_norm",
    "seed",
    "windows",
    "steps",
)


def tenant_state(tenant: Tenant) -> dict[str, Any]:
    """A copy of all that a tenant goes on from.

    Raises:
        ConfigError: it is in a window, whose gradients are each rank's own.
    """
    _require_between_windows(tenant)
    return {
        "adapter": {key: values.clone() for key, values in tenant.matrices.items()},
        "config": tenant.words,
        "optimizer": copy.deepcopy(tenant.part.optimizer.state_dict()),
        "optimizer_class": class_name(tenant.part.optimizer),
        "schedule": copy.deepcopy(tenant.part.schedule.state_dict()),
        "max_grad_norm": tenant.max_grad_norm,
        "seed": tenant.options.seed,
        "windows": tenant.windows,
        "steps": tenant.steps,
    }


def load_tenant_state(tenant: Tenant, state: Mapping[str, Any]) -> None:
    """Have a tenant go on from a state.

    Raises:
        ConfigError: it is of another adapter, naming what differs; nothing is changed then.
    """
    _require_between_windows(tenant)
    if faults := _differences(tenant, state):
        raise ConfigError(f"this is no state of {tenant.name!r}:\n  " + "\n  ".join(faults[:20]))
    optimizer = copy.deepcopy(tenant.part.optimizer.state_dict())
    schedule = copy.deepcopy(tenant.part.schedule.state_dict())
    try:
        tenant.part.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        tenant.part.schedule.load_state_dict(copy.deepcopy(state["schedule"]))
    except (KeyError, ValueError, TypeError) as error:
        tenant.part.optimizer.load_state_dict(optimizer)
        tenant.part.schedule.load_state_dict(schedule)
        raise ConfigError(f"this is no state of {tenant.name!r}: {error}") from error
    for key, values in tenant.matrices.items():
        values.copy_(state["adapter"][key])
    tenant.max_grad_norm = float(state["max_grad_norm"])
    tenant.windows, tenant.steps = int(state["windows"]), int(state["steps"])


def _require_between_windows(tenant: Tenant) -> None:
    if tenant.window.micro_batches:
        raise ConfigError(
            f"{tenant.name!r} has gathered {tenant.window.micro_batches} micro-batches since its last step; its "
            "state is taken and given between windows: call optim_step first"
        )


def _differences(tenant: Tenant, state: Mapping[str, Any]) -> list[str]:
    if missing := [key for key in _KEYS if key not in state]:
        return [f"it has no {', '.join(missing)}"]
    faults = []
    matrices: Mapping[str, torch.Tensor] = state["adapter"]
    for key in sorted({*matrices, *tenant.matrices}):
        there = tuple(matrices[key].shape) if key in matrices else None
        here = tenant.shapes.get(key)
        if there != here:
            faults.append(f"{key}: {there or 'not there'} in the state, {here or 'not there'} in the adapter")
    here_class = class_name(tenant.part.optimizer)
    if state["optimizer_class"] != here_class:
        faults.append(f"it was trained by {state['optimizer_class']}, and this one is by {here_class}")
    if state["seed"] != tenant.options.seed:
        faults.append(f"seed {state['seed']}, and {tenant.options.seed} here, which dropout follows from")
    if not faults and state["config"] != tenant.words:
        faults.append("its config is another (scaling, dropout or targets): create the tenant with the same")
    moments = state["optimizer"].get("state", {}).get(0, {})
    count = tenant.trained_count
    faults += [
        f"the optimizer's {key} is of {values.numel()} numbers, and {count} are trained"
        for key, values in moments.items()
        if isinstance(values, torch.Tensor) and values.ndim and values.numel() != count
    ]
    return faults
