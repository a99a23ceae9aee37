"""Option types of the public functions."""

from shardwise._face import face_of

__getattr__, __dir__, __all__ = face_of(__name__, __file__)
