"""The protocol of the ``tinker`` client over HTTP. See docs/serve.md for the calls that are served.

Whatever is wrong with a request in the order of a model, after its ``model_id`` and ``seq_id`` were read, is a
failed future: the client counts the place as used, and would wait forever for an answer to the next one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, Final

from packaging.version import InvalidVersion, Version
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from tinker import types

from shardwise.core.errors import ConfigError, StorageError
from shardwise.serve import messages
from shardwise.serve.checkpoints import KINDS, Checkpoint, describe_fault, require_saved_by
from shardwise.serve.keys import UserKey, find_key
from shardwise.serve.messages import StatusError
from shardwise.serve.operations import CopyModel, CreateModel, LoadModel, Refusal, SampleAnswer, SaveModel
from shardwise.serve.records import Model, QueuedRequest, Sampler, digest_of, name_model
from shardwise.serve.requests import Body, ServedBase, parse, read_sample, read_step
from shardwise.serve.service import OWN_NAMES, Service
from shardwise.serve.status import write_metrics, write_page

_log = logging.getLogger(__name__)

_PARTS: Final = ("attn", "mlp", "unembed")

_TTL_S: Final = range(3600, 10 * 365 * 86400 + 1)

_RENEWAL_S: Final = 300
"""Seconds between two renewals of the time of a snapshot that is in use, at least: each writes to disk."""

_UNLOGGED: Final = ("/api/v1/session_heartbeat", "/api/v1/telemetry", "/status", "/metrics")

_MAX_JSON_BYTES: Final = 1 << 16
"""Bytes of a JSON body without a prompt. Metadata of users is kept as long as their models are."""

Call = Callable[[Request, UserKey], Awaitable[Response]]


class JSONAnswer(JSONResponse):
    """JSON in ASCII: text of a request is repeated in errors, and with a lone surrogate it has no UTF-8."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False).encode()


class App:
    """Routes of a server.

    Args:
        service: its state.
        keys: users by the digest of their key. None for everybody.
        base: the base.
    """

    def __init__(self, service: Service, keys: Mapping[str, UserKey] | None, base: ServedBase) -> None:
        self._service = service
        self._keys = keys
        self._base = base

    def routes(self) -> Starlette:
        """Return the application."""
        run = "/api/v1/training_runs/{model_id}"
        calls: list[tuple[str, str, Call]] = [
            ("POST", "/api/v1/client/config", self._client_config),
            ("POST", "/api/v1/create_session", self._create_session),
            ("POST", "/api/v1/session_heartbeat", self._heartbeat),
            ("POST", "/api/v1/sessions/{session_id}/finish", self._finish_session),
            ("POST", "/api/v1/create_model", self._create_model),
            ("POST", "/api/v1/unload_model", self._unload_model),
            ("POST", "/api/v1/get_info", self._get_info),
            ("POST", "/api/v1/forward_backward", self._forward_backward),
            ("POST", "/api/v1/optim_step", self._place),
            ("POST", "/api/v1/retrieve_future", self._retrieve),
            ("POST", "/api/v1/save_weights", self._place),
            ("POST", "/api/v1/load_weights", self._place),
            ("POST", "/api/v1/save_weights_for_sampler", self._place),
            ("POST", "/api/v1/save_weights_external", self._place),
            ("POST", "/api/v1/create_sampling_session", self._create_sampler),
            ("GET", "/api/v1/samplers/{sampler_id}", self._get_sampler),
            ("POST", "/api/v1/asample", self._sample),
            ("GET", "/api/v1/get_server_capabilities", self._capabilities),
            ("POST", "/api/v1/weights_info", self._weights_info),
            ("GET", "/api/v1/checkpoints", self._list_checkpoints),
            ("GET", run, self._get_run),
            ("GET", run + "/checkpoints", self._list_checkpoints),
            ("DELETE", run + "/checkpoints/{name:path}", self._delete_checkpoint),
            ("POST", "/api/v1/telemetry", self._telemetry),
            ("GET", "/metrics", self._metrics),
            ("GET", "/status", self._status),
        ]
        routes = [Route(path, self._with_key(call), methods=[method]) for method, path, call in calls]
        for path in ("/healthz", "/api/v1/healthz"):
            routes.append(Route(path, self._health, methods=["GET"]))
        return Starlette(routes=routes, exception_handlers={404: _refuse_path, 405: _refuse_path})

    def _with_key(self, call: Call) -> Callable[[Request], Awaitable[Response]]:
        """Return the handler of a call: finds the user of the key, answers errors, and writes the log."""

        async def handle(request: Request) -> Response:
            begin_s, key = time.time(), None
            try:
                key = find_key(self._keys, request.headers.get("x-api-key", ""))
                if key is None:
                    raise StatusError(401, "X-API-Key: is not a key of this server")
                response = await call(request, key)
            except (StatusError, ConfigError) as error:
                response = _answer_error(error)
            except OSError as error:  # of the folder of checkpoints
                response = _answer_error(StatusError(503, describe_fault(error)))
            except ClientDisconnect:  # in the middle of its body
                response = Response(status_code=400)
            except asyncio.CancelledError:  # when the server ends
                response = _answer_error(StatusError(503, "the server is stopping"))
            path = request.url.path
            if response.status_code != 408 and path not in _UNLOGGED:
                entry = {
                    "time": _time(begin_s),
                    "user": None if key is None else key.name,
                    "path": path,
                    "status": response.status_code,
                    "seconds": round(time.time() - begin_s, 4),
                    "request_id": response.headers.get("x-request-id"),
                }
                _log.info(json.dumps(entry))
            return response

        return handle

    # Sessions

    async def _client_config(self, request: Request, _key: UserKey) -> Response:
        body = await _read(request, types.ClientConfigRequest)
        _require_client(body.sdk_version)
        return JSONAnswer(
            {
                "pjwt_auth_enabled": False,
                "proto_compress_fwdbwd": True,
                "parallel_fwdbwd_chunks": True,
                "fwdbwd_max_chunk_len": self._service.settings.max_rows,
                "fwdbwd_max_chunk_bytes_count": messages.MAX_CHUNK_BYTES,
                "sample_max_concurrent_requests": 256,
                "use_pyqwest_transport": True,
            }
        )

    async def _create_session(self, request: Request, key: UserKey) -> Response:
        body = await _read(request, types.CreateSessionRequest)
        _require_client(body.sdk_version)
        session = self._service.open_session(key)
        return JSONAnswer({"type": "create_session", "session_id": session.session_id})

    async def _heartbeat(self, request: Request, key: UserKey) -> Response:
        body = await _read(request, types.SessionHeartbeatRequest)
        self._service.get_session(key, body.session_id).heartbeat_s = time.monotonic()
        return JSONAnswer({"type": "session_heartbeat"})

    async def _finish_session(self, request: Request, key: UserKey) -> Response:
        try:
            session = self._service.get_session(key, request.path_params["session_id"])
        except StatusError as error:
            if error.status == 410:
                return JSONAnswer({})
            raise
        self._service.close_session(session, "finished")
        return JSONAnswer({})

    # Models

    async def _create_model(self, request: Request, key: UserKey) -> Response:
        body = await _read(request, types.CreateModelRequest)
        session = self._service.get_session(key, body.session_id)
        lora = body.lora_config or types.LoraConfig(rank=32)
        chosen = {"attn": lora.train_attn, "mlp": lora.train_mlp, "unembed": lora.train_unembed}
        parts = frozenset(part for part in _PARTS if chosen[part])
        number, optimizer = body.model_seq_id, body.optimizer_config.type
        with self._service.open_model(session, number, lora.rank, parts, body.user_metadata) as queued:
            if queued.is_new:
                self._check_model(key, body.base_model, optimizer, lora.rank, parts)
                model_id = name_model(session, number)
                # Below 2**62, whatever number was sent: files of the model have it.
                seed = secrets.randbits(62) if lora.seed is None else lora.seed % (1 << 62)
                queued.operation = CreateModel(queued.request_id, model_id, lora.rank, seed, parts)
                queued.answer = {"type": "create_model", "model_id": model_id}
        return _promise(queued.request_id)

    def _check_model(
        self, key: UserKey, base_model: str | None, optimizer: str, rank: int, parts: frozenset[str]
    ) -> None:
        """Raise ConfigError if there cannot be such a model."""
        name = self._service.settings.name
        if base_model not in (None, name):
            raise ConfigError(f"base_model={base_model!r}: this server has {name!r}")
        if optimizer != "adamw":
            raise ConfigError(f"optimizer_config: {optimizer!r} is not served. Use adamw")
        if not 1 <= rank <= key.max_rank:
            raise ConfigError(f"lora_config.rank={rank}: your key allows 1 to {key.max_rank}")
        if not parts:
            raise ConfigError("lora_config: trains nothing. Set train_attn, train_mlp or train_unembed")

    async def _unload_model(self, request: Request, key: UserKey) -> Response:
        body = await _read(request, types.UnloadModelRequest)
        self._service.remove_model(self._service.get_model(key, body.model_id))
        return _promise(self._service.answer(key, {"type": "unload_model", "model_id": body.model_id}))

    async def _get_info(self, request: Request, key: UserKey) -> Response:
        body = await _read(request, types.GetInfoRequest)
        model, settings = self._service.get_model(key, body.model_id), self._service.settings
        data = {"arch": self._base.arch, "model_name": settings.name, "tokenizer_id": settings.tokenizer}
        return JSONAnswer(
            {
                "type": "get_info",
                "model_data": data,
                "model_id": model.model_id,
                "is_lora": True,
                "lora_rank": model.rank,
                "model_name": settings.name,
                "optimizer_config": {"type": "adamw"},
            }
        )

    # Training

    async def _forward_backward(self, request: Request, key: UserKey) -> Response:
        data = await _read_bytes(request, messages.MAX_READ_BYTES)
        message = messages.parse_pass(data)
        model = self._service.get_model(key, message.model_id)
        with self._service.place(model, message.seq_id, data, is_backward=not message.forward_only) as queued:
            if queued.is_new:
                _require_size(data, messages.MAX_BODY_BYTES)
                queued.operation = messages.read_pass(
                    queued.request_id, message, vocab_size=self._base.vocab_size, longest=self._base.max_length
                )
        return _promise(queued.request_id)

    async def _place(self, request: Request, key: UserKey) -> Response:
        """Queue a JSON request in the order of a model. Its place comes before anything else is checked."""
        data, values = await _read_object(request, messages.MAX_BODY_BYTES)
        call = request.url.path.rpartition("/")[2]
        model_id, seq_id = values.get("model_id"), values.get("seq_id")
        if call == "load_weights" and model_id is None:
            _require_size(data, _MAX_JSON_BYTES)
            return self._load_new(key, values)
        if not isinstance(model_id, str) or type(seq_id) is not int:
            raise StatusError(400, "model_id or seq_id: is missing")
        model = self._service.get_model(key, model_id)
        with self._service.place(model, seq_id, data) as queued:
            if queued.is_new:
                _require_size(data, _MAX_JSON_BYTES)
                match call:
                    case "optim_step":
                        queued.operation = read_step(queued.request_id, values)
                    case "save_weights":
                        save = parse(types.SaveWeightsRequest, values)
                        name = save.path or f"step-{model.num_steps}-{seq_id}"
                        self._set_save(queued, model, "weights", name, save)
                        queued.may_replace = save.overwrite
                    case "save_weights_for_sampler":
                        self._set_save_for_sampler(queued, model, seq_id, values)
                    case "load_weights":
                        load = parse(types.LoadWeightsRequest, values)
                        try:
                            checkpoint, folder = self._find_checkpoint(key, load.path)
                        # Without its place, the next request would wait forever.
                        except StatusError as error:
                            raise ConfigError(str(error)) from error
                        _require_equal_matrices(model, checkpoint)
                        _set_load(queued, model_id, checkpoint, folder, load)
                    case _:
                        raise ConfigError(
                            f"{call}: is not served. Use save_state, whose folder is an adapter of PEFT"
                        )
        return _promise(queued.request_id)

    async def _retrieve(self, request: Request, key: UserKey) -> Response:
        body = await _read(request, types.FutureRetrieveRequest)
        try:
            result = (await self._service.retrieve(key, body.request_id)).result
        except StatusError as error:
            if error.status != 408:
                raise
            answer = {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}
            return JSONAnswer({**answer, "queue_state_reason": str(error)}, status_code=408)
        headers = {"x-request-id": body.request_id}
        if isinstance(result, bytes):
            return Response(result, media_type=messages.PROTOBUF, headers=headers)
        if isinstance(result, Refusal):
            result = {"error": result.text, "category": "user" if result.is_users else "server"}
        return JSONAnswer(result, headers=headers)

    # Checkpoints

    def _set_save_for_sampler(
        self, queued: QueuedRequest, model: Model, seq_id: int, values: Mapping[str, Any]
    ) -> None:
        """Set the operation of a request to a save, or to a copy in memory."""
        body = parse(types.SaveWeightsForSamplerRequest, values)
        session_id = model.session.session_id
        if body.sampling_session_seq_id is None:
            name = body.path or f"sample-{model.num_steps}-{seq_id}"
            self._set_save(queued, model, "sampler_weights", name, body)
        elif self._service.vllm is None:
            copy = f"{model.model_id}/{seq_id}"
            queued.operation = CopyModel(queued.request_id, model.model_id, copy)
            queued.sampler = Sampler(model.key, session_id, copy)
        else:  # vLLM loads the snapshot from a folder
            body = body.model_copy(update={"ttl_seconds": _TTL_S.start})
            name = f"snapshot-{queued.request_id}"  # no name of a user's checkpoint
            self._set_save(queued, model, "sampler_weights", name, body)
            assert isinstance(queued.operation, SaveModel)
            folder, save_id = queued.operation.folder, queued.request_id
            queued.sampler = Sampler(model.key, session_id, name, folder, save_id, _TTL_S.start)
        if queued.sampler is not None:
            queued.answer = {"type": "save_weights_for_sampler", "path": None}

    def _set_save(self, queued: QueuedRequest, model: Model, kind: str, name: str, body: Any) -> None:
        """Set the operation of a request to the save of a model."""
        if body.ttl_seconds is not None and body.ttl_seconds not in _TTL_S:
            raise ConfigError(f"ttl_seconds={body.ttl_seconds}: is not {_TTL_S.start} to {_TTL_S.stop - 1}")
        if kind == "weights" and name in OWN_NAMES:
            raise ConfigError(f"path {name!r}: is a name of the server's own saves. Use another")
        checkpoint = Checkpoint(
            model.model_id,
            kind,
            name,
            expires_s=None if body.ttl_seconds is None else time.time() + body.ttl_seconds,
            rank=model.rank,
            parts=sorted(model.parts),
            user_metadata=body.user_metadata,
            save_id=queued.request_id,
        )
        queued.operation = self._service.make_save(queued.request_id, model, checkpoint)
        queued.checkpoint, queued.answer = checkpoint, {"path": checkpoint.path}

    def _load_new(self, key: UserKey, values: Mapping[str, Any]) -> Response:
        """Create a model from a checkpoint."""
        body = parse(types.LoadWeightsRequest, values)
        if body.session_id is None or body.model_seq_id is None:
            raise StatusError(400, "session_id and model_seq_id, or model_id and seq_id: are missing")
        session, number = self._service.get_session(key, body.session_id), body.model_seq_id
        checkpoint, folder = self._find_checkpoint(key, body.path)
        rank, parts = checkpoint.rank, frozenset(checkpoint.parts)
        optimizer = "adamw" if body.optimizer_config is None else body.optimizer_config.type
        with self._service.open_model(session, number, rank, parts, body.user_metadata) as queued:
            if queued.is_new:
                self._check_model(key, body.base_model, optimizer, rank, parts)
                _set_load(queued, name_model(session, number), checkpoint, folder, body)
        return _promise(queued.request_id)

    def _find_checkpoint(self, key: UserKey, path: str) -> tuple[Checkpoint, str]:
        """Return a user's checkpoint and its folder.

        Raises:
            StatusError: 403 for one of another user, 404 if there is none.
        """
        store = self._service.store
        try:
            if store is not None and (checkpoint := store.find(key.folder, path)) is not None:
                return checkpoint, str(store.folder(key.folder, checkpoint))
            is_foreign = store is not None and store.is_of_other(key.folder, path)
        except ConfigError as error:
            raise StatusError(404, str(error)) from error
        raise StatusError(403 if is_foreign else 404, f"path {path!r}: is not a checkpoint of yours")

    async def _weights_info(self, request: Request, key: UserKey) -> Response:
        _, values = await _read_object(request)
        checkpoint, _ = self._find_checkpoint(key, str(values.get("tinker_path")))
        trained = {f"train_{part}": part in checkpoint.parts for part in _PARTS}
        name = self._service.settings.name
        return JSONAnswer({"base_model": name, "is_lora": True, "lora_rank": checkpoint.rank, **trained})

    async def _get_run(self, request: Request, key: UserKey) -> Response:
        """Describe a model, or one that is gone by its last checkpoint."""
        model_id, store = request.path_params["model_id"], self._service.store
        try:
            model = self._service.get_model(key, model_id)
            rank, time_s, metadata = model.rank, time.time(), model.user_metadata
        except StatusError as error:
            checkpoints = [] if store is None or error.status == 403 else list(store.list(key.folder, model_id))
            if not checkpoints:
                raise
            last = max(checkpoints, key=lambda each: each.time_s)
            rank, time_s, metadata = last.rank, last.time_s, last.user_metadata
        return JSONAnswer(
            {
                "training_run_id": model_id,
                "base_model": self._service.settings.name,
                "model_owner": key.name,
                "is_lora": True,
                "lora_rank": rank,
                "last_request_time": _time(time_s),
                "user_metadata": {name: str(value) for name, value in (metadata or {}).items()} or None,
            }
        )

    async def _list_checkpoints(self, request: Request, key: UserKey) -> Response:
        store, model_id = self._service.store, request.path_params.get("model_id")
        # In a thread: a user may have thousands, whose metadata are read.
        checkpoints = [] if store is None else await asyncio.to_thread(list, store.list(key.folder, model_id))
        limit, offset = (request.query_params.get(*item) for item in (("limit", "100"), ("offset", "0")))
        if not (limit.isdecimal() and offset.isdecimal() and len(limit + offset) < 12):
            raise StatusError(400, "limit or offset: is not a number")
        begin, end = int(offset), int(offset) + int(limit)
        cursor = {"offset": begin, "limit": int(limit), "total_count": len(checkpoints)}
        return JSONAnswer({"checkpoints": [_describe(each) for each in checkpoints[begin:end]], "cursor": cursor})

    async def _delete_checkpoint(self, request: Request, key: UserKey) -> Response:
        # Not decoded: name%2Fpublish is a checkpoint, and name/publish is a call that is not served.
        name = request.scope["raw_path"].decode("latin-1").partition("/checkpoints/")[2]
        checkpoint, _ = self._find_checkpoint(key, f"tinker://{request.path_params['model_id']}/{name}")
        await self._service.delete_checkpoint(key, checkpoint)
        return Response(status_code=204)

    # Samples

    async def _create_sampler(self, request: Request, key: UserKey) -> Response:
        body = await _read(request, types.CreateSamplingSessionRequest)
        self._service.require_open()
        session = self._service.get_session(key, body.session_id)
        sampler = self._make_sampler(key, session.session_id, body.model_path, body.base_model)
        sampler_id = self._service.open_sampler(sampler)
        return JSONAnswer({"type": "create_sampling_session", "sampling_session_id": sampler_id})

    def _make_sampler(self, key: UserKey, session_id: str, path: str | None, base_model: str | None) -> Sampler:
        name = self._service.settings.name
        if path is not None:
            checkpoint, folder = self._find_checkpoint(key, path)
            # A checkpoint that is saved again under its name is another one, also while this one is loaded.
            digest = digest_of(f"{folder} {checkpoint.save_id}".encode())
            return Sampler(key, session_id, f"sampler {digest[:40]}", folder, checkpoint.save_id)
        if base_model != name:
            raise StatusError(404, f"base_model={base_model!r}: this server has {name!r}")
        return Sampler(key, session_id)

    async def _get_sampler(self, request: Request, key: UserKey) -> Response:
        sampler_id = request.path_params["sampler_id"]
        self._service.get_sampler(key, sampler_id)
        name = self._service.settings.name
        return JSONAnswer({"sampler_id": sampler_id, "base_model": name, "model_path": None})

    async def _sample(self, request: Request, key: UserKey) -> Response:
        data, values = await _read_object(request, messages.MAX_BODY_BYTES)
        sampler_id, seq_id = values.get("sampling_session_id"), values.get("seq_id")
        if isinstance(sampler_id, str):
            sampler = self._service.get_sampler(key, sampler_id)
        else:
            path = values.get("model_path")
            sampler = self._make_sampler(key, "", None if path is None else str(path), values.get("base_model"))
        number = values.get("num_samples", 1)
        number = number if type(number) is int and 0 < number <= 1024 else 1
        digest = digest_of(data)
        if type(seq_id) is int and seq_id in sampler.seen:
            return _promise(self._service.find_again(key, sampler.seen, seq_id, digest), number)
        with self._service.admit(key, f"samples of {key.name}") as queued:
            read_sample(queued, sampler, values, self._base, has_vllm=self._service.vllm is not None)
            if isinstance(queued.answer, SampleAnswer) and queued.answer.stops and self._service.tokenizer is None:
                raise ConfigError("stop: this server has no tokenizer for texts. Pass ids of tokens")
            # vLLM may read the folder at any sample: it forgets adapters by itself.
            if self._service.vllm is not None and sampler.folder is not None:
                self._use_folder(sampler, sampler.folder)
        if type(seq_id) is int:
            sampler.seen[seq_id] = digest, queued.request_id
        return _promise(queued.request_id, number)

    def _use_folder(self, sampler: Sampler, folder: str) -> None:
        """Keep a snapshot for longer. Raise ConfigError if the folder has not what the sampler was opened on."""
        checkpoint, now_s = require_saved_by(sampler.save_id, folder), time.time()
        if sampler.ttl_s is None or (checkpoint.expires_s or 0) > now_s + sampler.ttl_s - _RENEWAL_S:
            return
        assert self._service.store is not None
        try:
            self._service.store.record(folder, replace(checkpoint, expires_s=now_s + sampler.ttl_s))
        except StorageError:  # the next sample tries again
            _log.exception("the time of a snapshot cannot be renewed")

    # The server

    async def _capabilities(self, _request: Request, _key: UserKey) -> Response:
        name, length = self._service.settings.name, self._base.max_sampled_length
        model = {"model_name": name, "max_context_length": length, "trainable": True, "sampleable": True}
        return JSONAnswer({"supported_models": [model]})

    async def _telemetry(self, _request: Request, _key: UserKey) -> Response:
        return JSONAnswer({"status": "accepted"})

    async def _health(self, _request: Request) -> Response:
        service = self._service
        return JSONAnswer(
            {
                "status": "stopping" if service.is_stopping else "ok",
                "models": len(service.models),
                "queue": service.num_waiting,
                "capacity": {
                    "max_tokens_per_turn": service.settings.max_tokens_per_turn,
                    "max_context_length": self._base.max_sampled_length,
                },
                "versions": {name: version(name) for name in ("shardwise", "torch", "transformers")},
                "clients": str(messages.CLIENTS),
                "durable": "what save_weights has acknowledged, and nothing else",
            },
            status_code=503 if service.is_stopping else 200,
        )

    async def _metrics(self, _request: Request, key: UserKey) -> Response:
        if not key.is_operator:
            raise StatusError(403, "/metrics: is for keys with is_operator: true")
        return Response(write_metrics(self._service), media_type="text/plain; version=0.0.4")

    async def _status(self, _request: Request, key: UserKey) -> Response:
        return HTMLResponse(write_page(self._service, key))


def _require_equal_matrices(model: Model, checkpoint: Checkpoint) -> None:
    """Raise ConfigError if a checkpoint is not of the model's rank and parts."""
    if (model.rank, model.parts) != (checkpoint.rank, frozenset(checkpoint.parts)):
        stored, trained = (f"rank {each.rank} ({', '.join(sorted(each.parts))})" for each in (checkpoint, model))
        raise ConfigError(
            f"path {checkpoint.path!r}: has {stored}, and the model has {trained}. Call "
            "create_training_client_from_state, which makes another model"
        )


def _set_load(queued: QueuedRequest, model_id: str, checkpoint: Checkpoint, folder: str, body: Any) -> None:
    """Set the operation of a request to the load of a model."""
    if body.optimizer and checkpoint.kind != "weights":
        raise ConfigError("optimizer: a checkpoint to sample from has none. Load the weights alone")
    queued.operation = LoadModel(queued.request_id, model_id, folder, body.optimizer)
    queued.answer = {"type": "load_weights", "model_id": model_id, "path": body.path}


def _describe(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "checkpoint_id": "/".join(checkpoint.path.split("/")[3:]),
        "checkpoint_type": KINDS[checkpoint.kind],
        "time": _time(checkpoint.time_s),
        "tinker_path": checkpoint.path,
        "user_metadata": checkpoint.user_metadata,
        "expires_at": None if checkpoint.expires_s is None else _time(checkpoint.expires_s),
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _promise(request_id: str, num_samples: int | None = None) -> Response:
    answer: dict[str, Any] = {"request_id": request_id}
    if num_samples is not None:
        answer["sample_sequence_ids"] = [f"{request_id}:{number}" for number in range(num_samples)]
    return JSONAnswer(answer, headers={"x-request-id": request_id})


async def _read_bytes(request: Request, max_bytes: int) -> bytes:
    """Return the body without its encoding. Raise StatusError 413 if it has more than ``max_bytes``."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise StatusError(413, f"the body has more than {max_bytes} bytes. Send less at once")
        parts.append(part)
    return messages.decompress(b"".join(parts), request.headers.get("content-encoding", ""), max_bytes)


def _require_size(data: bytes, max_bytes: int) -> None:
    if len(data) > max_bytes:
        raise ConfigError(f"the request has {len(data)} bytes. Send at most {max_bytes}")


async def _read_object(request: Request, max_bytes: int = _MAX_JSON_BYTES) -> tuple[bytes, dict[str, Any]]:
    """Return the body and its JSON object."""
    data = await _read_bytes(request, max_bytes)
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StatusError(400, f"the body is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise StatusError(400, "the body is not a JSON object")
    return data, values


async def _read(request: Request, kind: type[Body]) -> Body:
    _, values = await _read_object(request)
    return parse(kind, values)


def _require_client(text: str) -> None:
    try:
        is_served = Version(text) in messages.CLIENTS
    except InvalidVersion:
        is_served = False
    if not is_served:
        raise StatusError(426, f"tinker {text[:40]}: is not served. Run pip install 'tinker{messages.CLIENTS}'")


async def _refuse_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    call = f"{request.method} {request.url.path}"
    text = f"{call}: this server does not serve it. See 'What is served' in docs/serve.md"
    return JSONAnswer({"error": text}, status_code=error.status_code, headers=error.headers)


def _answer_error(error: Exception) -> Response:
    status = error.status if isinstance(error, StatusError) else 400
    headers = {"retry-after": "1"} if status in (429, 503) else None
    return JSONAnswer({"error": str(error)}, status_code=status, headers=headers)
