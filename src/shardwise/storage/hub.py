"""From a name to a folder: local paths as they are, hub repositories downloaded, or from the hub's cache."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.errors import StorageError
from shardwise.storage.names import shown, why_unsafe
from shardwise.storage.urls import is_url, without_secrets

_WANTED = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "tokenizer*")
"""Weights, their indexes, configurations, tokenizers. No Python files: nothing from the hub is executed."""

_NEEDED = ("*.safetensors", "*.safetensors.index.json", "config.json")

_TORCH = ("pytorch_model*.bin", "pytorch_model.bin.index.json")
"""Weights of repositories that are older than safetensors; wanted where there are no others."""

_NEVER = ("*.py",)
_OTHER_WEIGHTS = ("*.bin", "*.bin.index.json")


@dataclass(frozen=True)
class HubOptions:
    """Which state of a hub repository, kept where, fetched how.

    ``revision`` is a branch, tag or commit; ``cache_dir`` replaces the cache of huggingface_hub; ``token`` is
    a token, True for the stored one, False for none, None for the stored one if there is one. ``subfolder``
    applies to local folders, too.
    """

    revision: str | None = None
    cache_dir: str | None = None
    token: str | bool | None = None
    local_files_only: bool = False
    subfolder: str = ""


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


def resolve(
    name_or_path: str | os.PathLike[str],
    options: HubOptions = HubOptions(),
    *,
    download: bool = True,
) -> Path:
    """The local folder (or file) with the checkpoint, downloaded first where it is not there yet.

    Only the wanted files are downloaded: safetensors (where there are none, ``pytorch_model*.bin``), json,
    tokenizers; from the top of the repository, or of ``options.subfolder``, alone. ``download=False`` takes what
    the cache has: for the ranks of a node that come after the one that downloads.

    Raises :class:`StorageError` for a path that is not there, and for a repository that is not to be had.
    """
    if is_url(name_or_path):
        raise StorageError(
            f"{shown(without_secrets(os.fspath(name_or_path)))}: a folder on this machine, or a repository that "
            "is downloaded to one, is wanted here, and a URL is neither; download it, and pass its folder"
        )
    _check_subfolder(name_or_path, options.subfolder)
    if is_local(name_or_path):
        return _local(Path(name_or_path).expanduser(), options.subfolder)
    repo_id = os.fspath(name_or_path)
    # What the fetching sees: for a rank that must not download, the cache is all there is.
    effective = options if download else replace(options, local_files_only=True)
    with hub_errors_named(repo_id, options, download=download):
        folder = _snapshot(repo_id, effective)
    if not folder.is_dir():
        raise StorageError(
            f"{repo_id} at revision {_revision(options)}: no folder {options.subfolder!r} with weights or "
            "json files in it; check subfolder"
        )
    return folder


def _check_subfolder(name_or_path: str | os.PathLike[str], subfolder: str) -> None:
    fault = why_unsafe(subfolder) if subfolder else None
    if fault is not None:
        raise StorageError(
            f"{shown(os.fspath(name_or_path))}: subfolder {subfolder!r} is refused, {fault}; "
            "name it relative to the checkpoint's folder, as in 'a/b'"
        )


def _local(path: Path, subfolder: str) -> Path:
    place = path / subfolder
    if subfolder and path.is_file():
        raise StorageError(f"{path}: is a file, so subfolder={subfolder!r} has no place; leave it out")
    if not place.exists():
        raise StorageError(
            f"{place}: no such directory; check the path "
            "(for a repository of the Hugging Face hub, write 'organisation/name')"
        )
    return place


def _snapshot(repo_id: str, options: HubOptions) -> Path:
    # Beside model*.safetensors, "consolidated*.safetensors" is a second copy of the weights, large and
    # unused. It is fetched only where there are no others, which shows when everything else has been fetched.
    # Likewise what torch wrote.
    folder = _fetch_or_make_do(repo_id, options, ignored=(*_OTHER_WEIGHTS, "consolidated*"))
    if not any(folder.glob("*.safetensors")):
        folder = _fetch_or_make_do(repo_id, options, ignored=_OTHER_WEIGHTS)
    if not any(folder.glob("*.safetensors")):
        folder = _fetch_or_make_do(repo_id, options, ignored=(), more=_TORCH)
    return folder


def _fetch_or_make_do(
    repo_id: str, options: HubOptions, *, ignored: Sequence[str], more: Sequence[str] = ()
) -> Path:
    """The snapshot with all wanted files, or with all needed ones when nothing can be downloaded."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return _fetch(repo_id, options, wanted=(*_WANTED, *more), ignored=ignored)
    except LocalEntryNotFoundError as error:
        # IncompleteSnapshotError, which not all versions have. Somebody downloaded less than we would have,
        # say without README.txt. That is no reason to refuse where the weights are all there.
        if not hasattr(error, "snapshot_path"):
            raise
    return _fetch(repo_id, options, wanted=(*_NEEDED, *more), ignored=ignored)


def _fetch(repo_id: str, options: HubOptions, *, wanted: Sequence[str], ignored: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    # The hub's patterns let "*" match "/", so what lies deeper has to be left out by name.
    prefix = f"{glob.escape(options.subfolder)}/" if options.subfolder else ""
    folder = snapshot_download(
        repo_id,
        revision=options.revision,
        cache_dir=options.cache_dir,
        token=options.token,
        local_files_only=options.local_files_only,
        allow_patterns=[prefix + pattern for pattern in wanted],
        ignore_patterns=[prefix + pattern for pattern in (*_NEVER, *ignored, "*/*")],
    )
    return Path(folder) / options.subfolder


@contextmanager
def hub_errors_named(repo_id: str, options: HubOptions, *, download: bool) -> Iterator[None]:
    """Turn what huggingface_hub raises into a StorageError that says what to do."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name = f"{shown(repo_id)} at revision {_revision(options)}"
    try:
        yield
    except HFValidationError as error:
        raise StorageError(
            f"{shown(repo_id)}: neither a directory here nor a possible name on the Hugging Face hub "
            f"({error}); "
            "check the path, or write 'organisation/name'"
        ) from error
    except GatedRepoError as error:
        raise StorageError(
            f"{name}: access is gated; accept the terms at https://huggingface.co/{repo_id} and pass a token "
            "(token=..., HF_TOKEN, or `hf auth login`)"
        ) from error
    except RepositoryNotFoundError as error:
        raise StorageError(
            f"{name}: not found on the Hugging Face hub, nor as a directory here; check the spelling, and "
            "pass a token (token=..., HF_TOKEN, or `hf auth login`) if it is private"
        ) from error
    except RevisionNotFoundError as error:
        raise StorageError(
            f"{name}: the repository has no such revision; pass one of its branches, tags or commits"
        ) from error
    except LocalEntryNotFoundError as error:
        raise StorageError(f"{name}: {_why_not_cached(options, error, download=download)}") from error
    except Exception as error:
        # HTTP and connection errors, whose classes differ between versions of the library, a full disk, a
        # token that is asked for and not there.
        raise StorageError(
            f"{name}: could not be downloaded ({type(error).__name__}: {error}); "
            "check connection, token and disk space, or download it by other means and pass its folder"
        ) from error


def _why_not_cached(options: HubOptions, error: Exception, *, download: bool) -> str:
    from huggingface_hub import constants

    cache = options.cache_dir or constants.HF_HUB_CACHE
    part = "only in part" if hasattr(error, "snapshot_path") else "not"
    if options.local_files_only:
        remedy = "downloading is off (local_files_only): allow it, or download the repository first"
    elif constants.HF_HUB_OFFLINE:
        remedy = "downloading is off (HF_HUB_OFFLINE is set): unset it, or download the repository first"
    elif not download:
        remedy = "another rank of this node should have downloaded it: see its error, and use one cache for both"
    else:
        cause = error.__cause__ or error
        remedy = f"the hub could not be reached ({cause}): check the connection, or download it first"
    return f"{part} in the cache {cache}, and {remedy}"


def _revision(options: HubOptions) -> str:
    return options.revision or "main"
