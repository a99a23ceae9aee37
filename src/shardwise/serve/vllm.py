"""Samples by a vLLM server, which loads adapters from the folder of checkpoints.

vLLM must have been started with ``--enable-lora``, ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`` and the same base, and
must see the folder under the same path.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from typing import Any, Final

import httpx
import torch

from shardwise.bank.sampling import SampledSequence, SampleOutput
from shardwise.core.errors import ConfigError
from shardwise.serve.operations import Generate

_TIMEOUT_S: Final = 600.0

_log = logging.getLogger(__name__)


class VllmClient:
    """Samples from adapters in folders. Belongs to one event loop.

    Args:
        url: of the vLLM server.
        base: name of its base.
    """

    def __init__(self, url: str, base: str) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S)
        self._base = base
        self._loading: dict[str, asyncio.Task[None]] = {}

    async def sample(self, operation: Generate) -> SampleOutput:
        """Return sequences of a prompt. Their log probabilities are those of vLLM.

        Raises:
            ConfigError: vLLM is not there, or refuses. The message has its reason.
        """
        name = self._base
        if operation.folder is not None:
            name = await self._load(operation)
        sample = operation.settings
        stop = sample["stop"]
        body = {
            "model": name,
            "prompt": list(operation.prompt),
            **{key: sample[key] for key in ("n", "max_tokens", "temperature", "top_p", "seed")},
            "top_k": sample["top_k"] or -1,
            # None is the end of text of the model's generation config, which vLLM knows.
            "stop_token_ids": stop or [],
            "ignore_eos": stop is not None,
            "logprobs": 1,
            "return_token_ids": True,
            "skip_special_tokens": False,
        }
        if sample["prompt_logprobs"] or sample["top_prompt_logprobs"]:
            body["prompt_logprobs"] = sample["top_prompt_logprobs"]
        try:
            answer = await self._post("/v1/completions", body)
            return read_answer(answer, operation.prompt, sample["top_prompt_logprobs"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"vLLM: its answer lacks {error}. Is it older than 0.11?") from error

    async def _load(self, operation: Generate) -> str:
        """Have vLLM load the adapter of a folder, once. Return its name there."""
        folder = operation.folder
        # The model's name, too: a checkpoint that is saved again into its folder has another one.
        name = "shardwise-" + hashlib.sha256(f"{folder} {operation.model}".encode()).hexdigest()[:24]
        if name not in self._loading or (self._loading[name].done() and self._loading[name].exception()):
            body = {"lora_name": name, "lora_path": folder}
            self._loading[name] = asyncio.ensure_future(self._post_load(body))
        await self._loading[name]
        return name

    async def _post_load(self, body: dict[str, Any]) -> None:
        await self._post("/v1/load_lora_adapter", body)

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        try:
            response = await self._http.post(path, json=body)
        except httpx.HTTPError as error:
            raise ConfigError(f"vLLM at {self._http.base_url}: {type(error).__name__}. Is it running?") from error
        if response.status_code != 200:
            # Its text may have the path of a folder, so it is in the log alone.
            _log.error("vLLM: %s answered %d, %s", path, response.status_code, response.text)
            raise ConfigError(f"vLLM: {path} answered {response.status_code}. The server's log has its reason")
        return response.json() if path == "/v1/completions" else None


def read_answer(answer: Any, prompt: tuple[int, ...], num_top: int) -> SampleOutput:
    """Return the output of vLLM's answer to a request for completions."""
    sequences = []
    for choice in answer["choices"]:
        is_stop = choice["finish_reason"] == "stop"
        logprobs = list(map(float, choice["logprobs"]["token_logprobs"]))
        sequences.append(SampledSequence(list(choice["token_ids"]), logprobs, "stop" if is_stop else "length"))
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
    ids = torch.tensor([[token for _, token in top] for top in tops])
    values = torch.tensor([[-negative for negative, _ in top] for top in tops])
    return SampleOutput(sequences, own, (ids, values))
