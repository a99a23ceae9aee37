"""Folders of checkpoints: STATE/<user>/<model>/<kind>/<name>, with a file of metadata beside each folder.

All parts are percent-encoded, so no name leaves its folder. The file of metadata is written after the folder is
committed: a checkpoint without one has not been acknowledged.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote

from shardwise.core.errors import ConfigError
from shardwise.core.formatting import folder_name
from shardwise.files.local_writer import LocalWriter

KINDS: Final = {"weights": "training", "sampler_weights": "sampler"}
"""Kinds of checkpoints in paths, and what the protocol calls them in lists."""

_SCHEME: Final = "tinker://"

_METADATA: Final = "%meta.json"
"""Ends the name of a file of metadata. No encoded name ends with it, since "%me" encodes nothing."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint, and what is known of it. Another save under its name has another ``save_id``."""

    model: str
    kind: str
    name: str
    time_s: float = 0.0
    expires_s: float | None = None
    rank: int = 0
    parts: list[str] = field(default_factory=list)
    user_metadata: Mapping[str, str] | None = None
    save_id: str = ""

    @property
    def path(self) -> str:
        return f"{_SCHEME}{self.model}/{self.kind}/{quote(self.name, safe='')}"


def parse_path(path: str) -> Checkpoint:
    """Return the checkpoint that a path of the protocol names. Raise ConfigError if it names none.

    Its name is percent-encoded: pass no path that HTTP has decoded.
    """
    model, kind, name = (*path.removeprefix(_SCHEME).split("/"), "", "", "")[:3]
    is_whole = path.startswith(_SCHEME) and path.count("/") == 4 and bool(model and name)
    if not is_whole or kind not in KINDS or not path.isascii():  # names are percent-encoded
        raise ConfigError(f"path {path!r}: is not tinker://MODEL/{'|'.join(KINDS)}/NAME")
    return Checkpoint(model, kind, unquote(name))


class CheckpointStore:
    """The checkpoints of all users in a folder. Calls raise OSError if the folder cannot be read or written."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()  # vLLM, which loads from it, has another working directory
        checkpoints = {str(file): _read(file) for file in self._root.glob(f"*/*/*/*{_METADATA}")}
        self._expires_s = {file: each.expires_s for file, each in checkpoints.items() if each and each.expires_s}
        """By file of metadata, when the time of its checkpoint is over. Of those that have one."""

    def folder(self, user: str, checkpoint: Checkpoint) -> Path:
        """Return the folder of a checkpoint, which need not exist.

        Raises:
            ConfigError: the name is empty, too long, or has control characters.
        """
        name = checkpoint.name
        if not 1 <= len(name) <= 128 or not name.isprintable():
            raise ConfigError(f"path {name!r}: is not a name of 1 to 128 printable characters")
        return self._root / folder_name(user) / folder_name(checkpoint.model) / checkpoint.kind / folder_name(name)

    def record(self, folder: str, checkpoint: Checkpoint) -> None:
        """Acknowledge a checkpoint whose folder has been committed. Durable when it returns.

        Raises:
            StorageError: it cannot be written.
        """
        file = _metadata_file(Path(folder))
        content = json.dumps(asdict(replace(checkpoint, time_s=time.time())))
        LocalWriter(file.parent).replace(file.name, content.encode())
        self._expires_s.pop(str(file), None)
        if checkpoint.expires_s is not None:
            self._expires_s[str(file)] = checkpoint.expires_s

    def find(self, user: str, path: str) -> Checkpoint | None:
        """Return a user's checkpoint, or None. Raise ConfigError if the path is invalid."""
        return _read(_metadata_file(self.folder(user, parse_path(path))))

    def is_of_other(self, user: str, path: str) -> bool:
        """Return whether another user has this checkpoint."""
        others = (each.name for each in self._root.iterdir() if each.is_dir() and each.name != folder_name(user))
        checkpoint = parse_path(path)
        return any(_read(_metadata_file(self.folder(unquote(other), checkpoint))) for other in others)

    def list(self, user: str, model: str | None = None) -> Iterator[Checkpoint]:
        """Yield a user's checkpoints, of one model or of all."""
        pattern = f"{'*' if model is None else folder_name(model)}/*/*{_METADATA}"
        for file in sorted((self._root / folder_name(user)).glob(pattern)):
            if (checkpoint := _read(file)) is not None:
                yield checkpoint

    def delete(self, user: str, checkpoint: Checkpoint) -> None:
        """Delete a checkpoint."""
        _delete(_metadata_file(self.folder(user, checkpoint)))

    def delete_expired(self) -> None:
        """Delete all checkpoints whose time is over. Reads none, as there may be very many."""
        for file in [file for file, expires_s in self._expires_s.items() if expires_s < time.time()]:
            _delete(Path(file))
            del self._expires_s[file]


def _metadata_file(folder: Path) -> Path:
    return folder.with_name(folder.name + _METADATA)


def _delete(file: Path) -> None:
    """Delete the checkpoint of a file of metadata: first this, so that a kill leaves none that is damaged."""
    file.unlink(missing_ok=True)
    shutil.rmtree(file.with_name(file.name.removesuffix(_METADATA)), ignore_errors=True)


def _read(file: Path) -> Checkpoint | None:
    """Return the checkpoint of a file of metadata. None if there is none, or it is damaged."""
    try:
        values: Any = json.loads(file.read_text())
        return Checkpoint(**values)
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):
        return None


def require_saved(folder: str) -> Checkpoint:
    """Return the checkpoint in a folder. Raise ConfigError if it is gone."""
    checkpoint = _read(_metadata_file(Path(folder)))
    if checkpoint is None:
        raise ConfigError("the checkpoint: was deleted, or its time is over. Save it again")
    return checkpoint


def require_saved_by(save_id: str, folder: str) -> Checkpoint:
    """Return the checkpoint in a folder. Raise ConfigError if it is gone, or of another save."""
    checkpoint = require_saved(folder)
    if checkpoint.save_id != save_id:
        raise ConfigError(
            f"checkpoint {checkpoint.name!r}: was saved again since this sampling client was opened. Open a new "
            "sampling client, or save under other names"
        )
    return checkpoint


def describe_fault(error: OSError) -> str:
    """Return a message for clients: without the path, which is none of theirs."""
    return f"the folder of checkpoints: cannot be read or written, {error.strerror}. Try again"
