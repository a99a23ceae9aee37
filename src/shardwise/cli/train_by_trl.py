"""``shardwise train`` with a configuration of TRL: on all ranks, with its summary and exit code."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
import yaml

from shardwise.cli.launch import run_ranks, this_place
from shardwise.cli.training_log import STOPPED
from shardwise.trl_training.run_config import METHODS, RunConfig, read_run_config

if TYPE_CHECKING:
    from shardwise.trl_training.run import TrlOutcome

_SECTIONS = ("model", "data", "output", "tenants")
"""Keys of configurations in sections, which the training loop of our own reads."""

_IMPORTED = ("trl.trainer.sft_trainer", "shardwise.trl_training.run")
"""Modules that every training imports; they take seconds."""


def is_of_trl(arguments: Sequence[str]) -> bool:
    """Whether a command line has TRL's keys, and no sections."""
    words = [word for word in arguments if word not in METHODS]
    if words and not words[0].startswith("--") and "=" not in words[0]:
        try:
            found = yaml.safe_load(Path(words[0]).read_text("utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError):
            return len(words) < len(arguments)
        return isinstance(found, dict) and found.keys().isdisjoint(_SECTIONS)
    return any(word.startswith("--") for word in words) or len(words) < len(arguments)


def train_by_trl(
    arguments: Sequence[str], nproc_per_node: int, accelerate_config: str | None = None, *, as_json: bool
) -> int:
    """Train as a command line says; returns the exit code.

    Raises:
        ShardwiseError: naming what is wrong with the configuration, or why the training failed.
    """
    further = () if accelerate_config is None else ("--accelerate_config", accelerate_config)
    config = read_run_config([*arguments, *further])
    os.environ.update({name: str(value) for name, value in (config.own["env"] or {}).items()})
    ranks = config.own["num_processes"] or nproc_per_node
    outcomes = run_ranks(ranks, train_on_rank, config, asks_first=True, preloaded=_IMPORTED)
    if not outcomes:
        return 0
    first: TrlOutcome = outcomes[0]
    if as_json:
        click.echo(json.dumps(asdict(first), indent=2))
    else:
        click.echo("\n".join(first.summary))
        click.echo(
            f"stopped after step {first.steps}; run the same command to resume"
            if first.has_stopped
            else f"saved in {first.output_dir}"
        )
    return STOPPED if first.has_stopped else 0


def train_on_rank(config: RunConfig) -> TrlOutcome:
    """Train on one rank, with the environment that accelerate reads. Collective: yes."""
    from shardwise.trl_training.run import train_on_rank as train

    rank, size = this_place()
    if size > 1:
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", size), ("LOCAL_WORLD_SIZE", size)):
            os.environ.setdefault(name, str(value))
    return train(config, int(os.environ.get("LOCAL_RANK", "0")))
