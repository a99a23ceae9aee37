"""Keys of users, with their limits."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from pathlib import Path

import pydantic
import yaml

from shardwise.core.errors import ConfigError
from shardwise.core.untrusted import parse_yaml

PREFIX = "tml-"
"""The client refuses keys that begin otherwise."""


class UserKey(pydantic.BaseModel):
    """A user, and what the user may have at a time.

    Attributes:
        name: name of the user, for logs and metrics.
        sha256: of the key, in hexadecimal digits. "" for everybody, without a file of keys.
        is_operator: whether the user sees the models of all users in ``/status``, and ``/metrics``.
        max_sessions: sessions. Each client has one.
        max_models: models.
        max_rank: rank of a LoRA.
        max_snapshots: copies of a model in memory to sample from. The one used longest ago is forgotten.
        max_requests: requests that wait. Of each model as many again may wait for an earlier one.
        max_tokens: tokens of these requests, likewise.
        max_result_bytes: bytes of results that are kept. Older ones are forgotten.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str
    sha256: str = pydantic.Field(default="", pattern="^[0-9a-f]{64}$")
    is_operator: bool = False
    max_sessions: pydantic.PositiveInt = 256
    max_models: pydantic.PositiveInt = 8
    max_rank: pydantic.PositiveInt = 128
    max_snapshots: pydantic.PositiveInt = 4
    max_requests: pydantic.PositiveInt = 4096
    max_tokens: pydantic.PositiveInt = 4_000_000
    max_result_bytes: pydantic.PositiveInt = 1 << 28

    @property
    def folder(self) -> str:
        """Name of the user's folder of checkpoints."""
        return self.sha256[:16] or "local"


LOCAL = UserKey(name="local", is_operator=True)
"""The only user of a server without a file of keys, who may send any key."""


def find_key(keys: Mapping[str, UserKey] | None, text: str) -> UserKey | None:
    """Return the user of a key, or None. ``keys`` are by digest, so that the time of the search tells nothing."""
    return LOCAL if keys is None else keys.get(hashlib.sha256(text.encode()).hexdigest())


def read_keys(file: Path) -> dict[str, UserKey]:
    """Return the users of a YAML file, by digest: names, each with ``sha256`` and limits of :class:`UserKey`.

    Raises:
        ConfigError: the file cannot be read, or its values are invalid.
    """
    try:
        values = parse_yaml(file.read_text())
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{file}: cannot be read, {error}") from error
    keys: dict[str, UserKey] = {}
    for name, entry in (values if isinstance(values, dict) else {}).items():
        where = f"{file}: {name}"
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{where}: is not a name. Write text, in quotes if YAML reads another value")
        if not isinstance(entry, dict) or "sha256" not in entry or "name" in entry:
            raise ConfigError(f"{where}: has no sha256 of a key. Run shardwise serve --new-key NAME")
        try:
            key = UserKey.model_validate({**entry, "name": name})
        except pydantic.ValidationError as error:
            known = ", ".join(each for each in UserKey.model_fields if each != "name")
            raise ConfigError(f"{where}: {describe_faults(error)}. Use {known}") from error
        if key.sha256 in keys:
            raise ConfigError(f"{where}: has the key of {keys[key.sha256].name}. Make another one")
        keys[key.sha256] = key
    if not keys:
        raise ConfigError(f"{file}: has no users. Run shardwise serve --new-key NAME, and add what it prints")
    return keys


def describe_faults(error: pydantic.ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:5])


def make_key(name: str) -> str:
    """Return a new key and its entry for the file of keys, as text."""
    key = PREFIX + secrets.token_urlsafe(32)
    digest = hashlib.sha256(key.encode()).hexdigest()
    entry = yaml.safe_dump({name: {"sha256": digest}}, allow_unicode=True)
    return f"# The key, which only the user needs: {key}\n{entry.rstrip()}"
