"""Reports and estimates as plain data, and formatting of names and sizes."""

from shardwise._face import face_of

__getattr__, __dir__, __all__ = face_of(__name__, __file__)
