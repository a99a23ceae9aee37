"""``shardwise train``: TRL's trainers with models of ours, from a configuration of TRL."""

from shardwise.errors import require_versions

require_versions()
