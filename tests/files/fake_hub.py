"""A hub of one commit."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import _snapshot_download, constants
from huggingface_hub.hf_api import RepoFile

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def snapshot_in(cache: Path) -> Path:
    """The folder of org/name in a cache of the hub."""
    return cache / "models--org--name" / "snapshots" / COMMIT


@contextmanager
def hub_that_has(
    repository: Sequence[str] | Mapping[str, bytes], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[dict[str, object]]]:
    """A hub whose one commit has these files (empty where only names are given), and the options of downloads.

    What is downloaded, and what else is written to the cache, is up to ``huggingface_hub``. Only requests are
    answered here.
    """
    seen: list[dict[str, object]] = []
    contents = dict(repository) if isinstance(repository, Mapping) else dict.fromkeys(repository, b"")

    def repo_info(self: object, repo_id: str, **options: object) -> SimpleNamespace:
        return SimpleNamespace(sha=COMMIT, siblings=[SimpleNamespace(rfilename=name) for name in contents])

    def list_repo_tree(self: object, **options: object) -> list[RepoFile]:
        return [RepoFile(path=name, size=len(content), oid=COMMIT) for name, content in contents.items()]

    def download_file(repo_id: str, *, filename: str, **options: object) -> str:
        file = snapshot_in(cache) / filename
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(contents[filename])
        return str(file)

    def download(repo_id: str, **options: object) -> str:
        if not options.get("local_files_only"):
            seen.append({name: value for name, value in options.items() if "patterns" not in name})
        return str(snapshot_download(repo_id, **options))

    snapshot_download = huggingface_hub.snapshot_download
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", repo_info)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_tree", list_repo_tree)
    monkeypatch.setattr(_snapshot_download, "hf_hub_download", download_file)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    yield seen
