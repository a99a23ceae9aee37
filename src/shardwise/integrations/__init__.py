"""Models that are sharded here, in other libraries' ways of training and serving: stated in the stub beside."""

from shardwise._face import face_of
from shardwise.errors import require_versions

require_versions()

__getattr__, __dir__, __all__ = face_of(__name__, __file__)
