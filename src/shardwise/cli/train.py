"""``shardwise train``: fine-tuning by TRL's trainers, from a configuration."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import click

from shardwise.cli.launch import TRAINING, fail, run_ranks, this_place
from shardwise.errors import ConfigError, ShardwiseError

if TYPE_CHECKING:
    from shardwise.training.run import TrlOutcome
    from shardwise.training.run_config import RunConfig

STOPPED = 75
"""The exit code of a training that a signal ended with its state saved: EX_TEMPFAIL, call again to resume."""

SOME_FAILED = 3
"""The exit code if some of many LoRAs failed, and the others were trained."""

_EPILOG = """\
\b
A small config.yaml, with TRL's keys:
  model_name_or_path: Qwen/Qwen3-0.6B   # a folder, a name on the hub, or a URL
  dataset_name: chats.jsonl             # a file, or a data set on the hub
  output_dir: out
  assistant_only_loss: true
  learning_rate: 1e-5
  save_steps: 200
\b
METHOD is sft (the default), dpo, kto, grpo or reward. Every key: docs/train.md.
Whole files for several models are in recipes/. Many LoRAs: tenants: and sweep:
(docs/many_loras.md).
Exit codes: 0 trained; 2 an error; 3 some of many LoRAs failed; 75 stopped by SIGTERM, SIGUSR1 or Ctrl-C with
its state saved, so that the same command resumes.
"""


@click.command("train", epilog=_EPILOG, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, metavar="[METHOD] [CONFIG.yaml] [--KEY VALUE]...", type=click.UNPROCESSED)
@click.option("--nproc-per-node", default=1, type=click.IntRange(min=1), help="Ranks to start on this machine.")
@click.option("--accelerate-config", metavar="FILE", help="Shard as a file of accelerate says.")
@click.option("--observe", is_flag=True, help="Record memory and phases of each rank in output_dir.")
@click.option("--check", is_flag=True, help="Check the configuration, and end.")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as one JSON object.")
def train_command(
    arguments: Sequence[str],
    *,
    nproc_per_node: int,
    accelerate_config: str | None,
    observe: bool,
    check: bool,
    as_json: bool,
) -> None:
    """Fine-tune a model by TRL, as a YAML file of TRL's keys and --KEY VALUE overrides say.

    Under torchrun, the ranks are those it started; with --nproc-per-node they are started here.
    """
    try:
        config = _read([*arguments, *(("--accelerate_config", accelerate_config) if accelerate_config else ())])
        if check:
            click.echo(f"{config.source}: is a valid configuration of {config.method}")
            return
        os.environ.update({name: str(value) for name, value in (config.own["env"] or {}).items()})
        config = _without_token(config)
        ranks = config.own["num_processes"] or nproc_per_node
        outcomes = run_ranks(ranks, train_on_rank, config, observe, asks_first=True, preloaded=TRAINING)
    except ShardwiseError as error:
        fail(error)
    except KeyboardInterrupt:
        click.echo("interrupted; all ranks have been ended, what was saved before is whole", err=True)
        sys.exit(130)
    if outcomes:
        _print(outcomes[0], as_json=as_json)
        sys.exit(_exit_code(outcomes[0]))


def _read(arguments: Sequence[str]) -> RunConfig:
    """Read a configuration; tell of a local model that is not there before torch is imported.

    Raises:
        ShardwiseError: naming what is wrong.
    """
    try:
        from shardwise.tenants.tenant_configs import has_tenants, read_tenants
        from shardwise.training.run_config import read_run_config
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name}: is not installed. Run pip install 'shardwise[train]'.") from error
    from shardwise.storage.names import HubOptions, is_local, local_place

    config = read_run_config(arguments)
    if has_tenants(config):
        read_tenants(config)
    model = str(config.values.get("model_name_or_path", ""))
    if model and is_local(model) and "RANK" not in os.environ:  # ranks of a launcher find out together
        local_place(model, HubOptions())
    return config


def _without_token(config: RunConfig) -> RunConfig:
    """A configuration whose ``hub_token`` is in the environment instead: the Trainer saves its arguments."""
    values = dict(config.values)
    if token := values.pop("hub_token", None):
        os.environ["HF_TOKEN"] = str(token)
    return replace(config, values=values)


def train_on_rank(config: RunConfig, observe: bool = False) -> TrlOutcome:  # noqa: FBT001, FBT002 - runs on a rank
    """Train on one rank, with the environment that accelerate reads. Collective: yes."""
    from shardwise.engines.forecasting import observe as observed
    from shardwise.tenants.tenant_configs import has_tenants

    if has_tenants(config):
        from shardwise.tenants.tenant_run import train_tenants_on_rank as train
    else:
        from shardwise.training.run import train_on_rank as train
    rank, size = this_place()
    if size > 1:
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", size), ("LOCAL_WORLD_SIZE", size)):
            os.environ.setdefault(name, str(value))
    with observed(str(config.values.get("output_dir", "."))) if observe else nullcontext():
        return train(config, int(os.environ.get("LOCAL_RANK", "0")))


def _exit_code(outcome: TrlOutcome) -> int:
    if outcome.has_stopped:
        return STOPPED
    return SOME_FAILED if any("failure" in one for one in outcome.metrics.values() if isinstance(one, dict)) else 0


def _print(outcome: TrlOutcome, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(asdict(outcome), indent=2))
        return
    click.echo("\n".join(outcome.summary))
    if outcome.has_stopped:
        click.echo(f"stopped after {outcome.steps} steps; run the same command to resume")
    else:
        click.echo(f"saved in {outcome.output_dir}")
