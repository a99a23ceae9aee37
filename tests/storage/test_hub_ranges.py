"""A repository of the hub that is read in place; the hub is a store on this machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from huggingface_hub import HfApi, constants
from tests.formats.building import file_with
from tests.harness import HttpStore
from tests.harness.http_store import Redirect, Status

from shardwise.errors import StorageError
from shardwise.formats.opening import open_checkpoint
from shardwise.storage.names import HubOptions
from shardwise.storage.reading import open_storage
from shardwise.storage.remote import RemoteReader, named_commit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
WEIGHTS = file_with("a", "b", nbytes=1000)
FILES = {"model.safetensors": WEIGHTS, "config.json": b"{}", "fp16/my model.safetensors": WEIGHTS[:-8]}


def info(commit: str = COMMIT) -> bytes:
    siblings = []
    for name, content in FILES.items():
        lfs = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
        more = {"lfs": lfs} if name.endswith(".safetensors") else {}
        siblings.append({"rfilename": name, "size": len(content), "blobId": f"b{len(content)}", **more})
    return json.dumps({"id": "org/name", "modelId": "org/name", "sha": commit, "siblings": siblings}).encode()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpStore]:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    files = {f"org/name/resolve/{COMMIT}/{name}": content for name, content in FILES.items()}
    described = {"api/models/org/name": info(), "api/models/org/name/revision/v1": info()}
    with HttpStore({**files, **described}) as store:
        yield store


def reader_of(hub: HttpStore, url: str = "hf://org/name", **options: object) -> RemoteReader:
    return RemoteReader(url, storage_options={"endpoint": hub.url, "token": False, **options})


def test_a_repository_is_listed_and_read_at_one_commit(hub: HttpStore) -> None:
    with reader_of(hub) as reader:
        assert reader.list() == sorted(FILES)
        assert reader.size("model.safetensors") == len(WEIGHTS)
        assert reader.read("model.safetensors", 3, 500) == WEIGHTS[3:500]
        assert reader.root == "hf://org/name"
    asked = [request.file for request in hub.log]
    file = f"org/name/resolve/{COMMIT}/model.safetensors"
    assert asked == ["api/models/org/name", file, file]  # where it is, and what is in it


@pytest.mark.parametrize("url", ["hf://org/name@v1", "hf://models/org/name@v1/"])
def test_a_revision_is_asked_for(hub: HttpStore, url: str) -> None:
    with reader_of(hub, url) as reader:
        assert reader.read("config.json", 0, 2) == b"{}"
    assert hub.log[0].file == "api/models/org/name/revision/v1"


def test_a_folder_of_a_repository(hub: HttpStore) -> None:
    with reader_of(hub, "hf://org/name/fp16") as reader:
        assert reader.list() == ["my model.safetensors"]
        assert reader.read("my model.safetensors", 0, 9) == WEIGHTS[:9]


def test_the_identity_is_the_hash_of_the_content(hub: HttpStore) -> None:
    with reader_of(hub) as reader:
        sha256 = hashlib.sha256(WEIGHTS).hexdigest()
        assert reader.identity("model.safetensors") == f"sha256 {sha256}, {len(WEIGHTS)} bytes"
        assert reader.identity("config.json") == "blob b2, 2 bytes"


def test_a_push_in_the_middle_changes_nothing(hub: HttpStore) -> None:
    with reader_of(hub) as reader:
        reader.size("model.safetensors")
        hub.replace("api/models/org/name", info("f" * 40))
        assert reader.read("model.safetensors", 0, 9) == WEIGHTS[:9]


def test_the_token_goes_to_the_hub_and_not_where_it_sends_us(hub: HttpStore) -> None:
    with HttpStore({f"org/name/resolve/{COMMIT}/model.safetensors": WEIGHTS}) as cdn:
        hub.inject(Redirect(cdn.url), file="org/name/resolve/*")
        with reader_of(hub, token="hf_secret") as reader:
            assert reader.read("model.safetensors", 0, 9) == WEIGHTS[:9]
            assert reader.read("model.safetensors", 9, 20) == WEIGHTS[9:20]
    assert [request.headers["authorization"] for request in hub.log] == ["Bearer hf_secret"] * 2
    assert [request.headers.get("authorization") for request in cdn.log] == [None] * 2


def test_a_refusal_is_told_once(hub: HttpStore) -> None:
    hub.inject(Status(404))
    with reader_of(hub) as reader, pytest.raises(StorageError, match=r"org/name at revision main: .*404 Not Found"):
        reader.list()
    assert hub.counters.requests == 1


def test_a_hub_that_is_gone_is_told(hub: HttpStore) -> None:
    hub.close()
    with (
        reader_of(hub) as reader,
        pytest.raises(StorageError, match="cannot be had .*ConnectError"),
    ):
        reader.list()


def test_a_checkpoint_is_opened_in_place(hub: HttpStore) -> None:
    with reader_of(hub) as reader:
        index = open_checkpoint(reader)
    assert sorted(index.entries) == ["a", "b"]


def test_options_for_hub_ids_hold_for_urls_of_the_hub(hub: HttpStore, monkeypatch: pytest.MonkeyPatch) -> None:
    options = HubOptions(revision="v1", token="hf_secret", subfolder="fp16")
    opened = open_storage("hf://org/name", options, storage_options={"endpoint": hub.url})
    with opened.reader as reader:
        assert reader.list() == ["my model.safetensors"]
    assert hub.log[0].file == "api/models/org/name/revision/v1"
    assert hub.log[0].headers["authorization"] == "Bearer hf_secret"


def test_unknown_options_are_refused(hub: HttpStore) -> None:
    with reader_of(hub, anon=True) as reader, pytest.raises(StorageError, match="'anon'"):
        reader.read("config.json", 0, 2)


def test_a_link_that_expires_is_asked_for_again(hub: HttpStore) -> None:
    with HttpStore({f"org/name/resolve/{COMMIT}/model.safetensors": WEIGHTS}) as cdn:
        hub.inject(Redirect(cdn.url), file="org/name/resolve/*")
        with reader_of(hub) as reader:
            reader.read("model.safetensors", 0, 9)
            cdn.inject(Status(403), times=1)
            assert reader.read("model.safetensors", 9, 20) == WEIGHTS[9:20]
    assert [request.status for request in hub.log] == [200, 302, 302]


@pytest.mark.parametrize(
    ("url", "revision", "kind", "named"),
    [
        ("hf://org/name", None, "model", f"hf://org/name@{COMMIT}"),
        ("hf://org/name@v1/fp16?x=1", None, "model", f"hf://org/name@{COMMIT}/fp16?x=1"),
        ("hf://datasets/org/name/a/b", "v1", "dataset", f"hf://datasets/org/name@{COMMIT}/a/b"),
        (f"hf://org/name@{'f' * 40}", None, None, f"hf://org/name@{'f' * 40}"),
    ],
)
def test_a_url_that_names_the_commit(
    url: str, revision: str | None, kind: str | None, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which all ranks then take, whatever is pushed meanwhile."""
    asked: list[object] = []

    def repo_info(self: object, repo_id: str, **options: object) -> SimpleNamespace:
        asked.append((repo_id, options["repo_type"]))
        return SimpleNamespace(sha=COMMIT, siblings=[])

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(HfApi, "repo_info", repo_info)
    assert named_commit(url, HubOptions(revision=revision)) == named
    assert asked == ([] if kind is None else [("org/name", kind)])
    RemoteReader(named).close()


def test_a_url_and_an_option_that_name_two_revisions() -> None:
    with pytest.raises(StorageError, match="names revision 'v1', but revision='v2' is asked for"):
        named_commit("hf://org/name@v1", HubOptions(revision="v2"))
