"""State of an adapter's training except for tensors, as JSON that is validated when it is read."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, get_type_hints

import torch
from huggingface_hub.dataclasses import type_validator
from transformers import PreTrainedModel

from shardwise.bank.adapter import BankAdapter, require_options
from shardwise.core.errors import ConfigError, FormatError
from shardwise.core.formatting import canonical_name
from shardwise.files.checkpoint_index import parse_object
from shardwise.files.urls import shown
from shardwise.fsdp.named_tensors import collect_tensors
from shardwise.fsdp.optimizer_states_by_name import class_name
from shardwise.fsdp.torch_private import original_class
from shardwise.models.lora.adapted_layers import AdaptedSite, ExpertsSite
from shardwise.ranks.world import World
from shardwise.state import base_identity as bases

_FORMAT = "shardwise tenant 1"
"""Value of "format" in saved files. It keeps an older word for an adapter, so that files stay readable."""

_BASE_KEYS = {"name", "architecture", "shapes", "identity"}

_MAX_DEPTH = 32

_KEY_TYPES = (str, int, float, bool)

_FLOATS = {str(dtype): dtype for dtype in (torch.float32, torch.float64)}

_OF, _IS = "of", "is"
"""Keys of a value that JSON has no type for: the name of the type, and the value as JSON."""


@dataclass(frozen=True, slots=True)
class TrainingFacts:
    """State of an adapter except for tensors, equal on every rank and for any number of ranks.

    Attributes:
        base: "name", as PEFT has it, "architecture", a digest of the names and "shapes" of its
            parameters, and its "identity" as JSON ([Note: The identity of a base] in
            ``state/base_identity.py``).
        config: (rank, scaling, dropout) by layer.
        matrices: shapes, in the order of the matrices in flat tensors.
        optimizer: class of the optimizer.
        settings: settings of its parameter group.
        schedule: class of the schedule.
        schedule_state: ``state_dict`` of the schedule.
        max_grad_norm: the current limit.
        gradient_accumulation_steps: micro-batches of a window. None for any number.
        reduction: reduction of the loss.
        seed: seed of the dropout.
        windows: completed windows, whether or not their step was taken.
        steps: optimizer steps.
        micro_batches: micro-batches of the open window.
        num_supervised_tokens: supervised tokens of the open window, on all ranks.
    """

    base: dict[str, str]
    config: dict[str, tuple[int | float, ...]]
    matrices: dict[str, tuple[int, ...]]
    optimizer: str
    settings: dict[str, Any]
    schedule: str
    schedule_state: dict[Any, Any]
    max_grad_norm: int | float
    gradient_accumulation_steps: int | None
    reduction: str
    seed: int
    windows: int
    steps: int
    micro_batches: int
    num_supervised_tokens: int

    def options(self) -> dict[str, Any]:
        """Return the options of a resumed adapter that are used unless others are passed."""
        names = ("gradient_accumulation_steps", "reduction", "seed", "max_grad_norm")
        return {name: getattr(self, name) for name in names}

    def to_dict(self) -> dict[str, Any]:
        """Return a copy by name."""
        return {field.name: copy.deepcopy(getattr(self, field.name)) for field in fields(self)}


def identify_base(world: World, model: PreTrainedModel) -> dict[str, str]:
    """Return the identity of a base. Collective: yes (a small exchange)."""
    with world.all_reduce("identify the base") as exchange:
        samples = bases.BaseSamples.select(model, bases.select_base(collect_tensors(model), {}))
        exchange.local = samples.fingerprints()
        # Runs on the first rank, with the config that this one has. Other ranks contribute the sums of their
        # shards.
        exchange.reduce_fun = samples.identity
    identity = exchange.result
    shapes = sorted((canonical_name(name), tuple(each.shape)) for name, each in model.named_parameters())
    return {
        "name": str(getattr(model, "name_or_path", "") or ""),
        "architecture": original_class(model).__name__,
        "shapes": hashlib.sha256(repr(shapes).encode()).hexdigest()[:32],
        "identity": json.dumps(asdict(identity)),
    }


def get_facts(adapter: BankAdapter, base: Mapping[str, str]) -> TrainingFacts:
    """Return the current facts of an adapter. Its settings and schedule are not copied."""
    return TrainingFacts(
        base=dict(base),
        config={_site_name(site): (site.r, site.scaling, getattr(site, "dropout", 0.0)) for site in adapter.sites},
        matrices=dict(adapter.shapes),
        optimizer=class_name(adapter.optimizer),
        settings=adapter.settings,
        schedule=f"{type(adapter.schedule).__module__}.{type(adapter.schedule).__qualname__}",
        schedule_state=adapter.schedule.state_dict(),
        max_grad_norm=adapter.max_grad_norm,
        gradient_accumulation_steps=adapter.options["gradient_accumulation_steps"],
        reduction=adapter.options["reduction"],
        seed=adapter.options["seed"],
        windows=adapter.windows,
        steps=adapter.steps,
        micro_batches=adapter.micro_batches,
        num_supervised_tokens=adapter.num_supervised_tokens,
    )


def _site_name(site: AdaptedSite) -> str:
    return f"{site.module}.{site.parameter}" if isinstance(site, ExpertsSite) else site.module


def facts_to_text(facts: TrainingFacts, whose: str) -> str:
    """Return the facts as JSON. ``whose`` names the adapter in errors.

    Raises:
        ConfigError: the optimizer or the schedule has a value that is not plain data.
    """
    content = {name: to_json(value, f"{name} of {whose}") for name, value in facts.to_dict().items()}
    return json.dumps({"format": _FORMAT, **content})


def parse_facts(text: str, what: str) -> TrainingFacts:
    """Parse facts from untrusted text. ``what`` names it in errors.

    Raises:
        FormatError: the text is not of this format.
    """
    content = parse_object(text.encode("utf-8", "surrogatepass"), what=what)
    if content.pop("format", None) != _FORMAT:
        raise FormatError(f"{what}: it is not of the format {_FORMAT!r}. Update shardwise if it is newer")
    return validate_facts({name: from_json(value, what) for name, value in content.items()}, what)


def validate_facts(values: Mapping[str, Any], what: str) -> TrainingFacts:
    """Validate untrusted facts. ``what`` names them in errors.

    Raises:
        FormatError: a value is missing, unknown or invalid. Of values that are compared with the adapter's own
            later, only the type is checked.
    """
    hints = get_type_hints(TrainingFacts)
    try:
        if odd := sorted(map(str, hints.keys() ^ values.keys())):
            raise TypeError(f"{', '.join(map(shown, odd[:8]))}: missing or unknown")
        for name, hint in hints.items():
            type_validator(name, values[name], hint)
        facts = TrainingFacts(**values)
        # Types are valid from here on, so that values can be compared.
        if facts.base.keys() != _BASE_KEYS:
            raise TypeError(f"base: has other keys than {', '.join(sorted(_BASE_KEYS))}")
        if min(facts.steps, facts.micro_batches, facts.num_supervised_tokens) < 0:
            raise TypeError("a count is below 0")
        most = math.inf if facts.gradient_accumulation_steps is None else facts.gradient_accumulation_steps
        if facts.micro_batches > most or facts.steps > facts.windows:
            raise TypeError("the counts contradict each other")
        require_options(facts.options())
    except (TypeError, ConfigError) as error:
        raise FormatError(f"{what}: has an invalid value: {error}. Save it again") from error
    return facts


def to_json(value: Any, what: str, level: int = 0) -> Any:
    """Convert a value to lists, objects, strings and numbers. Floats and tensors of one float keep their bits.

    Raises:
        ConfigError: a value is not plain data.
    """
    if level > _MAX_DEPTH:
        raise ConfigError(f"{what} is nested more than {_MAX_DEPTH} levels deep, and cannot be saved")
    # A learning rate may be a tensor of one number.
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
    if kind in (dict, OrderedDict, Counter) and all(type(key) in _KEY_TYPES for key in value):
        pairs = [(to_json(key, what), to_json(item, f"{what}[{key!r}]", level + 1)) for key, item in value.items()]
        # As a JSON object, unless it has other keys than strings, or would be read as a converted value.
        if kind is dict and all(type(key) is str for key in value) and value.keys() != {_OF, _IS}:
            return dict(pairs)
        return {_OF: "Counter" if kind is Counter else "dict", _IS: [list(pair) for pair in pairs]}
    raise ConfigError(
        f"{what} is a {kind.__module__}.{kind.__qualname__}, and a saved training holds plain data only (dicts, "
        "lists, tuples, texts, numbers): have its state_dict return that, or save with training_state=False"
    )


def from_json(value: Any, what: str, level: int = 0) -> Any:
    """Return the value that :func:`to_json` was given.

    Raises:
        FormatError: the value is not a result of :func:`to_json`. ``what`` names it.
    """
    if level > _MAX_DEPTH:
        raise FormatError(
            f"{what} is nested more than {_MAX_DEPTH} levels deep. The file is corrupt. Save it again"
        )
    if isinstance(value, list):
        return [from_json(item, what, level + 1) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() != {_OF, _IS}:
        return {key: from_json(item, what, level + 1) for key, item in value.items()}
    # A converted value. The name of its type is untrusted, and so is what it is made of.
    kind, inner = value[_OF], value[_IS]
    if isinstance(kind, str) and kind in _FLOATS and type(inner) is float:
        return torch.tensor(inner, dtype=_FLOATS[kind], device="cpu")
    if kind == "float" and inner in ("inf", "-inf", "nan"):
        return float(inner)
    if isinstance(inner, list):
        items = [from_json(item, what, level + 1) for item in inner]
        if kind == "tuple":
            return tuple(items)
        if kind in ("dict", "Counter") and all(_is_pair(item) for item in items):
            return dict(items) if kind == "dict" else Counter(dict(items))
    raise FormatError(f"{what} has {shown(repr(value))}, which means nothing. The file is corrupt. Save it again")


def _is_pair(item: object) -> bool:
    return isinstance(item, list) and len(item) == 2 and type(item[0]) in _KEY_TYPES
