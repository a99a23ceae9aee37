"""Sharded models in other libraries' training and serving. The stub file lists the names."""

from shardwise._face import lazy_exports
from shardwise.errors import require_versions

require_versions()

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
