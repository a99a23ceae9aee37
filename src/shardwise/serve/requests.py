"""Bodies of requests as operations. What cannot be carried out is a :class:`ConfigError` with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import pydantic
import torch
from tinker import types

from shardwise.bank.rows import IGNORED
from shardwise.core.errors import ConfigError
from shardwise.serve.keys import describe_faults
from shardwise.serve.operations import Generate, OptimStep, Pass, SampleAnswer
from shardwise.serve.service import QueuedRequest, Sampler

Body = TypeVar("Body", bound=pydantic.BaseModel)

_MAX_SAMPLES, _MAX_TOP = 1024, 100


@dataclass(frozen=True, slots=True)
class ServedBase:
    """The base: tokens of its vocabulary, the longest row of this server in tokens, and the name of its class."""

    vocab_size: int
    max_length: int
    arch: str


def parse(kind: type[Body], values: Mapping[str, Any]) -> Body:
    """Return a body. Raise ConfigError if it is invalid."""
    try:
        return kind.model_validate(values)
    except pydantic.ValidationError as error:
        raise ConfigError(describe_faults(error)) from error


def read_step(request_id: str, values: Mapping[str, Any]) -> OptimStep:
    """Return a step of AdamW with the settings of the request."""
    body = parse(types.OptimStepRequest, values)
    params = body.optim_params
    if not isinstance(params, types.AdamParams):
        raise ConfigError(f"optim_params: {params.type!r} is not served. Use AdamParams")
    for name in ("learning_rate", "eps", "weight_decay", "grad_clip_norm"):
        if not 0 <= (value := getattr(params, name)) < float("inf"):
            raise ConfigError(f"{name}={value}: is not a finite number of 0 or more")
    betas = params.beta1, params.beta2
    if not all(0 <= beta < 1 for beta in betas):
        raise ConfigError(f"beta1, beta2: {betas} are not at least 0 and below 1")
    settings = {"lr": params.learning_rate, "betas": betas, "eps": params.eps, "weight_decay": params.weight_decay}
    return OptimStep(request_id, body.model_id, {**settings, "max_grad_norm": params.grad_clip_norm})


def read_sample(
    request: QueuedRequest, sampler: Sampler, values: Mapping[str, Any], base: ServedBase, *, has_vllm: bool
) -> None:
    """Set the operation of a sample. A prompt that is scored alone is a pass, and runs with those of models."""
    body = parse(types.SampleRequest, values)
    for name in ("topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k"):
        if getattr(body, name):
            raise ConfigError(f"{name}: is not served. Leave it out")
    params, prompt = body.sampling_params, _read_prompt(body.prompt)
    if not prompt or min(prompt) < 0 or max(prompt) >= base.vocab_size:
        raise ConfigError(f"prompt: is empty, or has tokens outside of the model's {base.vocab_size}")
    max_tokens = max(base.max_length - len(prompt), 0) if params.max_tokens is None else params.max_tokens
    if max_tokens < 0 or len(prompt) + max_tokens > base.max_length:
        raise ConfigError(
            f"prompt of {len(prompt)} tokens and max_tokens={max_tokens}: this server takes up to "
            f"{base.max_length} in all, by the length of the model or --max-tokens-per-pass. Ask for fewer"
        )
    if not 1 <= body.num_samples <= _MAX_SAMPLES:
        raise ConfigError(f"num_samples={body.num_samples}: is not 1 to {_MAX_SAMPLES}")
    if not (params.temperature >= 0 and 0 < params.top_p <= 1 and params.top_k >= -1):
        raise ConfigError("sampling_params: temperature is at least 0, top_k at least -1, and 0 < top_p <= 1")
    num_top, max_top = body.topk_prompt_logprobs, min(base.vocab_size, _MAX_TOP)
    if not 0 <= num_top <= max_top:
        raise ConfigError(f"topk_prompt_logprobs={num_top}: is not 0 to {max_top}")
    last_n = body.prompt_logprobs_last_n
    if last_n is not None and not 1 <= last_n < len(prompt):
        raise ConfigError(f"prompt_logprobs_last_n={last_n}: the prompt has {len(prompt)} tokens")
    stop = [params.stop] if isinstance(params.stop, str) else params.stop
    stops = tuple(each for each in stop or () if isinstance(each, str))
    request.answer = SampleAnswer(body.num_samples, bool(body.prompt_logprobs), last_n, stops)
    if max_tokens <= 1 and body.prompt_logprobs and not num_top and sampler.folder is None and not has_vllm:
        ids = torch.tensor(prompt)
        row = {"input_ids": ids, "targets": torch.cat([ids[1:], ids.new_tensor([IGNORED])])}
        request.operation = Pass(request.request_id, sampler.name, (row,))
        return
    settings = {
        "n": body.num_samples,
        "max_tokens": max_tokens,
        "temperature": params.temperature,
        "top_k": min(max(params.top_k, 0), base.vocab_size),
        "top_p": params.top_p,
        "stop": None if stop is None else [each for each in stop if not isinstance(each, str)],
        "seed": None if params.seed is None else params.seed % (1 << 62),
        "prompt_logprobs": bool(body.prompt_logprobs),
        "top_prompt_logprobs": num_top,
    }
    request.operation = Generate(request.request_id, sampler.name, sampler.folder, tuple(prompt), settings)


def _read_prompt(prompt: Any) -> list[int]:
    tokens: list[int] = []
    for chunk in prompt.chunks:
        if not isinstance(chunk, types.EncodedTextChunk):
            raise ConfigError("prompt: has an image or sound. This server has models of text alone")
        tokens += chunk.tokens
    return tokens
