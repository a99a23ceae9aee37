"""A training by shardwise, by hand and by accelerate: what the benchmarks of training put side by side."""

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.checkpoints import SHAPES, Shape
from benchmarks.place import own_device


def smaller(name: str, **changes: int) -> Shape:
    shape = SHAPES["qwen3-0.6b"]
    return replace(shape, name=name, config={**shape.config, **changes})


SMALL = smaller(
    "qwen3-36m",
    hidden_size=512,
    intermediate_size=1536,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    num_hidden_layers=8,
    max_window_layers=8,
    vocab_size=16384,
)
MIDDLE = smaller("qwen3-159m", num_hidden_layers=8, max_window_layers=8, vocab_size=32768)
MODELS = {
    SMALL.name: SMALL,
    MIDDLE.name: MIDDLE,
    "qwen3-0.6b": SHAPES["qwen3-0.6b"],
    "qwen3-1.7b": SHAPES["qwen3-1.7b"],
}
LEARNING_RATE = 1e-6
MAX_NORM = 1.0


@dataclass(frozen=True)
class Job:
    """A model's folder, and how much to do: rows and tokens for each rank and step."""

    folder: str
    steps: int
    rows: int
    tokens: int
    words: int
    dtype: str = "float32"
    lora: bool = False


def batches(job: Job, steps: int, rank: int) -> list[list[Any]]:
    """A batch for each step, another on every rank; every token is learned."""
    import torch

    made: list[list[Any]] = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        ids = torch.randint(0, job.words, (job.rows, job.tokens), generator=generator)
        ids = ids.to(own_device())
        made.append([SimpleNamespace(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)])
    return made


def bring_up_by_shardwise(job: Job) -> Any:
    from benchmarks.arms import adapter_config

    import shardwise

    keywords: dict[str, Any] = {"tuning": shardwise.Lora(adapter_config())} if job.lora else {}
    return shardwise.from_pretrained(job.folder, dtype=job.dtype, **keywords)


def bring_up_by_hand(job: Job) -> Any:
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(job.folder, dtype=job.dtype)
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def bring_up_by_accelerate(job: Job) -> Any:
    from benchmarks.arms import Request, with_accelerate

    return with_accelerate(Request(Path(job.folder), dtype=job.dtype, lora=job.lora)).model


def step_by_hand(model: Any, optimizer: Any, batch: Any) -> float:
    """A step as one writes it, and its loss, for which the host waits."""
    return float(update(model, optimizer, batch))


def update(model: Any, optimizer: Any, batch: Any) -> Any:
    """Forward, loss, backward, clip, update; the loss is on its device."""
    import torch.nn.functional as F
    from torch.nn.utils import clip_grad_norm_

    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch.labels[:, 1:].flatten())
    loss.backward()
    clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def train_by_hand(model: Any, steps: Sequence[Sequence[Any]]) -> None:
    import torch

    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)
    for [batch] in steps:
        step_by_hand(model, optimizer, batch)


@dataclass
class Trained:
    """Of each step the seconds, and the loss of all ranks."""

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def train_by_shardwise(
    model: Any,
    steps: Sequence[Sequence[Any]],
    on_step: Callable[[Any], None] = id,
    *,
    learning_rate: float = LEARNING_RATE,
) -> Trained:
    """The same loop, on a model that shardwise has sharded. Collective: yes."""
    import torch
    import torch.distributed as dist

    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=0.0)
    told = Trained()
    for [batch] in steps:
        start = time.perf_counter()
        mean = torch.tensor(step_by_hand(model, optimizer, batch))
        told.seconds.append(time.perf_counter() - start)
        dist.all_reduce(mean)
        told.losses.append(float(mean) / dist.get_world_size())
        on_step(told)
    return told


BRING_UP = {
    "shardwise": bring_up_by_shardwise,
    "by hand": bring_up_by_hand,
    "accelerate": bring_up_by_accelerate,
}
TRAIN: dict[str, Callable[[Any, Sequence[Sequence[Any]]], Any]] = {
    "shardwise": train_by_shardwise,
    "by hand": train_by_hand,
    "accelerate": train_by_hand,
}


def quieten() -> None:
    import torch
    import transformers

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
