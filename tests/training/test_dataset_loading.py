"""Datasets of ``shardwise train``: names and mixtures."""

import errno
import gzip
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
from tests.training import tiny

from shardwise.core.errors import ConfigError
from shardwise.training import dataset_loading
from shardwise.training.arguments import ShardwiseArguments


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def script(name: str | None = None, **further: Any) -> Any:
    plain = {"dataset_config": None, "dataset_streaming": False, "dataset_train_split": "train"}
    plain["dataset_test_split"] = "test"
    return SimpleNamespace(**{"dataset_name": name, **plain, **further})


def mixture(*entries: dict[str, Any], **further: Any) -> Any:
    absent = dict.fromkeys(("name", "data_dir", "data_files", "columns", "fraction"))
    found = [SimpleNamespace(**{**absent, "split": "train", **entry}) for entry in entries]
    return SimpleNamespace(**{"datasets": found, "streaming": False, "test_split_size": None, **further})


def load(name: str | None, mixed: Any | None = None) -> Any:
    return dataset_loading.load(script(name), mixed or mixture(), ShardwiseArguments())[0]


def write(file: Path, count: int, say: str) -> str:
    tiny.write_rows(file, *[{"text": f"{say}{number}"} for number in range(count)])
    return str(file)


def test_a_local_file_is_a_dataset(tmp_path: Path) -> None:
    name = write(tmp_path / "rows.jsonl", 3, "a")
    assert load(name)["train"]["text"] == ["a0", "a1", "a2"]
    with gzip.open(tmp_path / "rows.jsonl.gz", "wb") as file:
        file.write(Path(name).read_bytes())
    assert len(load(str(tmp_path / "rows.jsonl.gz"))["train"]) == 3
    parts = load(name, mixture(test_split_size=1 / 3))
    assert sorted(parts) == ["test", "train"]
    assert len(parts["train"]) == 2
    with pytest.raises(ConfigError, match="test_split_size: 1.5 cannot be used"):
        load(name, mixture(test_split_size=1.5))
    with pytest.raises(ConfigError, match=r"train_split: train_sft is not a split of the dataset \(train\)"):
        dataset_loading.load(
            script(name, dataset_train_split="train_sft"), mixture(test_split_size=0.5), ShardwiseArguments()
        )


@pytest.mark.parametrize("name", ["chats [v2].jsonl", "c*s v.jsonl", "[team] a/x.jsonl"])
def test_the_name_of_a_local_file_is_no_pattern(tmp_path: Path, name: str) -> None:
    (tmp_path / "[team] a").mkdir()
    write(tmp_path / "chats v.jsonl", 1, "other")
    file = write(tmp_path / name, 1, "a")
    own = ShardwiseArguments(dataset_mixture={"datasets": [{"id": file}]})
    streamed = dataset_loading.load(script(file, dataset_streaming=True), mixture(), ShardwiseArguments())[0]
    for splits in (
        load(file),
        streamed,
        load(None, mixture({"path": file})),
        dataset_loading.load(script(), mixture(), own)[0],
    ):
        assert [row["text"] for row in splits["train"]] == ["a0"]


def test_concatenated_datasets_are_split_alike_on_every_rank(tmp_path: Path) -> None:
    names = [write(tmp_path / f"{say}.jsonl", 40, say) for say in "ab"]
    first, second = (load(None, mixture(*({"path": name} for name in names), test_split_size=0.25)) for _ in "12")
    assert first["test"]["text"] == second["test"]["text"]
    assert (len(first["train"]), len(first["test"])) == (60, 20)


def test_a_folder_of_save_to_disk_is_named(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"text": ["a"]})
    rows.save_to_disk(tmp_path / "rows")
    datasets.DatasetDict(train=rows).save_to_disk(tmp_path / "splits")
    for name in ("rows", "splits"):
        with pytest.raises(ConfigError, match=f"{name}: is a folder of save_to_disk. Save the rows by to_parquet"):
            load(str(tmp_path / name))


def test_a_cache_that_cannot_be_written_is_not_blamed_on_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system", "/cache")

    monkeypatch.setattr(datasets.builder.os, "makedirs", fail)
    with pytest.raises(ConfigError, match=r"Read-only file system: '/cache'. .* env: {HF_DATASETS_CACHE"):
        load(write(tmp_path / "rows.jsonl", 3, "a"))


def test_a_file_that_is_missing_is_not_sought_on_the_hub_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="There is no such file on this machine. Check the path"):
        load(str(tmp_path / "rows.jsonl"))


def test_files_that_cannot_be_mixed_are_not_missing(tmp_path: Path) -> None:
    text = tiny.write_rows(tmp_path / "text.jsonl", {"a": "Hi"})
    lists = tiny.write_rows(tmp_path / "lists.jsonl", {"a": [{"b": 1}]})
    with pytest.raises(ConfigError, match="cannot be loaded as a dataset.* Check the name and the rows$"):
        load(None, mixture({"path": str(text)}, {"path": str(lists)}))


def test_an_empty_file_is_named(tmp_path: Path) -> None:
    name = str(tmp_path / "rows.jsonl")
    Path(name).touch()
    for mixed in (mixture(), mixture({"path": name})):
        with pytest.raises(ConfigError, match=f"{name}: is an empty file, without rows"):
            load(None if mixed.datasets else name, mixed)


def test_a_column_that_a_dataset_of_a_mixture_lacks_is_named(tmp_path: Path) -> None:
    name = write(tmp_path / "rows.jsonl", 3, "a")
    with pytest.raises(ConfigError, match="cannot be loaded as a dataset.*nothing"):
        load(None, mixture({"path": name, "columns": ["nothing"]}))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (None, "dataset_name: is missing"),
        ("no/such", "no/such: cannot be loaded"),
    ],
)
def test_datasets_that_cannot_be_loaded_are_named(name: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(name)


def test_a_file_with_a_broken_row_is_named(tmp_path: Path) -> None:
    tiny.write_rows(tmp_path / "rows.jsonl", '{"text": "a"}', "", '{"text": ')
    with pytest.raises(ConfigError, match=r"rows.jsonl: line 3 is not JSON. Write one object on each line"):
        load(str(tmp_path / "rows.jsonl"))
    with pytest.raises(ConfigError, match=r"rows.jsonl: line 3 is not JSON"):
        load(None, mixture({"path": str(tmp_path / "rows.jsonl")}))


def splits_of(folder: Path, name: str, texts: dict[str, list[str]]) -> str:
    """A dataset with these splits."""
    (folder / name).mkdir()
    for split, contents in texts.items():
        rows = [{"messages": [{"role": "user", "content": text}], "extra": 1} for text in contents]
        tiny.write_rows(folder / name / f"{split}.jsonl", *rows)
    return str(folder / name)


def texts_of(dataset: Any) -> list[str]:
    return [row["messages"][0]["content"] for row in dataset]


def test_a_mixer_has_the_first_rows_of_each_training_split(tmp_path: Path) -> None:
    """As that of the alignment handbook: shares are rounded down, tests are whole, and all is shuffled."""
    a = splits_of(tmp_path, "a", {"train": [f"a{n}" for n in range(10)], "test": ["ta", "tb"]})
    b = splits_of(tmp_path, "b", {"train": [f"b{n}" for n in range(5)], "test": ["tc"]})
    own = ShardwiseArguments(dataset_mixer={a: 0.35, b: 1})
    mixed = dataset_loading.load(script(None), mixture(), own)[0]
    assert sorted(texts_of(mixed["train"])) == ["a0", "a1", "a2", "b0", "b1", "b2", "b3", "b4"]
    assert sorted(texts_of(mixed["test"])) == ["ta", "tb", "tc"]
    assert mixed["train"].column_names == ["messages"]
    expected = datasets.Dataset.from_dict({"n": range(8)}).shuffle(seed=42)["n"]
    in_order = ["a0", "a1", "a2", "b0", "b1", "b2", "b3", "b4"]
    assert texts_of(mixed["train"]) == [in_order[number] for number in expected]
    own = ShardwiseArguments(dataset_mixer={b: 1}, dataset_splits=["train"])
    alone = dataset_loading.load(script(None), mixture(), own)[0]
    assert list(alone) == ["train"]
    own = ShardwiseArguments(dataset_mixer={a: 1}, dataset_splits=["train_sft"])
    with pytest.raises(ConfigError, match="cannot be loaded as a dataset"):
        dataset_loading.load(script(None), mixture(), own)[0]


def test_a_mixture_has_shuffled_rows_of_each_dataset(tmp_path: Path) -> None:
    """As that of open-r1: every step has the same seed."""
    a = splits_of(tmp_path, "a", {"train": [f"a{n}" for n in range(10)]})
    b = splits_of(tmp_path, "b", {"train": ["b0", "b1"]})
    entries = [{"id": a, "weight": 0.5, "columns": ["messages"]}, {"id": b, "columns": ["messages"]}]
    own = ShardwiseArguments(dataset_mixture={"datasets": entries, "seed": 3})
    mixed = texts_of(dataset_loading.load(script(None), mixture(), own)[0]["train"])
    rows = [f"a{n}" for n in datasets.Dataset.from_dict({"n": range(10)}).shuffle(seed=3)["n"][:5]] + ["b0", "b1"]
    assert mixed == [rows[n] for n in datasets.Dataset.from_dict({"n": range(7)}).shuffle(seed=3)["n"]]
    own = ShardwiseArguments(dataset_mixture={"datasets": entries, "seed": 3, "test_split_size": 2})
    parts = dataset_loading.load(script(None), mixture(), own)[0]
    assert sorted(texts_of(parts["train"]) + texts_of(parts["test"])) == sorted(rows)
    assert len(parts["test"]) == 2


def test_an_evaluation_dataset_replaces_the_test_split(tmp_path: Path) -> None:
    a = splits_of(tmp_path, "a", {"train": ["a"], "test": ["b"]})
    c = splits_of(tmp_path, "c", {"train": ["c"], "test": ["d"]})
    own = ShardwiseArguments(eval_dataset_name=c)
    trained, evaluated = dataset_loading.load(script(a), mixture(), own)
    assert (texts_of(trained["train"]), texts_of(evaluated["test"])) == (["a"], ["d"])
    # A split of the same name as that of the training stays apart from it.
    trained, evaluated = dataset_loading.load(script(a, dataset_test_split="train"), mixture(), own)
    assert (texts_of(trained["train"]), texts_of(evaluated["train"])) == (["a"], ["c"])
    file = write(tmp_path / "rows.jsonl", 1, "f")
    trained, evaluated = dataset_loading.load(script(a), mixture(), ShardwiseArguments(eval_dataset_name=file))
    assert (texts_of(trained["train"]), evaluated["test"]["text"]) == (["a"], ["f0"])
