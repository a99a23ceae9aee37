"""A service without ranks, whose operations have the outcomes of a test; options of the command, and its keys."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from tests.support.local_ranks import LIMIT_S

from shardwise.bank.compose import LENGTH_MULTIPLE, Unit, compose_passes
from shardwise.bank.sampling import Sample, SampleOutput
from shardwise.cli.serve import serve_command
from shardwise.core.errors import ConfigError, TrainingError
from shardwise.core.phases import current_phases
from shardwise.ranks.stop_signals import StopRequest
from shardwise.ranks.world import World
from shardwise.serve import run
from shardwise.serve import service as service_module
from shardwise.serve.checkpoints import Checkpoint, CheckpointStore
from shardwise.serve.engine import deal_rows
from shardwise.serve.keys import LOCAL, UserKey, read_keys
from shardwise.serve.messages import StatusError
from shardwise.serve.operations import (
    CopyModel,
    CreateModel,
    ForgetModels,
    Generate,
    OffloadModels,
    OptimStep,
    Pass,
    PassOutcome,
    Refusal,
    SampleAnswer,
    SaveModel,
    Turn,
)
from shardwise.serve.records import Model, Settings, name_model
from shardwise.serve.run import ServeOptions, Server, _load_tokenizer
from shardwise.serve.service import Service


async def run_turn(service: Service, duration_s: float = 0.0, outcome: object = None) -> Turn:
    turn, requests = await service.take_turn(LIMIT_S)
    await service.finish_turn(requests, {each.request_id: outcome for each in turn.operations}, duration_s)
    return turn


async def create(service: Service, key: UserKey = LOCAL) -> Model:
    session = service.open_session(key)
    with service.open_model(session, 1, 4, frozenset(("attn",)), None) as request:
        model_id = name_model(session, 1)
        request.operation = CreateModel(request.request_id, model_id, 4, 0, frozenset(("attn",)))
    await run_turn(service)
    return service.models[model_id]


def test_a_session_that_is_closed_during_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its models are saved once, and none of them is lost. vLLM loads from folders, so their paths are absolute."""
    monkeypatch.chdir(tmp_path)

    async def close() -> tuple[Service, list[Turn]]:
        service = Service(Settings("base", "base"), CheckpointStore(Path("checkpoints")))
        model = await create(service)
        await service.begin_stop()
        service.close_session(model.session, "finished")
        return service, [await run_turn(service) for _ in range(2)]

    service, (first, second) = asyncio.run(close())
    (folder,) = (Path(each.folder) for each in first.operations if isinstance(each, SaveModel))
    assert (folder.name, first.is_last, second.is_last) == ("finished", False, True)
    assert folder.is_relative_to(tmp_path / "checkpoints")
    assert service.lost_models == []


def test_a_session_that_is_closed_while_its_first_step_runs(tmp_path: Path) -> None:
    async def close() -> Turn:
        service = Service(Settings("base", "base"), CheckpointStore(tmp_path))
        model = await create(service)
        with service.place(model, 1, b"step") as request:
            request.operation = OptimStep(request.request_id, model.model_id, {})
        _, requests = await service.take_turn(LIMIT_S)
        service.close_session(model.session, "finished")
        await service.finish_turn(requests, {requests[0].request_id: {"skipped:max": 0.0}}, 0.0)
        return await run_turn(service)

    assert SaveModel in map(type, asyncio.run(close()).operations)


def test_models_whose_session_has_ended_stay_until_they_are_saved(tmp_path: Path) -> None:
    full = Refusal("no space is left", is_users=False)

    def get_operations(turn: Turn, model: Model) -> list[type]:
        """Saves of the model, and its moves to host memory and its removal."""
        operations = [each for each in turn.operations if isinstance(each, SaveModel)]
        others = [each for each in turn.operations if isinstance(each, ForgetModels | OffloadModels)]
        return [
            *(SaveModel for each in operations if each.model == model.model_id),
            *(type(each) for each in others if model.model_id in each.names),
        ]

    async def close(*, is_stopped: bool, fault: Refusal = full) -> tuple[list[list[type]], list[str]]:
        service = Service(Settings("base", "base"), CheckpointStore(tmp_path))
        model = await create(service)
        service.close_session(model.session, "expired")
        service._expired_s = time.monotonic()
        turns = [await run_turn(service, outcome=full)]
        if is_stopped:
            await service.begin_stop()
            turns.append(await run_turn(service, outcome=fault))
        else:
            await service.tidy()
            service._expired_s = -1e9  # a minute has passed at the end of this turn
            turns += [await run_turn(service), await run_turn(service)]
        turns.append(await run_turn(service))
        return [get_operations(turn, model) for turn in turns], service.lost_models

    operations, lost = asyncio.run(close(is_stopped=False))
    assert operations == [[SaveModel], [OffloadModels], [SaveModel], [ForgetModels]]
    assert lost == []
    operations, lost = asyncio.run(close(is_stopped=True))
    assert (operations, len(lost)) == ([[SaveModel], [SaveModel, OffloadModels], []], 1)
    assert asyncio.run(close(is_stopped=True, fault=Refusal("its last step failed")))[1] == []


def test_what_has_expired_is_deleted_without_reading_the_rest(tmp_path: Path, monkeypatch: Any) -> None:
    """Also what another server has saved, but not what has a later time or none since it was saved again."""
    store, now_s = CheckpointStore(tmp_path), time.time()
    first = [("kept", None), ("over", now_s - 1), ("again", now_s - 1)]
    second = [("later", now_s + 900), ("soon", now_s - 1), ("again", None)]
    for expirations in (first, second):
        for name, expires_s in expirations:
            checkpoint = Checkpoint("model", "weights", name, expires_s=expires_s)
            folder = store.folder("local", checkpoint)
            folder.mkdir(parents=True, exist_ok=True)
            store.record(str(folder), checkpoint)
        if expirations is first:
            store = CheckpointStore(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", None)
        store.delete_expired()
    assert {each.name for each in store.list("local")} == {"kept", "later", "again"}
    assert {each.name for each in folder.parent.iterdir() if each.is_dir()} == {"kept", "later", "again"}


def test_the_time_of_a_suspended_server_does_not_end_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr("shardwise.serve.service.time", SimpleNamespace(monotonic=lambda: now_s[0], time=time.time))

    async def wait() -> list[bool]:
        service = Service(Settings("base", "base"), None)
        session = service.open_session(LOCAL)
        are_open = []
        for seconds in (5, 4000, *[50] * 12, 5):  # it is suspended once; 605 seconds follow
            now_s[0] += seconds
            await service.tidy()
            are_open.append(session.session_id in service.sessions)
        return are_open

    assert asyncio.run(wait()) == [True] * 14 + [False]


def test_what_is_idle_is_moved_to_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models and copies, each once after its last use."""
    now_s = [0.0]
    monkeypatch.setattr("shardwise.serve.service.time", SimpleNamespace(monotonic=lambda: now_s[0], time=time.time))

    async def wait() -> list[list[str]]:
        service = Service(Settings("base", "base"), None)
        model = await create(service)
        with service.place(model, 1, b"copy") as request:
            request.operation = CopyModel(request.request_id, model.model_id, "copy")
        model.request_s = 0.0
        await run_turn(service)
        offloaded = []
        for number in range(5):
            now_s[0] += 40
            if number == 2:
                with service.admit(LOCAL, "samples") as request:
                    request.operation = Generate(request.request_id, Sample("copy", (1,), max_tokens=1))
                await run_turn(service)
            await service.tidy()
            turns = [await run_turn(service)] if service._has_work.is_set() else []
            names = [each.names for turn in turns for each in turn.operations if isinstance(each, OffloadModels)]
            offloaded.append(["copy" if name == "copy" else "model" for of in names for name in of])
        return offloaded

    assert asyncio.run(wait()) == [[], ["model", "copy"], [], [], ["copy"]]


def test_requests_that_wait_are_limited_and_steps_are_counted() -> None:
    async def send() -> int:
        service = Service(Settings("base", "base"), None)
        model = await create(service, UserKey(name="ada", sha256="a" * 64, max_requests=2))
        for seq_id in (1, 2):
            with service.place(model, seq_id, b"step") as request:
                request.operation = OptimStep(request.request_id, model.model_id, {})
        with (
            pytest.raises(StatusError, match=r"max_requests: 2 requests wait\. Send more once"),
            service.place(model, 3, b"step"),
        ):
            pass
        for skipped in (0.0, 1.0):
            await run_turn(service, outcome={"skipped:max": skipped})
        assert model.num_steps == 1
        for seq_id in range(4, 37):
            refusing = pytest.raises(StatusError, match="too many wait for 3") if seq_id == 36 else nullcontext()
            with refusing, service.place(model, seq_id, b"step") as request:
                request.operation = OptimStep(request.request_id, model.model_id, {})
        with service.place(model, 3, b"step") as request:
            request.operation = OptimStep(request.request_id, model.model_id, {})
        return model.next_seq_id

    assert asyncio.run(send()) == 36


def test_saves_of_a_key_take_turns_with_steps_of_others(tmp_path: Path) -> None:
    async def send() -> list[list[type]]:
        service = Service(Settings("base", "base"), CheckpointStore(tmp_path))
        saving, stepping = [await create(service, UserKey(name=name, sha256=name * 64)) for name in "ab"]
        for seq_id in (1, 2):
            with service.place(saving, seq_id, b"save") as request:
                checkpoint = Checkpoint(saving.model_id, "weights", str(seq_id))
                request.operation = service.make_save(request.request_id, saving, checkpoint)
            with service.place(stepping, seq_id, b"step") as request:
                request.operation = OptimStep(request.request_id, stepping.model_id, {})
        turns = [await run_turn(service) for _ in range(2)]
        return [[type(each) for each in turn.operations] for turn in turns]

    assert asyncio.run(send()) == [[OptimStep, SaveModel], [OptimStep, SaveModel]]


def test_the_tokens_of_a_pass_that_waits_are_counted_once() -> None:
    class Ids:
        num_counts = 0

        def __len__(self) -> int:
            self.num_counts += 1
            return 60

    async def send() -> int:
        service = Service(Settings("base", "base", max_tokens_per_turn=100), None)
        model, ids = await create(service), Ids()
        for seq_id in (1, 2, 3, 4):
            rows = ({"input_ids": ids if seq_id == 4 else torch.ones(60)},)
            with service.place(model, seq_id, b"pass") as request:
                request.operation = Pass(request.request_id, model.model_id, rows)  # type: ignore[arg-type]
        turns = [await run_turn(service) for _ in range(4)]
        assert [len(turn.operations) for turn in turns] == [1] * 4
        return ids.num_counts

    assert asyncio.run(send()) == 1


def test_the_loss_of_the_page_is_per_token_that_is_trained() -> None:
    ones, targets = torch.ones(4), torch.tensor([3, 4, 5, -100])
    rows = (
        {"input_ids": ones, "targets": targets, "weights": torch.tensor([0.0, 0.0, 0.5, 1.0])},
        {"input_ids": ones, "targets": targets[:, None].expand(4, 2), "weights": torch.tensor([[0.5, 0.5]] * 4)},
        {"input_ids": ones, "targets": targets, "advantages": torch.tensor([0.0, -1.0, 0.0, 0.0])},
        {"input_ids": ones, "targets": targets},
    )

    async def train() -> list[float]:
        service = Service(Settings("base", "base"), None)
        model = await create(service)
        with service.place(model, 1, b"pass") as request:
            request.operation = Pass(request.request_id, model.model_id, rows, backward=True)
        await run_turn(service, outcome=PassOutcome(16.0, [ones] * 4))
        return [*model.losses]

    assert asyncio.run(train()) == [16.0 / (1 + 3 + 1 + 3)]


def test_a_base_without_a_tokenizer(base: Path) -> None:
    assert _load_tokenizer(str(base)) is None


def test_turns_do_not_wait_as_long_as_one_without_a_pass() -> None:
    async def refuse() -> float:
        service = Service(Settings("base", "base"), None)
        with service.place(await create(service), 1, b"body"):
            raise ConfigError("refused")
        await run_turn(service, duration_s=100.0)
        return service._last_turn_s

    assert asyncio.run(refuse()) == 0.0


@pytest.mark.parametrize("answers", [True, False])
def test_samples_of_vllm_are_waited_for_at_a_stop(answers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """For some time: the connection may have been cut off."""
    if not answers:
        monkeypatch.setattr(service_module, "_STOPPING_SAMPLES_S", 0.0)

    class Vllm:
        def __init__(self) -> None:
            self.may_go = asyncio.Event()

        async def sample(self, _operation: Generate) -> SampleOutput:
            await self.may_go.wait()
            return SampleOutput([])

    async def stop() -> tuple[list[bool], Any, int]:
        service, vllm = Service(Settings("base", "base"), None), Vllm()
        service.vllm = vllm  # type: ignore[assignment]
        with service.admit(LOCAL, "samples") as request:
            request.operation = Generate(request.request_id, Sample(None, (1,), max_tokens=1))
            request.answer = SampleAnswer(1, prompt_logprobs=False)
        await asyncio.sleep(0)  # the sample begins
        await service.begin_stop()
        turns = [await run_turn(service) for _ in range(3)] if answers else []
        if answers:
            vllm.may_go.set()
        else:
            turns.append(await run_turn(service))
        result = (await service.retrieve(LOCAL, request.request_id)).result
        are_last = [*(turn.is_last for turn in turns), (await run_turn(service)).is_last]
        return are_last, result, service.counters.tokens[LOCAL.name]

    are_last, result, num_tokens = asyncio.run(stop())
    assert num_tokens == 2
    if answers:
        assert are_last == [False, False, False, True]
        assert isinstance(result, bytes)
    else:
        assert are_last[-1]
        assert result == Refusal("the server is stopping", is_users=False)


@pytest.mark.parametrize("name", ["ada", "no", "null", "0123", "1e3", "a: b", "é" * 70, '"'])
def test_the_name_of_a_new_key(tmp_path: Path, name: str) -> None:
    file = tmp_path / "keys.yaml"
    text = CliRunner().invoke(serve_command, ["--new-key", name]).output
    file.write_text(text)
    assert [key.name for key in read_keys(file).values()] == [name]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ada: {sha256: A}\nbo: {sha256: B}\nada: {sha256: B}", "ada is there twice, again in line 3"),
        ("ada: {sha256: A, max_models: 1, max_models: 2}", "max_models is there twice, again in line 1"),
        ("0123: {sha256: A}", "83: is not a name. Write text, in quotes"),
        ("ada: {sha256: A, no: 1}", "Keys should be strings"),
        ("ada: 2026-02-30", "cannot be read"),
        ("ada: {max_models: 1}", "ada: has no sha256"),
    ],
)
def test_a_file_of_keys_that_is_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(text.replace("A", "a" * 64).replace("B", "b" * 64))
    with pytest.raises(ConfigError, match=re.escape(words)):
        read_keys(file)


def test_the_name_of_a_base_in_the_working_folder(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    monkeypatch.setattr(
        "shardwise.cli.serve.run_ranks", lambda *arguments, **_: names.append(arguments[2].settings.name)
    )
    monkeypatch.chdir(base)
    for model in (".", "../base", str(base), "owner/base"):
        assert CliRunner().invoke(serve_command, [model]).exit_code == 0
    assert names == ["base", "base", "base", "owner/base"]
    # A server that stands still for less than a minute does not know it, and takes the time for its clients'.
    assert CliRunner().invoke(serve_command, ["base", "--session-timeout", "119"]).exit_code == 2
    too_few = ["base", "--max-tokens-per-pass", str(LENGTH_MULTIPLE - 1)]
    assert CliRunner().invoke(serve_command, too_few).exit_code == 2
    with pytest.raises(ConfigError, match="--session-timeout nan: is not a number"):
        CliRunner().invoke(serve_command, ["base", "--session-timeout", "nan"], catch_exceptions=False)


def test_the_option_of_an_address_that_cannot_be_listened_on(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"ada: {{sha256: '{'0' * 64}'}}")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        # The second address is of documentation, and so of no machine.
        for host, option in (
            ("127.0.0.1", f"--port {port}: Address already"),
            ("192.0.2.1", "--host 192.0.2.1: "),
        ):
            options = ServeOptions("base", Settings("base", "base"), host, port, keys)
            with ExitStack() as stack, pytest.raises(ConfigError, match=option):
                run._open_server(options, stack)


@pytest.mark.parametrize("call", ["request_stop", "finish_turn"])
def test_a_server_whose_connections_have_ended_does_not_wait_for_them(call: str) -> None:
    coroutine = asyncio.sleep(0)
    service: Any = SimpleNamespace(begin_stop=lambda: coroutine, finish_turn=lambda *_: coroutine)
    with socket.socket() as listener:
        server = Server(ServeOptions("base", Settings("base", "base")), service, None, listener)
        server._thread = threading.Thread()  # has not begun, and is not alive
        arguments: list[Any] = [] if call == "request_stop" else [[], {}, 0.0]
        with pytest.raises(TrainingError, match="the thread with the connections has ended"):
            getattr(server, call)(*arguments)
        server.stop()
    coroutine.close()


@pytest.mark.parametrize(
    ("call", "phase"), [("request_stop", "take no more requests"), ("finish_turn", "take a turn")]
)
def test_all_ranks_learn_in_a_phase_that_the_connections_have_ended(call, phase, monkeypatch) -> None:
    calls = []

    def record(name: str) -> None:
        calls.append(name)
        if name == call and "run" in calls:  # not in the first turn
            raise TrainingError(current_phases())

    server = SimpleNamespace(
        take_turn=lambda: (Turn(), []),
        request_stop=lambda: record("request_stop"),
        finish_turn=lambda *_: record("finish_turn"),
    )
    monkeypatch.setattr(run, "_join_stops", lambda by_rank: (by_rank[0], True))
    outer = [current_phases()] if current_phases() else []  # of tests that left one open
    with World.current(call="serve") as world, pytest.raises(TrainingError) as raised:
        run.run_turns(world, SimpleNamespace(run=lambda _: record("run")), server, StopRequest())
    assert str(raised.value) == ", ".join([*outer, "serve", phase])


def test_rows_are_dealt_so_that_passes_are_short() -> None:
    lengths = [[100], [10] * 10]
    shares = deal_rows(lengths, 2)
    assert sorted(row for of_rank in shares[1] for row in of_rank) == list(range(10))
    units = [
        [Unit(of[row]) for of, share in zip(lengths, shares, strict=True) for row in share[rank]]
        for rank in range(2)
    ]
    plans = compose_passes(units, longest=128, max_tokens=8192, overhead=0)
    assert sum(plan.tokens * max(map(len, plan.units)) for plan in plans) == 112 + 5 * 16
