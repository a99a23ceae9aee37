"""As much of the hub as a push needs: repositories that are made, and commits of whole small files."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


class StubHub:
    """What it has been told. ``broken``: commits fail."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.tokens: set[str] = set()
        self.broken = False
        self.url = ""

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        place = path.partition("?")[0]
        if method == "POST" and place == "/api/repos/create":
            self.made.append(json.loads(body))
            told = self.made[-1]
            name = f"{told.get('organization', 'me')}/{told['name']}"
            return 200, {"url": f"{self.url}/{name}", "name": name}
        if method == "POST" and "/preupload/" in place:
            files = [{**file, "uploadMode": "regular", "shouldIgnore": False} for file in json.loads(body)["files"]]
            return 200, {"files": files}
        if method == "POST" and "/commit/" in place:
            if self.broken:
                return 403, {"error": "you may not"}
            for line in body.splitlines():
                value = json.loads(line)
                if value["key"] == "file":
                    self.files[value["value"]["path"]] = base64.b64decode(value["value"]["content"])
            return 200, {"commitUrl": f"{self.url}/me/mine/commit/1", "commitOid": "1" * 40, "pullRequestUrl": None}
        if method == "GET":
            return 200, {
                "id": "me/mine",
                "sha": "0" * 40,
                "siblings": [],
                "private": False,
                "tags": [],
                "files": [],
            }
        return 404, {"error": f"{method} {place}"}


@contextmanager
def stub_hub() -> Iterator[StubHub]:
    """A hub on this machine, on a port that nobody else has."""
    hub = StubHub()

    class Handler(BaseHTTPRequestHandler):
        def _do(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            hub.tokens.add(self.headers.get("Authorization") or "")
            status, value = hub.answer(self.command, self.path, body)
            content = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = _do  # noqa: N815 - as http.server has it

        def log_message(self, *_: Any) -> None:
            """Nothing is logged."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
