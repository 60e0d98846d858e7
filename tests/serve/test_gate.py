"""What strangers can do to a server that listens: bodies, connections and hosts. Its ranks are none."""

from __future__ import annotations

import contextlib
import gzip
import logging
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn

from ditile.serve import server
from ditile.serve.api import gate
from ditile.serve.app import create_app
from ditile.serve.options import ServeOptions
from ditile.serve.server import configure_http, open_listener
from ditile.serve.service import Service
from tests.serve.servers import read_error

DRAW, EDIT, VIDEOS = "/v1/images/generations", "/v1/images/edits", "/v1/videos"
FORM, JSON = "application/x-www-form-urlencoded", "application/json"
MULTIPART = "multipart/form-data; boundary=x"


@contextlib.contextmanager
def listen(folder: Path, **flags: Any) -> Iterator[tuple[str, int]]:
    """Yield the address and the port of a server that answers each request which it reads with 503."""
    options = ServeOptions(state=str(folder), port=0, **flags)
    service = Service(options, lambda name, _: SimpleNamespace(name=name, state="ready"))
    serving = uvicorn.Server(configure_http(create_app(service)))
    with open_listener(options) as listener:
        port = listener.getsockname()[1]
        thread = threading.Thread(target=serving.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{port}", port
        finally:
            serving.should_exit = True
            thread.join(30)


def build_part(name: str, content: bytes) -> bytes:
    return b'--x\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n' % (name.encode(), content)


BODIES: list[tuple[str, str, str, bytes, int]] = [
    ("a form without files", EDIT, FORM, b"a=" + b"%41" * 2**19, 413),
    ("many fields of a form", DRAW, FORM, b"&a=b" * 2**18, 400),
    ("JSON without images", DRAW, JSON, b'{"prompt": "%s"}' % (b"a" * 2**20), 413),
    ("many fields of JSON", DRAW, JSON, b'{"a":1%s}' % b"".join(b',"%d":1' % k for k in range(300)), 400),
    ("many values of JSON", EDIT, JSON, b'{"a":[%s1]}' % (b"[]," * 2**16), 400),
    ("many parts", DRAW, MULTIPART, build_part("a", b"b") * 300 + b"--x--", 400),
    ("a long text of a form", EDIT, MULTIPART, build_part("prompt", b"a" * 2**21) + b"--x--", 413),
    ("a long text in JSON with images", EDIT, JSON, b'{"prompt": "%s"}' % (b"a" * 2**21), 413),
    ("a text that is not UTF-8", DRAW, FORM, b"prompt=%ff", 400),
    ("a compressed body", DRAW, JSON, gzip.compress(b"a" * 2**24), 400),
    ("a file for a route that takes none", "/health", MULTIPART, build_part("image", b"A" * 2**21) + b"--x--", 413),
    ("another route", "/nothing", JSON, b"a" * 2**21, 413),
    ("a form that is read", DRAW, FORM, b"prompt=a+b%C3%A4", 503),
    ("raw letters in a form", DRAW, FORM, "prompt=ä".encode(), 503),
    ("a large image in JSON", VIDEOS, JSON, b'{"prompt": "a", "image": "%s"}' % (b"AAAA" * 2**19), 503),
    ("a large file", EDIT, MULTIPART, build_part("prompt", b"a") + build_part("image", b"A" * 2**21) + b"--x--", 503),
    ("a file that is too large", EDIT, MULTIPART, build_part("image", b"A" * 2**22) + b"--x--", 413),
    ("a seed of many digits", DRAW, JSON, b'{"prompt": "a", "seed": %s}' % (b"9" * 5000), 503),
]


def test_bodies_are_bounded_by_what_they_hold(tmp_path: Path) -> None:
    """A failure would mean work that grows with what a client sends, in the loop that answers all others."""
    limited = listen(tmp_path, max_body=2**22)
    with limited as (url, _), httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        for name, path, kind, body, status in BODIES:
            pieces = (body[k : k + 2**16] for k in range(0, len(body), 2**16))
            for content in (body, pieces):
                answer = client.post(path, content=content, headers={"content-type": kind})
                assert answer.status_code == status, (name, answer.text)
                assert name != "a file that is too large" or "more than the 4194304 bytes" in answer.text
                assert read_error(answer)


def test_a_body_that_stalls_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "BODY_SECONDS", 0.1)
    monkeypatch.setattr(gate, "BODY_RATE", 2**30)
    monkeypatch.setattr(gate, "DROP_SECONDS", 0.1)
    with listen(tmp_path) as (_, port):
        for length, status in ((99, b"408"), (2**30, b"413")):
            with socket.create_connection(("127.0.0.1", port), 20) as wire:
                wire.sendall(b"POST %s HTTP/1.1\r\nHost: localhost\r\n" % DRAW.encode())
                wire.sendall(b"Content-Length: %d\r\n\r\n{" % length)
                assert wire.recv(99).startswith(b"HTTP/1.1 " + status)


def test_connections_without_a_request_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure would mean that a stranger who opens connections and sends nothing ends the server for all others."""
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 6)
    with listen(tmp_path) as (url, port), contextlib.ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 20))
        assert httpx.get(f"{url}/health", timeout=20, trust_env=False).status_code == 200


@pytest.mark.parametrize(
    "content",
    [
        b"GET /health HTT",
        # A request that is refused before its body is there.
        b"POST /health HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 99\r\n\r\n{",
    ],
)
def test_a_request_that_does_not_come_ends_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    """A letter now and then does not keep the connection. A failure would mean connections that stay for ever."""
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.3)
    with listen(tmp_path) as (_, port), socket.create_connection(("127.0.0.1", port), 20) as wire:
        wire.sendall(content)
        wire.settimeout(0.05)
        deadline = time.monotonic() + 20
        has_ended = False
        while not has_ended and time.monotonic() < deadline:
            try:
                wire.sendall(b"a")
                has_ended = wire.recv(2**16) == b""
            except TimeoutError:
                continue
            except OSError:
                has_ended = True
        assert has_ended


def test_heads_are_bounded(tmp_path: Path) -> None:
    """A failure would mean memory that a stranger fills without a key. A body may follow its head in one piece."""
    with listen(tmp_path) as (_, port):
        head = b"POST %s HTTP/1.1\r\nHost: localhost\r\n" % DRAW.encode()
        body = b'{"prompt": "%s"}' % (b"a" * 2**18)
        whole = head + b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        contents = [(head + b"X: " + b"y" * 2**20, b"400"), (b"A: b\r\n" * 2**18, b"400"), (whole, b"503")]
        for content, status in contents:
            with socket.create_connection(("127.0.0.1", port), 20) as wire, contextlib.suppress(ConnectionError):
                with contextlib.suppress(ConnectionError):
                    wire.sendall(content)
                assert wire.recv(99).startswith(b"HTTP/1.1 " + status)


MALFORMED = ["evil.example@localhost", "a:b@127.0.0.1", "localhost/x", "localhost#", "localhost:", "127.0.0.1:x"]
MALFORMED += ["a b", "["]
OTHERS = ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "[::1", ""]


def test_hosts_that_only_look_like_this_machine(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("ann:first-secret\n")
    with listen(tmp_path / "open") as (url, port), listen(tmp_path, api_key=str(tmp_path / "keys")) as (keyed, _):
        # With keys, a server may have any name.
        rows = [(url, host) for host in MALFORMED + OTHERS] + [(keyed, host) for host in MALFORMED]
        for address, host in rows:
            answer = httpx.get(f"{address}/health", headers={"host": host}, trust_env=False)
            assert (answer.status_code, read_error(answer)["code"]) == (400, "bad_host"), host
        for host in ("localhost", f"LocalHost:{port}", f"[::1]:{port}"):
            assert httpx.get(f"{url}/health", headers={"host": host}, trust_env=False).status_code == 200


def test_an_upgrade_is_an_ordinary_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A failure would mean a way around the keys, or lines that a stranger writes into the log."""
    headers = {"connection": "upgrade", "upgrade": "websocket"}
    headers |= {"sec-websocket-key": "a" * 22, "sec-websocket-version": "13"}
    with caplog.at_level(logging.INFO, "ditile.serve.access"), listen(tmp_path) as (url, _):
        assert httpx.get(f"{url}/health", headers=headers, trust_env=False).status_code == 200
    assert [record.name for record in caplog.records] == ["ditile.serve.access"]
