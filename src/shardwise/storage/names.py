"""Names: which files a storage takes, which URLs and repositories name a checkpoint, and what of them may be shown.

A *repository* is downloaded into a cache by whoever answers :class:`Repositories`; the Hugging Face hub is one
(:mod:`shardwise.storage.hub`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias
from urllib.parse import unquote, urlsplit

from shardwise.errors import StorageError

_DRIVE = re.compile(r"[A-Za-z]:")
_SHOWN_CHARACTERS = 200


def why_unsafe(name: str) -> str | None:
    """Why ``name`` could leave the storage's root, or cannot be a file name; None when it is fine.

    Names come out of files that anyone may have written (``weight_map`` of an index), so the rule is the same
    on every system: relative, "/"-separated, no way up, no backslash, no drive letter.
    """
    if not name:
        return "it is empty"
    if name.startswith("/"):
        return "it is absolute"
    if "\\" in name:
        return "it contains a backslash"
    if _DRIVE.match(name):
        return "it starts with a drive letter"
    if "\0" in name:
        return "it contains a NUL character"
    parts = name.split("/")
    if ".." in parts:
        return "it climbs out of its folder with '..'"
    if "" in parts or "." in parts:
        return "it has an empty or '.' component"
    return None


def why_not_plain(name: str) -> str | None:
    """Why ``name`` is not that of a file directly in the storage's root; None when it is."""
    return why_unsafe(name) or ("it has a folder in it" if "/" in name else None)


def shown(name: str) -> str:
    """``name`` as it may stand in a message: escaped where not printable, cut where very long."""
    text = name if name and name.isprintable() else ascii(name)
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    return f"{text[:_SHOWN_CHARACTERS]}... ({len(text)} characters)"


_SCHEME = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.\-]*)://")
_CHECKPOINT_FILES = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".pt",
    ".pth",
    "/.metadata",
)
_IN_TEXT = re.compile(
    r"(?P<start>[A-Za-z][A-Za-z0-9+.\-]*://)(?P<user>[^\s/?#'\"@]*@)?(?P<path>[^\s?#'\"<>]*)[^\s'\"<>)]*"
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=\-]+")
_SECRET_OPTION = re.compile(r"(?i)token|secret|key|password|credential|authorization|cookie|sas|headers")
_SHORTEST_SECRET = 4


def is_url(name_or_path: object) -> bool:
    """Whether this is a URL ("s3://bucket/folder") rather than a path or the name of a repository."""
    return isinstance(name_or_path, str) and _SCHEME.match(name_or_path) is not None


def scheme_of(url: str) -> str:
    """The URL's scheme, in small letters.

    Raises:
        StorageError: for what is no URL.
    """
    match = _SCHEME.match(url)
    if match is None:
        raise StorageError(f"{shown(url)}: not a URL; write it with its scheme, as in s3://bucket/folder")
    return match["scheme"].lower()


def split_file(url: str) -> tuple[str, str | None]:
    """The folder's URL, and the name of the file of tensors, or of their index, if the URL ends in one.

    A query belongs to the folder: it is sent with every file.
    """
    before, mark, query = url.partition("?")
    folder, _, name = before.rpartition("/")
    if not before.endswith(_CHECKPOINT_FILES) or folder.endswith(":/"):
        return url, None
    return folder + mark + query, unquote(name) if scheme_of(url) in ("http", "https") else name


def without_secrets(url: str) -> str:
    """The URL as it may be shown: without user, password, query and fragment. What is no URL stays as it is."""
    if not is_url(url):
        return url
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme.lower()}://{host}{parts.path}".rstrip("/")


class Redactor:
    """Takes credentials out of texts of others: the URLs' own, and the secrets among the options."""

    def __init__(self, url: str, options: Mapping[str, object]) -> None:
        parts = urlsplit(url)
        found = {parts.query, parts.username or "", parts.password or ""}
        _collect_secrets(options, found, is_secret=False)
        longest_first = sorted(found, key=len, reverse=True)
        self._secrets = [secret for secret in longest_first if len(secret) >= _SHORTEST_SECRET]

    def __call__(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        text = _IN_TEXT.sub(lambda match: match["start"] + match["path"], text)
        return _BEARER.sub(lambda match: f"{match[1]} ***", text)

    def made_anew(self, fault: OSError) -> OSError:
        """The fault without credentials, and without what it was raised from, which may quote them."""
        kind = type(fault) if isinstance(fault, (FileNotFoundError, PermissionError)) else OSError
        return kind(self(str(fault)))


def _collect_secrets(options: Mapping[str, object], found: set[str], *, is_secret: bool) -> None:
    for name, value in options.items():
        hidden = is_secret or _SECRET_OPTION.search(str(name)) is not None
        if isinstance(value, Mapping):
            _collect_secrets(value, found, is_secret=hidden)
        elif hidden and isinstance(value, str):
            found.add(value)
        elif isinstance(value, str) and "@" in value:  # the URL of a proxy or an endpoint
            parts = urlsplit(value)
            found |= {parts.username or "", parts.password or ""}


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
