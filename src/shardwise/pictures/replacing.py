"""Files that are replaced in one go."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardwise.errors import StorageError


@contextmanager
def in_place_of(path: Path) -> Iterator[Path]:
    """What the block writes into the file that it is given takes the place of this one.

    Of a block that fails nothing is left.

    Raises:
        StorageError: it cannot be written.
    """
    fresh = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield fresh
        fresh.replace(path)
    except OSError as error:
        cause = error.strerror or error
        raise StorageError(f"{path}: it cannot be written ({cause}); make room, or name another folder") from error
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink()
