"""Merging needs bounded memory, and leaves the old model if the process is killed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.models.reference import save_tiny
from tests.saving.adapters import save_adapter

_GROWTH = """
import resource, sys
import torch, transformers
from shardwise.saving.merge_adapter import merge_adapter
from shardwise.saving.merge_weights import merge_weights

def anonymous():
    fields = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
    return int(fields["RssAnon"].split()[0]) // 1024

import threading, time
peak, done = 0, threading.Event()
def watch():
    global peak
    while not done.wait(0.005):
        peak = max(peak, anonymous())
base, adapter, small, out = sys.argv[1:]
merge_adapter(small, adapter + "-small", out + "-small")
before = anonymous()
threading.Thread(target=watch, daemon=True).start()
merge_adapter(base, adapter, out)
merge_weights(base, out + "-weights")
merge_weights(base, out + "-bin", file_format="bin")
done.set()
print(peak - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    settings = {"r": 8, "target_modules": ["embed_tokens", "lm_head", "q_proj"], "use_dora": True}
    sizes = {"num_hidden_layers": 1, "tied": False, "dtype": torch.bfloat16}
    base = save_tiny(tmp_path / "base", vocab_size=200_000, hidden_size=1024, **sizes)  # two matrices of 390 MiB
    small = save_tiny(tmp_path / "small", vocab_size=100, **sizes)
    save_adapter(small, tmp_path / "adapter-small", **settings)
    save_adapter(base, tmp_path / "adapter", **settings | {"target_modules": ["lm_head", "q_proj"]})
    arguments = [str(item) for item in (base, tmp_path / "adapter", small, tmp_path / "out")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _GROWTH, *arguments], capture_output=True, text=True, env=environment
    )
    assert result.returncode == 0, result.stderr
    growth_mib = int(result.stdout)
    assert growth_mib < 450, growth_mib  # as much as one of the matrices in its own dtype, and half as float32
