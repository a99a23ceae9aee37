"""``shardwise demo``: a small model from nothing to trained, on this machine, with proof."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardwise.cli.demo_parts import DemoPart, TenantsShown, show_tenants
from shardwise.cli.launch import TRAINING, Launched, fail, read_launch, run_ranks
from shardwise.errors import ConfigError, ShardwiseError
from shardwise.training.options import Ratio, Steps, TrainOptions
from shardwise.training.report import StepFacts

if TYPE_CHECKING:
    from shardwise.report.load_report import LoadReport
    from shardwise.report.save_report import SaveReport
    from shardwise.training.example import Comparison, Learned
    from shardwise.training.report import Event, TrainReport

CORPUS = Path(str(resources.files("shardwise.cli"))) / "data" / "facts.jsonl"
"""Short chats about plain facts, shipped with the package."""

QUESTIONS = ("What colour is grass?", "What is the capital of France?", "How many legs does a spider have?")

_MARK = ".made-by-shardwise-demo"
_VOCAB_SIZE = 1024
_SEED = 0
_ROWS_PER_STEP = 16
_STEPS = 130
_LORA_STEPS = 30
_KILLED_AT = 17
_CHECKPOINT_EVERY = 5
LEARNED_LOSS = 2.0
"""Nats a token; where the demo says that the model has learned. It begins near 7."""


@dataclass(frozen=True)
class DemoRequest:
    """What every rank is asked to do. ``started`` is a time of ``time.time``, which all processes share."""

    checkpoint: str
    truth: str
    corpus: str
    options: TrainOptions
    started: float
    saved: str
    """A folder for the trained model, which need not be there yet."""


@dataclass(frozen=True)
class DemoOutcome:
    """What one rank has seen. ``reloaded`` compares the trained model with what transformers loads of its files."""

    loaded: LoadReport
    comparison: Comparison
    trained: TrainReport
    answers: tuple[str, ...]
    saved: SaveReport
    reloaded: Comparison


@click.command("demo")
@click.option("--out", default="demo-out", show_default=True, type=click.Path(path_type=Path), help="A folder.")
@click.option(
    "--nproc-per-node", default=2, show_default=True, type=click.IntRange(1, _ROWS_PER_STEP), help="Ranks to start."
)
@click.option("--steps", default=_STEPS, show_default=True, type=click.IntRange(min=1), help="Of the training.")
def demo_command(*, out: Path, nproc_per_node: int, steps: int) -> None:
    """Make a small model, load it on several processes, prove every weight, train and save it; then LoRAs.

    Needs no network, no GPU and no model: everything is made in the folder OUT, in about a minute.
    """
    started = time.time()
    try:
        outcomes = run_demo(out, nproc_per_node, steps)
        lesson = run_lesson(out)
        tenants = show_tenants(out)
    except ShardwiseError as error:
        fail(error)
    except KeyboardInterrupt:
        click.echo("interrupted; all ranks have been ended", err=True)
        sys.exit(130)
    faults = [*find_faults(outcomes), *lesson.faults, *tenants.faults]
    _print_verdict(outcomes, lesson, tenants, faults, time.time() - started)
    if faults:
        sys.exit(1)


def run_demo(out: Path, nproc_per_node: int, steps: int) -> list[DemoOutcome]:
    """The first six parts of the demo; what each rank has seen.

    Raises:
        ConfigError: the folder is not for a demo, or a launcher has started several of these.
    """
    if isinstance(read_launch(os.environ, nproc_per_node), Launched):
        raise ConfigError("the demo starts its ranks itself: run it without torchrun")
    if importlib.util.find_spec("peft") is None:
        raise ConfigError("the demo's LoRA is PEFT's, which is not installed; pip install 'shardwise[peft]'")
    click.echo(
        "shardwise demo: a small language model is made, loaded by several processes of which each reads\n"
        "only its own part, compared bit by bit with what transformers loads, trained, and saved."
    )
    prepare_folder(out)
    checkpoint, truth = out / "checkpoint", out / "truth.pt"

    part = DemoPart(1, f"Train a tokenizer on the shipped chats ({CORPUS.name})")
    from shardwise.training import example

    tokenizer = example.train_tokenizer(CORPUS, _VOCAB_SIZE)
    part.end(f"a byte-level BPE tokenizer with {len(tokenizer):,} tokens")

    part = DemoPart(2, f"Write a small Qwen3 model with random weights to {checkpoint}, by transformers")
    written = example.write_model(checkpoint, tokenizer, seed=_SEED)
    tensors = example.write_truth(checkpoint, truth)
    part.end(
        f"{written.parameters:,} parameters in {len(written.files)} safetensors files and an index",
        f"the {tensors} tensors that transformers itself loads from them, in one process, are kept in {truth}",
    )

    request = DemoRequest(
        checkpoint=str(checkpoint),
        truth=str(truth),
        corpus=str(CORPUS),
        options=TrainOptions(
            learning_rate=2e-3,
            duration=Steps(steps),
            batch_size=max(1, _ROWS_PER_STEP // nproc_per_node),
            warmup=Ratio(0.1),
            max_length=128,
            seed=_SEED,
        ),
        started=time.time(),
        saved=str(out / "trained"),
    )
    return run_ranks(nproc_per_node, demo_on_rank, request, preloaded=TRAINING)


@dataclass(frozen=True)
class LessonOutcome:
    """What became of the LoRA: how the first run ended, what the second has seen, what the merged model says."""

    killed: str
    learned: Learned
    said: str
    expected: str
    directory: Path

    @property
    def faults(self) -> list[str]:
        """What did not turn out as it should."""
        report = self.learned.trained
        first = report.steps[0].step if report.steps else 0
        wanted = _KILLED_AT // _CHECKPOINT_EVERY * _CHECKPOINT_EVERY + 1
        faults = []
        if not self.killed:
            faults.append("the training of the LoRA went on although one of its processes was killed")
        if first != wanted:
            faults.append(f"the training of the LoRA went on with step {first}, and should have with {wanted}")
        if self.said != self.learned.answer:
            faults.append(f"merged, the LoRA says {self.said!r}, and before {self.learned.answer!r}")
        if self.said != self.expected:
            faults.append(f"the LoRA says {self.said!r}, and was taught {self.expected!r}")
        return faults


def run_lesson(out: Path) -> LessonOutcome:
    """Two more parts of the demo: a LoRA on two processes, of which one is killed; and on one, merged."""
    from shardwise.training import example as lesson
    from shardwise.verbs.merge_adapter import merge_adapter

    rows, adapter, merged = out / "new.jsonl", out / "adapter", out / "merged"
    lesson.write_rows(rows)
    request = lesson.Lesson(
        base=str(out / "trained"),
        rows=str(rows),
        checkpoints=str(out / "checkpoints"),
        adapter=str(adapter),
        options=TrainOptions(
            learning_rate=5e-3, duration=Steps(_LORA_STEPS), batch_size=4, warmup=Ratio(0.1), max_length=128
        ),
        checkpoint_every=_CHECKPOINT_EVERY,
        killed_at=_KILLED_AT,
    )
    part = DemoPart(7, f"Teach it a LoRA on 2 processes, and kill one of them after step {_KILLED_AT}")
    killed = ""
    try:
        run_ranks(2, lesson.learn, request, preloaded=TRAINING)
    except ShardwiseError as error:
        killed = str(error).splitlines()[-1]
    part.end(f"it ended: {killed}", f"checkpoints of the adapter are in {request.checkpoints}")

    part = DemoPart(8, f"Go on with the LoRA in this one process, and merge it into {merged}")
    options = replace(request.options, batch_size=2 * request.options.batch_size)
    [learned] = run_ranks(1, lesson.learn, replace(request, options=options, killed_at=None))
    merge_adapter(out / "trained", adapter, merged)
    said = lesson.answer_of(str(merged))
    part.end(
        f"it went on with step {learned.trained.steps[0].step}, and ended with a loss of "
        f"{learned.trained.losses[-1]:.3f}",
        f"{lesson.QUESTION} {said}",
    )
    return LessonOutcome(killed, learned, said, lesson.ANSWER, merged)


def demo_on_rank(request: DemoRequest) -> DemoOutcome:
    """What every rank does; the first one tells. Collective: yes."""
    from shardwise.cli.launch import this_place
    from shardwise.training import example
    from shardwise.training.data.loader import step_loader
    from shardwise.training.data.read_once import read_data
    from shardwise.training.loop import train
    from shardwise.training.prepare import ModelRequest, keep, load_model, load_tokenizer

    rank, size = this_place()
    processes = "one process" if size == 1 else f"{size} processes, each reading its own part"
    part = DemoPart(
        3, f"Load the model with shardwise.from_pretrained on {processes}", rank=rank, started=request.started
    )
    model, loaded = load_model(ModelRequest(request.checkpoint, request.options))
    part.end(*str(loaded).splitlines(), "(the time is mostly that of starting the processes)")

    part = DemoPart(4, "Compare every parameter and buffer, gathered, with what transformers loaded", rank=rank)
    comparison = example.compare_with_truth(model, Path(request.truth))
    part.end(_describe(comparison))

    part = DemoPart(5, "Train all weights on the chats; of each, the assistant's answer is learned", rank=rank)
    tokenizer = load_tokenizer(request.checkpoint)
    data = read_data(request.corpus, tokenizer, max_length=request.options.max_length)
    steps = step_loader(data, request.options)
    every = max(1, len(steps) // 10)

    def tell(facts: Event) -> None:
        if not isinstance(facts, StepFacts):
            return
        if facts.step == 1 or facts.step % every == 0 or facts.step == len(steps):
            bar = "#" * round(6 * facts.loss)
            part.say(f"step {facts.step:>4}  loss {facts.loss:5.2f}  {bar}")

    trained = train(model, steps, request.options, tell)
    part.end(f"{trained.tokens:,} tokens, {trained.tokens_per_second:,.0f} in a second")
    answers = tuple(example.answer(model, tokenizer, question) for question in QUESTIONS)

    part = DemoPart(
        6, f"Save it to {request.saved}, each process its own bytes, and load that by transformers", rank=rank
    )
    saved = keep(model, tokenizer, request.saved, max_shard_size="3MB")
    reloaded = example.compare_with_transformers(model, Path(request.saved), Path(request.truth))
    part.end(*str(saved).splitlines(), f"loaded by transformers: {_describe(reloaded)}")
    return DemoOutcome(loaded, comparison, trained, answers, saved, reloaded)


def prepare_folder(out: Path) -> None:
    """An empty folder for the demo. What an earlier demo left there is removed; anything else is left alone.

    Raises:
        ConfigError: the folder holds what no demo has made.
    """
    mark = out / _MARK
    try:
        if out.is_dir() and any(out.iterdir()) and not mark.is_file():
            raise ConfigError(
                f"{out} is not empty, and not made by an earlier demo; give another folder with --out"
            )
        out.mkdir(parents=True, exist_ok=True)
        mark.touch()
        if (out / "checkpoint").is_symlink():
            (out / "checkpoint").unlink()
        shutil.rmtree(out / "checkpoint", ignore_errors=True)
        for made in ("trained", "adapter", "checkpoints", "merged", "tenants"):
            shutil.rmtree(out / made, ignore_errors=True)
        (out / "truth.pt").unlink(missing_ok=True)
        (out / "checkpoint").mkdir()
    except OSError as error:
        raise ConfigError(f"{out}: the demo cannot write there ({error.strerror or error})") from error


def find_faults(outcomes: Sequence[DemoOutcome]) -> list[str]:
    """What did not turn out as it should, on any rank."""
    faults = [
        f"rank {outcome.loaded.rank}: {len(outcome.comparison.differing)} tensors are not bitwise those that "
        f"transformers loads: {', '.join(outcome.comparison.differing[:4])}"
        for outcome in outcomes
        if outcome.comparison.differing
    ]
    faults += [
        f"rank {outcome.loaded.rank}: {len(outcome.reloaded.differing)} tensors that transformers "
        "loads of the saved "
        f"model are not those that were trained: {', '.join(outcome.reloaded.differing[:4])}"
        for outcome in outcomes
        if outcome.reloaded.differing
    ]
    final = final_loss(outcomes[0].trained)
    if not final < LEARNED_LOSS:
        faults.append(f"the loss ended at {final:.2f}; it should have fallen below {LEARNED_LOSS}")
    return faults


def final_loss(report: TrainReport) -> float:
    """The mean of the last five steps, in nats a token."""
    last = report.losses[-5:]
    return sum(last) / len(last)


def _describe(comparison: Comparison) -> str:
    facts = (
        f"{comparison.tensors} tensors ({comparison.parameters} parameters, {comparison.buffers} buffers), "
        f"{comparison.nbytes / 2**20:.2f} MiB"
    )
    if comparison.differing:
        return f"{facts}: {len(comparison.differing)} DIFFER, {', '.join(comparison.differing[:4])}"
    return f"{facts}: not one bit differs"


def _print_verdict(
    outcomes: Sequence[DemoOutcome],
    lesson: LessonOutcome,
    tenants: TenantsShown,
    faults: Sequence[str],
    seconds: float,
) -> None:
    first = outcomes[0]
    losses = first.trained.losses
    click.echo("\nThe trained model answers:")
    for question, answer in zip(QUESTIONS, first.answers, strict=True):
        click.echo(f"      {question} {answer}")
    if faults:
        click.echo(f"\nFailed, after {seconds:.0f} s:")
        for fault in faults:
            click.echo(f"  - {fault}")
        return
    read = " and ".join(f"{outcome.loaded.read_bytes / 2**20:.2f}" for outcome in outcomes)
    of_all = f"of {first.loaded.checkpoint_bytes / 2**20:.2f} MiB"
    everywhere = "" if len(outcomes) == 1 else f", on each of the {len(outcomes)} ranks"
    click.echo(f"\nShown, in {seconds:.0f} s:")
    click.echo(f"  - reading: {read} MiB {of_all}, rank by rank")
    click.echo(f"  - loading: all {first.comparison.tensors} tensors bitwise those of transformers{everywhere}")
    click.echo(f"  - training: loss {losses[0]:.2f} -> {final_loss(first.trained):.2f} in {len(losses)} steps")
    click.echo(f"  - saving: all {first.saved.tensors} tensors, by all ranks at once, are those transformers loads")
    click.echo(
        f"  - going on: a LoRA, killed on 2 processes after step {_KILLED_AT}, went on in 1 with step "
        f"{lesson.learned.trained.steps[0].step}; merged, it answers alike"
    )
    click.echo(f"  - many at once: {tenants}")
    click.echo(f"The trained model is in {first.saved.directory}, and with the LoRA in {lesson.directory}.")
