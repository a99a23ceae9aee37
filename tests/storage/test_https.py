"""Reading over TLS, from a server of Python's own, which knows no ranges."""

from __future__ import annotations

import socket
import socketserver
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from shardwise.errors import StorageError
from shardwise.storage.reading.remote_reader import RemoteReader
from shardwise.storage.reading.transport import Retries

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
    def do_GET(self) -> None:
        if self.path != "/away":
            super().do_GET()
            return
        self.send_response(302)
        self.send_header("Location", "http://127.0.0.1:1/away")
        self.end_headers()

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
    url, certificate = server
    options = {"ssl_context": ssl.create_default_context(cafile=str(certificate))}
    with RemoteReader(url, storage_options=options) as reader:
        assert reader.read("a", 0, len(CONTENT)) == CONTENT
        with pytest.raises(StorageError, match="the server ignores Range"):
            reader.read("a", 5, 10)
        with pytest.raises(StorageError, match="no such file") as caught:
            reader.size("absent")
        assert isinstance(caught.value.__cause__, FileNotFoundError)
        assert reader.identity("a").startswith("Last-Modified ")
        with pytest.raises(StorageError, match="https:// leads to http://"):
            reader.size("away")


@pytest.fixture
def proxy() -> Iterator[tuple[str, list[bytes]]]:
    """The URL of a proxy, and what it was asked."""
    asked: list[bytes] = []

    def pump(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    class Tunnel(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            asked.append(self.request.recv(65536))
            host, _, port = asked[-1].split()[1].decode().partition(":")
            with socket.create_connection((host, int(port))) as server:
                self.request.sendall(b"HTTP/1.1 200 Connected\r\n\r\n")
                back = threading.Thread(target=pump, args=(server, self.request))
                back.start()
                pump(self.request, server)
                back.join()

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Tunnel) as tunnel:
        thread = threading.Thread(target=tunnel.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://user:word@127.0.0.1:{tunnel.server_address[1]}", asked
        tunnel.shutdown()
        thread.join()


def test_a_proxy_connects_to_the_server_and_sees_nothing_else(
    server: tuple[str, Path], proxy: tuple[str, list[bytes]]
) -> None:
    url, certificate = server
    context = ssl.create_default_context(cafile=str(certificate))
    options = {"ssl_context": context, "proxy": proxy[0], "headers": {"X-Key": "secret"}}
    with RemoteReader(url, storage_options=options) as reader:
        assert reader.read("a", 0, len(CONTENT)) == CONTENT
    assert proxy[1][0].startswith(f"CONNECT {url.removeprefix('https://')} HTTP/1.".encode())
    assert b"Proxy-Authorization: Basic dXNlcjp3b3Jk" in proxy[1][0]
    assert b"secret" not in b"".join(proxy[1])


def test_a_certificate_that_is_not_trusted_is_reported_at_once(server: tuple[str, Path]) -> None:
    url, _ = server
    with (
        RemoteReader(url, retries=Retries(first_wait_s=60)) as reader,
        pytest.raises(StorageError, match=r"certificate is not trusted .*ssl_context"),
    ):
        reader.size("a")
