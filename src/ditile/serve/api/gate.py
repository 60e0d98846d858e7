"""Which requests the app sees: those with a key, from where they may come, with a body that is whole and small enough.

The whole body is read here, so that one place bounds its bytes and its time for every route.
"""

from __future__ import annotations

import asyncio
import re

from fastapi import Response
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ditile.serve.api.answers import RequestError, answer_error
from ditile.serve.api.uploads import MAX_TEXT, URLENCODED, read_media_type
from ditile.serve.api_keys import ApiKeys
from ditile.serve.options import ServeOptions

# How long a body that is too large is read before it is refused.
DROP_SECONDS = 10.0
# How long a body may take, and how many bytes of the largest one it may take a second more for.
BODY_SECONDS = 30.0
BODY_RATE = 2**18
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
# Routes that take images, by files or in JSON; without these no body is large.
_IMAGE_PATHS = ("/v1/images/edits", "/v1/images/variations", "/v1/videos")
# What needs no key: health, the page, which holds no secrets, and an image by its address, which cannot be guessed.
_OPEN_PATHS = re.compile(
    r"/|/health|/config|/theme\.css|/manifest\.json|/favicon\.ico|/(?:assets|static)/.*|/v1/images/[^/]+/content/\d+"
)
# A user before the host, as in evil.example@localhost, would make it another one.
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?", re.IGNORECASE)


class RequestGate:
    """Admits requests that have a key, and whose body is whole.

    Without keys, on a loopback address, it requires that host and origin are this machine. Otherwise a web page in a
    browser here could use the server by a name that leads here.

    Args:
        app: to which it passes requests on.
        keys: of the server.
    """

    def __init__(self, app: ASGIApp, options: ServeOptions, keys: ApiKeys) -> None:
        self._app = app
        self._options = options
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        # The lifespan of the app has no headers.
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self._check_host(scope, headers)
            scope.setdefault("state", {})["owner"] = self._find_owner(scope["path"], headers)
            body = await self._read_body(scope["path"], headers, receive)
        except RequestError as error:
            response = answer_error(error)
            if error.status == 401:
                response.headers["www-authenticate"] = "Bearer"
            await response(scope, receive, send)
            return
        except ClientDisconnect:
            # The access log gets the status that proxies use.
            await Response(status_code=499)(scope, receive, send)
            return
        await self._app(scope, _repeat_body(body, receive), send)

    def _check_host(self, scope: Scope, headers: Headers) -> None:
        host = headers.get("host", "")
        match = _HOST.fullmatch(host)
        if self._keys or not self._options.is_loopback:
            # Addresses in answers are made of it. Clients of HTTP/1.0 send none.
            if host and match is None:
                raise RequestError("the host is no name or address", code="bad_host")
            return
        name = "" if match is None else match[1].strip("[]").lower()
        if name not in (*LOOPBACK_NAMES, self._options.host):
            raise RequestError(
                "the host is not this machine; ask http://127.0.0.1, or serve with --api-key", code="bad_host"
            )
        origin = headers.get("origin")
        if origin is None or origin in self._options.list_origins():
            return
        is_own_page = origin.partition("://")[2] == host
        # Pages cannot read what they get without CORS.
        if not is_own_page and scope["method"] not in ("GET", "HEAD", "OPTIONS"):
            raise RequestError(
                f"pages of {origin[:60]!r} may not use this server; serve with --cors {origin[:60]}",
                status=403,
                code="bad_origin",
            )

    def _find_owner(self, path: str, headers: Headers) -> str:
        """Return the owner of a request's key; an empty text where none is required."""
        if not self._keys or _OPEN_PATHS.fullmatch(path):
            return ""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            token = headers.get("x-api-key", "")
        token = token.strip()
        # Headers are latin-1.
        key = self._keys.find_key(token.encode("latin-1", "replace"))
        if key is None:
            problem = "the key is not known" if token else "there is no key"
            raise RequestError(f"{problem}; send Authorization: Bearer KEY", status=401, code="invalid_api_key")
        return key.owner

    async def _read_body(self, path: str, headers: Headers, receive: Receive) -> bytes:
        """Return the whole body. Raises `RequestError` if it is too large, or does not come in time."""
        max_bytes = self._find_max_bytes(path, headers)
        announced = headers.get("content-length", "0")
        # 18 digits fit 64 bits; int() of a very long text would take seconds.
        is_too_large = not announced.isdecimal() or len(announced) > 18 or int(announced) > max_bytes
        seconds = DROP_SECONDS if is_too_large else BODY_SECONDS + max_bytes / BODY_RATE
        body = bytearray()
        try:
            await asyncio.wait_for(_receive_bytes(receive, body, max_bytes), seconds)
        except asyncio.TimeoutError:
            if not is_too_large:
                message = f"the body did not come within {seconds:.0f} s; send it faster, or a smaller one"
                raise RequestError(message, status=408, code="body_too_slow") from None
        if is_too_large or len(body) > max_bytes:
            raise RequestError(
                f"the body has more than the {max_bytes} bytes that this route takes; send smaller images, as files",
                status=413,
                code="body_too_large",
            )
        return bytes(body)

    def _find_max_bytes(self, path: str, headers: Headers) -> int:
        if path in _IMAGE_PATHS and read_media_type(headers) != URLENCODED:
            return self._options.max_body
        return min(MAX_TEXT, self._options.max_body)


async def _receive_bytes(receive: Receive, body: bytearray, max_bytes: int) -> None:
    """Receive a body up to its end. One that is too large is read up to twice the limit, and little of it is kept."""
    # A client that still sends sees no answer.
    left = 2 * max_bytes
    has_more = True
    while has_more and left > 0:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part = message.get("body", b"")
        left -= len(part)
        if len(body) <= max_bytes:
            body += part
        has_more = message.get("more_body", False)


def _repeat_body(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` function for a body that was read before. It gives the body once, and then what follows."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        if messages:
            return messages.pop()
        return await receive()

    return receive_again
