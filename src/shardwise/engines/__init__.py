"""Public functions: load, save, shard, states, streams, merges, estimates."""

from shardwise.errors import require_versions

require_versions()
