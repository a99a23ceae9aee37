"""How chats are read, as a value."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Learn(enum.Enum):
    """Which answers of a chat are learned."""

    ALL = "all"
    LAST = "last"


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How chats are read.

    Attributes:
        template: the chat template: None for the tokenizer's own, else a path to a Jinja file, or the name of one
            of several that the tokenizer has.
        learn: which answers are learned.
    """

    template: str | None = None
    learn: Learn = Learn.ALL
