"""Reads and writes torch's key-value store, under a prefix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class KeyStore:
    """The store under a prefix. All values are bytes."""

    def __init__(self, store: Any, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def set(self, key: str, value: bytes) -> None:
        self._store.set(f"{self._prefix}/{key}", value)

    def has(self, key: str) -> bool:
        return bool(self._store.check([f"{self._prefix}/{key}"]))

    def find(self, key: str) -> bytes | None:
        return self.get_all([key])[0] if self.has(key) else None

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """Values that are known to be there."""
        names = [f"{self._prefix}/{key}" for key in keys]
        if self._store.has_extended_api():
            return [bytes(value) for value in self._store.multi_get(names)]
        return [bytes(self._store.get(name)) for name in names]

    def set_first(self, key: str, value: bytes) -> bytes:
        """Set a key unless it is there; its value, whoever set it."""
        return bytes(self._store.compare_set(f"{self._prefix}/{key}", "", value.decode()))

    def count(self, key: str, more: int) -> int:
        return int(self._store.add(f"{self._prefix}/{key}", more))

    def forget(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._store.delete_key(f"{self._prefix}/{key}")

    def below(self, name: str) -> KeyStore:
        return KeyStore(self._store, f"{self._prefix}/{name}")
