"""Encodes values beside the tensors as plain data, so that whoever reads a checkpoint runs nothing."""

from __future__ import annotations

import hashlib
import io
from collections import Counter, OrderedDict
from typing import Any

import torch

from shardwise.errors import ConfigError

_PLAIN = (str, int, float, bool, bytes, type(None))
_MOST_LEVELS = 64


def packed(value: object, what: str) -> bytes:
    """A value as ``torch.save`` writes it, which ``torch.load(weights_only=True)`` reads.

    Raises:
        ConfigError: naming what in it is no plain data.
    """
    _require_plain(value, what, 0)
    buffer = io.BytesIO()
    torch.save(_at_home(value), buffer)
    return buffer.getvalue()


def digest_of(value: object) -> str:
    """The same for equal values, whatever objects they are made of."""
    found = hashlib.sha256()
    _digest(value, found)
    return found.hexdigest()[:32]


def _require_plain(value: object, what: str, level: int) -> None:
    kind = type(value)  # exactly: an object of a subclass is written by the name of its class
    if level > _MOST_LEVELS:
        raise ConfigError(f"{what} is nested more than {_MOST_LEVELS} levels deep, and cannot be saved")
    if kind in (dict, OrderedDict, Counter):  # MultiStepLR counts its milestones
        assert isinstance(value, dict)
        for key, item in value.items():
            if type(key) not in (str, int, float, bool):
                raise ConfigError(f"{what} has a key of type {type(key).__name__}; keys are texts or numbers")
            _require_plain(item, f"{what}[{key!r}]", level + 1)
    elif kind in (list, tuple):
        assert isinstance(value, (list, tuple))
        for number, item in enumerate(value):
            _require_plain(item, f"{what}[{number}]", level + 1)
    elif kind is not torch.Tensor and kind not in _PLAIN:
        raise ConfigError(
            f"{what} is of type {kind.__module__}.{kind.__qualname__}; a checkpoint holds plain data only (dicts, "
            "lists, tuples, texts, numbers, bytes, tensors): have its state_dict give that"
        )


def _at_home(value: Any) -> Any:
    """Tensors on the CPU, and without what else their storages hold."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return type(value)({key: _at_home(item) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        return type(value)(_at_home(item) for item in value)
    return value


def _digest(value: Any, into: Any) -> None:
    into.update(f"{type(value).__name__}(".encode())
    if isinstance(value, torch.Tensor):
        into.update(f"{value.dtype} {tuple(value.shape)} ".encode())
        into.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key, item in value.items():
            _digest(key, into)
            _digest(item, into)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _digest(item, into)
    else:
        into.update(repr(value).encode())
    into.update(b")")
