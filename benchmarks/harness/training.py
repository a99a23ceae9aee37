"""A training loop by hand, for models of any loader: batches, steps, their seconds and losses."""

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from benchmarks.harness.loaders import LOADERS, Request, own_device, synchronize
from torch.nn.utils import clip_grad_norm_

LEARNING_RATE = 1e-6
MAX_NORM = 1.0


@dataclass(frozen=True)
class Job:
    """A model's folder, and for each rank and step the rows and tokens; ids are below ``vocab_size``."""

    folder: str
    steps: int
    rows: int
    tokens: int
    vocab_size: int
    dtype: str = "float32"
    lora: bool = False


def quieten() -> None:
    """No warnings, no progress bars, one thread.

    Random weights make gradients of denormal numbers, with which some processors are ten times slower. They become
    0.
    """
    import transformers

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def load(arm: str, job: Job) -> Any:
    """The model of a job, by a loader. Collective: yes."""
    return LOADERS[arm](Request(job.folder, job.dtype, job.lora)).model


def batches(job: Job, rank: int) -> list[torch.Tensor]:
    """Ids of each step, (rows, tokens), different ones on every rank. All tokens are learned."""
    ids = []
    for step in range(job.steps):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        ids.append(torch.randint(0, job.vocab_size, (job.rows, job.tokens), generator=generator))
    return [each.to(own_device()) for each in ids]


def trained_parameters(model: Any) -> list[Any]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def compute_loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def update(model: Any, optimizer: Any, ids: torch.Tensor) -> torch.Tensor:
    """Forward, loss, backward, clip, update. The loss is on its device. Collective: yes."""
    loss = compute_loss(model, ids)
    loss.backward()
    clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def train(
    model: Any, steps: Sequence[torch.Tensor], *, learning_rate: float = LEARNING_RATE
) -> tuple[list[float], list[float]]:
    """Seconds of each step on this rank, and its loss, the mean over all ranks. Collective: yes."""
    model.train()
    optimizer = torch.optim.AdamW(trained_parameters(model), lr=learning_rate, weight_decay=0.0)
    seconds, losses = [], []
    for ids in steps:
        synchronize()
        start = time.perf_counter()
        loss = update(model, optimizer, ids).cpu()  # waits for the step
        seconds.append(time.perf_counter() - start)
        dist.all_reduce(loss)
        losses.append(float(loss) / dist.get_world_size())
    return seconds, losses
