"""Samples by a vLLM server, which loads adapters from the folder of checkpoints.

vLLM must have been started with ``--enable-lora``, ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`` and the same base, and
must see the folder under the same path.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from typing import Any, Final

import httpx
import torch

from shardwise.bank.sampling import SampledSequence, SampleOutput
from shardwise.core.errors import ConfigError
from shardwise.serve.operations import Generate

_TIMEOUT_S: Final = 60.0
"""Of a connection. An answer has no limit: a sample waits in vLLM for those before it."""

_NUM_LOADED: Final = 256
"""Adapters that vLLM has at a time. The least recently used one is unloaded for a new one."""

_NEUTRAL: Final = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0}
"""What vLLM takes from the model's generation config where a request leaves it out."""

_log = logging.getLogger(__name__)


class VllmClient:
    """Samples from adapters in folders. Belongs to one event loop.

    Args:
        url: of the vLLM server.
        base: name of its base.
    """

    def __init__(self, url: str, base: str) -> None:
        # All samples at once: vLLM makes batches of them.
        timeout, limits = httpx.Timeout(_TIMEOUT_S, read=None, pool=None), httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits)
        self._base = base
        self._loading: dict[tuple[str, str | None], asyncio.Task[str]] = {}
        """Names of adapters in vLLM by folder and name here, the one used last at the end. A checkpoint that is
        saved again into its folder has another name here."""

    async def sample(self, operation: Generate) -> SampleOutput:
        """Return sequences of a prompt. Their log probabilities are those of vLLM.

        Raises:
            ConfigError: vLLM is not there, or refuses. The message has its reason.
        """
        sample = operation.sample
        # At temperature 0 all sequences are equal, and vLLM refuses to make several.
        num_copies = 1 if sample.temperature else sample.n
        body: dict[str, Any] = {
            "prompt": list(sample.prompt),
            "n": sample.n // num_copies,
            "temperature": sample.temperature,
            "top_p": sample.top_p,
            "seed": sample.seed,
            **_NEUTRAL,
            "max_tokens": max(sample.max_tokens, 1),
            "top_k": sample.top_k or -1,
            # None is the end of text of the model's generation config, which vLLM knows.
            "stop_token_ids": sample.stop or [],
            "ignore_eos": sample.stop is not None,
            "logprobs": 1,
            "return_token_ids": True,
            "skip_special_tokens": False,
        }
        if operation.stops:
            body |= {"stop": list(operation.stops), "include_stop_str_in_output": True}
        if sample.prompt_logprobs or sample.top_prompt_logprobs:
            body["prompt_logprobs"] = sample.top_prompt_logprobs
        response = await self._complete(operation, body)
        try:
            answer = response.json()
            answer["choices"] *= num_copies
            output = read_answer(answer, sample.prompt, sample.top_prompt_logprobs)
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(f"vLLM: its answer lacks {error}. Is it older than 0.11?") from error
        if sample.max_tokens == 0:  # vLLM samples at least one token
            output.sequences[:] = [SampledSequence() for _ in output.sequences]
        return output

    async def _complete(self, operation: Generate, body: dict[str, Any]) -> httpx.Response:
        """Post a request for completions. Load its adapter first, unless vLLM has it."""
        path = "/v1/completions"
        if operation.folder is None:
            return _require_success(await self._post(path, {**body, "model": self._base}))
        key = operation.folder, operation.sample.adapter
        loading = self._get_loading(key)
        response = await self._post(path, {**body, "model": await loading})
        if response.status_code == 404:  # vLLM was started again, or has unloaded the adapter
            # Another sample may have begun to load it again.
            if self._loading.get(key) is loading:
                del self._loading[key]
            response = await self._post(path, {**body, "model": await self._get_loading(key)})
        return _require_success(response)

    def _get_loading(self, key: tuple[str, str | None]) -> asyncio.Task[str]:
        """Return the load of an adapter, which may be done. Begin it if there is none, or it has failed."""
        loading = self._loading.pop(key, None)
        if loading is None or (loading.done() and loading.exception()):
            loading = asyncio.ensure_future(self._load(key[0]))
        self._loading[key] = loading
        return loading

    async def _load(self, folder: str) -> str:
        """Have vLLM load an adapter. Return its name there."""
        while len(self._loading) > _NUM_LOADED:
            loaded = [key for key, each in self._loading.items() if each.done()]
            if not loaded:
                break
            oldest = self._loading.pop(loaded[0])
            if not oldest.exception():
                await self._post("/v1/unload_lora_adapter", {"lora_name": oldest.result()})
        # A new name in each load: vLLM refuses one that it has, also from a server that was here before.
        name = f"shardwise-{secrets.token_hex(12)}"
        _require_success(await self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder}))
        return name

    async def _post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        try:
            return await self._http.post(path, json=body)
        except httpx.HTTPError as error:
            raise ConfigError(f"vLLM at {self._http.base_url}: {type(error).__name__}. Is it running?") from error


def require_url(url: str) -> None:
    """Raise ConfigError unless a URL may be that of a vLLM server."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL()  # has no scheme
    is_valid = parsed.scheme in ("http", "https") and parsed.host
    if not is_valid or parsed.path.rstrip("/").endswith("/v1"):
        raise ConfigError(f"--vllm {url}: is not http://HOST:PORT without /v1. Pass the address of the vLLM server")


def read_max_length(url: str, base: str) -> int | None:
    """Return the ``--max-model-len`` of a vLLM server, or None if it is not there, or does not tell."""
    try:
        models = httpx.get(f"{url.rstrip('/')}/v1/models", timeout=_TIMEOUT_S).json()["data"]
        return next(int(each["max_model_len"]) for each in models if each["id"] == base)
    except (httpx.HTTPError, KeyError, StopIteration, TypeError, ValueError):
        return None


def _require_success(response: httpx.Response) -> httpx.Response:
    """Return a response. Raise ConfigError if its status is not 200."""
    if response.status_code != 200:
        path = response.url.path
        # Its text may have the path of a folder, so it is in the log alone.
        _log.error("vLLM: %s answered %d, %s", path, response.status_code, response.text)
        raise ConfigError(f"vLLM: {path} answered {response.status_code}. The server's log has its reason")
    return response


def read_answer(answer: Any, prompt: Sequence[int], num_top: int) -> SampleOutput:
    """Return the output of vLLM's answer to a request for completions."""
    sequences = []
    for choice in answer["choices"]:
        reason = choice["finish_reason"]
        if reason not in ("stop", "length"):
            raise ConfigError(f"vLLM: a sample has ended by {reason!r}. Send it again")
        logprobs = list(map(float, choice["logprobs"]["token_logprobs"]))
        sequences.append(SampledSequence(list(choice["token_ids"]), logprobs, reason))
    of_prompt = answer["choices"][0].get("prompt_logprobs")
    if not of_prompt:
        return SampleOutput(sequences)
    # For each token but the first: log probabilities by token id, of the prompt's own token and of the top ones.
    own = torch.tensor(
        [entry[str(token)]["logprob"] for token, entry in zip(prompt[1:], of_prompt[1:], strict=True)]
    )
    if not num_top:
        return SampleOutput(sequences, own)
    tops = [
        sorted(((-float(each["logprob"]), int(token)) for token, each in entry.items()))[:num_top]
        for entry in of_prompt[1:]
    ]
    shape = (len(tops), num_top)  # also where there are none, after a prompt of one token
    ids = torch.tensor([[token for _, token in top] for top in tops], dtype=torch.int64).view(shape)
    values = torch.tensor([[-negative for negative, _ in top] for top in tops]).view(shape)
    return SampleOutput(sequences, own, (ids, values))
