"""Checkpoints that many tests share."""

from tests.small_checkpoints import _quiet, changed, mixtral, qwen3, tied_qwen3

__all__ = ["_quiet", "changed", "mixtral", "qwen3", "tied_qwen3"]
