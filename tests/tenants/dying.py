"""A command of which rank 1 is killed in the middle of its passes."""

from __future__ import annotations

import os
import signal
from typing import Any

from shardwise.cli import tenants, train

PASSES = 14
"""Those that go well."""

original = tenants.train_tenants_on_rank


def install() -> None:
    """To be called in the process that starts the ranks."""
    train.train_tenants_on_rank = on_rank  # type: ignore[attr-defined]


def on_rank(request: Any) -> Any:
    from shardwise.bank.adapter_bank import AdapterBank
    from shardwise.execution.ranks.world import World

    own, calls = AdapterBank.forward_backward, 0

    def forward_backward(self: AdapterBank, batches: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > PASSES and World.current().rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return own(self, batches)

    AdapterBank.forward_backward = forward_backward  # type: ignore[method-assign]
    return original(request)
