"""What is restored is what was written: every byte that a restore reads is compared, on any number of ranks."""

from __future__ import annotations

import json
import random
import shutil

import pytest
from click.testing import CliRunner
from tests.checkpoints import on_ranks
from tests.checkpoints.tiny import Training, differences
from tests.verbs.on_ranks import attempt

import shardwise
from shardwise import Checkpointer, TrainState
from shardwise.cli import main
from shardwise.options import Ignore

pytestmark = pytest.mark.distributed

FINGERPRINTS = "shardwise.fingerprints.json"


@pytest.fixture(scope="module")
def run(worlds, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    worlds(2).run(on_ranks.train_and_save, str(folder), 3)
    return folder


def told(run):
    step = max(run.glob("step-*"), key=lambda place: int(place.name[5:]))
    return json.loads((step / FINGERPRINTS).read_text())["files"]


def tensor_places(run, count):
    """First, last and middle bytes of runs of elements."""
    runs = [(file, start, stop) for file, item in told(run).items() for start, stop, _ in item["tensors"]]
    chosen = runs[:: max(1, len(runs) // count)]
    return [(file, (start, (start + stop) // 2, stop - 1)[n % 3]) for n, (file, start, stop) in enumerate(chosen)]


def test_no_flipped_bit_is_restored(run, tmp_path):
    """Anywhere in any file: elements, values, what lies around them, and what tells of them."""
    shutil.copytree(run, tmp_path / "run")
    step = tmp_path / "run" / "step-3"
    draw = random.Random(0)
    files = [path.name for path in sorted(step.iterdir())]
    assert FINGERPRINTS in files
    places = [(name, draw.randrange((step / name).stat().st_size)) for name in files for _ in range(6)]
    places += tensor_places(run, 20)
    places += [(file, start + 3) for file, item in told(run).items() for start, _, _ in item["values"]]
    restored = []
    before = Training(seed=1).taken()
    for name, position in places:
        on_ranks.flip(step / name, position)
        kind, _ = attempt(lambda: Checkpointer(tmp_path / "run").restore(Training(seed=1).state))
        restored += [] if kind == "FormatError" else [(name, position, kind)]
        on_ranks.flip(step / name, position)
    # Generators of a rank that is no more are not read, and not restored either.
    assert [place for place in restored if not is_of_rank_1(run, *place)] == []
    assert len(places) > 50
    training = Training(seed=1)
    assert Checkpointer(tmp_path / "run").restore(training.state).checked_bytes > 0
    assert differences(training.taken(), before) != []


def is_of_rank_1(run, name, position, kind):
    values = told(run).get(name, {"values": []})["values"]
    is_value = any(start <= position < stop for start, stop, _ in values)
    return (name, kind, is_value) == ("__1_0.distcp", "", True)


WAYS = [(2, "flat"), (3, "flat"), (4, "hsdp"), (2, "columns")]


@pytest.mark.parametrize(("size", "way"), WAYS)
def test_damage_is_named_alike_on_all_ranks(worlds, run, tmp_path, size, way):
    """Whether a rank reads runs whole, or parts of them, or what others read too, or columns."""
    shutil.copytree(run, tmp_path / "run")
    places = tensor_places(run, 5)
    found = worlds(size).run(on_ranks.restore_damaged, str(tmp_path / "run"), places, way)
    nbytes = sum(stop - start for item in told(run).values() for start, stop, _ in item["tensors"])
    for errors, report in found:
        assert errors == found[0][0]
        for (kind, text), (file, position) in zip(errors, places, strict=True):
            assert kind == "FormatError"
            assert "is not what was written" in text
            [(start, stop)] = [
                (start, stop) for start, stop, _ in told(run)[file]["tensors"] if start <= position < stop
            ]
            assert f"bytes {start}..{stop} of {file}" in text
            assert "model." in text or "optimizer.state." in text
        assert report["checked_bytes"] == nbytes
        left = set() if size == 2 else {"rng.rank_1"}
        assert set(report["unchecked"]) == left


def test_a_model_that_is_brought_up_from_it_is_compared_too(worlds, tmp_path):
    from tests import zoo
    from tests.verbs.conftest import small_qwen3

    base, run = tmp_path / "base", tmp_path / "run"
    zoo.save_original(small_qwen3(), base)
    worlds(2).run(on_ranks.save_pretrained_run, str(base), str(run))
    nbytes = sum(stop - start for item in told(run).values() for start, stop, _ in item["tensors"])
    for errors, report in worlds(3).run(on_ranks.restore_damaged, str(run), tensor_places(run, 2), "", str(base)):
        assert [kind for kind, _ in errors] == ["FormatError"] * len(errors)
        assert all("is not what was written" in text for _, text in errors)
        assert report["checked_bytes"] == nbytes


def test_what_was_not_compared_is_told(run):
    training = Training(seed=1)
    report = Checkpointer(run).restore(TrainState(training.model), on_unexpected=Ignore())
    assert any(name.startswith("optimizer.state.embed.weight.exp_avg") for name in report.unchecked)
    assert not any(name.startswith("model.") for name in report.unchecked)
    assert "rng.rank_1" in report.unchecked
    assert "not checked" in str(report)
    whole = Checkpointer(run).restore(Training(seed=1).state)
    assert whole.unchecked == ("rng.rank_1",)
    assert whole.checked_bytes > report.checked_bytes > 0


def test_a_checkpoint_of_before_is_restored_and_said_to_be_unchecked(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    step = tmp_path / "run" / "step-3"
    (step / FINGERPRINTS).unlink()
    facts = json.loads((step / "shardwise.checkpoint.json").read_text())
    for name in ("fingerprints_sha256", "sha256", "optimizers"):
        del facts[name]
    (step / "shardwise.checkpoint.json").write_text(json.dumps(facts))
    training, other = Training(seed=1), Training(seed=2)
    report = Checkpointer(tmp_path / "run").restore(training.state)
    assert report.checked_bytes == 0
    assert "not checked all of it" in " ".join(str(report).split())
    Checkpointer(run).restore(other.state)
    assert differences(training.taken(), other.taken()) == []


def test_what_ranks_tell_beside_a_training_comes_in_small_messages(worlds, tmp_path):
    """Large ones would travel by a collective, in the middle of the training's own."""
    for sizes in worlds(2).run(on_ranks.save_in_small_messages, str(tmp_path)):
        assert len(sizes) > 1
        assert max(sizes) == 48


# Opened again


def command(folder, *options):
    return CliRunner().invoke(main, ["verify", str(folder), *options])


def test_verify_reads_all_of_a_training(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    step = tmp_path / "run" / "step-3"
    for place in (tmp_path / "run", step):
        report = shardwise.verify(place)
        assert report.is_sound
        assert report.checkpoint == str(step)
        assert (report.files, report.tensors) == (2, 49)
        assert report.compared == sum(len(item["tensors"]) + len(item["values"]) + 1 for item in told(run).values())
    assert "a training after 3 steps, saved by 2 ranks: model, data, optimizers, rng, schedulers" in str(report)
    step.rename(tmp_path / "elsewhere")
    assert command(tmp_path / "elsewhere").exit_code == 0
    (tmp_path / "elsewhere").rename(step)
    draw = random.Random(1)
    for file in sorted(told(run)):
        for position in [draw.randrange((step / file).stat().st_size) for _ in range(10)]:
            on_ranks.flip(step / file, position)
            assert command(step).exit_code in (1, 2)
            on_ranks.flip(step / file, position)
    [(file, position), *_] = tensor_places(run, 3)
    on_ranks.flip(step / file, position)
    [damaged] = shardwise.verify(step).damaged
    assert f"of {file})" in damaged
    result = command(tmp_path / "run")
    assert result.exit_code == 1
    assert damaged.split(" ")[0] in result.output


def test_verify_of_a_checkpoint_that_was_never_completed(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "step-3" / ".metadata").unlink()
    with pytest.raises(shardwise.StorageError, match=r"step 3 \(one was begun there, and never completed\)"):
        shardwise.verify(tmp_path / "run")
