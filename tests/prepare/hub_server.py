"""A small stand-in for the Hugging Face hub: serves model directories, counts bytes, and refuses as the hub does."""

from __future__ import annotations

import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import TracebackType

COMMIT = "a" * 40


class HubServer:
    """Context manager. `url` is for HF_ENDPOINT; `bytes_sent[file name]` counts bodies; repositories are owner/name."""

    def __init__(
        self, repositories: dict[str, Path], gated: frozenset[str] = frozenset(), broken_gets: int = 0
    ) -> None:
        self.repositories, self.gated, self.broken_gets = repositories, gated, broken_gets
        self.bytes_sent: dict[str, int] = {}
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> HubServer:
        Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _answer(
        self, status: int, body: bytes = b"", headers: dict[str, str] | None = None, size: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {
            "X-Repo-Commit": COMMIT,
            "Content-Length": str(size or len(body)),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        file = re.match(r"/([^/]+/[^/]+)/resolve/([^/]+)/([^?]+)", self.path)
        api = re.match(r"/api/models/([^/]+/[^/?]+)", self.path)
        match = file or api
        name = match.group(1) if match else ""
        if name in self.hub.gated:
            return self._answer(403, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"})
        if name not in self.hub.repositories:
            return self._answer(401, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "none"})
        if file and file.group(2) not in ("main", COMMIT):
            return self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if api:
            return self._api(name)
        assert file is not None
        return self._file(self.hub.repositories[name] / file.group(3))

    def _api(self, name: str) -> None:
        if "/tree/" in self.path:
            return self._answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        files = [{"rfilename": path.name} for path in self.hub.repositories[name].iterdir()]
        return self._answer(200, json.dumps({"id": name, "sha": COMMIT, "siblings": files}).encode())

    def _file(self, path: Path) -> None:
        if not path.is_file():
            return self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        body, status, headers = path.read_bytes(), 200, {"ETag": f'"{path.stat().st_size}"'}
        asked = re.match(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked and self.command == "GET":
            if self.hub.broken_gets:
                self.hub.broken_gets -= 1
                return self._answer(503)
            start, last = int(asked.group(1)), int(asked.group(2))
            headers["Content-Range"] = f"bytes {start}-{last}/{len(body)}"
            body, status = body[start : last + 1], 206
        if self.command == "GET":
            self.hub.bytes_sent[path.name] = self.hub.bytes_sent.get(path.name, 0) + len(body)
        return self._answer(status, body, headers, len(body))
