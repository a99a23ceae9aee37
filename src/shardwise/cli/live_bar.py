"""One bar on a terminal for what is trained; nothing where there is no terminal."""

from __future__ import annotations

import contextlib
import sys
from contextlib import AbstractContextManager
from typing import Any, Self

from tqdm import tqdm

from shardwise.training.report import StepFacts

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
