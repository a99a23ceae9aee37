"""What a server keeps in memory: sessions, models, samplers, requests with their results, and its settings."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from shardwise.serve.checkpoints import Checkpoint
from shardwise.serve.keys import UserKey
from shardwise.serve.operations import (
    CreateModel,
    Generate,
    LoadModel,
    OptimStep,
    Pass,
    Refusal,
    SampleAnswer,
    SaveModel,
    TurnOperation,
)
from shardwise.serve.turns import Cost, Stage

_FUTURE_BYTES: Final = 2048
"""Bytes of a future with its event and its places in dicts, about."""

OWN: Final = UserKey(name="")
"""The key of the server's own requests, whose results nobody retrieves. No user has this name."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a server.

    Attributes:
        name: name of the base for clients.
        tokenizer: name of the tokenizer for clients.
        max_tokens_per_turn: of passes and samples.
        fuse_wait_s: seconds that a turn waits, after each request, for models that stepped lately. None for half of
            the last turn, at most 0.1.
        session_timeout_s: seconds without a heartbeat after which the models of a session are saved and removed,
            and without a sample after which a checkpoint that was loaded to sample from is forgotten.
        retrieval_s: seconds for which a request for a result waits. The client waits for 45.
        max_rows: rows of a request. Clients cut a batch into requests.
    """

    name: str
    tokenizer: str
    max_tokens_per_turn: int = 16384
    fuse_wait_s: float | None = None
    session_timeout_s: float = 600.0
    retrieval_s: float = 30.0
    max_rows: int = 1024


@dataclass(slots=True)
class QueuedRequest:
    """A request, from its submission until its result is forgotten. See [Note: A request] in ``service.py``.

    Attributes:
        request_id: clients retrieve the result by it.
        key: the user.
        is_new: False for one that was sent before. Only its id is used.
        operation: what ranks carry out. None once the request is done.
        answer: what the result needs beside the operation's outcome, or all of the result.
        checkpoint: is recorded when the operation is done.
        may_replace: whether the checkpoint may replace one of its name.
        sampler: is opened when the operation is done.
        result: bytes of protobuf, a JSON object, or a refusal, which there may be before its turn.
        submitted_s: when it was queued.
    """

    request_id: str
    key: UserKey = OWN
    is_new: bool = True
    operation: TurnOperation | None = None
    answer: Mapping[str, Any] | SampleAnswer = field(default_factory=dict)
    checkpoint: Checkpoint | None = None
    may_replace: bool = True
    sampler: Sampler | None = None
    result: bytes | Mapping[str, Any] | Refusal | None = None
    is_done: asyncio.Event = field(default_factory=asyncio.Event)
    submitted_s: float = field(default_factory=time.monotonic)
    retrieved_s: float | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes in memory, of the objects around a result, too, which have more than most results."""
        return _FUTURE_BYTES + (len(self.result) if isinstance(self.result, bytes) else 0)

    @property
    def cost(self) -> Cost:
        match self.operation:
            case Pass(num_tokens=num_tokens):
                return Cost(Stage.PASS, num_tokens)
            case OptimStep():
                return Cost(Stage.STEP)
            case Generate(sample=sample):
                return Cost(Stage.OTHER, len(sample.prompt) + sample.max_tokens * sample.n)
            case SaveModel() | LoadModel() | CreateModel():
                return Cost(Stage.OTHER, is_slow=True)
        return Cost(Stage.OTHER)


@dataclass
class Session:
    session_id: str
    key: UserKey
    heartbeat_s: float


@dataclass
class Model:
    """A model of a user.

    Attributes:
        creation_id: request that created it.
        next_seq_id: that of the request that runs next.
        early: requests that wait for an earlier one, by seq_id.
        early_tokens: of these requests.
        seen: digest and future of each request, by seq_id, so that a repeated one is answered again.
        losses: loss per trained token of the last passes.
        num_steps: steps that were taken.
    """

    model_id: str
    session: Session
    creation_id: str
    rank: int
    parts: frozenset[str]
    user_metadata: Mapping[str, Any] | None = None
    next_seq_id: int = 1
    early: dict[int, QueuedRequest] = field(default_factory=dict)
    early_tokens: int = 0
    seen: dict[int, tuple[str, str]] = field(default_factory=dict)
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=200))
    request_s: float = field(default_factory=time.monotonic)
    stepped_turn: int = -10
    num_steps: int = 0
    is_ready: bool = False

    @property
    def key(self) -> UserKey:
        return self.session.key

    @property
    def is_created(self) -> bool:
        """Whether there is a model to save: now, or before its requests that are queued have run."""
        return self.is_ready or self.next_seq_id > 1


@dataclass(frozen=True, slots=True)
class Sampler:
    """What a sampling session samples from: a copy in memory, a checkpoint, or the base.

    With ``ttl_s`` it is a snapshot in a folder, which is kept for as many seconds after each use.
    """

    key: UserKey
    session_id: str
    name: str | None = None
    folder: str | None = None
    save_id: str = ""
    ttl_s: int | None = None
    seen: dict[int, tuple[str, str]] = field(default_factory=dict)


@dataclass
class Counters:
    """Sums for metrics."""

    turns: int = 0
    tokens: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    failures: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    adapters: deque[int] = field(default_factory=lambda: deque(maxlen=1000))
    waits_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


def name_model(session: Session, number: int) -> str:
    """Return the id of a session's model. Clients derive it, too."""
    return f"{session.session_id}:train:{number}"


def digest_of(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def new_id() -> str:
    """Return an id of 128 random bits."""
    return secrets.token_hex(16)
