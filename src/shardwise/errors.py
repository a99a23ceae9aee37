"""Everything that can go wrong, by name.

::

    ShardwiseError
    ├── CheckpointError          something about a checkpoint or a model's fit to it
    │   ├── FormatError          a file is not what it claims to be
    │   ├── KeyMismatchError        checkpoint and model do not cover each other
    │   ├── ShardingError       a model cannot be sharded, or is sharded, as asked
    │   ├── StorageError         bytes could not be read or written
    │   ├── RankMismatchError    ranks that must agree do not
    │   └── RankLostError        a rank was killed, has ended, or is stopped
    ├── TrainingError            a training cannot go on
    └── ConfigError              an argument or an option that cannot be honored

Every message names the parameter or the file, the rank if it is not the same everywhere, the cause, and the fix.
"""

import platform
import re
from functools import cache
from importlib import metadata
from types import TracebackType


class ShardwiseError(Exception):
    """Base class of every error shardwise raises on purpose.

    ``step`` is the call and the phase in which the ranks were, as in "load, read", if a collective raised the error
    on behalf of a rank.
    """

    step: str = ""


class CheckpointError(ShardwiseError):
    """A checkpoint cannot be brought into a model, or a model into a checkpoint."""


class FormatError(CheckpointError):
    """A file's content contradicts its format (truncated, overlapping, unknown dtype, ...)."""


class KeyMismatchError(CheckpointError):
    """Checkpoint and model do not cover each other: missing, unexpected or mismatched tensors."""


class ShardingError(CheckpointError):
    """A model cannot be sharded as requested, or its sharding is not supported."""


class StorageError(CheckpointError):
    """Bytes could not be read from, or written to, a storage."""


class RankMismatchError(CheckpointError):
    """Ranks that must hold or plan the same thing do not."""


class RankLostError(CheckpointError):
    """A rank that the others need was killed, has ended, is stopped, never came, or ran out of memory."""


class TrainingError(ShardwiseError):
    """A training cannot continue: its loss or gradient is not finite."""


class ConfigError(ShardwiseError):
    """An argument, an option or a configuration value cannot be honored."""


_OLDEST = {"torch": "2.11", "transformers": "5.17"}
"""As in ``pyproject.toml``."""


@cache
def require_versions() -> None:
    """Refuse a torch or transformers that is too old, before one of them is imported.

    Raises:
        ConfigError: as of :func:`require_version`.
    """
    for library, oldest in _OLDEST.items():
        require_version(library, oldest)


def require_version(library: str, oldest: str) -> None:
    """Refuse a library that is installed and too old.

    Raises:
        ConfigError: naming the installed version and the oldest one that works.
    """
    installed = _version_of(library)
    if (found := _numbers(installed)) and found < _numbers(oldest):
        raise ConfigError(
            f"{library} {installed}: is too old. shardwise needs {oldest} or newer. Run pip install -U {library}"
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version, or none if it is not a version."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else ()


class KnownNames:
    """Context that uses private names of a library, and raises one error if one of them is missing.

    Raises:
        ConfigError: the library is too old, or a name is missing. The message has the name, the installed version,
            and the supported ones.
    """

    def __init__(self, library: str, versions: str) -> None:
        self.library = library
        self.versions = versions

    def __enter__(self) -> None:
        require_version(self.library, self.versions.partition(" ")[0])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, (ImportError, AttributeError)):
            raise ConfigError(
                f"{self.library} {_version_of(self.library)} lacks a private name that shardwise needs ({error}). "
                f"Use {self.library} {self.versions}, or a newer shardwise"
            ) from error


def _version_of(library: str) -> str:
    if library == "Python":
        return platform.python_version()
    try:
        return str(metadata.version(library))
    except metadata.PackageNotFoundError:
        return "(not installed)"
