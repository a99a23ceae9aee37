"""Pure planning of the steps that commit a written save, and names of files that are not committed yet.

[Note: One commit] A reader of the hub's layout looks for ``model.safetensors`` first, and for
``model.safetensors.index.json`` next. A save to several files uses file names that no other save has, so that an
older save in the same folder stays intact until the index is replaced (or, if the older one is a single file, until
that file is set aside). A save to one file is written under another name and renamed. So there is exactly one step
that switches from the old save to the new one. A PEFT adapter is saved in the same way under a stem of its own,
``adapter_model``, and always to one file. If its config changes in the same save, the older adapter is set aside
first, because a config with another scaling would change its values. The state of its training may be in a separate
file, which takes effect together with the adapter: see [Note: Named by the adapter] in ``files/peft_adapter.py``.
An older distributed checkpoint of transformers has several files and no index. It is removed right after the
commit; until then a folder with both is an error of readers.

[Note: Rename journals] Some files have fixed names, and no step renames several files at once. They are written
under names unique to the save, and a small file that lists the renames, the journal, commits all of them in one
step. Before the journal exists the older files are valid, and afterwards the new ones are. The next save to the
folder carries out any renames that a killed process left undone. A load changes nothing: it reads each file by the
name that the file has at that time (``saving/rename_journal.py``). Until the renames are done, another program
would see a mix of files of both saves. A single file needs no journal.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwise.files.accelerate_saves import is_accelerate_file
from shardwise.files.checkpoint_index import MODELOPT_CONFIG, OF_RANKS
from shardwise.files.peft_adapter import is_training_file
from shardwise.files.urls import unsafe_name_reason
from shardwise.saving.plan import ADAPTER, MODEL, SINGLE_FILE, SavePlan

OLDER = ".older"
"""Suffix of the names of older weights that are set aside during a commit."""


_PENDING = r"\..+\.[0-9a-f]{8}\.incomplete"
"""Matches temporary names: of files that a save renames, and of new versions of small files."""


# "|" binds weakest: the stem and a suffix, or a temporary name whatever its stem.
_OF_A_SAVE = (
    rf"(-[0-9a-f]{{8}}-\d{{5,}}-of-\d{{5,}}\.safetensors|\.[0-9a-f]{{8}}(\.incomplete|{re.escape(OLDER)}))"
    rf"|{_PENDING}"
)
"""Follows the stem in a pattern for names that only saves give: the stem with a suffix, or a temporary name."""


@dataclass(frozen=True, slots=True)
class FolderState:
    """The content of a folder before a save.

    Attributes:
        files: the names of all files.
        weights: the files with the valid weights.
        listed: the files that the index lists. They are not valid while there is also a single file, but may become
            so. For an adapter, the file with the state of its training.
    """

    files: frozenset[str]
    weights: frozenset[str]
    listed: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Rename:
    """A step that renames a file and replaces any file of that name."""

    file: str
    name: str


@dataclass(frozen=True, slots=True)
class Commit:
    """The steps that commit a save whose files are written and synced.

    Attributes:
        files: the files under their names before the steps, with their sizes in bytes.
        ready: small files that are written and synced before the steps, which rename them.
        steps: the steps in order. Each is durable before the next begins, and the last one commits the save.
        final_files: the files under their names after the commit, with their sizes.
        final_contents: small files and their content after the commit.
        absent_files: names that must not exist after the commit, because such a file would be read instead.
        obsolete: files that are removed after the commit.
        journals: the files in ``final_contents`` that list renames still to do. The next save to the folder carries
            these out.
    """

    files: Mapping[str, int]
    steps: tuple[Rename, ...]
    final_files: Mapping[str, int]
    ready: Mapping[str, bytes] = field(default_factory=dict)
    final_contents: Mapping[str, bytes] = field(default_factory=dict)
    absent_files: frozenset[str] = frozenset()
    obsolete: tuple[str, ...] = ()
    journals: frozenset[str] = frozenset()

    @property
    def aside(self) -> tuple[Rename, ...]:
        """The steps that set older files aside."""
        return tuple(step for step in self.steps if step.name.endswith(OLDER))


def pending_name(name: str, save_id: str) -> str:
    """Return the temporary name of a file until the save with this id renames it."""
    return f".{name}.{save_id}.incomplete"


def is_pending(file: str) -> bool:
    """Check if a file has the temporary name of an uncommitted file."""
    return re.fullmatch(r".+\.[0-9a-f]{8}\.incomplete", file) is not None


def get_folder_state(files: Collection[str], index: bytes | None, single_file: str = SINGLE_FILE) -> FolderState:
    """Return the state of a folder from its file names and its index, ignoring an index that cannot be parsed."""
    listed: set[str] = set()
    if index is not None:
        try:
            values = json.loads(index)["weight_map"].values()
            listed = {name for name in values if isinstance(name, str)} & set(files)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            listed = set()
    # As for a reader, a single file comes before an index. Files of ranks count beside either.
    of_ranks = {name for name in files if single_file == SINGLE_FILE and OF_RANKS.fullmatch(name)}
    weights = of_ranks | ({single_file} & set(files) or listed)
    return FolderState(frozenset(files), frozenset(weights), frozenset(listed))


def plan_commit(plan: SavePlan, folder_state: FolderState, bound: Mapping[str, bytes]) -> Commit:
    """Return the commit of a save in the hub's layout.

    ``bound`` are small files, by name, that change the meaning of the weights (the config of an adapter contains
    its scaling). With them, the older weights are set aside, so that between the first step and the last there are
    no weights rather than wrong ones. An older single file is also set aside if it would be read instead of the new
    index.
    """
    files = {file.name: file.nbytes for file in plan.files}
    final_files = {name: file.nbytes for name, file in zip(plan.names, plan.files, strict=True)}
    # Three cases. One file without a new config: one rename. One file with a new config: older weights aside,
    # config, weights. Several files: the index, then an older single file aside.
    removed = tuple(find_obsolete(plan, folder_state))
    if plan.stem == MODEL and MODELOPT_CONFIG in folder_state.files:
        removed = (*removed, MODELOPT_CONFIG)  # describes the codes of the older weights. Saved ones have none
    aside: list[Rename] = []
    if plan.single_file in folder_state.files and (bound or plan.index is not None):
        aside = [Rename(plan.single_file, f"{plan.stem}.{plan.save_id}{OLDER}")]
    if plan.index is None:
        # Between the first step and the last there are no weights, so that no reader pairs a config with the
        # wrong ones.
        pending = {name: pending_name(name, plan.save_id) for name in bound}
        steps = [*aside, *(Rename(file, name) for name, file in pending.items())]
        steps.append(Rename(plan.files[0].name, plan.single_file))
        ready = {pending[name]: content for name, content in bound.items()}
        absent = frozenset({*files, *ready}) - final_files.keys()
        return Commit(files, tuple(steps), final_files, ready, bound, absent, removed)
    new_index = pending_name(plan.index_file, plan.save_id)
    # An older single file is read instead of the index, so the step that sets it aside commits, and comes last.
    steps = [Rename(new_index, plan.index_file), *aside]
    return Commit(
        files,
        tuple(steps),
        final_files,
        ready={new_index: plan.index},
        final_contents={plan.index_file: plan.index},
        absent_files=frozenset({plan.single_file, new_index}),
        obsolete=removed,
    )


def find_obsolete(plan: SavePlan, folder_state: FolderState) -> list[str]:
    """Return the files to remove after the commit: those of the older save, and of uncommitted saves."""
    new = {*plan.names, plan.single_file if plan.index is None else plan.index_file}
    # Weights that are valid now, and everything that only a save names. Files of other names are never removed.
    old = {name for name in folder_state.weights if name.endswith(".safetensors")}
    old |= {name for name in folder_state.files if re.fullmatch(f"{plan.stem}{_OF_A_SAVE}", name)}
    old |= {plan.index_file} & folder_state.files
    if plan.stem == ADAPTER:
        old |= {name for name in folder_state.files if is_training_file(name)}
    return sorted(old - new)


_JOURNAL = re.compile(r"\.shardwise\.([0-9a-f]{8})\.renames\.json")


_FRESH = re.compile(r"\.(.+)\.([0-9a-f]{8})\.new")


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """The files that a save has written and synced into a folder, collected on rank 0.

    Attributes:
        named: sizes in bytes, by final name, of files that have a temporary name until they are renamed.
        beside: sizes of files that keep the names under which they were written.
    """

    named: Mapping[str, int] = field(default_factory=dict)
    beside: Mapping[str, int] = field(default_factory=dict)

    def with_more(self, other: WrittenFiles) -> WrittenFiles:
        """Return the union of both."""
        return WrittenFiles({**self.named, **other.named}, {**self.beside, **other.beside})


@dataclass(frozen=True, slots=True)
class Renames:
    """The renames and deletions that remain after a save is committed.

    Names may contain a folder.
    """

    save_id: str
    names: tuple[str, ...]
    older: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        """The name of the journal."""
        return f".shardwise.{self.save_id}.renames.json"

    def to_bytes(self) -> bytes:
        content = {"token": self.save_id, "names": list(self.names), "older": list(self.older)}
        return json.dumps(content).encode()

    @classmethod
    def from_bytes(cls, file: str, content: bytes) -> Renames | None:
        """Parse a journal with this file name, or return None if it is malformed or contains unsafe names."""
        try:
            fields: Any = json.loads(content)
            save_id, names, older = fields["token"], fields["names"], fields["older"]
            match = _JOURNAL.fullmatch(file)
            if match is None or save_id != match[1] or not isinstance(names, list) or not isinstance(older, list):
                return None
            # A journal is untrusted. New names must stay inside of the folder. Only names that accelerate gives
            # are removed.
            if all(map(_is_safe, names)) and all(map(is_accelerate_file, older)):
                return cls(save_id, tuple(names), tuple(older))
        except (ValueError, KeyError, TypeError, RecursionError):
            pass
        return None

    def commit(self, written: WrittenFiles) -> Commit:
        """Return the commit of files that have been written."""
        # Names on disk before the commit, which the sizes are checked for.
        files = {
            **{temporary_name(name, self.save_id): nbytes for name, nbytes in written.named.items()},
            **written.beside,
        }
        if len(self.names) == 1:
            # No journal: the rename of the only file is the commit.
            [name] = self.names
            return Commit(
                files,
                steps=(Rename(temporary_name(name, self.save_id), name),),
                final_files={**written.named, **written.beside},
                absent_files=frozenset({temporary_name(name, self.save_id)}),
                obsolete=self.older,
            )
        ready = pending_name(self.file, self.save_id)
        return Commit(
            files,
            steps=(Rename(ready, self.file),),
            final_files={},  # a later save may have taken these names by then
            ready={ready: self.to_bytes()},
            final_contents={self.file: self.to_bytes()},
            journals=frozenset({self.file}),
            absent_files=frozenset({ready}),
        )


def temporary_name(name: str, save_id: str) -> str:
    """Return the temporary name of a file until its rename, distinct from names that saves delete as leftovers."""
    folder, slash, file = name.rpartition("/")
    return f"{folder}{slash}.{file}.{save_id}.new"


def parse_temporary_name(file: str) -> str | None:
    """Return the id of the save that created this temporary name, or None for other names."""
    match = _FRESH.fullmatch(file.rpartition("/")[2])
    return match[2] if match else None


def find_journals(files: Collection[str]) -> list[str]:
    """Return the files that are rename journals."""
    return sorted(file for file in files if _JOURNAL.fullmatch(file))


_LONGEST_NAME, _LONGEST_PATH = 255, 4096


def _is_safe(name: object) -> bool:
    """Check if a file below a folder may have this name, and its temporary name too."""
    if not isinstance(name, str) or len(name) > _LONGEST_PATH or unsafe_name_reason(name) is not None:
        return False
    return all(len(os.fsencode(item)) <= _LONGEST_NAME for item in temporary_name(name, "0" * 8).split("/"))
