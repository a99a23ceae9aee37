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
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
_MODEL = ("model.safetensors", "model.safetensors.index.json")
_TORCH = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_INDEX = re.compile(r".*\.(safetensors|bin)\.index(\.[^./]+)?\.json")
_SECOND_COPIES = ("consolidated*", "adapter_model*")
_MOST_JSON_BYTES = 100_000_000
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ASKING_S = 10.0
"""Seconds that the hub is waited for before the cache is taken for what there is."""


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
        named = _content(folder / name).get("weight_map")
        return sorted(there.intersection(map(str, named.values()))) if isinstance(named, dict) else []

    safetensors = [name for name in sorted(there) if name.endswith(".safetensors")]
    adapters = [name for name in _ADAPTERS if name in there][:1]
    if isinstance(wanted, AdapterFiles):
        return adapters
    if variant is not None:
        names_of = ("model.{}.safetensors", "model.safetensors.index.{}.json")
        torch_names_of = ("pytorch_model.{}.bin", "pytorch_model.bin.index.{}.json")
        choices = [of(name.format(variant)) for name in (*names_of, *torch_names_of)]
    else:
        own = [name for name in safetensors if not any(fnmatchcase(name, copy) for copy in _SECOND_COPIES)]
        choices = [
            of(str(_content(folder / "config.json").get("transformers_weights"))),
            *(of(name) for name in _MODEL),
            own,
            [name for name in safetensors if name not in adapters],
            *(of(name) for name in _TORCH),
            adapters,
        ]
    chosen = next(filter(None, choices), [])
    return [*chosen, *(name for name in wanted.extra if name in there and name not in chosen)]


def _content(file: Path) -> dict[str, object]:
    """The content of a JSON file; nothing where it cannot be read, which whoever opens it afterwards will tell."""
    try:
        content = json.loads(file.read_bytes()) if file.stat().st_size <= _MOST_JSON_BYTES else {}
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
    prefix = f"{options.subfolder.strip('/')}/" if options.subfolder else ""
    found = _listing(repo_id, options if download else replace(options, local_files_only=True))
    pinned = replace(options, revision=found.commit)
    if found.files is None:
        folder = _in_cache(repo_id, options) / "snapshots" / found.commit / prefix
    else:
        below = [name.removeprefix(prefix) for name in found.files if name.startswith(prefix)]
        names = [name for name in below if "/" not in name]
        patterns = (*_SMALL, "*.py") if isinstance(wanted, ModelFiles) and wanted.code else _SMALL
        small = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
        folder = _fetch(repo_id, pinned, prefix, small)
        if chosen := weights(names, folder, wanted, options.variant):
            folder = _fetch(repo_id, pinned, prefix, chosen)
        note_commit(repo_id, options, found.commit)
    if not folder.is_dir():
        raise StorageError(
            f"{repo_id} at revision {options.revision or 'main'}: no folder {options.subfolder!r} with weights or "
            "json files in it. Check subfolder, or download it first"
        )
    return folder


def commit_of(repo_id: str, options: HubOptions, *, kind: str = "model") -> str:
    """The commit that the revision names: asked of the hub, and where it cannot be reached, of the cache.

    Raises :class:`StorageError` where neither knows it.
    """
    revision = options.revision or "main"
    return revision if _COMMIT.fullmatch(revision) else _listing(repo_id, options, kind).commit


def note_commit(repo_id: str, options: HubOptions, commit: str) -> None:
    """Leave in the cache what a revision named, as a download by it would, for whoever is offline later."""
    noted = _ref(repo_id, options)
    if _COMMIT.fullmatch(noted.name):
        return
    with contextlib.suppress(OSError):  # a cache that cannot be written to has been read all the same
        if _in_cache(repo_id, options).is_dir() and not (noted.is_file() and noted.read_text() == commit):
            noted.parent.mkdir(parents=True, exist_ok=True)
            fresh = noted.with_name(f"{noted.name}.{os.getpid()}.new")
            fresh.write_text(commit)
            fresh.replace(noted)


@dataclass(frozen=True, slots=True)
class _Listing:
    """A commit of a repository, and the names of its files; None for what the cache has of them."""

    commit: str
    files: tuple[str, ...] | None


def _listing(repo_id: str, options: HubOptions, kind: str = "model") -> _Listing:
    """The state that the hub tells of, or where it cannot or must not be asked, the cache."""
    with hub_errors_named(repo_id, options):
        from huggingface_hub.errors import HFValidationError, RevisionNotFoundError

        try:
            return _ask(repo_id, options, kind)
        except Exception as error:
            noted = _ref(repo_id, options, kind)
            is_known = noted.is_file() or (noted.parent.parent / "snapshots" / noted.name).is_dir()
            if isinstance(error, (HFValidationError, RevisionNotFoundError)) or not is_known:
                raise
            return _Listing(noted.read_text().strip() if noted.is_file() else noted.name, None)


def _ask(repo_id: str, options: HubOptions, kind: str) -> _Listing:
    """The state that the hub tells of; raises what its library does, when it cannot or must not be asked."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import LocalEntryNotFoundError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # documented there

    validate_repo_id(repo_id)
    if options.local_files_only or constants.HF_HUB_OFFLINE:
        raise LocalEntryNotFoundError(f"not in the cache {place_of_cache(options)}, and downloading is off")
    info = HfApi(token=options.token).repo_info(
        repo_id, revision=options.revision, repo_type=kind, timeout=_ASKING_S
    )
    if info.sha is None:
        raise LocalEntryNotFoundError("the hub named no commit")
    return _Listing(info.sha, tuple(file.rfilename for file in getattr(info, "siblings", None) or ()))


def place_of_cache(options: HubOptions) -> Path:
    """The folder of the hub's cache."""
    from huggingface_hub import constants

    return Path(options.cache_dir or constants.HF_HUB_CACHE).expanduser().absolute()


def _in_cache(repo_id: str, options: HubOptions, kind: str = "model") -> Path:
    """The folder of a repository in the cache."""
    return place_of_cache(options) / f"{kind}s--{repo_id.replace('/', '--')}"


def _ref(repo_id: str, options: HubOptions, kind: str = "model") -> Path:
    """The file in which the cache notes the commit of a revision."""
    return _in_cache(repo_id, options, kind) / "refs" / (options.revision or "main")


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
    "LocalEntryNotFoundError": "Allow downloading (local_files_only, HF_HUB_OFFLINE), or download it first",
    "Exception": "Check connection, token and disk space, or download it by other means and pass its folder",
}


@contextmanager
def hub_errors_named(repo_id: str, options: HubOptions) -> Iterator[None]:
    """Turn what huggingface_hub raises into a StorageError that says what to do."""
    try:
        yield
    except Exception as error:
        kind = next(found for base in type(error).__mro__ if (found := base.__name__) in _REMEDIES)
        raise StorageError(
            f"{shown(repo_id)} at revision {options.revision or 'main'}: is no directory here, and cannot be had "
            f"from the Hugging Face hub ({type(error).__name__}: {' '.join(str(error).split())}). {_REMEDIES[kind]}"
        ) from error
