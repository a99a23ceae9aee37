"""Effects: what a plan decided is done, on all ranks, within a budget of memory."""

from shardwise.errors import require_versions

require_versions()
