"""Ranges of files of a repository on the Hugging Face hub, which is not downloaded."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self
from urllib.parse import quote, unquote

from shardwise.errors import StorageError
from shardwise.storage.hub import commit_of, hub_errors_named
from shardwise.storage.names import HubOptions, shown
from shardwise.storage.reading.http_transport import HttpTransport
from shardwise.storage.reading.transport import PASSING_STATUSES, FileState, Retries, TransientFault

_PATH = re.compile(
    r"hf://(?:(?P<kind>models|datasets|spaces)/)?(?P<repo_id>[^/@]+/[^/@]+)"
    r"(?:@(?P<revision>refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(?P<folder>.*))?"
)


@dataclass(frozen=True, slots=True)
class _HubFile:
    nbytes: int
    digest: str


def named_commit(url: str, hub: HubOptions) -> str:
    """The URL with the commit that its revision, or else that of ``hub``, names now.

    Raises :class:`StorageError` for what is no repository, or cannot be found out.
    """
    _, mark, query = url.partition("?")
    named = _HubName.of(url, hub.revision)
    commit = commit_of(named.repo_id, replace(hub, revision=named.revision), kind=named.kind)
    kind = "" if named.kind == "model" else f"{named.kind}s/"
    return f"hf://{kind}{named.repo_id}@{commit}/{named.folder}".rstrip("/") + mark + query


@dataclass(frozen=True, slots=True)
class _HubName:
    """What a URL names."""

    kind: str
    repo_id: str
    revision: str | None
    folder: str

    @classmethod
    def of(cls, url: str, asked: str | None) -> Self:
        match = _PATH.fullmatch(url.partition("?")[0].rstrip("/"))
        if match is None:
            raise StorageError(
                f"{shown(url)}: not a repository of the hub; write hf://organisation/name, "
                "hf://organisation/name@revision, or a folder below it"
            )
        named = unquote(match["revision"]) if match["revision"] else None
        if named and asked and named != asked:
            raise StorageError(
                f"{shown(url)}: names revision {named!r}, but revision={asked!r} is asked for; pass one of the two"
            )
        kind = "model" if match["kind"] in (None, "models") else match["kind"].removesuffix("s")
        return cls(kind, match["repo_id"], named or asked, f"{match['folder']}/" if match["folder"] else "")


class HubTransport:
    """Asks the hub for ranges; see :class:`~shardwise.storage.reading.transport.Transport`.

    huggingface_hub is asked once, for the commit that the revision names, and its files with their hashes. All
    bytes are those of that commit, whatever is pushed meanwhile, and a file's version is its hash.

    ``options`` are ``token``, ``endpoint`` and ``revision``, as for ``huggingface_hub.HfApi``, which finds its own
    way through a proxy; ``proxy`` is for the ranges.
    """

    def __init__(self, url: str, *, retries: Retries, options: Mapping[str, Any]) -> None:
        named = _HubName.of(url, options.get("revision"))
        unknown = sorted(set(options) - {"token", "endpoint", "revision", "proxy"})
        if unknown:
            raise StorageError(f"{shown(url)}: storage_options {unknown} mean nothing to the hub; leave them out")
        self._kind = named.kind
        self._repo_id = named.repo_id
        self._revision = named.revision
        self._folder = named.folder
        self._options = options
        self._retries = retries
        self._lock = threading.Lock()
        self._opened: tuple[HttpTransport, dict[str, _HubFile]] | None = None

    def list(self) -> list[str]:
        _, files = self._open()
        return list(files)

    def state(self, file: str) -> FileState:
        return self._described(file)[1]

    def fetch(
        self,
        file: str,
        start: int,
        buffers: Sequence[memoryview],
        expected: FileState,
        is_abandoned: Callable[[], bool],
    ) -> None:
        http, _ = self._described(file)
        # A commit's files do not change; only their size is compared, since the servers that the hub sends us to
        # call versions otherwise.
        http.fetch(file, start, buffers, expected, is_abandoned)

    def close(self) -> None:
        with self._lock:
            if self._opened is not None:
                self._opened[0].close()

    def _described(self, file: str) -> tuple[HttpTransport, FileState]:
        http, files = self._open()
        if file not in files:
            raise FileNotFoundError(f"no such file in {self._repo_id} at {self._revision or 'main'}")
        return http, FileState(files[file].nbytes, files[file].digest)

    def _open(self) -> tuple[HttpTransport, dict[str, _HubFile]]:
        with self._lock:
            if self._opened is None:
                self._opened = self._ask()
            return self._opened

    def _ask(self) -> tuple[HttpTransport, dict[str, _HubFile]]:
        from huggingface_hub import HfApi
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # documented there

        token = self._options.get("token")
        api = HfApi(endpoint=self._options.get("endpoint"), token=token)
        try:
            info = api.repo_info(
                self._repo_id,
                revision=self._revision,
                repo_type=self._kind,
                files_metadata=True,
                timeout=self._retries.timeout_s,
            )
        except Exception as error:
            if _is_passing(error):
                raise TransientFault(f"the hub failed ({type(error).__name__}: {error})") from error
            with hub_errors_named(self._repo_id, HubOptions(revision=self._revision), download=True):
                raise
        siblings: Sequence[Any] = getattr(info, "siblings", None) or ()
        files = {
            file.rfilename.removeprefix(self._folder): _HubFile(file.size, _digest(file))
            for file in siblings
            if file.rfilename.startswith(self._folder) and file.size is not None
        }
        prefix = "" if self._kind == "model" else f"{self._kind}s/"
        url = f"{api.endpoint}/{prefix}{self._repo_id}/resolve/{info.sha}/{quote(self._folder)}"
        headers = build_hf_headers(token=token)
        http = HttpTransport(url, retries=self._retries, headers=headers, proxy=self._options.get("proxy"))
        return http, files


def _digest(file: Any) -> str:
    if file.lfs is not None:
        return f"sha256 {file.lfs.sha256}"
    return f"blob {file.blob_id}"


def _is_passing(error: Exception) -> bool:
    """Whether the hub may answer the next time."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return status in PASSING_STATUSES
    # Connections that fail and time out. huggingface_hub 1 raises httpx's errors, huggingface_hub 2 httpx2's.
    return type(error).__module__.partition(".")[0] in ("httpx", "httpx2")
