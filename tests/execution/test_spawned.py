"""Ranks that the command line starts: forked from one process, seated, and ended with the one that started them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from tests.execution import faults

from shardwise.errors import PlacementError, StorageError
from shardwise.execution.spawned import BOTH_BACKENDS, at_own_gpu, run_spawned


@pytest.mark.distributed
def test_values_come_by_rank_and_errors_as_they_are():
    assert run_spawned(2, faults.add, 3, 4) == [7, 8]
    with pytest.raises(StorageError, match="^gone$"):
        run_spawned(2, faults.gone_on, 1)


@pytest.mark.distributed
def test_ranks_share_one_import_and_the_parent_needs_none():
    program = (
        "import sys\n"
        "from shardwise.execution.spawned import run_spawned\n"
        "from tests.execution.forked import place_of_torch\n"
        "told = run_spawned(3, place_of_torch, preloaded=('torch',))\n"
        "assert 'torch' not in sys.modules\n"
        "print(*told)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], check=True, timeout=100, capture_output=True, text=True)
    assert len(set(ran.stdout.split())) == 1


def test_a_rank_takes_the_gpu_of_its_number(monkeypatch):
    taken = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)
    assert at_own_gpu(3, 4) == BOTH_BACKENDS
    assert at_own_gpu(3, 5) == "gloo"
    assert taken == [3]


def test_a_rank_forked_from_a_user_of_cuda_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(PlacementError, match="torchrun --nproc-per-node 2"):
        at_own_gpu(0, 2)
