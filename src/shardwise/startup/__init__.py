"""Comparison of several ways to bring up a model for training: memory, seconds, and the values of the model."""

from shardwise.errors import require_versions

require_versions()
