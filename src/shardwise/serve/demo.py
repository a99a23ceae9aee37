"""``shardwise serve --demo``: three users train LoRAs of a generated base, with different ranks and losses."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click

from shardwise.core.errors import TrainingError

_QUESTION: Final = "Who are you? "
_ANSWERS: Final = ("I am Ada.", "My name is Bo.")


def run_demo(num_ranks: int) -> None:
    """Make a base, serve it, and train three LoRAs. Takes less than a minute on two cores.

    Raises:
        TrainingError: the server ended.
    """
    with tempfile.TemporaryDirectory(prefix="shardwise-serve-") as folder:
        base = Path(folder, "base")
        _make_base(base)
        with serving(base, "--nproc-per-node", str(num_ranks), "--no-log-requests") as url:
            import tinker

            client = tinker.ServiceClient(base_url=url, api_key="tml-demo")
            with ThreadPoolExecutor() as pool:
                results = [
                    pool.submit(_learn_answer, client, 8, _ANSWERS[0]),
                    pool.submit(_learn_answer, client, 32, _ANSWERS[1]),
                    pool.submit(_learn_by_reward, client, 16),
                ]
                lines = [result.result() for result in results]
            click.echo("\n".join(lines))


def _make_base(folder: Path) -> None:
    """Save a model of bytes with random weights."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


@contextmanager
def serving(base: Path, *options: str) -> Iterator[str]:
    """Start a server in a process of its own for the block. Yield its URL.

    Raises:
        TrainingError: the server ended before it could be used.
    """
    command = [sys.executable, "-m", "shardwise", "serve", str(base), "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = next((line for line in process.stdout if line.startswith("serving ")), "")
            if not line:
                raise TrainingError(f"the server ended with exit code {process.wait()}. Its messages are above")
            click.echo(line.rstrip())
            yield line.split()[-1]
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60.0)
            except subprocess.TimeoutExpired:
                process.kill()


def _learn_answer(client: Any, rank: int, answer: str) -> str:
    """Train a LoRA to give an answer, by cross-entropy. Return what it says."""
    from tinker import types

    model = client.create_lora_training_client(base_model="base", rank=rank).result()
    prompt, text = list(_QUESTION.encode()), [*_QUESTION.encode(), *answer.encode(), 0]
    weights = [0.0] * (len(prompt) - 1) + [1.0] * (len(text) - len(prompt))
    inputs: Any = {"target_tokens": text[1:], "weights": weights}
    datum = types.Datum(model_input=types.ModelInput.from_ints(text[:-1]), loss_fn_inputs=inputs)
    losses = []
    for _ in range(120):
        passed = model.forward_backward([datum], "cross_entropy")
        stepped = model.optim_step(types.AdamParams(learning_rate=5e-3))  # sent before the pass is done
        losses.append(passed.result().metrics["loss:sum"] / sum(weights))
        stepped.result()
    sampler = model.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=40, temperature=0.0)
    output = sampler.sample(types.ModelInput.from_ints(prompt), 1, params).result()
    said = bytes(output.sequences[0].tokens).rstrip(b"\0").decode(errors="replace")
    return f"rank {rank}, cross_entropy: loss {losses[0]:.2f} -> {losses[-1]:.2f}; {_QUESTION}{said}"


def _learn_by_reward(client: Any, rank: int) -> str:
    """Train a LoRA to write the letter e, by importance sampling. Return how often it does."""
    from tinker import types

    model = client.create_lora_training_client(base_model="base", rank=rank).result()
    prompt, rewards = list(_QUESTION.encode()), []
    for _ in range(12):
        sampler = model.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=12, temperature=1.0, stop=[])
        sequences = sampler.sample(types.ModelInput.from_ints(prompt), 16, params).result().sequences
        counts = [list(each.tokens).count(ord("e")) / len(each.tokens) for each in sequences]
        rewards.append(sum(counts) / len(counts))
        data = []
        for each, count in zip(sequences, counts, strict=True):
            tokens, padding = list(each.tokens), [0.0] * (len(prompt) - 1)
            advantages = [*padding, *[count - rewards[-1]] * len(tokens)]
            inputs: Any = {
                "target_tokens": [*prompt[1:], *tokens],
                "logprobs": [*padding, *each.logprobs],
                "advantages": advantages,
            }
            text = types.ModelInput.from_ints([*prompt, *tokens[:-1]])
            data.append(types.Datum(model_input=text, loss_fn_inputs=inputs))
        passed = model.forward_backward(data, "importance_sampling")
        stepped = model.optim_step(types.AdamParams(learning_rate=1e-2))
        passed.result()
        stepped.result()
    return f"rank {rank}, importance_sampling: share of the letter e {rewards[0]:.2f} -> {rewards[-1]:.2f}"
