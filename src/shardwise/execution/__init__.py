"""Execution of plans on all ranks, within a memory budget."""

from shardwise.errors import require_versions

require_versions()
