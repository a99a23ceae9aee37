"""Settings, fixtures and the order of all tests."""

import atexit
import gc
import os
import shutil
import signal
import tempfile

# Read by Hugging Face's libraries when they are first imported, and inherited by spawned workers.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# No caches of the user.
if "HF_DATASETS_CACHE" not in os.environ:
    os.environ["HF_DATASETS_CACHE"] = os.path.join(tempfile.gettempdir(), f"shardwise-cache-{os.getpid()}")
    atexit.register(shutil.rmtree, os.environ["HF_DATASETS_CACHE"], ignore_errors=True)

# One thread per process: sums in one order, and ranks do not compete for cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import hypothesis
import pytest
from tests.quiet import quieten
from tests.support.local_ranks import LocalRanks

from shardwise.core.errors import ConfigError, require_version
from shardwise.ranks.stop_signals import RELAYED, STOP_SIGNALS

collect_ignore_glob = [] if find_spec("tinker") else ["serve/*"]

try:
    require_version("transformers", "5.19")
except ConfigError:  # its Trainer does not support sharded models
    collect_ignore_glob += [
        "accelerator/test_launch.py",
        "cli/test_train.py",
        "integrations/test_larger_meshes.py",
        "training/test_adapters_*.py",
        "training/test_train_adapters.py",
        "training/test_chat_masks.py",
        "training/test_commands.py",
        "training/test_engines.py",
        "training/test_images.py",
        "training/test_resumed_callbacks.py",
        "training/test_tra*.py",
    ]

# The same examples on every run: a failure comes back when the test is run again. `make sweep` looks further.
hypothesis.settings.register_profile(
    "default",
    max_examples=60,
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
    "thorough",
    max_examples=2000,
    derandomize=False,
    deadline=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests in longest.txt as slow, and those with ``worlds`` as distributed.

    Files with tests that spawn ranks come first: they take longest.
    """
    lines = Path(__file__).with_name("longest.txt").read_text().splitlines()
    longest = {line for line in lines if not line.startswith("#")}
    for item in items:
        if not longest.isdisjoint((item.nodeid, item.nodeid.partition("::")[0])):
            item.add_marker(pytest.mark.slow)
        if "worlds" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.distributed)
    spawning = {item.path for item in items if item.get_closest_marker("distributed") is not None}
    items.sort(key=lambda item: item.path not in spawning)


def pytest_collection_finish() -> None:
    """Exclude all that was imported from garbage collections, which are then short."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that need a GPU if there is none."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.accelerator.is_available():
            pytest.skip("no accelerator")


_MOST_THREADS = 60
"""Threads of a rank after which its world is replaced. A process group has three threads, one of which polls."""


class Worlds:
    """Worlds of gloo ranks by size, kept from test to test."""

    def __init__(self) -> None:
        self._worlds: dict[int, LocalRanks] = {}

    def __call__(self, size: int) -> LocalRanks:
        world = self._worlds.get(size)
        if world is None or not world.is_alive or _threads_of(world.pid(0)) > _MOST_THREADS:
            if world is not None:
                world.close()
            world = self._worlds[size] = LocalRanks(size, is_forked=True)
            world.run(quieten)
        return world

    def close(self) -> None:
        for world in self._worlds.values():
            world.close()


def _threads_of(process: int) -> int:
    """Number of threads; 0 if the system does not show it."""
    try:
        return len(os.listdir(f"/proc/{process}/task"))
    except OSError:
        return 0


@pytest.fixture
def terminal_signals() -> Iterator[None]:
    """Dispositions of signals as in a terminal, whatever started the tests, for this process and its children.

    ``nohup`` ignores SIGHUP; a shell ignores SIGINT for commands in the background.
    """
    before = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, RELAYED)}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """``worlds(3).run(function, *args)`` calls an importable function on three ranks."""
    kept = Worlds()
    yield kept
    kept.close()


@pytest.fixture(scope="module")
def two() -> Iterator[LocalRanks]:
    with LocalRanks(2, is_forked=True) as found:
        yield found
