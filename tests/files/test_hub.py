"""From a name to a folder, without a network: local paths, and a hub cache built by hand."""

import os
from dataclasses import replace
from pathlib import Path
from unittest import mock

import huggingface_hub
import pytest
from huggingface_hub import constants, errors
from tests.files.fake_hub import COMMIT, hub_that_has, snapshot_in

from shardwise.core.errors import StorageError
from shardwise.files.remote import record_commit, resolve, resolve_commit
from shardwise.files.urls import AdapterFiles, HubOptions, ModelFiles, WantedFiles, is_local


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A hub cache that holds one snapshot of org/name, made of links as the real one."""
    repository = tmp_path / "cache" / "models--org--name"
    files = {"config.json": b"{}", "model.safetensors": b"weights", "sub/model.safetensors": b"other weights"}
    (repository / "blobs").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    for number, (name, content) in enumerate(files.items()):
        (repository / "blobs" / f"b{number}").write_bytes(content)
        link = repository / "snapshots" / COMMIT / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(repository / "blobs" / f"b{number}")
    return tmp_path / "cache"


def offline(cache: Path, **options: str) -> HubOptions:
    return HubOptions(cache_dir=str(cache), local_files_only=True, **options)


def test_a_directory_is_returned_as_is(tmp_path: Path) -> None:
    assert resolve(str(tmp_path)) == tmp_path
    assert resolve(tmp_path) == tmp_path


def test_a_subfolder_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "sub" / "deeper").mkdir(parents=True)
    assert resolve(tmp_path, HubOptions(subfolder="sub/deeper")) == tmp_path / "sub" / "deeper"
    with pytest.raises(StorageError, match="absent: no such directory"):
        resolve(tmp_path, HubOptions(subfolder="absent"))


def test_a_file_has_no_subfolder(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"")
    with pytest.raises(StorageError, match="has no subfolder"):
        resolve(tmp_path / "x", HubOptions(subfolder="sub"))


@pytest.mark.parametrize("subfolder", ["..", "../other", "/etc", "a/../../b"])
def test_a_subfolder_that_climbs_out_is_refused(tmp_path: Path, subfolder: str) -> None:
    with pytest.raises(StorageError, match="subfolder .* is refused"):
        resolve(tmp_path, HubOptions(subfolder=subfolder))


def test_the_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "models").mkdir()
    assert resolve("~/models") == tmp_path / "models"


@pytest.mark.parametrize("path", ["../absent", "/absent/x", "~/absent", "a/b/c", "org/name/", Path("org/name")])
def test_paths_are_never_requested_from_the_hub(path: str | Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    assert is_local(path)
    with pytest.raises(StorageError, match="no such directory"):
        resolve(path)


def test_names_of_repositories_are_not_local_unless_a_folder_has_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert not is_local("org/name")
    assert not is_local("gpt2")
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert is_local("org/name")
    assert resolve("org/name") == Path("org/name")


def test_a_cached_snapshot_is_found(cache: Path) -> None:
    folder = resolve("org/name", offline(cache))
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert resolve("org/name", offline(cache, revision="main")) == folder
    assert resolve("org/name", offline(cache, revision=COMMIT)) == folder


def test_ranks_that_must_not_download_take_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = resolve("org/name", HubOptions(cache_dir=str(cache)), download=False)
    assert folder.name == COMMIT
    with hub_that_has(["model.safetensors"], cache, monkeypatch) as options_seen:
        options = HubOptions(cache_dir=str(cache))
        for local_only, download in ((True, True), (True, False), (False, False)):
            resolve("org/name", replace(options, local_files_only=local_only), download=download)
        assert options_seen == []
        resolve("org/name", options)
        assert len(options_seen) == 2


def test_what_was_downloaded_is_found_though_the_repository_has_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = HubOptions(cache_dir=str(tmp_path))
    with hub_that_has(["config.json", "model.safetensors", "README.md", "x/y.bin"], tmp_path, monkeypatch):
        folder = resolve("org/name", options)
        assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
        # Other ranks of the machine, which know the commit.
        assert resolve("org/name", replace(options, revision=COMMIT), download=False) == folder
        assert resolve("org/name", replace(options, local_files_only=True)) == folder
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert resolve("org/name", options) == folder
        assert resolve_commit("org/name", options) == COMMIT


def test_a_subfolder_of_a_cached_snapshot(cache: Path) -> None:
    folder = resolve("org/name", offline(cache, subfolder="sub"))
    assert (folder / "model.safetensors").read_bytes() == b"other weights"
    with pytest.raises(StorageError, match="org/name .*no folder 'absent'"):
        resolve("org/name", offline(cache, subfolder="absent"))


def test_files_that_are_not_cached_are_named_if_offline(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = r"org/other at revision main: .*LocalEntryNotFoundError.*Run hf download NAME\. Only loads"
    with pytest.raises(StorageError, match=words):
        resolve("org/other", offline(cache))
    with pytest.raises(StorageError, match="org/name at revision v2: .*LocalEntryNotFoundError"):
        resolve("org/name", offline(cache, revision="v2"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(StorageError, match=words):
        resolve("org/other", HubOptions(cache_dir=str(cache)), download=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(StorageError, match=words):
        resolve("org/other", HubOptions(cache_dir=str(cache)))


def test_a_name_that_no_repository_can_have(cache: Path) -> None:
    with pytest.raises(StorageError, match="is not a local directory, .*HFValidationError"):
        resolve("not a name!", offline(cache))


def test_which_files_are_requested_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = (
        "config.json model-00001-of-00002.safetensors consolidated.safetensors pytorch_model.bin "
        "pytorch_model.bin.index.json modeling_x.py tokenizer.json tokenizer.model chat_template.jinja merges.txt "
        "original/model.safetensors fp16/model.safetensors fp16/config.json fp16/deeper/model.safetensors"
    )
    repository = dict.fromkeys(names.split(), b"") | {
        "model.safetensors.index.json": b'{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'
    }
    with hub_that_has(repository, tmp_path, monkeypatch) as options_seen:
        folder = resolve("org/name", HubOptions(revision="v1", token="secret", cache_dir=str(tmp_path)))
        wanted = (
            "chat_template.jinja config.json merges.txt model-00001-of-00002.safetensors "
            "model.safetensors.index.json pytorch_model.bin.index.json tokenizer.json tokenizer.model"
        )
        assert sorted(path.name for path in folder.rglob("*")) == wanted.split()
    expected = {"revision": COMMIT, "token": "secret", "cache_dir": str(tmp_path)}
    assert options_seen == [expected, expected]


def test_only_the_subfolder_is_requested_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = ["model.safetensors", "fp16/model.safetensors", "fp16/x.py", "fp16/deeper/model.safetensors"]
    with hub_that_has(repository, tmp_path, monkeypatch):
        folder = resolve("org/name", HubOptions(subfolder="fp16", cache_dir=str(tmp_path)))
    assert folder == snapshot_in(tmp_path) / "fp16"
    assert list(snapshot_in(tmp_path).rglob("*.*")) == [folder / "model.safetensors"]


_INDEX = b'{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
_SHARDS = {f"model-0000{number}-of-00002.safetensors": b"" for number in (1, 2)}


_FILE, _HALF, _LIST = "model.safetensors", "model.fp16.safetensors", "model.safetensors.index.json"


def files(*names: str, **contents: bytes) -> dict[str, bytes]:
    """Files that are empty, and JSON files with a content, by their names up to the ending."""
    return {**dict.fromkeys(names, b""), **{f"{name}.json": content for name, content in contents.items()}}


@pytest.mark.parametrize(
    ("repository", "wanted", "downloaded"),
    [
        (files(_FILE, _HALF, "pytorch_model.bin", *_SHARDS), ModelFiles(), {_FILE}),
        ({**files(*_SHARDS, "ema.safetensors", _HALF), _LIST: _INDEX}, ModelFiles(), {_LIST, *_SHARDS}),
        (
            files("w.safetensors", "x.safetensors", config=b'{"transformers_weights": "w.safetensors"}'),
            ModelFiles(extra=("x.safetensors", "absent.safetensors")),
            {"config.json", "w.safetensors", "x.safetensors"},
        ),
        (files(_FILE, "modeling_x.py", "deeper/y.py"), ModelFiles(code=True), {_FILE, "modeling_x.py"}),
        (
            files("adapter_model.safetensors", "adapter_model.bin", "a.py", adapter_config=b"{}"),
            AdapterFiles(),
            {"adapter_config.json", "adapter_model.safetensors"},
        ),
        (
            {
                **files("model-1.bin", "optimizer.bin", "training_args.bin", "fp16/pytorch_model.bin"),
                "pytorch_model.bin.index.json": b'{"weight_map": {"a": "model-1.bin"}}',
            },
            ModelFiles(),
            {"pytorch_model.bin.index.json", "model-1.bin"},
        ),
        (files("consolidated.safetensors", "x.py"), ModelFiles(), {"consolidated.safetensors"}),
        (
            files("adapter_model.bin", "optimizer.bin", adapter_config=b"{}"),
            AdapterFiles(),
            {"adapter_config.json", "adapter_model.bin"},
        ),
        (
            {_LIST: b'{"weight_map": {"a": "../../x.safetensors"}}', "y.safetensors": b""},
            ModelFiles(),
            {_LIST, "y.safetensors"},
        ),
    ],
)
def test_only_files_that_are_read_are_downloaded(
    repository: dict[str, bytes],
    wanted: WantedFiles,
    downloaded: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with hub_that_has(repository, tmp_path, monkeypatch):
        folder = resolve("org/name", HubOptions(cache_dir=str(tmp_path)), wanted=wanted)
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*.*")} == downloaded


def test_a_revision_is_the_commit_that_the_hub_or_the_cache_names(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = "f" * 40
    assert resolve_commit("org/name", offline(cache)) == COMMIT
    assert resolve_commit("org/name", offline(cache, revision=other)) == other
    with pytest.raises(StorageError, match="org/name at revision v2: .*LocalEntryNotFoundError"):
        resolve_commit("org/name", offline(cache, revision="v2"))
    with hub_that_has([], cache, monkeypatch):
        assert resolve_commit("org/name", HubOptions(cache_dir=str(cache), revision="v2")) == COMMIT
    record_commit("org/name", HubOptions(cache_dir=str(cache), revision="refs/pr/1"), other)
    (cache / "models--org--name" / "snapshots" / other).mkdir()
    assert resolve_commit("org/name", offline(cache, revision="refs/pr/1")) == other

    class ConnectError(Exception):
        pass

    def unreachable(*arguments: object, **options: object) -> None:
        raise ConnectError("no route")

    ConnectError.__module__ = "httpx"
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", unreachable)
    assert resolve_commit("org/name", HubOptions(cache_dir=str(cache))) == COMMIT
    with pytest.raises(StorageError, match=r"cannot be downloaded .*\(ConnectError: no route\)"):
        resolve_commit("org/name", HubOptions(cache_dir=str(cache), revision="v2"))


def test_the_commit_of_a_revision_is_there_at_any_time(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options, noted = HubOptions(cache_dir=str(cache)), cache / "models--org--name" / "refs" / "main"
    before = noted.stat()
    record_commit("org/name", options, COMMIT)
    assert noted.stat() == before
    with noted.open() as reader:
        record_commit("org/name", options, "f" * 40)
        assert reader.read() == COMMIT
    assert noted.read_text() == "f" * 40
    monkeypatch.setattr(os, "replace", mock.Mock(side_effect=OSError("the disk is full")))
    record_commit("org/name", options, COMMIT)
    assert [file.name for file in noted.parent.iterdir()] == ["main"]
    assert noted.read_text() == "f" * 40


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("GatedRepoError", "Accept the terms on its page"),
        ("RepositoryNotFoundError", "pass a token if it is private"),
        ("RevisionNotFoundError", "Pass one of its branches"),
        ("HfHubHTTPError", "Check connection, token and disk space"),
        ("TransportError", "Check connection, token and disk space"),  # of a library that nobody knows
    ],
)
def test_errors_of_the_hub_name_the_remedy(kind: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error_class = getattr(errors, kind, type("TransportError", (Exception,), {}))

    def refuse(*arguments: object, **options: object) -> str:
        if options.get("local_files_only"):
            raise errors.LocalEntryNotFoundError("not there")
        error = error_class.__new__(error_class)  # the constructors want an HTTP response
        error.args = ("refused",)
        raise error

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", refuse)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(StorageError) as caught:
        resolve("org/name", HubOptions(revision="v3"))
    assert words in str(caught.value)
    assert "org/name at revision v3" in str(caught.value)
    assert isinstance(caught.value.__cause__, error_class)
