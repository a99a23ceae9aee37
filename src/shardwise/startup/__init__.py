"""How a model comes up, by this library and by others: what that takes of memory and time, beside each other."""

from shardwise.errors import require_versions

require_versions()
