"""A short walk through hostile files, the same on every run; ``make fuzz`` goes further, guided by coverage."""

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.fuzz import targets as fuzzing
from tests.fuzz.mutating import mutate
from tests.fuzz.targets import Broken, targets

TARGETS = targets()
INPUTS = 60


@pytest.mark.parametrize("name", TARGETS)
def test_hostile_files_are_refused_and_nothing_else(name: str) -> None:
    target, draw = TARGETS[name], random.Random(f"{name} 1")
    with target.folder() as folder:
        for seed in target.seeds:
            assert target.check(folder, seed), "a sound file opens"
        opened = 0
        for number in range(INPUTS):
            content = mutate(draw.choice(target.seeds), target.seeds, draw)
            try:
                opened += target.check(folder, content)
            except Broken as error:
                raise AssertionError(f"input {number}: {error}\n{content!r}") from error
    assert opened < INPUTS, "some are refused"


KEPT: list[int] = []


def _open_one() -> None:
    KEPT.append(os.open("/dev/null", os.O_RDONLY))


def _take_memory() -> None:
    bytearray(b"x" * (2 * fuzzing.MOST_BYTES))


def _spend_time() -> None:
    end = time.process_time() + fuzzing.MOST_SECONDS
    while time.process_time() < end:
        pass


def _fail() -> None:
    raise KeyError("x")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (_open_one, "1 descriptors stay open"),
        (_take_memory, "bytes of memory"),
        (_spend_time, "s of processor time"),
        (_fail, "KeyError"),
    ],
)
def test_what_must_hold_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[], object], words: str
) -> None:
    """With a fault planted in opening, the checks of every target find it."""
    target, inner = TARGETS["index"], fuzzing.open_checkpoint

    def faulty(folder: Path) -> object:
        fault()
        return inner(folder)

    monkeypatch.setattr(fuzzing, "open_checkpoint", faulty)
    monkeypatch.setattr(fuzzing, "MOST_SECONDS", 0.2)
    with target.folder() as folder, pytest.raises(Broken, match=words):
        target.check(folder, target.seeds[0])
    while KEPT:
        os.close(KEPT.pop())
