"""An HTTP proxy on loopback that hurts chosen requests: answers lost, bodies cut, refusals, delays.

It stands before a real S3 server, which still does what it is asked: so a test can lose the answer of a put
that happened. Without a server behind it, it accepts every upload and keeps nothing. Rules look at "METHOD
/path?query"; all requests are logged.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Reply:
    """An answer of the server, or one that is made up."""

    status: int
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""

    def header(self, name: str, value: str) -> Reply:
        """The same answer with one header replaced."""
        kept = [(n, v) for n, v in self.headers if n.lower() != name.lower()]
        return Reply(self.status, [*kept, (name, value)], self.body)


@dataclass
class Request:
    """What a client asked. `began` and `ended` are seconds; `served` are the body bytes it got back."""

    target: str  # "METHOD /path?query"
    headers: Mapping[str, str]
    body: bytes
    began: float
    ended: float = 0.0
    served: int = 0
    status: int = 0  # 0: it got no answer


class Lost(Exception):  # noqa: N818
    """Raised by a fault: the connection is closed; with `reset` by a RST, else in order."""

    def __init__(self, reset: bool = False) -> None:
        self.reset = reset


Forward = Callable[[], Reply]
Fault = Callable[[Request, Forward], Reply | tuple[Reply, int]]  # a number: cut its body after that many bytes


def refuse(status: int, code: str, message: str = "as the test wants it") -> Fault:
    """An S3 error answer; the server is not asked."""
    xml = (
        f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>{message}</Message></Error>'
    )
    return lambda request, forward: Reply(status, [("Content-Type", "application/xml")], xml.encode())


def answer(status: int, body: bytes = b"", **headers: str) -> Fault:
    """A fixed answer; the server is not asked."""
    named = [(name.replace("_", "-"), value) for name, value in headers.items()]
    return lambda request, forward: Reply(status, named, body)


def lose_answer(request: Request, forward: Forward) -> Reply:
    """The server does it, the client never hears."""
    forward()
    raise Lost


def reset(request: Request, forward: Forward) -> Reply:
    """The connection is reset before the server sees the request."""
    raise Lost(reset=True)


def cut(after: int) -> Fault:
    """The connection ends after that many bytes of the answer's body."""
    return lambda request, forward: (forward(), after)


def delay(seconds: float) -> Fault:
    """The request reaches the server late."""

    def fault(request: Request, forward: Forward) -> Reply:
        time.sleep(seconds)
        return forward()

    return fault


def hold(until: threading.Event) -> Fault:
    """The request reaches the server once the event is set (or after 20 s)."""

    def fault(request: Request, forward: Forward) -> Reply:
        until.wait(20)
        return forward()

    return fault


def change(edit: Callable[[Reply], Reply]) -> Fault:
    """The server's answer, edited."""
    return lambda request, forward: edit(forward())


def _accept(request: Request) -> Reply:
    """What a store answers to the requests of an upload."""
    if request.target.startswith("DELETE"):
        return Reply(204)
    if request.target.startswith("PUT"):
        return Reply(200, [("ETag", '"e"')])
    if re.search("POST .*[?]uploads", request.target):
        return Reply(
            200, body=b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"
        )
    assert re.search("POST .*uploadId", request.target), f"no rule for {request.target}"
    return Reply(200, body=b"<CompleteMultipartUploadResult><ETag>e-1</ETag></CompleteMultipartUploadResult>")


class _Server(ThreadingHTTPServer):
    """One that says nothing of clients that go away, as those of these tests do."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@dataclass
class _Rule:
    pattern: re.Pattern[str]
    fault: Fault
    left: int


class FaultProxy:
    """Context manager. `endpoint` is its URL; `on` adds a rule; `log` holds the requests as they arrived."""

    def __init__(self, upstream: str | None = None) -> None:
        self._upstream = urlsplit(upstream).netloc if upstream else None
        self._rules: list[_Rule] = []
        self._lock = threading.Lock()
        self.log: list[Request] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *arguments: object) -> None:
                pass

            def _serve(self) -> None:
                proxy._serve(self)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve  # noqa: N815

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def on(self, pattern: str, fault: Fault, *, times: int = 1) -> None:
        """Hurt the next `times` requests whose "METHOD /path?query" the pattern is found in."""
        with self._lock:
            self._rules.append(_Rule(re.compile(pattern), fault, times))

    def count(self, pattern: str) -> int:
        """Requests so far that the pattern is found in."""
        return len(self.matching(pattern))

    def matching(self, pattern: str) -> list[Request]:
        with self._lock:
            return [request for request in self.log if re.search(pattern, request.target)]

    def peak(self, pattern: str) -> int:
        """The most matching requests that were ever in flight together."""
        requests = self.matching(pattern)
        return max((sum(r.began <= at.began < r.ended for r in requests) for at in requests), default=0)

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        request = Request(f"{handler.command} {handler.path}", dict(handler.headers), body, time.monotonic())
        with self._lock:
            self.log.append(request)
            rule = next((r for r in self._rules if r.left and r.pattern.search(request.target)), None)
            if rule:
                rule.left -= 1

        def forward() -> Reply:
            if self._upstream is None:
                return _accept(request)
            connection = http.client.HTTPConnection(self._upstream, timeout=30)
            sent = {n: v for n, v in request.headers.items() if n.lower() not in ("expect", "connection")}
            connection.request(handler.command, handler.path, body, sent)
            response = connection.getresponse()
            data = response.read()
            connection.close()
            return Reply(response.status, response.getheaders(), data)

        try:
            result = rule.fault(request, forward) if rule else forward()
        except Lost as lost:
            request.ended = time.monotonic()
            self._drop(handler, lost.reset)
            return
        reply, end = result if isinstance(result, tuple) else (result, None)
        request.ended, request.status = time.monotonic(), reply.status
        self._answer(handler, request, reply, end)

    def _answer(self, handler: BaseHTTPRequestHandler, request: Request, reply: Reply, end: int | None) -> None:
        handler.send_response_only(reply.status)
        named = {name.lower() for name, _ in reply.headers}
        for name, value in reply.headers:
            if name.lower() not in ("transfer-encoding", "connection"):
                handler.send_header(name, value)
        if "content-length" not in named and reply.status != 204:
            handler.send_header("Content-Length", str(len(reply.body)))
        handler.end_headers()
        if handler.command != "HEAD":
            sent = reply.body[:end]
            request.served = len(sent)
            with contextlib.suppress(ConnectionError):  # a client that has ended
                handler.wfile.write(sent)
        if end is not None:
            self._drop(handler, False)

    def _drop(self, handler: BaseHTTPRequestHandler, with_reset: bool) -> None:
        handler.close_connection = True
        if with_reset:
            handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            handler.connection.shutdown(socket.SHUT_RDWR)
        handler.connection.close()
