"""Users of a server, without the client: calls as JSON, and a message of one row."""

from __future__ import annotations

import json
import time
from array import array
from typing import TYPE_CHECKING, Any

import httpx
from tests.support.local_ranks import LIMIT_S
from tinker.proto import tinker_public_pb2 as protobuf

if TYPE_CHECKING:
    from tests.serve.conftest import Served


class User:
    """A connection with a user's key."""

    def __init__(self, url: str, key: str) -> None:
        self.http = httpx.Client(base_url=url, headers={"x-api-key": key}, timeout=LIMIT_S)
        self.session = self.post("create_session", tags=[], user_metadata=None, sdk_version="0.38.0")["session_id"]
        self.num_models = 0

    def call(self, path: str, /, **body: Any) -> httpx.Response:
        return self.http.post(f"/api/v1/{path}", content=json.dumps(body))

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
        deadline_s = time.monotonic() + LIMIT_S
        while True:
            response = self.call("retrieve_future", request_id=promise["request_id"])
            if response.status_code != 408:
                break
            assert time.monotonic() < deadline_s, "there is no result"
        assert response.status_code == 200, response.text
        is_json = response.headers["content-type"] == "application/json"
        return response.json() if is_json else response.content

    def finish(self, served: Served) -> None:
        """End the session, and wait until its models are saved and removed.

        For a save the server builds a model on meta. transformers does that by settings of the whole process, so no
        other thread may build one at that time.
        """
        self.post(f"sessions/{self.session}/finish")
        self.http.close()
        deadline_s = time.monotonic() + LIMIT_S
        while any(name.startswith(self.session) for name in served.bank.names):
            assert time.monotonic() < deadline_s, "its models stay"
            time.sleep(0.05)

    def send(self, message: Any, **headers: str) -> httpx.Response:
        data = message if isinstance(message, bytes) else message.SerializeToString()
        return self.http.post("/api/v1/forward_backward", content=data, headers=headers)


def make_message(model_id: str, seq_id: int, tokens: tuple[int, ...] = (1, 2, 3)) -> Any:
    message = protobuf.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = array("i", tokens).tobytes()
    target = datum.loss_fn_inputs["target_tokens"]
    target.dtype, target.dense = protobuf.DTYPE_INT64, array("q", tokens).tobytes()
    target.shape.extend([len(tokens)])
    return message
