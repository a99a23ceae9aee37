"""State dicts of models and optimizers in memory, and ``shard``."""

from shardwise.core.errors import require_versions

require_versions()
