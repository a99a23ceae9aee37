"""``load``, ``from_pretrained`` and ``plan``."""

from shardwise.core.errors import require_versions

require_versions()
