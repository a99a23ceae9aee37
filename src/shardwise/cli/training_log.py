"""Tells of a training as it happens: on the console, in one live bar, and in what is observed and drawn."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

import click
from tqdm import tqdm

from shardwise.errors import RankLostError
from shardwise.pictures.curves import Curves
from shardwise.training.report import CheckpointFacts, EvaluationFacts, Remark, StepFacts

if TYPE_CHECKING:
    from shardwise.observing.sampler import RankObserver
    from shardwise.report.load_report import LoadReport
    from shardwise.training.configuration.config_sections import ShardingSection, TrainConfig
    from shardwise.training.data.read_once import TrainData
    from shardwise.training.report import Event
    from shardwise.training.session import Session


_FORMAT = "{desc} {n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}"
"""What matters most comes first: a narrow terminal cuts off the end."""


class LiveBar:
    """Steps done, time gone and left, the last loss, epochs, tokens a second, memory of the fullest rank.

    On the error stream of one rank; ``is_silent`` on the others. Lines that are told meanwhile go above it.
    """

    def __init__(self, *, is_silent: bool = False) -> None:
        self._is_silent = is_silent
        self._bar: tqdm[Any] | None = None

    def begin(self, total: int) -> None:
        """Show it, where somebody can see it, for so many steps."""
        self._bar = tqdm(
            total=total,
            desc="training",
            bar_format=_FORMAT,
            disable=True if self._is_silent else None,  # None: unless stderr is a terminal
            leave=False,
            dynamic_ncols=True,
            mininterval=0.2,
            file=sys.stderr,
        )

    def go_on_after(self, steps: int) -> None:
        """So many more steps have been done before."""
        if self._bar is not None and not self._bar.disable:
            self._bar.initial += steps
            self._bar.n += steps
            self._bar.refresh()

    def step(self, facts: StepFacts) -> None:
        if self._bar is None or self._bar.disable:
            return
        self._bar.set_postfix_str(
            f"loss {facts.loss:.4f}, {facts.most_bytes / 2**30:.2f} GiB, {facts.tokens_per_second:,.0f} tokens/s, "
            f"epoch {facts.epoch:.2f}",
            refresh=False,
        )
        self._bar.update()

    def aside(self) -> AbstractContextManager[object]:
        """Within the block, lines may be written; the bar is below them afterwards."""
        if self._bar is None or self._bar.disable:
            return contextlib.nullcontext()
        mode: AbstractContextManager[object] = tqdm.external_write_mode(file=sys.stderr)
        return mode

    def close(self) -> None:
        """Take it away."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


STOPPED = 75
"""The exit code of a training that was asked to stop and has kept its state: EX_TEMPFAIL, call again to go on."""

Told: TypeAlias = Literal["stdout", "stderr"]
"""Where the console's lines go."""

Detail: TypeAlias = Literal["brief", "whole"]
"""How much is told of a load."""


def end_stuck(error: RankLostError) -> None:
    """Say which rank was lost, and end this one, which waits for it in a collective."""
    click.echo(f"error: {error}", err=True)
    sys.stderr.flush()
    os._exit(2)


class StepLog:
    """One line for every few steps, and for the last, written on the first rank as it happens.

    ``whose`` begins each line, where several are trained; ``total`` is how many steps there are. A ``bar`` is told
    of steps, and lines go above it. ``curves`` of the folder ``output`` are drawn at checkpoints and at the end.
    """

    def __init__(
        self,
        every: int,
        told: Told = "stdout",
        *,
        is_silent: bool = False,
        whose: str = "",
        total: int = 0,
        bar: LiveBar | None = None,
        output: Path | None = None,
        curves: Curves | None = None,
    ) -> None:
        self.every = every
        self.whose = f"{whose}  " if whose else ""
        self.to_stderr = told == "stderr"
        self.is_silent = is_silent
        self.total = total
        self.bar = bar or LiveBar(is_silent=True)
        self.output = output
        self.curves = None if is_silent else curves
        self.since: list[StepFacts] = []

    def begin(self, session: Session, detail: Detail = "brief") -> None:
        """Tell about the model and the data."""
        self.total = len(session.steps)
        self.say_loaded(session.loaded, detail)
        if session.data is None:
            buffer = session.config.data.shuffle_buffer
            self.say(f"data {session.steps.path}: read while it is trained on, shuffled {buffer:,} rows at a time")
        else:
            self.say(describe_data(session.data))
        if session.held_out is not None:
            self.say(describe_data(session.held_out, "evaluation"))
        ranks = count_of(session.size, "rank")
        self.say(f"training: {count_of(self.total, 'step')} on {ranks}, {_how(session.config.sharding)}")
        self.bar.begin(self.total)

    def tell(self, facts: Event) -> None:
        """Tell about a step, where one of these is due, and about all else."""
        width = len(str(self.total))
        place = f"{self.whose}step {facts.step:>{width}}/{self.total}"
        match facts:
            case StepFacts():
                self.bar.step(facts)
                self.since.append(facts)
                if facts.step % self.every == 0 or facts.step in (1, self.total):
                    self.say(f"{place}  {self._interval(facts)}")
                    self.since = []
            case EvaluationFacts():
                best = "  the best so far" if facts.is_best else ""
                self.say(f"{place}  evaluation: loss {facts.loss:.4f}  perplexity {facts.perplexity:.4g}{best}")
            case CheckpointFacts(kind="restored"):
                self.bar.go_on_after(facts.step)
                self.say(f"{self.whose}{facts.told}")
                self.say(f"{self.whose}training goes on after step {facts.step}")
            case CheckpointFacts():
                self._draw()
                self.say(f"{place}  checkpoint, in {facts.seconds:.1f} s")
            case Remark():
                self.say(f"{self.whose}{facts.text}")

    def _interval(self, last: StepFacts) -> str:
        """The steps since the last line: their mean loss, and of the last one what is of one step."""
        learned = sum(step.supervised_tokens for step in self.since)
        loss = sum(step.loss * step.supervised_tokens for step in self.since) / max(learned, 1)
        seconds = max(sum(step.seconds for step in self.since), 1e-9)
        return (
            f"loss {loss:7.4f}  lr {last.learning_rate:.2e}  grad norm {last.grad_norm:8.3f}  "
            f"{sum(step.tokens for step in self.since) / seconds:,.0f} tokens/s  "
            f"memory {last.most_bytes / 2**30:.2f} GiB"
        )

    def close(self) -> None:
        """There is no more to be told."""
        self._draw()

    def _draw(self) -> None:
        if self.curves is not None and self.output is not None:
            self.curves.draw(self.output)

    def say_loaded(self, loaded: LoadReport | None, detail: Detail) -> None:
        """Tell of a load, where there was one."""
        if loaded is not None:
            self.say(loaded.brief() if detail == "brief" else str(loaded))

    def say_end(self, observer: RankObserver | None, curves: Curves) -> None:
        """Tell what has not been drawn, and why this rank was not observed to the end, where it was not."""
        curves.finish()
        if curves.fault:
            self.say(curves.fault)
        if observer is not None and observer.fault:
            self.say(f"not observed to the end: {observer.fault}")

    def say(self, text: str) -> None:
        if not self.is_silent:
            with self.bar.aside():
                click.echo(text, err=self.to_stderr)


def _how(section: ShardingSection) -> str:
    """What is computed in, which may have been left to the machine."""
    recomputed = {False: "", True: ", blocks computed again in the backward pass"}
    return f"in {section.precision}{recomputed[bool(section.activation_checkpointing)]}"


def describe_data(data: TrainData, what: str = "data") -> str:
    """The rows and tokens of a training set, and the rows that are not there whole."""
    rows, examples = data.rows, len(data.examples)
    as_examples = "" if rows == examples else f" as {count_of(examples, 'example')}"
    lines = [
        f"{what} {data.path}",
        f"  {count_of(rows, 'row')}{as_examples}, {data.tokens:,} tokens, {data.supervised_tokens:,} learned",
    ]
    if data.layouts:
        shown = ", ".join(f"{name} ({count_of(count, 'row')})" for name, count in data.layouts.items())
        lines.append(f"  layout: {shown if len(data.layouts) > 1 else next(iter(data.layouts))}")
    if shares := data.shares():
        lines += [
            f"  {count_of(share, 'row')} of {name} in an epoch, which has {rows_of_set:,}"
            for name, share, rows_of_set in shares
        ]
    for places, why in (
        (data.cut_lines, "cut off at the end"),
        (data.skipped_lines, "left out: nothing to learn"),
        (tuple(fault.line for fault in data.malformed), f"left out: malformed, {_first_cause(data)}"),
    ):
        if places:
            shown = data.show_places(places[:8]) + (", ..." if len(places) > 8 else "")
            lines.append(f"  {why}: {count_of(len(places), 'row')}, {shown}")
    lines += [f"  {note}" for note in data.notes]
    return "\n".join(lines)


def _first_cause(data: TrainData) -> str:
    return f"such as {data.malformed[0].cause}" if data.malformed else ""


def count_of(number: int, word: str) -> str:
    """A number of things."""
    return f"{number:,} {word}" + ("" if number == 1 else "s")


def observed(config: TrainConfig, directory: str) -> AbstractContextManager[RankObserver | None]:
    """What writes down memory and phases of this rank, where that is asked for. Collective: yes, on entering."""
    if config.observe is False:
        return nullcontext()
    from shardwise.verbs.observe import observe

    return observe(directory) if config.observe is True else observe(directory, samples_per_second=config.observe)


def curves_of(environment: Mapping[str, str]) -> Curves:
    """What draws curves; not where ``SHARDWISE_CURVES`` is 0."""
    return Curves(are_wanted=environment.get("SHARDWISE_CURVES") != "0")
