"""``shardwise train``: full fine-tuning on chats, texts or completions."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import click

from shardwise.cli.launch import fail, run_ranks
from shardwise.errors import ConfigError, ShardwiseError
from shardwise.training.options import Epochs, Ratio, Steps, TrainOptions

if TYPE_CHECKING:
    from shardwise.report import LoadReport, SaveReport
    from shardwise.training.data import TrainData
    from shardwise.training.report import StepFacts, TrainReport

_DEFAULTS = TrainOptions()


@dataclass(frozen=True)
class TrainRequest:
    """What every rank is asked to do, and where the first one tells about it."""

    model: str
    data: str
    options: TrainOptions
    told: Literal["stdout", "stderr"]
    output_dir: str | None = None
    save_dtype: str | None = None


@click.command("train")
@click.option("--model", required=True, metavar="DIR_OR_ID", help="A folder, or a repository of the hub.")
@click.option("--data", required=True, metavar="FILE", help="JSON lines: messages, text, or prompt and completion.")
@click.option("--nproc-per-node", default=1, type=click.IntRange(min=1), help="Ranks to start on this machine.")
@click.option("--learning-rate", default=_DEFAULTS.learning_rate, show_default=True)
@click.option("--epochs", type=int, help="Passes over the data.  [default: 1]")
@click.option("--max-steps", type=int, help="Optimizer steps, instead of --epochs.")
@click.option("--batch-size", default=_DEFAULTS.batch_size, show_default=True, help="Rows at a time, on each rank.")
@click.option(
    "--gradient-accumulation-steps",
    default=_DEFAULTS.gradient_accumulation_steps,
    show_default=True,
    help="Batches of each rank that make one optimizer step.",
)
@click.option("--warmup-ratio", default=0.0, show_default=True, help="Share of all steps.")
@click.option("--schedule", default=_DEFAULTS.schedule, show_default=True, help="constant, linear or cosine.")
@click.option("--weight-decay", default=_DEFAULTS.weight_decay, show_default=True)
@click.option("--max-grad-norm", default=_DEFAULTS.max_grad_norm, show_default=True)
@click.option("--max-length", default=_DEFAULTS.max_length, show_default=True, help="Tokens of a row.")
@click.option("--seed", default=_DEFAULTS.seed, show_default=True, help="Of the order of the rows, and of dropout.")
@click.option(
    "--dtype",
    default=_DEFAULTS.dtype,
    show_default=True,
    help="float32, or bfloat16 for mixed precision. Weights are float32 either way.",
)
@click.option("--output-dir", metavar="DIR", help="Where the trained model and its tokenizer are saved.")
@click.option("--save-dtype", help="Of what is saved: float32, bfloat16, ...  [default: that of the model's files]")
@click.option("--log-every", default=_DEFAULTS.log_every, show_default=True, help="Steps between two lines.")
@click.option("--json", "as_json", is_flag=True, help="Print the reports as one JSON object, all else to stderr.")
def train_command(
    model: str,
    data: str,
    *,
    nproc_per_node: int,
    epochs: int | None,
    max_steps: int | None,
    warmup_ratio: float,
    output_dir: str | None,
    save_dtype: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Fine-tune all weights of a causal language model.

    Of chats the assistant's messages are learned, of prompts with completions the completions, of texts everything.
    Under torchrun, the ranks are those it started; with --nproc-per-node they are started here.
    """
    try:
        if epochs is not None and max_steps is not None:
            raise ConfigError("--epochs and --max-steps both say how long to train; give one of them")
        duration = Epochs(1 if epochs is None else epochs) if max_steps is None else Steps(max_steps)
        request = TrainRequest(
            model=model,
            data=data,
            options=TrainOptions(duration=duration, warmup=Ratio(warmup_ratio), **options),
            told="stderr" if as_json else "stdout",
            output_dir=output_dir,
            save_dtype=save_dtype,
        )
        reports = run_ranks(nproc_per_node, train_on_rank, request)
    except ShardwiseError as error:
        fail(error)
    except KeyboardInterrupt:
        click.echo("interrupted; all ranks have been ended, nothing was written", err=True)
        sys.exit(130)
    if not reports:
        return
    _, trained, saved = reports[0]
    if as_json:
        printed = [
            {"load": load.to_dict(), "train": train.to_dict(), "save": save.to_dict() if save else None}
            for load, train, save in reports
        ]
        click.echo(json.dumps({"ranks": printed}, indent=2))
        return
    print_summary(trained)
    click.echo(str(saved) if saved else "The trained weights were not saved: pass --output-dir to have them.")


def train_on_rank(request: TrainRequest) -> tuple[LoadReport, TrainReport, SaveReport | None]:
    """What every rank does; the first one tells. Collective: yes."""
    from shardwise.training.data import read_data, step_loader
    from shardwise.training.loop import train
    from shardwise.training.prepare import (
        keep,
        load_model,
        load_tokenizer,
        require_embeddings,
        require_place,
        stored_dtype,
    )

    if request.output_dir is not None:
        require_place(request.output_dir)
    log = StepLog(request.options.log_every, request.told)
    tokenizer = load_tokenizer(request.model)
    data = read_data(request.data, tokenizer, max_length=request.options.max_length)
    model, loaded = load_model(request.model, request.options)
    require_embeddings(model, data)
    steps = step_loader(data, request.options)
    log.begin(loaded, data, len(steps))
    trained = train(model, steps, request.options, log.tell)
    if request.output_dir is None:
        return loaded, trained, None
    dtype = request.save_dtype or stored_dtype(loaded)
    return loaded, trained, keep(model, tokenizer, request.output_dir, dtype=dtype)


class StepLog:
    """One line for every few steps, and for the last, written on the first rank as it happens."""

    def __init__(self, every: int, told: Literal["stdout", "stderr"] = "stdout") -> None:
        self.every = every
        self.to_stderr = told == "stderr"
        self.last = 0
        self.tokens = 0
        self.seconds = 0.0
        self.silent = True

    def begin(self, loaded: LoadReport, data: TrainData, steps: int) -> None:
        """Tell about the model and the data, on the first rank."""
        self.silent = loaded.rank != 0
        self.last = steps
        self.say(str(loaded))
        self.say(describe_data(data))
        self.say(f"training: {steps} steps on {_count(loaded.world_size, 'rank')}")

    def tell(self, facts: StepFacts) -> None:
        """Tell about a step, where one of these is due."""
        self.tokens += facts.tokens
        self.seconds += facts.seconds
        if facts.step % self.every and facts.step not in (1, self.last):
            return
        width = len(str(self.last))
        self.say(
            f"step {facts.step:>{width}}/{self.last}  loss {facts.loss:7.4f}  lr {facts.learning_rate:.2e}  "
            f"grad norm {facts.grad_norm:8.3f}  {self.tokens / max(self.seconds, 1e-9):,.0f} tokens/s  "
            f"memory {facts.memory_bytes / 2**30:.2f} GiB"
        )
        self.tokens, self.seconds = 0, 0.0

    def say(self, text: str) -> None:
        if not self.silent:
            click.echo(text, err=self.to_stderr)


def describe_data(data: TrainData) -> str:
    """The rows and tokens of a training set, and the rows that are not there whole."""
    lines = [
        f"data {data.path}",
        f"  {_count(len(data.examples), 'row')}, {data.tokens:,} tokens, {data.supervised_tokens:,} learned",
    ]
    for lineno, what in (
        (data.cut_lines, "cut off at the end"),
        (data.skipped_lines, "left out: nothing to learn"),
    ):
        if lineno:
            shown = ", ".join(map(str, lineno[:8])) + (", ..." if len(lineno) > 8 else "")
            lines.append(f"  {what}: {_count(len(lineno), 'row')}, on line {shown}")
    return "\n".join(lines)


def print_summary(report: TrainReport) -> None:
    """The whole training in two lines."""
    click.echo(
        f"trained {report.trained_parameters:,} parameters in {_count(len(report.steps), 'step')}: "
        f"loss {report.losses[0]:.4f} -> {report.losses[-1]:.4f}"
    )
    click.echo(
        f"  {report.tokens:,} tokens ({report.supervised_tokens:,} learned) in {report.seconds:.1f} s, "
        f"{report.tokens_per_second:,.0f} tokens/s"
    )


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}" + ("" if number == 1 else "s")
