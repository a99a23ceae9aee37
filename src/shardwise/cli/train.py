"""``shardwise train``: fine-tuning, from a configuration."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardwise.cli.keys import print_keys
from shardwise.cli.launch import TRAINING, fail, run_ranks
from shardwise.cli.tenants import TenantsOutcome, TenantsRequest, print_tenants, train_tenants_on_rank
from shardwise.cli.train_by_trl import is_of_trl, train_by_trl
from shardwise.cli.training_log import (
    STOPPED,
    Detail,
    LiveBar,
    StepLog,
    Told,
    count_of,
    curves_of,
    end_stuck,
    observed,
)
from shardwise.errors import ConfigError, ShardwiseError

if TYPE_CHECKING:
    from shardwise.report.load_report import LoadReport
    from shardwise.report.save_report import SaveReport
    from shardwise.training.configuration.config_sections import TrainConfig
    from shardwise.training.foretelling.memory_facts import MemoryFacts
    from shardwise.training.pushing import Pushed
    from shardwise.training.report import TrainReport

NOT_PUSHED = 4
"""The exit code of a training that has come to its end and is saved, and whose copy for the hub failed."""

_EPILOG = """\
\b
A small config.yaml:
  model: Qwen/Qwen3-0.6B       # a folder, an id of the hub, or a URL
  data: chats.jsonl            # chats, completions or texts; a file, folder or id
  output: out                  # last/, best/, checkpoints/, metrics.jsonl
\b
With what is changed most often:
  training: {epochs: 3, batch_size: 4, gradient_accumulation_steps: 2}
  optimizer: {learning_rate: 1e-5}
  schedule: {name: cosine, warmup_ratio: 0.03}
  sharding: {precision: bfloat16}   # the default on GPUs
  checkpoints: {every: 200}         # steps; the default is each epoch
  evaluation: {data: held-out.jsonl, every: 200}
\b
Many LoRAs of one base at once, each with keys of its own, or a grid of values:
tenants: [{name: ada, data: ada.jsonl}, {name: bob, data: bob.jsonl}]
sweep: {tuning.r: [8, 16], optimizer.learning_rate: [1e-4, 3e-4]}
\b
A configuration of TRL (trl sft, dpo, kto, grpo, reward) is taken as it is,
with overrides --KEY VALUE (shardwise docs train_trl).
\b
Every key: shardwise train --keys, or shardwise docs train; whole files for several models are in recipes/.
Exit codes: 0 trained; 2 refused; 3 some tenants refused or failed, the others
trained; 4 trained and saved, but not pushed to the hub; 75 stopped by SIGTERM,
SIGUSR1 or Ctrl-C with its state kept, so that the same command goes on.
"""


@dataclass(frozen=True)
class TrainRequest:
    """What every rank is asked to do, and where the first one tells about it."""

    config: TrainConfig
    told: Told
    cache_root: Path | None = None
    """Where tokens are kept, where the configuration does not say."""
    detail: Detail = "brief"

    @property
    def directory(self) -> str:
        """Where everything is written."""
        return self.config.output.directory


@dataclass(frozen=True)
class TrainOutcome:
    """What one rank has seen.

    ``loaded`` is None where all weights came from a checkpoint, ``saved`` where the training was stopped.
    """

    loaded: LoadReport | None
    trained: TrainReport
    saved: SaveReport | None
    pushed: Pushed | None = None
    """None where nothing was to be."""
    memory: MemoryFacts | None = None
    """Of the first rank alone."""

    @property
    def exit_code(self) -> int:
        if self.trained.is_stopped:
            return STOPPED
        return 0 if self.pushed is None or self.pushed.is_there else NOT_PUSHED

    def to_dict(self) -> dict[str, Any]:
        """The reports as plain JSON values."""
        return {
            "load": self.loaded.to_dict() if self.loaded else None,
            "train": self.trained.to_dict(),
            "save": self.saved.to_dict() if self.saved else None,
            "push": self.pushed.to_dict() if self.pushed else None,
            "memory": self.memory.to_dict() if self.memory else None,
        }


@click.command("train", epilog=_EPILOG, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, metavar="[METHOD] [CONFIG.yaml] [--KEY VALUE]...", type=click.UNPROCESSED)
@click.option("--nproc-per-node", default=1, type=click.IntRange(min=1), help="Ranks to start on this machine.")
@click.option(
    "--accelerate-config", metavar="FILE", help="Shard as this file of accelerate's says, or of the Trainer's."
)
@click.option("--observe", is_flag=True, help="Write down memory and phases of each rank, as observe=true does.")
@click.option("--verbose", is_flag=True, help="Tell the whole report of the load, not its ten lines.")
@click.option("--json", "as_json", is_flag=True, help="Print the reports as one JSON object, all else to stderr.")
@click.option(
    "--keys", is_flag=True, is_eager=True, expose_value=False, callback=print_keys, help="List every key, and end."
)
def train_command(
    arguments: Sequence[str],
    *,
    nproc_per_node: int,
    accelerate_config: str | None,
    observe: bool,
    verbose: bool,
    as_json: bool,
) -> None:
    """Fine-tune a causal language model, as a YAML file and KEY=VALUE overrides say.

    Of chats the assistant's messages are learned, of prompts with completions the completions, of texts everything.
    Under torchrun, the ranks are those it started; with --nproc-per-node they are started here.
    """
    try:
        told: Told = "stderr" if as_json else "stdout"
        if is_of_trl(arguments):
            sys.exit(train_by_trl(arguments, nproc_per_node, accelerate_config, as_json=as_json))
        request = read_request(arguments, told, accelerate_config, observe=observe)
        request = replace(request, detail="whole" if verbose else "brief")
        is_of_many = isinstance(request, TenantsRequest)
        _begin(request)
        function: Callable[..., Any] = train_tenants_on_rank if is_of_many else train_on_rank
        preloaded = (*TRAINING, "shardwise.tenants.session") if is_of_many else TRAINING
        outcomes = run_ranks(nproc_per_node, function, request, asks_first=True, preloaded=preloaded)
    except ShardwiseError as error:
        fail(error)
    except KeyboardInterrupt:
        click.echo("interrupted; all ranks have been ended, what was saved before is whole", err=True)
        sys.exit(130)
    if not outcomes:
        return
    first: TrainOutcome | TenantsOutcome = outcomes[0]
    if as_json:
        click.echo(json.dumps({"ranks": [outcome.to_dict() for outcome in outcomes]}, indent=2))
    elif isinstance(first, TenantsOutcome):
        print_tenants(first, request.directory)
    else:
        _print_summary(first, request.directory)
    if isinstance(first, TrainOutcome) and first.pushed is not None and not first.pushed.is_there:
        click.echo(f"error: {first.pushed}", err=True)
    sys.exit(first.exit_code)


def read_request(
    arguments: Sequence[str], told: Told, accelerate_config: str | None = None, *, observe: bool = False
) -> TrainRequest | TenantsRequest:
    """What a command line asks for; what accelerate's file says, and does not apply, is told by the first rank.

    Raises:
        ConfigError: its configuration cannot be read, or names what is wrong.
    """
    try:
        from shardwise.tenants.config import is_of_many, tenants_of
        from shardwise.training.configuration.accelerate_section import with_accelerate
        from shardwise.training.configuration.config import config_of, read_values
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"configurations are read by {error.name}, which is not installed; pip install 'shardwise[train]'"
        ) from error
    files = [argument for argument in arguments[:1] if "=" not in argument]
    values, where = read_values(files[0] if files else None, arguments[len(files) :])
    if accelerate_config is not None:
        values, notes = with_accelerate(values, accelerate_config)
        for note in notes if os.environ.get("RANK", "0") == "0" else ():
            click.echo(f"{accelerate_config}: {note}", err=True)
    if observe and not values.get("observe"):
        values["observe"] = True
    if is_of_many(values):
        return TenantsRequest(tenants_of(values, where), told, cache_root(os.environ))
    return TrainRequest(config_of(values, where), told, cache_root(os.environ))


def _begin(request: TrainRequest | TenantsRequest) -> None:
    """Before the seconds of imports: whether the model's folder is there, and what is waited for.

    Of ranks that a launcher has started, none says no by itself: they find out together, once they have met.

    Raises:
        StorageError: there is no such folder.
    """
    if "RANK" in os.environ:
        return
    from shardwise.storage.names import HubOptions, is_local, local_place

    if isinstance(request, TrainRequest):
        model = request.config.model
        for name in filter(is_local, filter(None, (model.name, model.tokenizer))):
            local_place(name, HubOptions())
    if sys.stderr.isatty():
        click.echo("starting: torch and transformers are imported first, which takes some seconds", err=True)


def cache_root(environment: Mapping[str, str]) -> Path:
    """Where tokens of data sets are kept: in ``SHARDWISE_CACHE``, else below the user's caches."""
    own, users = environment.get("SHARDWISE_CACHE"), environment.get("XDG_CACHE_HOME")
    return (Path(own) if own else Path(users or "~/.cache", "shardwise").expanduser()) / "tokens"


def train_on_rank(request: TrainRequest) -> TrainOutcome:
    """What every rank does; the first one tells. Collective: yes."""
    from shardwise.training.foretelling.memory_facts import memory_before, memory_facts
    from shardwise.training.session import Session
    from shardwise.training.stopping import stopping_on_signals

    before = memory_before()
    with (
        stopping_on_signals() as stop,
        curves_of(os.environ) as curves,
        observed(request.config, request.directory) as observer,
    ):
        session = Session.begin(request.config, request.cache_root)
        is_silent = session.rank != 0
        with LiveBar(is_silent=is_silent) as bar:
            output = Path(request.directory)
            log = StepLog(
                request.config.log.every, request.told, is_silent=is_silent, bar=bar, output=output, curves=curves
            )
            log.begin(session, request.detail)
            trained = session.train(log.tell, stop, end_stuck)
            log.close()
        saved = None if trained.is_stopped else session.save_last()
        pushed = None if trained.is_stopped else session.push()
        is_told = session.rank == 0 and not trained.is_stopped
        memory = memory_facts(session, trained, before) if is_told else None
        log.say_end(observer, curves)
    return TrainOutcome(session.loaded, trained, saved, pushed, memory)


def _print_summary(outcome: TrainOutcome, directory: str) -> None:
    report = outcome.trained
    if report.steps:
        click.echo(
            f"trained {report.trained_parameters:,} parameters in {count_of(len(report.steps), 'step')}: "
            f"loss {report.losses[0]:.4f} -> {report.losses[-1]:.4f}"
        )
        click.echo(
            f"  {report.tokens:,} tokens ({report.supervised_tokens:,} learned) in {report.seconds:.1f} s, "
            f"{report.tokens_per_second:,.0f} tokens/s"
        )
    else:
        click.echo(f"nothing was left to train after step {report.last_step}")
    if outcome.memory is not None:
        click.echo(f"  {outcome.memory}")
    if outcome.saved is None:
        click.echo(f"stopped after step {report.last_step}; the same command goes on from there")
    else:
        click.echo(str(outcome.saved))
    if outcome.pushed is not None and outcome.pushed.is_there:
        click.echo(str(outcome.pushed))
    click.echo(f"everything is in {Path(directory)}")
