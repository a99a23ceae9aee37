"""What a kind of remote storage has to do: one request at a time, and say how it failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

PASSING_STATUSES: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
"""HTTP statuses after which the same request may succeed."""


class TransientFault(OSError):
    """A request failed in a way in which the next one may not."""

    def __init__(self, cause: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(cause)
        self.retry_after_s = retry_after_s


class PermanentFault(OSError):
    """A request failed and would fail again; ``remedy`` says what to do."""

    def __init__(self, cause: str, remedy: str) -> None:
        super().__init__(cause)
        self.remedy = remedy


def changed(what: str) -> PermanentFault:
    """A file's content was replaced since it was first looked at."""
    return PermanentFault(
        f"the file changed while it was being read ({what})",
        "load again, from files that nobody writes to",
    )


@dataclass(frozen=True, slots=True)
class FileState:
    """A file's size in bytes, and what its storage calls this version of it (None: nothing)."""

    nbytes: int
    version: str | None

    @property
    def identity(self) -> str:
        return f"{self.version or 'no version'}, {self.nbytes} bytes"

    def require_version(self, version: str | None) -> None:
        """Nothing contradicts that the file is still in this state.

        A version is a kind and a value ("ETag abc"). Not every server of a cluster tells the same kind, and what is
        told in another way cannot be compared.

        Raises:
            PermanentFault: for another version.
        """
        if self.version is None or version is None or version == self.version:
            return
        if version.split(" ")[0] == self.version.split(" ")[0]:
            raise changed(f"{self.version} before, {version} now")


class Transport(Protocol):
    """Makes single requests. Every method may be called from several threads at once.

    Raises FileNotFoundError, PermissionError, :class:`TransientFault` and :class:`PermanentFault`, which hold the
    cause as text.
    """

    def list(self) -> list[str]:
        """All files below the root, in any order.

        Raises:
            CannotListError: where the storage does not tell.
        """
        ...

    def state(self, file: str) -> FileState:
        """The file's state as it is now."""
        ...

    def fetch(
        self,
        file: str,
        start: int,
        buffers: Sequence[memoryview],
        expected: FileState,
        is_abandoned: Callable[[], bool],
    ) -> None:
        """Fill the buffers, of bytes and none of them empty, with one range, which lies in the file.

        The file must be in the ``expected`` state. When ``is_abandoned`` says so, nobody waits for the bytes any
        more, and any fault may be raised.
        """
        ...

    def close(self) -> None: ...
