"""The ranks of a call: outcomes, messages, failures, and the processes they run in."""

from shardwise.core.errors import require_versions

require_versions()
