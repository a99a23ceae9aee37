"""``save``, streams, merges and ``verify``, and the commit of every kind of save."""

from shardwise.core.errors import require_versions

require_versions()
