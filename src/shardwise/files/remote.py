"""Downloads the required files of a hub repository to a folder."""

import contextlib
import glob
import json
import os
import re
import secrets
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from shardwise.core.errors import StorageError
from shardwise.files.urls import AdapterFiles, HubOptions, ModelFiles, WantedFiles, local_path, shown

_SMALL = ("*.json", "*.model", "*.txt", "*.jinja", "tokenizer*")
"""Indexes, configurations, tokenizers."""
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
_MODEL = ("model.safetensors", "model.safetensors.index.json")
_TORCH = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_INDEX = re.compile(r".*\.(safetensors|bin)\.index(\.[^./]+)?\.json")
_DUPLICATES = ("consolidated*", "adapter_model*")
_MAX_JSON_BYTES = 100_000_000
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HUB_TIMEOUT_S = 10.0
"""If the hub does not answer in this time, the cache is used."""


def weights(names: Collection[str], folder: Path, wanted: WantedFiles) -> list[str]:
    """Return the files of weights that a load will read.

    Args:
        names: names of the files in the folder of the repository.
        folder: local folder with its small files, which are already downloaded.
        wanted: the kind of files, of a model or an adapter.
    """
    available = set(names)

    def of(name: str) -> list[str]:
        """Return this file, or the files that it lists if it is an index."""
        if name not in available:
            return []
        if _INDEX.fullmatch(name) is None:
            return [name]
        named = _content(folder / name).get("weight_map")
        return sorted(available.intersection(map(str, named.values()))) if isinstance(named, dict) else []

    # Choices in the order of preference. The first that is not empty is downloaded.
    safetensors = [name for name in sorted(available) if name.endswith(".safetensors")]
    adapters = [name for name in _ADAPTERS if name in available][:1]
    if isinstance(wanted, AdapterFiles):
        return adapters
    originals = [name for name in safetensors if not any(fnmatchcase(name, copy) for copy in _DUPLICATES)]
    choices = [
        of(str(_content(folder / "config.json").get("transformers_weights"))),
        *(of(name) for name in _MODEL),
        originals,
        [name for name in safetensors if name not in adapters],
        *(of(name) for name in _TORCH),
        adapters,
    ]
    chosen = next(filter(None, choices), [])
    return [*chosen, *(name for name in wanted.extra if name in available and name not in chosen)]


def _content(file: Path) -> dict[str, object]:
    """Return the content of a JSON file, or {} if it cannot be read, because opening it later raises the error."""
    try:
        content = json.loads(file.read_bytes()) if file.stat().st_size <= _MAX_JSON_BYTES else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def resolve(
    name_or_path: str | os.PathLike[str],
    options: HubOptions = HubOptions(),  # noqa: B008 - frozen
    *,
    download: bool = True,
    wanted: WantedFiles = ModelFiles(),  # noqa: B008 - frozen
) -> Path:
    """Return the local folder (or file) with the checkpoint, after downloading missing files.

    Only the required files are downloaded: weights (safetensors, or else torch's), JSON files and tokenizers. They
    are taken only from the top folder of the repository, or from ``options.subfolder``. Python files are included
    only with ``ModelFiles(code=True)``.
    ``download=False`` uses the files in the cache, for the ranks of a node that run after the one that downloads.

    Raises:
        StorageError: the path does not exist, or the repository cannot be downloaded.
    """
    place = local_path(name_or_path, options)
    if place is not None:
        return place
    repo_id = os.fspath(name_or_path)
    prefix = f"{options.subfolder.strip('/')}/" if options.subfolder else ""
    # Without a listing, from the cache: whatever a download before has left there.
    listing_options = options if download else replace(options, local_files_only=True)
    listing = _listing(repo_id, listing_options)
    if listing is None:
        folder = _find_cached(repo_id, options) / prefix
    else:
        commit, files = listing
        pinned = replace(options, revision=commit)
        below = [name.removeprefix(prefix) for name in files if name.startswith(prefix)]
        names = [name for name in below if "/" not in name]
        patterns = (*_SMALL, "*.py") if isinstance(wanted, ModelFiles) and wanted.code else _SMALL
        small = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
        # Small files first: configs and indexes tell which files of weights are needed.
        folder = _fetch(repo_id, pinned, prefix, small)
        if chosen := weights(names, folder, wanted):
            folder = _fetch(repo_id, pinned, prefix, chosen)
        record_commit(repo_id, options, commit)
    if not folder.is_dir():
        raise StorageError(
            f"{repo_id} at revision {options.revision or 'main'}: no folder {options.subfolder!r} with weights or "
            "json files in it. Check subfolder, or download it first"
        )
    return folder


def resolve_commit(repo_id: str, options: HubOptions) -> str:
    """Return the commit of the revision from the hub, or from the cache if the hub cannot be reached.

    Raises:
        StorageError: neither the hub nor the cache has the revision.
    """
    if options.revision and _COMMIT.fullmatch(options.revision):
        return options.revision
    listing = _listing(repo_id, options)
    return _find_cached(repo_id, options).name if listing is None else listing[0]


def record_commit(repo_id: str, options: HubOptions, commit: str) -> None:
    """Record in the cache the commit of a revision, as a download by revision does, for later use offline."""
    revision = options.revision or "main"
    folder = get_cache_folder(options) / f"models--{repo_id.replace('/', '--')}"
    noted = folder / "refs" / revision
    if folder.is_dir() and not _COMMIT.fullmatch(revision):
        with contextlib.suppress(OSError):  # a cache that cannot be written to has been read all the same
            if not noted.is_file() or noted.read_text() != commit:
                noted.parent.mkdir(parents=True, exist_ok=True)
                # Renamed, because other processes read the ref meanwhile.
                fresh = noted.with_name(f"{noted.name}.{secrets.token_hex(4)}.tmp")
                try:
                    fresh.write_text(commit)
                    fresh.replace(noted)
                finally:
                    fresh.unlink(missing_ok=True)


def _listing(repo_id: str, options: HubOptions) -> tuple[str, list[str]] | None:
    """Return the commit and its file names from the hub, or None if the cache must be used."""
    with hub_errors_named(repo_id, options):
        from huggingface_hub import HfApi, constants
        from huggingface_hub.errors import HFValidationError, RevisionNotFoundError

        if options.local_files_only or constants.HF_HUB_OFFLINE:
            return None
        try:
            # An invalid name and an unknown revision are errors. After any other failure, a cached copy is used
            # if there is one.
            info = HfApi(token=options.token).repo_info(repo_id, revision=options.revision, timeout=_HUB_TIMEOUT_S)
        except (HFValidationError, RevisionNotFoundError):
            raise
        except Exception:
            with contextlib.suppress(StorageError):
                _find_cached(repo_id, options)
                return None
            raise
    return str(info.sha), [file.rfilename for file in getattr(info, "siblings", None) or ()]


def _find_cached(repo_id: str, options: HubOptions) -> Path:
    """Return the folder of the revision in the cache."""
    from huggingface_hub import snapshot_download

    with hub_errors_named(repo_id, options):
        folder = snapshot_download(
            repo_id,
            revision=options.revision,
            cache_dir=options.cache_dir,
            local_files_only=True,
            allow_patterns=[],  # otherwise every file of the repository has to be there
        )
    return Path(folder)


def get_cache_folder(options: HubOptions) -> Path:
    """Return the folder of the hub's cache."""
    from huggingface_hub import constants

    return Path(options.cache_dir or constants.HF_HUB_CACHE).expanduser().absolute()


def _fetch(repo_id: str, options: HubOptions, prefix: str, names: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    with hub_errors_named(repo_id, options):
        # The hub's patterns let "*" match "/", so what lies deeper has to be left out by name.
        folder = snapshot_download(
            repo_id,
            revision=options.revision,
            cache_dir=options.cache_dir,
            token=options.token,
            allow_patterns=[glob.escape(prefix + name) for name in names],
            ignore_patterns=[f"{glob.escape(prefix)}*/*"],
        )
        return Path(folder) / prefix


_REMEDIES = {
    "HFValidationError": "Check the path, or write 'organization/name'",
    "GatedRepoError": "Accept the terms on its page, and pass a token (token=..., HF_TOKEN, or `hf auth login`)",
    "RepositoryNotFoundError": "Check the spelling, and pass a token if it is private",
    "RevisionNotFoundError": "Pass one of its branches, tags or commits",
    "LocalEntryNotFoundError": "Run hf download NAME. Only loads and trainings download, and "
    "not with local_files_only or HF_HUB_OFFLINE",
    "Exception": "Check connection, token and disk space, or download it by other means and pass its folder",
}


@contextmanager
def hub_errors_named(repo_id: str, options: HubOptions) -> Iterator[None]:
    """Raise exceptions of huggingface_hub as StorageErrors with a remedy."""
    try:
        yield
    except Exception as error:
        kind = next(base.__name__ for base in type(error).__mro__ if base.__name__ in _REMEDIES)
        raise StorageError(
            f"{shown(repo_id)} at revision {options.revision or 'main'}: is not a local directory, and cannot "
            f"be downloaded from the Hugging Face hub ({type(error).__name__}: {' '.join(str(error).split())}). "
            f"{_REMEDIES[kind]}"
        ) from error
