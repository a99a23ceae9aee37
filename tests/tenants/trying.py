"""A configuration of three tenants on a tiny base, and the command that trains them."""

from __future__ import annotations

import json
import os
import signal
import sys
from inspect import signature
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner, Result
from tests.training import tiny

from shardwise.cli.train import train_command

# click before 8.2 mixes stderr into stdout unless told not to.
MIXES = "mix_stderr" in signature(CliRunner).parameters
RUNNER = CliRunner(**({"mix_stderr": False} if MIXES else {}))


def base(folder: Path) -> Path:
    tiny.write_model(folder / "model")
    for name, count in (("ada", 7), ("bob", 9), ("cy", 12)):
        tiny.write_chats(folder / f"{name}.jsonl", count)
    return folder


def values(folder: Path, output: Path) -> dict[str, Any]:
    """Ranks, targets, steps, sizes of steps, schedules, seeds and clips differ; ``ada`` ends first."""
    return {
        "model": str(folder / "model"),
        "output": str(output),
        "data": {"max_length": 64},
        "tuning": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
        "training": {"batch_size": 2},
        "optimizer": {"learning_rate": 5e-3},
        "evaluation": {"every": 2},
        "log": {"every": 2},
        "bank": {"tokens_per_pass": 256},
        "tenants": [
            {"name": "ada", "data": str(folder / "ada.jsonl"), "training": {"max_steps": 3}},
            {
                "name": "bob",
                "data": str(folder / "bob.jsonl"),
                "tuning": {"r": 8, "lora_alpha": 32, "target_modules": "all-linear"},
                "training": {"epochs": 3, "batch_size": 4, "gradient_accumulation_steps": 2, "seed": 3},
                "schedule": {"name": "linear", "warmup_steps": 2},
                "evaluation": {"data": str(folder / "ada.jsonl")},
            },
            {
                "name": "cy",
                "data": str(folder / "cy.jsonl"),
                "training": {"max_steps": 7},
                "optimizer": {"learning_rate": 2e-2, "weight_decay": 0.1, "max_grad_norm": 0.2},
            },
        ],
    }


def write(file: Path, config: dict[str, Any]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(config, sort_keys=False))
    return file


def halved(config: dict[str, Any]) -> dict[str, Any]:
    """For twice as many ranks: steps of as many rows."""
    whole = json.loads(json.dumps(config))
    for section in (whole, *whole.get("tenants", ())):
        if (rows := section.get("training", {}).get("batch_size")) is not None:
            section["training"]["batch_size"] = rows // 2
    return dict(whole)


def run(*arguments: object) -> Result:
    return RUNNER.invoke(train_command, [str(argument) for argument in arguments])


def command(*arguments: object) -> list[str]:
    program = "from shardwise.cli.train import train_command; train_command()"
    return [sys.executable, "-c", program, *map(str, arguments)]


def losses(result: Result) -> dict[str, list[float]]:
    """Of each tenant's steps, by name."""
    tenants = json.loads(result.stdout)["ranks"][0]["tenants"]
    return {each["name"]: [step["loss"] for step in (each["train"] or {"steps": []})["steps"]] for each in tenants}


def alone(folder: Path, output: Path, *arguments: object) -> list[float]:
    """Of the same tenant, trained by its own configuration, which its folder has, as ``tuning=lora``."""
    result = run(folder / "config.yaml", f"output={output}", "checkpoints.resume=never", "--json", *arguments)
    assert result.exit_code == 0, result.stderr
    return [step["loss"] for step in json.loads(result.stdout)["ranks"][0]["train"]["steps"]]


def metrics(folder: Path) -> list[tuple[int, float]]:
    """Steps and losses that are written down."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if line["kind"] == "step"]


def kill_self(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)
