"""One progress bar, on the first rank."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from tqdm import tqdm

from shardwise.models import transformers_compat as compat


class Progress(Protocol):
    """Told of bytes as they arrive."""

    def advance(self, nbytes: int) -> None: ...


class ProgressBar:
    """A bar of bytes with rate and time left; silent where there is no terminal or transformers' bars are off."""

    def __init__(self, label: str, total_bytes: int, *, enabled: bool) -> None:
        shown = enabled and compat.progress_bars_enabled()
        self._bar = tqdm(
            total=total_bytes,
            desc=label,
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            disable=None if shown else True,  # None: only when stderr is a terminal
            leave=False,
            mininterval=0.2,
        )

    def advance(self, nbytes: int) -> None:
        self._bar.update(nbytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
