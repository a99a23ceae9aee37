"""Layers whose weights are in four bits."""

from shardwise.core.errors import require_versions

require_versions()
