"""Models of torch and transformers: building on meta, wrapping, inspection, and initialization."""

from shardwise.errors import require_versions

require_versions()
