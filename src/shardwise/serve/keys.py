"""Keys of users, with their limits."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from shardwise.core.errors import ConfigError

PREFIX = "tml-"
"""The client refuses keys that begin otherwise."""


@dataclass(frozen=True, slots=True)
class UserKey:
    """A user, and what the user may have at a time.

    Attributes:
        name: name of the user, for logs and metrics.
        digest: SHA-256 of the key, in hexadecimal digits. "" for everybody, without a file of keys.
        is_operator: whether the user sees the models of all users in ``/status``, and ``/metrics``.
        max_models: models.
        max_rank: rank of a LoRA.
        max_snapshots: copies of a model in memory to sample from. Older ones are forgotten.
        max_requests: requests that wait.
        max_tokens: tokens of requests that wait.
        max_result_bytes: bytes of results that are kept. Older ones are forgotten.
    """

    name: str
    digest: str = ""
    is_operator: bool = False
    max_models: int = 8
    max_rank: int = 128
    max_snapshots: int = 4
    max_requests: int = 4096
    max_tokens: int = 4_000_000
    max_result_bytes: int = 1 << 28

    @property
    def folder(self) -> str:
        """Name of the user's folder of checkpoints."""
        return self.digest[:16] or "local"


LOCAL = UserKey("local", is_operator=True)
"""The only user of a server without a file of keys, who may send any key."""


def find_key(keys: Mapping[str, UserKey] | None, text: str) -> UserKey | None:
    """Return the user of a key, or None. ``keys`` are by digest, so that the time of the search tells nothing."""
    return LOCAL if keys is None else keys.get(hashlib.sha256(text.encode()).hexdigest())


def read_keys(file: Path) -> dict[str, UserKey]:
    """Return the users of a YAML file, by digest: names, each with ``sha256`` and limits of :class:`UserKey`.

    Raises:
        ConfigError: the file cannot be read, or its values are invalid.
    """
    import yaml

    try:
        values = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: cannot be read, {error}") from error
    limits = {each.name for each in fields(UserKey)} - {"name", "digest", "is_operator"}
    keys: dict[str, UserKey] = {}
    for name, entry in (values if isinstance(values, dict) else {}).items():
        where = f"{file}: {name}"
        if not name:
            raise ConfigError(f"{where}: is an entry without a name. Write the user's name")
        digest = entry.pop("sha256", None) if isinstance(entry, dict) else None
        if not isinstance(digest, str) or len(digest) != 64 or set(digest) - set("0123456789abcdef"):
            raise ConfigError(f"{where}: has no sha256 of a key. Run shardwise serve --new-key {name}")
        is_operator = entry.pop("is_operator", False)
        if not isinstance(is_operator, bool):
            raise ConfigError(f"{where}: is_operator={is_operator!r} is not true or false")
        if unknown := sorted(map(str, entry.keys() - limits)):
            raise ConfigError(f"{where}: has no limit {', '.join(unknown)}. Use {', '.join(sorted(limits))}")
        for limit, value in entry.items():
            if type(value) is not int or value < 1:
                raise ConfigError(f"{where}: {limit}={value!r} is not a number of 1 or more")
        if digest in keys:
            raise ConfigError(f"{where}: has the key of {keys[digest].name}. Make another one")
        keys[digest] = UserKey(str(name), digest, is_operator, **entry)
    if not keys:
        raise ConfigError(f"{file}: has no users. Run shardwise serve --new-key NAME, and add what it prints")
    return keys


def make_key(name: str) -> str:
    """Return a new key and its entry for the file of keys, as text."""
    key = PREFIX + secrets.token_urlsafe(32)
    digest = hashlib.sha256(key.encode()).hexdigest()
    return f"# The key, which only the user needs: {key}\n{name}:\n  sha256: {digest}"
