"""Rows that are read while they are trained on."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.harness.world import run_world
from tests.training import tiny
from tests.training.test_sources import same_rows

from shardwise.errors import CheckpointError, ConfigError
from shardwise.execution.ranks.world import World
from shardwise.training.configuration.config import config_of
from shardwise.training.data import row_stream
from shardwise.training.data.batches import Packed, Padded
from shardwise.training.data.read_once import ReadOptions, RowsAsked, SkipRows
from shardwise.training.data.sources import DataName
from shardwise.training.data.streamed import StreamLoader, stream_loader
from shardwise.training.data.tokenising import Effort, encoded_blocks
from shardwise.training.options import Epochs, Steps, TrainOptions
from shardwise.training.session import Session
from shardwise.training.stopping import StopRequest
from shardwise.training.texts.layouts import RowWords

PADDED = Padded()
ONE, TWO = (Effort(processes=count, block_bytes=100) for count in (1, 2))


def loader(
    *names: Any,
    batch: int = 4,
    steps: int = 20,
    buffer: int = 7,
    layout: Any = PADDED,
    seed: int = 0,
    **asked: Any,
) -> StreamLoader:
    how = RowsAsked(
        **{"tokenizer": tiny.tokenizer(), "max_length": 64, "options": ReadOptions(effort=ONE), **asked}
    )
    options = TrainOptions(batch_size=batch, duration=Steps(steps), seed=seed)
    given = [name if isinstance(name, DataName) else DataName(str(name)) for name in names]
    return stream_loader(given, how, options, layout, buffer_rows=buffer)


def texts(stream: Any, steps: int = 10**6) -> list[str]:
    """The rows of the next steps, in order."""
    found: list[str] = []
    for _, batches in zip(range(steps), stream, strict=False):
        found += [tiny.tokenizer().decode(row, skip_special_tokens=True) for b in batches for row in b.input_ids]
    return found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tiny.write_rows(tmp_path / "rows.jsonl", *[{"text": f"row {n:02}" + "." * (n % 5)} for n in range(25)])


def test_every_row_comes_once_an_epoch_in_another_order(file: Path) -> None:
    found = texts(loader(file, batch=5, steps=15))
    epochs = [found[:25], found[25:50], found[50:]]
    whole = sorted(json.loads(line)["text"] for line in file.read_text().splitlines())
    assert [sorted(epoch) for epoch in epochs] == [whole] * 3
    assert epochs[0] != epochs[1]
    assert epochs[0] != whole
    assert texts(loader(file, batch=5, steps=15)) == found
    assert texts(loader(file, batch=5, steps=15, seed=1)) != found
    # No row comes farther from its place than the buffer reaches, and some blocks.
    assert all(abs(place - int(text[4:6])) < 7 + 5 for place, text in enumerate(epochs[0]))


def test_a_file_that_is_replaced_while_it_is_streamed(file: Path) -> None:
    """By as many bytes, on the same lines: nothing else would tell."""
    stream = loader(file, buffer=4, batch=2)
    assert texts(stream, 1)
    other = file.with_name("other")
    other.write_bytes(file.read_bytes().replace(b"row", b"wor"))
    os.utime(other, ns=(1, 1))
    other.replace(file)
    with pytest.raises(ConfigError, match=rf"{file.name}: it was changed while it was streamed"):
        texts(stream)


@pytest.mark.slow
def test_several_processes_read_what_one_reads(file: Path) -> None:
    one = texts(loader(file, batch=5, steps=8))
    assert texts(loader(file, batch=5, steps=8, options=ReadOptions(effort=TWO))) == one


@pytest.mark.parametrize("layout", [Padded(), Packed(40)])
def test_a_training_goes_on_from_any_step_with_steps_of_any_size(file: Path, layout: Any) -> None:
    whole = texts(loader(file, batch=2, steps=30, layout=layout))
    for done in (1, 4, 6, 13, 15):
        first = loader(file, batch=2, steps=30, layout=layout)
        before = texts(first, done)
        state = json.loads(json.dumps(first.state_dict()))
        rest = loader(file, batch=1, steps=done + 2 * (15 - done), layout=layout)
        rest.load_state_dict(state)
        assert len(json.dumps(state)) < 150
        assert before + texts(rest) == whole[:30]


def test_files_of_all_kinds(tmp_path: Path) -> None:
    files = same_rows(tmp_path)
    expected = sorted(texts(loader(files[0], batch=7, steps=1)))
    for path in files:
        first = loader(path, batch=3, steps=7, buffer=3)
        whole = texts(first)
        assert sorted(whole[:7]) == expected, path
        again = loader(path, batch=3, steps=7, buffer=3)
        texts(again, 2)
        rest = loader(path, batch=3, steps=7, buffer=3)
        rest.load_state_dict(again.state_dict())
        assert whole[:6] + texts(rest) == whole
    together = texts(loader(f"{tmp_path}/*.arrow", batch=14, steps=1))
    assert sorted(together) == sorted(expected * 2)


def test_a_data_set_that_datasets_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "folder"
    folder.mkdir()
    rows = [{"question": f"{n}?", "answer": f"{n}!", "other": None} for n in range(9)]
    tiny.write_rows(folder / "some.jsonl", *rows)
    card = "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: some.jsonl\n---\n"
    (folder / "README.md").write_text(card)
    name = DataName(str(folder), words=RowWords(columns={"prompt": "question", "completion": "answer"}))
    whole = texts(loader(name, batch=3, steps=6, buffer=4))
    assert sorted(whole[:9]) == [f"{n}?{n}!" for n in range(9)]
    first = loader(name, batch=3, steps=6, buffer=4)
    texts(first, 2)
    rest = loader(name, batch=3, steps=6, buffer=4)
    rest.load_state_dict(first.state_dict())
    assert texts(rest) == whole[6:]
    assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").rglob("*.arrow"))


def test_data_sets_are_mixed_by_weight(file: Path, tmp_path: Path) -> None:
    few = tiny.write_rows(tmp_path / "few.jsonl", *[{"text": f"few {n}"} for n in range(3)])
    names = DataName(str(file), weight=1.0), DataName(str(few), weight=3.0)
    whole = texts(loader(*names, batch=2, steps=20))
    shares = [sum(text.startswith("few") for text in whole[:taken]) for taken in (4, 8, 20, 40)]
    assert shares == [3, 6, 15, 30]
    first = loader(*names, batch=2, steps=20)
    texts(first, 7)
    rest = loader(*names, batch=2, steps=20)
    rest.load_state_dict(first.state_dict())
    assert texts(rest) == whole[14:]
    [batch] = next(iter(loader(*names, batch=2)))
    assert f"{few}, line" in first.name_rows(batch.lines)
    other = loader(names[0], DataName(str(few), weight=2.0))
    with pytest.raises(ConfigError, match="the position is one in other data; resume with the same data"):
        other.load_state_dict(first.state_dict())
    with pytest.raises(ConfigError, match="are streamed together only with weights"):
        loader(file, DataName(str(few), words=RowWords("text")))


class Stopped(Exception):
    pass


def test_who_is_stopped_while_the_first_rows_are_read_is_told_so(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_read = threading.Event()

    def slowly(*args: Any, **options: Any) -> Any:
        for each in encoded_blocks(*args, **options):
            is_read.set()
            time.sleep(0.2)
            yield each

    def check(_: World) -> None:
        if is_read.is_set():
            raise Stopped

    monkeypatch.setattr(row_stream, "encoded_blocks", slowly)
    stream = loader(file)
    with monkeypatch.context() as stopping:
        stopping.setattr(World, "check", check)
        with pytest.raises(CheckpointError, match="Stopped"):
            texts(stream)
    assert texts(stream, 1) == texts(loader(file), 1)


def test_rows_that_cannot_be_used(tmp_path: Path) -> None:
    rows: list[Any] = [{"text": f"row {n}"} for n in range(30)]
    rows[20], rows[22] = "{", {"prompt": "a" * 99, "completion": "b"}
    file = tiny.write_rows(tmp_path / "rows.jsonl", *rows)
    stream = loader(file, batch=1)
    with pytest.raises(ConfigError, match=r"rows.jsonl: 1 row cannot be used\n  line 21: it is not valid JSON"):
        texts(stream)
    assert 5 <= stream.step < 20  # those before it were trained on
    found = texts(loader(file, batch=7, steps=4, malformed=SkipRows()))
    assert sorted(found) == sorted(f"row {n}" for n in range(30) if n not in (20, 22))
    (tmp_path / "empty.jsonl").write_text("\n")
    for name in ("empty.jsonl", "nothing.jsonl"):
        tiny.write_rows(tmp_path / "nothing.jsonl", {"prompt": "a" * 99, "completion": "b"})
        with pytest.raises(
            ConfigError, match=rf"{name}: there is no row with a token to learn within max_length=64"
        ):
            texts(loader(tmp_path / name))
    with pytest.raises(ConfigError, match=r"gone.jsonl: the data cannot be read \(No such file"):
        texts(loader(tmp_path / "gone.jsonl"))
    known = loader(file, malformed=SkipRows())
    known.vocabulary = 20
    with pytest.raises(
        ConfigError, match=r"rows.jsonl: the tokenizer makes the token \d+ of it, but the model has"
    ):
        texts(known)


@pytest.mark.parametrize(
    "wrong",
    [
        {"positions": [[0, 0, 9, 0, 0, 0]]},
        {"positions": [[0, 0, 0, 0, 0]]},
        {"taken": [float("inf")]},
        {"taken": []},
        {"step": -1},
        {"step": "a"},
    ],
)
def test_a_position_that_is_none(file: Path, wrong: dict[str, Any]) -> None:
    stream = loader(file)
    with pytest.raises(ConfigError, match=r"the position is none .*the checkpoint is damaged"):
        stream.load_state_dict({**stream.state_dict(), **wrong})
    os.utime(file, (1, 1))
    with pytest.raises(ConfigError, match="the position is one in other data"):
        loader(file).load_state_dict(stream.state_dict())


def _taken(path: str, done: int, state: Any) -> tuple[Any, list[list[str]], str]:
    """The rows of two ranks, some steps of them; and what all ranks say of a broken file."""
    stream = loader(path, batch=2, steps=20)
    if state is not None:
        stream.load_state_dict(state)
    steps = [texts([batches]) for _, batches in zip(range(done), stream, strict=False)]
    try:
        texts(loader(f"{path}.bad", steps=3))
    except ConfigError as error:
        return stream.state_dict(), steps, str(error)
    return stream.state_dict(), steps, ""


@pytest.mark.slow
@pytest.mark.distributed
def test_any_number_of_ranks_takes_the_same_rows(file: Path) -> None:
    Path(f"{file}.bad").write_text("{")
    whole = texts(loader(file, batch=4, steps=20))
    first, second = run_world(2, _taken, str(file), 5, None)
    assert first[0] == second[0]
    together = [sorted(own + other) for own, other in zip(first[1], second[1], strict=True)]
    assert together == [sorted(whole[start : start + 4]) for start in range(0, 20, 4)]
    assert first[2] == second[2]
    assert "line 1: it is not valid JSON" in first[2]
    rest = loader(file, batch=4, steps=20)
    rest.load_state_dict(first[0])
    assert texts(rest) == whole[20:]


def test_a_training_of_rows_that_are_streamed(file: Path, tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path / "model")

    def configured(output: str, **values: Any) -> Any:
        return config_of(
            {
                "model": {"name": str(folder)},
                "data": {
                    "train": str(file),
                    "streaming": True,
                    "shuffle_buffer": 8,
                    "max_length": 64,
                    "processes": 1,
                },
                "training": {"max_steps": 6, "batch_size": 3},
                "schedule": {"name": "constant"},
                "output": {"directory": str(tmp_path / output)},
                **values,
            }
        )

    def losses(config: Any, stop_after: int | None = None) -> list[float]:
        session, stop = Session.begin(config), StopRequest()
        found: list[float] = []

        def tell(facts: Any) -> None:
            if hasattr(facts, "grad_norm"):
                found.append(facts.loss)
            if stop_after is not None and len(found) == stop_after:
                stop.number = 15

        session.train(tell, stop)
        return found

    whole = losses(configured("whole"))
    assert len(whole) == 6
    parts = losses(configured("parts"), stop_after=2)
    assert parts + losses(configured("parts")) == whole
    for values, message in (
        ({"training": {}}, "training: max_steps must be given with data.streaming"),
        (
            {"data": {"train": "a", "streaming": True, "validation_fraction": 0.1}},
            "data: validation_fraction is of rows",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            configured("none", **values)
    how, endless = RowsAsked(tiny.tokenizer(), 64), TrainOptions(duration=Epochs(1))
    with pytest.raises(ConfigError, match="data.streaming: give training.max_steps"):
        stream_loader([DataName("a.jsonl")], how, endless, Padded(), buffer_rows=3)
