"""What is closed at the end of a block."""

from typing import Self


class Closing:
    """A ``with`` block closes it."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
