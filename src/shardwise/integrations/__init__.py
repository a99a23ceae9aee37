"""Sharded models in other libraries' training and serving. The stub file lists the names."""

from shardwise.core.errors import require_versions
from shardwise.core.lazy_exports import lazy_exports

require_versions()

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
