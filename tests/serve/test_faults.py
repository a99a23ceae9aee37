"""Faults of one user, in which the others go on: of a loss, of a step, of the disk, of a client that comes late."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
import torch
from tests.serve.conftest import Served, make_base, serving
from tests.serve.users import User, make_message
from tests.support.local_ranks import LIMIT_S
from tinker.proto import tinker_public_pb2 as protobuf

from shardwise.bank import batch, losses, passes
from shardwise.core.errors import RankLostError, StorageError, TrainingError
from shardwise.files.local_writer import LocalWriter
from shardwise.serve import app
from shardwise.serve.operations import OffloadModels, Pass, SaveModel
from shardwise.serve.records import Settings
from shardwise.serve.service import Service

STEP = {"adam_params": {"learning_rate": 1e-2}}


@pytest.fixture
def users(served: Served) -> Iterator[dict[str, User]]:
    made = {name: User(served.url, served.keys[name]) for name in ("ada", "bo", "dee", "eve")}
    yield made
    for user in made.values():
        user.finish(served)


@contextmanager
def one_turn(served: Served, dee: User) -> Iterator[None]:
    """Hold the server in a turn of another user, so that all requests of the block are in the next one."""
    model, run = dee.create(), served.engine.run
    is_held, may_go = threading.Event(), threading.Event()

    def hold(turn: Any) -> Any:
        if any(isinstance(operation, Pass) for operation in turn.operations):
            is_held.set()
            assert may_go.wait(LIMIT_S)
        return run(turn)

    served.engine.run = hold  # type: ignore[method-assign]
    try:
        promise = dee.send(make_message(model, 1)).json()
        assert is_held.wait(LIMIT_S)
        yield
    finally:
        served.engine.run = run  # type: ignore[method-assign]
        may_go.set()
    dee.retrieve(promise)


def loss_of(result: Any) -> float:
    assert isinstance(result, bytes), result
    return float(protobuf.ForwardBackwardOutput.FromString(result).metrics["loss:sum"])


def make_dro_message(model: str, seq_id: int) -> Any:
    message = make_message(model, seq_id)
    message.loss_fn = "dro"
    for name in ("logprobs", "advantages"):
        tensor = message.data[0].loss_fn_inputs[name]
        tensor.dtype, tensor.dense = protobuf.DTYPE_FLOAT32, torch.ones(3).numpy().tobytes()
    return message


def test_a_loss_that_raises(served: Served, users: dict[str, User], monkeypatch: pytest.MonkeyPatch) -> None:
    ada, bo = users["ada"], users["bo"]
    models = [user.create() for user in (ada, bo)]
    alone = loss_of(bo.retrieve(bo.send(make_message(models[1], 1)).json()))
    bo.retrieve(bo.post("optim_step", model_id=models[1], seq_id=2, adam_params={"learning_rate": 0.0}))

    def fail(*_args: Any) -> torch.Tensor:
        raise ArithmeticError("it has no value")

    with monkeypatch.context() as patch:
        patch.setitem(losses.LOSSES, "dro", replace(losses.LOSSES["dro"], function=fail))
        with one_turn(served, users["dee"]):
            failing = ada.send(make_dro_message(models[0], 1)).json()
            fine = bo.send(make_message(models[1], 3)).json()
            steps = [
                user.post("optim_step", model_id=model, seq_id=seq_id, **STEP)
                for user, model, seq_id in ((ada, models[0], 2), (bo, models[1], 4))
            ]
        assert "it has no value" in ada.retrieve(failing)["error"]
        assert loss_of(bo.retrieve(fine)) == alone
    refused, taken = (user.retrieve(step) for user, step in zip((ada, bo), steps, strict=True))
    assert "seq_id 1 failed since the last step" in refused["error"]
    assert taken["metrics"]["grad_norm:mean"] > 0
    again = ada.send(make_dro_message(models[0], 3)).json()
    assert isinstance(ada.retrieve(again), bytes)
    step = ada.retrieve(ada.post("optim_step", model_id=models[0], seq_id=4, **STEP))
    assert step["metrics"]["skipped:max"] == 0.0


def test_requests_that_do_not_fit_into_memory(
    served: Served, users: dict[str, User], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They fail alone in their turn: those of other users are carried out."""
    ada, bo, estimate_pass = users["ada"], users["bo"], batch.estimate_pass
    models = [user.create() for user in (ada, bo)]

    def estimate(base: Any, adapters: Any, rows: int, tokens: int, *rest: Any) -> int:
        return 1 << 60 if tokens > 64 else estimate_pass(base, adapters, rows, tokens, *rest)

    def sample(user: User, length: int) -> Any:
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [5] * length}]}
        body = {"base_model": "base", "prompt": prompt, "topk_prompt_logprobs": 1}
        return user.post("asample", **body, sampling_params={"max_tokens": 1})

    forward, failed, kept = passes.FusedPass.forward, list[Any](), list[bool]()

    def forward_of_one_row(fused: Any) -> None:
        kept.append(any(each() is not None for each in failed))
        if len(fused.rows) > 1:
            failed.append(weakref.ref(fused))
            raise MemoryError("no room for two rows")
        forward(fused)

    monkeypatch.setattr(batch, "estimate_pass", estimate)
    monkeypatch.setattr(passes.FusedPass, "forward", forward_of_one_row)
    with one_turn(served, users["dee"]):
        refused = [(ada, ada.send(make_message(models[0], 1, (5,) * 100)).json()), (ada, sample(ada, 100))]
        fine = [(bo, bo.send(make_message(models[1], seq_id)).json()) for seq_id in (1, 2)]
        fine += [(bo, sample(bo, 3)), (ada, sample(ada, 3))]
        steps = [
            user.post("optim_step", model_id=model, seq_id=seq_id, **STEP)
            for user, model, seq_id in ((ada, models[0], 2), (bo, models[1], 3))
        ]
    assert [user.retrieve(promise).get("category") for user, promise in refused] == ["server"] * 2
    assert all(isinstance(user.retrieve(promise), bytes) for user, promise in fine)
    assert "seq_id 1 failed since the last step" in ada.retrieve(steps[0])["error"]
    assert bo.retrieve(steps[1])["metrics"]["grad_norm:mean"] > 0
    assert failed
    assert not any(kept), "a call that failed keeps no memory while its requests run again"


def test_two_steps_that_are_sent_at_once_are_both_taken(served: Served, users: dict[str, User]) -> None:
    ada = users["ada"]
    model = ada.create()
    with one_turn(served, users["dee"]):
        ada.send(make_message(model, 1))
        steps = [ada.post("optim_step", model_id=model, seq_id=seq_id, **STEP) for seq_id in (2, 3)]
    norms = [ada.retrieve(step)["metrics"]["grad_norm:mean"] for step in steps]
    assert norms[0] > 0
    assert norms[1] == 0.0, "without a pass"


def test_a_request_without_an_outcome_has_failed(
    served: Served, users: dict[str, User], monkeypatch: pytest.MonkeyPatch
) -> None:
    ada = users["ada"]
    model = ada.create()
    with monkeypatch.context() as patch:
        patch.setattr(served.engine, "run", lambda turn: {})
        promises = [
            ada.post("save_weights", model_id=model, seq_id=1, path="never"),
            ada.post("optim_step", model_id=model, seq_id=2, **STEP),
        ]
        assert [ada.retrieve(promise).get("category") for promise in promises] == ["server"] * 2
    assert ada.http.get(f"/api/v1/training_runs/{model}/checkpoints").json()["checkpoints"] == []


def test_a_step_that_raises(served: Served, users: dict[str, User], monkeypatch: pytest.MonkeyPatch) -> None:
    """The model of the step recovers by a checkpoint, and that of another user has stepped in the same turn."""
    step = torch.optim.AdamW.step

    def fail(optimizer: Any, *args: Any) -> Any:
        if optimizer.param_groups[0]["lr"] == 0.125:
            raise ArithmeticError("it cannot step")
        return step(optimizer, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", fail)  # before there is a schedule, which keeps what it finds
    ada, bo = users["ada"], users["bo"]
    models = [user.create() for user in (ada, bo)]
    path = ada.retrieve(ada.post("save_weights", model_id=models[0], seq_id=1, path="before"))["path"]
    first = loss_of(bo.retrieve(bo.send(make_message(models[1], 1)).json()))
    with one_turn(served, users["dee"]):
        passed = ada.send(make_message(models[0], 2)).json()
        failing = ada.post("optim_step", model_id=models[0], seq_id=3, adam_params={"learning_rate": 0.125})
        fine = bo.post("optim_step", model_id=models[1], seq_id=2, **STEP)
    before = loss_of(ada.retrieve(passed))
    failed = ada.retrieve(failing)
    assert failed["category"] == "server"
    assert bo.retrieve(fine)["metrics"]["skipped:max"] == 0.0
    assert loss_of(bo.retrieve(bo.send(make_message(models[1], 3)).json())) < first
    refused = ada.retrieve(ada.send(make_message(models[0], 4)).json())
    assert "its last step failed. Load a checkpoint" in refused["error"]
    loaded = ada.post("load_weights", model_id=models[0], seq_id=5, path=path, optimizer=True)
    assert ada.retrieve(loaded)["path"] == path
    assert loss_of(ada.retrieve(ada.send(make_message(models[0], 6)).json())) == before
    taken = ada.retrieve(ada.post("optim_step", model_id=models[0], seq_id=7, **STEP))
    assert taken["metrics"]["skipped:max"] == 0.0
    # Another model of its name has not failed.
    failing = ada.post("optim_step", model_id=models[0], seq_id=8, adam_params={"learning_rate": 0.125})
    assert ada.retrieve(failing)["category"] == "server"
    ada.post("unload_model", model_id=models[0])
    ada.num_models = 0
    assert loss_of(ada.retrieve(ada.send(make_message(ada.create(), 1)).json())) == before


def test_a_checkpoint_that_cannot_be_acknowledged(
    served: Served, users: dict[str, User], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full when the weights are written already, also over others, which nobody samples then."""
    ada = users["ada"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
    model, replace_file = ada.create(), LocalWriter.replace

    def fail(writer: LocalWriter, file: str, content: bytes) -> None:
        if file.endswith("meta.json"):
            raise StorageError(f"{file} in {writer.root}: no space is left")
        replace_file(writer, file, content)

    with monkeypatch.context() as patch:
        patch.setattr(LocalWriter, "replace", fail)
        failed = ada.retrieve(ada.post("save_weights", model_id=model, seq_id=1, path="full"))
    assert failed["category"] == "server"
    assert "cannot write to its folder of checkpoints" in failed["error"], "and no path"
    runs = f"/api/v1/training_runs/{model}/checkpoints"
    assert ada.http.get(runs).json()["checkpoints"] == []
    saved = ada.retrieve(ada.post("save_weights", model_id=model, seq_id=2, path="full"))
    assert [each["tinker_path"] for each in ada.http.get(runs).json()["checkpoints"]] == [saved["path"]]
    sample = {"model_path": saved["path"], "prompt": prompt, "sampling_params": {"max_tokens": 2}}
    for seq_id, fails in ((3, True), (4, False)):
        with monkeypatch.context() as patch:
            if fails:
                patch.setattr(LocalWriter, "replace", fail)
            ada.retrieve(ada.post("save_weights", model_id=model, seq_id=seq_id, path="full", overwrite=True))
        sampled = ada.retrieve(ada.post("asample", **sample))
        assert ("a save over it has failed" in sampled["error"]) if fails else isinstance(sampled, bytes)


def test_results_that_nobody_retrieves(served: Served, users: dict[str, User]) -> None:
    """Eve may keep 6000 bytes: the oldest are gone, and the last one is there."""
    eve = users["eve"]
    model = eve.create()
    promises = [eve.send(make_message(model, seq_id)).json() for seq_id in range(1, 31)]
    eve.retrieve(promises[-1])
    # As the server does every 5 seconds.
    asyncio.run_coroutine_threadsafe(served.server._service.tidy(), served.server._loop).result(LIMIT_S)
    assert eve.call("retrieve_future", **promises[0]).status_code == 410
    assert isinstance(eve.retrieve(promises[-1]), bytes)
    gone = eve.retrieve(eve.send(make_message(model, 1)).json())
    assert "its result is gone" in gone["error"]
    assert isinstance(eve.retrieve(eve.send(make_message(model, 31)).json()), bytes)


def test_a_host_without_room_for_one_idle_model(served: Served, users: dict[str, User], monkeypatch: Any) -> None:
    """The others are moved to it all the same."""
    moved, names = [], tuple(users["ada"].create() for _ in range(3))

    def offload(name: str) -> None:
        moved.append(name)
        if name == names[1]:
            raise TrainingError("too little free memory")

    monkeypatch.setattr(served.bank, "offload", offload)
    assert served.engine._run_other(OffloadModels("request", names)) is None
    assert [name for name in moved if name in names] == [*names], "beside what the server moves"


def test_a_model_that_finds_no_room_is_tried_again(served: Served) -> None:
    """The client tries on, and has its model as soon as there is room."""
    first = User(served.url, served.keys["cy"])
    model = first.create(2)
    statuses = []
    body = {"session_id": first.session, "model_seq_id": 2, "base_model": "base", "lora_config": {"rank": 2}}
    statuses.append(first.call("create_model", **body).status_code)
    client = tinker.ServiceClient(base_url=served.url, api_key=served.keys["cy"])
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(lambda: client.create_lora_training_client("base", rank=2).result())
        assert not waiting.done()
        first.post("unload_model", model_id=model)
        second = waiting.result(LIMIT_S)
    assert second.get_info().lora_rank == 2
    statuses.append(first.call("create_model", **body).status_code)
    first.post("unload_model", model_id=second.model_id)
    # The same request of the same number.
    promise = first.post("create_model", **body)
    assert first.retrieve(promise)["model_id"] == f"{first.session}:train:2"
    assert first.post("create_model", **body) == promise
    assert statuses == [429, 429]
    # A number may be used again, too.
    first.post("unload_model", model_id=f"{first.session}:train:2")
    promise = first.post("create_model", **body)
    model = first.retrieve(promise)["model_id"]
    assert isinstance(first.retrieve(first.send(make_message(model, 1)).json()), bytes)
    first.finish(served)


def test_a_number_that_is_used_again_in_the_same_turn(served: Served, users: dict[str, User]) -> None:
    ada = users["ada"]
    other, model = ada.create(), ada.create()
    body = {"session_id": ada.session, "model_seq_id": 2, "base_model": "base", "lora_config": {"rank": 2}}
    with one_turn(served, users["dee"]):
        ada.send(make_message(other, 1))
        ada.post("unload_model", model_id=model)
        promise = ada.post("create_model", **body)
    assert ada.retrieve(promise)["model_id"] == model
    assert ada.post("get_info", model_id=model)["lora_rank"] == 2
    assert isinstance(ada.retrieve(ada.send(make_message(model, 1)).json()), bytes)


def test_a_checkpoint_that_is_not_there_keeps_its_place(served: Served, users: dict[str, User]) -> None:
    """As all that is wrong once model and seq_id are known: the next request is answered."""
    ada, bo = users["ada"], users["bo"]
    model, foreign = ada.create(), bo.create()
    path = bo.retrieve(bo.post("save_weights", model_id=foreign, seq_id=1, path="mine"))["path"]
    bodies = (
        {"path": f"tinker://{model}/weights/nothing", "optimizer": True},
        {"path": "nonsense", "optimizer": True},
        {"path": 5, "optimizer": "perhaps"},
        {"path": path, "optimizer": True},
    )
    for seq_id, body in enumerate(bodies, 1):
        refused = ada.retrieve(ada.post("load_weights", model_id=model, seq_id=seq_id, **body))
        assert refused["category"] == "user", body
    assert isinstance(ada.retrieve(ada.send(make_message(model, 5)).json()), bytes)


def test_a_load_of_another_rank_or_of_a_checkpoint_that_is_deleted_meanwhile(users: dict[str, User]) -> None:
    ada = users["ada"]
    model, other = ada.create(), ada.create(rank=2)
    path = ada.retrieve(ada.post("save_weights", model_id=model, seq_id=1, path="first"))["path"]
    refused = ada.retrieve(ada.post("load_weights", model_id=other, seq_id=1, path=path, optimizer=True))
    assert "has rank 4 (attn, mlp, unembed), and the model has rank 2 (attn, mlp, unembed)" in refused["error"]
    # Before the request that it waits for.
    loaded = ada.post("load_weights", model_id=model, seq_id=3, path=path, optimizer=True)
    assert ada.http.delete(f"/api/v1/training_runs/{model}/checkpoints/weights/first").status_code == 204
    ada.send(make_message(model, 2))
    assert "the checkpoint: was deleted, or its time is over" in ada.retrieve(loaded)["error"]


def test_an_optimizer_that_a_checkpoint_does_not_have(users: dict[str, User]) -> None:
    """The load is refused, and the model is as before."""
    ada = users["ada"]
    model = ada.create()
    saved = ada.retrieve(ada.post("save_weights_for_sampler", model_id=model, seq_id=1, path="to sample"))["path"]
    ada.send(make_message(model, 2))
    ada.retrieve(ada.post("optim_step", model_id=model, seq_id=3, **STEP))
    before = loss_of(ada.retrieve(ada.send(make_message(model, 4)).json()))
    refused = ada.retrieve(ada.post("load_weights", model_id=model, seq_id=5, path=saved, optimizer=True))
    assert "optimizer: a checkpoint to sample from has none" in refused["error"]
    assert loss_of(ada.retrieve(ada.send(make_message(model, 6)).json())) == before
    body = {"session_id": ada.session, "model_seq_id": 2, "path": saved}
    assert "has none" in ada.retrieve(ada.post("load_weights", **body, optimizer=True))["error"]
    assert ada.retrieve(ada.post("load_weights", **body, optimizer=False))["path"] == saved


def test_a_loaded_model_has_no_part_of_a_batch(users: dict[str, User]) -> None:
    """Of which another part was refused, or which the client sends again."""
    ada = users["ada"]
    model = ada.create()
    ada.send(make_message(model, 1))
    assert "error" in ada.retrieve(ada.send(make_message(model, 2, (1, 600))).json())
    path = ada.retrieve(ada.post("save_weights", model_id=model, seq_id=3, path="part"))["path"]
    ada.post("load_weights", model_id=model, seq_id=4, path=path, optimizer=True)
    body = {"session_id": ada.session, "model_seq_id": 2, "path": path, "optimizer": True}
    resumed = ada.retrieve(ada.post("load_weights", **body))["model_id"]
    for name, seq_id in ((model, 5), (resumed, 1)):
        stepped = ada.retrieve(ada.post("optim_step", model_id=name, seq_id=seq_id, **STEP))
        assert stepped["metrics"]["grad_norm:mean"] == 0.0


def test_saves_under_one_name_that_are_sent_at_once(served: Served, users: dict[str, User]) -> None:
    """Neither replaces the other unless it says so. Their results are kept without their requests."""
    ada, metadata = users["ada"], {"note": "x" * 60_000}
    model = ada.create()
    with one_turn(served, users["dee"]):
        promises = [
            ada.post(
                "save_weights",
                model_id=model,
                seq_id=seq_id,
                path="one",
                overwrite=overwrite,
                user_metadata=metadata,
            )
            for seq_id, overwrite in ((1, False), (2, False), (3, True))
        ]
    first, second, third = (ada.retrieve(promise) for promise in promises)
    assert first == third
    assert second["error"] == "path 'one': exists already. Pass overwrite=True, or another name"
    again = ada.retrieve(ada.post("save_weights", model_id=model, seq_id=4, path="one"))
    assert again["error"] == "path 'one': exists already. Pass overwrite=True, or another name"
    # Only the bytes of a result are counted, so that it must not hold its request.
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    body = {"base_model": "base", "prompt": prompt, "sampling_params": {"max_tokens": 1, "stop": "text"}}
    promises.append(ada.post("asample", **body))
    assert "has no tokenizer" in ada.retrieve(promises[-1])["error"]
    for promise in promises:
        request = served.server._service.futures[promise["request_id"]]
        assert (request.operation, request.checkpoint, request.answer) == (None, None, {})


def test_a_folder_of_checkpoints_that_cannot_be_read(
    served: Served, users: dict[str, User], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a moment, or not written. Nothing is replaced, no request waits for ever, and the server goes on."""
    ada, state, read_text = users["ada"], served.server._service, Path.read_text
    model = ada.create()
    body = {"path": "one", "user_metadata": {"note": "first"}}
    path = ada.retrieve(ada.post("save_weights", model_id=model, seq_id=1, **body))["path"]

    def fail(file: Path, *arguments: Any, **keywords: Any) -> str:
        if file.name.endswith("meta.json"):
            raise OSError(116, "Stale file handle", str(file))
        return read_text(file, *arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", fail)
        state._expired_s = -1e9
        saved = ada.retrieve(ada.post("save_weights", model_id=model, seq_id=2, path="one"))
        loaded = ada.retrieve(ada.post("load_weights", model_id=model, seq_id=3, path=path, optimizer=True))
        info = ada.call("weights_info", tinker_path=path)

    def fail_everywhere(file: Path, **_keywords: Any) -> None:
        raise OSError(116, "Stale file handle", str(file))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", fail_everywhere)
        patch.setattr(Path, "unlink", fail_everywhere)
        body = {"path": f"{path}-of-another", "optimizer": True}
        searched = ada.retrieve(ada.post("load_weights", model_id=model, seq_id=4, **body))
        deleted = ada.http.delete(f"/api/v1/training_runs/{model}/checkpoints/weights/one")
    assert isinstance(ada.retrieve(ada.send(make_message(model, 5)).json()), bytes)
    assert {each["category"] for each in (saved, loaded, searched)} == {"server"}
    assert (info.status_code, deleted.status_code) == (503, 503)
    for text in (saved["error"], loaded["error"], searched["error"], info.text, deleted.text):
        assert "cannot be read or written, Stale file handle. Try again" in text
        assert str(served.state) not in text
    (listed,) = ada.http.get(f"/api/v1/training_runs/{model}/checkpoints").json()["checkpoints"]
    assert listed["user_metadata"] == {"note": "first"}


def test_a_checkpoint_that_is_deleted_while_it_is_saved_again(
    served: Served, users: dict[str, User], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is deleted after the save, and not under its hands."""
    ada, run = users["ada"], served.engine.run
    model = ada.create()
    path = ada.retrieve(ada.post("save_weights", model_id=model, seq_id=1, path="gone"))["path"]
    is_saved, may_go = threading.Event(), threading.Event()

    def hold(turn: Any) -> Any:
        outcomes = run(turn)
        if any(isinstance(operation, SaveModel) for operation in turn.operations):
            is_saved.set()
            assert may_go.wait(LIMIT_S)
        return outcomes

    monkeypatch.setattr(served.engine, "run", hold)
    checkpoint = f"/api/v1/training_runs/{model}/checkpoints/weights/gone"
    with ThreadPoolExecutor() as pool:
        promise = ada.post("save_weights", model_id=model, seq_id=2, path="gone", overwrite=True)
        assert is_saved.wait(LIMIT_S)
        deleted = pool.submit(httpx.delete, served.url + checkpoint, headers=ada.http.headers, timeout=LIMIT_S)
        try:
            with pytest.raises(TimeoutError):
                deleted.result(0.5)
        finally:
            may_go.set()
        assert deleted.result(LIMIT_S).status_code == 204
    assert ada.retrieve(promise)["path"] == path
    assert ada.http.get(f"/api/v1/training_runs/{model}/checkpoints").json()["checkpoints"] == []
    assert list(served.state.rglob("gone*")) == []


def test_a_checkpoint_saved_again_when_its_time_is_over_stays(
    served: Served, users: dict[str, User], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expired ones are looked for in the turn that saves it again."""
    ada, state = users["ada"], served.server._service
    model = ada.create()
    monkeypatch.setattr(app, "_TTL_S", range(-10, 10))
    monkeypatch.setattr(state, "_expired_s", time.monotonic())
    ada.retrieve(ada.post("save_weights", model_id=model, seq_id=1, path="again", ttl_seconds=-5))
    state._expired_s = -1e9
    path = ada.retrieve(ada.post("save_weights", model_id=model, seq_id=2, path="again", overwrite=True))["path"]
    assert ada.post("weights_info", tinker_path=path)["lora_rank"] == 4
    loaded = ada.retrieve(ada.post("load_weights", model_id=model, seq_id=3, path=path, optimizer=True))
    assert loaded["path"] == path


def test_no_sample_is_of_a_checkpoint_that_was_saved_later(served: Served, users: dict[str, User]) -> None:
    """A sampling session has the checkpoint that it was opened on, or none."""
    ada, state = users["ada"], served.server._service
    model = ada.create()
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
    save = {"model_id": model, "path": "latest"}

    def open_sampler() -> str:
        body = {"session_id": ada.session, "sampling_session_seq_id": 0, "model_path": path}
        return str(ada.post("create_sampling_session", **body)["sampling_session_id"])

    def sample(sampler: str) -> Any:
        body = {"prompt": prompt, "prompt_logprobs": True, "topk_prompt_logprobs": 1}
        return ada.post(
            "asample", sampling_session_id=sampler, **body, sampling_params={"max_tokens": 1, "seed": 1}
        )

    def forget() -> None:
        state._forget_copies(list(state._copies))

    path = ada.retrieve(ada.post("save_weights_for_sampler", **save, seq_id=1))["path"]
    first = open_sampler()
    before = ada.retrieve(sample(first))
    assert isinstance(before, bytes)
    ada.send(make_message(model, 2))
    ada.post("optim_step", model_id=model, seq_id=3, **STEP)
    ada.retrieve(ada.post("save_weights_for_sampler", **save, seq_id=4))
    second = open_sampler()
    assert ada.retrieve(sample(first)) == before, "it is still loaded"
    with one_turn(served, users["dee"]):
        promises = [ada.post("save_weights_for_sampler", **save, seq_id=5), sample(second)]
    saved, in_one_turn = map(ada.retrieve, promises)
    assert saved["path"] == path
    served.server._loop.call_soon_threadsafe(forget)
    third = open_sampler()
    for failed in (in_one_turn, *(ada.retrieve(sample(each)) for each in (first, second))):
        assert "checkpoint 'latest': was saved again since" in failed["error"]
        assert failed["category"] == "user"
    assert isinstance(ada.retrieve(sample(third)), bytes)
    served.server._loop.call_soon_threadsafe(forget)
    ada.http.delete(f"/api/v1/training_runs/{model}/checkpoints/sampler_weights/latest")
    assert "was deleted" in ada.retrieve(sample(third))["error"]


def test_the_seq_id_that_is_waited_for(users: dict[str, User]) -> None:
    ada = users["ada"]
    model = ada.create()
    for seq_id in range(1, 7):
        ada.retrieve(ada.send(make_message(model, seq_id)).json())
    late = ada.send(make_message(model, 8)).json()
    waiting = ada.call("retrieve_future", **late)
    assert (waiting.status_code, waiting.json()["queue_state_reason"]) == (408, "waiting for seq_id 7")
    ada.send(make_message(model, 7))
    assert isinstance(ada.retrieve(late), bytes)


def test_what_waits_when_a_rank_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is refused with the reason, and the connections are closed without a traceback."""
    is_held, retrieving = threading.Event(), threading.Semaphore(0)
    original = Service.retrieve

    async def retrieve(*args: Any) -> Any:
        retrieving.release()
        return await original(*args)

    monkeypatch.setattr(Service, "retrieve", retrieve)

    def lose(_turn: Any) -> Any:
        is_held.set()
        raise RankLostError("rank 1 is lost")

    with (
        serving(make_base(), tmp_path, Settings("base", "base"), {"ada": {}}) as served,
        ThreadPoolExecutor() as pool,
    ):
        user = User(served.url, served.keys["ada"])
        model = user.create()
        monkeypatch.setattr(threading, "excepthook", lambda _: None)  # the thread of the turns ends
        monkeypatch.setattr(served.engine, "run", lose)
        waiting = [pool.submit(user.retrieve, user.send(make_message(model, number)).json()) for number in (2, 1)]
        assert is_held.wait(LIMIT_S)
        for _ in waiting:
            assert retrieving.acquire(timeout=LIMIT_S)
        served.server.stop()
        for answer in waiting:
            refused = answer.result(LIMIT_S)
            assert refused["category"] == "server"
            assert "one of its ranks is lost" in refused["error"]
        user.http.close()
    assert not [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
