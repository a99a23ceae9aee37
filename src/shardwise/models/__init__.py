"""Models of transformers: building on meta, traced conversions, initialization, tunings, four-bit layers."""

from shardwise.core.errors import require_versions

require_versions()
