"""URLs of checkpoints: which they are, and what of them may be shown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import unquote, urlsplit

from shardwise.errors import StorageError
from shardwise.storage.names import shown

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
    """The folder's URL, and the name of the safetensors or index file if the URL ends in one.

    A query belongs to the folder: it is sent with every file.
    """
    before, mark, query = url.partition("?")
    folder, _, name = before.rpartition("/")
    if not name.endswith(_CHECKPOINT_FILES) or folder.endswith(":/"):
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
