"""Calls a function before each collective that torch is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import DTensor

from shardwise.models._torch_private import TorchDispatchMode

_NAMESPACES = ("c10d", "c10d_functional", "c10d_functional_autograd")
_WAITS = "wait_tensor"


class BeforeCollectives(TorchDispatchMode):
    """In this block ``ask`` is called with the name of each collective before it begins: torch's own, or DTensor's.

    What ``ask`` raises is raised where the collective was asked for, which is not begun then. Within ``ask`` the
    block does not count.
    """

    def __init__(self, ask: Callable[[str], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ask = ask

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # first it becomes what a DTensor does on plain tensors
        namespace, _, name = str(func).partition(".")
        if namespace.removeprefix("_") in _NAMESPACES and not name.startswith(_WAITS):
            self._ask(str(func))
        return func(*args, **(kwargs or {}))
