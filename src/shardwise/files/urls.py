"""Names of files, URLs and repositories: checks of safety, parsing, and formatting for messages."""

import errno
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias
from urllib.parse import SplitResult, unquote, urlsplit

from shardwise.core.errors import StorageError

_DRIVE = re.compile(r"[A-Za-z]:")
_SHOWN_CHARACTERS = 200


def unsafe_name_reason(name: str) -> str | None:
    """Return the reason why ``name`` could leave the storage's root or is no file name, or None if it is safe.

    Names come from files of untrusted origin (``weight_map`` of an index), so the rule is the same on every system:
    relative, "/"-separated, no way up, no backslash, no drive letter.
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
    components = name.split("/")
    if ".." in components:
        return "it climbs out of its folder with '..'"
    if "" in components or "." in components:
        return "it has an empty or '.' component"
    return None


def require_file_name(root: str, name: str, *, is_nested: bool = True) -> None:
    """Raise StorageError if ``name`` could leave the root, or has a folder and is not ``is_nested``."""
    reason = unsafe_name_reason(name) or ("it has a folder in it" if "/" in name and not is_nested else None)
    if reason is not None:
        raise StorageError(
            f"{shown(name)}: refused as a file name below {root}, {reason}. Name files relative to that folder"
        )


def shown(name: str) -> str:
    """Format ``name`` for a message: escaped if not printable, truncated if very long."""
    text = name if name and name.isprintable() else ascii(name)
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    return f"{text[:_SHOWN_CHARACTERS]}... ({len(text)} characters)"


_REMEDIES: Final = {
    errno.ENOENT: "Check the path, or download it again",
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "Free some space, or save elsewhere"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "Change the permissions, or use another folder"),
    errno.EROFS: "Mount it for writing, or save elsewhere",
    errno.EEXIST: "It exists already. Remove it first, or use another name",
    errno.ELOOP: "It is a symbolic link, which is not written through: remove the link, or save elsewhere",
}


def to_storage_error(root: str, file: str | None, doing: str, error: OSError | UnicodeError) -> StorageError:
    """Return the error for a failed operation on a file of the folder ``root``, or on the folder itself (None)."""
    where = shown(root) if file is None else f"{shown(file)} in {root}"
    cause, remedy = "the name cannot be encoded", "Rename it"
    if isinstance(error, OSError):
        cause = f"{(error.strerror or str(error)).lower()} (errno {error.errno})"
        remedy = _REMEDIES.get(error.errno or 0, "Check the file system, and try again")
        if file is not None and isinstance(error, FileNotFoundError) and os.path.islink(os.path.join(root, file)):
            cause += f", a link to {shown(os.readlink(os.path.join(root, file)))}"
    return StorageError(f"{where}: {doing} failed, {cause}. {remedy}")


_SCHEME = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.\-]*)://")
_CHECKPOINT_FILE = re.compile(r".*(\.safetensors(\.index\.json)?|\.bin(\.index\.json)?|\.pth?|/\.metadata)")
_IN_TEXT = re.compile(
    r"(?P<start>[A-Za-z][A-Za-z0-9+.\-]*://)(?P<user>[^\s/?#'\"@]*@)?(?P<path>[^\s?#'\"<>]*)[^\s'\"<>)]*"
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=\-]+")
_SECRET_OPTION = re.compile(r"(?i)token|secret|key|password|credential|authorization|cookie|sas|headers")
_SHORTEST_SECRET = 4


def is_url(name_or_path: object) -> bool:
    """Check if this is a URL ("s3://bucket/folder") rather than a path or the name of a repository."""
    return isinstance(name_or_path, str) and _SCHEME.match(name_or_path) is not None


def get_scheme(url: str) -> str:
    """Return the URL's scheme in lower case.

    Raises:
        StorageError: it is not a URL.
    """
    match = _SCHEME.match(url)
    if match is None:
        raise StorageError(f"{shown(url)}: not a URL. Write it with its scheme, as in s3://bucket/folder")
    return match["scheme"].lower()


def split_file(url: str) -> tuple[str, str | None]:
    """Split a URL into the folder's URL and the name of the file of tensors or index, if it ends in one.

    A query stays with the folder because it is sent with every file.
    """
    # "https://host/a/model.safetensors?sig=1" is ("https://host/a?sig=1", "model.safetensors").
    before, mark, query = url.partition("?")
    folder, _, name = before.rpartition("/")
    if not _CHECKPOINT_FILE.fullmatch(before) or folder.endswith(":/"):
        return url, None
    return folder + mark + query, unquote(name) if get_scheme(url) in ("http", "https") else name


def without_secrets(url: str) -> str:
    """Format a URL for messages without user, password, query and fragment. Other strings are unchanged."""
    if not is_url(url):
        return url
    components = _parts_of(url)
    # The path may be needed to find the file. All else may contain secrets.
    host = components.netloc.rpartition("@")[2]
    return f"{components.scheme.lower()}://{host}{components.path}".rstrip("/")


def _parts_of(url: str) -> SplitResult:
    """Return the parts of a URL, of which only the scheme is known if it is invalid."""
    try:
        return urlsplit(url)
    except ValueError:
        return SplitResult(url.partition("://")[0], "", "", "", "")


def redact(text: str, url: str, options: Mapping[str, object]) -> str:
    """Remove credentials from a foreign text: those of the URL, and the secrets among the options."""
    # Known secrets first, the longest first, as one may contain another. Then everything that looks like one.
    components = _parts_of(url)
    secrets = {components.query, components.username or "", components.password or "", *_secrets(options)}
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _SHORTEST_SECRET:
            text = text.replace(secret, "***")
    text = _IN_TEXT.sub(r"\g<start>\g<path>", text)
    return _BEARER.sub(r"\1 ***", text)


def _secrets(options: Mapping[str, object], *, is_secret: bool = False) -> Iterator[str]:
    for name, value in options.items():
        is_hidden = is_secret or _SECRET_OPTION.search(str(name)) is not None
        if isinstance(value, Mapping):
            yield from _secrets(value, is_secret=is_hidden)
        elif isinstance(value, str) and is_hidden:
            yield value
        elif isinstance(value, str) and "@" in value:  # the URL of a proxy or an endpoint
            yield from filter(None, (_parts_of(value).username, _parts_of(value).password))


@dataclass(frozen=True)
class HubOptions:
    """Options for a hub repository: the revision, the cache and the download.

    ``revision`` is a branch, tag or commit. ``cache_dir`` replaces the cache of huggingface_hub. ``token`` is a
    token, True for the stored one, False for none, or None for the stored one if it exists. ``subfolder`` also
    applies to local folders.
    """

    revision: str | None = None
    cache_dir: str | None = None
    token: str | bool | None = field(default=None, repr=False)
    local_files_only: bool = False
    subfolder: str = ""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of a model: its weights (safetensors, or else torch's), and the small files.

    Attributes:
        code: whether Python files are included, for users who want to run them.
        extra: further files of weights, if they exist.
    """

    code: bool = False
    extra: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The files of a PEFT adapter: its tensors and its config."""


WantedFiles: TypeAlias = ModelFiles | AdapterFiles


def is_local(name_or_path: str | os.PathLike[str]) -> bool:
    """Check if this is a path, existing or not, rather than a URL or the name of a repository.

    Paths are all path objects, strings that exist as a path, and strings that look like one ("./x", "/x", "~/x",
    "a/b/c").
    """
    if not isinstance(name_or_path, str):
        return True
    if is_url(name_or_path):
        return False
    looks_like_path = name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1
    return looks_like_path or "\\" in name_or_path or os.path.exists(name_or_path)


def local_path(name_or_path: str | os.PathLike[str], options: HubOptions) -> Path | None:
    """Return the local folder or file of this name, or None for the name of a repository.

    Raises:
        StorageError: it is a URL, a path that does not exist, or a subfolder that leads out of the folder.
    """
    # What looks like a path is one, whether it exists or not. So a typing error is no request to the hub.
    named = os.fspath(name_or_path)
    if is_url(named):
        raise StorageError(f"{shown(without_secrets(named))}: is a URL. Download it, and pass its folder")
    require_subfolder(named, options)
    if not is_local(name_or_path):
        return None
    path = Path(named).expanduser()
    if path.is_file() and options.subfolder:
        raise StorageError(f"{path}: is a file, which has no subfolder. Leave subfolder out")
    place = path / options.subfolder
    if not place.exists():
        # A path object is never the name of a repository.
        is_name = isinstance(name_or_path, str)
        hint = " (for a repository of the Hugging Face hub, write 'organization/name')" if is_name else ""
        raise StorageError(f"{place}: no such directory. Check the path{hint}")
    return place


def require_subfolder(named: str, options: HubOptions) -> None:
    """Raise StorageError if the subfolder leads out of the checkpoint's folder."""
    fault = unsafe_name_reason(options.subfolder) if options.subfolder else None
    if fault is not None:
        raise StorageError(
            f"{shown(named)}: subfolder {options.subfolder!r} is refused, {fault}. "
            "Name it relative to the checkpoint's folder, as in 'a/b'"
        )
