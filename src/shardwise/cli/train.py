"""``shardwise train``: fine-tuning, from a configuration."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from shardwise.cli.launch import TRAINING, fail, run_ranks
from shardwise.errors import ConfigError, RankLostError, ShardwiseError
from shardwise.training.report import CheckpointFacts, EvaluationFacts, Remark, StepFacts

if TYPE_CHECKING:
    from shardwise.report.load_report import LoadReport
    from shardwise.report.save_report import SaveReport
    from shardwise.training.data import TrainData
    from shardwise.training.report import Event, TrainReport
    from shardwise.training.sections import TrainConfig
    from shardwise.training.session import Session

STOPPED = 75
"""The exit code of a training that was asked to stop and has kept its state: EX_TEMPFAIL, call again to go on."""

_EPILOG = """\
\b
A small config.yaml:
  model: Qwen/Qwen3-0.6B       # a folder, an id of the hub, or a URL
  data: chats.jsonl            # messages, text, or prompt and completion
  output: out                  # last/, best/, checkpoints/, metrics.jsonl
\b
With what is changed most often:
  training: {epochs: 3, batch_size: 4, gradient_accumulation_steps: 2}
  optimizer: {learning_rate: 1e-5}
  schedule: {name: cosine, warmup_ratio: 0.03}
  sharding: {precision: bfloat16}
  checkpoints: {every: 200}
  evaluation: {data: held-out.jsonl, every: 200}
\b
Every key is in docs/train.md; whole files for several models are in recipes/.
Exit codes: 0 trained; 2 refused; 75 stopped by SIGTERM or Ctrl-C with its state
kept, so that the same command goes on.
"""


@dataclass(frozen=True)
class TrainRequest:
    """What every rank is asked to do, and where the first one tells about it."""

    config: TrainConfig
    told: Literal["stdout", "stderr"]


@dataclass(frozen=True)
class TrainOutcome:
    """What one rank has seen.

    ``loaded`` is None where all weights came from a checkpoint, ``saved`` where the training was stopped.
    """

    loaded: LoadReport | None
    trained: TrainReport
    saved: SaveReport | None


@click.command("train", epilog=_EPILOG)
@click.argument("arguments", nargs=-1, metavar="[CONFIG.yaml] [KEY=VALUE]...")
@click.option("--nproc-per-node", default=1, type=click.IntRange(min=1), help="Ranks to start on this machine.")
@click.option("--json", "as_json", is_flag=True, help="Print the reports as one JSON object, all else to stderr.")
def train_command(arguments: Sequence[str], *, nproc_per_node: int, as_json: bool) -> None:
    """Fine-tune a causal language model, as a YAML file and KEY=VALUE overrides say.

    Of chats the assistant's messages are learned, of prompts with completions the completions, of texts everything.
    Under torchrun, the ranks are those it started; with --nproc-per-node they are started here.
    """
    try:
        request = TrainRequest(read_arguments(arguments), "stderr" if as_json else "stdout")
        outcomes = run_ranks(nproc_per_node, train_on_rank, request, asks_first=True, preloaded=TRAINING)
    except ShardwiseError as error:
        fail(error)
    except KeyboardInterrupt:
        click.echo("interrupted; all ranks have been ended, what was saved before is whole", err=True)
        sys.exit(130)
    if not outcomes:
        return
    first: TrainOutcome = outcomes[0]
    if as_json:
        click.echo(json.dumps({"ranks": [_values(outcome) for outcome in outcomes]}, indent=2))
    else:
        _print_summary(first, request.config.output.directory)
    if first.trained.is_stopped:
        sys.exit(STOPPED)


def read_arguments(arguments: Sequence[str]) -> TrainConfig:
    """The configuration that a command line names.

    Raises:
        ConfigError: it cannot be read, or names what is wrong.
    """
    try:
        from shardwise.training.config import read_config
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"configurations are read by {error.name}, which is not installed; pip install 'shardwise[train]'"
        ) from error
    files = [argument for argument in arguments[:1] if "=" not in argument]
    return read_config(files[0] if files else None, arguments[len(files) :])


def train_on_rank(request: TrainRequest) -> TrainOutcome:
    """What every rank does; the first one tells. Collective: yes."""
    from shardwise.training.session import Session
    from shardwise.training.stopping import stopping_on_signals

    with stopping_on_signals() as stop:
        session = Session.begin(request.config)
        log = StepLog(request.config.log.every, request.told, is_silent=session.rank != 0)
        log.begin(session)
        trained = session.train(log.tell, stop, end_stuck)
        saved = None if trained.is_stopped else session.save_last()
    return TrainOutcome(session.loaded, trained, saved)


def end_stuck(error: RankLostError) -> None:
    """Say which rank was lost, and end this one, which waits for it in a collective."""
    click.echo(f"error: {error}", err=True)
    sys.stderr.flush()
    os._exit(2)


class StepLog:
    """One line for every few steps, and for the last, written on the first rank as it happens."""

    def __init__(
        self, every: int, told: Literal["stdout", "stderr"] = "stdout", *, is_silent: bool = False
    ) -> None:
        self.every = every
        self.to_stderr = told == "stderr"
        self.is_silent = is_silent
        self.total = 0
        self.since: list[StepFacts] = []

    def begin(self, session: Session) -> None:
        """Tell about the model and the data."""
        self.total = len(session.steps)
        if session.loaded is not None:
            self.say(str(session.loaded))
        self.say(describe_data(session.data))
        if session.held_out is not None:
            self.say(describe_data(session.held_out, "evaluation"))
        self.say(f"training: {_count(self.total, 'step')} on {_count(session.size, 'rank')}")

    def tell(self, facts: Event) -> None:
        """Tell about a step, where one of these is due, and about all else."""
        width = len(str(self.total))
        place = f"step {facts.step:>{width}}/{self.total}"
        match facts:
            case StepFacts():
                self.since.append(facts)
                if facts.step % self.every == 0 or facts.step in (1, self.total):
                    self.say(f"{place}  {self._interval(facts)}")
                    self.since = []
            case EvaluationFacts():
                best = "  the best so far" if facts.is_best else ""
                self.say(f"{place}  evaluation: loss {facts.loss:.4f}  perplexity {facts.perplexity:.4g}{best}")
            case CheckpointFacts(kind="restored"):
                self.say(facts.told)
                self.say(f"training goes on after step {facts.step}")
            case CheckpointFacts():
                self.say(f"{place}  checkpoint, in {facts.seconds:.1f} s")
            case Remark():
                self.say(facts.text)

    def _interval(self, last: StepFacts) -> str:
        """The steps since the last line: their mean loss, and of the last one what is of one step."""
        learned = sum(step.supervised_tokens for step in self.since)
        loss = sum(step.loss * step.supervised_tokens for step in self.since) / max(learned, 1)
        seconds = max(sum(step.seconds for step in self.since), 1e-9)
        return (
            f"loss {loss:7.4f}  lr {last.learning_rate:.2e}  grad norm {last.grad_norm:8.3f}  "
            f"{sum(step.tokens for step in self.since) / seconds:,.0f} tokens/s  "
            f"memory {last.memory_bytes / 2**30:.2f} GiB"
        )

    def say(self, text: str) -> None:
        if not self.is_silent:
            click.echo(text, err=self.to_stderr)


def describe_data(data: TrainData, what: str = "data") -> str:
    """The rows and tokens of a training set, and the rows that are not there whole."""
    lines = [
        f"{what} {data.path}",
        f"  {_count(len(data.examples), 'row')}, {data.tokens:,} tokens, {data.supervised_tokens:,} learned",
    ]
    for places, why in (
        (data.cut_lines, "cut off at the end"),
        (data.skipped_lines, "left out: nothing to learn"),
        (tuple(fault.line for fault in data.malformed), f"left out: malformed, {_first_cause(data)}"),
    ):
        if places:
            shown = ", ".join(map(str, places[:8])) + (", ..." if len(places) > 8 else "")
            lines.append(f"  {why}: {_count(len(places), 'row')}, {data.unit} {shown}")
    return "\n".join(lines)


def _first_cause(data: TrainData) -> str:
    return f"such as {data.malformed[0].cause}" if data.malformed else ""


def _print_summary(outcome: TrainOutcome, directory: str) -> None:
    report = outcome.trained
    if report.steps:
        click.echo(
            f"trained {report.trained_parameters:,} parameters in {_count(len(report.steps), 'step')}: "
            f"loss {report.losses[0]:.4f} -> {report.losses[-1]:.4f}"
        )
        click.echo(
            f"  {report.tokens:,} tokens ({report.supervised_tokens:,} learned) in {report.seconds:.1f} s, "
            f"{report.tokens_per_second:,.0f} tokens/s"
        )
    else:
        click.echo(f"nothing was left to train after step {report.last_step}")
    if outcome.saved is None:
        click.echo(f"stopped after step {report.last_step}; the same command goes on from there")
    else:
        click.echo(str(outcome.saved))
    click.echo(f"everything is in {Path(directory)}")


def _values(outcome: TrainOutcome) -> dict[str, Any]:
    return {
        "load": outcome.loaded.to_dict() if outcome.loaded else None,
        "train": outcome.trained.to_dict(),
        "save": outcome.saved.to_dict() if outcome.saved else None,
    }


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}" + ("" if number == 1 else "s")
