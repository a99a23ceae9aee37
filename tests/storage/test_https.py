"""Reading over TLS, from a server of Python's own, which knows no ranges."""

import ssl
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from shardwise.errors import StorageError
from shardwise.storage.remote import RemoteReader

CONTENT = bytes(range(256)) * 1000

# For localhost, signed by itself, valid for a hundred years; it protects nothing.
CERTIFICATE = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgX7SZjLGSnY7ES3Q3
4WuoPXBHz320bEJl0PsYTEuBrZOhRANCAAQoW0zI5fKy3FWGysr2GQVEsTE5FzMI
i5zfjAFVD4lYtDM6gTlGXvmN6BAHUno9IGzQJuXdJ2hkBygfT4F93GBj
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBmzCCAUGgAwIBAgIUHYlSCpHoJRckcM1UnGgRXMfs+fkwCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyMTA5NTgwOVoYDzIxMjYxMDI4
MDk1ODA5WjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAAQoW0zI5fKy3FWGysr2GQVEsTE5FzMIi5zfjAFVD4lYtDM6gTlGXvmN
6BAHUno9IGzQJuXdJ2hkBygfT4F93GBjo28wbTAdBgNVHQ4EFgQUq6ib29l/DDWd
kfOh7U5DPoeUGz8wHwYDVR0jBBgwFoAUq6ib29l/DDWdkfOh7U5DPoeUGz8wDwYD
VR0TAQH/BAUwAwEB/zAaBgNVHREEEzARgglsb2NhbGhvc3SHBH8AAAEwCgYIKoZI
zj0EAwIDSAAwRQIgfBIS8DH+YsVrcXjgZy73c35YZuJMZlurkGmxarBIDXkCIQDn
SBAV4puhhVmn/eeHiK2gRfZkxMD61hRlhmZEDMzbJg==
-----END CERTIFICATE-----
"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


class QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *arguments: object) -> None:
        pass  # clients that do not trust us hang up


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Its URL, and the certificate's file."""
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a").write_bytes(CONTENT)
    certificate = tmp_path / "certificate.pem"
    certificate.write_text(CERTIFICATE)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with QuietServer(("127.0.0.1", 0), partial(Quiet, directory=tmp_path / "files")) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"https://127.0.0.1:{server.server_address[1]}", certificate
        server.shutdown()
        thread.join()


def test_files_are_read_over_tls(server: tuple[str, Path]) -> None:
    url, _ = server
    options = {"client_options": {"allow_invalid_certificates": True}}
    with RemoteReader(url, storage_options=options) as reader:
        assert reader.read("a", 0, len(CONTENT)) == CONTENT
        with pytest.raises(StorageError, match="Range request not supported"):
            reader.read("a", 5, 10)
        with pytest.raises(StorageError, match="no such file") as caught:
            reader.size("absent")
        assert isinstance(caught.value.__cause__, FileNotFoundError)
        assert reader.identity("a").startswith("changed 20")


def test_a_certificate_that_is_not_trusted_is_an_error(server: tuple[str, Path]) -> None:
    url, _ = server
    with (
        RemoteReader(url, storage_options={"retry_config": {"max_retries": 0}}) as reader,
        pytest.raises(StorageError, match="a in https://.*error sending request"),
    ):
        reader.size("a")
