"""Readers and writers of files by range, in local folders or at URLs."""

from shardwise.core.lazy_exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
