"""Shipped for tests, ours and users': small worlds of processes."""

from shardwise.testing.world import run_world

__all__ = ["run_world"]
