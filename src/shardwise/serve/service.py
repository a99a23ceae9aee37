"""The queues of a server: requests come in, turns of them go out, results come back. All in one event loop.

[Note: A request] A call of a client opens a request in a ``with`` block, whose body sets the operation. When the
block ends, the request is in its queue; if the body raised ConfigError, it has failed instead::

    with service.place(model, seq_id, body) as request:
        if request.is_new:
            request.operation = OptimStep(request.request_id, ...)
    return request.request_id  # of the future, which the client retrieves

A turn takes operations from the queues (:meth:`Service.take_turn`), ranks carry them out, and
:meth:`Service.finish_turn` makes the results of the futures.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from shardwise.core.errors import ConfigError, StorageError
from shardwise.serve import messages
from shardwise.serve.checkpoints import Checkpoint, CheckpointStore, describe_fault
from shardwise.serve.keys import UserKey
from shardwise.serve.messages import StatusError
from shardwise.serve.operations import (
    CopyModel,
    CreateModel,
    ForgetModels,
    Generate,
    LoadModel,
    OffloadModels,
    OptimStep,
    Pass,
    PassOutcome,
    Refusal,
    SampleAnswer,
    SaveModel,
    Turn,
    TurnOperation,
)
from shardwise.serve.records import (
    OWN,
    Counters,
    Model,
    QueuedRequest,
    Sampler,
    Session,
    Settings,
    digest_of,
    name_model,
    new_id,
)
from shardwise.serve.turns import find_early_steps, next_turn
from shardwise.serve.vllm import VllmClient

_KEPT_S: Final = 600.0
"""Seconds for which a result is kept after it was retrieved."""

_IDLE_S: Final = 60.0
"""Seconds without a request after which a model or a copy is offloaded."""

_MAX_FUSE_WAIT_S: Final = 0.1

_NUM_GONE: Final = 4096
"""Ids of sessions and models that are gone and get 410. Older ones get 404."""

_NUM_SAMPLERS: Final = 1024
"""Sampling sessions of a user. A loop of reinforcement learning opens one in each step, and closes none."""

OWN_NAMES: Final = ("expired", "finished", "shutdown")
"""Names of the saves that the server makes by itself."""

_PAUSE_S: Final = 60.0
"""Seconds between two calls of tidy() after which heartbeats begin anew, since a suspended server gets none."""

_EXPIRY_S: Final = 60.0
"""Seconds between two looks at the checkpoints whose time may be over, and at models that could not be saved."""

_STOPPING_TURN_S: Final = 0.05
"""Seconds after which there is a turn without operations while the server stops."""

_STOPPING_SAMPLES_S: Final = 60.0
"""Seconds for which a stop waits for samples of vLLM, which may have been cut off."""

_NOT_CARRIED_OUT: Final = Refusal("the server has not carried out the request. Send it again", is_users=False)

_ENDED: Final = Refusal(
    "the server has ended, perhaps because one of its ranks is lost. Once it runs again, make a new ServiceClient "
    "and go on from the last save_state",
    is_users=False,
)

_REPLACED: Final = Refusal("the checkpoint to sample from: a save over it has failed. Save it again")

_log = logging.getLogger(__name__)


_Owned = TypeVar("_Owned", Session, Model, Sampler)


class Service:
    """Takes requests, makes turns of them, and keeps their results. Not for several threads.

    Args:
        settings: of the server.
        store: of checkpoints, or None without a folder for them.

    Attributes:
        vllm: samples instead of the bank, if there is one.
        tokenizer: of the base, or None. For stops that are texts.
    """

    def __init__(self, settings: Settings, store: CheckpointStore | None) -> None:
        self.settings = settings
        self.store = store
        self.vllm: VllmClient | None = None
        self.tokenizer: Any = None
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, Model] = {}
        self.samplers: dict[str, Sampler] = {}
        self.futures: dict[str, QueuedRequest] = {}
        self.counters = Counters()
        self.is_stopping = False
        self.lost_models: list[str] = []
        """Models that could not be saved when the server stopped."""
        self._gone: deque[str] = deque(maxlen=_NUM_GONE)
        self._queues: dict[str, dict[str, deque[QueuedRequest]]] = {OWN.name: {}}
        """By key and name: a model, the samples of a key, or a request of the server itself. These come first, so
        that a model is removed before another one of its name is created."""
        self._waiting: dict[str, dict[str, int]] = {}
        """Tokens of the requests that wait, by key and id. Without those that are early."""
        self._unrecorded: set[str] = set()
        """Folders whose last save could not be recorded: what they have is not what their metadata name."""
        self._unsaved: list[QueuedRequest] = []
        """Saves of models whose session has ended, which could not be written. The models stay until they are."""
        self._credits: dict[str, int] = {}
        self._order: tuple[str, ...] = ()
        self._has_work = asyncio.Event()
        self._has_arrived = asyncio.Event()
        self._are_saves_done = asyncio.Event()
        """Whether no turn with saves is running."""
        self._are_saves_done.set()
        self._last_turn_s = 0.0
        """Of the last turn with a pass."""
        self._had_early_steps = False
        self._sampling: set[asyncio.Task[None]] = set()
        self._sampling_end_s = math.inf
        """When samples of vLLM that still run are refused, because the server stops."""
        self._offloaded: set[str] = set()
        """Models and copies that were not used since they were moved to host memory."""
        self._copies: dict[str, tuple[Model | UserKey, float]] = {}
        """What is in memory to sample from, the one used last at the end: the owner and the time of the use. A
        snapshot is owned by its model, a checkpoint that was loaded by its user."""
        self._expired_s = 0.0
        """When checkpoints whose time is over were deleted last."""
        self._tidied_s = time.monotonic()

    # Sessions, models and samplers

    def open_session(self, key: UserKey) -> Session:
        self.require_open()
        num_sessions = sum(session.key is key for session in self.sessions.values())
        if num_sessions >= key.max_sessions:
            raise StatusError(429, f"max_sessions: you have {num_sessions} sessions. {self._describe_removal()}")
        session = Session(new_id(), key, time.monotonic())
        self.sessions[session.session_id] = session
        return session

    def _describe_removal(self) -> str:
        """What a user can do above a limit: the client has no call that removes one model."""
        return (
            'Call close("success") of a ServiceClient, which removes its models, or wait: those of a client that '
            f"is gone are removed after {self.settings.session_timeout_s:g} seconds"
        )

    def get_session(self, key: UserKey, session_id: str) -> Session:
        return self._find(self.sessions, key, "session", session_id)

    def get_model(self, key: UserKey, model_id: str) -> Model:
        model = self._find(self.models, key, "model", model_id)
        model.request_s = time.monotonic()
        model.session.heartbeat_s = model.request_s
        return model

    def get_sampler(self, key: UserKey, sampler_id: str) -> Sampler:
        sampler = self._find(self.samplers, key, "sampling session", sampler_id)
        self.samplers[sampler_id] = self.samplers.pop(sampler_id)  # the one used last is at the end
        return sampler

    def _find(self, table: Mapping[str, _Owned], key: UserKey, kind: str, name: str) -> _Owned:
        """Return an entry of a table. Raise StatusError 403 if another key has it, 404 or 410 if there is none."""
        entry = table.get(name)
        if entry is None and name in self._gone:
            raise StatusError(410, f"{kind} {name!r}: is gone")
        if entry is None:
            raise StatusError(
                404, f"{kind} {name!r}: does not exist. After a restart of the server, make a new ServiceClient"
            )
        if entry.key is not key:
            raise StatusError(403, f"this {kind} is that of another key")
        return entry

    def open_sampler(self, sampler: Sampler) -> str:
        """Return the id of a sampling session. A user has the _NUM_SAMPLERS that were used last."""
        sampler_ids = [sampler_id for sampler_id, each in self.samplers.items() if each.key is sampler.key]
        for sampler_id in sampler_ids[: max(len(sampler_ids) + 1 - _NUM_SAMPLERS, 0)]:
            del self.samplers[sampler_id]
        sampler_id = new_id()
        self.samplers[sampler_id] = sampler
        return sampler_id

    def remove_model(self, model: Model, name: str = "") -> None:
        """Remove a model in the next turn, with its snapshots and requests. With a name, save it before."""
        self._drop_model(model, "the model was removed")
        self._gone.append(model.model_id)
        if name:
            self._put_save(model, name, OWN, new_id())  # which removes it
        else:
            self._put_own(ForgetModels(new_id(), (model.model_id,)))
        self._forget_copies([copy for copy, (owner, _) in self._copies.items() if owner is model])

    def _drop_model(self, model: Model, text: str) -> None:
        del self.models[model.model_id]
        self._offloaded.discard(model.model_id)
        for request in [*self._queues.get(model.key.name, {}).pop(model.model_id, ()), *model.early.values()]:
            if request.key is not OWN:  # its save at a stop is not needed
                self._finish(request, Refusal(text))
        model.early.clear()

    def close_session(self, session: Session, name: str) -> None:
        """Save the models of a session under a name, and remove them and its samplers."""
        del self.sessions[session.session_id]
        self._gone.append(session.session_id)
        for model in [model for model in self.models.values() if model.session is session]:
            self.remove_model(model, name if self.store is not None and model.is_created else "")
        for sampler_id in [key for key, each in self.samplers.items() if each.session_id == session.session_id]:
            del self.samplers[sampler_id]

    # Requests

    def require_open(self) -> None:
        if self.is_stopping:
            raise StatusError(503, "the server is stopping")

    @contextmanager
    def open_model(
        self,
        session: Session,
        number: int,
        rank: int,
        parts: frozenset[str],
        user_metadata: Mapping[str, Any] | None,
    ) -> Iterator[QueuedRequest]:
        """Queue the creation of a session's model. One that was asked for before has the same future.

        Raises:
            StatusError: 429 if the user has too many models, and as :meth:`place`.
        """
        model_id = name_model(session, number)
        if model_id in self.models:
            yield QueuedRequest(self.models[model_id].creation_id, is_new=False)
            return
        with self.admit(session.key, model_id) as request:
            yield request
            num_models = sum(model.key is session.key for model in self.models.values())
            if num_models >= session.key.max_models:
                raise StatusError(429, f"max_models: you have {num_models} models. {self._describe_removal()}")
        if request.result is None:
            self.models[model_id] = Model(model_id, session, request.request_id, rank, parts, user_metadata)

    @contextmanager
    def place(
        self, model: Model, seq_id: int, body: bytes, *, is_backward: bool = False
    ) -> Iterator[QueuedRequest]:
        """Queue a request in its place in the order of a model. See [Note: A request].

        If the block raises ConfigError the request has failed, and its place is taken all the same. So has an early
        one without room beside the other early ones of its model: the client sends the first part of a batch once
        the others are accepted, and would wait forever for 429 to end.

        Args:
            model: the model.
            seq_id: place of the request, from 1.
            body: what was sent. A request that is sent again is not carried out twice.
            is_backward: whether it is a part of a batch, without which the next step must not be taken.

        Raises:
            StatusError: 400 for an invalid place, 429 for too many requests, 503 if the server is stopping.
        """
        if seq_id < 1:
            raise StatusError(400, f"seq_id={seq_id}: begins with 1")
        digest = digest_of(body)
        # The client sends a request again when an answer was lost on its way.
        if seq_id in model.seen or seq_id in model.early or seq_id < model.next_seq_id:
            yield QueuedRequest(self.find_again(model.key, model.seen, seq_id, digest), is_new=False)
            return
        # Those without room take memory, too.
        if seq_id > model.next_seq_id and len(model.early) >= 16 * model.key.max_requests:
            raise StatusError(429, f"seq_id={seq_id}: too many wait for {model.next_seq_id}. Send that first")
        with self._open_request(model.key) as request:
            yield request
            if seq_id == model.next_seq_id:
                self._require_room(model.key, request.cost.tokens)
            else:
                _require_early_room(model, request.cost.tokens)
        if request.result is not None:  # it keeps its place, also because a step after it must not be taken
            request.operation = Pass(
                request.request_id, model.model_id, (), seq_id, backward=is_backward, is_refused=True
            )
        model.seen[seq_id] = digest, request.request_id
        model.early[seq_id] = request
        model.early_tokens += request.cost.tokens
        # With next_seq_id 3 and requests 4 and 5 early, request 3 queues all of them. Request 6 would wait.
        while (ready := model.early.pop(model.next_seq_id, None)) is not None:
            self._enqueue(model.key, model.model_id, ready)
            self._note_arrival(model.key, ready)
            model.early_tokens -= ready.cost.tokens
            model.next_seq_id += 1

    def find_again(self, key: UserKey, seen: Mapping[int, tuple[str, str]], seq_id: int, digest: str) -> str:
        """Return the future of a request that was sent before. ``seen`` is of its model or sampling session."""
        known, request_id = seen.get(seq_id, ("", ""))
        if known == digest:
            return request_id
        text = "had another body before" if known else "was answered before, and its result is gone"
        return self.answer(key, Refusal(f"seq_id={seq_id}: {text}"))

    @contextmanager
    def admit(self, key: UserKey, queue: str) -> Iterator[QueuedRequest]:
        """Queue a request that has no place in the order of a model. Otherwise as :meth:`place`."""
        with self._open_request(key) as request:
            yield request
            self._require_room(key, request.cost.tokens)
        if request.result is not None:
            return
        if self.vllm is not None and isinstance(request.operation, Generate):
            task = asyncio.get_running_loop().create_task(self._sample_by_vllm(request))
            self._sampling.add(task)
            task.add_done_callback(self._sampling.discard)
        else:
            self._enqueue(key, queue, request)
        self._note_use(request.operation)
        self._note_arrival(key, request)

    @contextmanager
    def _open_request(self, key: UserKey) -> Iterator[QueuedRequest]:
        """Open a request. If the block raises ConfigError or OSError it has failed; after others it never was."""
        self.require_open()
        request = QueuedRequest(new_id(), key)
        self.futures[request.request_id] = request
        try:
            yield request
        except ConfigError as error:
            self._set_result(request, Refusal(str(error)))
        except OSError as error:  # of the folder of checkpoints
            self._set_result(request, Refusal(describe_fault(error), is_users=False))
        except BaseException:
            del self.futures[request.request_id]
            raise

    async def _sample_by_vllm(self, request: QueuedRequest) -> None:
        assert self.vllm is not None
        assert isinstance(request.operation, Generate)
        try:
            is_replaced = request.operation.folder in self._unrecorded
            outcome: Any = _REPLACED if is_replaced else await self.vllm.sample(request.operation)
        except ConfigError as error:
            outcome = Refusal(str(error), is_users=False)
        except asyncio.CancelledError:  # by take_turn()
            outcome = Refusal("the server is stopping", is_users=False)
        except Exception:  # in a task of its own, where the client would wait forever
            _log.exception("a sample of vLLM failed")
            outcome = Refusal("sampling failed on the server, whose log has the reason", is_users=False)
        self.counters.tokens[request.key.name] += request.cost.tokens
        self._finish(request, outcome)

    def _require_room(self, key: UserKey, tokens: int) -> None:
        waiting = self._waiting.get(key.name, {})
        if len(waiting) >= key.max_requests:
            raise StatusError(429, f"max_requests: {len(waiting)} requests wait. Send more once some are done")
        waiting_tokens = sum(waiting.values())
        if waiting and waiting_tokens + tokens > key.max_tokens:
            raise StatusError(429, f"max_tokens: {waiting_tokens} tokens wait. Send more once some are done")

    def _note_arrival(self, key: UserKey, request: QueuedRequest) -> None:
        self._waiting.setdefault(key.name, {})[request.request_id] = request.cost.tokens
        self._has_arrived.set()

    def _enqueue(self, key: UserKey, name: str, request: QueuedRequest) -> None:
        self._queues.setdefault(key.name, {}).setdefault(name, deque()).append(request)
        self._has_work.set()

    def _put_own(self, operation: TurnOperation) -> None:
        """Queue an operation of the server itself, whose outcome nobody waits for."""
        self._enqueue(OWN, operation.request_id, QueuedRequest(operation.request_id, operation=operation))

    def make_save(self, request_id: str, model: Model, checkpoint: Checkpoint) -> SaveModel:
        """Return the save of a model. Raise ConfigError if the name cannot be that of a folder."""
        if self.store is None:
            raise ConfigError("path: this server has no folder for checkpoints. Start it with --state")
        folder = self.store.folder(model.key.folder, checkpoint)
        return SaveModel(request_id, model.model_id, str(folder), training_state=checkpoint.kind == "weights")

    # Results

    def answer(self, key: UserKey, result: Mapping[str, Any] | Refusal) -> str:
        """Return the id of a future that is done."""
        request = QueuedRequest(new_id(), key)
        self.futures[request.request_id] = request
        self._set_result(request, result)
        return request.request_id

    async def retrieve(self, key: UserKey, request_id: str) -> QueuedRequest:
        """Wait for a result. Errors: StatusError 403, 404; 408 if it is not ready in time."""
        request = self.futures.get(request_id)
        if request is None:
            raise StatusError(404 if len(request_id) != len(new_id()) else 410, "the result is gone, or never was")
        if request.key is not key:
            raise StatusError(403, "this future is that of another key")
        if request.result is None:
            try:
                await asyncio.wait_for(request.is_done.wait(), self.settings.retrieval_s)
            except TimeoutError:
                reason = f"{self.num_waiting} requests are in the queue"
                model = self.models.get(getattr(request.operation, "model", None) or "")
                if model is not None and request_id not in self._waiting.get(key.name, {}):  # it is early
                    reason = f"waiting for seq_id {model.next_seq_id}"
                raise StatusError(408, reason) from None
        request.retrieved_s = time.monotonic()
        return request

    def _set_result(self, request: QueuedRequest, result: bytes | Mapping[str, Any] | Refusal) -> None:
        """Set the result of a request, which is kept without the rest, since only a result's bytes are counted."""
        request.result = result
        request.operation = request.checkpoint = request.sampler = None
        request.answer = {}
        request.is_done.set()
        if isinstance(result, Refusal):
            self.counters.failures[request.key.name] += 1

    def _finish(self, request: QueuedRequest, outcome: object) -> None:
        """Set the result of a request."""
        if isinstance(outcome, Refusal):
            result: bytes | Mapping[str, Any] | Refusal = outcome
        else:
            try:
                result = self._make_result(request, outcome)  # also of own saves, which are recorded here
            except StorageError as error:
                _log.error("the checkpoint of a save cannot be recorded: %s", error)
                result = Refusal("the server cannot write to its folder of checkpoints", is_users=False)
            except Exception:  # of a tokenizer, for example: no request ends the server for all users
                _log.exception("a result cannot be written")
                result = Refusal("the result failed on the server, whose log has the reason", is_users=False)
        if request.key is OWN:
            if isinstance(result, Refusal):
                _log.error("an operation of the server failed: %s", result.text)
            if isinstance(request.operation, SaveModel):
                self._finish_own_save(request, request.operation.model, result)
            return
        self._waiting.get(request.key.name, {}).pop(request.request_id, None)  # an early one is not there
        self.counters.waits_s[request.key.name] += time.monotonic() - request.submitted_s
        if request.result is None:  # one that failed before its turn has a result
            self._set_result(request, result)
        request.operation = None

    def _finish_own_save(self, request: QueuedRequest, model: str, result: object) -> None:
        """Note that a save by the server failed in a stop. Otherwise remove its model, or keep it to save again."""
        # One whose last step failed has nothing to save, and is refused as its user's requests are.
        is_unsaved = isinstance(result, Refusal) and not result.is_users
        if self.is_stopping:
            if is_unsaved:
                self.lost_models.append(model)
        elif is_unsaved:
            self._unsaved.append(request)
            self._put_own(OffloadModels(new_id(), (model,)))
        else:
            self._put_own(ForgetModels(new_id(), (model,)))

    def _save_unsaved(self) -> None:
        """Queue the saves again that could not be written."""
        for request in self._unsaved:
            self._enqueue(OWN, request.request_id, request)
        self._unsaved = []

    def _make_result(self, request: QueuedRequest, outcome: Any) -> bytes | Mapping[str, Any]:
        operation, answer = request.operation, request.answer
        if isinstance(operation, Pass):
            if isinstance(answer, SampleAnswer):
                return messages.write_score(outcome, answer)
            return messages.write_pass(outcome)
        if isinstance(answer, SampleAnswer):
            return messages.write_sample(messages.cut_at_stops(self.tokenizer, outcome, answer.stops), answer)
        if isinstance(operation, OptimStep):
            return {"metrics": outcome}
        if request.checkpoint is not None:
            assert isinstance(operation, SaveModel)
            assert self.store is not None
            self._unrecorded.add(operation.folder)
            self.store.record(operation.folder, request.checkpoint)
            self._unrecorded.remove(operation.folder)
        if isinstance(operation, CopyModel):
            if (model := self.models.get(operation.model)) is None:  # it was removed while the turn ran
                self._put_own(ForgetModels(new_id(), (operation.new,)))
            else:
                self._keep_copy(operation.new, model, model.key.max_snapshots)
        if request.sampler is not None:
            return {**answer, "sampling_session_id": self.open_sampler(request.sampler)}
        return answer

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    # Turns

    async def take_turn(self, timeout_s: float) -> tuple[Turn, list[QueuedRequest]]:
        """Return the next turn and its requests. It may be empty after ``timeout_s``, or soon during a stop."""
        if self.is_stopping:
            timeout_s = _STOPPING_TURN_S
        if time.monotonic() > self._sampling_end_s:
            for task in self._sampling:
                task.cancel()
        try:
            await asyncio.wait_for(self._has_work.wait(), timeout_s)
        except TimeoutError:
            return self._make_turn([]), []
        # Models that train at the same pace come a few milliseconds apart, and cost less in one pass.
        await self._wait_for_others()
        costs = {
            key: {name: [request.cost for request in queue] for name, queue in queues.items()}
            for key, queues in self._queues.items()
        }
        budget = self.settings.max_tokens_per_turn
        # Not twice in a row: whoever sends nothing but steps keeps no pass from running.
        num_requests = {} if self._had_early_steps else find_early_steps(costs)
        self._had_early_steps = bool(num_requests)
        if not num_requests:
            plan = next_turn(costs, self._credits, self._order, budget=budget, quantum=max(budget // 4, 1))
            num_requests, self._credits, self._order = plan.num_requests, plan.credits, plan.order
        requests: list[QueuedRequest] = []
        for queues in self._queues.values():
            for name in [name for name in queues if name in num_requests]:
                queue = queues.pop(name)
                requests += [queue.popleft() for _ in range(num_requests[name])]
                if queue:
                    queues[name] = queue  # at the end, so that models of a key take turns, too
        # No await since the queues were read, so nothing has come in between that the event would miss.
        if not any(any(queues.values()) for queues in self._queues.values()):
            self._has_work.clear()
        self._queues = {name: queues for name, queues in self._queues.items() if queues or name == OWN.name}
        requests.sort(key=lambda request: request.cost.stage)
        self._refuse_existing(requests)
        for request in requests:
            if isinstance(request.operation, Generate) and request.operation.folder in self._unrecorded:
                self._set_result(request, _REPLACED)
                request.operation = Pass(request.request_id, None, (), is_refused=True)
        return self._make_turn(requests), requests

    def _refuse_existing(self, requests: Sequence[QueuedRequest]) -> None:
        """Refuse saves under names that are taken. A key has one save in a turn, so no two have one name."""
        for request in requests:
            save, checkpoint = request.operation, request.checkpoint
            if not isinstance(save, SaveModel) or checkpoint is None or self.store is None or request.may_replace:
                continue
            refusal = Refusal(f"path {checkpoint.name!r}: exists already. Pass overwrite=True, or another name")
            try:
                if self.store.find(request.key.folder, checkpoint.path) is None:
                    continue
            except OSError as error:
                refusal = Refusal(describe_fault(error), is_users=False)
            self._set_result(request, refusal)
            request.operation = Pass(request.request_id, save.model, (), is_refused=True)

    def _make_turn(self, requests: Sequence[QueuedRequest]) -> Turn:
        operations = tuple(request.operation for request in requests if request.operation is not None)
        if any(isinstance(operation, SaveModel) for operation in operations):
            self._are_saves_done.clear()
        # There may be work in spite of a timeout: a stop that began at the end of the wait has queued saves.
        is_last = self.is_stopping and not (requests or self._has_work.is_set() or self._sampling)
        return Turn(operations, is_last)

    async def delete_checkpoint(self, key: UserKey, checkpoint: Checkpoint) -> None:
        """Delete a checkpoint, after the saves that run: they may be of its name."""
        assert self.store is not None
        while not self._are_saves_done.is_set():
            await self._are_saves_done.wait()
        self.store.delete(key.folder, checkpoint)

    async def _wait_for_others(self) -> None:
        """Wait for models that stepped within the last two turns and are about to send their next request.

        The wait begins anew with each request that comes, and ends after half of the last turn in any case. Clients
        of one process prepare their requests one after the other.
        """
        turn = self.counters.turns
        recent = {name for name, model in self.models.items() if turn - model.stepped_turn <= 2}
        wait_s = self.settings.fuse_wait_s
        if wait_s is None:
            wait_s = min(self._last_turn_s / 2, _MAX_FUSE_WAIT_S)
        deadline_s = time.monotonic() + max(self._last_turn_s / 2, wait_s)
        while not recent <= {name for queues in self._queues.values() for name in queues}:
            self._has_arrived.clear()
            left_s = deadline_s - time.monotonic()
            try:
                await asyncio.wait_for(self._has_arrived.wait(), min(wait_s, left_s))
            except TimeoutError:
                return

    async def finish_turn(
        self, requests: Sequence[QueuedRequest], outcomes: Mapping[str, Any], duration_s: float
    ) -> None:
        """Set the results of a turn, and note what they tell about models."""
        operations = [request.operation for request in requests]
        if any(isinstance(operation, Pass) and not operation.is_refused for operation in operations):
            self._last_turn_s = duration_s
        counters = self.counters
        counters.turns += bool(requests)
        trained = set()
        for request in requests:
            operation = request.operation
            # A request that failed before its turn has its result; its Pass without rows has no outcome.
            outcome = request.result or outcomes.get(request.request_id, _NOT_CARRIED_OUT)
            model = self.models.get(getattr(operation, "model", None) or "")
            if request.key is not OWN:
                counters.tokens[request.key.name] += request.cost.tokens
            if model is not None:
                self._offloaded.discard(model.model_id)  # its values may be back on the device
            if model is not None and isinstance(operation, Pass) and operation.backward:
                trained.add(model.model_id)
                if isinstance(outcome, PassOutcome):
                    model.losses.append(outcome.loss / max(operation.count_trained(), 1))
            elif model is not None and isinstance(operation, OptimStep):
                model.stepped_turn = counters.turns
                if isinstance(outcome, dict) and not outcome["skipped:max"]:
                    model.num_steps += 1
            elif model is not None and isinstance(operation, CreateModel | LoadModel):
                if not isinstance(outcome, Refusal):
                    model.is_ready = True
                elif not model.is_ready:
                    self._drop_model(model, "the model was not created")
            elif isinstance(operation, Generate) and operation.folder is not None:
                self._keep_copy(str(operation.sample.adapter), request.key, request.key.max_snapshots)
            self._note_use(operation)  # again: it may have waited for long
            self._finish(request, outcome)
        if trained:
            counters.adapters.append(len(trained))
        self._are_saves_done.set()
        # Here no rank writes, and what this turn saved is recorded: else a checkpoint that is saved again under the
        # name of one whose time is over would lose its files.
        if self.store is not None and time.monotonic() - self._expired_s > _EXPIRY_S:
            self._expired_s = time.monotonic()
            try:
                self.store.delete_expired()
            except OSError:
                _log.exception("checkpoints whose time is over cannot be deleted")
            self._save_unsaved()

    def _keep_copy(self, name: str, owner: Model | UserKey, most: int) -> None:
        """Note a new or used copy. The owner has the ``most`` that were used last; others are forgotten."""
        self._copies.pop(name, None)
        self._copies[name] = owner, time.monotonic()
        names = [each for each, (other, _) in self._copies.items() if other is owner]
        self._forget_copies(names[:-most])

    def _note_use(self, operation: TurnOperation | None) -> None:
        """Note the use of a copy, if the operation is a sample or score of one."""
        name = operation.sample.adapter if isinstance(operation, Generate) else getattr(operation, "model", None)
        if name in self._copies:
            self._copies[name] = self._copies.pop(name)[0], time.monotonic()
            self._offloaded.discard(name)

    def _forget_copies(self, names: Sequence[str]) -> None:
        if names:
            self._put_own(ForgetModels(new_id(), tuple(names)))
        for name in names:
            del self._copies[name]
            self._offloaded.discard(name)

    # What the server does by itself

    async def tidy(self) -> None:
        """Remove what is over: sessions without heartbeat, results, copies. Offload models that are idle."""
        now_s = time.monotonic()
        if now_s - self._tidied_s > _PAUSE_S:
            for session in self.sessions.values():
                session.heartbeat_s = now_s
        self._tidied_s = now_s
        for session in list(self.sessions.values()):
            if now_s - session.heartbeat_s > self.settings.session_timeout_s:
                self.close_session(session, "expired")
        used = [(model.model_id, model.request_s) for model in self.models.values() if model.is_ready]
        used += [(name, used_s) for name, (_, used_s) in self._copies.items()]
        idle = [name for name, used_s in used if now_s - used_s > _IDLE_S and name not in self._offloaded]
        if idle:
            # Before the turn that offloads: a turn with a request of the model clears it again.
            self._offloaded.update(idle)
            self._put_own(OffloadModels(new_id(), tuple(idle)))
        timeout_s = self.settings.session_timeout_s
        self._forget_copies(
            [
                name
                for name, (owner, used_s) in self._copies.items()
                if isinstance(owner, UserKey) and now_s - used_s > timeout_s
            ]
        )
        self._tidy_results(now_s)

    def _tidy_results(self, now_s: float) -> None:
        num_bytes: dict[str, int] = {}  # of results, by user
        for request in reversed(list(self.futures.values())):  # the newest first, so that the oldest go
            if request.result is None:
                continue
            user = request.key.name
            num_bytes[user] = num_bytes.get(user, 0) + request.num_bytes
            is_old = request.retrieved_s is not None and now_s - request.retrieved_s > _KEPT_S
            if is_old or num_bytes[user] > request.key.max_result_bytes:
                del self.futures[request.request_id]
        # Places whose result is gone. A request that is sent again there is refused, since its place is taken.
        for seen in [*(m.seen for m in self.models.values()), *(s.seen for s in self.samplers.values())]:
            for seq_id in [seq_id for seq_id, (_, request_id) in seen.items() if request_id not in self.futures]:
                del seen[seq_id]

    async def begin_stop(self) -> None:
        """Take no more requests, and save all models as ``shutdown`` once those in the queue are done."""
        if self.is_stopping:  # several ranks may have a request to stop
            return
        self.is_stopping = True
        self._sampling_end_s = time.monotonic() + _STOPPING_SAMPLES_S
        self._save_unsaved()
        for model in self.models.values():
            # The gap before them cannot be filled: new requests get 503.
            for request in model.early.values():
                self._finish(request, Refusal("the server is stopping", is_users=False))
            model.early.clear()
            if self.store is not None and model.is_created:
                self._put_save(model, "shutdown", model.key, model.model_id)  # after what the model has queued
        self._has_work.set()

    def end(self) -> None:
        """Take no more requests, and refuse those without a result, which no rank carries out any more."""
        self.is_stopping = True
        for request in self.futures.values():
            if request.result is None:
                self._set_result(request, _ENDED)

    def _put_save(self, model: Model, name: str, key: UserKey, queue: str) -> None:
        """Queue a save of a model that its user has not asked for."""
        request_id, parts = new_id(), sorted(model.parts)
        checkpoint = Checkpoint(model.model_id, "weights", name, rank=model.rank, parts=parts, save_id=request_id)
        request = QueuedRequest(request_id, checkpoint=checkpoint)
        request.operation = self.make_save(request.request_id, model, checkpoint)
        self._enqueue(key, queue, request)


def _require_early_room(model: Model, tokens: int) -> None:
    """Raise ConfigError if a model has no room for another early request. See :meth:`Service.place`."""
    key = model.key
    if len(model.early) >= key.max_requests:
        raise ConfigError(f"max_requests: the batch has more than {key.max_requests} parts. Send smaller batches")
    if model.early and model.early_tokens + tokens > key.max_tokens:
        raise ConfigError(f"max_tokens: the batch has more than {key.max_tokens} tokens. Send smaller batches")
