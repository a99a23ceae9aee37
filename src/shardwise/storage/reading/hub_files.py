"""Ranges of files of a repository on the Hugging Face hub, which is not downloaded."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Self
from urllib.parse import quote, unquote, urlsplit

from shardwise.errors import StorageError
from shardwise.storage.hub import commit_of, hub_errors_named
from shardwise.storage.names import HubOptions, shown
from shardwise.storage.objects import FileState, Objects, http_store, is_denied

_PATH = re.compile(
    r"hf://(?:(?P<kind>models|datasets|spaces)/)?(?P<repo_id>[^/@]+/[^/@]+)"
    r"(?:@(?P<revision>refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(?P<folder>.*))?"
)


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
                f"{shown(url)}: not a repository of the hub. Write hf://organisation/name, "
                "hf://organisation/name@revision, or a folder below it"
            )
        named = unquote(match["revision"]) if match["revision"] else None
        if named and asked and named != asked:
            raise StorageError(
                f"{shown(url)}: names revision {named!r}, but revision={asked!r} is asked for. Pass one of the two"
            )
        kind = "model" if match["kind"] in (None, "models") else match["kind"].removesuffix("s")
        return cls(kind, match["repo_id"], named or asked, f"{match['folder']}/" if match["folder"] else "")


class HubFiles(Objects):
    """The files of one commit, read from where the hub sends whoever asks for them.

    huggingface_hub is asked once for the commit that the revision names, and its files with their hashes, and once
    for the place of each file that is read: a link that is signed for some time, and asked for again after it.
    ``options`` are ``token``, ``endpoint`` and ``revision``, and those of an HTTP server.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        hub = {name: options[name] for name in ("token", "endpoint", "revision") if name in options}
        self._http_options = {name: value for name, value in options.items() if name not in hub}
        self._named = _HubName.of(url, hub.pop("revision", None))
        self._hub = hub
        self._folder_url = ""
        self._states: dict[str, FileState] = {}
        self._places: dict[str, tuple[Any, str]] = {}
        self._asking = threading.Lock()
        super().__init__(url, options, doing="reading")

    def _opened(self, url: str, options: Mapping[str, Any]) -> Any:
        del url, options
        return None  # each file has a place of its own

    def list(self) -> list[str]:
        return sorted(self._described())

    def state(self, file: str) -> FileState:
        found = self._described().get(file)
        if found is None:
            raise StorageError(
                f"{self.named(file)}: no such file at revision {self._named.revision or 'main'}. Check the URL"
            ) from FileNotFoundError(file)
        return found

    def require_same(self, file: str, expected: FileState, found: FileState) -> None:
        """Compare sizes: a commit's files do not change, and servers that the hub sends us to have other ETags."""
        super().require_same(file, replace(expected, version=found.version), found)

    def _get(self, file: str, options: Any) -> Any:
        store, name = self._places.get(file) or self._locate(file)
        try:
            return store.get(name, options=options)
        except Exception as error:
            if not is_denied(error):
                raise
        store, name = self._locate(file)
        return store.get(name, options=options)

    def _locate(self, file: str) -> tuple[Any, str]:
        from huggingface_hub import get_hf_file_metadata

        with self._errors_named():
            location = get_hf_file_metadata(f"{self._folder_url}{quote(file)}", **self._hub).location
        folder, _, name = location.partition("?")[0].rpartition("/")
        client = self._http_options.get("client_options", {})
        if urlsplit(location).netloc == urlsplit(self._folder_url).netloc:
            from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # documented there

            headers = build_hf_headers(token=self._hub.get("token"))
            client = {**client, "default_headers": {**headers, **client.get("default_headers", {})}}
        store = http_store(
            f"{folder}?{urlsplit(location).query}".rstrip("?"), {**self._http_options, "client_options": client}
        )
        self._places[file] = store, unquote(name)
        return self._places[file]

    def _described(self) -> dict[str, FileState]:
        with self._asking:
            if not self._folder_url:
                with self._errors_named():
                    self._describe()
            return self._states

    def _describe(self) -> None:
        from huggingface_hub import HfApi

        named, api = self._named, HfApi(**self._hub)
        info = api.repo_info(
            named.repo_id, revision=named.revision, repo_type=named.kind, files_metadata=True, timeout=30
        )
        for file in getattr(info, "siblings", None) or ():
            if file.rfilename.startswith(named.folder) and file.size is not None:
                digest = f"sha256 {file.lfs.sha256}" if file.lfs is not None else f"blob {file.blob_id}"
                self._states[file.rfilename.removeprefix(named.folder)] = FileState(file.size, digest)
        kind = "" if named.kind == "model" else f"{named.kind}s/"
        self._folder_url = f"{api.endpoint}/{kind}{named.repo_id}/resolve/{info.sha}/{quote(named.folder)}"

    def _errors_named(self) -> AbstractContextManager[None]:
        return hub_errors_named(self._named.repo_id, HubOptions(revision=self._named.revision))
