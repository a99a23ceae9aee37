"""Real processes, killed at random moments: two that save into one folder, two hundred times each way."""

import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.torture import objects
from tests.torture.killing import KINDS, kill_again_and_again, litter
from tests.torture.verbs import IN_MEMORY

KILLS = 200

SAVES = ("one file", "several files", "one and several")
CASES = [(kind, "disk") for kind in KINDS] + [(kind, store) for store in ("s3", "az") for kind in SAVES]


@pytest.fixture
def seed() -> int:
    """Told when a test fails, and taken from the environment to see it again."""
    return int(os.environ.get("TORTURE_SEED", random.SystemRandom().randrange(10**6)))


@pytest.fixture
def target(store: str, tmp_path: Path) -> Iterator[str]:
    if store == "disk":
        with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
            yield f"{folder}/runs/out"
    else:
        with objects.bucket(store) as url:
            yield f"{url}/runs/out"


@pytest.mark.torture
@pytest.mark.timeout(36000)
@pytest.mark.parametrize(("kind", "store"), CASES, ids=[f"{kind} on {store}" for kind, store in CASES])
def test_two_hundred_kills_lose_nothing(kind: str, store: str, target: str, tmp_path: Path, seed: int) -> None:
    tally = kill_again_and_again(kind, target, str(tmp_path / "log"), kills=KILLS, seed=seed)
    print(f"{kind} on {store}: {tally}; TORTURE_SEED={seed}")
    assert not tally.faults, f"TORTURE_SEED={seed}: {tally}\n" + "\n".join(tally.faults[:10])
    assert tally.returned > KILLS
    KINDS[kind].save(target, 999)
    assert KINDS[kind].found(target) == 999
    assert list(litter(target)) == []
