"""A short walk through hostile files, the same on every run; ``make fuzz`` goes further, guided by coverage."""

import random

import pytest
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
