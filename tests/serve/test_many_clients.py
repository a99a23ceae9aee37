"""64 clients with 50 requests each, of which 4 are killed half way."""

from __future__ import annotations

import gc
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tests.serve.conftest import Served, make_base, serving
from tests.serve.users import User, make_message
from tests.support.local_ranks import LIMIT_S

from shardwise import AdapterBank
from shardwise.ranks.world import World
from shardwise.serve.engine import Engine
from shardwise.serve.operations import SaveModel
from shardwise.serve.records import Settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

NUM_CLIENTS, NUM_KILLED, NUM_ROUNDS = 64, 4, 25


def wait_until(is_so: Callable[[], bool], fault: str) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline_s, fault
        time.sleep(0.2)


def num_bytes() -> int:
    """Return the bytes of all tensors that are alive in this process."""
    gc.collect()
    # Not isinstance, which has some objects of torch answer, and warn. Tensors of other classes have no bytes of
    # their own: DTensor has a plain one, and fake ones may be left by other tests.
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    storages = [each.untyped_storage() for each in tensors]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def bytes_of_models(bank: AdapterBank) -> int:
    """Values, gradient and two moments of each number, in float32, and a count of steps for each adapter."""
    return sum(16 * adapter.flat.numel() + 4 for adapter in bank._adapters.values())


def train_one(served: Served, name: str) -> None:
    """Train a model for one step, and remove it."""
    user = User(served.url, served.keys[name])
    model = user.create()
    user.retrieve(user.send(make_message(model, 1)).json())
    user.retrieve(user.post("optim_step", model_id=model, seq_id=2, adam_params={}))
    user.post("unload_model", model_id=model)
    user.post(f"sessions/{user.session}/finish")
    user.http.close()
    wait_until(lambda: not served.bank.names, "it stays")


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
        operations = tuple(each for each in turn.operations if not isinstance(each, SaveModel))
        engine.run(replace(turn, operations=operations))
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
        train_one(served, names[0])  # what is made once is there then
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
        wait_until(lambda: num_bytes() - empty == bytes_of_models(served.bank), "bytes are not those of the models")
        # As when the sessions of those that were killed expire.
        assert len(sessions) == NUM_KILLED
        for session, name in product(sessions, names[:NUM_KILLED]):  # each is that of one of them
            headers = {"x-api-key": served.keys[name]}
            httpx.post(f"{served.url}/api/v1/sessions/{session}/finish", headers=headers)
        wait_until(
            lambda: len(served.bank.names) == NUM_CLIENTS - NUM_KILLED, "models of sessions that are over stay"
        )
        wait_until(lambda: num_bytes() - empty == bytes_of_models(served.bank), "bytes are not those of the models")
        replayed = replay(turns)
        assert set(replayed.names) == set(served.bank.names)
        for name in replayed.names:
            require_equal(served.bank.state_dict(name), replayed.state_dict(name), name)
