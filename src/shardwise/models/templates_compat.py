"""Private names of transformers and Jinja for chat templates, in one file: without torch, for who only tokenises.

Seen in transformers 5.17 to 5.23, and Jinja 3.1.6.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import pass_context
from jinja2.runtime import Context, Macro, Undefined
from jinja2.utils import Namespace

from shardwise.errors import KnownNames

with KnownNames("transformers", "5.17 to 5.23"):
    from transformers.utils.chat_template_utils import _compile_jinja_template


def compile_template(text: str) -> Any:
    """A chat template, compiled for transformers' sandbox; that of equal texts is the same object."""
    return _compile_jinja_template(text)


def follow_marks(
    template: Any, pieces: list[str], marks: list[tuple[int, int]]
) -> contextlib.AbstractContextManager[None]:
    """What is marked as generated from now on is added to ``marks``, as places in what ``pieces`` then say."""
    found: contextlib.AbstractContextManager[None] = template.environment.activate_tracker(pieces, marks)
    return found


def told_what_is_set(function: Callable[[Mapping[str, Any], Any], Any]) -> Callable[..., Any]:
    """A function for a template to call with one value; it is also told all that the template has set, by name."""

    @pass_context
    def called(context: Context, value: Any) -> Any:
        return function(context.vars, value)

    return called


def attributes(value: Any) -> dict[str, Any] | None:
    """What a namespace of a template has, to be read and changed; None of what is no namespace."""
    if not isinstance(value, Namespace):
        return None
    found: dict[str, Any] = value._Namespace__attrs
    return found


def is_macro(value: Any) -> bool:
    """Whether a value is a macro of a template."""
    return isinstance(value, Macro)


def is_undefined(value: Any) -> bool:
    """Whether a value stands for what is not there."""
    return isinstance(value, Undefined)


def set_round(loop: Any, number: int) -> None:
    """Have a loop of a template be in this round."""
    loop.index0 = number
