"""The app: the routers, the gate before them, and the access log."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Iterator
from typing import TextIO

from fastapi import APIRouter, FastAPI, Response
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from prometheus_client import generate_latest
from sse_starlette.sse import AppStatus
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ditile.plan.errors import DitileError
from ditile.plan.option_classes import JsonObject
from ditile.plan.version import __version__
from ditile.serve.api import images, videos
from ditile.serve.api.answers import (
    AsciiJSONResponse,
    RequestError,
    answer_error,
    convert_error,
    find_served_name,
    find_service,
)
from ditile.serve.api.fields import list_own_values
from ditile.serve.api.gate import RequestGate
from ditile.serve.api_keys import read_api_keys
from ditile.serve.metrics import Metrics
from ditile.serve.service import Service

LOG = logging.getLogger("ditile")
# One line of JSON for each request, without its content.
ACCESS_LOG = logging.getLogger("ditile.serve.access")

router = APIRouter()


def create_app(service: Service) -> FastAPI:
    """Build the app of a service.

    Raises `ModelError` if the file of keys cannot be read, or one of its keys is not valid.
    """
    # By default a signal ends streams at once; here their jobs get the seconds of `--drain` to finish.
    AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]
    options = service.options
    keys = read_api_keys(options.api_key)
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
    # The gate comes after CORS, because its refusals need the headers of CORS too.
    middleware.append(Middleware(RequestGate, options=options, keys=keys))
    app = FastAPI(
        title="ditile",
        version=__version__,
        # The page of docs would load scripts from other servers.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        middleware=middleware,
        default_response_class=AsciiJSONResponse,
    )
    app.state.service = service
    for part in (router, images.router, videos.router):
        app.include_router(part)
    for error_class in (DitileError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(error_class, _answer_exception)
    return app


@contextlib.contextmanager
def write_access_log(stream: TextIO) -> Iterator[None]:
    """Log each request as a line of JSON within the context: its time, path, key owner, job and duration."""
    handler = logging.StreamHandler(stream)
    # If the stream is closed, each request would otherwise write a traceback into the other log.
    handler.handleError = lambda record: None  # type: ignore[method-assign]
    handler.setFormatter(logging.Formatter("%(message)s"))
    ACCESS_LOG.addHandler(handler)
    ACCESS_LOG.setLevel(logging.INFO)
    # The lines are JSON, and other handlers would write them a second time.
    ACCESS_LOG.propagate = False
    try:
        yield
    finally:
        ACCESS_LOG.removeHandler(handler)
        ACCESS_LOG.propagate = True


class AccessLog:
    """Writes a line of JSON for each request to `app`, and counts those that are refused."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        began = time.time()
        # The status to log if the answer never begins.
        status = 500

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        finally:
            # A request that became a job was not refused, even if its job failed or was cancelled.
            is_failed_post = scope["method"] == "POST" and status >= 400
            if status == 401 or (is_failed_post and state.get("job") is None):
                self._metrics.count("requests_refused", status)
            entry = {
                "time": round(began, 3),
                "method": scope["method"],
                "path": scope["path"][:200],
                "status": status,
                "ms": round(1000 * (time.time() - began), 1),
                "owner": state.get("owner", ""),
                "job": state.get("job"),
            }
            ACCESS_LOG.info(json.dumps(entry))


@router.get("/health")
async def report_health(http: HttpRequest) -> Response:
    """Return 200 if a request would be generated now, or would start unloaded ranks, otherwise 503 with the reason."""
    health = find_service(http).describe_health()
    status_code = 200 if health["status"] in ("ok", "unloaded") else 503
    return AsciiJSONResponse(health, status_code=status_code)


@router.get("/metrics")
async def report_metrics(http: HttpRequest) -> Response:
    """Return the metrics for Prometheus."""
    content = generate_latest(find_service(http).metrics.registry)
    return Response(content, media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/v1/plan")
async def report_plan(http: HttpRequest) -> Response:
    """Return how the model is split, with the predicted and the measured time."""
    plan = find_service(http).describe_plan()
    if "model" in plan:
        plan["model"] = find_served_name(plan["model"])
    return AsciiJSONResponse(plan)


@router.get("/v1/models")
async def list_models(http: HttpRequest) -> Response:
    """Return the served model in a list."""
    return AsciiJSONResponse({"object": "list", "data": [await _describe_model(http)]})


@router.get("/v1/models/{name:path}")
async def read_model(http: HttpRequest, name: str) -> Response:
    """Return the served model by its name."""
    model = await _describe_model(http)
    served = model["id"]
    if name != served:
        raise RequestError(f"model {name[:60]!r} is not served; {served} is", status=404, code="model_not_found")
    return AsciiJSONResponse(model)


async def _describe_model(http: HttpRequest) -> JsonObject:
    """Return the model in OpenAI's form, with what a web page needs to build a form for its requests."""
    service = find_service(http)
    facts = service.facts
    return {
        "id": find_served_name(facts.name),
        "object": "model",
        # OpenAI's clients require the field.
        "created": 0,
        "owned_by": "ditile",
        "kind": "video" if facts.is_video else "image",
        "edits": facts.edit is not None,
        "negative_prompt": facts.takes("negative_prompt"),
        "defaults": list_own_values(facts),
        # This reads the folder of LoRAs, so it runs in a thread.
        "loras": await asyncio.to_thread(service.options.list_lora_names, facts),
    }


async def _answer_exception(_: HttpRequest, error: Exception) -> Response:
    return answer_error(convert_error(error), getattr(error, "headers", None))
