"""Readers and writers of files by range, in local folders or at URLs."""

from shardwise._face import face_of

__getattr__, __dir__, __all__ = face_of(__name__, __file__)
