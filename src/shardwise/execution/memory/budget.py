"""The least memory that a call can work with."""

from __future__ import annotations

from typing import Final

from shardwise.errors import ConfigError

_PAGE_BYTES: Final = 4096


def require_budget(budget_bytes: int) -> None:
    """Raise for a budget, of any call, that no page goes into.

    Raises:
        ConfigError: naming it.
    """
    if budget_bytes < _PAGE_BYTES:
        raise ConfigError(f"budget_bytes={budget_bytes} is less than a page ({_PAGE_BYTES})")
