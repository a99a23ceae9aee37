"""State of a server: sessions, models, queues and futures. All of it belongs to one event loop."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from shardwise.core.errors import ConfigError
from shardwise.serve.checkpoints import Checkpoint, CheckpointStore
from shardwise.serve.keys import UserKey
from shardwise.serve.operations import (
    CreateModel,
    ForgetModels,
    Generate,
    LoadModel,
    OffloadModels,
    OptimStep,
    Pass,
    PassOutcome,
    Refusal,
    SaveModel,
    Turn,
    TurnOperation,
)
from shardwise.serve.turns import Cost, Stage, next_turn

_KEPT_S: Final = 600.0
"""Seconds for which a result is kept after it was retrieved."""

_IDLE_S: Final = 60.0
"""Seconds without a request after which a model is offloaded."""

_MAX_FUSE_WAIT_S: Final = 0.1

_log = logging.getLogger(__name__)


class StatusError(Exception):
    """An answer with an HTTP status other than 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a server.

    Attributes:
        name: name of the base for clients.
        tokenizer: name of the tokenizer for clients.
        max_tokens_per_turn: of passes and samples.
        fuse_wait_s: seconds that a turn waits for models that stepped lately. None for half of the last turn.
        session_timeout_s: seconds without a heartbeat after which the models of a session are saved and removed.
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


@dataclass
class Future:
    """The result of a request: bytes of protobuf, a JSON object, or a refusal."""

    request_id: str
    key: UserKey
    reason: str = ""
    result: bytes | dict[str, Any] | Refusal | None = None
    is_done: asyncio.Event = field(default_factory=asyncio.Event)
    retrieved_s: float | None = None

    @property
    def num_bytes(self) -> int:
        return len(self.result) if isinstance(self.result, bytes) else 200


@dataclass(slots=True)
class Queued:
    """An operation of a queue. ``write`` makes its result from its outcome, and ``refusal`` is one known before."""

    operation: TurnOperation
    cost: Cost
    write: Callable[[Any], bytes | dict[str, Any]]
    refusal: Refusal | None = None


@dataclass
class Session:
    session_id: str
    key: UserKey
    heartbeat_s: float
    user_metadata: Mapping[str, Any] | None = None
    samplers: list[str] = field(default_factory=list)


@dataclass
class Model:
    """A model of a user.

    Attributes:
        next_seq_id: that of the request that runs next.
        early: requests that wait for an earlier one, by seq_id.
        seen: digest and future of each request, by seq_id, so that a repeated one is answered again.
        failed_seq_id: a pass that failed since the last step.
        snapshots: copies to sample from, the oldest first.
        losses: loss per token of the last passes.
    """

    model_id: str
    key: UserKey
    session: Session
    rank: int
    parts: frozenset[str]
    user_metadata: Mapping[str, Any] | None = None
    next_seq_id: int = 1
    early: dict[int, Queued] = field(default_factory=dict)
    seen: dict[int, tuple[str, str]] = field(default_factory=dict)
    failed_seq_id: int | None = None
    snapshots: list[str] = field(default_factory=list)
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=200))
    request_s: float = field(default_factory=time.monotonic)
    stepped_turn: int = -10
    num_steps: int = 0
    is_ready: bool = False
    is_offloaded: bool = False


@dataclass(frozen=True, slots=True)
class Sampler:
    """What a sampling session samples from: a copy in memory, a checkpoint, or the base."""

    key: UserKey
    name: str | None
    folder: str | None = None
    seen: dict[int, tuple[str, str]] = field(default_factory=dict)


@dataclass
class Counters:
    """Sums for metrics."""

    turns: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    adapters: deque[int] = field(default_factory=lambda: deque(maxlen=1000))
    waits_s: dict[str, float] = field(default_factory=dict)


class Service:
    """Takes requests, makes turns of them, and keeps their results. Not for several threads.

    Args:
        settings: of the server.
        store: of checkpoints, or None without a folder for them.
    """

    def __init__(self, settings: Settings, store: CheckpointStore | None) -> None:
        self.settings = settings
        self.store = store
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, Model] = {}
        self.expired: set[str] = set()
        self.samplers: dict[str, Sampler] = {}
        self.futures: dict[str, Future] = {}
        self.counters = Counters()
        self.is_stopping = False
        self.queues: dict[str, dict[str, deque[Queued]]] = {}
        self._queued: dict[str, tuple[Queued, float]] = {}
        self._waiting: dict[str, tuple[int, int]] = {}
        """Number of requests that wait, and their tokens, by user."""
        self._credits: dict[str, int] = {}
        self._order: tuple[str, ...] = ()
        self._has_work = asyncio.Event()
        self._last_turn_s = 0.0
        self._outside: set[asyncio.Task[None]] = set()
        self._loaded: dict[str, float] = {}

    # Sessions and models

    def open_session(self, key: UserKey, user_metadata: Mapping[str, Any] | None) -> Session:
        self.require_open()
        session = Session(secrets.token_hex(16), key, time.monotonic(), user_metadata)
        self.sessions[session.session_id] = session
        return session

    def get_session(self, key: UserKey, session_id: str) -> Session:
        session = self.sessions.get(session_id)
        if session is None:
            raise StatusError(410 if session_id in self.expired else 404, f"session {session_id!r}: is not open")
        _require_own(key, session.key, "session")
        return session

    def get_model(self, key: UserKey, model_id: str) -> Model:
        model = self.models.get(model_id)
        if model is None:
            raise StatusError(410 if model_id in self.expired else 404, f"model {model_id!r}: does not exist")
        _require_own(key, model.key, "model")
        model.request_s = time.monotonic()
        model.session.heartbeat_s = model.request_s
        return model

    def add_model(
        self,
        session: Session,
        model_seq_id: int,
        rank: int,
        parts: frozenset[str],
        metadata: Mapping[str, Any] | None,
    ) -> tuple[Model, bool]:
        """Return the model of a session with a number, and whether it is new.

        Raises:
            StatusError: 429 if the user has too many.
        """
        model_id = f"{session.session_id}:train:{model_seq_id}"  # clients derive it, too
        if model_id in self.models:
            return self.models[model_id], False
        number = sum(model.key is session.key for model in self.models.values())
        if number >= session.key.max_models:
            raise StatusError(429, f"max_models: you have {number} models. Unload one")
        model = Model(model_id, session.key, session, rank, parts, metadata)
        self.models[model_id] = model
        return model, True

    def remove_model(self, model: Model) -> None:
        """Remove a model at the end of the next turn, with its snapshots and requests."""
        del self.models[model.model_id]
        self.expired.add(model.model_id)
        self._refuse_queue(model, "the model was removed")
        self._put_own(ForgetModels(new_id(), (model.model_id, *model.snapshots)))

    def _refuse_queue(self, model: Model, text: str) -> None:
        for item in [*self.queues.get(model.key.name, {}).pop(model.model_id, ()), *model.early.values()]:
            self._finish(item, Refusal(text))
        model.early.clear()

    # Requests

    def require_open(self) -> None:
        if self.is_stopping:
            raise StatusError(503, "the server is stopping")

    def submit(
        self,
        model: Model,
        seq_id: int,
        digest: str,
        make: Callable[[str], Queued],
        *,
        is_pass: bool = False,
    ) -> str:
        """Queue a request of a model in its place. Return the id of its future.

        Args:
            model: the model.
            seq_id: place of the request, from 1.
            digest: of its body, so that a request that was sent again is not carried out twice.
            make: makes the operation from the id of the request. If it raises ConfigError, the request has failed,
                and its place is taken all the same.
            is_pass: whether it is a part of a batch, without which the next step must not be taken.

        Raises:
            StatusError: 400 for an invalid place, 429 for too many requests, 503 if the server is stopping.
        """
        if seq_id < 1:
            raise StatusError(400, f"seq_id={seq_id}: begins with 1")
        if seq_id in model.seen:
            known, request_id = model.seen[seq_id]
            return (
                request_id
                if known == digest
                else self.refuse(model.key, f"seq_id={seq_id}: had another body before")
            )
        if seq_id < model.next_seq_id:
            return self.refuse(model.key, f"seq_id={seq_id}: was answered before, and its result is gone")
        self.require_open()
        future = self._open_future(model.key)
        try:
            item = make(future.request_id)
            self._require_room(model.key, item.cost.tokens)
        except ConfigError as error:
            # It keeps its place in the order, also because a step after it must not be taken.
            failed = Pass(future.request_id, model.model_id, (), seq_id, backward=is_pass)
            refusal = Refusal(str(error))
            item = Queued(failed, Cost(Stage.PASS), write_nothing, refusal)
            self._set_result(future, refusal)
        except StatusError:
            del self.futures[future.request_id]
            raise
        model.seen[seq_id] = digest, future.request_id
        model.early[seq_id] = item
        self._note_queued(future, item)
        queue = self._get_queue(model.key, model.model_id)
        while (ready := model.early.pop(model.next_seq_id, None)) is not None:
            queue.append(ready)
            model.next_seq_id += 1
        self._describe_waits(model)
        self._has_work.set()
        return future.request_id

    def submit_unordered(self, key: UserKey, queue: str, make: Callable[[str], Queued]) -> str:
        """Queue a request that has no place in the order of a model. Errors: as :meth:`submit`."""
        future, item = self._admit(key, make)
        if item is not None:
            self._get_queue(key, queue).append(item)
            self._has_work.set()
        return future.request_id

    def run_outside(
        self, key: UserKey, make: Callable[[str], Queued], work: Callable[[Any], Awaitable[Any]]
    ) -> str:
        """Carry out a request in no turn. Return the id of its future. Errors: as :meth:`submit`.

        ``work`` returns its outcome, and raises ConfigError if it fails.
        """
        future, item = self._admit(key, make)
        if item is None:
            return future.request_id

        async def run() -> None:
            try:
                outcome = await work(item.operation)
            except ConfigError as error:
                outcome = Refusal(str(error), is_users=False)
            self._finish(item, outcome)

        task = asyncio.get_running_loop().create_task(run())
        self._outside.add(task)
        task.add_done_callback(self._outside.discard)
        return future.request_id

    def _admit(self, key: UserKey, make: Callable[[str], Queued]) -> tuple[Future, Queued | None]:
        """Return the future of a request, and its operation, or None if it has failed already."""
        self.require_open()
        future = self._open_future(key)
        try:
            item = make(future.request_id)
            self._require_room(key, item.cost.tokens)
        except ConfigError as error:
            self._set_result(future, Refusal(str(error)))
            return future, None
        except StatusError:
            del self.futures[future.request_id]
            raise
        self._note_queued(future, item)
        return future, item

    def forget(self, names: Sequence[str]) -> None:
        """Queue the removal of copies and loaded checkpoints."""
        self._put_own(ForgetModels(new_id(), tuple(names)))

    def answer(self, key: UserKey, result: dict[str, Any]) -> str:
        """Return the id of a future that is done."""
        future = self._open_future(key)
        self._set_result(future, result)
        return future.request_id

    def refuse(self, key: UserKey, text: str) -> str:
        """Return the id of a future that has failed by the user's fault."""
        future = self._open_future(key)
        self._set_result(future, Refusal(text))
        return future.request_id

    def _open_future(self, key: UserKey) -> Future:
        future = Future(new_id(), key)
        self.futures[future.request_id] = future
        return future

    def _get_queue(self, key: UserKey, name: str) -> deque[Queued]:
        return self.queues.setdefault(key.name, {}).setdefault(name, deque())

    def _put_own(self, operation: TurnOperation) -> None:
        """Queue an operation of the server itself, whose outcome nobody waits for."""
        queue = self.queues.setdefault("", {}).setdefault(operation.request_id, deque())
        queue.append(Queued(operation, Cost(Stage.OTHER), write_nothing))
        self._has_work.set()

    def _require_room(self, key: UserKey, tokens: int) -> None:
        number, queued = self._waiting.get(key.name, (0, 0))
        if number >= key.max_requests:
            raise StatusError(429, f"max_requests: {number} requests wait. Retrieve results first")
        if number and queued + tokens > key.max_tokens:
            raise StatusError(429, f"max_tokens: {queued} tokens wait. Retrieve results first")

    def _note_queued(self, future: Future, item: Queued) -> None:
        self._queued[future.request_id] = item, time.monotonic()
        number, tokens = self._waiting.get(future.key.name, (0, 0))
        self._waiting[future.key.name] = number + 1, tokens + item.cost.tokens

    def _describe_waits(self, model: Model) -> None:
        for item in model.early.values():
            self.futures[item.operation.request_id].reason = f"waiting for seq_id {model.next_seq_id}"

    # Results

    async def retrieve(self, key: UserKey, request_id: str) -> Future:
        """Wait for a result. Errors: StatusError 403, 404; 408 if it is not ready in time."""
        future = self.futures.get(request_id)
        if future is None:
            raise StatusError(404 if len(request_id) != len(new_id()) else 410, "the result is gone, or never was")
        _require_own(key, future.key, "future")
        if future.result is None:
            try:
                await asyncio.wait_for(future.is_done.wait(), self.settings.retrieval_s)
            except TimeoutError:
                raise StatusError(408, future.reason or f"{self.num_queued} requests are in the queue") from None
        future.retrieved_s = time.monotonic()
        return future

    def _set_result(self, future: Future, result: bytes | dict[str, Any] | Refusal | None) -> None:
        future.result = result
        future.is_done.set()
        if isinstance(result, Refusal):
            name = future.key.name
            self.counters.failures[name] = self.counters.failures.get(name, 0) + 1

    def _finish(self, item: Queued, outcome: object) -> None:
        """Set the result of an operation."""
        result: Any = outcome
        if not isinstance(outcome, Refusal):
            try:
                result = item.write(outcome)  # also of the server's own saves, whose metadata it writes
            except (OSError, ConfigError) as error:
                result = Refusal(str(error), is_users=False)
        entry = self._queued.pop(item.operation.request_id, None)
        future = self.futures.get(item.operation.request_id)
        if entry is None or future is None:
            if isinstance(result, Refusal):
                _log.error("an operation of the server failed: %s", result.text)
            return
        name = future.key.name
        number, tokens = self._waiting[name]
        self._waiting[name] = number - 1, tokens - item.cost.tokens
        self.counters.waits_s[name] = self.counters.waits_s.get(name, 0.0) + time.monotonic() - entry[1]
        if future.result is None:  # a request that failed before it was queued has one
            self._set_result(future, result)

    @property
    def num_queued(self) -> int:
        return len(self._queued)

    # Turns

    async def take_turn(self, timeout_s: float) -> tuple[Turn, list[Queued]]:
        """Return the next turn, and its items in the order of their parts. After ``timeout_s`` it may be empty."""
        try:
            await asyncio.wait_for(self._has_work.wait(), timeout_s)
        except TimeoutError:
            return Turn(), []
        await self._wait_for_others()
        costs = {
            # Queues that were served least lately come first, so that models of a key take turns, too.
            key: {name: [item.cost for item in queue] for name, queue in queues.items()}
            for key, queues in self.queues.items()
        }
        budget = self.settings.max_tokens_per_turn
        plan = next_turn(costs, self._credits, self._order, budget=budget, quantum=max(budget // 4, 1))
        self._credits, self._order = plan.credits, plan.order
        items: list[Queued] = []
        for queues in self.queues.values():
            for name in [name for name in queues if name in plan.num_requests]:
                queue = queues.pop(name)
                items += [queue.popleft() for _ in range(plan.num_requests[name])]
                if queue:
                    queues[name] = queue  # at the end
        if not any(any(queues.values()) for queues in self.queues.values()):
            self._has_work.clear()
        self.queues = {key: queues for key, queues in self.queues.items() if queues}
        return self._make_turn(items)

    async def _wait_for_others(self) -> None:
        """Wait for models that stepped within the last two turns and are about to send their next request."""
        turn = self.counters.turns
        recent = {name for name, model in self.models.items() if turn - model.stepped_turn <= 2}
        ready = {name for queues in self.queues.values() for name in queues}
        wait_s = self.settings.fuse_wait_s
        if wait_s is None:
            wait_s = min(self._last_turn_s / 2, _MAX_FUSE_WAIT_S)
        deadline_s = time.monotonic() + wait_s
        while not recent <= ready and time.monotonic() < deadline_s:
            await asyncio.sleep(0.001)
            ready = {name for queues in self.queues.values() for name in queues}

    def _make_turn(self, items: list[Queued]) -> tuple[Turn, list[Queued]]:
        passes: list[Pass] = []
        steps: list[OptimStep] = []
        others: list[Any] = []
        for item in items:
            operation = item.operation
            model = self.models.get(getattr(operation, "model", None) or "")
            if item.refusal is not None:
                assert isinstance(operation, Pass)
                if model is not None and operation.backward:
                    model.failed_seq_id = operation.seq_id
            elif isinstance(operation, Pass):
                passes.append(operation)
            elif isinstance(operation, OptimStep):
                assert model is not None  # requests of a model are refused when it is removed
                item.operation = replace(operation, failed_seq_id=model.failed_seq_id)
                model.failed_seq_id = None
                steps.append(item.operation)
            else:
                others.append(operation)
        return Turn(tuple(passes), tuple(steps), tuple(others)), items

    def finish_turn(self, items: list[Queued], outcomes: Mapping[str, Any], duration_s: float) -> None:
        """Set the results of a turn, and note what they tell about models."""
        self._last_turn_s = duration_s
        if not items:
            return
        counters = self.counters
        counters.turns += 1
        trained = set()
        # Passes come first: a step of the same turn has seen their failures.
        for item in sorted(items, key=lambda item: item.cost.stage):
            operation = item.operation
            outcome = item.refusal or outcomes.get(operation.request_id)
            model = self.models.get(getattr(operation, "model", None) or "")
            future = self.futures.get(operation.request_id)
            if future is not None:
                tokens = counters.tokens
                tokens[future.key.name] = tokens.get(future.key.name, 0) + item.cost.tokens
            if model is not None and isinstance(operation, Pass) and operation.backward:
                trained.add(model.model_id)
                model.is_offloaded = False
                if not isinstance(outcome, PassOutcome):
                    model.failed_seq_id = operation.seq_id
                else:
                    model.losses.append(outcome.loss / max(item.cost.tokens, 1))
            elif model is not None and isinstance(operation, OptimStep):
                model.failed_seq_id = None
                model.stepped_turn = counters.turns
                model.num_steps += 1
            elif model is not None and isinstance(operation, CreateModel | LoadModel):
                model.is_ready = not isinstance(outcome, Refusal) or model.is_ready
                if not model.is_ready:
                    del self.models[model.model_id]
                    self._refuse_queue(model, "the model was not created")
            elif isinstance(operation, Generate) and operation.folder is not None and operation.model is not None:
                self._loaded[operation.model] = time.monotonic()
            self._finish(item, outcome)
        if trained:
            counters.adapters.append(len(trained))

    # What the server does by itself

    def tidy(self) -> None:
        """Remove what is over: sessions without heartbeat, results, checkpoints. Offload models that are idle."""
        now_s = time.monotonic()
        for session in list(self.sessions.values()):
            if now_s - session.heartbeat_s > self.settings.session_timeout_s:
                self.close_session(session, "expired")
        idle = [
            model
            for model in self.models.values()
            if model.is_ready and not model.is_offloaded and now_s - model.request_s > _IDLE_S
        ]
        for model in idle:
            model.is_offloaded = True
        if idle:
            self._put_own(OffloadModels(new_id(), tuple(model.model_id for model in idle)))
        unused = [name for name, used_s in self._loaded.items() if now_s - used_s > self.settings.session_timeout_s]
        if unused:
            self._put_own(ForgetModels(new_id(), tuple(unused)))
            for name in unused:
                del self._loaded[name]
        self._tidy_results(now_s)
        if self.store is not None:
            self.store.delete_expired()

    def _tidy_results(self, now_s: float) -> None:
        kept: dict[str, int] = {}
        for future in reversed(list(self.futures.values())):  # the newest first
            if future.result is None:
                continue
            kept[future.key.name] = kept.get(future.key.name, 0) + future.num_bytes
            is_old = future.retrieved_s is not None and now_s - future.retrieved_s > _KEPT_S
            if is_old or kept[future.key.name] > future.key.max_result_bytes:
                del self.futures[future.request_id]
        for seen in [*(m.seen for m in self.models.values()), *(s.seen for s in self.samplers.values())]:
            for seq_id in [seq_id for seq_id, (_, request_id) in seen.items() if request_id not in self.futures]:
                del seen[seq_id]

    def close_session(self, session: Session, name: str) -> None:
        """Save the models of a session under a name, and remove them and its samplers."""
        del self.sessions[session.session_id]
        self.expired.add(session.session_id)
        for model in [model for model in self.models.values() if model.session is session]:
            if self.store is not None and model.is_ready:
                self.save_own(model, name)
            self.remove_model(model)
        for sampler in session.samplers:
            self.samplers.pop(sampler, None)

    def save_own(self, model: Model, name: str) -> None:
        """Queue a save of a model that its user has not asked for."""
        assert self.store is not None
        item = make_save(self.store, model, "weights", name, None, None)(new_id())
        self.queues.setdefault("", {}).setdefault(item.operation.request_id, deque()).append(item)
        self._has_work.set()

    def begin_stop(self) -> None:
        """Take no more requests, and save all models as ``shutdown`` once those in the queue are done."""
        self.is_stopping = True
        for model in self.models.values():
            for item in model.early.values():
                self._finish(item, Refusal("the server is stopping", is_users=False))
            model.early.clear()
            if self.store is not None and model.is_ready:
                queue = self._get_queue(model.key, model.model_id)  # after what the model has in the queue
                queue.append(make_save(self.store, model, "weights", "shutdown", None, None)(new_id()))
        self._has_work.set()


def make_save(
    store: CheckpointStore,
    model: Model,
    kind: str,
    name: str,
    ttl_s: int | None,
    user_metadata: Mapping[str, str] | None,
) -> Callable[[str], Queued]:
    """Return what makes the save of a model from the id of a request."""

    def make(request_id: str) -> Queued:
        folder = store.folder(model.key.folder, model.model_id, kind, name)
        operation = SaveModel(request_id, model.model_id, str(folder), training_state=kind == "weights")
        return Queued(operation, Cost(Stage.OTHER), write)

    def write(_outcome: object) -> dict[str, Any]:
        now_s = time.time()
        expires_s = None if ttl_s is None else now_s + ttl_s
        parts = sorted(model.parts)
        checkpoint = Checkpoint(model.model_id, kind, name, now_s, expires_s, model.rank, parts, user_metadata)
        store.record(model.key.folder, checkpoint)
        return {"path": checkpoint.path}

    return make


def write_nothing(_outcome: object) -> dict[str, Any]:
    return {}


def digest_of(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def new_id() -> str:
    """Return an id of 128 random bits."""
    return secrets.token_hex(16)


def _require_own(key: UserKey, owner: UserKey, what: str) -> None:
    if key is not owner:
        raise StatusError(403, f"this {what} is that of another key")
