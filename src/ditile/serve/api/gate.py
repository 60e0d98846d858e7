"""The gate before the app: it checks keys, hosts and origins, and reads bodies within limits.

The whole body is read here, so that one place bounds its bytes and its time for every route.
"""

from __future__ import annotations

import asyncio
import hmac
import re

from fastapi import Response
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ditile.serve.api.answers import RequestError, answer_error
from ditile.serve.api.uploads import MAX_TEXT, URLENCODED, read_media_type
from ditile.serve.api_keys import ApiKeys
from ditile.serve.options import ServeOptions

# Seconds to read a body that is too large before it is refused.
DROP_SECONDS = 10.0
# A body may take this many seconds, and one second more for each `BODY_RATE` bytes of its route's limit.
BODY_SECONDS = 30.0
BODY_RATE = 2**18
# Routes that accept images, as files or in JSON. No other route has large bodies.
_IMAGE_PATHS = ("/v1/images/edits", "/v1/images/variations", "/v1/videos")
# No key is needed for health, for the page without secrets, and for an image at its address, which cannot be guessed.
_OPEN_PATHS = re.compile(
    r"/|/health|/config|/theme\.css|/manifest\.json|/favicon\.ico|/(?:assets|static)/.*|/v1/images/[^/]+/content/\d+"
)
# A user before the host is refused: a link to localhost@evil.example leads to evil.example.
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?", re.IGNORECASE)


class RequestGate:
    """Admits requests with a key and a complete body.

    Without keys, on a loopback address, host and origin must be this machine. Otherwise a web page in a local browser
    could use the server by a name that resolves to this machine.
    """

    def __init__(self, app: ASGIApp, options: ServeOptions, keys: ApiKeys) -> None:
        self._app = app
        self._options = options
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        # Lifespan events of the app have no headers.
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
            # Proxies log this status for a client that has disconnected.
            await Response(status_code=499)(scope, receive, send)
            return
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again() -> Message:
            # First the body, and then what follows it.
            if messages:
                return messages.pop()
            return await receive()

        await self._app(scope, receive_again, send)

    def _check_host(self, scope: Scope, headers: Headers) -> None:
        host = headers.get("host", "")
        match = _HOST.fullmatch(host)
        if self._keys or not self._options.is_loopback:
            # Addresses in answers are built from the host. Clients of HTTP/1.0 send no host.
            if host and match is None:
                raise RequestError("the host is not a name or an address", code="bad_host")
            return
        name = "" if match is None else match[1].strip("[]").lower()
        if name not in ("localhost", "127.0.0.1", "::1", self._options.host):
            raise RequestError(
                "the host is not this machine; ask http://127.0.0.1, or serve with --api-key", code="bad_host"
            )
        origin = headers.get("origin")
        if origin is None or origin in self._options.list_origins():
            return
        is_own_page = origin.partition("://")[2] == host
        # Without CORS, pages cannot read the answers of requests that only read.
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
        # HTTP headers are encoded as latin-1.
        secret = token.encode("latin-1", "replace")
        # Every key is compared, so that the time does not reveal a nearly right one.
        owners = [owner for owner, key in self._keys if hmac.compare_digest(key, secret)]
        if not owners:
            problem = "the key is not known" if token else "there is no key"
            raise RequestError(f"{problem}; send Authorization: Bearer KEY", status=401, code="invalid_api_key")
        return owners[0]

    async def _read_body(self, path: str, headers: Headers, receive: Receive) -> bytes:
        """Return the whole body. Raises `RequestError` if it is too large, or does not come in time."""
        max_bytes = self._options.max_body
        if path not in _IMAGE_PATHS or read_media_type(headers) == URLENCODED:
            max_bytes = min(MAX_TEXT, max_bytes)
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


async def _receive_bytes(receive: Receive, body: bytearray, max_bytes: int) -> None:
    """Receive a body to its end. If it is too large, read up to twice the limit, and keep up to about the limit."""
    # A client that is still sending would not see the answer.
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
