"""Files that take the place of others together: by the one rename, or by a list of renames.

[Note: A list of renames] Some files have given names, and no step renames several. They are written under names of
the save's own, and what makes all of them count in one step is a small file that lists the renames. Before it is
there the older files count, from then on the new ones: whoever saves or loads there next carries out what a kill
has left of the list. Another program would see some files of either save until then. A single file needs no list.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwise.formats.accelerate_names import is_of_accelerate
from shardwise.planning.saves.commit import Commit, Publish, Rename, on_its_way
from shardwise.storage.names import why_unsafe

_LIST = re.compile(r"\.shardwise\.([0-9a-f]{8})\.renames\.json")
_FRESH = re.compile(r"\.(.+)\.([0-9a-f]{8})\.new")


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """What a save has written and synced into a folder, as the first rank knows it.

    Attributes:
        named: files that are to have these names, with their sizes; until then they are called as :func:`fresh`
            says.
        beside: files that have their names already, which nothing that counts tells of yet.
    """

    named: Mapping[str, int] = field(default_factory=dict)
    beside: Mapping[str, int] = field(default_factory=dict)

    def with_more(self, other: WrittenFiles) -> WrittenFiles:
        """Both together."""
        return WrittenFiles({**self.named, **other.named}, {**self.beside, **other.beside})


@dataclass(frozen=True, slots=True)
class Renames:
    """What is left to do once a save counts: files get these names, and older ones go.

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
    def from_bytes(cls, content: bytes) -> Renames | None:
        """What a list says; None where it makes no sense, or would lead to what is no file of such saves."""
        try:
            found: Any = json.loads(content)
            token, names, older = found["token"], found["names"], found["older"]
            if (
                not re.fullmatch(r"[0-9a-f]{8}", token)
                or not isinstance(names, list)
                or not isinstance(older, list)
            ):
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
    """What a file is called until it is renamed: no name of what any save takes for left behind by itself."""
    folder, slash, file = name.rpartition("/")
    return f"{folder}{slash}.{file}.{token}.new"


def token_of_fresh(file: str) -> str | None:
    """The save that has given a file such a name; None for others."""
    found = _FRESH.fullmatch(file.rpartition("/")[2])
    return found[2] if found else None


def lists_among(files: Collection[str]) -> list[str]:
    """Those that are lists of renames."""
    return sorted(file for file in files if _LIST.fullmatch(file))


def _is_safe(name: object) -> bool:
    return isinstance(name, str) and why_unsafe(name) is None
