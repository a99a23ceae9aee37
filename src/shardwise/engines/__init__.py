"""What carries out the verbs: calls compared between ranks, checkpoints opened, models built, loads and saves."""

from shardwise.errors import require_versions

require_versions()
