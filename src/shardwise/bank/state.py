"""Training state of a tenant: tensors by name, and facts as plain data. It is taken, compared, and restored here.

A file and a state dict hold the same: matrices by PEFT's names, the optimizer's tensors and an open window's
gradient flat in the order of the matrices, and facts. Resuming is strict, and equal for any number of ranks.

[Note: An open window] Of a window that is not over, each rank has the gradient of its own rows. The sum over all
ranks is saved, with the tokens of all ranks. On resume the first rank gets the sum and the others zeros: gradients
are summed over the ranks at the end of the window anyway. On one rank this is to the bit, on several the order of a
sum of floats is another.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from shardwise.bank.stepping import sum_all
from shardwise.bank.tenant import Tenant, TenantStart, TenantWindow
from shardwise.bank.tenant_facts import TenantFacts, facts_of, sound_facts
from shardwise.checkpoints import base_identity as bases
from shardwise.checkpoints.facts import digest_of
from shardwise.errors import ConfigError, FormatError
from shardwise.formats.contract import parse_object
from shardwise.models.optimizer_parsing import set_group, unlike
from shardwise.models.torch_api import in_memory
from shardwise.planning.load_plan import Ignore, allows
from shardwise.planning.matching import OnFault
from shardwise.storage.names import shown
from shardwise.tensors import DType

NamesOfPeft: TypeAlias = Callable[[], Collection[str]]
"""Returns the names of all tensors that PEFT saves of a tenant."""

_HOW_STEPPED = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Settings that decide how a step is computed, not what: those of the present optimizer stay."""
_LATER = frozenset({"maximize", "decoupled_weight_decay"})
"""Settings that not every version of torch has."""
_NEVER_BELOW_0 = ("lr", "initial_lr", "weight_decay", "eps")


# ── taken out ─────────────────────────────────────────────────────────────────────────────────────

GRADIENT, MATRICES = "gradient", "matrices"
"""Flat: of an open window; and what the adapter's file has in another dtype."""

_OPTIMIZER = "optimizer."


def window_gradient(tenant: Tenant) -> torch.Tensor | None:
    """Return the sum of the gradients accumulated in the open window, (count,), or None between windows. See [Note.

    An open window].

    Collective: where a window is open, one all-reduce. Memory: a copy of the gradient.
    """
    if not tenant.window.micro_batches:
        return None
    gradient = tenant.gradient.clone()
    sum_all(tenant.world, [gradient])
    return gradient


def training_tensors(tenant: Tenant, gradient: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Return the optimizer's state as it is, and the gradient of an open window, by name.

    Raises:
        ConfigError: something of it is no tensor.
    """
    found = {} if gradient is None else {GRADIENT: gradient}
    for entry, values in tenant.optimizer.state.get(tenant.flat, {}).items():
        if not isinstance(values, torch.Tensor):
            raise ConfigError(
                f"{entry} of the optimizer of {tenant.name!r} is a {type(values).__name__}, and only tensors "
                "are saved. Save with training_state=False"
            )
        found[_OPTIMIZER + entry] = values
    return found


# ── taken in ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class AllowedFaults:
    """Faults that a state may have: another base, or values that are not finite."""

    other_base: OnFault
    not_finite: OnFault


@dataclass(frozen=True, slots=True)
class StoredTraining:
    """Training state in a file (``what``) or a state dict: facts, and shapes and dtypes of tensors."""

    what: str
    facts: TenantFacts
    tensors: Mapping[str, tuple[tuple[int, ...], DType]]


def require_on_fault(on_not_finite: object) -> None:
    """Raises ConfigError for an invalid value."""
    if on_not_finite != "error" and not isinstance(on_not_finite, Ignore):
        raise ConfigError(f"on_not_finite={on_not_finite!r}: pass 'error' or Ignore()")


def parse_training(
    tenant: Tenant, state: Mapping[str, Any], names_of_peft: NamesOfPeft
) -> StoredTraining | TenantStart:
    """Look at a state dict, or matrices by PEFT's names, that all ranks are given alike. Collective: yes.

    ``names_of_peft`` gives the names of all tensors that PEFT saves of the tenant, with embeddings of the base.

    Raises:
        ConfigError: it is none, or its matrices are of another adapter.
        RankMismatchError: ranks are given other values.
    """
    what = f"the state of {tenant.name!r}"

    def check() -> StoredTraining | TenantStart:
        given: object = state
        if not isinstance(given, Mapping):
            raise ConfigError(f"{what} is a {type(given).__name__}. Pass what state_dict gave")
        if given and all(isinstance(values, torch.Tensor) for values in given.values()):
            if faults := _misfits_of_peft(tenant, given, names_of_peft):
                raise _refusal(what, tenant, faults)
            return TenantStart(reason="the state has matrices alone")
        if lacks := [key for key in ("adapter", "training", "facts") if not isinstance(given.get(key), Mapping)]:
            raise ConfigError(
                f"{what}: it has no {', '.join(lacks)}; nor is it matrices alone, by PEFT's names. Pass what "
                "state_dict gave."
            )
        shapes = {key: tuple(values.shape) for key, values in given["adapter"].items()}
        facts = replace(sound_facts(given["facts"], what), matrices=shapes)
        tensors = {key: (tuple(own.shape), in_memory(own.dtype)) for key, own in given["training"].items()}
        return StoredTraining(what, facts, tensors)

    found = tenant.world.run_all(check)
    told = tenant.world.run_all(lambda: digest_of(dict(state)))
    tenant.world.require_equal(told, f"the state that {tenant.name!r} is given")
    return found


def copy_given(tenant: Tenant, state: Mapping[str, Any], targets: Mapping[str, torch.Tensor]) -> None:
    """Copy the values of a state dict, or of matrices alone, that fits."""
    for key, values in tenant.matrices.items():
        values.copy_(state.get("adapter", state)[key])
    for key, values in targets.items():
        values.copy_(state["training"][key])


def _misfits_of_peft(tenant: Tenant, state: Mapping[str, torch.Tensor], names_of_peft: NamesOfPeft) -> list[str]:
    found = {key: tuple(values.shape) for key, values in state.items()}
    if found.keys() - tenant.shapes.keys():  # embeddings of the base, which PEFT saves beside adapters on them
        of_base = set(names_of_peft()) - tenant.shapes.keys()
        found = {key: shape for key, shape in found.items() if key not in of_base}
    faults = _differing_shapes(found, tenant.shapes)
    for key in found:
        values = state[key]
        if isinstance(values, DTensor) or values.is_meta or not values.is_floating_point():
            kind = f"{type(values).__name__} of {values.dtype} on {values.device}"
            faults.append(f"{key}: is a {kind}; a whole tensor of floating-point numbers is needed")
    return faults


def go_on(
    tenant: Tenant,
    what: str,
    found: StoredTraining | TenantStart,
    fill: Callable[[Mapping[str, torch.Tensor]], None],
    base: Mapping[str, str],
    allowed: AllowedFaults,
) -> TenantStart:
    """Restore a tenant that is not registered yet from a state, or start it with its matrices. Collective: yes.

    Args:
        tenant: as it was made.
        what: name of the state's source, for messages.
        found: in it.
        fill: gives the tenant's matrices, and these tensors by name, their values.
        base: identity of the base.
        allowed: whether values may be infinite or NaN, and whether the base may differ.

    Raises:
        ConfigError: it belongs to another adapter, base, optimizer or schedule. The message has the differences.
        FormatError: values are not finite, and that is not allowed.
    """
    world, targets = tenant.world, dict[str, torch.Tensor]()
    if isinstance(found, StoredTraining):
        targets = world.run_all(_targets, tenant, found, base, allowed.other_base)
    fill(targets)
    if world.rank:  # see [Note: An open window]
        tenant.gradient.zero_()
    moments = {key: values for key, values in targets.items() if key.startswith(_OPTIMIZER)}
    world.run_all(_require_finite, what, {**tenant.matrices, **moments}, allowed.not_finite)
    if isinstance(found, TenantStart):
        return found
    facts = found.facts
    world.run_all(_take_facts, tenant, facts)
    if moments:
        tenant.optimizer.state[tenant.flat] = {key.removeprefix(_OPTIMIZER): own for key, own in moments.items()}
    told = _match_bases(facts.base, base, allowed.other_base).summary
    return TenantStart(facts.steps, facts.windows, facts.micro_batches, facts.num_supervised_tokens, told)


def _targets(
    tenant: Tenant, found: StoredTraining, base: Mapping[str, str], on_other_base: OnFault
) -> dict[str, torch.Tensor]:
    """Return memory for the tensors to restore, by name, after everything has been found to match.

    Raises:
        ConfigError: something does not match. The message has the differences.
    """
    if faults := _differences(tenant, found.facts, base, on_other_base):
        raise _refusal(found.what, tenant, faults)
    targets = {_OPTIMIZER + entry: values for entry, values in _room_for_moments(tenant, found.facts).items()}
    if found.facts.micro_batches:
        targets[GRADIENT] = tenant.gradient
    if MATRICES in found.tensors:
        targets[MATRICES] = tenant.flat.detach()
    wanted = {key: (tuple(own.shape), in_memory(own.dtype)) for key, own in targets.items()}
    faults = [
        f"{shown(key)}: {_describe(found.tensors.get(key))} in the file, {_describe(wanted.get(key))} here"
        for key in sorted({*wanted, *found.tensors})
        if wanted.get(key) != found.tensors.get(key)
    ]
    if faults:
        raise _refusal(found.what, tenant, faults)
    return targets


def _describe(tensor: tuple[tuple[int, ...], DType] | None) -> str:
    return "not there" if tensor is None else f"{tensor[0]} {tensor[1].label}"


def _refusal(what: str, tenant: Tenant, faults: list[str]) -> ConfigError:
    lines = "\n  ".join(faults[:20])
    return ConfigError(
        f"{what}: is not a state of {tenant.name!r} as it is here:\n  {lines}\n"
        "Create it as it was, or take the matrices alone, with training_state=False."
    )


def _room_for_moments(tenant: Tenant, facts: TenantFacts) -> dict[str, torch.Tensor]:
    """Return memory for the state of an optimizer with these settings after this number of steps.

    The optimizer does not hold it yet.
    """
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
    return {key: value for key, value in settings.items() if key not in _HOW_STEPPED}


def _require_finite(what: str, tensors: Mapping[str, torch.Tensor], allowed: OnFault) -> None:
    faults = [
        f"{key} has {count} values of {values.numel()} that are not finite. Take them by on_not_finite=Ignore()"
        for key, values in tensors.items()
        if not allows(allowed, key) and (count := int((~values.isfinite()).sum()))
    ]
    if faults:
        raise FormatError(f"{what}: is not a valid state:\n  " + "\n  ".join(faults[:20]))


def _take_facts(tenant: Tenant, facts: TenantFacts) -> None:
    """Restore the values of a tenant that are not tensors. Raises ConfigError if its schedule rejects its state."""
    try:
        tenant.schedule.load_state_dict(copy.deepcopy(dict(facts.schedule_state)))
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"this is not a state of {tenant.name!r}: its schedule does not take it: {error}"
        ) from error
    set_group(tenant.optimizer.param_groups[0], _taken_settings(facts.settings))
    tenant.max_grad_norm = float(facts.max_grad_norm)
    tenant.windows, tenant.steps = facts.windows, facts.steps
    tenant.window = TenantWindow(facts.micro_batches, facts.num_supervised_tokens)


# ── compared ──────────────────────────────────────────────────────────────────────────────────────


def _differences(tenant: Tenant, there: TenantFacts, base: Mapping[str, str], on_other_base: OnFault) -> list[str]:
    """List the reasons why a tenant cannot continue from a state. Empty if it can."""
    here = facts_of(tenant, base)
    faults = [*_of_bases(there.base, here.base, on_other_base), *_differing_shapes(there.matrices, here.matrices)]
    if not faults:
        faults = [
            f"{site}: (rank, scaling, dropout) is {there.config.get(site)} in the state, and "
            f"{here.config.get(site)} in the adapter"
            for site in sorted({*there.config, *here.config})
            if there.config.get(site) != here.config.get(site)
        ]
    if not faults and list(there.matrices) != list(here.matrices):
        faults.append("its matrices are in another order. Save it again with the versions that are installed here")
    if there.seed != here.seed:
        faults.append(f"seed {there.seed}, and {here.seed} here, which dropout follows from")
    if there.micro_batches:
        for what in ("gradient_accumulation_steps", "reduction"):
            one, other = getattr(there, what), getattr(here, what)
            if one != other:
                faults.append(f"its window is open, with {what} {one}, and it is {other} here")
    return [*faults, *_of_optimizers(tenant.name, there, here), *_of_schedules(tenant, there, here)]


def _match_bases(there: Mapping[str, str], here: Mapping[str, str], on_other_base: OnFault) -> bases.BaseMatch:
    """Compare two bases by the results of :func:`facts_of_base`. FormatError if the first has no identity."""
    what = "the base of a tenant's state"
    one, other = (
        bases.BaseIdentity.from_dict(
            parse_object(told["identity"].encode("utf-8", "surrogatepass"), what=what), what
        )
        for told in (there, here)
    )
    return bases.compare_bases(one, other, on_other_base, are_shapes_same=there["shapes"] == here["shapes"])


def _of_bases(there: Mapping[str, str], here: Mapping[str, str], on_other_base: OnFault) -> list[str]:
    known, own = (f"{told['name'] or 'a base without a name'} ({told['architecture']})" for told in (there, here))
    if there["architecture"] != here["architecture"]:
        return [f"it was trained on {known}, and this is {own}"]
    match = _match_bases(there, here, on_other_base)
    if match.refused:
        why = "; ".join(match.refused)
        return [f"it was trained on {known}, and this is another base, {own}: {why}. {bases.ALLOW_OTHER_BASE}"]
    return []  # a folder may have been moved


def _differing_shapes(there: Mapping[str, tuple[int, ...]], here: Mapping[str, tuple[int, ...]]) -> list[str]:
    return [
        f"{key}: {there.get(key, 'not there')} in the state, {here.get(key, 'not there')} in the adapter"
        for key in sorted({*there, *here})
        if there.get(key) != here.get(key)
    ]


def _of_optimizers(name: str, there: TenantFacts, here: TenantFacts) -> list[str]:
    faults = unlike({name: (here.optimizer, here.settings)}, {name: (there.optimizer, there.settings)})
    if faults:
        return [f"{fault}. Pass optimizer= as it was" for fault in faults]
    of_no_concern = _HOW_STEPPED | _LATER
    for key in sorted((there.settings.keys() ^ here.settings.keys()) - of_no_concern):
        whose = "is not there" if key in here.settings else "is nothing that this one has"
        faults.append(f"the setting {shown(key)} of {there.optimizer} {whose}")
    for key in sorted((there.settings.keys() & here.settings.keys()) - _HOW_STEPPED):
        if not _is_like(there.settings[key], here.settings[key]) or (
            key in _NEVER_BELOW_0 and not float(there.settings[key]) >= 0
        ):
            faults.append(f"the setting {key} of {there.optimizer} is {shown(repr(there.settings[key]))}")
    return faults


def _of_schedules(tenant: Tenant, there: TenantFacts, here: TenantFacts) -> list[str]:
    if there.schedule != here.schedule:
        return [f"its schedule was a {there.schedule}, and here it is a {here.schedule}. Pass schedule= as it was"]
    if not isinstance(tenant.schedule, LRScheduler):
        return []  # its own affair. Of torch's, each key becomes an attribute
    faults = []
    for key in sorted(map(str, {*there.schedule_state, *here.schedule_state})):
        values = [each.schedule_state.get(key, _ABSENT) for each in (there, here)]
        if any(value is _ABSENT for value in values) or not _is_like(*values):
            faults.append(f"{shown(key)} of its schedule {there.schedule} is not as that of this one")
    return faults


_ABSENT = object()


def _is_like(value: Any, present: Any) -> bool:
    """Return whether a value has the type of the current one. Numbers must be finite."""
    if isinstance(present, torch.Tensor):
        present = float(present)
    if isinstance(value, torch.Tensor):
        value = float(value) if value.numel() == 1 else None
    if present is None or value is None or isinstance(present, str | bool) or isinstance(value, str | bool):
        return value is None or present is None or type(value) is type(present)
    if isinstance(present, int | float):
        return isinstance(value, int | float) and math.isfinite(value)
    if isinstance(present, list | tuple):
        is_as_long = isinstance(value, list | tuple) and len(value) == len(present)
        return is_as_long and all(map(_is_like, value, present))
    if type(present) is dict and isinstance(value, Mapping):
        return value.keys() == present.keys() and all(_is_like(value[key], present[key]) for key in present)
    return isinstance(value, Mapping) == isinstance(present, Mapping)
