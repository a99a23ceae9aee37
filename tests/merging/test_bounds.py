"""What merging takes and leaves: memory that does not grow, and an old model where the process is killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests import zoo
from tests.merging.adapters import save_adapter, tensors_of
from tests.quiet import quieten
from transformers import AutoModelForCausalLM, Qwen3Config


@pytest.fixture(scope="session", autouse=True)
def _quiet():
    quieten()


def save_base(folder: Path, vocabulary: int, hidden: int) -> Path:
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with zoo.silenced():
        model.save_pretrained(folder)
    return folder


_GROWTH = """
import resource, sys
import torch, transformers
from shardwise.engines.merging_adapter import merge_adapter
from shardwise.interchange.merging_weights import merge_weights

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
    base = save_base(tmp_path / "base", 200_000, 1024)  # two matrices of 390 MiB
    small = save_base(tmp_path / "small", 100, 32)
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


_KILLED = """
import os, signal, sys
from shardwise.storage import LocalWriter
from shardwise.engines.merging_adapter import merge_adapter

write, left = LocalWriter.write, [int(sys.argv[4])]
def fatal(self, *arguments):
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    write(self, *arguments)
LocalWriter.write = fatal
merge_adapter(*sys.argv[1:4], max_shard_size="20KB")
"""


def test_a_kill_half_way_leaves_the_old_model_and_the_next_merge_cleans_up(tmp_path: Path) -> None:
    from shardwise.engines.merging_adapter import merge_adapter

    base = save_base(tmp_path / "base", 500, 32)
    adapter = save_adapter(base, tmp_path / "adapter", r=2, target_modules=["q_proj", "down_proj"])
    out = tmp_path / "out"
    merge_adapter(base, adapter, out)
    before = tensors_of(out)
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _KILLED, str(base), str(adapter), str(out), "6"], capture_output=True
    )
    assert result.returncode == -signal.SIGKILL, result.stderr.decode()
    assert len(list(out.glob("model-*.safetensors"))) > 1
    with zoo.silenced():
        found = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert all(torch.equal(found[key], value) for key, value in before.items())
    merge_adapter(base, adapter, out)
    assert sorted(file.name for file in out.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.fingerprints.json",
        "model.safetensors",
    ]
