"""Clients as tasks of one process: ``python -m tests.serve.many_clients URL KEYS ROUNDS STOP``.

KEYS are words with a comma in between. Each client trains a model of its own by ROUNDS passes and steps, and asks
for both results. The process prints each session, and "half" when a client has had STOP rounds, which then waits.
"""

import asyncio
import sys
from typing import Any

import httpx
from tests.serve.users import make_message
from tests.support.local_ranks import LIMIT_S

RANKS = (1, 2, 4, 8)


async def retrieve(http: httpx.AsyncClient, promise: httpx.Response) -> httpx.Response:
    assert promise.status_code == 200, promise.text
    while True:
        answer = await http.post("/api/v1/retrieve_future", json=promise.json())
        if answer.status_code != 408:
            assert answer.status_code == 200, answer.text
            is_failed = answer.headers["content-type"] == "application/json" and "error" in answer.json()
            assert not is_failed, answer.text
            return answer


async def train(number: int, http: httpx.AsyncClient, num_rounds: int, stop: int) -> None:
    async def post(path: str, **body: Any) -> httpx.Response:
        return await http.post(f"/api/v1/{path}", json=body)

    opened = await post("create_session", tags=[], user_metadata=None, sdk_version="0.38.0")
    session = opened.json()["session_id"]
    lora = {"rank": RANKS[number % len(RANKS)], "seed": number}
    body = {"session_id": session, "model_seq_id": 1, "base_model": "base", "lora_config": lora}
    model = (await retrieve(http, await post("create_model", **body))).json()["model_id"]
    print(session, flush=True)
    for each in range(num_rounds):
        if each == stop:
            print("half", flush=True)
            await asyncio.Event().wait()
        tokens = tuple((number + each + place) % 90 for place in range(4 + number % 5))
        data = make_message(model, 2 * each + 1, tokens).SerializeToString()
        # Both are sent before either is done, in any order.
        step = {"model_id": model, "seq_id": 2 * each + 2, "adam_params": {"learning_rate": 1e-3}}
        promises = await asyncio.gather(
            http.post("/api/v1/forward_backward", content=data), post("optim_step", **step)
        )
        for promise in promises:
            await retrieve(http, promise)


async def run_all(url: str, keys: list[str], num_rounds: int, stop: int) -> None:
    async with asyncio.TaskGroup() as tasks:
        for number, key in enumerate(keys):
            http = httpx.AsyncClient(base_url=url, headers={"x-api-key": key}, timeout=LIMIT_S)
            tasks.create_task(train(number, http, num_rounds, stop))


if __name__ == "__main__":
    asyncio.run(run_all(sys.argv[1], sys.argv[2].split(","), int(sys.argv[3]), int(sys.argv[4])))
