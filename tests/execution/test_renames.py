"""A save committed by a list of renames: after a crash at any moment, all files are of one save."""

import json
from pathlib import Path

import pytest
from tests.interchange.test_commit import contents

from shardwise.errors import FormatError
from shardwise.execution import committing, rename_journal
from shardwise.execution.committing import make_file
from shardwise.execution.locked_folder import locked_by_first_rank
from shardwise.execution.rename_journal import as_renamed
from shardwise.execution.world import World
from shardwise.planning.commit_plan import Renames, WrittenFiles, fresh
from shardwise.storage.folders import FoldersWriter

NAMES = ("scheduler.bin", "optimizer.bin", "pytorch_model_fsdp_0/.metadata", "unet/weights.bin")


def save(seed: int, root: Path, older: tuple[str, ...] = ()) -> None:
    """Files of one content, under several names."""
    content = str(seed).encode()
    with locked_by_first_rank(
        World(0, 1), root, rename_journal.tidy, lambda marked: rename_journal.undo(marked, ["unet"])
    ) as saving:
        with FoldersWriter(root) as writer:
            for name in NAMES:
                make_file(writer, fresh(name, saving.save_id), content)
            writer.sync_names()
        committing.commit_written(saving.locked, WrittenFiles(dict.fromkeys(NAMES, len(content))), older)


def seen(root: Path) -> int | None:
    """Whose all files are; reading changes nothing."""
    before = contents(root)
    with as_renamed(root) as place:
        found = {(place / name).read_text() if (place / name).is_file() else "" for name in NAMES}
    assert contents(root) == before
    (one,) = found
    return int(one) if one else None


def listed(root: Path) -> list[str]:
    return [path.name for path in root.iterdir() if path.name.endswith(".renames.json")]


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
def test_a_list_that_makes_no_sense_is_refused(tmp_path, content):
    """It names no file to be removed but those that accelerate gives their names."""
    save(1, tmp_path)
    good = {"token": "0123abcd", "names": ["scheduler.bin"], "older": []}
    file = Renames("0123abcd", ()).file
    assert Renames.from_bytes(file, json.dumps(good).encode()) == Renames("0123abcd", ("scheduler.bin",))
    text = content if isinstance(content, str) else json.dumps(good | content)
    (tmp_path / file).write_text(text)
    before = contents(tmp_path)
    for act in (lambda: seen(tmp_path), lambda: save(2, tmp_path)):
        with pytest.raises(FormatError, match="is not a list of renames"):
            act()
        assert contents(tmp_path) == before
