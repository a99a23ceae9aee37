"""Memory that a rank of a training frees goes back to the system, and that of a server's rank stays."""

import os
import subprocess
import sys
from unittest import mock

import pytest

from shardwise.ranks import processes

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
    from shardwise.transfer.memory import trim_heap
    # Larger than any that glibc keeps by itself.
    blocks = [torch.ones(mebibytes << 20, dtype=torch.uint8) for mebibytes in (200, 200, 112)]
    full = process_memory()
    del blocks
    freed = full - process_memory()
    trim_heap()  # as the bank does before it refuses a pass
    print(freed, full - process_memory())

sys.modules["shardwise.serve.run"] = SimpleNamespace(serve=serve)
from shardwise.cli.serve import serve_on_rank
serve_on_rank(None)
"""


def freed_bytes(program: str = _RANK, **variables: str) -> list[int]:
    """Bytes that come back when a training frees every other of 100 blocks of 2 MiB.

    When a server frees blocks of 512 MiB, and when it then trims its heap.
    """
    environment = {name: value for name, value in os.environ.items() if "MALLOC" not in name} | variables
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, env=environment, check=True, capture_output=True, timeout=600)
    return [int(word) for word in ended.stdout.split()]


@pytest.mark.skipif(not _IS_GLIBC, reason="another allocator")
def test_a_training_returns_what_it_frees() -> None:
    assert freed_bytes()[0] >= 95 * _MEBIBYTE


@pytest.mark.skipif(not _IS_GLIBC, reason="another allocator")
def test_a_threshold_of_the_users_stays() -> None:
    assert freed_bytes(MALLOC_MMAP_THRESHOLD_=str(32 * _MEBIBYTE))[0] <= 5 * _MEBIBYTE


@pytest.mark.skipif(not _IS_GLIBC, reason="another allocator")
def test_a_server_keeps_what_it_frees_until_it_trims_its_heap() -> None:
    freed, trimmed = freed_bytes(_SERVER)
    assert freed <= 5 * _MEBIBYTE
    assert trimmed >= (512 - 64) * _MEBIBYTE


@pytest.mark.parametrize(
    ("environment", "is_accepted", "options"),
    [
        ({}, True, [processes._MMAP_THRESHOLD, processes._TRIM_THRESHOLD]),
        ({}, False, [processes._MMAP_THRESHOLD]),  # glibc before 2.35
        ({"MALLOC_TRIM_THRESHOLD_": "1048576"}, True, []),
        ({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1048576"}, True, []),
    ],
)
def test_thresholds_are_set_together_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], is_accepted: bool, options: list[int]
) -> None:
    library = mock.Mock()
    library.mallopt.return_value = int(is_accepted)
    monkeypatch.setattr(processes.ctypes, "CDLL", lambda _name: library)
    monkeypatch.setattr("shardwise.fsdp.torch_private.accelerator", lambda: None)
    processes.keep_freed_blocks(environment)
    assert [call.args[0] for call in library.mallopt.call_args_list] == options
