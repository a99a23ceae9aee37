"""A server in this process: its turns run in a thread, on one rank."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.support.local_ranks import LIMIT_S
from transformers import Qwen3Config, Qwen3ForCausalLM

from shardwise.bank.adapter_bank import AdapterBank
from shardwise.ranks.stop_signals import StopRequest
from shardwise.ranks.world import World
from shardwise.serve import run
from shardwise.serve.engine import Engine
from shardwise.serve.keys import make_key
from shardwise.serve.records import Settings

VOCAB_SIZE = 96


def make_base(vocab_size: int = VOCAB_SIZE, max_length: int = 128) -> Qwen3ForCausalLM:
    """A small model in float32, the same in each call."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=max_length,
        tie_word_embeddings=False,
        eos_token_id=1,
    )
    return Qwen3ForCausalLM(config)


@dataclass(frozen=True)
class Served:
    """A server, with keys of its users and its folder of checkpoints."""

    url: str
    keys: dict[str, str]
    state: Path
    server: Any
    engine: Engine
    bank: AdapterBank


@contextmanager
def serving(
    model: Any, folder: Path, options: Settings, users: Mapping[str, Mapping[str, Any]], vllm: str | None = None
) -> Iterator[Served]:
    """Serve a model in this process, to users with their limits."""
    keys, entries = {}, {}
    for name, limits in users.items():
        text = make_key(name)
        keys[name] = text.splitlines()[0].split()[-1]
        entries[name] = {**yaml.safe_load(text)[name], **limits}
    file = folder / "keys.yaml"
    file.write_text(yaml.safe_dump(entries))
    request = StopRequest()
    serve_options = run.ServeOptions(options.name, options, port=0, keys=file, state=folder / "state", vllm=vllm)
    with ExitStack() as stack:
        world = stack.enter_context(World.current(call="serve"))
        server = run._open_server(serve_options, stack)
        bank = AdapterBank(model)
        engine = Engine(world, bank, model)
        server.start(run._describe_base(model, bank, serve_options.max_tokens_per_pass), None, request)
        turns = threading.Thread(target=run.run_turns, args=(world, engine, server, request), daemon=True)
        turns.start()
        host, port = server._listener.getsockname()
        try:
            yield Served(f"http://{host}:{port}", keys, folder / "state", server, engine, bank)
        finally:
            request.number = 15
            turns.join(LIMIT_S)
            server.stop()
            assert not turns.is_alive()


@pytest.fixture(scope="session", autouse=True)
def no_telemetry() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_TELEMETRY", "0")
        yield


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "base"
    make_base().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve for the whole session, with three rows a request."""
    users = {
        "ada": {"max_models": 100},
        "bo": {},
        "cy": {"max_models": 1, "max_requests": 3, "max_rank": 8},
        "dee": {"is_operator": True},
        "eve": {"max_result_bytes": 6000},
        "fay": {"max_sessions": 2},
        "gus": {"max_tokens": 100},
    }
    settings = Settings("base", "base-tokenizer", retrieval_s=0.5, max_rows=3, session_timeout_s=7200.0)
    with serving(make_base(), tmp_path_factory.mktemp("serve"), settings, users) as started:
        yield started
