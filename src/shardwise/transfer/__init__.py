"""Values on their way: between ranks, from files, into memory; checksums and metadata of them."""

from shardwise.core.errors import require_versions

require_versions()
