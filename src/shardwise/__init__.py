"""Hugging Face models under PyTorch FSDP2, each rank touching only its own bytes.

The names that users see are stated in ``__init__.pyi``. They are loaded when they are first used, so that
``import shardwise`` is quick and ``shardwise inspect`` needs no torch.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

__version__ = "0.1.0"


def _homes() -> dict[str, str]:
    """By name, the module it is imported from."""
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text("utf-8"))
    found = [node for node in stub.body if isinstance(node, ast.ImportFrom) and node.module]
    return {alias.name: str(node.module) for node in found for alias in node.names}


_HOMES = _homes()

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
