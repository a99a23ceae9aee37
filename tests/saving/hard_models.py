"""Models that are hard to save, and ranks that save them."""

import errno
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tests.small_checkpoints import small_qwen3
from tests.support.world import attempt
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardwise
from shardwise.core.machine import namespace_id

OPTIONS = shardwise.options.SaveOptions(budget_bytes=4096, progress=False)


class Odd(nn.Module):
    """Every dtype and shape that savers stumble over, by turns parameters and buffers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7)
        self.head.weight = self.embedding.weight
        self.scalar = nn.Parameter(torch.randn(()))
        self.tiny = nn.Parameter(torch.randn(1))  # on two ranks or more, most have none of it
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.short = nn.Parameter(torch.randn(3, 3).half())
        self.narrow = nn.Parameter(torch.randn(6, 4).to(torch.float8_e4m3fn), requires_grad=False)
        self.register_buffer("scale", torch.randn(4).to(torch.float8_e5m2))
        self.register_buffer("steps", torch.tensor(2**40 + seed))
        self.register_buffer("flags", torch.rand(5) > 0.5)
        self.register_buffer("codes", torch.arange(6, dtype=torch.uint8).reshape(2, 3))
        self.register_buffer("precise", torch.randn(3, dtype=torch.float64))
        self.register_buffer("nothing", torch.empty(0, dtype=torch.int64))
        self.register_buffer("strided", torch.randn(4, 6).t())
        self.register_buffer("passing", torch.ones(2), persistent=False)


def cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """As a save is to cast."""
    is_cast = dtype is not None and tensor.is_floating_point() and tensor.itemsize >= 2
    return tensor.detach().to(dtype) if is_cast else tensor.detach()


def expected(model: nn.Module, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    values = {name: cast(tensor, dtype) for name, tensor in model.state_dict().items()}
    return {name: value for name, value in values.items() if name != "head.weight"}


def save_odd(folder: str, size: str, dtype: torch.dtype | None) -> None:
    """Sharded by hand; what FSDP2 does not shard is the same on all ranks."""
    model = Odd()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh, ignored_params={model.scalar})
    shardwise.save(model, folder, max_shard_size=size, dtype=dtype, options=OPTIONS)


def save_by_hand(folder: str, dtype: torch.dtype | None) -> None:
    """A transformers model that shardwise has never seen."""
    model = small_qwen3(tie_word_embeddings=True)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    shardwise.save(model, folder, dtype=dtype, options=OPTIONS)


def linear(seed: int = 0, columns: int = 4) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(columns, 300), nn.Linear(300, columns))


def mark(**changes: Any) -> bytes:
    """The mark of a save by a process of this machine that is gone, unless the changes say otherwise."""
    found = {"host": socket.gethostname(), "process": 2**22 + 5, "born": "1", "space": namespace_id("pid")}
    found |= {"save_id": "0123abcd", "renewed_s": 0.0, "since": 0.0}
    return json.dumps(found | changes).encode()


def _other_dtype() -> nn.Module:
    model = linear()
    model[1].bias = nn.Parameter(model[1].bias.detach().double())
    return model


UNEQUAL: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "shape": (lambda: linear(columns=5), {}),
    "dtype": (_other_dtype, {}),
    "names": (lambda: nn.Sequential(nn.Linear(4, 300), nn.Sequential(nn.Linear(300, 4))), {}),
    "meta": (lambda: linear().to("meta"), {}),
    "cast": (linear, {"dtype": "bfloat16"}),
    "size": (linear, {"max_shard_size": 10810}),  # as many files, of other sizes
    "nonsense": (linear, {"max_shard_size": "many"}),
    "verify": (linear, {"verify": True}),
    "internal": (linear, {"names": "internal"}),
    "budget": (linear, {"options": shardwise.options.SaveOptions(budget_bytes=1 << 20)}),
}


def save_unequal(folder: str, what: str) -> tuple[str, str]:
    """The last rank is at odds with the others."""
    build, keywords = UNEQUAL[what] if dist.get_rank() == dist.get_world_size() - 1 else (linear, {})
    keywords = {"max_shard_size": "6KB", "options": OPTIONS, **keywords}
    return attempt(lambda: shardwise.save(build(), folder, **keywords))


@contextmanager
def full_disk(*, after: int) -> Iterator[None]:
    """No more than so many writes succeed in this process."""
    original = os.pwritev
    left = [None] * after

    def pwritev(*arguments: Any) -> int:
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left.pop()
        return original(*arguments)

    with mock.patch.object(os, "pwritev", pwritev):
        yield
