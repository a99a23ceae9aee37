"""A server that is killed or stopped in each phase of a turn, that has no space left, or whose client is gone."""

from __future__ import annotations

import os
import resource
import signal
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.serve.test_processes import Process, serving
from tests.serve.users import User, make_message
from tests.support.local_ranks import LIMIT_S
from tinker.proto import tinker_public_pb2 as protobuf

from shardwise.serve.keys import make_key

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]

CALLS = ("forward_backward", "optim_step", "save")


def wait_for(file: Path) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not file.exists():
        assert time.monotonic() < deadline_s, f"{file.name}: the server never came there"
        time.sleep(0.02)


@dataclass(frozen=True)
class Controls:
    """The folder that a server of ``held_server`` looks at."""

    folder: Path

    @contextmanager
    def serving(self, base: Path, state: Path, *options: str) -> Iterator[Process]:
        self.folder.mkdir(exist_ok=True)
        for file in self.folder.iterdir():
            file.unlink()
        (self.folder / "clock").write_bytes(struct.pack("d", 0.0))
        with serving(base, state, *options, program=("tests.serve.held_server", str(self.folder))) as server:
            yield server

    def hold(self, moment: str) -> None:
        (self.folder / f"hold {moment}").touch()

    def wait_until_held(self) -> None:
        wait_for(self.folder / "held")

    def release(self, moment: str) -> None:
        (self.folder / f"hold {moment}").unlink()

    def set_clock(self, ahead_s: float) -> None:
        with (self.folder / "clock").open("r+b") as file:
            file.write(struct.pack("d", ahead_s))


@pytest.fixture
def controls(tmp_path: Path) -> Controls:
    return Controls(tmp_path / "controls")


class Trainer:
    """A user with a model, and the number of its next request."""

    def __init__(self, server: Process, path: str = "", key: str = "tml-any") -> None:
        self.user = User(server.url, key)
        self.model = self.load(path) if path else self.user.create()
        self.seq_id = 1

    def load(self, path: str) -> str:
        self.user.num_models += 1
        body = {"session_id": self.user.session, "model_seq_id": self.user.num_models, "path": path}
        return str(self.user.retrieve(self.user.post("load_weights", **body, optimizer=True))["model_id"])

    def send_pass(self, *, forward_only: bool = False) -> Any:
        message = make_message(self.model, self.seq_id, (1, 2, 3, 4))
        message.forward_only = forward_only
        self.seq_id += 1
        return self.user.send(message).json()

    def send(self, call: str, **body: Any) -> Any:
        self.seq_id += 1
        return self.user.post(call, model_id=self.model, seq_id=self.seq_id - 1, **body)

    def send_turn(self, name: str) -> list[Any]:
        """Send a pass, a step and a save over what is there."""
        step = {"adam_params": {"learning_rate": 1e-2}}
        return [
            self.send_pass(),
            self.send("optim_step", **step),
            self.send("save_weights", path=name, overwrite=True),
        ]

    def run_turn(self, name: str) -> str:
        """Return the path of what is acknowledged."""
        return str([self.user.retrieve(promise) for promise in self.send_turn(name)][-1]["path"])

    def loss(self) -> float:
        output = protobuf.ForwardBackwardOutput.FromString(self.user.retrieve(self.send_pass(forward_only=True)))
        return float(output.metrics["loss:sum"])

    def checkpoints(self) -> set[str]:
        listed = self.user.http.get("/api/v1/checkpoints").json()["checkpoints"]
        return {each["tinker_path"] for each in listed}


def test_a_kill_in_each_phase_of_a_turn(base: Path, tmp_path: Path, controls: Controls) -> None:
    """Each life of the server begins with what the one before it has left."""
    state, acknowledged = tmp_path / "state", set[str]()
    kept = same = ""
    before = 0.0
    moments = [f"{when} {call}" for call in CALLS for when in ("before", "after")]
    for moment in [*moments, ""]:
        with controls.serving(base, state) as server:
            trainer = Trainer(server, kept)
            assert trainer.checkpoints() == acknowledged, "and nothing that was not acknowledged"
            if kept:
                assert trainer.loss() == before
                acknowledged.add(trainer.run_turn("again"))
                # That over which the killed server saved is as before, or as after the turn, and whole.
                assert Trainer(server, same).loss() in (before, trainer.loss())
            if not moment:
                break
            same = trainer.run_turn("same")
            kept = str(trainer.user.retrieve(trainer.send("save_weights", path="kept"))["path"])
            acknowledged |= {kept, same}
            before = trainer.loss()
            controls.hold(moment)
            trainer.send_turn("same")
            controls.wait_until_held()
            os.killpg(server.process.pid, signal.SIGKILL)
            assert server.wait() == -signal.SIGKILL


def test_a_stop_in_each_phase_of_a_turn(base: Path, tmp_path: Path, controls: Controls) -> None:
    """What was sent is done and answered, new work is refused at once, and the model is saved as it is then."""
    state, path, last = tmp_path / "state", "", ""
    for call in (*CALLS, ""):
        with controls.serving(base, state) as server, ThreadPoolExecutor() as pool:
            trainer = Trainer(server, path)
            if path:
                assert trainer.loss() == Trainer(server, last).loss()
            if not call:
                break
            controls.hold(f"before {call}")
            answers = [pool.submit(trainer.user.retrieve, promise) for promise in trainer.send_turn("last")]
            controls.wait_until_held()
            server.process.send_signal(signal.SIGTERM)
            deadline_s = time.monotonic() + LIMIT_S
            session = {"tags": [], "user_metadata": None, "sdk_version": "0.38.0"}
            while (status := trainer.user.call("create_session", **session).status_code) != 503:
                assert time.monotonic() < deadline_s, f"new work is accepted: {status}"
                time.sleep(0.05)
            controls.release(f"before {call}")
            passed, stepped, saved = (answer.result() for answer in answers)
            assert isinstance(passed, bytes)
            assert stepped["metrics"]["skipped:max"] == 0.0
            assert server.wait() == 0, server.errors
        path, last = f"tinker://{trainer.model}/weights/shutdown", saved["path"]


def test_no_space_is_left(base: Path, tmp_path: Path, controls: Controls) -> None:
    with controls.serving(base, tmp_path / "state") as server:
        trainer = Trainer(server)
        first = trainer.run_turn("first")
        no_limit = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (4096, no_limit[1]))
        for name in ("first", "second"):  # over one that is there, and a new one
            *_, failed = [trainer.user.retrieve(promise) for promise in trainer.send_turn(name)]
            assert failed["category"] == "server"
            assert str(tmp_path) not in failed["error"]
        assert trainer.checkpoints() == {first}
        loss = trainer.loss()
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, no_limit)
        second = trainer.run_turn("second")
        assert trainer.checkpoints() == {first, second}
        assert Trainer(server, second).loss() == trainer.loss() < loss
        assert Trainer(server, first).loss() > loss, "it is the one from before"
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (4096, no_limit[1]))
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 2
    assert "could not be saved under the name shutdown: " in "".join(server.errors)


def test_the_models_of_a_client_that_is_gone(base: Path, tmp_path: Path, controls: Controls) -> None:
    text = make_key("eve")
    key = text.splitlines()[0].split()[-1]
    keys = tmp_path / "keys.yaml"
    keys.write_text(yaml.safe_dump({"eve": {**yaml.safe_load(text)["eve"], "max_models": 1}}))
    with controls.serving(base, tmp_path / "state", "--keys", str(keys), "--session-timeout", "600") as server:
        gone, other = Trainer(server, key=key), User(server.url, key)
        gone.run_turn("kept")
        expected = gone.loss()
        body = {"session_id": other.session, "model_seq_id": 1, "base_model": "base", "lora_config": {"rank": 4}}
        assert other.call("create_model", **body).status_code == 429
        # In steps, since a server that stands still for a minute takes itself for suspended.
        for ahead_s in range(15, 591, 5):
            controls.set_clock(ahead_s)
            assert other.call("session_heartbeat", session_id=other.session).status_code == 200
        controls.set_clock(610)  # 20 seconds after the heartbeat of the other session
        path, deadline_s = f"tinker://{gone.model}/weights/expired", time.monotonic() + LIMIT_S
        while path not in gone.checkpoints():  # which is no sign of life, as a request for the model is
            assert time.monotonic() < deadline_s, "it does not expire"
            time.sleep(0.1)
        assert other.call("get_info", model_id=gone.model).status_code == 410
        assert gone.user.call("session_heartbeat", session_id=gone.user.session).status_code == 410
        resumed = Trainer(server, path, key=key)  # there is room for it
        assert resumed.loss() == expected
        assert other.call("session_heartbeat", session_id=other.session).status_code == 200
