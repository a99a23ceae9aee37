"""Tokens that are kept from one training to the next."""

from __future__ import annotations

import datetime
import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.harness.world import run_world
from tests.training import tiny

from shardwise.cli.train import cache_root
from shardwise.errors import ConfigError, FormatError
from shardwise.execution.processes.launched import this_place
from shardwise.storage.contract import StorageWriter
from shardwise.storage.writing.local_writer import LocalWriter
from shardwise.training.configuration.config import config_of
from shardwise.training.data import read_once as reading
from shardwise.training.data import token_cache
from shardwise.training.data.read_once import ReadOptions, SkipRows, TrainData, read_data
from shardwise.training.data.row_files import ByContent, ByStat
from shardwise.training.data.sources import DataName
from shardwise.training.data.token_cache import CacheFolder
from shardwise.training.session import Session, read_rows
from shardwise.training.stopping import StopRequest
from shardwise.training.texts.chat_script import ChatOptions, Learn
from shardwise.training.texts.layouts import RowWords


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tiny.write_chats(tmp_path / "chats.jsonl", 9)


def folder(tmp_path: Path, **options: Any) -> CacheFolder:
    return CacheFolder(tmp_path / "cache", **options)


def read(
    data: Any, cache: CacheFolder, *, max_length: int = 64, tokenizer: Any = None, **options: Any
) -> TrainData:
    tokenizer = tokenizer or tiny.tokenizer()
    return read_data(data, tokenizer, max_length=max_length, options=ReadOptions(cache), **options)


def kept(cache: CacheFolder) -> list[Path]:
    return sorted(cache.directory.glob("tokens-*/tokens.safetensors"))


def read_metadata(entry: Path) -> dict[str, str]:
    content = entry.read_bytes()
    found: dict[str, str] = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    return found


def was_kept(data: TrainData) -> bool:
    return [note.endswith("its tokens were kept") for note in data.notes] == [True]


def same(one: TrainData, other: TrainData) -> bool:
    arrays = [
        [data.examples.lines, *(e.tokens for e in data.examples), *(e.supervised for e in data.examples)]
        for data in (one, other)
    ]
    return (
        all(np.array_equal(a, b) for a, b in zip(*arrays, strict=True))
        and one.examples.digest == other.examples.digest
        and (one.cut_lines, one.skipped_lines, one.malformed, one.layouts)
        == (other.cut_lines, other.skipped_lines, other.malformed, other.layouts)
    )


def test_what_is_kept_is_what_was_made(tmp_path: Path) -> None:
    cache = folder(tmp_path)
    rows = [tiny.chat("Hi", "Ho"), "{", {"text": "a" * 99}, {"prompt": "b" * 70, "completion": "c"}]
    file = tiny.write_rows(tmp_path / "rows.jsonl", *rows)
    plain = read_data(file, tiny.tokenizer(), max_length=64, malformed=SkipRows())
    assert (plain.cut_lines, plain.skipped_lines, len(plain.malformed)) == ((3, 4), (4,), 1)
    first, second = (read(file, cache, malformed=SkipRows()) for _ in range(2))
    assert (was_kept(first), was_kept(second)) == (False, True)
    assert same(first, plain)
    assert same(second, plain)
    assert isinstance(second.examples.tokens, np.memmap)  # type: ignore[union-attr]
    assert second.examples[0].tokens.flags.writeable  # else torch warns
    with pytest.raises(ConfigError, match=r"1 row cannot be used\n  line 2"):
        read(file, cache)
    assert {path.name for path in kept(cache)[0].parent.iterdir()} == {"tokens.safetensors"}


def test_what_decides_about_tokens_decides_what_is_kept(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = folder(tmp_path)
    again = [
        lambda: read(file, cache),
        lambda: read(file, cache, max_length=63),
        lambda: read(file, cache, tokenizer=tiny.tokenizer(tiny.UNMARKED)),
        lambda: read(file, cache, chats=ChatOptions(learn=Learn.LAST)),
        lambda: read(DataName(str(file), words=RowWords("messages")), cache),
    ]
    for number, reads in enumerate(again, start=1):
        assert not was_kept(reads())
        assert len(kept(cache)) == number
    assert all(was_kept(reads()) for reads in again)
    os.utime(file, (1, 1))
    assert not was_kept(read(file, cache))
    monkeypatch.setattr(token_cache, "VERSION", 2)
    assert not was_kept(read(file, cache))
    monkeypatch.setattr(token_cache.metadata, "version", lambda name: "0.0")
    assert not was_kept(read(file, cache))


def test_parts_of_a_data_set_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the data sets library cuts from one file, of as many rows."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    datasets.disable_progress_bars()
    (tmp_path / "rows").mkdir()
    tiny.write_rows(tmp_path / "rows" / "some.jsonl", {"text": "one"}, {"text": "two"})
    card = "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: some.jsonl\n---\n"
    (tmp_path / "rows" / "README.md").write_text(card)
    first, second = (
        read(DataName(str(tmp_path / "rows"), split), folder(tmp_path)) for split in ("train[:1]", "train[1:]")
    )
    assert not was_kept(second)
    assert first.examples[0].tokens.tolist() != second.examples[0].tokens.tolist()
    assert was_kept(read(DataName(str(tmp_path / "rows"), "train[1:]"), folder(tmp_path)))
    several = datasets.Dataset.from_list([{"text": "one"}, {"text": "two"}])
    several.save_to_disk(str(tmp_path / "saved"), num_shards=2)
    one = read(tmp_path / "saved", folder(tmp_path))
    state = json.loads((tmp_path / "saved" / "state.json").read_text())
    (tmp_path / "saved" / "state.json").write_text(json.dumps({**state, "_data_files": state["_data_files"][::-1]}))
    turned = read(tmp_path / "saved", folder(tmp_path))
    assert [each.tokens.tolist() for each in turned.examples] == [each.tokens.tolist() for each in one.examples][
        ::-1
    ]


@pytest.mark.parametrize("known_by", [ByContent(), ByStat()], ids=["content", "stat"])
def test_the_same_bytes_read_in_another_way_are_other_rows(tmp_path: Path, known_by: ByContent | ByStat) -> None:
    """What a file is called says by what its columns are separated, and whether it is an array."""
    cache = folder(tmp_path, known_by=known_by)
    (tmp_path / "rows").write_text("text,b\ttext\none,x\ttwo\n")
    (tmp_path / "array").write_text('[{"text": "one"}]\n')
    for name in ("rows.csv", "rows.tsv", "array.json", "array.jsonl"):
        (tmp_path / name).symlink_to(tmp_path / Path(name).stem)
    commas, tabs = (read(tmp_path / f"rows.{suffix}", cache) for suffix in ("csv", "tsv"))
    assert [was_kept(data) for data in (commas, tabs)] == [False, False]
    assert commas.examples[0].tokens.tolist() != tabs.examples[0].tokens.tolist()
    assert was_kept(read(tmp_path / "rows.tsv", cache))
    assert len(read(tmp_path / "array.json", cache).examples) == 1
    with pytest.raises(ConfigError, match="line 1: it is a JSON array, not an object"):
        read(tmp_path / "array.jsonl", cache)


def test_rows_are_named_by_the_files_as_they_are_called_now(tmp_path: Path) -> None:
    (tmp_path / "then").mkdir()
    for name in "ab":
        tiny.write_rows(tmp_path / "then" / f"{name}.jsonl", {"text": name})
    cache = folder(tmp_path, known_by=ByContent())
    assert "then/b.jsonl, line 1" in read(tmp_path / "then", cache).name_rows([2])
    found = read((tmp_path / "then").rename(tmp_path / "now"), cache)
    assert was_kept(found)
    assert "now/b.jsonl, line 1" in found.name_rows([2])


def test_other_content_with_the_same_time_is_found_by_its_content(file: Path, tmp_path: Path) -> None:
    def change() -> None:
        at = file.stat()
        content = file.read_bytes().replace(b"What", b"Whom")
        with file.open("r+b") as opened:
            opened.write(content)
        os.utime(file, ns=(at.st_atime_ns, at.st_mtime_ns))

    by_stat, by_content = folder(tmp_path, known_by=ByStat()), folder(tmp_path, known_by=ByContent())
    before = read(file, by_content)
    read(file, by_stat)
    moved = file.rename(tmp_path / "elsewhere.jsonl")
    assert was_kept(read(moved, by_content))
    file = moved.rename(tmp_path / "chats.jsonl")
    change()
    assert was_kept(read(file, by_stat))
    after = read(file, by_content)
    assert not was_kept(after)
    assert after.examples.digest != before.examples.digest


def test_a_file_that_is_not_sound_is_made_again(file: Path, tmp_path: Path) -> None:
    cache = folder(tmp_path)
    expected = read(file, cache)
    [entry] = kept(cache)
    good = entry.read_bytes()

    def facts_with(**changed: Any) -> bytes:
        arrays = load_file(entry)
        with_facts = json.loads(read_metadata(entry)["shardwise"])
        save_file(arrays, entry, {"shardwise": json.dumps({**with_facts, **changed})})
        return entry.read_bytes()

    def arrays_with(**changed: Any) -> bytes:
        save_file({**load_file(entry), **changed}, entry, read_metadata(entry))
        return entry.read_bytes()

    arrays = {name: array.copy() for name, array in load_file(entry).items()}
    tokens, ends = arrays["tokens"], arrays["ends"]
    bad: list[bytes] = []
    for make in (
        lambda: facts_with(version=7),
        lambda: facts_with(key="0" * 64),
        lambda: facts_with(digest="many"),
        lambda: facts_with(digest=3),
        lambda: arrays_with(tokens=-tokens - 1),
        lambda: arrays_with(ends=ends[::-1].copy()),
        lambda: arrays_with(ends=ends * 2**40),
        lambda: arrays_with(tokens=tokens.astype(np.int64)),
        lambda: arrays_with(lines=arrays["lines"] + 1),
        lambda: arrays_with(hashes=arrays["hashes"][:-1].copy()),
        lambda: arrays_with(more=ends),
    ):
        entry.write_bytes(good)
        bad.append(make())
    flipped = bytearray(good)
    flipped[-1] ^= 1
    one_token = bytearray(good)
    at = good.find(np.ascontiguousarray(tokens).tobytes())
    one_token[at] ^= 1
    bad += [b"", b"\xff" * 99, good[:-1], good[: len(good) // 2], good + b"\0", bytes(flipped), bytes(one_token)]
    bad.append(good[: -len(good) // 2] + bytes(len(good) // 2))  # torn: pages that were never written
    for content in bad:
        entry.write_bytes(content)
        found = read(file, cache)
        assert not was_kept(found)
        assert same(found, expected)
        assert entry.read_bytes() == good
    entry.unlink()
    entry.mkdir()
    assert same(read(file, cache), expected)


def test_a_file_that_is_cut_off_once_its_header_has_been_read(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank of the machine has looked at every byte; this one maps it, and may come too late."""
    cache = folder(tmp_path)
    read(file, cache)
    [entry] = kept(cache)
    read_header = token_cache.read_header

    def cut_off(*given: Any) -> Any:
        header = read_header(*given)
        os.truncate(entry, entry.stat().st_size // 2)
        return header

    monkeypatch.setattr(token_cache, "read_header", cut_off)
    key = json.loads(read_metadata(entry)["shardwise"])["key"]
    with pytest.raises(FormatError, match="cannot be mapped"):
        token_cache.map_table(entry.parent, key, token_cache.CheckSizes())


def test_a_folder_that_cannot_be_written_to_is_no_error(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = read_data(file, tiny.tokenizer(), max_length=64)
    (tmp_path / "cache").write_text("is no folder")
    found = read(file, folder(tmp_path))
    assert same(found, expected)
    assert "its tokens are not kept (" in found.notes[0]
    (tmp_path / "cache").unlink()

    def full(self: StorageWriter, file: str, start: int, buffers: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(LocalWriter, "write", full)
        found = read(file, folder(tmp_path))
    assert same(found, expected)
    assert "No space left on device" in found.notes[0]
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []
    read(file, folder(tmp_path))
    assert was_kept(read(file, folder(tmp_path)))


def test_a_file_that_changes_while_it_is_read_is_not_kept(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, gathered = folder(tmp_path), reading.gathered

    def slowly(*args: Any) -> Any:
        with file.open("a") as opened:
            opened.write("\n")
        return gathered(*args)

    with monkeypatch.context() as patched:
        patched.setattr(reading, "gathered", slowly)
        assert read(file, cache).notes[0].endswith("its tokens are not kept (a file was changed while it was read)")
    assert kept(cache) == []


def test_two_trainings_make_the_same_at_once(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second finds the first with its file under way; both have their tokens, and what is kept is sound."""
    cache, begun, done = folder(tmp_path), threading.Event(), threading.Event()
    found: list[TrainData] = []
    sync = LocalWriter.sync

    def held(self: LocalWriter, name: str) -> None:
        if "tokens" in name and not begun.is_set():
            begun.set()
            assert done.wait(60)
        sync(self, name)

    monkeypatch.setattr(LocalWriter, "sync", held)
    first = threading.Thread(target=lambda: found.append(read(file, cache)))
    first.start()
    assert begun.wait(60)
    second = read(file, cache)
    assert "its tokens are not kept (" in second.notes[0]
    done.set()
    first.join()
    assert same(found[0], second)
    assert was_kept(read(file, cache))


def test_what_was_not_used_for_longest_goes_first(file: Path, tmp_path: Path) -> None:
    wide = folder(tmp_path)
    for number, length in enumerate((50, 51, 52), start=1):
        read(file, wide, max_length=length)
        newest = max(kept(wide), key=lambda path: path.stat().st_mtime_ns).parent
        os.utime(newest, (number, number))
    left = wide.directory / "tokens-left"
    left.mkdir()
    os.utime(left, (1, 1))
    assert was_kept(read(file, wide, max_length=50))  # it is used, and so the newest
    nbytes = kept(wide)[0].stat().st_size
    read(file, folder(tmp_path, most_bytes=2 * nbytes + 500), max_length=53)
    assert len(kept(wide)) == 2
    assert not left.exists()
    assert was_kept(read(file, wide, max_length=50))
    read(file, folder(tmp_path, most_bytes=1), max_length=54)
    assert len(kept(wide)) == 1
    assert was_kept(read(file, wide, max_length=54))


def _read_on_rank(path: str, cache: str) -> tuple[Any, ...]:
    found = read(path, CacheFolder(Path(cache)))
    mapped = isinstance(found.examples.tokens, np.memmap)  # type: ignore[union-attr]
    try:
        read(f"{path}.bad", CacheFolder(Path(cache)))
    except ConfigError as error:
        refused = str(error)
    else:
        refused = ""
    in_memory = read_data(path, tiny.tokenizer(), max_length=64)
    # A folder that only the leading rank finds unusable: all have the tokens in memory.
    beside = read(path, CacheFolder(Path(path)))
    # As if each rank were on a machine of its own: both make what is kept, or one has the other's in memory.
    with pytest.MonkeyPatch.context() as patched:
        rank = this_place()[0]
        patched.setattr(reading, "file_space", lambda: f"machine {rank}")
        apart = read(path, CacheFolder(Path(f"{cache}-{rank}")))
        alone = read(path, CacheFolder(Path(cache) if rank == 0 else Path(path)))
    several = (in_memory, beside, apart, alone)
    return mapped, refused, [same(found, other) for other in several], found.examples.digest


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_of_a_machine_map_one_file(file: Path, tmp_path: Path) -> None:
    Path(f"{file}.bad").write_text("{")
    cache = str(tmp_path / "cache")
    ranks = run_world(2, _read_on_rank, str(file), cache)
    assert [rank[0] for rank in ranks] == [True, True]
    assert ranks[0][1] == ranks[1][1]
    assert "line 1: it is not valid JSON" in ranks[0][1]
    assert [rank[2] for rank in ranks] == [[True] * 4] * 2
    assert ranks[0][3] == ranks[1][3]
    assert [len(kept(CacheFolder(Path(each)))) for each in (cache, f"{cache}-0", f"{cache}-1")] == [1, 1, 1]


def test_where_tokens_are_kept(file: Path, tmp_path: Path) -> None:
    home = Path("~/.cache/shardwise/tokens").expanduser()
    assert cache_root({}) == home
    assert cache_root({"XDG_CACHE_HOME": "/x"}) == Path("/x/shardwise/tokens")
    assert cache_root({"XDG_CACHE_HOME": "/x", "SHARDWISE_CACHE": "/own"}) == Path("/own/tokens")

    def found(root: Path | None, **data: Any) -> list[Any]:
        config = config_of(
            {
                "model": {"name": "m"},
                "output": {"directory": "out"},
                "data": {"train": str(file), "max_length": 64, **data},
            }
        )
        learned, _ = read_rows(config, tiny.tokenizer(), root)
        return [was_kept(learned), *sorted(path.name for path in tmp_path.iterdir() if path.is_dir())]

    assert found(None) == [False]
    assert found(tmp_path / "root", cache="never") == [False]
    assert [found(tmp_path / "root") for _ in range(2)] == [[False, "root"], [True, "root"]]
    own = str(tmp_path / "own")
    assert found(tmp_path / "root", cache_dir=own) == [False, "own", "root"]
    assert found(None, cache_dir=own) == [True, "own", "root"]
    assert found(None, cache_dir=own, cache="content") == [False, "own", "root"]
    with pytest.raises(ConfigError, match="data.cache_size: 'much' is not a size"):
        found(None, cache_dir=own, cache_size="much")


def test_a_run_keeps_the_day_on_which_it_began(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates tell it. Gone on with on another day, rows are the same, and are not tokenised again."""
    model = tiny.write_model(tmp_path / "model")
    tiny.tokenizer("{{- strftime_now('%d %b %Y') }}" + tiny.MARKED).save_pretrained(model)

    def begin(output: str, day: datetime.date) -> Session:
        class Day(datetime.date):
            @classmethod
            def today(cls) -> Any:
                return day

        monkeypatch.setattr("shardwise.training.resuming.datetime.date", Day)
        values = {
            "model": {"name": str(model)},
            "data": {"train": str(file), "max_length": 64, "processes": 1},
            "training": {"max_steps": 3, "batch_size": 3},
            "output": {"directory": str(tmp_path / output)},
        }
        return Session.begin(config_of(values), tmp_path / "root")

    def told(session: Session) -> str:
        assert session.data is not None
        return str(tiny.tokenizer().decode(session.data.examples[0].tokens))[:11]

    first, stop = begin("out", datetime.date(2024, 7, 26)), StopRequest()
    assert told(first) == "26 Jul 2024"

    def tell(facts: Any) -> None:
        stop.number = 15

    first.train(tell, stop)
    again = begin("out", datetime.date(2024, 7, 27))
    assert told(again) == "26 Jul 2024"
    assert again.data is not None
    assert was_kept(again.data)
    again.train(lambda facts: None, StopRequest())
    other = begin("other", datetime.date(2024, 7, 27))
    assert told(other) == "27 Jul 2024"
    assert other.data is not None
    assert not was_kept(other.data)
