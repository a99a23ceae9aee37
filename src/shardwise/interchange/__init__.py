"""Reads and writes files of accelerate and the Trainer, and merges sharded checkpoints."""

from shardwise.errors import require_versions

require_versions()
