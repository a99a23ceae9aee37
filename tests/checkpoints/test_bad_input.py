"""Calls that cannot be honored, and damaged checkpoints: one clear error, on every rank."""

import hashlib
import io
import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.checkpoints import on_ranks
from tests.checkpoints.tiny import Training, differences
from tests.support.files import flip_bit
from tests.support.world import agreed, require_same_error
from torch import nn

import shardwise
from shardwise import Checkpointer
from shardwise.checkpoints import header as header_module
from shardwise.checkpoints.header import CheckpointHeader
from shardwise.files.distributed import read_metadata
from shardwise.files.local_reader import LocalReader
from shardwise.options import Ignore, StateOptions

CALLS = {
    "meta": ("ShardingError", "are on meta and have no values"),
    "no state_dict": ("ConfigError", "data is a object, which has no state_dict and load_state_dict"),
    "no plain data": ("ConfigError", "data.rank_0.at: is a PosixPath that torch.load"),
    "shard in the data": ("ConfigError", "data.rank_0.at: is a DTensor, and those are stored for the model"),
    "shard in a schedule": ("ConfigError", "schedulers.0.mean.0: is a DTensor, and those are stored for the model"),
    "no json": ("ConfigError", "user: is not JSON"),
    "complex128": ("ShardingError", "model.phases: is torch.complex128, which a checkpoint cannot hold"),
    "other optimizer": ("ShardingError", "is not the model's"),
    "step": ("ConfigError", "step=-1 is not a number of optimizer steps"),
    "other steps": (
        "RankMismatchError",
        "the list of arguments on rank 1 is not that of rank 0: step (-1 against 1).",
    ),
    "other rates": (
        "RankMismatchError",
        "the settings of the optimizers on rank 1 are not those of rank 0 (learning rates 0.05, 0.5 against 0.05,",
    ),
    "some positions": ("RankMismatchError", "some ranks have a position in the data and others none"),
    "mark": ("StorageError", "another save is writing here (process"),
    "raise while writing": ("CheckpointError", "rank 1: OSError: struck"),
}


@pytest.mark.parametrize("fault", CALLS)
def test_a_call_that_cannot_be_honoured(worlds, tmp_path, fault):
    require_same_error(worlds(2).run(on_ranks.refused, str(tmp_path), fault), *CALLS[fault])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [b"", 2**3000])
def test_values_that_torch_does_not_load_are_refused(value):
    with pytest.raises(shardwise.ConfigError, match=rf"x\.a\.0: is a {type(value).__name__} that torch\.load"):
        header_module.to_pickle({"a": [value]}, "x")


def test_numbers_of_numpy_are_saved_as_those_of_python():
    """As a schedule by numpy.cos leaves them in groups of an optimizer, and a scheduler in its state."""
    content = header_module.to_pickle({"rates": [np.float64(0.5), np.int64(3)]}, "x")
    assert torch.load(io.BytesIO(content), weights_only=True) == {"rates": [0.5, 3]}
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=np.float64(0.5))
    [group] = shardwise.get_optimizer_state_dict(model, optimizer)["param_groups"]
    assert type(group["lr"]) is float


def test_ranks_that_do_not_hold_all_of_it(worlds, tmp_path):
    for kind, text in worlds(4).run(on_ranks.only_some, str(tmp_path)):
        assert kind == "ShardingError"
        assert "together do not have each element of" in text


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_counts_is_known_of_though_something_failed_after(worlds, tmp_path, mode):
    for error, there, then in worlds(2).run(on_ranks.fail_to_tidy_up, str(tmp_path), mode):
        assert error == ("CheckpointError", "LookupError: struck")
        assert there == [1, 2]
        assert then == [3]


def test_a_wait_that_is_interrupted_loses_sight_of_nothing(worlds, tmp_path):
    assert worlds(2).run(on_ranks.wait_interrupted, str(tmp_path)) == [(True, [1, 2])] * 2


def test_a_rank_that_cannot_copy_its_state_fails_the_save(worlds, tmp_path):
    found = worlds(2).run(on_ranks.fail_to_stage, str(tmp_path))
    assert found[0] == found[1]
    error, left, steps = found[0]
    assert error == ("CheckpointError", "rank 1: out of memory (struck). See docs/out_of_memory.md")
    assert left == ["step-1"]
    assert steps == [1, 2]


def test_errors_in_the_background_are_reported_at_the_next_call(worlds, tmp_path):
    for error, is_complete, steps, then in worlds(2).run(on_ranks.fail_in_the_background, str(tmp_path)):
        assert error == ("CheckpointError", "rank 1: OSError: struck")
        assert not is_complete
        assert steps == [1]
        assert then == [1, 3]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda folder: Checkpointer(folder, keep=0), "1 or more"),
        (lambda folder: StateOptions(budget_bytes=1), "less than a page"),
        (lambda folder: Checkpointer("s3://bucket/run"), "is a URL"),
        (lambda folder: Checkpointer(folder, keep="all"), "1 or more"),
        (lambda folder: Checkpointer(folder, mode="later"), "Pass one of 'sync', 'async'"),
        (lambda folder: Checkpointer(folder, only="adapter"), "Pass AdapterOnly"),
    ],
)
def test_an_argument_that_cannot_be_honoured(tmp_path, make, text):
    with pytest.raises(shardwise.ConfigError, match=text):
        make(tmp_path)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"model": None}, "model is a NoneType. Pass a module"),
        ({"optimizers": None}, "optimizers is a NoneType. Pass torch.optim.Optimizer"),
        ({"optimizers": ["x"]}, "optimizers is a list. Pass torch.optim.Optimizer"),
    ],
)
def test_a_state_of_other_things(given, text):
    with pytest.raises(shardwise.ConfigError, match=text):
        replace(Training(seed=5).state, **given)


@pytest.mark.parametrize("step", [None, "1", 1.0, -1, True])
def test_a_step_that_is_none(tmp_path, step):
    with pytest.raises(shardwise.ConfigError, match=f"step={step!r} is not a number of optimizer steps"):
        Checkpointer(tmp_path).discard_after(step)


# What does not fit


MISFITS = {
    "optimizer of others": ("KeyMismatchError", "unexpected"),
    "other optimizer": ("KeyMismatchError", "optimizers: saved by torch.optim.AdamW, and there is torch.optim.SGD"),
    "no optimizer": ("KeyMismatchError", "unexpected 1     optimizers"),
    "scaler": ("KeyMismatchError", "missing 1        scaler"),
    "other schedule": ("KeyMismatchError", "schedulers: the stored state is not of a StepLR"),
    "schedule of more groups": ("KeyMismatchError", "of a LambdaLR (its base_lrs does not fit the one here"),
    "other model": ("KeyMismatchError", "missing 2        0.weight"),
    "dtype": ("KeyMismatchError", "embed.weight: stored (11, 6) F32, the model has (11, 6) BF16"),
    "step": ("StorageError", "no complete checkpoint of step 4. Saved steps: 3"),
    "which": ("RankMismatchError", "the list of arguments on rank 1 is not that of rank 0: step (2 against 1)."),
}


@pytest.mark.parametrize("was_enabled", [True, False])
def test_a_scaler_that_is_enabled_on_one_side_only_is_refused(tmp_path, was_enabled):
    saved, training = Training(), Training(seed=3)
    scalers = [torch.amp.GradScaler("cpu", enabled=each) for each in (was_enabled, not was_enabled)]
    Checkpointer(tmp_path).save(1, replace(saved.state, scaler=scalers[0]))
    before = training.taken()
    words = ["disabled", "enabled"]
    text = f"scaler: saved by a scaler that was {words[was_enabled]}, and it is {words[not was_enabled]} now"
    with pytest.raises(shardwise.KeyMismatchError, match=text):
        Checkpointer(tmp_path).restore(replace(training.state, scaler=scalers[1]))
    assert differences(training.taken(), before) == []
    report = Checkpointer(tmp_path).restore(
        replace(training.state, scaler=scalers[1]), on_mismatched=Ignore(only=("scaler",))
    )
    assert (report.mismatched, "scaler" in report.restored) == (("scaler",), False)


@pytest.mark.parametrize("fault", MISFITS)
def test_what_does_not_fit_is_refused_and_changes_nothing(worlds, run, fault):
    errors, changed = zip(*worlds(2).run(on_ranks.restore_badly, str(run), fault), strict=True)
    require_same_error(errors, *MISFITS[fault])
    assert changed == ([], [])


# What cannot be trusted


class Bomb:
    def __reduce__(self):
        return (Path.touch, (Path(self.at),))

    def __init__(self, at):
        self.at = str(at)


def rewritten(step: Path, change) -> None:
    """The header, changed, and telling the truth of the metadata."""
    file = step / "shardwise.checkpoint.json"
    header = json.loads(file.read_text())
    change(header)
    header["metadata_sha256"] = hashlib.sha256((step / ".metadata").read_bytes()).hexdigest()
    header["files"] = {name: (step / name).stat().st_size for name in header["files"] if (step / name).exists()}
    header["checksums"] = {name: header["checksums"][name] for name in header["files"]}
    file.write_text(sealed(header))


def renamed(step: Path, old: bytes, new: bytes) -> None:
    (step / ".metadata").write_bytes((step / ".metadata").read_bytes().replace(old, new))
    rewritten(step, lambda found: None)


def sealed(header: dict) -> str:
    header = {name: value for name, value in header.items() if name != "sha256"}
    return json.dumps({**header, "sha256": header_module._seal(header)})


def spoil(fault: str, step: Path, bomb: Path) -> None:
    header, data = step / "shardwise.checkpoint.json", step / "__1_0.distcp"
    match fault:
        case "truncated":
            data.write_bytes(data.read_bytes()[:-1])
        case "missing":
            data.unlink()
        case "mixed":
            (step / ".metadata").write_bytes((step / ".metadata").read_bytes() + b"\0")
        case "no header":
            header.write_text("[]")
        case "other header":
            header.write_text(sealed(json.loads(header.read_text()) | {"step": "x"}))
        case "newer":
            header.write_text(json.dumps({"kind": "shardwise training checkpoint", "version": 2}))
        case "other data":
            header.write_text(sealed(json.loads(header.read_text()) | {"data": "some"}))
        case "no ranks":
            header.write_text(sealed(json.loads(header.read_text()) | {"world_size": 0}))
        case "a tensor for a value":
            found = pickle.loads((step / ".metadata").read_bytes())
            old = next(key for key in found.state_dict_metadata if key.startswith("model."))
            found.state_dict_metadata["rng.x"] = found.state_dict_metadata.pop(old)
            found.planner_data["rng.x"] = "rng", "x"
            found.storage_data = {
                replace(index, fqn="rng.x") if index.fqn == old else index: place
                for index, place in found.storage_data.items()
            }
            (step / ".metadata").write_bytes(pickle.dumps(found))
            rewritten(step, lambda found: None)
        case "no checksums":
            header.write_text(sealed(json.loads(header.read_text()) | {"checksums": {}}))
        case "other step":
            rewritten(step, lambda found: found.update(step=4))
        case "pickle":
            (step / ".metadata").write_bytes(pickle.dumps(Bomb(bomb)))
            rewritten(step, lambda found: None)
        case "climbing":
            renamed(step, b"__1_0.distcp", b"../__0.distc")
        case "other names":
            renamed(step, b"schedulers", b"schedulerz")
        case "object":
            whole = (step / "__0_0.distcp").read_bytes()
            at = whole.index(b"schedulers") if b"schedulers" in whole else whole.rindex(b"PK\x05\x06")
            (step / "__0_0.distcp").write_bytes(whole[: at + 1] + b"\0" * (len(whole) - at - 1))
        case "seal":
            header.write_text(header.read_text().replace('"best": 0.25', '"best": 0.75'))
        case "no seal":
            header.write_text(header.read_text().replace('"sha256"', '"sha257"'))
        case "checksums":
            flip_bit(data, -3)
        case "names checksums":
            found = pickle.loads((step / ".metadata").read_bytes())
            place = next(info for index, info in found.storage_data.items() if index.fqn == "schedulers")
            place.offset = (step / "__0_0.distcp").stat().st_size - 8
            place.length = 8
            (step / ".metadata").write_bytes(pickle.dumps(found))
            told = CheckpointHeader.from_bytes(header.read_bytes(), "")
            digest = hashlib.sha256((step / ".metadata").read_bytes()).hexdigest()
            header.write_bytes(replace(told, metadata_sha256=digest).to_bytes())
        case "other checksums":
            told = CheckpointHeader.from_bytes(header.read_bytes(), "")
            header.write_bytes(replace(told, files=dict.fromkeys(told.files, 3)).to_bytes())
        case _:
            raise AssertionError(fault)


DAMAGE = {
    "truncated": r"__1_0.distcp: has \d+ bytes, and \d+ were written",
    "missing": "__1_0.distcp: is missing",
    "mixed": "is not the one recorded in shardwise.checkpoint.json",
    "no header": "is not a checkpoint of shardwise",
    "other header": "has an invalid value",
    "other data": "has an invalid value: data",
    "no ranks": "has an invalid value: step or world_size",
    "a tensor for a value": "rng.x, which no checkpoint of shardwise has",
    "no checksums": "has an invalid value: files",
    "newer": "has version 2, and this shardwise reads 1",
    "other step": "is of step 4",
    "pickle": "pathlib",
    "climbing": "refused",
    "other names": "schedulerz, which no checkpoint of shardwise has",
    "object": r"does not match its checksum|do not match the header",
    "seal": r"shardwise.checkpoint.json: does not match its checksum",
    "no seal": r"shardwise.checkpoint.json: does not match its checksum",
    "checksums": "__1_0.distcp: its checksums do not match the header",
    "names checksums": ".metadata: names the checksums of __0_0.distcp",
    "other checksums": "has an invalid value: files",
}


@pytest.mark.parametrize("fault", DAMAGE)
def test_a_damaged_or_hostile_checkpoint_is_refused(run, tmp_path, fault):
    shutil.copytree(run, tmp_path / "run")
    bomb = tmp_path / "bomb"
    spoil(fault, tmp_path / "run" / "step-3", bomb)
    training = Training(seed=5)
    before = training.taken()
    with pytest.raises(shardwise.FormatError, match=DAMAGE[fault]):
        Checkpointer(tmp_path / "run").restore(training.state)
    assert not bomb.exists()
    assert on_ranks.differences(training.taken(), before) == []


def test_a_pickle_among_the_values_is_not_run(run, tmp_path):
    """A value that is no plain data, where plain data was."""
    shutil.copytree(run, tmp_path / "run")
    step, bomb = tmp_path / "run" / "step-3", tmp_path / "bomb"
    buffer = io.BytesIO()
    torch.save(Bomb(bomb), buffer)
    place = shardwise_place(step, ("schedulers",))
    whole = bytearray((step / place.file).read_bytes())
    assert len(buffer.getvalue()) <= place.bytes.nbytes
    whole[place.bytes.start : place.bytes.start + len(buffer.getvalue())] = buffer.getvalue()
    content = (step / ".metadata").read_bytes()
    metadata = pickle.loads(content)
    for index, info in metadata.storage_data.items():
        if index.fqn == "schedulers":
            info.length = len(buffer.getvalue())
    (step / ".metadata").write_bytes(pickle.dumps(metadata))
    nbytes = header_module.content_nbytes(len(whole))
    sums = header_module.BlockSums(nbytes)
    sums.add(0, memoryview(whole)[:nbytes])
    (step / place.file).write_bytes(whole[:nbytes] + sums.to_bytes())
    checksums = {place.file: header_module.digest(sums.to_bytes())}
    rewritten(step, lambda found: found["checksums"].update(checksums))
    training = Training(seed=5)
    with pytest.raises(shardwise.FormatError, match="schedulers in .*: cannot be read as plain data"):
        Checkpointer(tmp_path / "run").restore(training.state)
    assert not bomb.exists()


def shardwise_place(step: Path, path: tuple[str, ...]):
    with LocalReader(step) as reader:
        return read_metadata(reader).objects[path]


def test_a_save_in_the_background_after_calls_that_did_not_meet(worlds, tmp_path):
    kinds, steps = agreed(worlds(2), on_ranks.save_after_other_calls, str(tmp_path))
    assert kinds == ["RankMismatchError"] * 2
    assert steps == [2]


@pytest.mark.parametrize("is_renewed", [False, True])
def test_a_mark_of_another_machine(tmp_path, is_renewed):
    """It is taken over where it is not renewed."""
    kind, text = on_ranks.elsewhere(str(tmp_path), is_renewed)
    assert kind == ("StorageError" if is_renewed else "")
    assert ("on elsewhere" in text) == is_renewed
    assert (tmp_path / "step-1").exists() != is_renewed
