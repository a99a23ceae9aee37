"""The protocol of the ``tinker`` client over HTTP. See docs/serve.md for the calls that are served."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

import pydantic
import torch
from packaging.version import InvalidVersion, Version
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from tinker import types

from shardwise.bank.sampling import SampleOutput
from shardwise.core.errors import ConfigError
from shardwise.serve import messages
from shardwise.serve.checkpoints import KINDS, Checkpoint
from shardwise.serve.keys import UserKey, find_key
from shardwise.serve.operations import (
    CopyModel,
    CreateModel,
    Generate,
    LoadModel,
    OptimStep,
    Pass,
    PassOutcome,
    Refusal,
)
from shardwise.serve.service import Model, Queued, Sampler, Service, StatusError, digest_of, make_save, new_id
from shardwise.serve.status import write_metrics, write_page
from shardwise.serve.turns import Cost, Stage
from shardwise.serve.vllm import VllmClient

_log = logging.getLogger(__name__)

_ORDER: Final = ("attn", "mlp", "unembed")

BaseCapabilities = Mapping[str, Any]
"""``vocab_size``, ``max_length`` and ``arch`` of the base."""

Body = TypeVar("Body", bound=pydantic.BaseModel)
Handler = Callable[[Request], Awaitable[Response]]


class App:
    """Routes of a server.

    Args:
        service: its state.
        keys: users by the digest of their key. None for everybody.
        base: ``vocab_size``, ``max_length`` and ``arch`` of the base.
        tokenizer: of the base, or None. For stops that are texts.
        vllm: samples instead of the bank, if there is one.
    """

    def __init__(
        self,
        service: Service,
        keys: Mapping[str, UserKey] | None,
        base: BaseCapabilities,
        tokenizer: Any,
        vllm: VllmClient | None = None,
    ) -> None:
        self._service = service
        self._keys = keys
        self._base = base
        self._tokenizer = tokenizer
        self._vllm = vllm

    def routes(self) -> Starlette:
        """Return the application."""
        calls: list[tuple[str, str, Callable[[Request, UserKey], Awaitable[Response]]]] = [
            ("POST", "/api/v1/client/config", self._client_config),
            ("POST", "/api/v1/create_session", self._create_session),
            ("POST", "/api/v1/session_heartbeat", self._heartbeat),
            ("POST", "/api/v1/sessions/{session_id}/finish", self._finish_session),
            ("POST", "/api/v1/create_model", self._create_model),
            ("POST", "/api/v1/unload_model", self._unload_model),
            ("POST", "/api/v1/get_info", self._get_info),
            ("POST", "/api/v1/forward_backward", self._forward_backward),
            ("POST", "/api/v1/optim_step", self._optim_step),
            ("POST", "/api/v1/retrieve_future", self._retrieve),
            ("POST", "/api/v1/save_weights", self._save_weights),
            ("POST", "/api/v1/load_weights", self._load_weights),
            ("POST", "/api/v1/save_weights_for_sampler", self._save_for_sampler),
            ("POST", "/api/v1/create_sampling_session", self._create_sampler),
            ("GET", "/api/v1/samplers/{sampler_id}", self._get_sampler),
            ("POST", "/api/v1/asample", self._sample),
            ("GET", "/api/v1/get_server_capabilities", self._capabilities),
            ("POST", "/api/v1/weights_info", self._weights_info),
            ("GET", "/api/v1/checkpoints", self._list_checkpoints),
            ("GET", "/api/v1/training_runs", self._list_runs),
            ("GET", "/api/v1/training_runs/{model_id}", self._get_run),
            ("GET", "/api/v1/training_runs/{model_id}/checkpoints", self._list_checkpoints),
            ("DELETE", "/api/v1/training_runs/{model_id}/checkpoints/{kind}/{name}", self._delete_checkpoint),
            ("POST", "/api/v1/telemetry", self._telemetry),
            ("GET", "/metrics", self._metrics),
            ("GET", "/status", self._status),
        ]
        routes = [Route(path, self._with_key(call), methods=[method]) for method, path, call in calls]
        routes.append(Route("/healthz", self._health, methods=["GET"]))
        routes.append(Route("/api/v1/healthz", self._health, methods=["GET"]))
        handlers: Any = {
            StatusError: _answer_status,
            HTTPException: _answer_http,
            messages.UndecodableError: _answer_undecodable,
            messages.TooLargeError: _answer_too_large,
            pydantic.ValidationError: _answer_invalid,
            ConfigError: _answer_undecodable,
        }
        return Starlette(routes=routes, exception_handlers=handlers)

    def _with_key(self, call: Callable[[Request, UserKey], Awaitable[Response]]) -> Handler:
        """Return a handler that finds the user of the key first."""

        async def handle(request: Request) -> Response:
            begin_s = time.monotonic()
            key = find_key(self._keys, request.headers.get("x-api-key", ""))
            if key is None:
                raise StatusError(401, "X-API-Key: is not a key of this server")
            response = await call(request, key)
            if _log.isEnabledFor(logging.DEBUG):
                entry = {"user": key.name, "path": request.url.path, "status": response.status_code}
                _log.debug(json.dumps({**entry, "seconds": round(time.monotonic() - begin_s, 4)}))
            return response

        return handle

    # Sessions

    async def _client_config(self, request: Request, _key: UserKey) -> Response:
        body = await _read(request, types.ClientConfigRequest)
        _require_client(body.sdk_version)
        return JSONResponse(
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
        session = self._service.open_session(key, body.user_metadata)
        return JSONResponse({"type": "create_session", "session_id": session.session_id})

    async def _heartbeat(self, request: Request, key: UserKey) -> Response:
        body = await _read(request, types.SessionHeartbeatRequest)
        session = self._service.get_session(key, body.session_id)
        session.heartbeat_s = time.monotonic()
        return JSONResponse({"type": "session_heartbeat"})

    async def _finish_session(self, request: Request, key: UserKey) -> Response:
        session = self._service.get_session(key, request.path_params["session_id"])
        self._service.close_session(session, "finished")
        return JSONResponse({})

    # Models

    async def _create_model(self, request: Request, key: UserKey) -> Response:
        body = await _read(request, types.CreateModelRequest)
        session = self._service.get_session(key, body.session_id)
        lora = body.lora_config or types.LoraConfig(rank=32)
        chosen = {"attn": lora.train_attn, "mlp": lora.train_mlp, "unembed": lora.train_unembed}
        parts = frozenset(part for part in _ORDER if chosen[part])
        if fault := self._find_model_fault(key, body.base_model, body.optimizer_config.type, lora.rank, parts):
            return _promise(self._service.refuse(key, fault))
        seed = (lora.seed or 0) % (1 << 62)
        model, is_new = self._service.add_model(session, body.model_seq_id, lora.rank, parts, body.user_metadata)
        if not is_new:
            return _promise(model.seen[0][1] if 0 in model.seen else self._service.refuse(key, "exists already"))

        def make(request_id: str) -> Queued:
            operation = CreateModel(request_id, model.model_id, lora.rank, seed, parts)
            return Queued(
                operation, Cost(Stage.OTHER), lambda _: {"type": "create_model", "model_id": model.model_id}
            )

        return _promise(self._create(model, make))

    def _create(self, model: Model, make: Callable[[str], Queued]) -> str:
        """Queue what creates a model. A request that is sent again has the same future, as number 0."""
        try:
            request_id = self._service.submit_unordered(model.key, model.model_id, make)
        except StatusError:
            del self._service.models[model.model_id]
            raise
        model.seen[0] = "", request_id
        return request_id

    def _find_model_fault(
        self, key: UserKey, base_model: str | None, optimizer: str, rank: int, parts: frozenset[str]
    ) -> str | None:
        name = self._service.settings.name
        if base_model not in (None, name):
            return f"base_model={base_model!r}: this server has {name!r}"
        if optimizer != "adamw":
            return f"optimizer_config: {optimizer!r} is not served. Use adamw"
        if not 1 <= rank <= key.max_rank:
            return f"lora_config.rank={rank}: your key allows 1 to {key.max_rank}"
        if not parts:
            return "lora_config: trains nothing. Set train_attn, train_mlp or train_unembed"
        return None

    async def _unload_model(self, request: Request, key: UserKey) -> Response:
        body = await _read(request, types.UnloadModelRequest)
        model = self._service.get_model(key, body.model_id)
        self._service.remove_model(model)
        return JSONResponse(
            {"request_id": self._service.answer(key, {"type": "unload_model", "model_id": body.model_id})}
        )

    async def _get_info(self, request: Request, key: UserKey) -> Response:
        body = await _read(request, types.GetInfoRequest)
        model = self._service.get_model(key, body.model_id)
        settings = self._service.settings
        data = {"arch": self._base["arch"], "model_name": settings.name, "tokenizer_id": settings.tokenizer}
        return JSONResponse(
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
        data = await _read_bytes(request)
        message = messages.parse_pass(data)
        model = self._service.get_model(key, message.model_id)

        def make(request_id: str) -> Queued:
            each = messages.read_pass(
                request_id, message, vocab_size=self._base["vocab_size"], longest=self._base["max_length"]
            )
            return Queued(each, Cost(Stage.PASS, count_tokens(each)), messages.write_pass)

        is_pass = not message.forward_only
        return _promise(self._service.submit(model, message.seq_id, digest_of(data), make, is_pass=is_pass))

    async def _optim_step(self, request: Request, key: UserKey) -> Response:
        data, values = await _read_object(request)
        model, seq_id = self._find_place(key, values)

        def make(request_id: str) -> Queued:
            body = _parse(types.OptimStepRequest, values)
            params = body.optim_params
            if not isinstance(params, types.AdamParams):
                raise ConfigError(f"optim_params: {params.type!r} is not served. Use AdamParams")
            operation = OptimStep(request_id, model.model_id, _read_adam(params))
            return Queued(operation, Cost(Stage.STEP), lambda metrics: {"metrics": metrics})

        return _promise(self._service.submit(model, seq_id, digest_of(data), make))

    def _find_place(self, key: UserKey, values: Mapping[str, Any]) -> tuple[Model, int]:
        """Return model and seq_id of a JSON request, which come before anything else is checked."""
        model_id, seq_id = values.get("model_id"), values.get("seq_id")
        if not isinstance(model_id, str) or type(seq_id) is not int:
            raise StatusError(400, "model_id or seq_id: is missing")
        return self._service.get_model(key, model_id), seq_id

    async def _retrieve(self, request: Request, key: UserKey) -> Response:
        body = await _read(request, types.FutureRetrieveRequest)
        try:
            future = await self._service.retrieve(key, body.request_id)
        except StatusError as error:
            if error.status != 408:
                raise
            answer = {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}
            return JSONResponse({**answer, "queue_state_reason": str(error)}, status_code=408)
        result = future.result
        if isinstance(result, Refusal):
            category = "user" if result.is_users else "server"
            return JSONResponse({"error": result.text, "category": category})
        if isinstance(result, bytes):
            return Response(result, media_type=messages.PROTOBUF)
        return JSONResponse(result)

    # Checkpoints

    async def _save_weights(self, request: Request, key: UserKey) -> Response:
        data, values = await _read_object(request)
        model, seq_id = self._find_place(key, values)

        def make(request_id: str) -> Queued:
            body = _parse(types.SaveWeightsRequest, values)
            name = body.path or f"step-{model.num_steps}-{seq_id}"
            return self._make_save(model, "weights", name, body, overwrite=body.overwrite)(request_id)

        return _promise(self._service.submit(model, seq_id, digest_of(data), make))

    def _make_save(
        self, model: Model, kind: str, name: str, body: Any, *, overwrite: bool
    ) -> Callable[[str], Queued]:
        store = self._service.store
        if store is None:
            raise ConfigError("path: this server has no folder for checkpoints. Start it with --state")
        if body.ttl_seconds is not None and not 3600 <= body.ttl_seconds <= 10 * 365 * 86400:
            raise ConfigError(f"ttl_seconds={body.ttl_seconds}: is not 3600 to {10 * 365 * 86400}")
        path = Checkpoint(model.model_id, kind, name).path
        if not overwrite and store.find(model.key.folder, path) is not None:
            raise ConfigError(f"path {name!r}: exists already. Pass overwrite=True, or another name")
        return make_save(store, model, kind, name, body.ttl_seconds, body.user_metadata)

    async def _save_for_sampler(self, request: Request, key: UserKey) -> Response:
        data, values = await _read_object(request)
        model, seq_id = self._find_place(key, values)

        def make(request_id: str) -> Queued:
            body = _parse(types.SaveWeightsForSamplerRequest, values)
            if body.sampling_session_seq_id is None:
                name = body.path or f"sample-{model.num_steps}-{seq_id}"
                return self._make_save(model, "sampler_weights", name, body, overwrite=True)(request_id)
            if self._vllm is not None:
                return self._save_snapshot(model, seq_id, request_id)
            new = f"{model.model_id}/{seq_id}"

            def write(_outcome: object) -> dict[str, Any]:
                self._keep_snapshot(model, new)
                sampler_id = self._add_sampler(model.session.session_id, Sampler(key, new))
                return {"type": "save_weights_for_sampler", "path": None, "sampling_session_id": sampler_id}

            return Queued(CopyModel(request_id, model.model_id, new), Cost(Stage.OTHER), write)

        return _promise(self._service.submit(model, seq_id, digest_of(data), make))

    def _save_snapshot(self, model: Model, seq_id: int, request_id: str) -> Queued:
        """Return what saves a snapshot to a folder, from which vLLM loads it."""
        if self._service.store is None:
            raise ConfigError("snapshots for vLLM need a folder for checkpoints. Start the server with --state")
        name = f"snapshot-{seq_id}"
        item = make_save(self._service.store, model, "sampler_weights", name, 3600, None)(request_id)
        folder = self._service.store.folder(model.key.folder, model.model_id, "sampler_weights", name)

        def write(outcome: object) -> dict[str, Any]:
            item.write(outcome)
            sampler_id = self._add_sampler(model.session.session_id, Sampler(model.key, name, str(folder)))
            return {"type": "save_weights_for_sampler", "path": None, "sampling_session_id": sampler_id}

        return Queued(item.operation, item.cost, write)

    def _keep_snapshot(self, model: Model, new: str) -> None:
        """Note a snapshot, and forget the oldest above the user's limit."""
        model.snapshots.append(new)
        old = model.snapshots[: -model.key.max_snapshots]
        if old:
            del model.snapshots[: len(old)]
            self._service.forget(old)

    async def _load_weights(self, request: Request, key: UserKey) -> Response:
        data, values = await _read_object(request)
        body = await _read(request, types.LoadWeightsRequest)
        if body.model_id is not None:
            model, seq_id = self._find_place(key, values)
            checkpoint, folder = self._find_checkpoint(key, body.path)

            def make(request_id: str) -> Queued:
                operation = LoadModel(request_id, model.model_id, folder, body.optimizer)
                return Queued(operation, Cost(Stage.OTHER), lambda _: _loaded(model, body.path))

            return _promise(self._service.submit(model, seq_id, digest_of(data), make))
        if body.session_id is None or body.model_seq_id is None:
            raise StatusError(400, "session_id and model_seq_id, or model_id and seq_id: are missing")
        session = self._service.get_session(key, body.session_id)
        checkpoint, folder = self._find_checkpoint(key, body.path)
        parts = frozenset(checkpoint.parts)
        optimizer = "adamw" if body.optimizer_config is None else body.optimizer_config.type
        if fault := self._find_model_fault(key, body.base_model, optimizer, checkpoint.rank, parts):
            return _promise(self._service.refuse(key, fault))
        new, is_new = self._service.add_model(
            session, body.model_seq_id, checkpoint.rank, parts, body.user_metadata
        )
        if not is_new:
            return _promise(new.seen[0][1] if 0 in new.seen else self._service.refuse(key, "exists already"))

        def make_new(request_id: str) -> Queued:
            operation = LoadModel(request_id, new.model_id, folder, body.optimizer)
            return Queued(operation, Cost(Stage.OTHER), lambda _: _loaded(new, body.path))

        return _promise(self._create(new, make_new))

    def _find_checkpoint(self, key: UserKey, path: str) -> tuple[Checkpoint, str]:
        """Return a user's checkpoint and its folder.

        Raises:
            StatusError: 403 for one of another user, 404 if there is none.
        """
        store = self._service.store
        try:
            checkpoint = None if store is None else store.find(key.folder, path)
            if store is None or checkpoint is None:
                is_foreign = store is not None and store.is_of_other(key.folder, path)
                raise StatusError(403 if is_foreign else 404, f"path {path!r}: is not a checkpoint of yours")
        except ConfigError as error:
            raise StatusError(404, str(error)) from error
        return checkpoint, str(store.folder(key.folder, checkpoint.model, checkpoint.kind, checkpoint.name))

    async def _weights_info(self, request: Request, key: UserKey) -> Response:
        _, values = await _read_object(request)
        checkpoint, _ = self._find_checkpoint(key, str(values.get("tinker_path")))
        return JSONResponse(
            {
                "base_model": self._service.settings.name,
                "is_lora": True,
                "lora_rank": checkpoint.rank,
                **{f"train_{part}": part in checkpoint.parts for part in _ORDER},
            }
        )

    async def _list_checkpoints(self, request: Request, key: UserKey) -> Response:
        store, model_id = self._service.store, request.path_params.get("model_id")
        found = [] if store is None else [_describe(each) for each in store.list(key.folder, model_id)]
        limit, offset = _read_page(request)
        cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
        return JSONResponse({"checkpoints": found[offset : offset + limit], "cursor": cursor})

    async def _delete_checkpoint(self, request: Request, key: UserKey) -> Response:
        place = request.path_params
        path = f"tinker://{place['model_id']}/{place['kind']}/{place['name']}"
        checkpoint, _ = self._find_checkpoint(key, path)
        assert self._service.store is not None
        self._service.store.delete(key.folder, checkpoint)
        return Response(status_code=204)

    async def _list_runs(self, request: Request, key: UserKey) -> Response:
        runs = [self._describe_run(model) for model in self._service.models.values() if model.key is key]
        limit, offset = _read_page(request)
        cursor = {"offset": offset, "limit": limit, "total_count": len(runs)}
        return JSONResponse({"training_runs": runs[offset : offset + limit], "cursor": cursor})

    async def _get_run(self, request: Request, key: UserKey) -> Response:
        return JSONResponse(self._describe_run(self._service.get_model(key, request.path_params["model_id"])))

    def _describe_run(self, model: Model) -> dict[str, Any]:
        age_s = time.monotonic() - model.request_s
        metadata = {str(name): str(value) for name, value in (model.user_metadata or {}).items()}
        return {
            "training_run_id": model.model_id,
            "base_model": self._service.settings.name,
            "model_owner": model.key.name,
            "is_lora": True,
            "lora_rank": model.rank,
            "last_request_time": _time(time.time() - age_s),
            "user_metadata": metadata or None,
        }

    # Samples

    async def _create_sampler(self, request: Request, key: UserKey) -> Response:
        body = await _read(request, types.CreateSamplingSessionRequest)
        self._service.require_open()
        session = self._service.get_session(key, body.session_id)
        sampler_id = self._add_sampler(
            session.session_id, self._open_sampler(key, body.model_path, body.base_model)
        )
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": sampler_id})

    def _open_sampler(self, key: UserKey, path: str | None, base_model: str | None) -> Sampler:
        name = self._service.settings.name
        if path is not None:
            _, folder = self._find_checkpoint(key, path)
            return Sampler(key, f"sampler {digest_of(folder.encode())[:40]}", folder)
        if base_model != name:
            raise StatusError(404, f"base_model={base_model!r}: this server has {name!r}")
        return Sampler(key, None)

    def _add_sampler(self, session_id: str, sampler: Sampler) -> str:
        sampler_id = new_id()
        self._service.samplers[sampler_id] = sampler
        if (session := self._service.sessions.get(session_id)) is not None:
            session.samplers.append(sampler_id)
        return sampler_id

    def _get_own_sampler(self, key: UserKey, sampler_id: str) -> Sampler:
        sampler = self._service.samplers.get(sampler_id)
        if sampler is None:
            raise StatusError(404, f"sampling session {sampler_id!r}: does not exist")
        if sampler.key is not key:
            raise StatusError(403, "this sampling session is that of another key")
        return sampler

    async def _get_sampler(self, request: Request, key: UserKey) -> Response:
        sampler_id = request.path_params["sampler_id"]
        self._get_own_sampler(key, sampler_id)
        return JSONResponse(
            {"sampler_id": sampler_id, "base_model": self._service.settings.name, "model_path": None}
        )

    async def _sample(self, request: Request, key: UserKey) -> Response:
        data, values = await _read_object(request)
        sampler_id, seq_id = values.get("sampling_session_id"), values.get("seq_id")
        if isinstance(sampler_id, str):
            sampler = self._get_own_sampler(key, sampler_id)
        else:
            sampler = self._open_sampler(key, values.get("model_path"), values.get("base_model"))
        number = values.get("num_samples", 1)
        number = number if type(number) is int and 0 < number <= 1024 else 1
        if type(seq_id) is int and seq_id in sampler.seen:
            digest, request_id = sampler.seen[seq_id]
            if digest != digest_of(data):
                request_id = self._service.refuse(key, f"seq_id={seq_id}: had another body before")
            return _promise(request_id, number)

        def make(request_id: str) -> Queued:
            return self._make_sample(request_id, sampler, _parse(types.SampleRequest, values))

        if self._vllm is not None:
            request_id = self._service.run_outside(key, make, self._vllm.sample)
        else:
            request_id = self._service.submit_unordered(key, f"samples of {key.name}", make)
        if type(seq_id) is int:
            sampler.seen[seq_id] = digest_of(data), request_id
        return _promise(request_id, number)

    def _make_sample(self, request_id: str, sampler: Sampler, body: types.SampleRequest) -> Queued:
        """Return the operation of a sample. One that is scored alone runs with the passes of models."""
        for name in ("topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k"):
            if getattr(body, name):
                raise ConfigError(f"{name}: is not served. Leave it out")
        params = body.sampling_params
        prompt = tuple(_read_prompt(body.prompt))
        vocab_size, longest = self._base["vocab_size"], self._base["max_length"]
        if not prompt or min(prompt) < 0 or max(prompt) >= vocab_size:
            raise ConfigError(f"prompt: is empty, or has tokens outside of the model's {vocab_size}")
        max_tokens = params.max_tokens if params.max_tokens is not None else max(longest - len(prompt), 0)
        if not 1 <= body.num_samples <= 1024 or max_tokens < 0 or len(prompt) + max_tokens > longest:
            raise ConfigError(
                f"prompt of {len(prompt)} tokens and max_tokens={max_tokens}: the model has {longest}"
            )
        if not (params.temperature >= 0 and 0 < params.top_p <= 1 and params.top_k >= -1):
            raise ConfigError("sampling_params: temperature is at least 0, top_k at least -1, and 0 < top_p <= 1")
        if not 0 <= body.topk_prompt_logprobs <= min(vocab_size, 100):
            raise ConfigError(
                f"topk_prompt_logprobs={body.topk_prompt_logprobs}: is not 0 to {min(vocab_size, 100)}"
            )
        last_n = body.prompt_logprobs_last_n
        if last_n is not None and not 1 <= last_n < len(prompt):
            raise ConfigError(f"prompt_logprobs_last_n={last_n}: the prompt has {len(prompt)} tokens")
        settings = {"prompt_logprobs": bool(body.prompt_logprobs), "last_n": last_n}
        is_scored = max_tokens <= 1 and body.prompt_logprobs and not body.topk_prompt_logprobs
        if is_scored and sampler.folder is None and self._vllm is None:
            ids = torch.tensor(prompt)
            row = {"input_ids": ids, "targets": torch.cat([ids[1:], ids.new_tensor([-100])])}
            score = Pass(request_id, sampler.name, (row,))

            def write_score(outcome: PassOutcome) -> bytes:
                return messages.write_sample(make_score(outcome, body.num_samples), settings)

            return Queued(score, Cost(Stage.PASS, len(prompt)), write_score)
        stop = [params.stop] if isinstance(params.stop, str) else params.stop
        texts = [each for each in stop or () if isinstance(each, str)]
        if texts and self._tokenizer is None:
            raise ConfigError("stop: this server has no tokenizer for texts. Pass ids of tokens")
        sample = {
            "n": body.num_samples,
            "max_tokens": max_tokens,
            "temperature": params.temperature,
            "top_k": max(params.top_k, 0),
            "top_p": params.top_p,
            "stop": None if stop is None else [each for each in stop if not isinstance(each, str)],
            "seed": None if params.seed is None else params.seed % (1 << 62),
            "prompt_logprobs": settings["prompt_logprobs"],
            "top_prompt_logprobs": body.topk_prompt_logprobs,
        }

        def write(output: SampleOutput) -> bytes:
            if texts:
                messages.cut_at_stops(self._tokenizer, output, texts)
            return messages.write_sample(output, settings)

        tokens = len(prompt) + max_tokens * body.num_samples
        operation = Generate(request_id, sampler.name, sampler.folder, prompt, {"sample": sample})
        return Queued(operation, Cost(Stage.OTHER, tokens), write)

    # The server

    async def _capabilities(self, _request: Request, _key: UserKey) -> Response:
        name, length = self._service.settings.name, self._base["max_length"]
        model = {"model_name": name, "max_context_length": length, "trainable": True, "sampleable": True}
        return JSONResponse({"supported_models": [model]})

    async def _telemetry(self, _request: Request, _key: UserKey) -> Response:
        return JSONResponse({"status": "accepted"})

    async def _health(self, _request: Request) -> Response:
        service = self._service
        status = "stopping" if service.is_stopping else "ok"
        return JSONResponse(
            {
                "status": status,
                "models": len(service.models),
                "queue": service.num_queued,
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


def count_tokens(each: Pass) -> int:
    return sum(len(row["input_ids"]) for row in each.rows)


def make_score(outcome: PassOutcome, num_samples: int) -> SampleOutput:
    """Return the output of a sample that was scored alone, with no tokens."""
    from shardwise.bank.sampling import SampledSequence

    return SampleOutput([SampledSequence() for _ in range(num_samples)], outcome.logprobs[0][:-1])


def _read_prompt(prompt: Any) -> list[int]:
    tokens: list[int] = []
    for chunk in prompt.chunks:
        if not isinstance(chunk, types.EncodedTextChunk):
            raise ConfigError("prompt: has an image or sound. This server has models of text alone")
        tokens += chunk.tokens
    return tokens


def _read_adam(params: types.AdamParams) -> dict[str, Any]:
    """Return settings of AdamW for one step. Raise ConfigError if they are invalid."""
    values = {"learning_rate": params.learning_rate, "eps": params.eps, "weight_decay": params.weight_decay}
    values["grad_clip_norm"] = params.grad_clip_norm
    for name, value in values.items():
        if not 0 <= value < float("inf"):
            raise ConfigError(f"{name}={value}: is not a finite number of 0 or more")
    betas = params.beta1, params.beta2
    if not all(0 <= beta < 1 for beta in betas):
        raise ConfigError(f"beta1, beta2: {betas} are not at least 0 and below 1")
    step = {"lr": params.learning_rate, "betas": betas, "eps": params.eps, "weight_decay": params.weight_decay}
    return {**step, "max_grad_norm": params.grad_clip_norm}


def _loaded(model: Model, path: str) -> dict[str, Any]:
    return {"type": "load_weights", "model_id": model.model_id, "path": path}


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
    return JSONResponse(answer)


async def _read_bytes(request: Request) -> bytes:
    """Return the body without its encoding, of at most MAX_BODY_BYTES."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > messages.MAX_BODY_BYTES:
            raise messages.TooLargeError(f"the body has more than {messages.MAX_BODY_BYTES} bytes")
        parts.append(part)
    return messages.decompress(b"".join(parts), request.headers.get("content-encoding", ""))


async def _read_object(request: Request) -> tuple[bytes, dict[str, Any]]:
    """Return the body and its JSON object."""
    data: bytes = getattr(request.state, "data", None) or await _read_bytes(request)
    request.state.data = data
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise messages.UndecodableError(f"the body is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise messages.UndecodableError("the body is not a JSON object")
    return data, values


async def _read(request: Request, kind: type[Body]) -> Body:
    _, values = await _read_object(request)
    return kind.model_validate(values)


def _parse(kind: type[Body], values: Mapping[str, Any]) -> Body:
    """Return a request whose place in the order is known. Raise ConfigError if it is invalid."""
    try:
        return kind.model_validate(values)
    except pydantic.ValidationError as error:
        raise ConfigError(_describe_invalid(error)) from error


def _describe_invalid(error: pydantic.ValidationError) -> str:
    faults = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:5]]
    return "; ".join(faults)


def _read_page(request: Request) -> tuple[int, int]:
    limit, offset = (
        request.query_params.get(name, default) for name, default in (("limit", "100"), ("offset", "0"))
    )
    if not (limit.isdecimal() and offset.isdecimal() and len(limit + offset) < 12):
        raise StatusError(400, "limit or offset: is not a number")
    return int(limit), int(offset)


def _require_client(version: str) -> None:
    try:
        is_served = Version(version) in messages.CLIENTS
    except InvalidVersion:
        is_served = False
    if not is_served:
        raise StatusError(426, f"tinker {version[:40]}: is not served. Run pip install 'tinker{messages.CLIENTS}'")


async def _answer_status(_request: Request, error: Exception) -> Response:
    assert isinstance(error, StatusError)
    headers = {"retry-after": "1"} if error.status in (429, 503) else None
    return JSONResponse({"error": str(error)}, status_code=error.status, headers=headers)


async def _answer_http(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, status_code=error.status_code)


async def _answer_undecodable(_request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, status_code=400)


async def _answer_too_large(_request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, status_code=413)


async def _answer_invalid(_request: Request, error: Exception) -> Response:
    assert isinstance(error, pydantic.ValidationError)
    return JSONResponse({"error": _describe_invalid(error)}, status_code=400)


async def tidy_regularly(service: Service, interval_s: float = 5.0) -> None:
    """Remove what is over, until the task is cancelled."""
    while True:
        await asyncio.sleep(interval_s)
        try:
            service.tidy()
        except OSError:
            _log.exception("checkpoints that are over cannot be removed")
