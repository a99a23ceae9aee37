"""The state of a tenant's training: tensors by name, and facts as plain data; taken out, compared, and taken in.

A file and a state dict hold the same: matrices by PEFT's names, the optimizer's tensors and an open window's
gradient flat in the order of the matrices, and facts. What goes on from it is strict, and the same
for any number of ranks.

[Note: An open window] Of a window that is not over, each rank has the gradient of its own rows. The window's is
their sum; that is what is taken out, with the tokens of all ranks. What goes on from it gives the first rank the
sum, and the others nothing: ranks' gradients are summed at the end of the window whatever part each has. On one
rank this is to the bit, on several the order of a sum of floats is another.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel

from shardwise.bank.tenant import Tenant, TenantStart, TenantWindow, maker_of, summed
from shardwise.checkpoints import base_identity as bases
from shardwise.checkpoints.facts import digest_of
from shardwise.errors import ConfigError, FormatError
from shardwise.execution.world import World
from shardwise.formats.contract import parse_object
from shardwise.models.optimizer_state import class_name, set_group, unlike
from shardwise.models.torch_words import in_memory, original_class
from shardwise.models.view import canonical, look_inside
from shardwise.planning.load_plan import Ignore, allows
from shardwise.planning.matching import OnFault
from shardwise.storage.names import shown
from shardwise.tensors import DType
from shardwise.tuning.sites import ExpertsSite

_FORMAT = "shardwise tenant 1"
_MOST = 1 << 53
_HOW_STEPPED = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Settings that decide how a step is computed, not what: those of the present optimizer stay."""
_LATER = frozenset({"maximize", "decoupled_weight_decay"})
"""Settings that not every version of torch has."""
_NEVER_BELOW_0 = ("lr", "initial_lr", "weight_decay", "eps")


@dataclass(frozen=True, slots=True)
class TenantFacts:
    """All of a tenant's state but tensors; the same on every rank, and for any number of them.

    Attributes:
        base: "name", as PEFT has it, "architecture", a digest of the names and "shapes" of its
            parameters, and its "identity" as JSON ([Note: The identity of a base]).
        config: by layer, (rank, scaling, dropout).
        matrices: their shapes, in the order in which they lie in flat tensors.
        optimizer: its class.
        settings: of its one group.
        schedule: its class.
        schedule_state: what its ``state_dict`` gives.
        max_grad_norm: as it was changed last.
        accumulation: how many micro-batches make a window.
        reduction: the class of it.
        seed: what dropout follows from.
        windows: that are over.
        steps: that were taken.
        micro_batches: of the window that is open.
        learned_tokens: in it, on all ranks.
    """

    base: Mapping[str, str]
    config: Mapping[str, tuple[float, ...]]
    matrices: Mapping[str, tuple[int, ...]]
    optimizer: str
    settings: Mapping[str, Any]
    schedule: str
    schedule_state: Mapping[str, Any]
    max_grad_norm: float
    accumulation: int
    reduction: str
    seed: int
    windows: int
    steps: int
    micro_batches: int
    learned_tokens: int

    def options(self) -> dict[str, Any]:
        """Return what a tenant that goes on is made with where nothing else is asked for.

        Raises:
            ConfigError: no optimizer of torch's has such settings.
        """
        make = maker_of(self.optimizer, self.settings)
        return {
            "accumulation": self.accumulation,
            "reduction": self.reduction,
            "seed": self.seed,
            "max_grad_norm": float(self.max_grad_norm),
            **({} if make is None else {"optimizer": make}),
        }

    def to_dict(self) -> dict[str, Any]:
        """Return a copy by name."""
        return {field.name: copy.deepcopy(getattr(self, field.name)) for field in fields(self)}


def facts_of_base(world: World, model: PreTrainedModel) -> dict[str, str]:
    """Return the identity of a base. Collective: yes; two short meetings."""
    samples = world.together(lambda: bases.BaseSamples.of(bases.base_of(look_inside(model), {})))
    identity = world.all_reduce(samples.taken, lambda told: samples.identity(model, told))
    shapes = sorted((canonical(name), tuple(own.shape)) for name, own in model.named_parameters())
    return {
        "name": str(getattr(model, "name_or_path", "") or ""),
        "architecture": original_class(model).__name__,
        "shapes": hashlib.sha256(repr(shapes).encode()).hexdigest()[:32],
        "identity": json.dumps(identity.to_dict()),
    }


def facts_of(tenant: Tenant, base: Mapping[str, str]) -> TenantFacts:
    """Return the facts of a tenant as it is; its settings and schedule are not copied."""
    group = tenant.optimizer.param_groups[0]
    return TenantFacts(
        base=base,
        config={_named(site): (site.r, site.scaling, getattr(site, "dropout", 0.0)) for site in tenant.sites},
        matrices=dict(tenant.shapes),
        optimizer=class_name(tenant.optimizer),
        settings={key: value for key, value in group.items() if key != "params"},
        schedule=f"{type(tenant.schedule).__module__}.{type(tenant.schedule).__qualname__}",
        schedule_state=tenant.schedule.state_dict(),
        max_grad_norm=tenant.max_grad_norm,
        accumulation=tenant.options.accumulation,
        reduction=tenant.options.reduction,
        seed=tenant.options.seed,
        windows=tenant.windows,
        steps=tenant.steps,
        micro_batches=tenant.window.micro_batches,
        learned_tokens=tenant.window.learned_tokens,
    )


def _named(site: Any) -> str:
    return f"{site.module}.{site.parameter}" if isinstance(site, ExpertsSite) else str(site.module)


# ── taken out ─────────────────────────────────────────────────────────────────────────────────────

GRADIENT, MATRICES = "gradient", "matrices"
"""Flat: of an open window; and what the adapter's file has in another dtype."""

_OPTIMIZER = "optimizer."


def window_gradient(tenant: Tenant) -> torch.Tensor | None:
    """Sum what ranks have gathered in the open window, (count,); None between windows. See [Note: An open window].

    Collective: where a window is open, one all-reduce. Memory: a copy of the gradient.
    """
    return summed(tenant.world, tenant.gradient.clone()) if tenant.window.micro_batches else None


def training_tensors(tenant: Tenant, gradient: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Return what the optimizer keeps, as it is, and the gradient of an open window, by name.

    Raises:
        ConfigError: something of it is no tensor.
    """
    found = {} if gradient is None else {GRADIENT: gradient}
    for entry, values in tenant.optimizer.state.get(tenant.flat, {}).items():
        if not isinstance(values, torch.Tensor):
            raise ConfigError(
                f"{entry} of the optimizer of {tenant.name!r} is a {type(values).__name__}, and only tensors "
                "are saved; save with training_state=False"
            )
        found[_OPTIMIZER + entry] = values
    return found


# ── taken in ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class AllowedFaults:
    """Faults that a state may have: another base than the one that is there; values that are not finite."""

    other_base: OnFault
    not_finite: OnFault


@dataclass(frozen=True, slots=True)
class StoredTraining:
    """The state of a training in a file (``what``) or a state dict: facts, and shapes and dtypes of tensors."""

    what: str
    facts: TenantFacts
    tensors: Mapping[str, tuple[tuple[int, ...], DType]]


def require_on_fault(on_not_finite: object) -> None:
    """Raises ConfigError for what is no such mode."""
    if on_not_finite != "error" and not isinstance(on_not_finite, Ignore):
        raise ConfigError(f"on_not_finite={on_not_finite!r}: pass 'error' or Ignore()")


def given_training(
    tenant: Tenant, state: Mapping[str, Any], names_of_peft: Callable[[], Collection[str]]
) -> StoredTraining | TenantStart:
    """Look at a state dict, or matrices by PEFT's names, that all ranks are given alike. Collective: yes.

    ``names_of_peft`` gives the names of all tensors that PEFT saves of the tenant, with embeddings of the base.

    Raises:
        ConfigError: it is none, or its matrices are of another adapter.
        DisagreementError: ranks are given other values.
    """
    what = f"the state of {tenant.name!r}"

    def check() -> StoredTraining | TenantStart:
        given: object = state
        if not isinstance(given, Mapping):
            raise ConfigError(f"{what} is a {type(given).__name__}; pass what state_dict gave")
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

    found = tenant.world.together(check)
    told = tenant.world.together(lambda: digest_of(dict(state)))
    tenant.world.require_equal(told, f"the state that {tenant.name!r} is given")
    return found


def copy_given(tenant: Tenant, state: Mapping[str, Any], targets: Mapping[str, torch.Tensor]) -> None:
    """Copy the values of a state dict, or of matrices alone, that fits."""
    for key, values in tenant.matrices.items():
        values.copy_(state.get("adapter", state)[key])
    for key, values in targets.items():
        values.copy_(state["training"][key])


def _misfits_of_peft(
    tenant: Tenant, state: Mapping[str, torch.Tensor], names_of_peft: Callable[[], Collection[str]]
) -> list[str]:
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
    """Have a tenant, of which nobody knows yet, go on from a state, or begin with its matrices. Collective: yes.

    Args:
        tenant: as it was made.
        what: has the state, for messages.
        found: in it.
        fill: gives the tenant's matrices, and these tensors by name, their values.
        base: what the base is told apart by.
        allowed: whether values may be infinite, or no numbers; whether the base may be another.

    Raises:
        ConfigError: it is of another adapter, base, optimizer or schedule, naming what differs.
        FormatError: values are not finite, and that is not allowed.
    """
    world, targets = tenant.world, dict[str, torch.Tensor]()
    if isinstance(found, StoredTraining):
        targets = world.together(lambda: _targets(tenant, found, base, allowed.other_base))
    fill(targets)
    if world.rank:  # see [Note: An open window]
        tenant.gradient.zero_()
    moments = {key: values for key, values in targets.items() if key.startswith(_OPTIMIZER)}
    world.together(lambda: _require_finite(what, {**tenant.matrices, **moments}, allowed.not_finite))
    if isinstance(found, TenantStart):
        return found
    facts = found.facts
    world.together(lambda: _take_facts(tenant, facts))
    if moments:
        tenant.optimizer.state[tenant.flat] = {key.removeprefix(_OPTIMIZER): own for key, own in moments.items()}
    told = _match_bases(facts.base, base, allowed.other_base).told
    return TenantStart(facts.steps, facts.windows, facts.micro_batches, facts.learned_tokens, told)


def _targets(
    tenant: Tenant, found: StoredTraining, base: Mapping[str, str], on_other_base: OnFault
) -> dict[str, torch.Tensor]:
    """Return memory for what a training goes on from, by name, once all is known to fit.

    Raises:
        ConfigError: naming what does not.
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
        f"{shown(key)}: {_in_words(found.tensors.get(key))} in the file, {_in_words(wanted.get(key))} here"
        for key in sorted({*wanted, *found.tensors})
        if wanted.get(key) != found.tensors.get(key)
    ]
    if faults:
        raise _refusal(found.what, tenant, faults)
    return targets


def _in_words(tensor: tuple[tuple[int, ...], DType] | None) -> str:
    return "not there" if tensor is None else f"{tensor[0]} {tensor[1].label}"


def _refusal(what: str, tenant: Tenant, faults: list[str]) -> ConfigError:
    lines = "\n  ".join(faults[:20])
    return ConfigError(
        f"{what}: is no state of {tenant.name!r} as it is here:\n  {lines}\n"
        "Create it as it was, or take the matrices alone, with training_state=False."
    )


def _room_for_moments(tenant: Tenant, facts: TenantFacts) -> dict[str, torch.Tensor]:
    """Return memory for what an optimizer of these settings keeps after so many steps; not yet in it."""
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
        f"{key} has {count} values of {values.numel()} that are not finite; take them by on_not_finite=Ignore()"
        for key, values in tensors.items()
        if not allows(allowed, key) and (count := int((~values.isfinite()).sum()))
    ]
    if faults:
        raise FormatError(f"{what}: is no sound state:\n  " + "\n  ".join(faults[:20]))


def _take_facts(tenant: Tenant, facts: TenantFacts) -> None:
    """Have a tenant go on with what is no tensor; raises ConfigError where its schedule does not take it."""
    try:
        tenant.schedule.load_state_dict(copy.deepcopy(dict(facts.schedule_state)))
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"this is no state of {tenant.name!r}: its schedule does not take it: {error}") from error
    set_group(tenant.optimizer.param_groups[0], _taken_settings(facts.settings))
    tenant.max_grad_norm = float(facts.max_grad_norm)
    tenant.windows, tenant.steps = facts.windows, facts.steps
    tenant.window = TenantWindow(facts.micro_batches, facts.learned_tokens)


# ── compared ──────────────────────────────────────────────────────────────────────────────────────


def _differences(tenant: Tenant, there: TenantFacts, base: Mapping[str, str], on_other_base: OnFault) -> list[str]:
    """List why a tenant cannot continue from a state; empty if it can."""
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
        faults.append("its matrices are in another order; save it again with the versions that are installed here")
    if there.seed != here.seed:
        faults.append(f"seed {there.seed}, and {here.seed} here, which dropout follows from")
    if there.micro_batches:
        for what in ("accumulation", "reduction"):
            one, other = getattr(there, what), getattr(here, what)
            if one != other:
                faults.append(f"its window is open, with {what} {one}, and it is {other} here")
    return [*faults, *_of_optimizers(tenant.name, there, here), *_of_schedules(tenant, there, here)]


def _match_bases(there: Mapping[str, str], here: Mapping[str, str], on_other_base: OnFault) -> bases.BaseMatch:
    """Compare two bases by what :func:`facts_of_base` tells of them; FormatError if the first has no identity."""
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
        return [f"{fault}; pass optimizer= as it was" for fault in faults]
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
        return [f"its schedule was a {there.schedule}, and here it is a {here.schedule}; pass schedule= as it was"]
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
    """Whether a value is of the kind of the present one; numbers are finite."""
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


# ── JSON ──────────────────────────────────────────────────────────────────────────────────────────


def to_text(facts: TenantFacts, whose: str) -> str:
    """As JSON.

    Raises:
        ConfigError: the optimizer or the schedule has what is no plain data.
    """
    content = {name: to_json(value, f"{name} of {whose}") for name, value in facts.to_dict().items()}
    return json.dumps({"format": _FORMAT, **content})


def facts_in(text: str, what: str) -> TenantFacts:
    """The facts in a text, which a stranger may have written; ``what`` names it.

    Raises:
        FormatError: it is no such text.
    """
    content = parse_object(text.encode("utf-8", "surrogatepass"), what=what)
    if content.pop("format", None) != _FORMAT:
        raise FormatError(f"{what}: it is not of the format {_FORMAT!r}; update shardwise if it is newer")
    return sound_facts({name: from_json(value, what) for name, value in content.items()}, what)


def sound_facts(values: Mapping[str, Any], what: str) -> TenantFacts:
    """Facts of these values, which a stranger may have written; ``what`` names them.

    Raises:
        FormatError: a value is not there, unknown, or none that it can be. What a tenant compares with its own is
            of the right kind only.
    """
    kinds = {field.name: _KINDS.get(str(field.type), (dict,)) for field in fields(TenantFacts)}
    if kinds.keys() != values.keys():
        raise FormatError(
            f"{what}: it lacks {_few(kinds.keys() - values.keys())}, and has {_few(values.keys() - kinds.keys())} "
            "more; the file is damaged or forged"
        )
    for name, value in values.items():
        is_sound = type(value) in kinds[name]
        if kinds[name] == (int,) and name != "seed":
            is_sound = is_sound and 0 <= value < _MOST
        elif kinds[name] == (dict,) and name != "schedule_state":
            is_sound = is_sound and all(isinstance(key, str) for key in value)
        if not is_sound:
            raise FormatError(f"{what}: {name} is {shown(repr(value))}; the file is damaged or forged")
    base = values["base"]
    if base.keys() != _OF_A_BASE or not all(isinstance(told, str) for told in base.values()):
        raise FormatError(f"{what}: base is {shown(repr(base))}; the file is damaged or forged")
    if values["micro_batches"] > values["accumulation"] or values["steps"] > values["windows"]:
        raise FormatError(f"{what}: its counts contradict each other; the file is damaged or forged")
    return TenantFacts(**values)


def _few(names: Collection[str]) -> str:
    return ", ".join(shown(name) for name in sorted(names)[:8]) or "nothing"


_OF_A_BASE = {"name", "architecture", "shapes", "identity"}
_KINDS: Mapping[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,)}


# ── plain data ────────────────────────────────────────────────────────────────────────────────────

_OF, _IS = "of", "is"
_MOST_LEVELS = 32
_KEYS = (str, int, float, bool)
_FLOATS = {str(dtype): dtype for dtype in (torch.float32, torch.float64)}


def to_json(value: Any, what: str, level: int = 0) -> Any:
    """A value in lists, objects, texts and numbers. Floats keep their bits, as do tensors of one (a learning rate).

    Raises:
        ConfigError: naming what in it is no plain data.
    """
    if level > _MOST_LEVELS:
        raise ConfigError(f"{what} is nested more than {_MOST_LEVELS} levels deep, and cannot be saved")
    if isinstance(value, torch.Tensor) and value.ndim == 0 and value.dtype in _FLOATS.values():
        return {_OF: str(value.dtype), _IS: to_json(value.item(), what)}
    kind = type(value)
    if value is None or kind in (str, int, bool):
        return value
    if kind is float:
        return value if math.isfinite(value) else {_OF: "float", _IS: str(value)}
    if kind in (list, tuple):
        items = [to_json(item, f"{what}[{number}]", level + 1) for number, item in enumerate(value)]
        return items if kind is list else {_OF: "tuple", _IS: items}
    if kind in (dict, OrderedDict, Counter) and all(type(key) in _KEYS for key in value):
        pairs = [(to_json(key, what), to_json(item, f"{what}[{key!r}]", level + 1)) for key, item in value.items()]
        if kind is dict and all(type(key) is str for key in value) and value.keys() != {_OF, _IS}:
            return dict(pairs)
        return {_OF: "Counter" if kind is Counter else "dict", _IS: [list(pair) for pair in pairs]}
    raise ConfigError(
        f"{what} is a {kind.__module__}.{kind.__qualname__}, and a saved training holds plain data only (dicts, "
        "lists, tuples, texts, numbers): have its state_dict give that, or save with training_state=False"
    )


def from_json(value: Any, what: str, level: int = 0) -> Any:
    """Return the value that :func:`to_json` was given.

    Raises:
        FormatError: it has made no such thing; ``what`` names it.
    """
    if level > _MOST_LEVELS:
        raise FormatError(f"{what} is nested more than {_MOST_LEVELS} levels deep; the file is damaged or forged")
    if isinstance(value, list):
        return [from_json(item, what, level + 1) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() != {_OF, _IS}:
        return {key: from_json(item, what, level + 1) for key, item in value.items()}
    kind, inner = value[_OF], value[_IS]
    if isinstance(kind, str) and kind in _FLOATS and type(inner) is float:
        return torch.tensor(inner, dtype=_FLOATS[kind])
    if kind == "float" and inner in ("inf", "-inf", "nan"):
        return float(inner)
    if isinstance(inner, list):
        items = [from_json(item, what, level + 1) for item in inner]
        if kind == "tuple":
            return tuple(items)
        if kind in ("dict", "Counter") and all(_is_pair(item) for item in items):
            return dict(items) if kind == "dict" else Counter(dict(items))
    raise FormatError(f"{what} has {shown(repr(value))}, which means nothing; the file is damaged or forged")


def _is_pair(item: object) -> bool:
    return isinstance(item, list) and len(item) == 2 and type(item[0]) in _KEYS
