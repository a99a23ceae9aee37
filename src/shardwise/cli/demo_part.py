"""Tells of one part of the demo."""

from __future__ import annotations

import time

import click

_PARTS = 9


class DemoPart:
    """One numbered part of the demo, told on the first rank: a heading, then results and seconds."""

    def __init__(self, number: int, heading: str, *, rank: int = 0, started: float | None = None) -> None:
        self.tells = rank == 0
        self.started = time.time() if started is None else started
        if self.tells:
            click.echo(f"\n[{number}/{_PARTS}] {heading}")

    def say(self, line: str) -> None:
        if self.tells:
            click.echo(f"      {line}")

    def end(self, *results: str) -> None:
        for line in results:
            self.say(line)
        self.say(f"{time.time() - self.started:.1f} s")
