"""A save committed by a rename journal: after a crash at any moment, all files are of one save."""

import json
from pathlib import Path

import pytest
from tests.support.files import contents
from tests.support.meanwhile import meanwhile, unmark

from shardwise.core.errors import FormatError, StorageError
from shardwise.files.local_writer import LocalWriter, open_writer
from shardwise.ranks.world import World
from shardwise.saving import commit, rename_journal
from shardwise.saving.commit import make_file
from shardwise.saving.commit_plan import Renames, WrittenFiles, temporary_name
from shardwise.saving.locked_folder import LockedFolder
from shardwise.saving.rename_journal import link_as_renamed

NAMES = ("scheduler.bin", "optimizer.bin", "pytorch_model_fsdp_0/.metadata", "unet/weights.bin")


def save(seed: int, root: Path, older: tuple[str, ...] = ()) -> None:
    """Files of one content, under several names."""
    content = str(seed).encode()
    with rename_journal.lock_and_clean_up(World(0, 1), root, ["unet"]) as saving:
        with LocalWriter(root, folders=()) as writer:
            for name in NAMES:
                make_file(writer, temporary_name(name, saving.save_id), content)
            writer.sync_names()
        commit.commit_written(saving.locked, WrittenFiles(dict.fromkeys(NAMES, len(content))), older)


def seen(root: Path) -> int | None:
    """Whose all files are; reading changes nothing."""
    before = contents(root)
    with link_as_renamed(root) as place:
        found = {(place / name).read_text() if (place / name).is_file() else "" for name in NAMES}
    assert contents(root) == before
    (one,) = found
    return int(one) if one else None


def listed(root: Path) -> list[str]:
    return [path.name for path in root.iterdir() if path.name.endswith(".renames.json")]


@pytest.mark.parametrize("done", ["nothing", "some", "all"])
def test_files_count_though_another_has_carried_out_their_renames_and_died(tmp_path, done):
    """Whoever is told of a failure looks for the older files, and would find these."""
    save(1, tmp_path)
    taken: list[LockedFolder] = []

    def other() -> None:
        unmark(tmp_path)
        writer = open_writer(tmp_path)
        taken.append(LockedFolder(writer, "0123abcd"))
        (file,) = listed(tmp_path)
        if done == "all":
            rename_journal.finish_renames(str(tmp_path), file, taken[0])
        elif done == "some":
            (one,) = [name for name in writer.list() if name.startswith(".scheduler.bin.")]
            writer.rename(one, "scheduler.bin")

    with meanwhile(lambda name, *_: name == "rename" and listed(tmp_path), other):
        save(2, tmp_path)
    taken[0].release()
    unmark(tmp_path)
    assert seen(tmp_path) == 2


def test_one_that_lost_its_mark_before_the_list_counts_is_reported(tmp_path):
    save(1, tmp_path)

    def other() -> None:
        unmark(tmp_path)
        save(3, tmp_path)

    with meanwhile(lambda name, *_: name == "rename" and not listed(tmp_path), other), pytest.raises(StorageError):
        save(2, tmp_path)
    assert seen(tmp_path) == 3
    assert {*contents(tmp_path)} == {*NAMES}


def test_one_that_lost_its_mark_behind_the_list_leaves_the_other_s_files(tmp_path):
    """It is held before its first rename; the other one carries its journal out, and then saves and counts."""
    save(1, tmp_path)
    (tmp_path / "random_states_7.pkl").write_text("of more ranks")

    def other() -> None:
        unmark(tmp_path)
        save(3, tmp_path)
        (tmp_path / "random_states_7.pkl").write_text("of more ranks once more")

    with meanwhile(lambda name, *_: name == "rename" and listed(tmp_path), other):
        save(2, tmp_path, ("random_states_7.pkl",))
    assert seen(tmp_path) == 3
    assert {*contents(tmp_path)} == {*NAMES, "random_states_7.pkl"}


STRANGE = [
    "",
    "{",
    {"names": ["../x"]},
    {"token": 1},
    {"older": ["../x"]},
    {"older": ["notes.txt"]},
    {"older": ["unet/weights.bin"]},
    {"names": [1]},
    {"names": [["scheduler.bin"]]},
    {"names": ["/etc/passwd"]},
    {"names": ["\ud800"]},
    {"names": ["a" * 250]},
    {"names": ["a/" * 4000 + "b"]},
    {"token": "89abcdef"},
    {"token": 1234567},
    {"more": "x" * (1 << 24)},
    "[" * 100_000,
]


@pytest.mark.parametrize("content", STRANGE)
def test_an_invalid_rename_list_is_refused(tmp_path, content):
    """It names no file to be removed but those that accelerate gives their names."""
    save(1, tmp_path)
    good = {"token": "0123abcd", "names": ["scheduler.bin"], "older": []}
    file = Renames("0123abcd", ()).file
    assert Renames.from_bytes(file, json.dumps(good).encode()) == Renames("0123abcd", ("scheduler.bin",))
    text = content if isinstance(content, str) else json.dumps(good | content)
    (tmp_path / file).write_text(text)
    before = contents(tmp_path)
    for act in (lambda: seen(tmp_path), lambda: save(2, tmp_path)):
        with pytest.raises(FormatError, match="is not a rename journal"):
            act()
        assert contents(tmp_path) == before
