"""Worlds, a storage on a port, what storages promise, and crashes, for tests and benchmarks."""
