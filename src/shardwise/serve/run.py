"""Runs a server on all ranks: turns in the main thread, HTTP in a thread of the first rank."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import click
import uvicorn
from torch import nn
from transformers import AutoTokenizer

from shardwise.bank.adapter_bank import AdapterBank
from shardwise.bank.compose import LENGTH_MULTIPLE
from shardwise.core.errors import ConfigError, StorageError, TrainingError
from shardwise.loading.from_pretrained import from_pretrained
from shardwise.models.four_bit.config import Nf4
from shardwise.ranks.stop_signals import StopRequest, stopping_on_signals
from shardwise.ranks.world import World
from shardwise.saving.locked_folder import lock_here
from shardwise.serve.app import App
from shardwise.serve.checkpoints import CheckpointStore
from shardwise.serve.engine import Engine
from shardwise.serve.keys import UserKey, read_keys
from shardwise.serve.operations import Turn
from shardwise.serve.records import QueuedRequest, Settings
from shardwise.serve.requests import ServedBase
from shardwise.serve.service import Service
from shardwise.serve.vllm import VllmClient, read_max_length, require_url

T = TypeVar("T")

_IDLE_TURN_S: Final = 4.0
"""Seconds after which there is a turn without operations: other ranks wait for it, and report longer waits."""

_TIDY_S: Final = 5.0

_LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of a server, as of the command."""

    model: str
    settings: Settings
    host: str = "127.0.0.1"
    port: int = 8000
    keys: Path | None = None
    state: Path | None = None
    max_tokens_per_pass: int = 8192
    dtype: str = "auto"
    load_in_4bit: bool = False
    vllm: str | None = None
    log_requests: bool = True


def serve(options: ServeOptions) -> None:
    """Serve until a stop signal. Called on every rank.

    Raises:
        ConfigError: an option is invalid.
        StorageError: another server holds the folder of checkpoints, or a model could not be saved at the end.
        RankLostError: a rank is lost.
    """
    with ExitStack() as stack:
        stop = stack.enter_context(stopping_on_signals())
        world = stack.enter_context(World.current(call="serve"))
        with world.collective("open the server"):
            server = _open_server(options, stack) if world.rank == 0 else None
        if options.load_in_4bit:
            model = from_pretrained(options.model, dtype=options.dtype, quantization=Nf4())
        else:
            model = from_pretrained(options.model, dtype=options.dtype)
        bank = AdapterBank(model, max_tokens_per_pass=options.max_tokens_per_pass)
        engine = Engine(world, bank, model)
        if server is not None:
            if options.log_requests:
                _log_requests_to_stderr()
            base = _describe_base(model, bank, options.max_tokens_per_pass)
            server.start(base, _load_tokenizer(options.model), stop)
            stack.callback(server.stop)
        run_turns(world, engine, server, stop)


def run_turns(world: World, engine: Engine, server: Server | None, stop: StopRequest) -> None:
    """Carry out turns until the last one, which a stop request of any rank brings about. Collective: yes.

    Raises:
        StorageError: a model could not be saved at the end.
        TrainingError: the event loop of the first rank has ended.
        RankLostError: a rank is lost.
    """
    turn, requests, outcomes, duration_s = Turn(), list[QueuedRequest](), dict[str, Any](), 0.0
    while not turn.is_last:
        with world.all_reduce("take a turn", _join_stops) as exchange:
            if server is not None:
                # Of the turn before: within a phase, all ranks have the error if the loop has ended.
                server.finish_turn(requests, outcomes, duration_s)
                exchange.local, requests = server.take_turn()
            elif stop.is_made:
                exchange.local = True
        turn, is_stop_requested = exchange.result
        if is_stop_requested:
            with world.collective("take no more requests"):
                if server is not None:
                    server.request_stop()
        begin_s = time.monotonic()
        outcomes = engine.run(turn)
        duration_s = time.monotonic() - begin_s
    with world.collective("stop the server"):
        if server is not None:
            server.finish_turn(requests, outcomes, duration_s)
            server.require_saved()


class Server:
    """The event loop of the first rank, in a thread of its own. Methods are for the main thread.

    Args:
        options: of the command.
        service: state of the server.
        keys: users by the digest of their key. None for everybody.
        listener: the socket.
    """

    def __init__(
        self,
        options: ServeOptions,
        service: Service,
        keys: Mapping[str, UserKey] | None,
        listener: socket.socket,
    ) -> None:
        self._options = options
        self._service = service
        self._keys = keys
        self._listener = listener
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None
        self._http: uvicorn.Server | None = None

    def start(self, base: ServedBase, tokenizer: Any, stop: StopRequest) -> None:
        """Begin to listen, until a stop is requested."""
        service = self._service
        service.tokenizer = tokenizer
        if self._options.vllm is not None:
            service.vllm = VllmClient(self._options.vllm, service.settings.name)
            longest = read_max_length(self._options.vllm, service.settings.name)
            if longest is None:
                name = service.settings.name
                click.echo(f"--vllm: does not tell the length of {name!r}. Is it running, and serves it?", err=True)
            base = replace(base, max_sampled_length=min(longest or base.max_length, base.max_length))
        config = uvicorn.Config(
            App(service, self._keys, base).routes(),
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=75,
        )
        self._http = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, args=(stop,), name="shardwise-serve", daemon=True)
        self._thread.start()
        host, port = self._listener.getsockname()[:2]
        click.echo(f"serving {service.settings.name} on http://{host}:{port}")

    def _run(self, stop: StopRequest) -> None:
        asyncio.set_event_loop(self._loop)
        assert self._http is not None
        tasks = {
            self._loop.create_task(each) for each in (_tidy_regularly(self._service), _watch(self._service, stop))
        }
        self._loop.run_until_complete(self._http.serve(sockets=[self._listener]))
        tasks |= asyncio.all_tasks(self._loop)  # calls of clients that have not sent all of their body, for example
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))

    def take_turn(self) -> tuple[Turn, list[QueuedRequest]]:
        """Return the next turn, which may be empty. After a stop request, there is a last one."""
        return self._run_on_loop(self._service.take_turn(_IDLE_TURN_S))

    def request_stop(self) -> None:
        """Take no more requests, because of a stop request to another rank."""
        self._run_on_loop(self._service.begin_stop())

    def finish_turn(self, requests: list[QueuedRequest], outcomes: dict[str, Any], duration_s: float) -> None:
        """Give the outcomes of a turn to those who wait for them."""
        self._run_on_loop(self._service.finish_turn(requests, outcomes, duration_s))

    def _run_on_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop's thread, and return its result. Raise TrainingError if that has ended."""
        assert self._thread is not None
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        while not wait([future], timeout=0.25).done:  # in short steps, between which signals are handled
            if not self._thread.is_alive():
                raise TrainingError("the thread with the connections has ended. Its messages are above")
        return future.result()

    def require_saved(self) -> None:
        """Raise StorageError if the save of a model at the end has failed."""
        if lost := self._service.lost_models:
            raise StorageError(
                f"--state: models that could not be saved under the name shutdown: {len(lost)}. The log has the "
                "reason. Resume them from the last checkpoints of their users"
            )

    def stop(self) -> None:
        """Answer what waits for a result, and close connections."""
        if self._http is not None and self._thread is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._service.end)  # nothing waits if the last turn was taken
            self._http.should_exit = True
            self._thread.join(5.0)
            if self._thread.is_alive():  # calls that still run keep their connections
                self._http.force_exit = True
                self._thread.join(5.0)
        self._loop.close()


def _join_stops(by_rank: Sequence[Any]) -> tuple[Turn, bool]:
    """Return the turn, which the first rank has taken, and whether another rank has a stop request."""
    turn, *requests = by_rank
    return turn, any(requests)


async def _watch(service: Service, stop: StopRequest) -> None:
    """Refuse new work as soon as a stop is requested, also while a turn runs, which may take long."""
    while not stop.is_made:
        await asyncio.sleep(0.1)
    await service.begin_stop()


async def _tidy_regularly(service: Service) -> None:
    """Remove what is over, until the task is cancelled."""
    while True:
        await asyncio.sleep(_TIDY_S)
        await service.tidy()


def _open_server(options: ServeOptions, stack: ExitStack) -> Server:
    """Check what the first rank needs before the base is loaded: keys, the folder, the port."""
    keys = None if options.keys is None else read_keys(options.keys)
    if keys is None and options.host not in _LOOPBACK:
        raise ConfigError(f"--host {options.host}: without --keys, anyone could use it. Pass --keys, or 127.0.0.1")
    if options.vllm is not None:
        require_url(options.vllm)
        if options.state is None:
            raise ConfigError("--vllm: loads adapters from a folder. Pass --state, which both servers see")
    store = None
    if options.state is not None:
        try:
            options.state.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock_here(options.state))
            store = CheckpointStore(options.state)
        except OSError as error:
            raise StorageError(f"--state {options.state}: {error}") from error
        except StorageError as error:
            raise StorageError(f"--state {options.state}: another server has it. {error}") from error
    listener = socket.socket(socket.AF_INET6 if ":" in options.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((options.host, options.port))
    except OSError as error:
        listener.close()
        is_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
        option = f"--port {options.port}" if is_port else f"--host {options.host}"
        raise ConfigError(f"{option}: {error.strerror}. Choose another one") from error
    stack.callback(listener.close)
    return Server(options, Service(options.settings, store), keys, listener)


def _describe_base(model: nn.Module, bank: AdapterBank, max_tokens_per_pass: int) -> ServedBase:
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    # A row that is padded to a multiple still fits into a pass.
    longest_in_pass = max_tokens_per_pass // LENGTH_MULTIPLE * LENGTH_MULTIPLE
    longest = min(bank.max_length, longest_in_pass)
    return ServedBase(embedding.num_embeddings, longest, longest, type(model).__name__)


def _log_requests_to_stderr() -> None:
    """Write the log of requests to stderr, a JSON object a line."""
    log = logging.getLogger("shardwise.serve")
    log.addHandler(logging.StreamHandler())
    log.setLevel(logging.INFO)
    log.propagate = False


def _load_tokenizer(model: str) -> Any:
    """Return the tokenizer of a model, or None if it has none."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (ImportError, OSError, ValueError):
        return None
    # Without files, transformers makes one that has special tokens alone.
    return tokenizer if len(tokenizer) > len(tokenizer.all_special_tokens) else None
