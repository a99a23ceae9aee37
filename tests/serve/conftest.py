"""A server in this process: its turns run in a thread, on one rank."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import Qwen3Config, Qwen3ForCausalLM

from shardwise.bank.adapter_bank import AdapterBank
from shardwise.ranks.stop_signals import StopRequest
from shardwise.ranks.world import World
from shardwise.serve import run
from shardwise.serve.engine import Engine
from shardwise.serve.keys import make_key
from shardwise.serve.service import Settings

VOCAB_SIZE = 96


def make_base() -> Qwen3ForCausalLM:
    """A small model in float32, the same in each call."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        eos_token_id=1,
    )
    return Qwen3ForCausalLM(config)


@dataclass(frozen=True)
class Served:
    """A server, with the keys of three users and its folder of checkpoints."""

    url: str
    keys: dict[str, str]
    state: Path
    server: Any


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve for the whole session, with three rows a request."""
    folder = tmp_path_factory.mktemp("serve")
    keys, entries = {}, []
    for name in ("ada", "bo", "cy", "dee"):
        text = make_key(name)
        keys[name] = text.splitlines()[0].split()[-1]
        entries.append(text)
    file = folder / "keys.yaml"
    file.write_text("\n".join(entries) + "\n")
    values = yaml.safe_load(file.read_text())
    values["dee"] |= {"is_operator": True}
    values["ada"] |= {"max_models": 100}
    values["cy"] |= {"max_models": 1, "max_requests": 3, "max_rank": 8}
    file.write_text(yaml.safe_dump(values))
    settings = Settings("base", "base-tokenizer", retrieval_s=0.5, max_rows=3)
    options = run.ServeOptions("base", settings, port=0, keys=file, state=folder / "state")
    request = StopRequest()
    with ExitStack() as stack:
        world = stack.enter_context(World.current(call="serve"))
        server = run._open(options, stack)
        model = make_base()
        bank = AdapterBank(model)
        engine = Engine(world, bank, model)
        server.start(run._describe(model, bank, options.max_tokens_per_pass), None)
        turns = threading.Thread(target=run.run_turns, args=(world, engine, server, request), daemon=True)
        turns.start()
        host, port = server._listener.getsockname()
        try:
            yield Served(f"http://{host}:{port}", keys, folder / "state", server)
        finally:
            request.number = 15
            turns.join(30)
            server.stop()
            assert not turns.is_alive()
