"""Plans the steps after which a written save counts, and names the files that are on their way. Pure.

[Note: One commit] A reader of the hub's layout looks for ``model.safetensors`` first, and for
``model.safetensors.index.json`` next. A save to several files gives them names that no other save has, so that an
older save in the same folder stays whole until the index is replaced (or, where the older one is a single file,
until that file is set aside). A save to one file is written under another name and renamed. So at every moment
there is one step after which the new save counts, and before which the old one does. A PEFT adapter is saved in the
same way under a stem of its own, ``adapter_model``, and always to one file. If its config changes with it, the
older file is set aside first, because a config of another scaling would change its meaning. Its training state may
be in a file next to it, which is committed with the adapter. See [Note: Named by the adapter].

[Note: A list of renames] Some files have given names, and no step renames several. They are written under temporary
names of this save. A small file that lists the renames commits all of them in one step. Before it exists the older
files are valid, afterwards the new ones. The next save there finishes the renames of a killed one. A load changes
nothing, and reads each file under its current name (``execution/rename_journal.py``). Another program would see
some files of either save until then. A single file needs no list.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

from shardwise.formats.accelerate_saves import is_of_accelerate
from shardwise.formats.peft_adapter import is_training_file
from shardwise.planning.save_plan import ADAPTER, SINGLE_FILE, SavePlan
from shardwise.storage.names import why_unsafe

OLDER = ".older"
"""Ends the name of older weights that were set aside for the moment of a commit."""


_ON_ITS_WAY = r"\..+\.[0-9a-f]{8}\.incomplete"
"""What has a name only to lose it: what a save renames, and what replaces a small file."""


_OF_A_SAVE = (
    rf"(-[0-9a-f]{{8}}-\d{{5,}}-of-\d{{5,}}\.safetensors|\.[0-9a-f]{{8}}(\.incomplete|{re.escape(OLDER)}))"
    rf"|{_ON_ITS_WAY}"
)
"""What follows the stem in names that only saves give."""


@dataclass(frozen=True, slots=True)
class FolderState:
    """Content of a folder before a save.

    Attributes:
        files: all of them.
        weights: those that make up the weights that count.
        named: those that the index names. Next to a single file they are not valid, but may be about to be
            committed. Of an adapter, the file with its training.
    """

    files: frozenset[str]
    weights: frozenset[str]
    named: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Rename:
    """Give a file another name, in place of whatever had it."""

    file: str
    name: str


@dataclass(frozen=True, slots=True)
class Publish:
    """Give a small file another name, on any storage."""

    file: str
    name: str


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove a file, for good."""

    file: str


CommitStep: TypeAlias = Rename | Publish | Remove


NOTHING_BOUND: Mapping[str, bytes] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Commit:
    """Commit of a save that is written and synced: the checks and changes to carry out, in order.

    Attributes:
        files: as they are called before the steps, with their sizes in bytes.
        ready: small files that are written and synced before the steps, which publish them.
        steps: in their order, each durable before the next. After the last, and not before, the save counts.
        then: the files as they are called when it counts, with their sizes.
        says: small files with their content.
        without: names that are not there then: whoever had them would count in its place.
        obsolete: files to remove after the commit.
        carried_out: those of ``says`` that are journals, which the next save in the folder finishes.
    """

    files: Mapping[str, int]
    steps: tuple[CommitStep, ...]
    then: Mapping[str, int]
    ready: Mapping[str, bytes] = field(default_factory=dict)
    says: Mapping[str, bytes] = field(default_factory=dict)
    without: frozenset[str] = frozenset()
    obsolete: tuple[str, ...] = ()
    carried_out: frozenset[str] = frozenset()

    @property
    def aside(self) -> tuple[Rename, ...]:
        """The steps that set something older aside."""
        return tuple(step for step in self.steps if isinstance(step, Rename) and step.name.endswith(OLDER))


def on_its_way(name: str, token: str) -> str:
    """Return the temporary name of a file until its save renames it."""
    return f".{name}.{token}.incomplete"


def is_on_its_way(file: str) -> bool:
    """Return whether a file has a name that it gets only to lose it."""
    return re.fullmatch(r".+\.[0-9a-f]{8}\.incomplete", file) is not None


def look_at_folder(files: Collection[str], index: bytes | None, single_file: str = SINGLE_FILE) -> FolderState:
    """Return the state of a folder from its file names and its index file. An invalid index names nothing."""
    named: set[str] = set()
    if index is not None:
        try:
            values = json.loads(index)["weight_map"].values()
            named = {name for name in values if isinstance(name, str)} & set(files)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            named = set()
    weights = {single_file} & set(files) or named
    return FolderState(frozenset(files), frozenset(weights), frozenset(named))


def commit_of(
    plan: SavePlan, standing: FolderState, *, can_rename: bool, bound: Mapping[str, bytes] = NOTHING_BOUND
) -> Commit:
    """The commit of a save in the hub's layout.

    ``bound`` are small files, by name, that would change the meaning of the older weights (an adapter's config has
    its scaling). Then there are no weights, rather than wrong ones, between the first step and the last: the older
    ones are set aside. So is a single file that would count in place of an index.
    """
    files = {file.name: file.nbytes for file in plan.files}
    then = {name: file.nbytes for name, file in zip(plan.names, plan.files, strict=True)}
    removed = tuple(obsolete(plan, standing))
    aside: list[CommitStep] = []
    if plan.single_file in standing.files and can_rename and (bound or plan.index is not None):
        aside = [Rename(plan.single_file, set_aside(plan))]
    if plan.index is None:
        published = {name: on_its_way(name, plan.token) for name in bound}
        steps = [*aside, *(Publish(file, name) for name, file in published.items())]
        steps.append(Rename(plan.files[0].name, plan.single_file))
        made = {published[name]: content for name, content in bound.items()}
        return Commit(files, tuple(steps), then, made, bound, frozenset({*files, *made}) - then.keys(), removed)
    says, without = {plan.index_file: plan.index}, frozenset({plan.single_file})
    ready = on_its_way(plan.index_file, plan.token)
    if plan.single_file in standing.files and not can_rename:
        aside = [Remove(plan.single_file)]
    into_place = (Publish(ready, plan.index_file), *aside)
    return Commit(files, into_place, then, {ready: plan.index}, says, without | {ready}, removed)


def set_aside(plan: SavePlan) -> str:
    """Return the name of older weights during the commit of a save that would otherwise be confused with them."""
    return f"{plan.stem}.{plan.token}{OLDER}"


def obsolete(plan: SavePlan, standing: FolderState) -> list[str]:
    """Files to remove once the new save counts: those of the older one, and of saves that were never committed."""
    new = {*plan.names, plan.single_file if plan.index is None else plan.index_file}
    old = {name for name in standing.weights if name.endswith(".safetensors")}
    old |= {name for name in standing.files if re.fullmatch(f"{plan.stem}{_OF_A_SAVE}", name)}
    old |= {plan.index_file} & standing.files
    if plan.stem == ADAPTER:
        old |= {name for name in standing.files if is_training_file(name)}
    return sorted(old - new)


_LIST = re.compile(r"\.shardwise\.([0-9a-f]{8})\.renames\.json")


_FRESH = re.compile(r"\.(.+)\.([0-9a-f]{8})\.new")


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """Files that a save has written and synced into a folder, as known to the first rank.

    Attributes:
        named: final names of files with their sizes. Until then they are called as :func:`fresh` returns.
        beside: files with their final names, which no valid file refers to yet.
    """

    named: Mapping[str, int] = field(default_factory=dict)
    beside: Mapping[str, int] = field(default_factory=dict)

    def with_more(self, other: WrittenFiles) -> WrittenFiles:
        """Both together."""
        return WrittenFiles({**self.named, **other.named}, {**self.beside, **other.beside})


@dataclass(frozen=True, slots=True)
class Renames:
    """Rename journal of a committed save: files to rename, and older files to remove.

    Names may have a folder in front.
    """

    token: str
    names: tuple[str, ...]
    older: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        """The name of the list."""
        return f".shardwise.{self.token}.renames.json"

    def to_bytes(self) -> bytes:
        content = {"token": self.token, "names": list(self.names), "older": list(self.older)}
        return json.dumps(content).encode()

    @classmethod
    def from_bytes(cls, file: str, content: bytes) -> Renames | None:
        """Parse a rename journal. Return None if it is invalid or leads out of the folder."""
        try:
            found: Any = json.loads(content)
            token, names, older = found["token"], found["names"], found["older"]
            named = _LIST.fullmatch(file)
            if named is None or token != named[1] or not isinstance(names, list) or not isinstance(older, list):
                return None
            if all(map(_is_safe, names)) and all(map(is_of_accelerate, older)):
                return cls(token, tuple(names), tuple(older))
        except (ValueError, KeyError, TypeError, RecursionError):
            pass
        return None

    def commit(self, written: WrittenFiles) -> Commit:
        """The commit of files that have been written."""
        files = {**{fresh(name, self.token): nbytes for name, nbytes in written.named.items()}, **written.beside}
        if len(self.names) == 1:
            [name] = self.names
            return Commit(
                files,
                steps=(Rename(fresh(name, self.token), name),),
                then={**written.named, **written.beside},
                without=frozenset({fresh(name, self.token)}),
                obsolete=self.older,
            )
        ready = on_its_way(self.file, self.token)
        return Commit(
            files,
            steps=(Publish(ready, self.file),),
            then={},  # not these, of which whoever has the folder by then may have given some their names
            ready={ready: self.to_bytes()},
            says={self.file: self.to_bytes()},
            carried_out=frozenset({self.file}),
            without=frozenset({ready}),
        )


def fresh(name: str, token: str) -> str:
    """Return the temporary name of a file. It never matches the names that saves treat as leftovers."""
    folder, slash, file = name.rpartition("/")
    return f"{folder}{slash}.{file}.{token}.new"


def token_of_fresh(file: str) -> str | None:
    """Return the id of the save that has given a file such a name, or None."""
    found = _FRESH.fullmatch(file.rpartition("/")[2])
    return found[2] if found else None


def lists_among(files: Collection[str]) -> list[str]:
    """Return the rename journals among the files."""
    return sorted(file for file in files if _LIST.fullmatch(file))


_LONGEST_NAME, _LONGEST_PATH = 255, 4096


def _is_safe(name: object) -> bool:
    """Return whether a file below a folder, and while it waits for its name, may be called this."""
    if not isinstance(name, str) or len(name) > _LONGEST_PATH or why_unsafe(name) is not None:
        return False
    return all(len(os.fsencode(part)) <= _LONGEST_NAME for part in fresh(name, "0" * 8).split("/"))
