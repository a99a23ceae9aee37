"""A crash at any moment of a checkpoint by two ranks leaves the older or the new one, whole."""

import pytest
from tests.checkpoints import on_ranks
from tests.checkpoints.tiny import Training
from tests.support.crashes import EffectLog, states_after_crash
from tests.support.files import contents

from shardwise import Checkpointer
from shardwise.checkpoints.restore import open_checkpoint
from shardwise.checkpoints.step_folders import steps_in


def of_step(files: dict[str, bytes], step: int) -> dict[str, bytes]:
    return {name: content for name, content in files.items() if name.startswith(f"step-{step}/")}


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("old", ["none", "kept", "removed"])
def test_a_crash_leaves_one_checkpoint_or_the_other(worlds, tmp_path, old, mode):
    run, log = tmp_path / "run", tmp_path / "log"
    ranks = worlds(2)
    if old != "none":
        ranks.run(on_ranks.save_steps, str(run), [1], 1, mode, None)
    before = contents(run) if run.exists() else {}
    ranks.run(on_ranks.save_steps, str(run), [2], 2 if old == "kept" else 1, mode, str(log))
    whole = {1: of_step(before, 1), 2: of_step(contents(run), 2)}
    assert steps_in(run) == ([1, 2] if old == "kept" else [2])
    effects = EffectLog(log).effects()
    seen: dict[int | None, int] = {}
    training = Training()
    for number, state in enumerate(states_after_crash(before, effects, samples=3)):
        place = tmp_path / str(number)
        state.put_into(place)
        latest = max(steps_in(place), default=None)
        seen[latest] = seen.get(latest, 0) + 1
        assert latest in ((None, 2) if old == "none" else (1, 2)), state.what
        if latest is None:
            assert state.completed < len(effects)
            continue
        assert latest == 2 or state.completed < len(effects), state.what
        open_checkpoint(place, latest)
        assert whole[latest].items() <= contents(place).items(), state.what
        if number % 40 == 0:
            (place / "shardwise.saving").unlink(missing_ok=True)  # whose process lives on in this test
            checkpointer = Checkpointer(place)
            checkpointer.restore(training.state)
            checkpointer.save(3, training.state)
            assert checkpointer.latest() == 3
            assert {path.name for path in place.iterdir()} <= {"step-1", "step-2", "step-3"}
    assert seen[2] > 3
    assert seen[None if old == "none" else 1] > 2 * len(effects)
