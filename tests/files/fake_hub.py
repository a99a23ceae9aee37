"""A hub of one commit."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import constants

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub_that_has(
    repository: Sequence[str] | Mapping[str, bytes], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[dict[str, object]]]:
    """A hub whose one commit has these files (empty where only names are given), filtered by the real rules."""
    seen: list[dict[str, object]] = []
    contents = dict(repository) if isinstance(repository, Mapping) else dict.fromkeys(repository, b"")

    def repo_info(self: object, repo_id: str, **options: object) -> SimpleNamespace:
        return SimpleNamespace(sha=COMMIT, siblings=[SimpleNamespace(rfilename=name) for name in contents])

    def download(
        repo_id: str, *, allow_patterns: Sequence[str] = (), ignore_patterns: Sequence[str] = (), **options: object
    ) -> str:
        if options.get("local_files_only"):
            return str(in_cache(repo_id, **options))
        seen.append(options)
        for name in huggingface_hub.utils.filter_repo_objects(
            contents, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        ):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(contents[name])
        return str(folder)

    in_cache = huggingface_hub.snapshot_download
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", repo_info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    yield seen
