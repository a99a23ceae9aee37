"""``shardwise train``: TRL's trainers with sharded models, from a configuration of TRL."""

from shardwise.errors import require_versions

require_versions()
