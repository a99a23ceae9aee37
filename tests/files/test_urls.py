"""URLs: parsing, redaction, opening."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.http_store import HttpStore

from shardwise.core.errors import StorageError
from shardwise.files.local_reader import LocalReader, open_storage
from shardwise.files.objects import RemoteReader
from shardwise.files.remote import resolve
from shardwise.files.urls import HubOptions, is_local, is_url, redact, split_file, without_secrets


@pytest.mark.parametrize("url", ["s3://bucket/x", "https://host", "HF://org/name", "abfs+x.y-1://c", "memory://"])
def test_urls(url: str) -> None:
    assert is_url(url)
    assert not is_local(url)


@pytest.mark.parametrize("path", ["org/name", "/a/b", "./a", "C:\\a", "a:b", "1s3://x", "://x", "", Path("s3://b")])
def test_paths_that_are_not_urls(path: object) -> None:
    assert not is_url(path)


@pytest.mark.parametrize(
    ("url", "folder", "file"),
    [
        ("https://h/f", "https://h/f", None),
        ("https://h/f/model.safetensors", "https://h/f", "model.safetensors"),
        ("https://h/f/model.safetensors?sig=1&x=a/b", "https://h/f?sig=1&x=a/b", "model.safetensors"),
        ("https://h/model.safetensors.index.json", "https://h", "model.safetensors.index.json"),
        ("https://h/f/my%20model.safetensors", "https://h/f", "my model.safetensors"),
        ("s3://b/f/my%20model.safetensors", "s3://b/f", "my%20model.safetensors"),
        ("https://h/f/config.json", "https://h/f/config.json", None),
        ("https://h.safetensors", "https://h.safetensors", None),
        ("s3://b/models.safetensors/", "s3://b/models.safetensors/", None),
    ],
)
def test_a_url_that_names_a_file(url: str, folder: str, file: str | None) -> None:
    assert split_file(url) == (folder, file)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://user:pw@host:8080/a/b/?sig=1#frag", "https://host:8080/a/b"),
        ("s3://key:secret@bucket/a", "s3://bucket/a"),
        ("HTTPS://host/", "https://host"),
        ("hf://org/name@main/sub", "hf://org/name@main/sub"),
        ("hf://org/name@main", "hf://org/name@main"),
        ("https://user:pw@[host/a", "https:"),
    ],
)
def test_shown_parts_of_urls(url: str, shown: str) -> None:
    assert without_secrets(url) == shown


def test_credentials_are_taken_out_of_the_texts_of_others() -> None:
    options = {
        "key": "AKIA1234",
        "client_kwargs": {"headers": {"x": "nested9"}},
        "anon": False,
        "proxy": "http://u:proxypw@p",
    }
    text = redact(
        "GET https://u:p@h/x?X-Signature=q&b=c failed for AKIA1234 (nested9), alice hunter22 sig=deadbeef proxypw, "
        "Authorization: Bearer abc.DEF-1; see https://docs.host/page.",
        "s3://alice:hunter22@bucket/x?sig=deadbeef",
        options,
    )
    assert text == (
        "GET https://h/x failed for *** (***), *** *** *** ***, Authorization: Bearer ***; see https://docs.host/page."
    )


def test_words_too_short_to_be_secrets_stay() -> None:
    assert redact("abc is the alphabet", "s3://b", {"key": "abc"}) == "abc is the alphabet"


def test_a_url_that_is_invalid_is_an_error_of_the_storage() -> None:
    with pytest.raises(StorageError, match="s3:.* failed") as caught:
        open_storage("s3://user:pw@[host/a")
    assert "pw" not in str(caught.value)
    assert redact("GET https://u:p@h/x", "s3://user:pw@[host/a", {}) == "GET https://h/x"


# Opening


def test_a_folder_and_a_file_are_opened_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"123")
    for path, file in ((tmp_path, None), (tmp_path / "x.safetensors", "x.safetensors"), (str(tmp_path), None)):
        opened = open_storage(path)
        with opened.reader as reader:
            assert isinstance(reader, LocalReader)
            assert opened.file == file
            assert reader.read("x.safetensors", 0, 3) == b"123"


def test_a_url_is_opened_in_place() -> None:
    with HttpStore({"org/model/a.safetensors": b"123", "org/model/sub/b": b"45"}) as store:
        opened = open_storage(f"{store.url}/org/model/a.safetensors")
        with opened.reader as reader:
            assert isinstance(reader, RemoteReader)
            assert opened.file == "a.safetensors"
            assert reader.read("a.safetensors", 0, 3) == b"123"
        opened = open_storage(f"{store.url}/org/model?x=1", HubOptions(subfolder="sub"))
        with opened.reader as reader:
            assert opened.file is None
            assert reader.read("b", 0, 2) == b"45"
            assert reader.root == f"{store.url}/org/model/sub"


def test_options_of_the_storage_reach_it() -> None:
    with HttpStore({"a": b"1"}) as store:
        options = {"client_options": {"default_headers": {"X-Key": "k"}}}
        with RemoteReader(store.url, storage_options=options) as reader:
            reader.size("a")
        assert store.log[0].headers["x-key"] == "k"


@pytest.mark.parametrize(
    ("url", "options", "words"),
    [
        ("https://h/f", HubOptions(local_files_only=True), "local_files_only is set"),
        ("https://h/f", HubOptions(subfolder="../x"), "subfolder '../x' is refused"),
        ("https://h/f/x.safetensors", HubOptions(subfolder="x"), "has no subfolder"),
        ("file:///models/x", HubOptions(), "Pass the path without file://"),
        ("nosuch://h/f", HubOptions(), "reading nosuch:// failed"),
        ("hf://org/name@v1", HubOptions(), "the hub is not read in place. Pass the repository's name"),
    ],
)
def test_urls_that_cannot_be_opened_are_explained(url: str, options: HubOptions, words: str) -> None:
    with pytest.raises(StorageError) as caught:
        open_storage(url, options)
    assert words in str(caught.value)
    assert url.partition("?")[0] in str(caught.value)


def test_a_url_is_never_resolved_to_a_folder() -> None:
    with pytest.raises(StorageError, match="https://h/f: is a URL") as caught:
        resolve("https://user:secret@h/f?sig=1")
    assert "secret" not in str(caught.value)


def test_local_reads_load_no_network_code(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    program = (
        "import sys, shardwise; from shardwise.storage import open_storage; "
        "open_storage(sys.argv[1]).reader.read('a', 0, 1); "
        "found = {'obstore', 'huggingface_hub', 'http.client', 'ssl', 'torch', 'pytest'} & set(sys.modules); "
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
