"""Give me these bytes, take these bytes: files read and written by range, in a folder or at a URL."""

from shardwise._face import face_of

__getattr__, __dir__, __all__ = face_of(__name__, __file__)
