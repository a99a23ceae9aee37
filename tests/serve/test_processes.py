"""``shardwise serve`` as users start it: on one rank and on two, stopped, killed, and with a rank that is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tinker
from tests.serve.test_client import ADAM, make_rows, to_data
from tests.support.local_ranks import LIMIT_S
from tinker import types

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Process:
    """A server's process, its URL and what it writes to stderr."""

    def __init__(self, base: Path, state: Path, *options: str, program: tuple[str, ...] = ("shardwise",)) -> None:
        command = [sys.executable, "-m", *program, "serve", str(base), "--port", "0", "--state", str(state)]
        self.process = subprocess.Popen(
            [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        self.errors: list[str] = []
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._reader = threading.Thread(target=self.errors.extend, args=(self.process.stderr,), daemon=True)
        self._reader.start()
        self.url = next((line.split()[-1] for line in self.process.stdout if line.startswith("serving ")), "")

    def wait(self) -> int:
        code = self.process.wait(timeout=LIMIT_S)
        self._reader.join(10)
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()  # may be called again
        return code

    def client(self) -> Any:
        return tinker.ServiceClient(base_url=self.url, api_key="tml-any")


@contextmanager
def serving(base: Path, state: Path, *options: str, **keywords: Any) -> Iterator[Process]:
    process = Process(base, state, *options, **keywords)
    try:
        if not process.url:
            raise RuntimeError(f"exit code {process.wait()}: {''.join(process.errors)}")
        yield process
    finally:
        if process.process.poll() is None:
            os.killpg(process.process.pid, signal.SIGKILL)
        process.wait()


def train(model: Any, seed: int, num_steps: int = 2) -> list[float]:
    losses = []
    for _ in range(num_steps):
        passed = model.forward_backward(to_data(make_rows(seed, [5, 30, 9, 17])), "cross_entropy")
        model.optim_step(ADAM).result()
        losses.append(passed.result().metrics["loss:sum"])
    return losses


def test_two_ranks_give_the_losses_of_one(base: Path, tmp_path: Path) -> None:
    found = {}
    for ranks in (1, 2):
        with serving(base, tmp_path / str(ranks), "--nproc-per-node", str(ranks)) as server:
            client = server.client()
            models = [client.create_lora_training_client("base", rank=rank, seed=1).result() for rank in (4, 16)]
            with ThreadPoolExecutor() as pool:
                losses = list(pool.map(train, models, range(2)))
            prompt = types.ModelInput.from_ints([3, 4, 5])
            sampler = models[0].save_weights_and_get_sampling_client().result()
            greedy = types.SamplingParams(max_tokens=5, temperature=0.0, stop=[])
            tokens = [list(sampler.sample(prompt, 1, greedy).result().sequences[0].tokens) for _ in range(3)]
            rows = models[0].forward(to_data(make_rows(9, [4, 20, 11])), "cross_entropy").result()
            logprobs = [value for row in rows.loss_fn_outputs for value in row["logprobs"].data]
            found[ranks] = [value for each in losses for value in each], tokens, logprobs
            server.process.send_signal(signal.SIGTERM)
            assert server.wait() == 0, server.errors
    for (first, second), what in zip(
        zip(*found.values(), strict=True), ("losses", "tokens", "logprobs"), strict=True
    ):
        assert first == (second if what == "tokens" else pytest.approx(second, rel=1e-4, abs=1e-4)), what


def test_a_stop_saves_all_models(base: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    with serving(base, state) as server:
        model = server.client().create_lora_training_client("base", rank=4).result()
        path = f"tinker://{model.model_id}/weights/shutdown"
        expected = train(model, 0, 4)[3]
        server.process.send_signal(signal.SIGTERM)
        # Two steps of the four are taken again from the save, which has all of them.
        assert server.wait() == 0, server.errors
    with serving(base, state) as server:
        resumed = server.client().create_training_client_from_state_with_optimizer(path).result()
        assert train(resumed, 0, 1)[0] < expected


def test_what_was_acknowledged_survives_a_kill(base: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    with serving(base, state) as server:
        model = server.client().create_lora_training_client("base", rank=4).result()
        train(model, 0)
        path = model.save_state("kept").result().path
        expected = train(model, 0, 1)
        with pytest.raises(RuntimeError, match=r"(?s)exit code 2: .*another server has it"), serving(base, state):
            pass
        os.killpg(server.process.pid, signal.SIGKILL)
        assert server.wait() == -signal.SIGKILL
    with serving(base, state) as server:
        resumed = server.client().create_training_client_from_state_with_optimizer(path).result()
        assert train(resumed, 0, 1) == expected


def signal_second_rank(server: Process, number: int) -> None:
    children = subprocess.run(
        ["pgrep", "-P", str(server.process.pid), "-f", "spawn_main"], capture_output=True, text=True, check=True
    )
    os.kill(int(children.stdout.split()[-1]), number)


def test_a_stop_of_any_rank_stops_the_server(base: Path, tmp_path: Path) -> None:
    with serving(base, tmp_path / "state", "--nproc-per-node", "2") as server:
        server.client().create_lora_training_client("base", rank=4).result()
        signal_second_rank(server, signal.SIGTERM)
        assert server.wait() == 0, server.errors
    assert list((tmp_path / "state").rglob("*shutdown*"))


def test_a_lost_rank_ends_the_server(base: Path, tmp_path: Path) -> None:
    with serving(base, tmp_path / "state", "--nproc-per-node", "2") as server:
        model = server.client().create_lora_training_client("base", rank=4).result()
        train(model, 0, 1)
        signal_second_rank(server, signal.SIGKILL)
        assert server.wait() == 2
        text = "".join(server.errors)
        assert "rank" in text
        assert "error:" in text
