"""Other libraries' ways of training and serving, with models that are sharded here."""

from __future__ import annotations

from shardwise._face import face_of

__getattr__, __dir__, __all__ = face_of(__name__, __file__)
