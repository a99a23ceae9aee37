"""Plain data as JSON and back, exactly: what JSON has no word for is an object that says what it is."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from typing import Any

import torch

from shardwise.errors import ConfigError, FormatError
from shardwise.storage.names import shown

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
        "lists, tuples, texts, numbers): have its state_dict give that, or save with state=MatricesOnly()"
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
