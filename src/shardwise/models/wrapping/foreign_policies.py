"""Wrap policies as others write them: classes, torch's functions and partials of these, and further functions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any

from torch import nn
from torch.distributed.fsdp.wrap import (
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from shardwise.errors import ConfigError
from shardwise.models.wrapping.policies import Classes, Matching, MinSize, NoSplitModules


def as_policy(given: Any) -> Any:
    """The policy of ours that somebody else's comes to; what is neither is left as it is, for whoever checks it.

    A class, or several: the modules of these. ``transformer_auto_wrap_policy`` with its classes likewise, without:
    those that the model declares. ``size_based_auto_wrap_policy``: by size. Another function is asked.

    Raises:
        ConfigError: a partial of torch's that says what cannot be honoured.
    """
    if isinstance(given, functools.partial):
        return _of_partial(given)
    if given is transformer_auto_wrap_policy:
        return NoSplitModules()
    if given is size_based_auto_wrap_policy:
        return MinSize(_default_of(size_based_auto_wrap_policy, "min_num_params"))
    if _is_class(given):
        return Classes((given.__name__,))
    if isinstance(given, (set, frozenset, list, tuple)) and given and all(map(_is_class, given)):
        return Classes(_names(given))
    if callable(given) and not isinstance(given, type):
        return Matching(given)
    return given


def _of_partial(given: functools.partial[Any]) -> Any:
    if given.args:
        raise ConfigError(f"wrap is a functools.partial with {len(given.args)} positional arguments; name them")
    keywords = dict(given.keywords)
    if given.func is transformer_auto_wrap_policy:
        classes = keywords.pop("transformer_layer_cls", None)
        _refuse(keywords, "transformer_auto_wrap_policy")
        if not isinstance(classes, Collection) or not classes or not all(map(_is_class, classes)):
            raise ConfigError(
                f"transformer_layer_cls={classes!r} must be a set of classes, as in {{LlamaDecoderLayer}}"
            )
        return Classes(_names(classes))
    if given.func is size_based_auto_wrap_policy:
        numel = keywords.pop("min_num_params", _default_of(size_based_auto_wrap_policy, "min_num_params"))
        _refuse(keywords, "size_based_auto_wrap_policy")
        return MinSize(int(numel))
    if given.func is lambda_auto_wrap_policy:
        function = keywords.pop("lambda_fn", None)
        _refuse(keywords, "lambda_auto_wrap_policy")
        if not callable(function):
            raise ConfigError(f"lambda_fn={function!r} must be a function of a module")
        return Matching(function)
    return Matching(given)


def _refuse(keywords: dict[str, Any], of: str) -> None:
    left = {name: value for name, value in keywords.items() if value is not None}
    if left:
        name, value = next(iter(left.items()))
        raise ConfigError(
            f"wrap: {of} has {name}={value!r}, which is not known here; name the classes to wrap instead"
        )


def _is_class(given: object) -> bool:
    return isinstance(given, type) and issubclass(given, nn.Module)


def _names(classes: Collection[type]) -> tuple[str, ...]:
    """In an order that is the same on every rank, of a set too."""
    return tuple(sorted(kind.__name__ for kind in classes))


def _default_of(function: Callable[..., Any], name: str) -> int:
    return int(inspect.signature(function).parameters[name].default)
