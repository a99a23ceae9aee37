"""Download of the required files of a hub repository to a folder, and a reader of URLs by range."""

import contextlib
import glob
import json
import os
import re
import secrets
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from shardwise.core.errors import StorageError
from shardwise.files.objects import FileState, Objects
from shardwise.files.storage import OBJECT_STORE, ReadPolicy, StorageReader, as_bytes, ends_early
from shardwise.files.urls import (
    AdapterFiles,
    HubOptions,
    ModelFiles,
    WantedFiles,
    get_scheme,
    local_path,
    require_file_name,
    shown,
    without_secrets,
)

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


class RemoteReader(StorageReader):
    """A reader of files below a URL by range. See :class:`~shardwise.files.storage.StorageReader`.

    Nothing is written to disk, and no complete file is held in memory: each request in flight is buffered once and
    copied into the caller's buffers. At most ``policy.concurrency`` requests are in flight, regardless of the
    number of threads. Obstore retries transient failures. The version of every file is recorded at the first
    access, and bytes of another version are a StorageError.

    ``reads`` (requested ranges) and ``files_opened`` (accessed files) are counters.

    Args:
        url: a folder, as ``https://host/folder``, ``s3://bucket/folder``, ``gs://bucket/folder``, ``az://...`` or
            ``memory://folder``. A query is sent with every file.
        storage_options: the arguments of obstore's store: ``client_options`` and ``retry_config``, for buckets also
            ``region``, ``endpoint``, ``skip_signature``, ...
        concurrency: a replacement for ``policy.concurrency``.
        policy: read policy of the storage.

    Raises:
        StorageError: the URL cannot be read. No request is sent before the first read.
    """

    def __init__(
        self,
        url: str,
        *,
        storage_options: Mapping[str, Any] | None = None,
        concurrency: int | None = None,
        policy: ReadPolicy = OBJECT_STORE,
    ) -> None:
        self._policy = policy if concurrency is None else replace(policy, concurrency=concurrency)
        options = storage_options or {}
        if get_scheme(url) == "hf":
            raise StorageError(
                f"{shown(without_secrets(url))}: the hub is not read in place. Pass the repository's name "
                "(organization/name, with revision and subfolder), whose files are downloaded"
            )
        self._files = Objects(url, options, doing="reading")
        self._in_flight = threading.BoundedSemaphore(self._policy.concurrency)
        self._states: dict[str, FileState] = {}
        self._lock = threading.Lock()
        self._closed = False
        self.reads = 0
        self.files_opened = 0

    @property
    def root(self) -> str:
        return self._files.root

    @property
    def policy(self) -> ReadPolicy:
        return self._policy

    def list(self) -> list[str]:
        """Return the names of all files below the URL, sorted.

        Raises:
            CannotListError: the URL is on an HTTP server, which only serves files by name, or there is no
                permission to list.
        """
        self._require_open(None)
        return self._files.list()

    def size(self, file: str) -> int:
        return self._state(file).nbytes

    def identity(self, file: str) -> str:
        """Return the file's version (ETag or hash, or else modification time) and size, from a new request."""
        return self._get_state(file).identity

    def read_vectored(self, file: str, start: int, buffers: Sequence[memoryview]) -> None:
        flat, nbytes = as_bytes(buffers)
        # Against the size at the first access: another version since then is an error of fetch().
        stop, state = start + nbytes, self._state(file)
        if not 0 <= start <= stop <= state.nbytes:
            raise ends_early(self.root, file, (start, stop), state.nbytes)
        if start == stop:
            return
        doing = f"reading bytes {start}..{stop}"
        # The semaphore is held until the response is copied: it also bounds the memory of responses.
        with self._in_flight, self._files.failures(file, doing):
            self._require_open(file)
            data = self._files.fetch(file, start, stop, state)
            if data.nbytes != nbytes:
                raise StorageError(
                    f"{self._files.label(file)}: {doing} failed, the response has a wrong size. Check the server"
                )
            for buffer in flat:
                buffer[:], data = data[: buffer.nbytes], data[buffer.nbytes :]
        with self._lock:
            self.reads += 1

    def close(self) -> None:
        self._closed = True

    def _state(self, file: str) -> FileState:
        """Return the file's state as of its first access."""
        self._require_open(file)
        return self._states.get(file) or self._get_state(file, is_first=True)

    def _get_state(self, file: str, *, is_first: bool = False) -> FileState:
        self._require_open(file)
        require_file_name(self.root, file)
        with self._in_flight:
            state = self._files.state(file)
        with self._lock:
            self.files_opened += file not in self._states
            first = self._states.setdefault(file, state)
        return first if is_first else state

    def _require_open(self, file: str | None) -> None:
        if self._closed:
            raise StorageError(f"{self._files.label(file)}: the reader is closed. Open another one")
