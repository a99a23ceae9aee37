"""How each verb does what it does, as values: what may be replaced, who reads, what is kept, which memory."""

from shardwise._face import face_of

__getattr__, __dir__, __all__ = face_of(__name__, __file__)
