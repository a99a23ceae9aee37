"""A LoRA on a base in four bits, by the command: trained, killed, and gone on with by other ranks."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests import zoo
from tests.training import tiny
from transformers import AutoModelForCausalLM, LlamaConfig

STEPS = 6


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tokenizer = tiny.tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        dtype="float32",
    )
    model = AutoModelForCausalLM.from_config(config)
    zoo.fill(model)
    zoo.save_original(model, folder)
    tokenizer.save_pretrained(folder)
    return folder


def command(base: Path, chats: Path, out: Path, *more: str) -> list[str]:
    program = "from shardwise.cli.train import train_command; train_command()"
    return [
        *(sys.executable, "-c", program, f"model={base}", f"data={chats}", f"output={out}", "quantization=nf4"),
        *("tuning.method=lora", "tuning.r=4", f"training.max_steps={STEPS}", "training.batch_size=2"),
        *("optimizer.learning_rate=1e-2", "checkpoints.every=2", "sharding.precision=float32", *more),
    ]


def losses(out: Path) -> dict[int, float]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "step"}


def trained(*arguments: object) -> str:
    made = subprocess.run(command(*arguments), check=False, timeout=100, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return made.stdout + made.stderr


@pytest.mark.slow
@pytest.mark.distributed
def test_killed_and_gone_on_with_by_other_ranks(base, tmp_path):
    chats = tiny.write_chats(tmp_path / "chats.jsonl", 8)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert "14 linear layers are in four bits" in trained(base, chats, whole, "--nproc-per-node", "2")
    shutil.copytree(whole, killed)  # as a kill after the checkpoint of step 2 leaves it
    for place in ("last", "checkpoints/step-4", f"checkpoints/step-{STEPS}"):
        shutil.rmtree(killed / place)
    lines = (killed / "metrics.jsonl").read_text().splitlines(keepends=True)
    (killed / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line).get("step", 0) <= 2))
    assert [place.name for place in (killed / "checkpoints").iterdir()] == ["step-2"]
    trained(base, chats, killed, "training.batch_size=4", "--nproc-per-node", "1")
    wanted, found = losses(whole), losses(killed)
    assert found.keys() == wanted.keys() == set(range(1, STEPS + 1))
    assert [found[step] for step in wanted] == pytest.approx(list(wanted.values()), rel=1e-5)
    assert wanted[STEPS] < wanted[1]
    first, second = (load_file(place / "last" / "adapter_model.safetensors") for place in (whole, killed))
    assert first.keys() == second.keys()
    assert all(torch.allclose(first[key], second[key], rtol=1e-3, atol=1e-6) for key in first)


def test_a_base_in_four_bits_is_not_trained_itself(base, tmp_path):
    chats = tiny.write_chats(tmp_path / "chats.jsonl", 8)
    arguments = command(base, chats, tmp_path / "out", "tuning.method=full")
    made = subprocess.run(
        [item for item in arguments if not item.startswith("tuning.r=")],
        check=False,
        timeout=100,
        capture_output=True,
        text=True,
    )
    assert made.returncode == 2
    assert "tuning.method is lora on such a base" in made.stderr
    assert not (tmp_path / "out").exists()
