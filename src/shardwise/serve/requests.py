"""Bodies of requests as operations. What cannot be carried out is a :class:`ConfigError` with the reason."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import pydantic
from tinker import types

from shardwise.bank.rows import make_scored_row
from shardwise.bank.sampling import Sample, require_sample
from shardwise.core.errors import ConfigError
from shardwise.serve.keys import describe_faults
from shardwise.serve.operations import Generate, OptimStep, Pass, SampleAnswer
from shardwise.serve.records import QueuedRequest, Sampler

Body = TypeVar("Body", bound=pydantic.BaseModel)

_MAX_SAMPLES, _MAX_TOP = 1024, 100

_MAX_SETTING: Final = 1e15
"""Of a step. Products of two, and quotients by 1 - beta, are within float32, above which the step would fail."""


@dataclass(frozen=True, slots=True)
class ServedBase:
    """The base: tokens of its vocabulary, the longest row and sample in tokens, and the name of its class."""

    vocab_size: int
    max_length: int
    max_sampled_length: int
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
    limits = {"learning_rate": _MAX_SETTING, "eps": _MAX_SETTING, "weight_decay": _MAX_SETTING}
    for name, most in {**limits, "grad_clip_norm": sys.float_info.max}.items():
        if not 0 <= (value := getattr(params, name)) <= most:
            raise ConfigError(f"{name}={value}: is not a number from 0 to {most:g}")
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
    stop = [params.stop] if isinstance(params.stop, str) else params.stop
    stops = tuple(each for each in stop or () if isinstance(each, str))
    if "" in stops:
        raise ConfigError('stop: "" is in every text. Leave it out')
    room = max(base.max_sampled_length - len(prompt), 0)
    sample = Sample(
        sampler.name,
        tuple(prompt),
        n=body.num_samples,
        max_tokens=room if params.max_tokens is None else params.max_tokens,
        temperature=params.temperature,
        top_k=0 if params.top_k == -1 else min(params.top_k, base.vocab_size),
        top_p=params.top_p,
        stop=None if stop is None else [each for each in stop if not isinstance(each, str)],
        # Below 2**62: vLLM takes seeds of 64 bits.
        seed=None if params.seed is None else params.seed % (1 << 62),
        prompt_logprobs=bool(body.prompt_logprobs),
        top_prompt_logprobs=body.topk_prompt_logprobs,
    )
    require_sample("the sample", sample, vocab_size=base.vocab_size, longest=base.max_sampled_length)
    for name, value, most in (
        ("num_samples", sample.n, _MAX_SAMPLES),
        ("topk_prompt_logprobs", sample.top_prompt_logprobs, _MAX_TOP),
    ):
        if value > most:
            raise ConfigError(f"{name}={value}: this server takes up to {most}. Ask for fewer")
    last_n = body.prompt_logprobs_last_n
    if last_n is not None and not 1 <= last_n < len(prompt):
        raise ConfigError(f"prompt_logprobs_last_n={last_n}: the prompt has {len(prompt)} tokens")
    request.answer = SampleAnswer(sample.n, sample.prompt_logprobs, last_n, stops)
    is_score = sample.max_tokens <= 1 and sample.prompt_logprobs and not sample.top_prompt_logprobs
    if is_score and sampler.folder is None and not has_vllm:
        request.operation = Pass(request.request_id, sampler.name, (make_scored_row(prompt),))
        return
    request.operation = Generate(request.request_id, sample, sampler.folder, sampler.save_id, stops)


def _read_prompt(prompt: Any) -> list[int]:
    tokens: list[int] = []
    for chunk in prompt.chunks:
        if not isinstance(chunk, types.EncodedTextChunk):
            raise ConfigError("prompt: has an image or sound. This server has models of text alone")
        tokens += chunk.tokens
    return tokens
