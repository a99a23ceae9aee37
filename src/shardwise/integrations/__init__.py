"""Sharded models in other libraries' training and serving. The stub file lists the names."""

from shardwise._face import face_of
from shardwise.errors import require_versions

require_versions()

__getattr__, __dir__, __all__ = face_of(__name__, __file__)
