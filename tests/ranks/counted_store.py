"""Many ranks as threads of one process, over a store that counts what it carries."""

import re
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.support.local_ranks import LIMIT_S

from shardwise.ranks import control_channel
from shardwise.ranks import world as world_module


@dataclass
class CountedStore:
    """As torch's store. Who would look again and again for what is not there yet looks once, and waits.

    Attributes:
        size: how many ranks there are.
        calls: by kind.
        asked: the same, by the last word of the key.
        nbytes: keys and values, of all calls.
        largest_bytes: of the values.
    """

    size: int
    calls: Counter[str] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)
    nbytes: int = 0
    largest_bytes: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._events: defaultdict[str, threading.Event] = defaultdict(threading.Event)

    def __hash__(self) -> int:
        return id(self)

    def _count(self, kind: str, *items: str | bytes) -> None:
        self.calls[kind] += 1
        self.asked[re.findall("[a-z]+", str(items[0]))[-1]] += 1
        self.nbytes += sum(map(len, items))
        self.largest_bytes = max(self.largest_bytes, *(len(item) for item in items))

    def _await(self, key: str) -> None:
        assert self._events[key].wait(LIMIT_S), f"nobody set {key}"

    def has_extended_api(self) -> bool:
        return True

    def set(self, key: str, value: bytes) -> None:
        with self._lock:
            self._count("set", key, value)
            self._values[key] = bytes(value)
            event = self._events[key]
        event.set()

    def check(self, keys: Sequence[str]) -> bool:
        (key,) = keys
        if key.endswith(("/all", "/in", "/out")) and self.size > 1:
            self._await(key)
        with self._lock:
            self._count("check", key)
            return key in self._values

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        with self._lock:
            found = [self._values[key] for key in keys]
            self._count("multi_get", *keys, *found, b"")
            return found

    def add(self, key: str, more: int) -> int:
        assert more, "a poll must not write"
        with self._lock:
            self._count("add", key)
            total = int(self._values.get(key, b"0")) + more
            self._values[key] = str(total).encode()
            if total % (1 << 32) == self.size - 1:
                self._events[key].set()
            return total

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        with self._lock:
            self._count("compare_set", key, expected, value)
            return self._values.setdefault(key, value.encode())

    def delete_key(self, key: str) -> bool:
        with self._lock:
            self._count("delete_key", key)
            return self._values.pop(key, None) is not None


class _FakeDist:
    """``torch.distributed``, as a thread that is a rank sees it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.here = threading.local()

    def is_initialized(self) -> bool:
        return True

    def get_rank(self, group: object = None) -> int:
        return int(self.here.rank)

    def get_world_size(self, group: object = None) -> int:
        return self.size

    def get_process_group_ranks(self, group: object) -> range:
        return range(self.size)


class _Deaf:
    """A detector that looks for nobody, so that only meetings are counted."""

    error, heartbeats, watchers, unanswered_s = None, {}, set(), 0.0
    has_started = SimpleNamespace(wait=lambda: None)
    waits_for = ""

    def __init__(self) -> None:
        self.meetings: dict[str, Any] = {}
        self.calls: dict[str, int] = {}

    def add(self, *_: object) -> None: ...


@dataclass
class CountedRanks:
    """Ranks that are threads: ``World.current()`` is theirs while :func:`counted_ranks` lasts."""

    size: int
    store: Any
    dist: Any

    def each(self, function: Callable[[int], Any]) -> list[Any]:
        """The function's value or error, by rank, all running at once."""
        found: list[Any] = [None] * self.size

        def run(rank: int) -> None:
            self.dist.here.rank = rank
            try:
                found[rank] = function(rank)
            except Exception as error:
                found[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found


@contextmanager
def counted_ranks(size: int, store: Any = None) -> Iterator[CountedRanks]:
    """Ranks of this process; ``store`` is a counted one unless another is given."""
    dist = _FakeDist(size)
    store = store or CountedStore(size)
    words = SimpleNamespace(default_store=lambda: store)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(world_module, dist=dist, torch_private=words))
        if isinstance(store, CountedStore) and store.size:
            stack.enter_context(mock.patch.object(control_channel, "get_detector", return_value=_Deaf()))
        yield CountedRanks(size, store, dist)
