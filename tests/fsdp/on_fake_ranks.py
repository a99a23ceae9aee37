"""Real ``fully_shard`` as one rank of many, under torch's fake process group."""

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextlib.contextmanager
def fake_rank(rank: int, size: int) -> Iterator[None]:
    """This process as rank ``rank`` of ``size``; collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
