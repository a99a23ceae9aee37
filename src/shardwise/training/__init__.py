"""``shardwise train``: TRL's trainers with sharded models, from a configuration of TRL."""

from shardwise.core.errors import require_versions

require_versions()
