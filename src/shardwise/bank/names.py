"""Says what an adapter may be called."""

from __future__ import annotations

import re

from shardwise.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def require_name(name: object) -> str:
    """A name that is safe as that of a folder, of a file, and in a log.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name) or ".." in name or name.endswith("."):
        raise ConfigError(
            f"{name!r} is no name of an adapter: up to 128 letters, digits, '.', '_' and '-', the first a letter "
            "or a digit, the last no '.', and no '..'"
        )
    return name
