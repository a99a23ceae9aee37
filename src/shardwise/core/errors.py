"""Exceptions, and the checks of versions and keywords that raise them.

::

    ShardwiseError
    ├── CheckpointError          a checkpoint, or its fit to a model
    │   ├── FormatError          a file is not what it claims to be
    │   ├── KeyMismatchError     checkpoint and model have different tensors
    │   ├── ShardingError        a model cannot be sharded as requested
    │   ├── StorageError         bytes could not be read or written
    │   ├── RankMismatchError    ranks that must agree do not
    │   └── RankLostError        a rank was killed, has ended, or is stopped
    ├── TrainingError            a training run cannot continue
    └── ConfigError              an argument or an option cannot be honored

Every message has the parameter or the file, the rank if ranks differ, the cause, and the fix.
"""

import difflib
import functools
import re
from collections.abc import Collection, Mapping
from importlib import import_module, metadata
from typing import Any


def escape_controls(text: str) -> str:
    """Return lines with control characters escaped: names in files are untrusted, and terminals obey some."""
    return "".join(char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text)


class ShardwiseError(Exception):
    """Base class of shardwise's errors.

    ``phase`` is the call and the phase in which the ranks were, as in "load, read", if a collective raised the
    error on behalf of a rank. ``output`` is the outcome of a call of ``AdapterBank.forward_backward`` in which some
    losses raised, or of ``optim_step``, of the adapters that have stepped.
    """

    phase: str = ""
    output: Any = None

    def __str__(self) -> str:
        return escape_controls(super().__str__())


class CheckpointError(ShardwiseError):
    """A checkpoint cannot be loaded into a model, or a model cannot be saved."""


class FormatError(CheckpointError):
    """A file's content contradicts its format (truncated, overlapping, unknown dtype, ...)."""


class KeyMismatchError(CheckpointError):
    """Tensors are missing in a checkpoint, unexpected, or of another shape."""


class ShardingError(CheckpointError):
    """A model cannot be sharded as requested, or its sharding is not supported."""


class StorageError(CheckpointError):
    """Bytes could not be read from, or written to, a storage."""


class RankMismatchError(CheckpointError):
    """Ranks differ in what must be equal: arguments, plans, files, values."""


class RankLostError(CheckpointError):
    """A rank that the others wait for was killed, has ended, or is stopped."""


class TrainingError(ShardwiseError):
    """A training run cannot continue: its loss or gradient is not finite, or a rank is out of memory."""


class ConfigError(ShardwiseError):
    """An argument, an option or a configuration value cannot be honored."""


_OLDEST = {"torch": "2.11", "transformers": "5.17"}
"""As in ``pyproject.toml``."""


@functools.cache
def require_versions() -> None:
    """Reject a torch or transformers that is too old, before one of them is imported.

    Raises:
        ConfigError: the message has the installed version and the oldest supported one.
    """
    for library, oldest in _OLDEST.items():
        require_version(library, oldest)


def require_version(library: str, oldest: str) -> None:
    """Reject a library that is installed and too old.

    Raises:
        ConfigError: the message has the installed version and the oldest supported one.
    """
    installed = _get_version(library)
    if (numbers := _numbers(installed)) and numbers < _numbers(oldest):
        raise ConfigError(
            f"{library} {installed}: is too old. shardwise needs {oldest} or newer. Run pip install -U {library}"
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Return major and minor version, or nothing if it is not a version."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, match.groups())) if match else ()


_KNOWN = {
    "torch": "2.11 to 2.15",
    "transformers": "5.17 to 5.24",
    "accelerate": "1.13 to 1.15",
    "peft": "0.20 or 0.21",
    "trl": "1.16",
}
"""Versions whose private names are known."""


def private(path: str, instance: object = None) -> Any:
    """Look up a private name of a library, such as ``torch.autograd:Variable._execution_engine``.

    Call it where the feature that needs the name starts, so that no other feature depends on it. With ``instance``,
    an object of the class in ``path``, its own attribute is returned.

    Raises:
        ConfigError: the library is too old, or lacks the name.
    """
    try:
        return getattr(*find_private(path)) if instance is None else getattr(instance, path.rpartition(".")[2])
    except AttributeError as error:
        raise lacks(path) from error


@functools.cache
def find_private(path: str) -> tuple[Any, str]:
    """Return the module or class that has a private name, and the name in it. Errors are those of ``private``."""
    # The owner is kept, not the value, which may be replaced between two calls.
    module, _, names = path.partition(":")
    *classes, name = names.split(".")
    try:
        owner = functools.reduce(getattr, classes, import_module(module))
        getattr(owner, name)
    except (ImportError, AttributeError) as error:
        raise lacks(path) from error
    return owner, name


def require_private(owner: str, names: str, instance: object = None) -> None:
    """Look up several names of one class, separated by spaces. Errors are those of ``private``."""
    for name in names.split():
        private(f"{owner}.{name}", instance)


def lacks(path: str) -> ConfigError:
    """Return the error for a private name that a library lacks."""
    module, _, name = path.partition(":")
    library = module.partition(".")[0]
    require_version(library, _KNOWN[library].partition(" ")[0])
    return ConfigError(
        f"{library} {_get_version(library)} lacks the private name {name} ({module}). Use {library} "
        f"{_KNOWN[library]}, or a newer shardwise"
    )


def _get_version(library: str) -> str:
    try:
        return str(metadata.version(library))
    except metadata.PackageNotFoundError:
        return "(not installed)"


def nearest(name: str, known: Collection[str]) -> str:
    """Return a question that suggests the known name most similar to ``name``, or "" without one."""
    matches = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {matches[0]!r}?" if matches else ""


def unknown_keyword(call: str, name: str, known: Collection[str], instead: Mapping[str, str]) -> ConfigError:
    """Return the error for an unknown keyword of a call. ``instead`` has advice for some keywords."""
    if "config_overrides" in known:
        others = "Attributes of the config go into config_overrides"
    else:
        others = f"Keywords: {', '.join(known)}"
    remedy = instead.get(name) or nearest(name, known) or others
    return ConfigError(f"{call}() got an unexpected keyword argument {name!r}. {remedy}")
