"""What of a tenant's state is no tensor: as a value, as JSON in a file's header, and compared with a tenant."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args

import torch
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel

from shardwise.bank.tenant import Reduction, Tenant, maker_of
from shardwise.checkpoints.base_identity import (
    ALLOW_OTHER_BASE,
    BaseIdentity,
    BaseMatch,
    BaseSamples,
    base_of,
    compare_bases,
)
from shardwise.errors import ConfigError, FormatError
from shardwise.execution.world import World
from shardwise.formats.strict_json import parse_object
from shardwise.models.optimizer_kind import class_name, unlike
from shardwise.models.torch_words import original_class
from shardwise.models.view import canonical, look_inside
from shardwise.planning.matching import OnFault
from shardwise.storage.names import shown
from shardwise.tuning.sites import ExpertsSite

_FORMAT = "shardwise tenant 1"
_MOST = 1 << 53
HOW_STEPPED = frozenset({"foreach", "fused", "capturable", "differentiable"})
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

    def require_optimizer(self) -> None:
        """Raises ConfigError where no optimizer of torch's has such settings."""
        maker_of(self.optimizer, self.settings)

    @property
    def options(self) -> dict[str, Any]:
        """What a tenant that goes on is made with where nothing else is asked for."""
        make = maker_of(self.optimizer, self.settings)
        return {
            "accumulation": self.accumulation,
            "reduction": self.reduction,
            "seed": self.seed,
            **({} if make is None else {"optimizer": make}),
        }


def facts_of_base(world: World, model: PreTrainedModel) -> dict[str, str]:
    """What a base is told apart by. Collective: yes; two short meetings."""
    samples = world.together(lambda: BaseSamples.of(base_of(look_inside(model), {})))
    identity = world.all_reduce(samples.taken, lambda told: samples.identity(model, told))
    shapes = sorted((canonical(name), tuple(own.shape)) for name, own in model.named_parameters())
    return {
        "name": str(getattr(model, "name_or_path", "") or ""),
        "architecture": original_class(model).__name__,
        "shapes": hashlib.sha256(repr(shapes).encode()).hexdigest()[:32],
        "identity": json.dumps(identity.to_dict()),
    }


def facts_of(tenant: Tenant, base: Mapping[str, str]) -> TenantFacts:
    """Of a tenant as it is; its settings and schedule are not copied."""
    group = tenant.optimizer.param_groups[0]
    return TenantFacts(
        base=base,
        config={_named(site): (site.r, site.scaling, getattr(site, "dropout", 0.0)) for site in tenant.sites},
        matrices=dict(tenant.shapes),
        optimizer=class_name(tenant.optimizer),
        settings={key: value for key, value in group.items() if key != "params"},
        schedule=_class(tenant.schedule),
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


def _class(value: object) -> str:
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


# ── JSON ──────────────────────────────────────────────────────────────────────────────────────────


def to_text(facts: TenantFacts, whose: str) -> str:
    """As JSON.

    Raises:
        ConfigError: the optimizer or the schedule has what is no plain data.
    """
    content = {
        field.name: to_json(_plain(getattr(facts, field.name)), f"{field.name} of {whose}")
        for field in fields(facts)
    }
    return json.dumps({"format": _FORMAT, **content})


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) and type(value) is not dict else value


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
        FormatError: a value is not there, unknown, or none that it can be.
    """
    names = {field.name for field in fields(TenantFacts)}
    if names != values.keys():
        raise FormatError(
            f"{what}: it lacks {_few(names - values.keys())}, and has {_few(values.keys() - names)} more; the "
            "file is damaged or forged"
        )
    for name, value in values.items():
        if not _IS_SOUND[name](value):
            raise FormatError(f"{what}: {name} is {shown(repr(value))}; the file is damaged or forged")
    if values["micro_batches"] > values["accumulation"] or values["steps"] > values["windows"]:
        raise FormatError(f"{what}: its counts contradict each other; the file is damaged or forged")
    return TenantFacts(**values)


def _few(names: Any) -> str:
    return ", ".join(shown(name) for name in sorted(names)[:8]) or "nothing"


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(value) <= float(_MOST)  # type: ignore[arg-type]


def _is_dict(of: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: (
        isinstance(value, dict) and all(isinstance(key, str) and of(item) for key, item in value.items())
    )


def _is_row(of: Callable[[object], bool], length: int) -> Callable[[object], bool]:
    return lambda value: isinstance(value, tuple) and len(value) == length and all(map(of, value))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


_OF_A_BASE = {"name", "architecture", "shapes", "identity"}
_IS_SOUND: Mapping[str, Callable[[Any], bool]] = {
    "base": lambda value: _is_dict(_is_text)(value) and value.keys() == _OF_A_BASE,
    "config": _is_dict(_is_row(_is_number, 3)),
    "matrices": _is_dict(_is_row(_is_count, 2)),
    "optimizer": _is_text,
    "settings": _is_dict(lambda _: True),
    "schedule": _is_text,
    "schedule_state": lambda value: isinstance(value, dict),
    "max_grad_norm": lambda value: type(value) in (int, float) and value > 0,
    "accumulation": lambda value: _is_count(value) and value > 0,
    "reduction": lambda value: value in get_args(Reduction),
    "seed": lambda value: type(value) is int and abs(value) < 1 << 64,
    **dict.fromkeys(("windows", "steps", "micro_batches", "learned_tokens"), _is_count),
}


# ── compared ──────────────────────────────────────────────────────────────────────────────────────


def differences(tenant: Tenant, there: TenantFacts, base: Mapping[str, str], on_other_base: OnFault) -> list[str]:
    """Why a tenant cannot go on from a state, in sentences; nothing where it can."""
    here = facts_of(tenant, base)
    faults = [*_of_bases(there.base, here.base, on_other_base), *differing_shapes(there.matrices, here.matrices)]
    if not faults:
        for site in sorted({*there.config, *here.config}):
            one, other = there.config.get(site), here.config.get(site)
            if one is None or other is None or tuple(one) != tuple(other):
                faults.append(f"{site}: (rank, scaling, dropout) is {one} in the state, and {other} in the adapter")
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


def match_bases(there: Mapping[str, str], here: Mapping[str, str], on_other_base: OnFault) -> BaseMatch:
    """Compare two bases by what :func:`facts_of_base` tells of them.

    Raises:
        FormatError: what is told of the first is no identity.
    """
    one, other = (_identity_in(told["identity"]) for told in (there, here))
    are_shapes_same = there["shapes"] == here["shapes"]
    return compare_bases(one, other, on_other_base, are_shapes_same=are_shapes_same)


def _identity_in(text: str) -> BaseIdentity:
    what = "the base of a tenant's state"
    return BaseIdentity.from_dict(parse_object(text.encode("utf-8", "surrogatepass"), what=what), what)


def _of_bases(there: Mapping[str, str], here: Mapping[str, str], on_other_base: OnFault) -> list[str]:
    known = f"{there['name'] or 'a base without a name'} ({there['architecture']})"
    own = f"{here['name'] or 'a base without a name'} ({here['architecture']})"
    if there["architecture"] != here["architecture"]:
        return [f"it was trained on {known}, and this is {own}"]
    match = match_bases(there, here, on_other_base)
    if match.refused:
        why = "; ".join(match.refused)
        return [f"it was trained on {known}, and this is another base, {own}: {why}. {ALLOW_OTHER_BASE}"]
    return []  # a folder may have been moved


def differing_shapes(there: Mapping[str, tuple[int, ...]], here: Mapping[str, tuple[int, ...]]) -> list[str]:
    faults = []
    for key in sorted({*there, *here}):
        one, other = there.get(key), here.get(key)
        if one is None or other is None or tuple(one) != tuple(other):
            faults.append(f"{key}: {one or 'not there'} in the state, {other or 'not there'} in the adapter")
    return faults


def _of_optimizers(name: str, there: TenantFacts, here: TenantFacts) -> list[str]:
    faults = unlike({name: (here.optimizer, here.settings)}, {name: (there.optimizer, there.settings)})
    if faults:
        return [f"{fault}; pass optimizer= as it was" for fault in faults]
    of_no_concern = HOW_STEPPED | _LATER
    for key in sorted((there.settings.keys() ^ here.settings.keys()) - of_no_concern):
        whose = "is not there" if key in here.settings else "is nothing that this one has"
        faults.append(f"the setting {shown(key)} of {there.optimizer} {whose}")
    for key in sorted((there.settings.keys() & here.settings.keys()) - HOW_STEPPED):
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
    """What :func:`to_json` was given.

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
