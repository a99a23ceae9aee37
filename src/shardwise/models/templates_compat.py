"""Private names of transformers for chat templates, in one file: without torch, for processes that only tokenise.

Seen in transformers 5.17 to 5.23.
"""

from __future__ import annotations

import contextlib
from typing import Any

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
