"""Resolves a name to a folder: a local path, or those files of a hub repository that will be read."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from shardwise.errors import StorageError
from shardwise.storage.names import AdapterFiles, HubOptions, ModelFiles, WantedFiles, local_place, shown

_SMALL = ("*.json", "*.model", "*.txt", "*.jinja", "tokenizer*")
"""Indexes, configurations, tokenizers."""
_NEEDED = ("config.json", "adapter_config.json", "*.index.json", "*.index.*.json")
"""Those of them that a load reads."""
_CODE = "*.py"
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
_MODEL = ("model.safetensors", "model.safetensors.index.json")
_TORCH = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_INDEX = re.compile(r".*\.(safetensors|bin)\.index(\.[^./]+)?\.json")
_SECOND_COPIES = ("consolidated*", "adapter_model*")
_MOST_CONFIG_BYTES = 10_000_000
_MOST_INDEX_BYTES = 100_000_000


def small_files(names: Collection[str], wanted: WantedFiles) -> list[str]:
    """The small files among ``names``, which lie in one folder; Python only where it is to be run."""
    patterns = (*_SMALL, _CODE) if isinstance(wanted, ModelFiles) and wanted.code else _SMALL
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def needed_files(names: Collection[str], wanted: WantedFiles) -> list[str]:
    """The small files without which nothing can be loaded."""
    patterns = (*_NEEDED, _CODE) if isinstance(wanted, ModelFiles) and wanted.code else _NEEDED
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def weights(names: Collection[str], folder: Path, wanted: WantedFiles, variant: str | None) -> list[str]:
    """The files of weights that a load will read, of those that there are.

    Args:
        names: what is in the folder of the repository.
        folder: where its small files are already.
        wanted: a model or an adapter.
        variant: as in the names of files.
    """
    there = set(names)

    def of(name: str) -> list[str]:
        """A file, or those that an index names."""
        if name not in there:
            return []
        if _INDEX.fullmatch(name) is None:
            return [name]
        return sorted(there.intersection(_named_by(folder / name)))

    safetensors = [name for name in sorted(there) if name.endswith(".safetensors")]
    adapters = [name for name in _ADAPTERS if name in there][:1]
    if isinstance(wanted, AdapterFiles):
        return adapters
    if variant is not None:
        names_of = (
            f"model.{variant}.safetensors",
            f"model.safetensors.index.{variant}.json",
            f"pytorch_model.{variant}.bin",
            f"pytorch_model.bin.index.{variant}.json",
        )
        choices = [of(name) for name in names_of]
    else:
        own = [name for name in safetensors if not any(fnmatchcase(name, copy) for copy in _SECOND_COPIES)]
        choices = [
            of(_weights_named_in(folder / "config.json")),
            *(of(name) for name in _MODEL),
            own,
            [name for name in safetensors if name not in adapters],
            *(of(name) for name in _TORCH),
            adapters,
        ]
    chosen = next(filter(None, choices), [])
    return [*chosen, *(name for name in wanted.extra if name in there and name not in chosen)]


def _named_by(index: Path) -> set[str]:
    weight_map = _content(index, _MOST_INDEX_BYTES).get("weight_map")
    values = weight_map.values() if isinstance(weight_map, dict) else ()
    return {name for name in values if isinstance(name, str)}


def _weights_named_in(config: Path) -> str:
    name = _content(config, _MOST_CONFIG_BYTES).get("transformers_weights")
    return name if isinstance(name, str) else ""


def _content(file: Path, most_bytes: int) -> dict[str, object]:
    """What a JSON file holds; nothing where it cannot be read, which whoever opens it afterwards will tell."""
    try:
        if file.stat().st_size > most_bytes:
            return {}
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


_COMMIT = re.compile(r"[0-9a-f]{40}")
_ASKING_S = 10.0
"""How long the hub is waited for before the cache is taken for what there is."""


def resolve(
    name_or_path: str | os.PathLike[str],
    options: HubOptions = HubOptions(),  # noqa: B008 - frozen
    *,
    download: bool = True,
    wanted: WantedFiles = ModelFiles(),  # noqa: B008 - frozen
) -> Path:
    """The local folder (or file) with the checkpoint, downloaded first where it is not there yet.

    Only what will be read is downloaded: the weights of ``options.variant``, or those without one (safetensors,
    and where there are none, torch's), json, tokenizers; from the top of the repository, or of
    ``options.subfolder``, alone; Python files only with ``ModelFiles(code=True)``. ``download=False`` takes what
    the cache has: for the ranks of a node that come after the one that downloads.

    Raises :class:`StorageError` for a path that is not there, and for a repository that is not to be had.
    """
    place = local_place(name_or_path, options)
    if place is not None:
        return place
    repo_id = os.fspath(name_or_path)
    # What the fetching sees: for a rank that must not download, the cache is all there is.
    effective = options if download else replace(options, local_files_only=True)
    with hub_errors_named(repo_id, options, download=download):
        folder = _snapshot(repo_id, effective, wanted)
    if not folder.is_dir():
        raise StorageError(
            f"{repo_id} at revision {_revision(options)}: no folder {options.subfolder!r} with weights or "
            "json files in it; check subfolder"
        )
    return folder


def commit_of(repo_id: str, options: HubOptions, *, kind: str = "model") -> str:
    """The commit that the revision names: asked of the hub, and where it cannot be reached, of the cache.

    Raises :class:`StorageError` where neither knows it.
    """
    revision = _revision(options)
    if _COMMIT.fullmatch(revision):
        return revision
    with hub_errors_named(repo_id, options, download=True):
        try:
            return _ask(repo_id, options, kind).commit
        except Exception as error:
            noted = _ref(repo_id, options, revision, kind)
            if not _is_final(error) and noted.is_file():
                return noted.read_text().strip()
            if _never_answered(error):
                raise _not_found(f"{noted} is not there") from error
            raise


def note_commit(repo_id: str, options: HubOptions, commit: str) -> None:
    """Leave in the cache what a revision named, as a download by it would, for whoever is offline later."""
    revision = _revision(options)
    if _COMMIT.fullmatch(revision):
        return
    noted = _ref(repo_id, options, revision, "model")
    with contextlib.suppress(OSError):  # a cache that cannot be written to has been read all the same
        if _in_cache(repo_id, options).is_dir() and not (noted.is_file() and noted.read_text() == commit):
            noted.parent.mkdir(parents=True, exist_ok=True)
            fresh = noted.with_name(f"{noted.name}.{os.getpid()}.new")
            fresh.write_text(commit)
            fresh.replace(noted)


@dataclass(frozen=True, slots=True)
class _Listing:
    """A commit of a repository, and the names of its files."""

    commit: str
    files: tuple[str, ...]


def _snapshot(repo_id: str, options: HubOptions, wanted: WantedFiles) -> Path:
    """The snapshot, with what will be read in it: the small files first, which tell of the weights."""
    prefix = f"{options.subfolder.strip('/')}/" if options.subfolder else ""
    try:
        listing = _ask(repo_id, options, "model")
    except Exception as error:
        from huggingface_hub.errors import LocalEntryNotFoundError

        if _is_final(error):
            raise
        try:
            return _cached(repo_id, options, wanted, prefix)
        except LocalEntryNotFoundError as absent:
            if _never_answered(error):
                raise absent from error
            if isinstance(error, LocalEntryNotFoundError):  # it was not to be asked
                raise
            raise error from absent
    below = [name.removeprefix(prefix) for name in listing.files if name.startswith(prefix)]
    names = [name for name in below if "/" not in name]
    pinned = replace(options, revision=listing.commit)
    small = small_files(names, wanted)
    folder = _fetch(repo_id, pinned, prefix, small)
    chosen = weights(names, folder, wanted, options.variant)
    if chosen:
        folder = _fetch(repo_id, pinned, prefix, [*small, *chosen])
    note_commit(repo_id, options, listing.commit)
    return folder


def _cached(repo_id: str, options: HubOptions, wanted: WantedFiles, prefix: str) -> Path:
    """The snapshot as the cache has it: what will be read is there, or it is refused."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    options = replace(options, local_files_only=True)
    try:
        folder = _fetch(repo_id, options, prefix, ["config.json"])
    except LocalEntryNotFoundError as error:
        # IncompleteSnapshotError, which not all versions have: something was not downloaded. That is no reason to
        # refuse where all that will be read is there.
        if not hasattr(error, "snapshot_path"):
            raise
        folder = Path(error.snapshot_path) / prefix
    names = [file.name for file in folder.iterdir() if file.is_file()] if folder.is_dir() else []
    chosen = weights(names, folder, wanted, options.variant)
    if not chosen:  # told by the hub's library where it knows of weights that were not downloaded
        return _fetch(repo_id, options, prefix, ["*.safetensors", "config.json"])
    return _fetch(repo_id, options, prefix, [*needed_files(names, wanted), *chosen])


def _ask(repo_id: str, options: HubOptions, kind: str) -> _Listing:
    """What the hub says of a revision; raises what its library does, when it cannot or must not be asked."""
    import huggingface_hub
    from huggingface_hub import constants

    if options.local_files_only or constants.HF_HUB_OFFLINE:
        raise _not_found("downloading is off")
    api = huggingface_hub.HfApi(token=options.token)
    info = api.repo_info(repo_id, revision=options.revision, repo_type=kind, timeout=_ASKING_S)
    if info.sha is None:
        raise _not_found("the hub named no commit")
    siblings = getattr(info, "siblings", None) or ()
    return _Listing(info.sha, tuple(file.rfilename for file in siblings))


def _not_found(cause: str) -> Exception:
    from huggingface_hub.errors import LocalEntryNotFoundError

    return LocalEntryNotFoundError(cause)


def _is_final(error: Exception) -> bool:
    """Whether no cache can answer either: the name cannot be one, or there is no such revision."""
    from huggingface_hub.errors import HFValidationError, RevisionNotFoundError

    return isinstance(error, (HFValidationError, RevisionNotFoundError))


def _never_answered(error: Exception) -> bool:
    # Connections that fail and time out. huggingface_hub 1 raises httpx's errors, huggingface_hub 2 httpx2's.
    return type(error).__module__.partition(".")[0] in ("httpx", "httpx2")


def place_of_cache(options: HubOptions) -> Path:
    """The folder of the hub's cache."""
    from huggingface_hub import constants

    return Path(options.cache_dir or constants.HF_HUB_CACHE).expanduser().absolute()


def _in_cache(repo_id: str, options: HubOptions, kind: str = "model") -> Path:
    """The folder of a repository in the cache."""
    return place_of_cache(options) / f"{kind}s--{repo_id.replace('/', '--')}"


def _ref(repo_id: str, options: HubOptions, revision: str, kind: str) -> Path:
    """Where the cache notes the commit of a revision."""
    return _in_cache(repo_id, options, kind) / "refs" / revision


def _fetch(repo_id: str, options: HubOptions, prefix: str, names: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    # The hub's patterns let "*" match "/", so what lies deeper has to be left out by name.
    folder = snapshot_download(
        repo_id,
        revision=options.revision,
        cache_dir=options.cache_dir,
        token=options.token,
        local_files_only=options.local_files_only,
        allow_patterns=[
            glob.escape(prefix) + (name if name.startswith("*") else glob.escape(name)) for name in names
        ],
        ignore_patterns=[f"{glob.escape(prefix)}*/*"],
    )
    return Path(folder) / prefix if prefix else Path(folder)


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
        why = _why_not_cached(options, error, download=download)
        raise StorageError(f"{name}: {why}; if a folder is meant, there is none of this name here") from error
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
