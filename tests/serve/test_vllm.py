"""Samples by a stand-in of a vLLM server, which refuses fields that vLLM's requests do not have."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import tinker
from tests.serve.conftest import Served, make_base, serving
from tests.support.local_ranks import LIMIT_S
from tinker import types

from shardwise.bank.sampling import Sample
from shardwise.core.errors import ConfigError
from shardwise.serve import app, checkpoints, run
from shardwise.serve.operations import Generate
from shardwise.serve.records import Settings
from shardwise.serve.vllm import VllmClient, read_max_length

# What vLLM takes from the base's generation config otherwise.
NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0}

# Of vLLM 0.11 and later: vllm/entrypoints/openai, CompletionRequest and LoadLoRAAdapterRequest.
FIELDS = {
    "/v1/completions": {
        *("model", "prompt", "n", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop_token_ids"),
        *("stop", "include_stop_str_in_output"),
        *("ignore_eos", "logprobs", "prompt_logprobs", "return_token_ids", "skip_special_tokens"),
        *NEUTRAL,
    },
    "/v1/load_lora_adapter": {"lora_name", "lora_path"},
    "/v1/unload_lora_adapter": {"lora_name"},
}


class StandIn(BaseHTTPRequestHandler):
    """Continues each prompt with its last token, plus 1, 2, ..."""

    requests: list[tuple[str, dict[str, Any]]] = []  # noqa: RUF012
    adapters: set[str] = set()  # noqa: RUF012
    url = ""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.requests.append((self.path, body))
        if set(body) - FIELDS[self.path]:
            self.answer(400, {"error": f"unknown {set(body) - FIELDS[self.path]}"})
        elif self.path == "/v1/load_lora_adapter":
            is_there = Path(body["lora_path"], "adapter_config.json").is_file()
            if body["lora_name"] in self.adapters:
                self.answer(400, {"error": "has already been loaded"})
                return
            if is_there:
                self.adapters.add(body["lora_name"])
            self.answer(200 if is_there else 404, {})
        elif self.path == "/v1/unload_lora_adapter":
            self.answer(200 if body["lora_name"] in self.adapters else 404, {})
            self.adapters.discard(body["lora_name"])
        elif body["max_tokens"] < 1:
            self.answer(400, {"error": "max_tokens must be at least 1"})
        elif body["n"] > 1 and not body["temperature"]:
            self.answer(400, {"error": "n must be 1 when using greedy sampling"})
        elif body["model"] not in {*self.adapters, "base"}:
            self.answer(404, {"error": "no such model"})
        else:
            tokens = [body["prompt"][-1] + number + 1 for number in range(body["max_tokens"])]
            choice = {
                "finish_reason": "length",
                "token_ids": tokens,
                "logprobs": {"token_logprobs": [-0.5] * len(tokens)},
            }
            if "prompt_logprobs" in body:
                entries = [{str(token): {"logprob": -float(token)}} for token in body["prompt"][1:]]
                choice["prompt_logprobs"] = [None, *entries]
            self.answer(200, {"choices": [choice] * body["n"]})

    def do_GET(self) -> None:
        models = [{"id": "shardwise-1", "max_model_len": None}, {"id": "base", "max_model_len": 100}]
        self.answer(200, {"data": models})

    def answer(self, status: int, body: dict[str, Any] | bytes) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_args: Any) -> None:
        """Nothing."""


@pytest.fixture
def vllm(served: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[StandIn]]:
    monkeypatch.setattr(ThreadingHTTPServer, "request_queue_size", 128)
    with ThreadingHTTPServer(("127.0.0.1", 0), StandIn) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        StandIn.requests.clear()
        StandIn.adapters.clear()
        StandIn.url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(served.server._service, "vllm", VllmClient(StandIn.url, "base"))
        yield StandIn
        server.shutdown()


def test_snapshots_are_sampled_by_vllm(served: Served, vllm: type[StandIn]) -> None:
    client = tinker.ServiceClient(base_url=served.url, api_key=served.keys["ada"])
    model = client.create_lora_training_client("base", rank=2).result()
    model.save_weights_for_sampler("snapshot-2").result()
    sampler = model.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints([3, 4, 5])
    for _ in range(2):
        output = sampler.sample(prompt, 2, types.SamplingParams(max_tokens=3, seed=1, stop=[9])).result()
        assert [list(each.tokens) for each in output.sequences] == [[6, 7, 8]] * 2
    assert sampler.compute_logprobs(prompt).result() == [None, -4.0, -5.0]
    one = types.ModelInput.from_ints([3])
    scores = sampler.sample(one, 1, types.SamplingParams(max_tokens=1), topk_prompt_logprobs=2).result()
    assert scores.topk_prompt_logprobs == [None]
    paths = [path for path, _ in vllm.requests]
    assert paths == ["/v1/load_lora_adapter", *["/v1/completions"] * 4], "an adapter is loaded once"
    assert not vllm.requests[0][1]["lora_path"].endswith("/snapshot-2"), "it is that of the user"
    assert vllm.requests[1][1]["stop_token_ids"] == [9]
    assert vllm.requests[1][1]["ignore_eos"] is True
    assert {name: vllm.requests[1][1].get(name) for name in NEUTRAL} == NEUTRAL
    output = sampler.sample(prompt, 2, types.SamplingParams(max_tokens=0)).result()
    assert [(list(each.tokens), each.stop_reason) for each in output.sequences] == [([], "length")] * 2
    one_token = types.SamplingParams(max_tokens=1)
    paths, both = [], []
    for _ in range(2):  # under one name, and so in one folder
        paths.append(model.save_weights_for_sampler("latest").result().path)
        both.append(client.create_sampling_client(paths[-1]).result())
        both[-1].sample(prompt, 1, one_token).result()
    assert len({body["lora_name"] for path, body in vllm.requests if "lora_name" in body}) == 3
    # vLLM may have forgotten the first one, and would read the second from its folder.
    with pytest.raises(tinker.RequestFailedError, match="'latest': was saved again since"):
        both[0].sample(prompt, 1, one_token).result()
    run = paths[1].removeprefix("tinker://").replace("/", "/checkpoints/", 1)
    headers = {"x-api-key": served.keys["ada"]}
    httpx.delete(f"{served.url}/api/v1/training_runs/{run}", headers=headers).raise_for_status()
    with pytest.raises(tinker.RequestFailedError, match="was deleted"):
        both[1].sample(prompt, 1, one_token).result()
    assert len({body["lora_name"] for path, body in vllm.requests if "lora_name" in body}) == 3
    output = sampler.sample(prompt, 2, types.SamplingParams(max_tokens=1, temperature=0.0)).result()
    assert [list(each.tokens) for each in output.sequences] == [[6]] * 2
    base = client.create_sampling_client(base_model="base").result()
    base.sample(prompt, 1, types.SamplingParams(max_tokens=1)).result()
    assert vllm.requests[-1][1]["model"] == "base"


def test_samples_keep_to_the_length_of_vllm(vllm: type[StandIn], tmp_path: Path) -> None:
    settings = Settings("base", "base-tokenizer", retrieval_s=0.5)
    with serving(make_base(), tmp_path, settings, {"ada": {}}, vllm.url) as served:
        client = tinker.ServiceClient(base_url=served.url, api_key=served.keys["ada"])
        headers = {"x-api-key": served.keys["ada"]}
        capabilities = httpx.get(f"{served.url}/api/v1/get_server_capabilities", headers=headers).json()
        assert capabilities["supported_models"][0]["max_context_length"] == 100
        sampler = client.create_sampling_client(base_model="base").result()
        prompt = types.ModelInput.from_ints([3, 4, 5])
        assert len(sampler.sample(prompt, 1, types.SamplingParams()).result().sequences[0].tokens) == 97
        with pytest.raises(tinker.RequestFailedError, match="100"):
            sampler.sample(prompt, 1, types.SamplingParams(max_tokens=98)).result()
    assert read_max_length(vllm.url, "another") is None


@pytest.mark.parametrize("url", ["localhost:8001", "vllm", "http://", "http://vllm:80a", "http://vllm:8001/v1/"])
def test_a_url_that_is_not_of_vllm_is_refused_before_the_base_is_loaded(url: str) -> None:
    with ExitStack() as stack, pytest.raises(ConfigError, match=f"--vllm {url}: is not http://HOST:PORT"):
        run._open_server(run.ServeOptions("base", Settings("base", "base"), vllm=url), stack)


def test_texts_stop_samples_of_vllm(served: Served, vllm: type[StandIn], monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = SimpleNamespace(decode=lambda tokens: "".join(chr(64 + token) for token in tokens))
    monkeypatch.setattr(served.server._service, "tokenizer", tokenizer)
    client = tinker.ServiceClient(base_url=served.url, api_key=served.keys["ada"])
    sampler = client.create_sampling_client(base_model="base").result()
    params = types.SamplingParams(max_tokens=5, stop=["EF"])
    (sequence,) = sampler.sample(types.ModelInput.from_ints([3]), 1, params).result().sequences
    ((_, body),) = vllm.requests
    assert (body["stop"], body["include_stop_str_in_output"], body["ignore_eos"]) == (["EF"], True, True)
    assert (list(sequence.tokens), sequence.stop_reason) == ([4, 5, 6], "stop")


def test_a_snapshot_is_kept_while_it_is_used(
    served: Served, vllm: type[StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = tinker.ServiceClient(base_url=served.url, api_key=served.keys["ada"])
    model = client.create_lora_training_client("base", rank=2).result()
    files = f"snapshot-*{checkpoints._METADATA}"
    others = set(served.state.rglob(files))
    sampler = model.save_weights_and_get_sampling_client().result()
    store, prompt, now_s = served.server._service.store, types.ModelInput.from_ints([3]), time.time()
    clock = SimpleNamespace(time=lambda: now_s, monotonic=time.monotonic)
    monkeypatch.setattr(app, "time", clock)
    monkeypatch.setattr(checkpoints, "time", clock)

    def read_expiry() -> float | None:
        (snapshot,) = set(served.state.rglob(files)) - others
        return checkpoints.Checkpoint(**json.loads(snapshot.read_text())).expires_s

    writes = []
    for _ in range(4):
        now_s += 200
        assert len(sampler.sample(prompt, 1, types.SamplingParams(max_tokens=1)).result().sequences) == 1
        store.delete_expired()
        writes.append(read_expiry())
    assert len(set(writes)) == 3, "not at each use"
    now_s += 3500
    sampler.sample(prompt, 1, types.SamplingParams(max_tokens=1)).result()
    store.delete_expired()
    assert read_expiry() == now_s + 3600
    now_s += 3601
    store.delete_expired()
    with pytest.raises(tinker.RequestFailedError, match="its time is over. Save it again"):
        sampler.sample(prompt, 1, types.SamplingParams(max_tokens=1)).result()


def test_adapters_are_loaded_again_when_a_server_was_started_again(
    served: Served, vllm: type[StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = tinker.ServiceClient(base_url=served.url, api_key=served.keys["ada"])
    model = client.create_lora_training_client("base", rank=2).result()
    paths = [model.save_weights_for_sampler(name).result().path for name in ("first", "second")]
    first, second = (client.create_sampling_client(path).result() for path in paths)

    def sample(sampler: Any, num_loads: int) -> None:
        """Two requests at once, which load an adapter as often together."""
        vllm.requests.clear()
        params = types.SamplingParams(max_tokens=1)
        futures = [sampler.sample(types.ModelInput.from_ints([3]), 1, params) for _ in range(2)]
        assert [list(future.result().sequences[0].tokens) for future in futures] == [[4]] * 2
        assert [path for path, _ in vllm.requests].count("/v1/load_lora_adapter") == num_loads

    sample(first, 1)
    monkeypatch.setattr(served.server._service, "vllm", VllmClient(vllm.url, "base"))
    sample(first, 1)
    vllm.adapters.clear()
    sample(first, 1)
    sample(first, 0)
    monkeypatch.setattr("shardwise.serve.vllm._NUM_LOADED", 1)
    sample(second, 1)
    assert len(vllm.adapters) == 1, "the first was unloaded"
    sample(first, 1)
    both, post = threading.Barrier(2), StandIn.do_POST

    def wait_for_both(request: StandIn) -> None:
        if request.path == "/v1/load_lora_adapter":
            both.wait(LIMIT_S)
        post(request)

    vllm.adapters.clear()
    monkeypatch.setattr(served.server._service, "vllm", VllmClient(vllm.url, "base"))
    with monkeypatch.context() as patch:
        patch.setattr(StandIn, "do_POST", wait_for_both)
        params = types.SamplingParams(max_tokens=1)
        futures = [each.sample(types.ModelInput.from_ints([3]), 1, params) for each in (first, second)]
        assert [len(future.result(LIMIT_S).sequences) for future in futures] == [1, 1]
    third = client.create_sampling_client(model.save_weights_for_sampler("third").result().path).result()
    sample(third, 1)
    assert len(vllm.adapters) == 1, "those that were loaded at once were unloaded"


def test_all_samples_are_sent_at_once(vllm: type[StandIn], monkeypatch: pytest.MonkeyPatch) -> None:
    all_samples, post = threading.Barrier(101), StandIn.do_POST

    def wait_for_all(request: StandIn) -> None:
        all_samples.wait(LIMIT_S)
        post(request)

    monkeypatch.setattr(StandIn, "do_POST", wait_for_all)

    async def sample_all() -> int:
        client = VllmClient(vllm.url, "base")
        assert client._http.timeout.read is None, "a sample takes as long as those before it"
        operations = [Generate(str(number), Sample(None, (1,), max_tokens=1)) for number in range(101)]
        return len(await asyncio.gather(*(client.sample(operation) for operation in operations)))

    assert asyncio.run(sample_all()) == 101


def test_an_error_of_vllm_is_one_of_the_request(
    served: Served, vllm: type[StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FIELDS, "/v1/completions", {"model"})
    client = tinker.ServiceClient(base_url=served.url, api_key=served.keys["ada"])
    sampler = client.create_sampling_client(base_model="base").result()
    prompt, params = types.ModelInput.from_ints([3]), types.SamplingParams(max_tokens=1)
    with pytest.raises(tinker.RequestFailedError, match="vLLM: /v1/completions answered 400"):
        sampler.sample(prompt, 1, params).result()
    assert vllm.requests
    monkeypatch.setattr(StandIn, "do_POST", lambda each: each.answer(200, b"<html>of a proxy"))
    with pytest.raises(tinker.RequestFailedError, match="vLLM"):
        sampler.sample(prompt, 1, params).result(LIMIT_S)
    choice = {"finish_reason": "abort", "token_ids": [1], "logprobs": {"token_logprobs": [-0.5]}}
    monkeypatch.setattr(StandIn, "do_POST", lambda each: each.answer(200, {"choices": [choice]}))
    with pytest.raises(tinker.RequestFailedError, match="a sample has ended by 'abort'"):
        sampler.sample(prompt, 1, params).result(LIMIT_S)
