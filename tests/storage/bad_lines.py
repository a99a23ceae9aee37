"""Loads where a line of a table leads nowhere on one rank: what it names is not installed there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save
from torch import nn

import shardwise
from shardwise.engines.load_fill import FORMS
from shardwise.storage import MemoryReader
from shardwise.storage.names import HubOptions
from shardwise.storage.reading import opening

TABLES = ("pinner", "opener", "repositories", "form")


class InOwnForm(nn.Linear):
    """A layer that says that it is kept in a form of its own."""

    kept_as = "own"


def stored() -> MemoryReader:
    return MemoryReader({"model.safetensors": save({"weight": torch.ones(3, 5), "bias": torch.ones(3)})})


def open_stored(_url: str, _options: Mapping[str, Any]) -> MemoryReader:
    return stored()


def loaded(table: str) -> tuple[str, str]:
    """What a load raises where one rank has a bad line: the first, of what the first alone asks."""
    is_bad = dist.get_rank() == (0 if table == "pinner" else 1)
    module = "nosuch.module" if is_bad else __name__
    with pytest.MonkeyPatch.context() as patch:
        if table == "repositories" and is_bad:
            patch.setattr(opening, "_REPOSITORIES", module)
        patch.setitem(FORMS, "own", f"{module}:form" if is_bad else FORMS["four bits"])
        pinner = f"{module}:pinned" if table == "pinner" else ""
        patch.setitem(opening.SCHEMES, "own", opening.UrlScheme(f"{module}:open_stored", pinner=pinner))
        checkpoint: Any = "organisation/name" if table == "repositories" else "own://x/y"
        if table == "form":
            checkpoint = stored()
        model = InOwnForm(5, 3) if table == "form" else nn.Linear(5, 3)
        try:
            hub = HubOptions(local_files_only=table == "repositories")
            shardwise.load(model, checkpoint, hub=hub)
        except Exception as error:
            return type(error).__name__, str(error)
    return "", ""
