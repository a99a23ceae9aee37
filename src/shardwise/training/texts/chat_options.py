"""How chats are read, as a value."""

from __future__ import annotations

import datetime
import enum
from dataclasses import dataclass


class Learn(enum.Enum):
    """Which answers of a chat are learned; see [Note: What is learned of a chat]."""

    ALL = "all"
    """Each as it was said at its turn, in as many examples as that takes."""
    LAST = "last"
    """The last one."""
    AS_READ = "as_read"
    """Each as it stands in the whole chat, in one example, be it rewritten there."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How chats are read.

    Attributes:
        template: the chat template: None for the tokenizer's own, else a path to a Jinja file, or the name of one
            of several that the tokenizer has.
        learn: which answers are learned.
        day: the day that templates are told (Llama 3, gpt-oss); None for today's. Rows of one run have one.
    """

    template: str | None = None
    learn: Learn = Learn.ALL
    day: datetime.date | None = None
