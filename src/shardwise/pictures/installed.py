"""The libraries that draw, which not everybody has."""

from __future__ import annotations

import importlib.util

from shardwise.errors import ConfigError

_INSTALL = "pip install 'shardwise[report]'"


def lacking(*names: str) -> list[str]:
    """Those that are not installed."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def require(*names: str) -> None:
    """Refuse to draw without a library.

    Raises:
        ConfigError: naming those that are not installed.
    """
    if lack := lacking(*names):
        are = "is" if len(lack) == 1 else "are"
        raise ConfigError(f"{' and '.join(lack)}, which draws, {are} not installed; {_INSTALL}")


def note_on_curves() -> str:
    """Why a training has no curves drawn; "" where it has."""
    if not lacking("matplotlib"):
        return ""
    return f"loss.png and memory.png are not drawn: matplotlib is not installed; {_INSTALL}"
