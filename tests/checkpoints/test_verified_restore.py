"""Every byte that a restore reads is compared with its checksum, on any number of ranks."""

import random
import re
import shutil
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from tests import zoo
from tests.checkpoints import on_ranks
from tests.checkpoints.tiny import Training, differences
from tests.loading.on_ranks import attempt
from tests.small_checkpoints import small_qwen3
from torch import nn

import shardwise
from shardwise import Checkpointer, TrainState
from shardwise.checkpoints.step_folders import open_folder
from shardwise.checkpoints.trainer_folders import MODEL_ALONE, TrainerHeader
from shardwise.cli import main
from shardwise.files.distributed import open_state
from shardwise.files.local_reader import LocalReader


def latest(run):
    return max(run.glob("step-*"), key=lambda place: int(place.name[5:]))


def tensor_places(run, count):
    """First, last and middle bytes of the elements of tensors."""
    entries = [entry for entry in open_folder(latest(run)).index.entries.values() if entry.nbytes]
    runs = sorted((entry.file, entry.start, entry.stop) for entry in entries)
    chosen = runs[:: max(1, len(runs) // count)]
    return [(file, (start, (start + stop) // 2, stop - 1)[n % 3]) for n, (file, start, stop) in enumerate(chosen)]


def test_paths_from_home_are_verified(run, tmp_path, monkeypatch):
    shutil.copytree(run, tmp_path / "run")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert shardwise.verify("~/run").compared == shardwise.verify("~/run/step-3").compared > 0


def test_no_flipped_bit_is_restored(run, tmp_path):
    """Anywhere in any file: elements, values, what lies around them, and what tells of them."""
    shutil.copytree(run, tmp_path / "run")
    step = tmp_path / "run" / "step-3"
    draw = random.Random(0)
    files = [path.name for path in sorted(step.iterdir())]
    places = [(name, draw.randrange((step / name).stat().st_size)) for name in files for _ in range(12)]
    places += tensor_places(run, 20)
    places += [(item.file, item.bytes.start + 3) for item in open_folder(step).objects.values()]
    restored = []
    before = Training(seed=1).taken()
    for name, position in places:
        on_ranks.flip(step / name, position)
        kind, _ = attempt(lambda: Checkpointer(tmp_path / "run").restore(Training(seed=1).state))
        restored += [] if kind == "FormatError" else [(name, position, kind)]
        on_ranks.flip(step / name, position)
    assert restored == []
    assert len(places) > 50
    training = Training(seed=1)
    assert Checkpointer(tmp_path / "run").restore(training.state).checked_bytes > 0
    assert differences(training.taken(), before) != []


def test_one_archive_of_each_form_is_read_and_all_are_compared(tmp_path, monkeypatch):
    """Opening reads as often for eight equal tensors as for two. Damage around any of them changes nothing."""
    states = []
    for count in (2, 8):
        torch.manual_seed(count)
        model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(count)])
        states.append(TrainState(model, torch.optim.SGD(model.parameters())))
        Checkpointer(tmp_path / str(count)).save(1, states[-1])
    read = []
    original = LocalReader.read_vectored
    monkeypatch.setattr(LocalReader, "read_vectored", lambda *args: read.append(args[1:3]) or original(*args))
    reads = []
    for count in (2, 8):
        read.clear()
        opened = open_folder(tmp_path / str(count) / "step-1")
        reads.append(sum(file.endswith(".distcp") for file, _ in read))
        with LocalReader(opened.folder) as reader:
            assert open_state(reader) == opened.index
    assert reads[0] == reads[1]
    saved = [weight.detach().clone() for weight in model.parameters()]
    nn.utils.vector_to_parameters(torch.zeros(8 * 256 * 256), model.parameters())
    for entry in list(opened.index.entries.values())[::3]:
        for position in (entry.start - 1, entry.stop + 20):  # padding before the elements, a name after them
            on_ranks.flip(opened.folder / entry.file, position)
            with pytest.raises(shardwise.FormatError):
                Checkpointer(tmp_path / "8").restore(states[1])
            on_ranks.flip(opened.folder / entry.file, position)
    assert not any(weight.any() for weight in model.parameters())
    Checkpointer(tmp_path / "8").restore(states[1])
    assert all(map(torch.equal, model.parameters(), saved))


WAYS = [(2, "flat"), (3, "flat"), (4, "hsdp"), (2, "columns")]


@pytest.mark.parametrize(("size", "way"), WAYS)
def test_damage_is_named_alike_on_all_ranks(worlds, run, tmp_path, size, way):
    """Whether a rank reads runs whole, or parts of them, or what others read too, or columns."""
    shutil.copytree(run, tmp_path / "run")
    places = tensor_places(run, 5)
    found = worlds(size).run(on_ranks.restore_damaged, str(tmp_path / "run"), places, way)
    for errors, report in found:
        assert errors == found[0][0]
        for (kind, text), (file, position) in zip(errors, places, strict=True):
            assert kind == "FormatError"
            assert "does not match its checksum" in text
            start, stop = map(int, re.search(rf"bytes (\d+)\.\.(\d+) of {re.escape(file)}", text).groups())
            assert start <= position < stop
            assert "model." in text or "optimizer.state." in text
        assert report["checked_bytes"]


def test_a_model_that_is_brought_up_from_it_is_compared_too(worlds, tmp_path):
    base, run = zoo.save_original(small_qwen3(), tmp_path / "base"), tmp_path / "run"
    worlds(2).run(on_ranks.save_pretrained_run, str(base), str(run))
    for errors, report in worlds(3).run(on_ranks.restore_damaged, str(run), tensor_places(run, 2), "", str(base)):
        assert [kind for kind, _ in errors] == ["FormatError"] * len(errors)
        assert all("does not match its checksum" in text for _, text in errors)
        assert report["checked_bytes"]


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
        assert report.compared >= 2
    assert "a training after 3 steps, saved by 2 ranks: model, data, optimizers, rng, schedulers" in str(report)
    step.rename(tmp_path / "elsewhere")
    assert command(tmp_path / "elsewhere").exit_code == 0
    (tmp_path / "elsewhere").rename(step)
    draw = random.Random(1)
    for file in ("__0_0.distcp", "__1_0.distcp"):
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


def test_verify_of_a_trainer_reads_model_and_state(run, tmp_path):
    """Of a folder of several, the newest complete one."""
    place = tmp_path / "checkpoint-3"
    shutil.copytree(run / "step-3", place / "state" / "step-3")
    model = shardwise.save(small_qwen3(), place).tensors
    (place / "shardwise.begun").touch()
    with pytest.raises(shardwise.ShardwiseError, match="no weights found"):
        shardwise.verify(tmp_path)
    header = TrainerHeader(3, "everything", 8, 2)
    (place / "shardwise.trainer.json").write_bytes(header.to_bytes())
    (tmp_path / "checkpoint-20").mkdir()
    for folder in (tmp_path, place):
        report = shardwise.verify(folder)
        assert report.is_sound
        assert (report.checkpoint, report.tensors) == (str(place), model + 49)
        assert "coverage    all that Qwen3ForCausalLM needs" in str(report)
        assert "a training after 3 steps" in str(report)
    [(file, position), *_] = [(f"state/step-3/{file}", position) for file, position in tensor_places(run, 3)]
    for name, where in ((file, position), (next(place.glob("*.safetensors")).name, -1)):
        on_ranks.flip(place / name, where)
        assert len(shardwise.verify(tmp_path).damaged) == command(place).exit_code == 1
        on_ranks.flip(place / name, where)
    shutil.rmtree(place / "state")
    assert command(place).exit_code == 2
    (place / "shardwise.trainer.json").write_bytes(replace(header, holds=MODEL_ALONE).to_bytes())
    assert shardwise.verify(place).tensors == model
    torch.save({"model.lora_A.weight": torch.zeros(1, 1)}, tmp_path / "adapter_model.bin")
    assert shardwise.verify(tmp_path).checkpoint == str(tmp_path)


def test_verify_of_a_checkpoint_that_was_never_completed(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "step-3" / ".metadata").unlink()
    with pytest.raises(shardwise.StorageError, match=r"step 3 \(one was begun there, and never completed\)"):
        shardwise.verify(tmp_path / "run")
