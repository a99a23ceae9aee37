"""Models as torch and transformers have them: built on meta, wrapped, looked into, initialized."""

from shardwise.errors import require_versions

require_versions()
