"""What names a checkpoint without a scheme, as values: a path, or a repository and which state of it.

A *repository* is downloaded into a cache by whoever answers :class:`Repositories`; the Hugging Face hub is one
(:mod:`shardwise.storage.hub`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias

from shardwise.errors import StorageError
from shardwise.storage.names import shown, why_unsafe
from shardwise.storage.urls import is_url, without_secrets


@dataclass(frozen=True)
class HubOptions:
    """Which state of a hub repository, kept where, fetched how.

    ``revision`` is a branch, tag or commit; ``cache_dir`` replaces the cache of huggingface_hub; ``token`` is
    a token, True for the stored one, False for none, None for the stored one if there is one. ``variant`` is that
    in the names of the weights, as "fp16" in ``model.fp16.safetensors``. ``subfolder`` and ``variant`` apply to
    local folders, too.
    """

    revision: str | None = None
    cache_dir: str | None = None
    token: str | bool | None = field(default=None, repr=False)
    local_files_only: bool = False
    subfolder: str = ""
    variant: str | None = None


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model: its weights (safetensors, else torch's), and the small files.

    Attributes:
        code: also the Python files, for a user who wants them run.
        extra: further files of weights, where they are there.
    """

    code: bool = False
    extra: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter of PEFT's: its tensors and its config."""


WantedFiles: TypeAlias = ModelFiles | AdapterFiles


class Repositories(Protocol):
    """Whoever has repositories. Every method raises :class:`StorageError` for one that is not to be had."""

    def commit_of(self, repo_id: str, options: HubOptions, *, kind: str = "model") -> str:
        """The commit that the revision names: as the network says, and where that is down, the cache."""
        ...

    def resolve(
        self,
        name_or_path: str | os.PathLike[str],
        options: HubOptions = ...,
        *,
        download: bool = True,
        wanted: WantedFiles = ...,
    ) -> Path:
        """The local folder with what is wanted, downloaded first where it is not there yet; a path is its own."""
        ...

    def place_of_cache(self, options: HubOptions) -> Path:
        """The folder of the cache: ranks of one machine that share it download once."""
        ...

    def note_commit(self, repo_id: str, options: HubOptions, commit: str) -> None:
        """Leave in the cache what a revision named, for whoever is offline later."""
        ...


def is_local(name_or_path: str | os.PathLike[str]) -> bool:
    """Whether this is a path, existing or not, rather than a URL or the name of a repository.

    Strings that exist as a path, that look like one ("./x", "/x", "~/x", "a/b/c"), and all path objects are.
    """
    if not isinstance(name_or_path, str):
        return True
    if is_url(name_or_path):
        return False
    looks_like_path = name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1
    return looks_like_path or "\\" in name_or_path or os.path.exists(name_or_path)


def local_place(name_or_path: str | os.PathLike[str], options: HubOptions) -> Path | None:
    """The folder (or file) of this machine that is named; None for the name of a repository.

    Raises:
        StorageError: for a URL, a path that is not there, and a subfolder that leads elsewhere.
    """
    if is_url(name_or_path):
        raise StorageError(
            f"{shown(without_secrets(os.fspath(name_or_path)))}: a folder on this machine, or a repository that "
            "is downloaded to one, is wanted here, and a URL is neither; download it, and pass its folder"
        )
    fault = why_unsafe(options.subfolder) if options.subfolder else None
    if fault is not None:
        raise StorageError(
            f"{shown(os.fspath(name_or_path))}: subfolder {options.subfolder!r} is refused, {fault}; "
            "name it relative to the checkpoint's folder, as in 'a/b'"
        )
    return _local(Path(name_or_path).expanduser(), options) if is_local(name_or_path) else None


def _local(path: Path, options: HubOptions) -> Path:
    subfolder = options.subfolder
    place = path / subfolder
    for name, value in (("subfolder", subfolder), ("variant", options.variant)):
        if value and path.is_file():
            raise StorageError(f"{path}: is a file, so {name}={value!r} has no place; leave it out")
    if not place.exists():
        raise StorageError(
            f"{place}: no such directory; check the path "
            "(for a repository of the Hugging Face hub, write 'organisation/name')"
        )
    return place
