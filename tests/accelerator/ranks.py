"""Ranks with a simulated device each."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from tests.accelerator.simulated import DELAY_US, PLUGIN, environment
from tests.support.local_ranks import LocalRanks


@contextlib.contextmanager
def simulated_ranks(size: int) -> Iterator[LocalRanks]:
    """Start fresh processes, each with its device, and collectives on both kinds of tensors."""
    given = environment(devices=size, delay_us=DELAY_US)
    with mock.patch.dict(os.environ, given), mock.patch.object(sys, "path", [str(PLUGIN), *sys.path]):
        ranks = LocalRanks(size)
    with tempfile.TemporaryDirectory() as folder, ranks:  # which end before their store goes
        ranks.run(_join, str(Path(folder) / "store"))
        yield ranks


def _join(store: str) -> None:
    import torch
    import torch.distributed as dist
    from tests.quiet import quieten

    from shardwise.fsdp.torch_private import both_backends

    quieten()
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    torch.npu.set_device(rank)
    backend = both_backends(torch.device("npu"))
    dist.init_process_group(backend, store=dist.FileStore(store, size), rank=rank, world_size=size)
