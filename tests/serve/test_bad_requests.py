"""Requests that a server must refuse, as bytes and JSON: nothing of another user, no hang, no status above 499."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.serve.conftest import VOCAB_SIZE, Served
from tinker.proto import tinker_public_pb2 as protobuf

from shardwise.serve import messages


class User:
    """A connection with a user's key."""

    def __init__(self, url: str, key: str) -> None:
        self.http = httpx.Client(base_url=url, headers={"x-api-key": key}, timeout=20)
        self.session = self.post("create_session", tags=[], user_metadata=None, sdk_version="0.38.0")["session_id"]
        self.num_models = 0

    def call(self, path: str, /, **body: Any) -> httpx.Response:
        return self.http.post(f"/api/v1/{path}", json=body)

    def post(self, path: str, /, **body: Any) -> Any:
        response = self.call(path, **body)
        assert response.status_code == 200, response.text
        return response.json()

    def create(self, rank: int = 4) -> str:
        """Return the id of a new model."""
        self.num_models += 1
        promise = self.post(
            "create_model",
            session_id=self.session,
            model_seq_id=self.num_models,
            base_model="base",
            lora_config={"rank": rank},
        )
        return str(self.retrieve(promise)["model_id"])

    def retrieve(self, promise: Any) -> Any:
        """Return a result as JSON, or as bytes."""
        for _ in range(40):
            response = self.call("retrieve_future", request_id=promise["request_id"])
            if response.status_code == 408:
                continue
            assert response.status_code == 200, response.text
            is_json = response.headers["content-type"] == "application/json"
            return response.json() if is_json else response.content
        raise AssertionError("there is no result")

    def send(self, message: Any, **headers: str) -> httpx.Response:
        data = message if isinstance(message, bytes) else message.SerializeToString()
        return self.http.post("/api/v1/forward_backward", content=data, headers=headers)


@pytest.fixture(scope="module")
def ada(served: Served) -> Iterator[User]:
    user = User(served.url, served.keys["ada"])
    yield user
    user.post(f"sessions/{user.session}/finish")
    user.http.close()


@pytest.fixture(scope="module")
def bo(served: Served) -> Iterator[User]:
    user = User(served.url, served.keys["bo"])
    yield user
    user.http.close()


def make_message(model_id: str, seq_id: int, tokens: tuple[int, ...] = (1, 2, 3)) -> Any:
    message = protobuf.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = torch.tensor(tokens, dtype=torch.int32).numpy().tobytes()
    target = datum.loss_fn_inputs["target_tokens"]
    target.dtype, target.dense = protobuf.DTYPE_INT64, torch.tensor(tokens).numpy().tobytes()
    target.shape.extend([len(tokens)])
    return message


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


@pytest.mark.parametrize("version", ["0.37.9", "0.40.0", "nonsense", ""])
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


@pytest.mark.parametrize("name", ["../../../escape", "/etc/escape", "..", ".hidden", "a\\b", "%2e%2e%2f", "é" * 30])
def test_names_stay_in_their_folder(served: Served, ada: User, name: str) -> None:
    model = ada.create()
    path = ada.retrieve(ada.post("save_weights", model_id=model, seq_id=1, path=name))["path"]
    listed = ada.http.get(f"/api/v1/training_runs/{model}/checkpoints").json()["checkpoints"]
    assert [each["tinker_path"] for each in listed] == [path]
    assert not list(served.state.parent.rglob("escape"))
    ada.post("unload_model", model_id=model)


@pytest.mark.parametrize("name", ["", "x" * 300, "line\nbreak", "nul\0"])
def test_names_that_no_folder_can_have(ada: User, name: str) -> None:
    model = ada.create()
    body = {"model_id": model, "seq_id": 1, "path": name or "\t"}
    assert ada.retrieve(ada.post("save_weights", **body))["category"] == "user"
    ada.post("unload_model", model_id=model)


def test_bodies_that_are_too_large_or_none(ada: User) -> None:
    bomb = zstandard.compress(bytes(50 * messages.MAX_BODY_BYTES))
    assert len(bomb) < 100_000
    assert ada.send(bomb, **{"content-encoding": "zstd"}).status_code == 413
    assert ada.send(bytes(messages.MAX_BODY_BYTES + 1)).status_code == 413
    assert ada.send(b"nonsense", **{"content-encoding": "zstd"}).status_code == 400
    assert ada.send(b"nonsense", **{"content-encoding": "br"}).status_code == 400
    assert ada.send(b"\xff\xff\xff").status_code == 400
    for body in (b"", b"[]", b"{", b"[" * 100_000, b"\xff"):
        assert ada.http.post("/api/v1/optim_step", content=body).status_code == 400


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

    def with_sparse(begins: list[int], columns: list[int]) -> Any:
        message = change(make_message(model, 0), shape=[3, 2])
        sparse = message.data[0].loss_fn_inputs["target_tokens"].sparse_csr
        sparse.values = torch.tensor([1] * len(columns)).numpy().tobytes()
        sparse.crow_indices = torch.tensor(begins).numpy().tobytes()
        sparse.col_indices = torch.tensor(columns).numpy().tobytes()
        return message

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


def test_a_snapshot_that_is_gone_fails_its_own_score_alone(ada: User) -> None:
    model = ada.create()
    samplers = []
    for seq_id in range(1, 7):  # of which the last four are kept
        copy = ada.post("save_weights_for_sampler", model_id=model, seq_id=seq_id, sampling_session_seq_id=seq_id)
        samplers.append(ada.retrieve(copy)["sampling_session_id"])
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
    body = {"prompt": prompt, "prompt_logprobs": True, "sampling_params": {"max_tokens": 1}}
    # The pass waits for its turn behind the gap, so that it is in one turn with the score.
    passed = ada.send(make_message(model, 8)).json()
    gone = ada.post("asample", sampling_session_id=samplers[0], seq_id=0, **body)
    first = ada.send(make_message(model, 7)).json()
    assert "is gone" in ada.retrieve(gone)["error"]
    assert isinstance(ada.retrieve(first), bytes)
    assert isinstance(ada.retrieve(passed), bytes)
    assert isinstance(ada.retrieve(ada.post("asample", sampling_session_id=samplers[5], seq_id=0, **body)), bytes)
    ada.post("unload_model", model_id=model)


def test_limits_are_refused_before_their_place_counts(served: Served) -> None:
    user = User(served.url, served.keys["cy"])
    model = user.create()
    body = {"session_id": user.session, "model_seq_id": 7, "base_model": "base", "lora_config": {"rank": 2}}
    refused = user.call("create_model", **body)
    assert (refused.status_code, "max_models" in refused.text) == (429, True)
    promises = [user.send(make_message(model, seq_id)) for seq_id in (2, 3, 4)]
    assert [each.status_code for each in promises] == [200] * 3
    refused = user.send(make_message(model, 5))
    assert (refused.status_code, "max_requests" in refused.text) == (429, True)
    user.http.close()


@given(data=st.binary(max_size=200))
@settings(max_examples=50)
def test_random_bytes(ada: User, data: bytes) -> None:
    assert ada.send(data).status_code < 500
    assert ada.http.post("/api/v1/asample", content=data).status_code < 500


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=5), each, max_size=3),
    max_leaves=5,
)
_PATHS = [
    "client/config",
    "create_session",
    "session_heartbeat",
    "create_model",
    "get_info",
    "optim_step",
    "retrieve_future",
    "save_weights",
    "load_weights",
    "save_weights_for_sampler",
    "create_sampling_session",
    "asample",
    "weights_info",
    "unload_model",
]
_FIELDS = [
    "model_id",
    "seq_id",
    "session_id",
    "model_seq_id",
    "path",
    "optimizer",
    "base_model",
    "lora_config",
    "adam_params",
    "prompt",
    "sampling_params",
    "sampling_session_id",
    "num_samples",
    "tinker_path",
    "request_id",
    "sdk_version",
    "ttl_seconds",
]


@given(path=st.sampled_from(_PATHS), body=st.dictionaries(st.sampled_from(_FIELDS), _JSON, max_size=6))
@settings(max_examples=100)
def test_random_json(ada: User, path: str, body: dict[str, Any]) -> None:
    content = json.dumps({"session_id": ada.session, **body})
    assert ada.http.post(f"/api/v1/{path}", content=content).status_code < 500
