"""What users call: one page each, read top to bottom."""

from shardwise.errors import require_versions

require_versions()
