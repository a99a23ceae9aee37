"""Requests that a server must refuse, as bytes and JSON: nothing of another user, no hang, no status above 499."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import torch
import zstandard
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.serve.conftest import VOCAB_SIZE, Served
from tests.serve.users import User, make_message
from tinker import types
from tinker.proto import tinker_public_pb2 as protobuf

from shardwise.serve import messages, service


@pytest.fixture(scope="module")
def ada(served: Served) -> Iterator[User]:
    user = User(served.url, served.keys["ada"])
    yield user
    user.finish(served)


@pytest.fixture(scope="module")
def bo(served: Served) -> Iterator[User]:
    user = User(served.url, served.keys["bo"])
    yield user
    user.finish(served)


def test_a_key_is_needed(served: Served) -> None:
    for headers in ({}, {"x-api-key": "tml-other"}):
        response = httpx.post(f"{served.url}/api/v1/create_session", json={}, headers=headers)
        assert (response.status_code, "is not a key" in response.text) == (401, True)
    assert httpx.get(f"{served.url}/healthz").json()["status"] == "ok"
    assert httpx.get(f"{served.url}/metrics").status_code == 401


def test_the_page_and_metrics_of_an_operator(served: Served, ada: User, bo: User) -> None:
    model = bo.create()
    assert model in bo.http.get("/status").text
    assert model not in ada.http.get("/status").text
    assert ada.http.get("/metrics").status_code == 403
    operator = User(served.url, served.keys["dee"])
    assert model in operator.http.get("/status").text
    assert b'shardwise_tokens_total{user="' in operator.http.get("/metrics").content
    operator.http.close()
    bo.post("unload_model", model_id=model)


@pytest.mark.parametrize("version", ["0.37.9", "0.40.0", "nonsense", "", "\ud800"])
def test_other_clients_are_told_which_to_install(ada: User, version: str) -> None:
    response = ada.call("client/config", sdk_version=version)
    assert (response.status_code, "pip install 'tinker" in response.text) == (426, True)


def test_nothing_of_another_user(ada: User, bo: User) -> None:
    model = ada.create()
    saved = ada.retrieve(ada.post("save_weights", model_id=model, seq_id=1, path="mine"))["path"]
    copy = ada.post("save_weights_for_sampler", model_id=model, seq_id=2, sampling_session_seq_id=0)
    sampler = ada.retrieve(copy)["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    calls = [
        ("get_info", {"model_id": model}),
        ("optim_step", {"model_id": model, "seq_id": 3, "adam_params": {}}),
        ("save_weights", {"model_id": model, "seq_id": 3}),
        ("unload_model", {"model_id": model}),
        ("retrieve_future", copy),
        ("session_heartbeat", {"session_id": ada.session}),
        ("create_sampling_session", {"session_id": bo.session, "sampling_session_seq_id": 0, "model_path": saved}),
        ("asample", {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt, "sampling_params": {}}),
        ("load_weights", {"session_id": bo.session, "model_seq_id": 90, "path": saved, "optimizer": False}),
        ("weights_info", {"tinker_path": saved}),
        ("create_model", {"session_id": ada.session, "model_seq_id": 91, "base_model": "base"}),
    ]
    for path, body in calls:
        assert bo.call(path, **body).status_code == 403, path
    assert bo.send(make_message(model, 3)).status_code == 403
    assert bo.http.get(f"/api/v1/samplers/{sampler}").status_code == 403
    assert bo.http.get(f"/api/v1/training_runs/{model}").status_code == 403
    name = saved.split("/", 3)[3]
    assert bo.http.delete(f"/api/v1/training_runs/{model}/checkpoints/{name}").status_code == 403
    for path in ("checkpoints", "training_runs", f"training_runs/{model}/checkpoints"):
        assert model not in bo.http.get(f"/api/v1/{path}").text
    assert ada.http.delete(f"/api/v1/training_runs/{model}/checkpoints/{name}").status_code == 204
    assert bo.call("get_info", model_id="nothing").status_code == 404


@pytest.mark.parametrize(
    "name", ["", "../../../escape", "/etc/escape", "..", ".hidden", "a\\b", "%2e%2e%2f", "é" * 30]
)
def test_names_stay_in_their_folder(served: Served, ada: User, name: str) -> None:
    model = ada.create()
    path = ada.retrieve(ada.post("save_weights", model_id=model, seq_id=1, path=name))["path"]
    listed = ada.http.get(f"/api/v1/training_runs/{model}/checkpoints").json()["checkpoints"]
    assert [each["tinker_path"] for each in listed] == [path]
    assert not list(served.state.parent.rglob("escape"))
    ada.post("unload_model", model_id=model)


def test_each_checkpoint_is_deleted_by_its_path(ada: User) -> None:
    model = ada.create()
    left = {
        ada.retrieve(ada.post("save_weights", model_id=model, seq_id=seq_id, path=name))["path"]
        for seq_id, name in enumerate(("a%20b", "a b", "x/é", "x/é/publish"), 1)
    }
    published = f"/api/v1/training_runs/{model}/checkpoints/weights/{quote('x/é', safe='')}/publish"
    assert ada.http.delete(published).status_code == 404, "a call of the client that is not served"
    for path in sorted(left, reverse=True):
        name = path.split("/", 3)[3]
        assert ada.http.delete(f"/api/v1/training_runs/{model}/checkpoints/{name}").status_code == 204, path
        left.remove(path)
        listed = ada.http.get(f"/api/v1/training_runs/{model}/checkpoints").json()["checkpoints"]
        assert {each["tinker_path"] for each in listed} == left
    ada.post("unload_model", model_id=model)


@pytest.mark.parametrize("name", ["\t", "x" * 300, "line\nbreak", "nul\0", "\ud800", *service.OWN_NAMES])
def test_names_that_a_save_cannot_have(ada: User, name: str) -> None:
    model = ada.create()
    body = {"model_id": model, "seq_id": 1, "path": name}
    assert ada.retrieve(ada.post("save_weights", **body))["category"] == "user"
    ada.post("unload_model", model_id=model)


def test_bodies_that_are_too_large_or_none(ada: User) -> None:
    bomb = zstandard.compress(bytes(50 * messages.MAX_BODY_BYTES))
    assert len(bomb) < 100_000
    assert ada.send(bomb, **{"content-encoding": "zstd"}).status_code == 413
    assert ada.send(bytes(messages.MAX_READ_BYTES + 1)).status_code == 413
    assert ada.send(b"nonsense", **{"content-encoding": "zstd"}).status_code == 400
    assert ada.send(b"nonsense", **{"content-encoding": "br"}).status_code == 400
    assert ada.send(b"\xff\xff\xff").status_code == 400
    for body in (b"", b"[]", b"{", b"[" * 50_000, b"\xff"):
        assert ada.http.post("/api/v1/optim_step", content=body).status_code == 400


def test_a_client_that_leaves_in_the_middle_of_its_body(served: Served) -> None:
    parts = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/api/v1/optim_step",
        "headers": [(b"x-api-key", served.keys["ada"].encode())],
    }
    answers = []

    async def receive() -> Any:
        return parts.pop(0)

    async def send(message: Any) -> None:
        answers.append(message)

    asyncio.run(served.server._http.config.app(scope, receive, send))
    assert answers[0]["status"] == 400


def test_models_without_a_seed_begin_with_other_values(served: Served, ada: User) -> None:
    models = [ada.create() for _ in range(2)]
    first, second = (served.bank._adapters[model].flat for model in models)
    assert not torch.equal(first, second)
    for model in models:
        ada.post("unload_model", model_id=model)


def test_the_order_of_requests(ada: User) -> None:
    model = ada.create()
    second = ada.send(make_message(model, 2)).json()
    waiting = ada.call("retrieve_future", **second)
    assert (waiting.status_code, waiting.json()["queue_state_reason"]) == (408, "waiting for seq_id 1")
    first = ada.send(make_message(model, 1, (4, 5))).json()
    assert ada.send(make_message(model, 1, (4, 5))).json() == first, "it is not carried out twice"
    other_body = ada.send(make_message(model, 1, (6, 7))).json()
    assert "had another body before" in ada.retrieve(other_body)["error"]
    for promise, length in ((first, 2), (second, 3)):
        output = protobuf.ForwardBackwardOutput.FromString(ada.retrieve(promise))
        assert len(output.loss_fn_outputs[0].fields["logprobs"].data) == 4 * length
    assert ada.send(make_message(model, 0)).status_code == 400
    ada.post("unload_model", model_id=model)
    assert ada.send(make_message(model, 3)).status_code == 410


def change(message: Any, **values: Any) -> Any:
    """Change fields of the target of the only row."""
    target = message.data[0].loss_fn_inputs["target_tokens"]
    for name, value in values.items():
        if name == "shape":
            del target.shape[:]
            target.shape.extend(value)
        else:
            setattr(target, name, value)
    return message


def test_an_early_request_whose_result_is_gone(served: Served, ada: User) -> None:
    """It was refused, retrieved, and forgotten before the one that it waits behind has come."""
    model = ada.create()
    refused = ada.send(make_message(model, 2, (1, VOCAB_SIZE, 3))).json()
    assert ada.retrieve(refused)["category"] == "user"
    state = served.server._service
    del state.futures[refused["request_id"]], state.models[model].seen[2]  # as the server does in ten minutes
    assert ada.send(make_message(model, 3)).status_code == 200
    assert "its result is gone" in ada.retrieve(ada.send(make_message(model, 2)).json())["error"]
    first, second = ada.send(make_message(model, 1)).json(), ada.send(make_message(model, 4)).json()
    assert isinstance(ada.retrieve(first), bytes)
    assert isinstance(ada.retrieve(second), bytes)
    ada.post("unload_model", model_id=model)


def test_each_fault_of_rows_is_a_failed_future_in_its_place(ada: User) -> None:
    model = ada.create()

    def with_weights(*weights: float) -> Any:
        message = make_message(model, 0)
        tensor = message.data[0].loss_fn_inputs["weights"]
        tensor.dtype, tensor.dense = protobuf.DTYPE_FLOAT32, torch.tensor(weights).numpy().tobytes()
        return message

    def with_image() -> Any:
        message = make_message(model, 0)
        message.data[0].model_input.add().image.data = b"png"
        return message

    def with_sparse(begins: list[int], columns: list[int], tokens: tuple[int, ...] = (1, 2, 3), k: int = 2) -> Any:
        message = change(make_message(model, 0, tokens), shape=[len(tokens), k])
        sparse = message.data[0].loss_fn_inputs["target_tokens"].sparse_csr
        sparse.values = torch.tensor([1] * len(columns)).numpy().tobytes()
        sparse.crow_indices = torch.tensor(begins).numpy().tobytes()
        sparse.col_indices = torch.tensor(columns).numpy().tobytes()
        return message

    # Of few bytes, and of many when dense, or when the targets of other rows in its pass are padded to it.
    wide = with_sparse([0, 0], [], (1,), 20_000_000)
    less_wide = with_sparse([0, 0], [], (1,), 1025)

    faults = {
        "tokens of row 0 are 3 bytes": b"odd",
        "from 1 to 96. The model has 96 tokens": make_message(model, 0, (1, VOCAB_SIZE)),
        "row 0 has 200 tokens. It may have 1 to 128": make_message(model, 0, (1,) * 200),
        "has 3 values, and its shape is [2]": change(make_message(model, 0), shape=[2]),
        "is not a tensor of float32 or int64": change(make_message(model, 0), dtype=protobuf.DTYPE_BFLOAT16),
        "with 1 or 2 dimensions": change(make_message(model, 0), shape=[1, 3, 1]),
        "weights are not all finite": with_weights(1.0, float("nan"), 1.0),
        "weights are (2,), and its targets (3,)": with_weights(1.0, 1.0),
        "has an image or sound": with_image(),
        "its sparse indices do not fit": with_sparse([0, 1, 1, 9], [0]),
        "sparse indices do not fit into [3, 2]": with_sparse([0, 1, 1, 1], [2]),
        "have 160000000 bytes when dense": wide,
        "has 1025 values for each token. Send at most 1024": less_wide,
        "data: has no rows": protobuf.ForwardBackwardRequest(model_id=model, loss_fn="cross_entropy"),
    }
    for seq_id, (words, message) in enumerate(faults.items(), 1):
        if message == b"odd":
            message = make_message(model, 0)
            message.data[0].model_input[0].encoded_text.tokens = b"odd"
        message.seq_id = seq_id
        result = ada.retrieve(ada.send(message).json())
        assert result["category"] == "user", result
        assert words in result["error"], (words, result)
    last = len(faults) + 1
    # What is no part of a batch keeps its place alone.
    for path, body in (("save_weights", {"path": "\t"}), ("save_weights", {"ttl_seconds": 1})):
        refused = ada.retrieve(ada.post(path, model_id=model, seq_id=last, **body))
        assert refused["category"] == "user"
        last += 1
    step = ada.post("optim_step", model_id=model, seq_id=last, adam_params={"learning_rate": -1.0})
    assert "learning_rate=-1.0" in ada.retrieve(step)["error"]
    step = ada.post("optim_step", model_id=model, seq_id=last + 1, adam_params={"learning_rate": 1e-3})
    assert "failed since the last step" in ada.retrieve(step)["error"]
    step = ada.post("optim_step", model_id=model, seq_id=last + 2, adam_params={"learning_rate": 1e-3})
    assert ada.retrieve(step)["metrics"]["skipped:max"] == 0.0
    ada.post("unload_model", model_id=model)


def test_numbers_that_no_float_can_have(ada: User) -> None:
    huge = 10**400
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    body = {"base_model": "base", "prompt": prompt, "sampling_params": {"max_tokens": 2, "top_k": huge}}
    assert isinstance(ada.retrieve(ada.post("asample", **body)), bytes)
    too_long = ada.post("asample", **{**body, "sampling_params": {"max_tokens": 127}})
    assert "sequences of 129 tokens with the prompt. They may have 128" in ada.retrieve(too_long)["error"]
    for stop in ("", ["text", ""]):
        refused = ada.post("asample", **{**body, "sampling_params": {"max_tokens": 2, "stop": stop}})
        assert 'stop: "" is in every text' in ada.retrieve(refused)["error"]
    model = ada.create()
    for seq_id, rate in enumerate((huge, 1e38), 1):  # the second is none that torch takes
        step = ada.post("optim_step", model_id=model, seq_id=seq_id, adam_params={"learning_rate": rate})
        assert ada.retrieve(step)["category"] == "user"


def test_a_snapshot_that_is_gone_fails_its_own_score_alone(ada: User) -> None:
    """Of six, the first one is used again and again, as the reference of a training is. It stays."""
    model = ada.create()
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
    body = {"prompt": prompt, "prompt_logprobs": True, "sampling_params": {"max_tokens": 1}}
    samplers: list[str] = []
    for seq_id in range(1, 7):  # of which the four that were used last are kept
        copy = ada.post("save_weights_for_sampler", model_id=model, seq_id=seq_id, sampling_session_seq_id=seq_id)
        samplers.append(ada.retrieve(copy)["sampling_session_id"])
        score = ada.post("asample", sampling_session_id=samplers[0], seq_id=seq_id, **body)
        assert isinstance(ada.retrieve(score), bytes)
    # The pass waits for its turn behind the gap, so that it is in one turn with the score.
    passed = ada.send(make_message(model, 8)).json()
    gone = ada.post("asample", sampling_session_id=samplers[1], seq_id=0, **body)
    first = ada.send(make_message(model, 7)).json()
    assert re.search("is gone .* max_snapshots", ada.retrieve(gone)["error"])
    assert isinstance(ada.retrieve(first), bytes)
    assert isinstance(ada.retrieve(passed), bytes)
    sampled = {**body, "prompt_logprobs": False}
    gone = ada.post("asample", sampling_session_id=samplers[2], seq_id=0, **sampled)
    assert re.search("is gone .* max_snapshots", ada.retrieve(gone)["error"])
    assert isinstance(ada.retrieve(ada.post("asample", sampling_session_id=samplers[5], seq_id=0, **body)), bytes)
    ada.post("unload_model", model_id=model)


def test_limits_of_models_and_of_early_requests(served: Served) -> None:
    user = User(served.url, served.keys["cy"])
    model = user.create()
    body = {"session_id": user.session, "model_seq_id": 7, "base_model": "base", "lora_config": {"rank": 2}}
    refused = user.call("create_model", **body)
    assert refused.status_code == 429
    words = 'max_models: you have 1 models. Call close("success") of a ServiceClient'
    assert refused.json()["error"].startswith(words)
    assert "after 7200 seconds" in refused.json()["error"]
    *early, above = [user.send(make_message(model, seq_id)).json() for seq_id in (2, 3, 4, 5)]
    assert "max_requests: the batch has more than 3 parts" in user.retrieve(above)["error"]
    first = user.send(make_message(model, 1)).json()
    assert all(isinstance(user.retrieve(promise), bytes) for promise in (first, *early))
    user.finish(served)


def test_limits_of_sessions_samplers_and_json(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_NUM_SAMPLERS", 4)
    first, second = (User(served.url, served.keys["fay"]) for _ in range(2))
    body = {"tags": [], "user_metadata": None, "sdk_version": "0.38.0"}
    refused = first.call("create_session", **body)
    assert (refused.status_code, "max_sessions" in refused.text) == (429, True)
    for _ in range(2):  # again, as if the first answer was lost
        second.post(f"sessions/{second.session}/finish")
    first.post("create_session", **body)
    body = {"session_id": first.session, "base_model": "base"}
    paths = []
    for number in range(5):
        sampler = first.post("create_sampling_session", sampling_session_seq_id=number, **body)
        paths.append(f"/api/v1/samplers/{sampler['sampling_session_id']}")
        assert first.http.get(paths[0]).status_code == 200
    statuses = [first.http.get(path).status_code for path in paths]
    assert statuses == [200, 404, 200, 200, 200], "the one used longest ago is forgotten, and not before"
    assert first.call("session_heartbeat", session_id="x" * (1 << 16)).status_code == 413
    for user in (first, second):
        user.http.close()


@pytest.fixture(scope="module")
def secrets(bo: User) -> list[str]:
    """What no other user may learn: ids of a session, a model, a result, a checkpoint and a sampler of Bo."""
    model = bo.create()
    promises = [
        bo.post("save_weights", model_id=model, seq_id=1, path="secret-name"),
        bo.post("save_weights_for_sampler", model_id=model, seq_id=2, sampling_session_seq_id=0),
    ]
    path, sampler = (bo.retrieve(promise) for promise in promises)
    ids = [promise["request_id"] for promise in promises]
    return [bo.session, model, *ids, path["path"], sampler["sampling_session_id"]]


def require_answer(response: httpx.Response, request: bytes, secrets: list[str]) -> None:
    """No fault of the server, and nothing of another user that was not in the request."""
    assert response.status_code < 500, response.text
    for secret in secrets:
        assert secret.encode() not in response.content or secret.encode() in request


@dataclass
class Place:
    """A model, and the seq_id of its next request."""

    model: str
    seq_id: int = 1

    def require_result(self, user: User, response: httpx.Response) -> None:
        """A request in this place is a future, which is answered."""
        assert response.status_code == 200, response.text
        self.seq_id += 1
        result = user.retrieve(response.json())
        assert isinstance(result, bytes) or result.get("category") in (None, "user"), result


@pytest.fixture(scope="module")
def place(ada: User) -> Place:
    return Place(ada.create())


@given(data=st.binary(max_size=200))
@settings(max_examples=50)
def test_random_bytes(ada: User, data: bytes) -> None:
    assert ada.send(data).status_code < 500
    assert ada.http.post("/api/v1/asample", content=data).status_code < 500


_NAMES = st.sampled_from(["target_tokens", "target_tokens", "weights", "logprobs", "advantages"]) | st.text(
    max_size=3
)
_ARRAYS = st.binary(max_size=32) | st.lists(st.integers(-2, 100), max_size=5).map(
    lambda values: torch.tensor(values, dtype=torch.int64).numpy().tobytes()
)
_KNOWN = {
    "loss_fn": st.sampled_from(["cross_entropy", "importance_sampling", "ppo", "gspo", "custom"]),
    "tokens": st.lists(st.integers(-1, VOCAB_SIZE), max_size=5).map(
        lambda ids: torch.tensor(ids, dtype=torch.int32).numpy().tobytes()
    ),
    "shape": st.lists(st.integers(-1, 6) | st.sampled_from([1 << 30, 1 << 62]), max_size=3),
    "dense": _ARRAYS,
    **dict.fromkeys(("values", "crow_indices", "col_indices"), _ARRAYS),
}
"""Values that a part of the requests has in fields of these names, so that checks behind the first are reached."""


def draw_value(draw: Any, field: Any) -> Any:
    """Draw a value of a field; one of those that a repeated field has."""
    if field.message_type is not None:
        return draw_message(draw, field.message_type)
    if field.enum_type is not None:
        return draw(st.sampled_from([value.number for value in field.enum_type.values]))
    kinds = {
        field.TYPE_INT32: st.integers(-(1 << 31), (1 << 31) - 1),
        field.TYPE_INT64: st.integers(-(1 << 63), (1 << 63) - 1),
        field.TYPE_UINT32: st.integers(0, (1 << 32) - 1),
        field.TYPE_UINT64: st.integers(0, (1 << 64) - 1),
        field.TYPE_BOOL: st.booleans(),
        field.TYPE_STRING: st.text(max_size=5),
        field.TYPE_BYTES: st.binary(max_size=20),
        field.TYPE_FLOAT: st.floats(width=32),
        field.TYPE_DOUBLE: st.floats(),
    }
    return draw(kinds[field.type])


def draw_message(draw: Any, descriptor: Any) -> Any:
    """Draw a message of a descriptor: most of its fields but settings of losses, and of each union one."""
    message = GetMessageClass(descriptor)()
    chosen = {
        union: draw(st.sampled_from([union.fields[0]] * 3 + list(union.fields))) for union in descriptor.oneofs
    }
    for field in descriptor.fields:
        is_rare = draw(st.integers(0, 7)) == 7
        if (
            is_rare != field.name.startswith("loss_fn_config")
            or chosen.get(field.containing_oneof, field) is not field
        ):
            continue
        place = getattr(message, field.name)
        is_known = field.name in _KNOWN and draw(st.integers(0, 7)) < 7
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            entry = field.message_type.fields_by_name["value"]
            for name in draw(st.lists(_NAMES, max_size=1 if entry.message_type is None else 3)):
                value = draw_value(draw, entry)
                if entry.message_type is None:
                    place[name] = value
                else:
                    place[name].CopyFrom(value)
        elif field.is_repeated:
            length = draw(st.integers(0, 2))
            place.extend(draw(_KNOWN[field.name]) if is_known else [draw_value(draw, field) for _ in range(length)])
        elif field.message_type is not None:
            place.CopyFrom(draw_value(draw, field))
        else:
            setattr(message, field.name, draw(_KNOWN[field.name]) if is_known else draw_value(draw, field))
    return message


@given(data=st.data())
@settings(max_examples=100)
def test_random_messages(ada: User, place: Place, secrets: list[str], data: Any) -> None:
    """Messages of the protocol's descriptor. Those with a place in the order are answered."""
    message = make_message(place.model, 0)
    if data.draw(st.booleans()):
        message.data[0].MergeFrom(draw_message(data.draw, message.data[0].DESCRIPTOR))
    else:
        message = draw_message(data.draw, message.DESCRIPTOR)
    has_place = data.draw(st.integers(0, 9)) > 0
    if has_place:
        message.model_id, message.seq_id = place.model, place.seq_id
    elif data.draw(st.booleans()):
        message.model_id = data.draw(st.sampled_from(secrets))
    response = ada.send(message)
    require_answer(response, message.SerializeToString(), secrets)
    if has_place:
        place.require_result(ada, response)


_TEXTS = st.text(st.characters(exclude_categories=()), max_size=5) | st.sampled_from(
    ["x" * 300, "tinker://a/weights/b", "tinker://\ud800/weights/b"]
)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _TEXTS,
    lambda each: st.lists(each, max_size=3) | st.dictionaries(_TEXTS, each, max_size=3),
    max_leaves=5,
)
_BODIES = {
    "client/config": types.ClientConfigRequest,
    "create_session": types.CreateSessionRequest,
    "session_heartbeat": types.SessionHeartbeatRequest,
    "create_model": types.CreateModelRequest,
    "get_info": types.GetInfoRequest,
    "optim_step": types.OptimStepRequest,
    "retrieve_future": types.FutureRetrieveRequest,
    "save_weights": types.SaveWeightsRequest,
    "load_weights": types.LoadWeightsRequest,
    "save_weights_for_sampler": types.SaveWeightsForSamplerRequest,
    "create_sampling_session": types.CreateSamplingSessionRequest,
    "asample": types.SampleRequest,
    "weights_info": None,
    "unload_model": types.UnloadModelRequest,
    "telemetry": None,
}
"""Paths, and the client's own classes of their bodies."""


def draw_json(draw: Any, schema: Any, whole: Any, ids: list[str]) -> Any:
    """Draw a value of a JSON schema, of which each part may be anything else.

    This server has no OpenAPI document, which schemathesis needs: the client's classes are its only schema.
    """
    if not draw(st.integers(0, 7)):
        return draw(_JSON)
    if "$ref" in schema:
        return draw_json(draw, whole["$defs"][schema["$ref"].rpartition("/")[2]], whole, ids)
    for union in ("anyOf", "oneOf"):
        if union in schema:
            return draw_json(draw, draw(st.sampled_from(schema[union])), whole, ids)
    if "const" in schema or "enum" in schema:
        return draw(st.sampled_from(schema.get("enum", [schema.get("const")])))
    match schema.get("type"):
        case "object" if "properties" in schema:
            names = [name for name in schema["properties"] if draw(st.integers(0, 3))]
            return {name: draw_json(draw, schema["properties"][name], whole, ids) for name in names}
        case "array":
            items = schema.get("items", {})
            return [draw_json(draw, items, whole, ids) for _ in range(draw(st.integers(0, 3)))]
        case "integer":
            return draw(st.integers(-1, 5) | st.integers())
        case "number":
            return draw(st.floats(0, 2) | st.floats())
        case "boolean":
            return draw(st.booleans())
        case "string":
            return draw(st.sampled_from(ids) | _TEXTS)
    return draw(_JSON)


_ORDERED = ("optim_step", "save_weights", "load_weights", "save_weights_for_sampler")


@given(data=st.data())
@settings(max_examples=200)
def test_random_json(ada: User, place: Place, others: list[str], secrets: list[str], data: Any) -> None:
    path = data.draw(st.sampled_from(sorted(_BODIES)))
    kind = _BODIES[path]
    schema = {"type": "object", "properties": {"tinker_path": {"type": "string"}}}
    if kind is not None:
        schema = kind.model_json_schema()
    body = draw_json(data.draw, schema, schema, others + secrets)
    has_place = path in _ORDERED and isinstance(body, dict) and data.draw(st.booleans())
    if has_place:
        body |= {"model_id": place.model, "seq_id": place.seq_id}
    content = json.dumps(body).encode()
    response = ada.http.post(f"/api/v1/{path}", content=content)
    require_answer(response, content, secrets)
    if has_place:
        place.require_result(ada, response)


@pytest.fixture(scope="module")
def others(ada: User) -> list[str]:
    """Values that requests have: of models and sessions that a request may end, and names."""
    other = User(str(ada.http.base_url), ada.http.headers["x-api-key"])
    return [other.session, other.create(), "base", "0.38.0"]


@given(words=st.lists(_TEXTS, min_size=1, max_size=3))
@settings(max_examples=100)
def test_random_paths(ada: User, secrets: list[str], words: list[str]) -> None:
    quoted = [quote(word.encode("utf-8", "surrogatepass"), safe="") or "-" for word in [*words, "x", "x"]]
    for method, path in (
        ("GET", f"samplers/{quoted[0]}"),
        ("GET", f"training_runs/{quoted[0]}"),
        ("GET", f"training_runs/{quoted[0]}/checkpoints?limit={quoted[1]}&offset={quoted[2]}"),
        ("DELETE", f"training_runs/{quoted[0]}/checkpoints/{quoted[1]}/{quoted[2]}"),
        ("DELETE", f"training_runs/{quoted[0]}/checkpoints/weights/{quoted[1]}"),
        ("POST", f"sessions/{quoted[0]}/finish"),
    ):
        require_answer(ada.http.request(method, f"/api/v1/{path}"), path.encode(), secrets)
