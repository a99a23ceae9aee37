"""Memory that a rank of a training frees goes back to the system, and that of a server's rank stays."""

import os
import subprocess
import sys

import pytest

_MEBIBYTE = 1 << 20
_IS_GLIBC = "CS_GNU_LIBC_VERSION" in os.confstr_names

_RANK = """
import sys
from types import SimpleNamespace

stub = sys.modules["shardwise.training.train_model"] = SimpleNamespace()

def train(config, local_rank):
    import torch
    from shardwise.core.machine import process_memory
    torch.ones(16 << 20, dtype=torch.uint8)  # glibc keeps blocks as large as one that was freed
    blocks = [torch.ones(2 << 20, dtype=torch.uint8) for _ in range(100)]
    full = process_memory()
    del blocks[::2]
    return full - process_memory()

stub.train = train
from shardwise.cli.train import run_on_rank
print(run_on_rank(SimpleNamespace(own=SimpleNamespace(has_adapters=False))))
"""


_SERVER = """
import sys
from types import SimpleNamespace

def serve(options):
    import torch
    from shardwise.core.machine import process_memory
    block = torch.ones(256 << 20, dtype=torch.uint8)  # larger than any that glibc keeps by itself
    full = process_memory()
    del block
    print(full - process_memory())

sys.modules["shardwise.serve.run"] = SimpleNamespace(serve=serve)
from shardwise.cli.serve import serve_on_rank
serve_on_rank(None)
"""


def freed_bytes(program: str = _RANK, **variables: str) -> int:
    """Bytes that come back when a training frees every other of 100 blocks of 2 MiB, or a server one of 256."""
    environment = {name: value for name, value in os.environ.items() if "MALLOC" not in name} | variables
    command = [sys.executable, "-c", program]
    return int(subprocess.run(command, env=environment, check=True, capture_output=True, timeout=600).stdout)


@pytest.mark.skipif(not _IS_GLIBC, reason="another allocator")
def test_a_training_returns_what_it_frees() -> None:
    assert freed_bytes() >= 95 * _MEBIBYTE


@pytest.mark.skipif(not _IS_GLIBC, reason="another allocator")
def test_a_threshold_of_the_users_stays() -> None:
    assert freed_bytes(MALLOC_MMAP_THRESHOLD_=str(32 * _MEBIBYTE)) <= 5 * _MEBIBYTE


@pytest.mark.skipif(not _IS_GLIBC, reason="another allocator")
def test_a_server_keeps_what_it_frees() -> None:
    assert freed_bytes(_SERVER) <= 5 * _MEBIBYTE
