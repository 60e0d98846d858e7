"""A client of a ditile server that a person can interrupt. It needs the standard library alone.

Each exchange runs in a thread of its own, while the caller asks every tenth of a second whether it is interrupted; then
the connection is closed, and the server ends the work within two steps.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

CHECK_SECONDS = 0.1
# A busy server sends something on a stream every 15 s; one that is silent for longer has gone.
SILENT_SECONDS = 120.0
# How often a request is sent to a server that is full or starts.
MOST_TRIES = 20
# How long a job is polled while nobody answers: jobs of videos outlive a restart of the server.
LOST_SECONDS = 120.0
DEFAULT_ADDRESS = "http://127.0.0.1:8000"


class ServerError(Exception):
    """A refusal of the server, in its own words.

    Attributes:
        status: of HTTP; 0 if there was no answer.
        retry_after: seconds after which the same may work; None if it will not.
    """

    def __init__(self, message: str, status: int = 0, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


@dataclass
class Answer:
    """An answer of a server. `lines` are the lines of a stream; empty otherwise."""

    status: int
    headers: Mapping[str, str]
    content: bytes = b""
    lines: Iterator[bytes] = field(default_factory=lambda: iter(()))

    def read_json(self) -> Any:
        """The content as JSON. Raises `ServerError` if it is none."""
        try:
            return json.loads(self.content)
        except ValueError:
            raise ServerError("the answer is not JSON; is there another server at this address?") from None


def find_default_address() -> str:
    """The address in DITILE_SERVER, or a server on this machine."""
    return os.environ.get("DITILE_SERVER") or DEFAULT_ADDRESS


def find_key_file() -> Path:
    """The file of keys: JSON, address -> key."""
    return Path(os.environ.get("DITILE_KEYS") or Path.home() / ".config" / "ditile" / "keys.json")


def find_key(address: str) -> str | None:
    """The key of a server, which no workflow holds: from the file of keys, or DITILE_API_KEY.

    DITILE_API_KEY is the key of the address of DITILE_SERVER (by default a server on this machine), and is sent to no
    other: an address may come from a workflow of a stranger.

    Raises:
        ServerError: if the file of keys cannot be read.
    """
    server = normalize_address(address)
    path = find_key_file()
    if path.exists():
        try:
            keys = {normalize_address(name): str(key) for name, key in json.loads(path.read_text("utf-8")).items()}
        except (OSError, ValueError, AttributeError) as error:
            raise ServerError(f'{path} cannot be read: {error}; write {{"{address}": "KEY"}}') from None
        if server in keys:
            return keys[server]
    if server == normalize_address(find_default_address()):
        return os.environ.get("DITILE_API_KEY", "").strip() or None
    return None


def normalize_address(address: str) -> str:
    """An address without its optional parts: the last slash, /v1.

    Raises:
        ServerError: if it is not an address of HTTP.
    """
    text = address.strip().rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(text)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        valid = False
    if not valid:
        raise ServerError(f"address {address!r} is none of HTTP; try {DEFAULT_ADDRESS}")
    return text


class Client:
    """Sends requests to one server.

    Args:
        address: of the server, such as http://127.0.0.1:8000.
        check: raises if the work is to be interrupted; called every tenth of a second, and its error is passed on.
    """

    def __init__(self, address: str, check: Callable[[], None] = lambda: None) -> None:
        self.address = normalize_address(address)
        self._check = check

    def read_json(self, path: str, *, may_fail: bool = False) -> Any:
        """JSON of a GET.

        Args:
            path: from the address on.
            may_fail: whether an answer of an error is read all the same, as of /health.

        Raises:
            ServerError: if there is no answer, or one of an error.
        """
        return self._exchange("GET", path, may_fail=may_fail).read_json()

    def read_bytes(self, path: str) -> bytes:
        """The content of a GET. Raises `ServerError` as `read_json` does."""
        return self._exchange("GET", path).content

    def delete_job(self, path: str) -> None:
        """Ends and removes a job. Raises `ServerError` as `read_json` does."""
        # A user who has pressed Cancel wants exactly this: nothing interrupts it.
        Client(self.address)._exchange("DELETE", path)

    def post_fields(self, path: str, fields: Mapping[str, Any]) -> Answer:
        """POSTs fields as JSON; waits while the server is full or starts.

        Raises:
            ServerError: if there is no answer, or one of an error.
        """
        body = json.dumps(dict(fields)).encode()
        for tries in range(MOST_TRIES):
            try:
                return self._exchange("POST", path, body)
            except ServerError as error:
                if error.retry_after is None or tries == MOST_TRIES - 1:
                    raise
                self._wait_seconds(error.retry_after)
        raise AssertionError("the last try returns or raises")

    def stream_events(self, path: str, fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The server-sent events of a POST, each with its `type`.

        Raises:
            ServerError: if there is no answer, one of an error, or an event of an error.
        """
        answer = self.post_fields(path, {**fields, "stream": True})
        data = b""
        for line in answer.lines:
            if line.startswith(b"data:"):
                data += line[5:].strip()
            elif not line and data:
                event = json.loads(data)
                data = b""
                if "error" in event:
                    raise ServerError(str(event["error"].get("message", "the server failed")))
                yield event

    def generate_video(
        self, fields: Mapping[str, Any], on_progress: Callable[[int], None]
    ) -> tuple[dict[str, Any], bytes]:
        """Generates a video; when this is interrupted, the server ends it.

        Args:
            fields: of the request.
            on_progress: called with the percent that is done.

        Returns:
            What the server says of the video, and its file.

        Raises:
            ServerError: if it was refused or failed.
        """
        job = self.post_fields("/v1/videos", fields).read_json()
        path = f"/v1/videos/{job['id']}"
        try:
            while job["status"] in ("queued", "in_progress"):
                on_progress(int(job["progress"]))
                job = self._poll_job(path)
            if job["status"] != "completed":
                raise ServerError((job.get("error") or {}).get("message") or "the video failed")
            return job, self.read_bytes(f"{path}/content")
        except BaseException:
            if job["status"] in ("queued", "in_progress"):
                try:
                    self.delete_job(path)
                except ServerError as error:
                    print(f"ditile: {path} could not be ended: {error}")
            raise

    def _poll_job(self, path: str) -> dict[str, Any]:
        """A job as it is after half a second; waits for a server that starts again."""
        deadline = time.monotonic() + LOST_SECONDS
        while True:
            self._wait_seconds(0.5)
            try:
                job: dict[str, Any] = self.read_json(path)
                return job
            except ServerError as error:
                is_lost = error.status == 0 or error.retry_after is not None
                if not is_lost or time.monotonic() > deadline:
                    raise

    def _wait_seconds(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self._check()
        while time.monotonic() < deadline:
            time.sleep(CHECK_SECONDS)
            self._check()

    def _exchange(self, method: str, path: str, body: bytes | None = None, *, may_fail: bool = False) -> Answer:
        headers = {}
        if body is not None:
            headers["content-type"] = "application/json"
        key = find_key(self.address)
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        exchange = _Exchange(self.address, method, path, body, headers)
        parts = exchange.receive_parts(self._check)
        answer = next(parts)
        assert isinstance(answer, Answer)
        if answer.headers.get("content-type", "").startswith("text/event-stream"):
            answer.lines = (part for part in parts if isinstance(part, bytes))
            return answer
        answer.content = b"".join(part for part in parts if isinstance(part, bytes))
        if answer.status >= 400 and not may_fail:
            raise _read_error(answer)
        return answer


class _Exchange:
    """One request, whose answer a thread reads: first an `Answer`, then its lines, then None or an error."""

    def __init__(self, address: str, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> None:
        parts = urlsplit(address)
        connection_class = http.client.HTTPConnection
        if parts.scheme == "https":
            connection_class = http.client.HTTPSConnection
        self._address = address
        self._connection = connection_class(parts.hostname or "", parts.port, timeout=SILENT_SECONDS)
        self._request = (method, parts.path + path, body, dict(headers))
        self._parts: queue.SimpleQueue[Answer | bytes | Exception | None] = queue.SimpleQueue()
        self._socket: socket.socket | None = None
        self._is_closed = False

    def receive_parts(self, check: Callable[[], None]) -> Iterator[Answer | bytes]:
        """Yields the parts of the answer as they come.

        Raises:
            ServerError: if there is no answer.
        """
        threading.Thread(target=self._send_and_read, daemon=True).start()
        try:
            while True:
                check()
                try:
                    part = self._parts.get(timeout=CHECK_SECONDS)
                except queue.Empty:
                    continue
                if part is None:
                    return
                if isinstance(part, Exception):
                    raise ServerError(f"no answer from {self._address}: {part or type(part).__name__}") from part
                yield part
        finally:
            self._close_connection()

    def _send_and_read(self) -> None:
        try:
            self._connection.connect()
            # In this order: either `_close_connection` sees the socket, or this thread sees that it is closed.
            self._socket = self._connection.sock
            if self._is_closed:
                return
            self._connection.request(*self._request)
            response = self._connection.getresponse()
            headers = {name.lower(): value for name, value in response.getheaders()}
            self._parts.put(Answer(response.status, headers))
            if headers.get("content-type", "").startswith("text/event-stream"):
                for line in response:
                    self._parts.put(line.rstrip(b"\r\n"))
            else:
                self._parts.put(response.read())
            self._parts.put(None)
        except (OSError, http.client.HTTPException) as error:
            self._parts.put(error)
        finally:
            self._connection.close()

    def _close_connection(self) -> None:
        """Wakes the thread, which may wait for the server; it closes what it reads from."""
        self._is_closed = True
        if self._socket is not None:
            # It may be closed already.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)


def _read_error(answer: Answer) -> ServerError:
    """The error of an answer, with the line that says what would work."""
    try:
        message = str(json.loads(answer.content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"HTTP {answer.status}: {answer.content[:200].decode('utf-8', 'replace')}"
    if answer.status == 401:
        message += f"; write the key into {find_key_file()} or DITILE_API_KEY"
    seconds = answer.headers.get("retry-after", "")
    retry_after = None
    if answer.status in (429, 503) and seconds.isdecimal():
        retry_after = float(seconds)
    return ServerError(message, answer.status, retry_after)
