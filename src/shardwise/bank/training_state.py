"""Training state of an adapter: tensors by name, and facts as plain data.

A file and a state dict contain the same: matrices by PEFT's names, the optimizer's tensors and the gradient of an
open window, flat in the order of the matrices, and facts. They restore on any number of ranks.

[Note: An open window] Within an accumulation window, each rank has the gradient of its own rows. The sum over all
ranks is saved, with the number of tokens of all ranks. On resume the first rank gets the sum and the others zeros,
as gradients are summed over the ranks at the end of the window anyway. On one rank the result is bitwise equal, on
several ranks floats are summed in another order.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.bank.adapter import AdapterStart, BankAdapter, without_tensors
from shardwise.bank.optimizer_steps import sum_all
from shardwise.bank.training_facts import TrainingFacts, get_facts, validate_facts
from shardwise.core.consents import allows
from shardwise.core.errors import ConfigError, FormatError
from shardwise.core.tensors import DType
from shardwise.files.checkpoint_index import parse_object
from shardwise.files.urls import shown
from shardwise.fsdp.optimizer_states_by_name import list_differences, scheduler_mismatch, set_group
from shardwise.fsdp.torch_private import from_torch_or_other
from shardwise.state import base_identity as bases
from shardwise.transfer.matching import OnFault

_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Settings that decide how a step is computed, not its result. They are not restored."""

GRADIENT, MATRICES = "gradient", "matrices"
"""Names of flat tensors: the gradient of an open window, and the matrices if the adapter's file has them cast."""

_OPTIMIZER = "optimizer."


def collect_training_tensors(adapter: BankAdapter) -> dict[str, torch.Tensor]:
    """Return the optimizer's state (not copied) and the gradient of an open window, by name.

    The gradient is summed over all ranks. Collective: one all-reduce if a window is open, with a copy of the
    gradient. See [Note: An open window].

    Raises:
        ConfigError: an entry of the state is not a tensor.
    """
    tensors = {}
    if adapter.micro_batches:
        # A copy: the gradient of this rank stays, since the window goes on.
        tensors[GRADIENT] = adapter.gradient.clone()
        sum_all(adapter.world, [tensors[GRADIENT]])
    for entry, values in adapter.optimizer.state.get(adapter.flat, {}).items():
        if not isinstance(values, torch.Tensor):
            raise ConfigError(
                f"{entry} of the optimizer of {adapter.name!r}: is a {type(values).__name__}, and only tensors are "
                "saved. Save with training_state=False"
            )
        tensors[_OPTIMIZER + entry] = values
    return tensors


def copy_state(adapter: BankAdapter, base: Mapping[str, str]) -> dict[str, Any]:
    """Return a state dict. Collective: as :func:`collect_training_tensors`."""
    training = collect_training_tensors(adapter)
    return {
        "adapter": {key: values.clone() for key, values in adapter.matrices.items()},
        "training": {key: values.clone() for key, values in training.items()},
        "facts": get_facts(adapter, base).to_dict(),
    }


@dataclass(frozen=True, slots=True)
class StoredTraining:
    """Training state in a file (``what``) or a state dict: facts, and shapes and dtypes of tensors."""

    what: str
    facts: TrainingFacts
    tensors: Mapping[str, tuple[tuple[int, ...], DType]]


def parse_state(adapter: BankAdapter, what: str, state: object) -> StoredTraining | AdapterStart:
    """Parse a state dict, or matrices alone by PEFT's names. ``what`` names it in errors.

    Raises:
        ConfigError: it is neither, or its matrices are those of another adapter.
        FormatError: its facts are invalid.
    """
    if not isinstance(state, Mapping):
        raise ConfigError(f"{what}: is a {type(state).__name__}. Pass the result of state_dict")
    # Flat, as PEFT returns it: matrices alone.
    if state and all(isinstance(values, torch.Tensor) for values in state.values()):
        shapes = {key: tuple(values.shape) for key, values in state.items()}
        if faults := [*_list_differing(shapes, adapter.shapes), *_find_kind_faults(state)]:
            raise _state_error(what, adapter, faults)
        return AdapterStart(reason="the state has matrices alone")
    if missing := [key for key in ("adapter", "training", "facts") if not isinstance(state.get(key), Mapping)]:
        raise ConfigError(
            f"{what}: it has no {', '.join(missing)}; nor is it matrices alone, by PEFT's names. Pass the result "
            "of state_dict"
        )
    if faults := [*_find_kind_faults(state["adapter"]), *_find_kind_faults(state["training"])]:
        raise _state_error(what, adapter, faults)
    # The shapes of the matrices are those of the tensors here, whatever the facts say.
    shapes = {key: tuple(values.shape) for key, values in state["adapter"].items()}
    facts = replace(validate_facts(state["facts"], what), matrices=shapes)
    tensors = {
        key: (tuple(values.shape), from_torch_or_other(values.dtype)) for key, values in state["training"].items()
    }
    return StoredTraining(what, facts, tensors)


def copy_values(adapter: BankAdapter, state: Mapping[str, Any], targets: Mapping[str, torch.Tensor]) -> None:
    """Copy the values of a parsed state dict, or of matrices alone, into an adapter and into ``targets``."""
    for key, values in adapter.matrices.items():
        values.copy_(state.get("adapter", state)[key])
    for key, values in targets.items():
        values.copy_(state["training"][key])


def _find_kind_faults(state: Mapping[str, Any]) -> list[str]:
    faults = []
    for key, values in state.items():
        kind = type(values).__name__
        if not isinstance(values, torch.Tensor):
            faults.append(f"{key}: is a {kind}, not a tensor")
        elif isinstance(values, DTensor) or values.is_meta or not values.is_floating_point():
            needed = "a whole tensor of floating-point numbers is needed"
            faults.append(f"{key}: is a {kind} of {values.dtype} on {values.device}; {needed}")
    return faults


def restore(
    adapter: BankAdapter,
    what: str,
    stored: StoredTraining | AdapterStart,
    targets: Mapping[str, torch.Tensor],
    base: Mapping[str, str],
    on_other_base: OnFault,
    on_not_finite: OnFault,
) -> AdapterStart:
    """Restore everything else of an adapter whose matrices and ``targets`` have been filled. Collective: no.

    Args:
        adapter: an adapter that is not registered yet.
        what: name of the state's source, for messages.
        stored: the parsed state.
        targets: result of :func:`allocate_targets`.
        base: identity of the base.
        on_other_base: whether the base may differ.
        on_not_finite: whether values may be infinite or NaN.

    Raises:
        ConfigError: the schedule rejects its state.
        FormatError: values are not finite, and that is not allowed.
    """
    # The first rank has the sum of all ranks' gradients: see [Note: An open window].
    if adapter.world.rank:
        adapter.gradient.zero_()
    moments = {key: values for key, values in targets.items() if key.startswith(_OPTIMIZER)}
    _require_finite(what, {**adapter.matrices, **moments}, on_not_finite)
    if isinstance(stored, AdapterStart):
        return stored
    facts = stored.facts
    _restore_counters(adapter, facts)
    if moments:
        state = {key.removeprefix(_OPTIMIZER): values for key, values in moments.items()}
        adapter.optimizer.state[adapter.flat] = state
    compared = _compare_bases(facts.base, base, on_other_base).summary
    return AdapterStart(facts.steps, facts.windows, facts.micro_batches, facts.num_supervised_tokens, compared)


def allocate_targets(
    adapter: BankAdapter, stored: StoredTraining | AdapterStart, base: Mapping[str, str], on_other_base: OnFault
) -> dict[str, torch.Tensor]:
    """Return memory for the training's tensors to restore, by name. Empty if there is no training.

    Raises:
        ConfigError: the state belongs to another adapter, base, optimizer or schedule. The message has the
            differences.
    """
    if isinstance(stored, AdapterStart):
        return {}
    if faults := _find_differences(adapter, stored.facts, base, on_other_base):
        raise _state_error(stored.what, adapter, faults)
    targets: dict[str, torch.Tensor] = {}
    for entry, values in _allocate_optimizer_state(adapter, stored.facts).items():
        targets[_OPTIMIZER + entry] = values
    if stored.facts.micro_batches:
        targets[GRADIENT] = adapter.gradient
    # The file with the matrices may have them cast. These are read after it, and are exact.
    if MATRICES in stored.tensors:
        targets[MATRICES] = adapter.flat.detach()
    # Names, shapes and dtypes must be equal, since the tensors are read in place.
    here = {
        key: f"{tuple(values.shape)} {from_torch_or_other(values.dtype).label}" for key, values in targets.items()
    }
    there = {shown(key): f"{shape} {dtype.label}" for key, (shape, dtype) in stored.tensors.items()}
    if faults := _list_differing(there, here, "here"):
        raise _state_error(stored.what, adapter, faults)
    return targets


def _state_error(what: str, adapter: BankAdapter, faults: list[str]) -> ConfigError:
    lines = "\n  ".join(faults[:20])
    return ConfigError(
        f"{what}: is not a state of {adapter.name!r} as it is here:\n  {lines}\n"
        "Create it as it was, or take the matrices alone, with training_state=False"
    )


def _allocate_optimizer_state(adapter: BankAdapter, facts: TrainingFacts) -> dict[str, torch.Tensor]:
    """Return memory for the state of an optimizer with these settings after this number of steps.

    Its entries are those that an optimizer of one number has.
    """
    # A step of one number on the side: the adapter's own optimizer is not stepped.
    single = nn.Parameter(adapter.flat.new_zeros(1))
    kind: Any = type(adapter.optimizer)
    optimizer = kind([single], lr=0.1)
    settings = {**adapter.settings, **_select_settings(facts.settings)}
    optimizer.param_groups[0].update(settings)
    # Optimizers create their state in the first step.
    if facts.steps > 0:
        single.grad = torch.zeros_like(single)
        optimizer.step()
    state = {}
    for entry, like in optimizer.state.get(single, {}).items():
        if like is not None:
            shape = adapter.flat.shape if like.ndim else ()  # a step count is one number
            state[entry] = torch.zeros(shape, dtype=like.dtype, device=like.device)
    return state


def _select_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in _IMPLEMENTATION}


def _require_finite(what: str, tensors: Mapping[str, torch.Tensor], allowed: OnFault) -> None:
    faults = []
    for key, values in tensors.items():
        count = 0 if allows(allowed, key) else int((~values.isfinite()).sum())
        if count:
            total = values.numel()
            faults.append(
                f"{key} has {count} values of {total} that are not finite. Accept them by on_not_finite=Ignore()"
            )
    if faults:
        raise FormatError(f"{what}: is not a valid state:\n  " + "\n  ".join(faults[:20]))


def _restore_counters(adapter: BankAdapter, facts: TrainingFacts) -> None:
    try:
        adapter.schedule.load_state_dict(copy.deepcopy(dict(facts.schedule_state)))
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"the schedule of {adapter.name!r}: rejects its state, {error}. Pass schedule= as it was"
        ) from error
    # After the schedule, whose load_state_dict may set lr.
    set_group(adapter.optimizer.param_groups[0], _select_settings(facts.settings))
    adapter.max_grad_norm = float(facts.max_grad_norm)
    adapter.windows, adapter.steps = facts.windows, facts.steps
    adapter.micro_batches, adapter.num_supervised_tokens = facts.micro_batches, facts.num_supervised_tokens


def _find_differences(
    adapter: BankAdapter, stored: TrainingFacts, base: Mapping[str, str], on_other_base: OnFault
) -> list[str]:
    """List the reasons why an adapter cannot resume from a state."""
    current = get_facts(adapter, base)
    faults = _find_base_faults(stored.base, current.base, on_other_base)
    faults += _list_differing(stored.matrices, current.matrices)
    # Another shape implies another config, and is the clearer message.
    if not faults:
        faults += _list_differing(stored.config, current.config, label="(rank, scaling, dropout) is ")
    if not faults and list(stored.matrices) != list(current.matrices):
        faults.append("its matrices are in another order. Save it again with the versions that are installed here")
    if stored.seed != current.seed:
        faults.append(f"seed {stored.seed}, and {current.seed} here, which dropout follows from")
    # Between windows, both may change. Within one, they decide what its gradient means.
    if stored.micro_batches:
        for option in ("gradient_accumulation_steps", "reduction"):
            there, here = getattr(stored, option), getattr(current, option)
            if there != here:
                faults.append(f"its window is open, with {option} {there}, and it is {here} here")
    faults += _find_optimizer_faults(adapter, stored, current)
    return [*faults, *_find_schedule_faults(stored, current)]


def _compare_bases(
    stored: Mapping[str, str], current: Mapping[str, str], on_other_base: OnFault
) -> bases.BaseMatch:
    """Compare two results of :func:`identify_base`. FormatError if the first has no identity."""
    what = "the base of an adapter's state"
    identities = (base["identity"].encode("utf-8", "surrogatepass") for base in (stored, current))
    there, here = (bases.BaseIdentity.from_dict(parse_object(text, what=what), what) for text in identities)
    return bases.compare_bases(there, here, on_other_base, are_shapes_same=stored["shapes"] == current["shapes"])


def _find_base_faults(stored: Mapping[str, str], current: Mapping[str, str], on_other_base: OnFault) -> list[str]:
    there, here = (
        f"{base['name'] or 'a base without a name'} ({base['architecture']})" for base in (stored, current)
    )
    if stored["architecture"] != current["architecture"]:
        return [f"it was trained on {there}, and this is {here}"]
    match = _compare_bases(stored, current, on_other_base)
    if match.refused:
        why = "; ".join(match.refused)
        return [f"it was trained on {there}, and this is another base, {here}: {why}. {bases.ALLOW_OTHER_BASE}"]
    return []  # names may differ: a folder may have been moved


def _list_differing(
    stored: Mapping[str, object], current: Mapping[str, object], where: str = "in the adapter", label: str = ""
) -> list[str]:
    """List the values by name that are others in a state, or in one of the two alone."""
    faults = []
    for key in sorted({*stored, *current}, key=str):
        there, here = stored.get(key, "not there"), current.get(key, "not there")
        if there != here:
            faults.append(f"{key}: {label}{there} in the state, {here} {where}")
    return faults


def _find_optimizer_faults(adapter: BankAdapter, stored: TrainingFacts, current: TrainingFacts) -> list[str]:
    name = adapter.name
    faults = list_differences(
        {name: (current.optimizer, current.settings)}, {name: (stored.optimizer, stored.settings)}
    )
    if faults:
        return [f"{fault}. Pass optimizer= as it was" for fault in faults]
    # list_differences() has compared the class, and the settings that decide which state there is.
    settings, present = _select_settings(stored.settings), _select_settings(current.settings)
    if differing := sorted(map(str, settings.keys() ^ present.keys())):
        return [f"the setting {shown(key)} of {stored.optimizer}: is in only one of the two" for key in differing]
    initial_lr = without_tensors(settings).get("initial_lr", 0.0)  # of optimizers with a schedule
    if not isinstance(initial_lr, int | float) or not 0 <= initial_lr < math.inf:
        return [f"the setting initial_lr of {stored.optimizer}: {initial_lr!r} is not a learning rate"]
    # Flags are compared by list_differences().
    numbers = {key: settings[key] for key in adapter.changeable & settings.keys()}
    faults = adapter.find_invalid_settings(without_tensors(numbers))
    return [f"of the settings of {stored.optimizer}, {fault}" for fault in faults]


def _find_schedule_faults(stored: TrainingFacts, current: TrainingFacts) -> list[str]:
    if stored.schedule != current.schedule:
        return [
            f"its schedule was a {stored.schedule}, and here it is a {current.schedule}. Pass schedule= as it was"
        ]
    # torch's schedules accept any key as an attribute.
    reason = scheduler_mismatch(current.schedule_state, stored.schedule_state)
    return [f"the state of its schedule {stored.schedule}: {reason}"] if reason else []
