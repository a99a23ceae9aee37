"""Folders of adapters: the run's, checkpoints that are kept, when one is due, and states that are damaged."""

import errno
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import datasets
import pytest
from tests.conftest import Worlds
from tests.support.crashes import EffectLog, recorded, states_after_crash
from tests.support.world import require_same_error
from tests.training import adapters_on_ranks, tiny
from tests.training.adapters_on_ranks import config
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from shardwise.bank.adapter import AdapterStep
from shardwise.bank.rows import Request
from shardwise.core.errors import ConfigError, FormatError, StorageError, TrainingError
from shardwise.ranks.world import World
from shardwise.saving.saving_lock import LOCK_FILE
from shardwise.training.adapter_rows import StepOrder, TokenizedRows
from shardwise.training.arguments import TrainMethod
from shardwise.training.run_config import read_run_config
from shardwise.training.run_inputs import RUN_FOLDER, lock_output, open_inputs
from shardwise.training.train_adapters import AdapterTraining, _find_latest, train_together

POSITION = {"count": 4, "epoch": 0, "offset": 2, "rows_per_step": 2, "seed": 5}


def state(folder: Path, step: int, position: Any = POSITION, **further: Any) -> Path:
    place = folder / f"checkpoint-{step}"
    place.mkdir()
    values = {**vars(TrainerState(global_step=step)), "stateful_callbacks": {"StepOrder": position}, **further}
    (place / TRAINER_STATE_NAME).write_text(json.dumps(values))
    return place


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing. is deprecated:FutureWarning")
def test_a_run_is_recorded_beside_its_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL expands the user's folder in the names of the adapters' folders."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    tiny.tokenizer().save_pretrained(tmp_path / "words")
    rows = tiny.write_rows(tmp_path / "rows.jsonl", tiny.chat("Hi", "Ho"))
    values = {"model_name_or_path": str(tmp_path / "words"), "dataset_name": str(rows), "output_dir": "~/out"}
    adapters = {"ada": {}, "bob": {"learning_rate": 1.0, "lora_r": 2}, "eve": {"max_length": 9}}
    with open_inputs(read_run_config(config({**values, "adapters": adapters})), 0) as inputs:
        assert inputs.output == tmp_path / "out" == Path(inputs.arguments["ada"].training.output_dir).parent
        assert (tmp_path / "out" / RUN_FOLDER).is_dir()
        train, test = inputs.data["ada"]
        assert (test, next(iter(train)).keys()) == (None, {"input_ids", "labels"})
        # Rows are tokenized once for adapters that differ in their steps only.
        assert [inputs.data[name][0] is train for name in adapters] == [True, True, False]
    (tmp_path / "out" / "ada").mkdir()
    (tmp_path / "out" / "ada" / "adapter_model.safetensors").touch()
    for key, value, default in (
        ("lora_dropout", 0.0, 0.05),
        ("use_rslora", True, False),
        ("lora_target_parameters", ["x"], None),
        ("seed", 1, 42),
    ):
        same, other = (
            read_run_config(config({**values, "adapters": {"ada": {key: one}}})) for one in (default, value)
        )
        with pytest.raises(ConfigError, match=f"a training with ada.{key}={default}, not "), open_inputs(other, 0):
            pass
        with open_inputs(same, 0):
            pass


def test_an_output_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    message = f"output_dir: {tmp_path}/file/out cannot be created, Not a directory. Set one"
    with pytest.raises(StorageError, match=message), lock_output(tmp_path / "file" / "out", {"method": "sft"}, []):
        pass


def test_an_adapter_that_has_saved_nothing_may_change(tmp_path: Path) -> None:
    identity = {"method": "adapters", "system_prompt": "Be brief.", "ada.lora_r": 4, "b.ob.lora_r": 4}
    patterns = ["*/*.safetensors", "*/checkpoint-*/*.safetensors"]
    with lock_output(tmp_path, identity, patterns):
        checkpoint = tmp_path / "ada" / "checkpoint-2"
        checkpoint.mkdir(parents=True)
        (checkpoint / "adapter_model.safetensors").touch()
    with lock_output(tmp_path, {**identity, "b.ob.lora_r": 8}, patterns):
        assert json.loads((tmp_path / RUN_FOLDER / "run.json").read_text())["b.ob.lora_r"] == 8
    without_prompt = {key: value for key, value in identity.items() if key != "system_prompt"}
    for other, expected in (
        ({**identity, "ada.lora_r": 8}, "ada.lora_r=4, not 8"),
        (without_prompt, "system_prompt='Be brief.', not None"),
    ):
        with (
            pytest.raises(ConfigError, match=f"has a training with {expected}"),
            lock_output(tmp_path, other, patterns),
        ):
            pass


def test_fractions_of_epochs_are_as_many_steps_as_in_the_trainer() -> None:
    order = StepOrder(count=37, rows_per_step=4, seed=0)  # 10 steps in an epoch
    assert [order.steps_left(epochs) for epochs in (0.9, 1.1, 1.3, 0.5, 2)] == [9, 11, 13, 5, 20]
    order.take_step()
    assert [order.steps_left(epochs) for epochs in (0.9, 1.1, 0.05)] == [8, 10, 0]


@pytest.mark.parametrize(("method", "numbers"), [("sft", [2, 0]), ("dpo", [4, 5, 0, 1])])
def test_rows_of_a_step_are_read_at_once(
    method: TrainMethod, numbers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"input_ids": [n, n + 1], "labels": [-100, n + 1]} for n in range(6)]
    tokenized = TokenizedRows(datasets.Dataset.from_list(rows), method)
    reads, read = list[Any](), datasets.Dataset.__getitem__
    monkeypatch.setattr(datasets.Dataset, "__getitem__", lambda self, key: reads.append(key) or read(self, key))
    monkeypatch.setattr(datasets.Dataset, "select", mock.Mock(side_effect=AssertionError("another dataset")))
    taken = tokenized.take([2, 0])
    assert reads == [numbers]
    assert [row["input_ids"].tolist() for row in taken] == [[n, n + 1] for n in numbers]
    assert [row["targets"].tolist() for row in taken] == [[n + 1, -100] for n in numbers]
    assert tokenized.take([]) == []


def test_a_failure_after_a_save_says_what_keeps_the_learning_rate(tmp_path: Path) -> None:
    step = AdapterStep(is_taken=False, grad_norm=math.inf, num_supervised_tokens=3, learning_rate=0.1)
    ada: Any = SimpleNamespace(state=TrainerState(global_step=2), _loss=1.0, _folder=tmp_path, _saved_step=0)
    failures = [AdapterTraining.find_failure(ada, step)]
    ada._saved_step = 2
    failures.append(AdapterTraining.find_failure(ada, step))
    for failure, expected in zip(failures, (", or", f" and remove checkpoint-* of {tmp_path},"), strict=True):
        assert f"Lower learning_rate{expected}" in str(failure)


def test_a_folder_that_a_rank_does_not_see_is_refused_before_the_training(worlds: Worlds, tmp_path: Path) -> None:
    errors = worlds(2).run(adapters_on_ranks.lock_another_folder, str(tmp_path))
    require_same_error(errors, "StorageError", "rank 1", "is not visible")
    assert not (tmp_path / "0" / RUN_FOLDER / LOCK_FILE).exists()


def test_the_record_of_a_run_survives_a_crash(tmp_path: Path) -> None:
    log, folder = EffectLog(tmp_path / "log"), tmp_path / RUN_FOLDER
    folder.mkdir()
    with recorded(log, folder), lock_output(tmp_path, {"method": "sft"}, ["*.safetensors"]):
        pass
    *_, last = states_after_crash({}, log.effects(), samples=0)
    assert json.loads(last.files["run.json"]) == {"method": "sft"}


@pytest.mark.parametrize(
    ("limit", "kept"), [(None, [1, 2, 3]), (0, [1, 2, 3]), (-1, [1, 2, 3]), (1, [3]), (2, [2, 3]), (9, [1, 2, 3])]
)
def test_as_many_checkpoints_are_kept_as_the_trainer_keeps(
    tmp_path: Path, limit: int | None, kept: list[int]
) -> None:
    commit_third(tmp_path, limit)
    assert sorted(int(file.name.removeprefix("checkpoint-")) for file in tmp_path.iterdir()) == kept
    step, found = _find_latest(tmp_path)
    assert step == 3
    assert found is not None


def commit_third(folder: Path, limit: int | None) -> None:
    adapter: Any = SimpleNamespace(
        _folder=folder,
        _position=(0, 2),
        _order=StepOrder(count=4, rows_per_step=2, seed=5),
        state=TrainerState(global_step=3),
        args=SimpleNamespace(save_total_limit=limit),
    )
    for step in (1, 2):
        state(folder, step)
    AdapterTraining._commit(adapter, folder / "checkpoint-3")


def saved_state(folder: Path) -> TrainerState:
    commit_third(folder, None)
    _, found = _find_latest(folder)
    assert found is not None
    return found


def test_an_adapter_resumes_with_as_many_rows_in_a_step(tmp_path: Path) -> None:
    """Unless it is done."""
    found = saved_state(tmp_path)
    ada: Any = SimpleNamespace(_folder=tmp_path, _order=SimpleNamespace(rows_per_step=2), is_done=False)
    AdapterTraining._require_equal_steps(ada, found)
    ada._order.rows_per_step = 4
    with pytest.raises(ConfigError, match=r"has a training with 2 rows in a step, not 4 \(per_device"):
        AdapterTraining._require_equal_steps(ada, found)
    ada.is_done = True
    AdapterTraining._require_equal_steps(ada, found)


def test_an_adapter_resumes_with_rows_in_the_same_order(tmp_path: Path) -> None:
    found = saved_state(tmp_path)
    ada: Any = SimpleNamespace(_folder=tmp_path, _order=StepOrder(count=4, rows_per_step=2, seed=5))
    AdapterTraining._restore(ada, found)
    assert (ada._position, ada._order.offset) == ((0, 2), 2)
    ada._order.seed = 6
    with pytest.raises(ConfigError, match=r"whose rows are shuffled with seed 5, not 6\. Keep data_seed"):
        AdapterTraining._restore(ada, found)


def test_a_checkpoint_that_cannot_be_removed_does_not_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "rmtree", mock.Mock(side_effect=OSError(errno.ENOTEMPTY, "Directory not empty")))
    commit_third(tmp_path, 1)
    assert _find_latest(tmp_path)[0] == 3
    assert caplog.text.count("cannot be removed, [Errno 39] Directory not empty") == 2


def test_of_a_checkpoint_of_another_training_the_link_is_removed(tmp_path: Path) -> None:
    other, folder = tmp_path / "other", tmp_path / "folder"
    for place in (other, folder):
        place.mkdir()
    state(other, 0)
    (folder / "checkpoint-0").symlink_to(other / "checkpoint-0")
    commit_third(folder, 1)
    assert [file.name for file in folder.iterdir()] == ["checkpoint-3"]
    assert _find_latest(other)[1] is not None


def test_no_checkpoint_is_due_every_0_steps() -> None:
    adapter: Any = SimpleNamespace(
        args=SimpleNamespace(save_strategy="steps"), state=TrainerState(global_step=2, save_steps=0)
    )
    assert not AdapterTraining._is_due(adapter, "save")
    adapter.state.save_steps = 2
    assert AdapterTraining._is_due(adapter, "save")


def test_an_evaluation_that_does_not_fit_into_memory_is_no_failure_of_its_adapter() -> None:
    def proceed(_: AdapterStep, _request: Any) -> None:
        raise TrainingError("a pass of 'ada' needs about 8 GiB")

    step = AdapterStep(is_taken=True, grad_norm=1.0, num_supervised_tokens=3, learning_rate=0.1)
    deleted: list[str] = []
    bank = SimpleNamespace(
        forward_backward=lambda _: SimpleNamespace(requests=[]),
        optim_step=lambda _: {"ada": step},
        delete_adapter=deleted.append,
    )
    ada: Any = SimpleNamespace(
        name="ada",
        bank=bank,
        state=TrainerState(max_steps=2),
        args=SimpleNamespace(disable_tqdm=True),
        is_done=False,
        is_finished=False,
        next_requests=list,
        note_outcomes=list,
        find_failure=lambda _: None,
        step_settings={},
        proceed=proceed,
    )
    with pytest.raises(TrainingError, match="needs about 8 GiB"):
        train_together([ada], SimpleNamespace(is_made=False))
    assert deleted == []


class Recorded(AdapterTraining):
    """An adapter that computes nothing. A signal comes in its evaluation."""

    def __init__(self, name: str, max_steps: int, calls: list[str], request: Any) -> None:
        self.name, self._calls, self._request = name, calls, request
        self.state = TrainerState(max_steps=max_steps)
        step = AdapterStep(is_taken=True, grad_norm=1.0, num_supervised_tokens=3, learning_rate=0.1)
        self.bank: Any = SimpleNamespace(
            forward_backward=lambda _: SimpleNamespace(requests=[]),
            optim_step=lambda steps: dict.fromkeys(steps, step),
        )
        self.args = SimpleNamespace(
            disable_tqdm=True, max_grad_norm=0.0, eval_strategy="epoch", save_strategy="epoch"
        )
        self._loss, self._held_out, self._order = 1.0, Any, SimpleNamespace(offset=0)  # type: ignore[assignment]
        self._shared: Any = SimpleNamespace(world=World.current())
        self.is_finished = False

    def next_requests(self) -> list[Request]:
        return []

    def note_outcomes(self, outcomes: Any) -> None:
        assert not list(outcomes)

    def _note_step(self, step: AdapterStep) -> None:
        self.state.global_step += 1

    def _evaluate(self, rows: Any) -> None:
        self._calls.append(f"evaluate {self.name}")
        self._request.is_made = True

    def save_checkpoint(self) -> None:
        self._calls.append(f"save {self.name}")

    def _finish(self) -> None:
        self._calls.append(f"finish {self.name}")
        self.is_finished = True


def test_a_stop_leaves_out_the_evaluations_that_are_due() -> None:
    """Adapters are saved without them. Those that are done are evaluated when they resume."""
    calls, request = list[str](), SimpleNamespace(is_made=False)
    adapters = [Recorded(name, 2, calls, request) for name in "abc"]
    assert train_together(adapters, request)[0]  # type: ignore[arg-type]
    assert calls == ["evaluate a", "save a", "save a", "save b", "save c"]
    calls.clear()
    request.is_made = False
    assert train_together(adapters, request)[0]  # type: ignore[arg-type]
    assert calls == ["evaluate a", "save a", "finish a", "save b", "save c"]
    calls.clear()
    assert not train_together(adapters[1:], SimpleNamespace(is_made=False))[0]  # type: ignore[arg-type]
    assert calls == ["evaluate b", "save b", "finish b", "evaluate c", "save c", "finish c"]


@pytest.mark.parametrize(
    "change",
    [
        {"position": {}},
        {"position": [1]},
        {"position": {**POSITION, "offset": 4}},
        {"position": {**POSITION, "offset": -1}},
        {"position": {**POSITION, "epoch": 1 << 70}},
        {"position": {**POSITION, "epoch": "0"}},
        {"position": {**POSITION, "offset": 1.5}},
        {"stateful_callbacks": []},
        {"stateful_callbacks": None},
        {"global_step": "2"},
        {"nothing": 1},
    ],
)
def test_a_damaged_state_is_named(tmp_path: Path, change: dict[str, Any]) -> None:
    place = state(tmp_path, 2, **change)
    with pytest.raises(FormatError, match=f"{place / TRAINER_STATE_NAME}: cannot be read, .*. Remove {place}"):
        _find_latest(tmp_path)
