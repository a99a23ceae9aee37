"""What ranks do in the tests of many tenants."""

from __future__ import annotations

from typing import Any

from shardwise.cli.tenants import TenantsRequest, train_tenants_on_rank
from shardwise.tenants.config import tenants_of


def train(values: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """What the command has its ranks do: its exit code, and what it tells as JSON."""
    outcome = train_tenants_on_rank(TenantsRequest(tenants_of(values), "stderr"))
    return outcome.exit_code, outcome.to_dict()
