"""What happened or will happen, as plain data, and how names and sizes are put into words."""

from shardwise._face import face_of

__getattr__, __dir__, __all__ = face_of(__name__, __file__)
