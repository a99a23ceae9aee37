"""Trains many LoRAs on one base, from one configuration."""

from shardwise.errors import require_versions

require_versions()
