"""64 clients with 50 requests each, of which 4 are killed half way."""

from __future__ import annotations

import gc
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tests.serve.conftest import Served, make_base, serving
from tests.support.local_ranks import LIMIT_S

from shardwise import AdapterBank
from shardwise.ranks.world import World
from shardwise.serve.engine import Engine
from shardwise.serve.operations import SaveModel
from shardwise.serve.service import Settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

NUM_CLIENTS, NUM_KILLED, NUM_ROUNDS = 64, 4, 25


def num_bytes() -> int:
    """Return the bytes of all tensors that are alive in this process."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    storages = [each.untyped_storage() for each in tensors]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def start(served: Served, names: list[str], stop: int) -> subprocess.Popen[str]:
    keys = ",".join(served.keys[name] for name in names)
    command = [sys.executable, "-m", "tests.serve.many_clients", served.url, keys, str(NUM_ROUNDS), str(stop)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def record(served: Served) -> list[bytes]:
    """Return turns of a server from now on, as bytes, so that their tensors do not live on."""
    turns: list[bytes] = []
    run = served.engine.run

    def recorded(turn: Any) -> Any:
        turns.append(pickle.dumps(turn))
        return run(turn)

    served.engine.run = recorded  # type: ignore[method-assign]
    return turns


def replay(turns: list[bytes]) -> AdapterBank:
    """Return a fresh bank after the same turns, without their saves."""
    model = make_base()
    bank = AdapterBank(model)
    engine = Engine(World.current(call="test"), bank, model)
    for turn in map(pickle.loads, turns):
        others = tuple(each for each in turn.others if not isinstance(each, SaveModel))
        engine.run(replace(turn, others=others))
    return bank


def require_equal(first: Any, second: Any, where: str) -> None:
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second), where
    elif isinstance(first, dict):
        assert first.keys() == second.keys(), where
        for name, value in first.items():
            require_equal(value, second[name], f"{where} {name}")
    else:
        assert first == second, where


def test_many_clients_of_which_some_are_killed(tmp_path: Path) -> None:
    users: dict[str, Any] = {f"user-{number}": {"max_models": 1} for number in range(NUM_CLIENTS)}
    names = list(users)
    with serving(make_base(), tmp_path, Settings("base", "base"), users) as served:
        empty, turns = num_bytes(), record(served)
        staying = start(served, names[NUM_KILLED:], NUM_ROUNDS)
        leaving = start(served, names[:NUM_KILLED], NUM_ROUNDS // 2)
        try:
            assert leaving.stdout is not None
            sessions = []
            while (line := leaving.stdout.readline()) != "half\n":
                assert line, "the process has ended"
                sessions.append(line.strip())
            leaving.kill()
            assert leaving.wait() == -signal.SIGKILL
            assert staying.wait(LIMIT_S) == 0, "a request was refused, or had no result"
        finally:
            for process in (staying, leaving):
                process.kill()
                process.wait()
                assert process.stdout is not None
                process.stdout.close()
        assert len(served.bank.names) == NUM_CLIENTS
        bytes_of_all = num_bytes() - empty
        # As when the sessions of those that were killed expire.
        assert len(sessions) == NUM_KILLED
        for session, name in product(sessions, names[:NUM_KILLED]):  # each is that of one of them
            headers = {"x-api-key": served.keys[name]}
            httpx.post(f"{served.url}/api/v1/sessions/{session}/finish", headers=headers)
        deadline_s = time.monotonic() + LIMIT_S
        while len(served.bank.names) > NUM_CLIENTS - NUM_KILLED:
            assert time.monotonic() < deadline_s, "models of sessions that are over stay"
            time.sleep(0.1)
        live = num_bytes() - empty
        print(bytes_of_all, live, 16 * sum(served.bank.num_trainable_parameters().values()))
        without = num_bytes()
        replayed = replay(turns)
        assert num_bytes() - without - live == 0
        assert set(replayed.names) == set(served.bank.names)
        for name in replayed.names:
            require_equal(served.bank.state_dict(name), replayed.state_dict(name), name)
