"""The app: who may ask, how much at once, and what is written of each request, around the routers."""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO
from urllib.parse import urlsplit

from fastapi import APIRouter, FastAPI, Response
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import RedirectResponse
from sse_starlette.sse import AppStatus
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ditile.distributed import env
from ditile.plan.errors import DitileError, ModelError
from ditile.plan.version import __version__
from ditile.serve.api import images, sdapi, videos
from ditile.serve.api.answers import (
    AsciiJSONResponse,
    RequestError,
    answer_error,
    convert_error,
    find_served_name,
    find_service,
)
from ditile.serve.metrics import Metrics
from ditile.serve.options import ServeOptions
from ditile.serve.page.login import LOGIN_PATH, PageKeys, is_page_path

if TYPE_CHECKING:
    from ditile.serve.service import Service

LOG = logging.getLogger("ditile")
ACCESS_LOG = logging.getLogger("ditile.serve.access")
"""Has one line of JSON for each request, without what was asked for."""
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
LEAST_KEY_LETTERS = 8
MAX_KEY_FILE_BYTES = 2**20

router = APIRouter()


def create_app(service: Service) -> FastAPI:
    """The app of a service.

    Raises:
        ModelError: if the file of keys cannot be read, or a key in it is none.
    """
    # On a signal to end, streams go on: their jobs get the time that a server leaves them.
    AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]
    options, keys = service.options, read_api_keys(service.options)
    page_keys = PageKeys(keys)
    origins = options.list_origins()
    middleware = [Middleware(AccessLog, metrics=service.metrics)]
    if origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["authorization", "content-type", "x-api-key"],
                expose_headers=["openai-poll-after-ms", "retry-after"],
            )
        )
    middleware.append(Middleware(Gate, options=options, keys=keys, origins=origins, page_keys=page_keys))
    app = FastAPI(
        title="ditile",
        version=__version__,
        docs_url=None,  # the page would be made of scripts of other servers
        redoc_url=None,
        redirect_slashes=False,
        middleware=middleware,
        default_response_class=AsciiJSONResponse,
    )
    app.state.service, app.state.page_keys = service, page_keys
    for part in (router, images.router, videos.router, sdapi.router):
        app.include_router(part)
    app.add_exception_handler(DitileError, _answer_exception)
    app.add_exception_handler(HTTPException, _answer_exception)
    app.add_exception_handler(RequestValidationError, _answer_bad_parameter)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)
    app.add_exception_handler(Exception, _answer_bug)
    return app


def read_api_keys(options: ServeOptions) -> list[tuple[str, bytes]]:
    """The keys that a server asks for: (owner, key); none if it asks for none.

    A line of the file is a key, or its owner's name, a colon and a key; of a key without a name the owner is "key-N", N
    the number of the line. Empty lines and those that begin with # do not count. DITILE_API_KEY has lines of the same
    kind.

    Raises:
        ModelError: if the file cannot be read, or there is no key in it, or a short one.
    """
    where, text = "DITILE_API_KEY", env.read_api_key()
    if options.api_key is not None:
        where = f"api_key={options.api_key!r}"
        try:
            with Path(options.api_key).open("rb") as file:
                text = file.read(MAX_KEY_FILE_BYTES).decode("utf-8")
                mode = os.fstat(file.fileno()).st_mode
        except (OSError, ValueError) as error:
            raise ModelError(f"{where} cannot be read: {error}; give a file with a key on each line") from None
        if stat.S_ISREG(mode) and mode & (stat.S_IRGRP | stat.S_IROTH):
            LOG.warning("%s can be read by other users of this machine; try chmod 600 %s", where, options.api_key)
    if text is None:
        return []
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, colon, key = (part.strip() for part in line.strip().partition(":"))
        name, key = (name, key) if colon else (f"key-{number}", name)
        if len(key) < LEAST_KEY_LETTERS or not name:
            raise ModelError(f"{where}: line {number} has no key of {LEAST_KEY_LETTERS} letters or more; try name:key")
        keys.append((name, key.encode()))
    if not keys:
        raise ModelError(f"{where} has no key; write one on a line, as key or name:key")
    return keys


@contextlib.contextmanager
def write_access_log(stream: TextIO) -> Iterator[None]:
    """Within, a line of JSON is written for each request: when, what path, by whose key, which job, how long."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(message)s"))
    ACCESS_LOG.addHandler(handler)
    ACCESS_LOG.setLevel(logging.INFO)
    ACCESS_LOG.propagate = False
    try:
        yield
    finally:
        ACCESS_LOG.removeHandler(handler)
        ACCESS_LOG.propagate = True


class Gate:
    """Lets in who has a key, and of a request no more bytes than allowed.

    Without keys, on a loopback address, it asks that host and origin are this machine: else a page of the web in a
    browser here could make the server draw, by a name that leads here.

    Args:
        app: what is behind it.
        options: of the server.
        keys: (owner, key).
        origins: of pages that may call the server.
        page_keys: the cookies that stand for keys on the server's own page, and nowhere else.
    """

    def __init__(
        self,
        app: ASGIApp,
        options: ServeOptions,
        keys: Sequence[tuple[str, bytes]],
        origins: Sequence[str],
        page_keys: PageKeys,
    ) -> None:
        self._app, self._options, self._keys, self._origins = app, options, keys, origins
        self._page_keys = page_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            headers = Headers(scope=scope)
            self._check_host(scope, headers)
            scope.setdefault("state", {})["owner"] = self._find_owner(scope["path"], headers)
            await self._check_length(headers, receive)
        except RequestError as error:
            if error.status == 401 and scope["path"] == "/" and "text/html" in headers.get("accept", ""):
                await RedirectResponse(LOGIN_PATH, status_code=303)(scope, receive, send)
                return
            wanted = {"www-authenticate": "Bearer"} if error.status == 401 else None
            await answer_error(error, wanted)(scope, receive, send)
            return
        await self._app(scope, self._count_bytes(receive), send)

    def _check_host(self, scope: Scope, headers: Headers) -> None:
        if self._keys or not self._options.is_loopback:
            return
        host = headers.get("host", "")
        if _read_host_name(f"//{host}") not in (*LOOPBACK_NAMES, self._options.host):
            raise RequestError(
                "the host is not this machine; ask http://127.0.0.1, or serve with --api-key", code="bad_host"
            )
        origin = headers.get("origin")
        if origin is None or origin in self._origins or origin.partition("://")[2] == host:
            return
        if scope["method"] not in ("GET", "HEAD", "OPTIONS"):
            raise RequestError(
                f"pages of {origin[:60]!r} may not draw here; serve with --cors {origin[:60]}",
                status=403,
                code="bad_origin",
            )

    def _find_owner(self, path: str, headers: Headers) -> str:
        """The owner of the key of a request; empty where none is asked for."""
        if not self._keys or _is_open_path(path):
            return ""
        word, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if word.lower() == "bearer" else headers.get("x-api-key", "")
        owner = None
        if not given and is_page_path(path):
            owner = self._page_keys.find_owner(headers.get("cookie", ""))
        for name, key in self._keys:
            # Each is compared, so that the time says nothing of which one is nearly right.
            if hmac.compare_digest(key, given.encode("latin-1", "replace")) and owner is None:
                owner = name
        if owner is None:
            what = "the key is not known" if given else "there is no key"
            raise RequestError(f"{what}; send Authorization: Bearer KEY", status=401, code="invalid_api_key")
        return owner

    async def _check_length(self, headers: Headers, receive: Receive) -> None:
        """Raises `RequestError` for a body that is announced too large, after it was read away as far as is sensible:
        a client that still sends sees no answer."""
        length = headers.get("content-length", "0")
        most = self._options.max_body
        if not length.isdecimal() or len(length) > 18 or int(length) > most:
            left = 2 * most
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body"):
                    break
            raise _build_size_error(most)

    def _count_bytes(self, receive: Receive) -> Receive:
        num_bytes = 0

        async def receive_counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._options.max_body:
                raise _build_size_error(self._options.max_body)
            return message

        return receive_counted


class AccessLog:
    """Writes a line of JSON for each request, and counts those that are refused.

    Args:
        app: what is behind it.
        metrics: of the server.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state, began, status = scope.setdefault("state", {}), time.time(), 500

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        finally:
            # Without those whose job was drawn, and failed or was cancelled.
            if status == 401 or (scope["method"] == "POST" and status >= 400 and state.get("job") is None):
                self._metrics.note_refused_request(status)
            line = {
                "time": round(began, 3),
                "method": scope["method"],
                "path": scope["path"][:200],
                "status": status,
                "ms": round(1000 * (time.time() - began), 1),
                "owner": state.get("owner", ""),
                "job": state.get("job"),
            }
            ACCESS_LOG.info(json.dumps(line))


@router.get("/health")
async def report_health(http: HttpRequest) -> Response:
    """200 if a picture would be drawn now, else 503 with the reason."""
    health = find_service(http).describe_health()
    return AsciiJSONResponse(health, status_code=200 if health["status"] == "ok" else 503)


@router.get("/metrics")
async def report_metrics(http: HttpRequest) -> Response:
    """For Prometheus."""
    return Response(find_service(http).metrics.render_text(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/v1/plan")
async def report_plan(http: HttpRequest) -> Response:
    """How the model is divided, what that should take, and what it took."""
    plan = find_service(http).describe_plan()
    name = plan.get("model")
    return AsciiJSONResponse(plan | ({"model": find_served_name(name)} if isinstance(name, str) else {}))


@router.get("/v1/models")
async def list_models(http: HttpRequest) -> Response:
    """The served model."""
    return AsciiJSONResponse({"object": "list", "data": [_describe_model(http)]})


@router.get("/v1/models/{name:path}")
async def read_model(http: HttpRequest, name: str) -> Response:
    """The served model by its name."""
    model = _describe_model(http)
    if name != model["id"]:
        raise RequestError(f"model {name[:60]!r} is not served; {model['id']} is", status=404, code="model_not_found")
    return AsciiJSONResponse(model)


def _describe_model(http: HttpRequest) -> dict[str, Any]:
    return {
        "id": find_served_name(find_service(http).facts.name),
        "object": "model",
        "created": 0,
        "owned_by": "ditile",
    }


def _is_open_path(path: str) -> bool:
    """Whether a path needs no key: health, the form for keys, and a picture by its address, which nobody guesses."""
    return path in ("/health", LOGIN_PATH) or re.fullmatch(r"/v1/images/[^/]+/content/\d+", path) is not None


def _read_host_name(address: str) -> str | None:
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None


def _build_size_error(most: int) -> RequestError:
    return RequestError(
        f"the body has more than the {most} bytes that this server takes; send smaller pictures",
        status=413,
        code="body_too_large",
    )


async def _answer_exception(_: HttpRequest, error: Exception) -> Response:
    headers: Mapping[str, str] = getattr(error, "headers", None) or {}
    return answer_error(convert_error(error), dict(headers))


async def _answer_bad_parameter(_: HttpRequest, error: Exception) -> Response:
    """A parameter of the address that has not its type."""
    assert isinstance(error, RequestValidationError)
    wrong = error.errors()[0]
    name = str(wrong["loc"][-1])
    return answer_error(RequestError(f"{name}: {wrong['msg']}", param=name))


async def _answer_nobody(_: HttpRequest, error: Exception) -> Response:
    """A client that went away before it had sent its request; the log has the status that proxies write then."""
    return Response(status_code=499)


async def _answer_bug(_: HttpRequest, error: Exception) -> Response:
    """An error that nobody foresaw: the log has its traceback, the client one line."""
    return answer_error(RequestError("the server failed; its log says why", status=500, code="internal"))
