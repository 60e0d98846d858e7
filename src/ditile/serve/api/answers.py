"""Answers of all routers: errors in OpenAI's form, and the results of jobs for waiting clients."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from ditile.plan.errors import DitileError, ModelError, PlanError
from ditile.plan.option_classes import JsonObject
from ditile.runner.requests.facts import ModelFacts
from ditile.runner.requests.pictures import hide_local_path
from ditile.serve.jobs import (
    Failure,
    Job,
    JobNotFoundError,
    JobResult,
    Kind,
    NotReadyError,
    QueueFullError,
    RanksFailedError,
)
from ditile.serve.service import Service

LOG = logging.getLogger("ditile")
# Options of the command line -> fields of a request, where they differ.
NAMES_OF_OPTIONS = {
    "steps": "num_inference_steps",
    "guidance": "guidance_scale",
    "true_cfg": "true_cfg_scale",
    "frames": "num_frames",
    "num_images": "n",
}
# Code of a job's failure -> status; 503 for all others, which are the server's fault.
STATUS_BY_FAILURE = {"refused": 422, "out_of_memory": 422, "timeout": 408, "cancelled": 409}
# Seconds until a client may try again while ranks start.
NOT_READY_SECONDS = 5
# Error of the service -> status, code, and seconds until a client may try again. The first match counts.
_ANSWERS: list[tuple[type[DitileError], int, str, int | None]] = [
    (RanksFailedError, 503, "ranks_failed", None),
    (NotReadyError, 503, "not_ready", NOT_READY_SECONDS),
    (JobNotFoundError, 404, "not_found", None),
]
# Status -> message and code. Starlette's own answers say only "Not Found" and the like.
_ROUTE_ERRORS = {
    404: ("there is no such route; /openapi.json has those there are", "not_found"),
    405: ("the route does not take this method; /openapi.json has those it takes", "method_not_allowed"),
}
# Status -> type of the error in OpenAI's words; all other statuses are `invalid_request_error`.
_TYPES = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}


@dataclass(eq=False)
class RequestError(DitileError):
    """An error to answer a request with.

    Attributes:
        message: one line, which says what would work.
        status: the status of HTTP.
        param: the wrong field.
        code: a word for programs.
        retry_after: the seconds after which the client may try again.
    """

    message: str
    _: KW_ONLY
    status: int = 400
    param: str | None = None
    code: str = "invalid_value"
    retry_after: int | None = None


class AsciiJSONResponse(JSONResponse):
    """JSON in ASCII only, since a request may hold half a surrogate pair, and UTF-8 cannot."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


def find_service(http: HttpRequest) -> Service:
    """Return the service behind the app of a request."""
    service: Service = http.app.state.service
    return service


def find_owner(http: HttpRequest) -> str:
    """Return the name of the request's key; empty where keys are not required."""
    return str(getattr(http.state, "owner", ""))


def find_served_name(name: str) -> str:
    """Return the served model's name for clients. A local folder is shown only by its last part."""
    return hide_local_path(name).partition(" (")[0]


def find_facts(http: HttpRequest, kind: Kind) -> ModelFacts:
    """Return the facts of the served model.

    Raises:
        RequestError: if the model does not generate this kind.
        NotReadyError: before the ranks have loaded it.
    """
    facts = find_service(http).facts
    if facts.is_video == (kind == "video"):
        return facts
    name = find_served_name(facts.name)
    message = f"{name} generates images; send this to /v1/images/generations"
    if facts.is_video:
        message = f"{name} generates videos; send this to /v1/videos"
    # 422: the request is well formed, and this server's model does not generate it.
    raise RequestError(message, status=422, param="model", code="wrong_kind_of_model")


def convert_error(error: Exception) -> RequestError:
    """Convert any error to a `RequestError`."""
    if isinstance(error, RequestError):
        return error
    message = str(error)
    if isinstance(error, QueueFullError):
        return RequestError(message, status=429, code="queue_full", retry_after=error.retry_after)
    for error_class, status, code, retry_after in _ANSWERS:
        if isinstance(error, error_class):
            return RequestError(message, status=status, code=code, retry_after=retry_after)
    if isinstance(error, ModelError | PlanError):
        message = rename_options(message)
        return RequestError(message, status=422, param=_find_param(message), code="unsupported_value")
    if isinstance(error, HTTPException):
        message, code = _ROUTE_ERRORS.get(error.status_code, (str(error.detail), f"http_{error.status_code}"))
        return RequestError(message, status=error.status_code, code=code)
    # The address has a parameter of the wrong type.
    if isinstance(error, RequestValidationError):
        problem = error.errors()[0]
        name = str(problem["loc"][-1])
        return RequestError(f"{name}: {problem['msg']}", param=name)
    # The log has the traceback of an unexpected exception.
    if not isinstance(error, DitileError):
        return RequestError("the server failed; its log says why", status=500, code="internal")
    # The text of any other error is only for the log.
    LOG.error("a request failed: %s", message)
    message = "the server cannot do this now; its log says why"
    return RequestError(message, status=503, code="unavailable", retry_after=NOT_READY_SECONDS)


def _find_param(message: str) -> str | None:
    """Return the field at the start of a message; None if there is none."""
    param = re.match(r"(\w+)=", message)
    return None if param is None else param[1]


def build_error_body(error: RequestError) -> JsonObject:
    """Build the body of an error in OpenAI's form."""
    error_type = _TYPES.get(error.status, "invalid_request_error")
    line = " ".join(error.message.split())
    return {"error": {"message": line, "type": error_type, "param": error.param, "code": error.code}}


def answer_error(error: RequestError, headers: Mapping[str, str] | None = None) -> AsciiJSONResponse:
    """Build the response for an error."""
    headers = dict(headers or {})
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    # OpenAI's clients would otherwise ask for the same again.
    if error.status in (408, 409):
        headers["x-should-retry"] = "false"
    return AsciiJSONResponse(build_error_body(error), status_code=error.status, headers=headers)


def rename_options(message: str) -> str:
    """Replace the command line's options in a message with the field names of requests."""

    def rename(match: re.Match[str]) -> str:
        # A command to run is advice for the operator of the server, so it stays as it is.
        if match[1] is None:
            return match[0]
        name = match[1].replace("-", "_")
        return NAMES_OF_OPTIONS.get(name, name)

    message = re.sub(r"ditile [a-z]+[^;]*|--([a-z-]+)(?: FILE)?", rename, message)
    return re.sub(rf"\b({'|'.join(NAMES_OF_OPTIONS)})(?==)", rename, message)


def check_done(job: Job) -> JobResult:
    """Return the result of a job. Raises `RequestError` if it has none."""
    if job.result is not None:
        return job.result
    failure = describe_failure(job)
    status = STATUS_BY_FAILURE.get(failure.code, 503)
    retry_after = NOT_READY_SECONDS if status == 503 else None
    param = _find_param(failure.message)
    raise RequestError(failure.message, status=status, param=param, code=failure.code, retry_after=retry_after)


def describe_failure(job: Job) -> Failure:
    """Return the reason why a job has no result."""
    if job.failure is not None:
        return Failure(code=job.failure.code, message=rename_options(job.failure.message))
    if not job.has_ended:
        return Failure(code="restarted", message="the server ends; send it again in a minute")
    return Failure(code="cancelled", message="the job was cancelled before it was done")


async def await_job_end(http: HttpRequest, job: Job) -> Job:
    """Wait until a job has ended, and return it. The job is cancelled if the client disconnects first.

    Raises `RequestError` if the client has disconnected; nobody reads this response.
    """
    service = find_service(http)

    async def await_end() -> Job:
        last = job
        async for news in service.watch(job.id):
            last = news
        return last

    async def await_disconnect() -> None:
        # The body of the request has been read before.
        while (await http.receive())["type"] != "http.disconnect":
            pass

    end = asyncio.ensure_future(await_end())
    disconnect = asyncio.ensure_future(await_disconnect())
    try:
        await asyncio.wait({end, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if end.done():
            return end.result()
        # nginx uses this status for a closed connection; only the access log shows it.
        raise RequestError("the client is gone", status=499, code="disconnected")
    finally:
        # Reached too if the task of the request is cancelled.
        is_gone = not end.done()
        end.cancel()
        disconnect.cancel()
        if is_gone:
            await cancel_job_of_gone_client(service, job)


async def cancel_job_of_gone_client(service: Service, job: Job) -> None:
    """Cancel a job, even if the task of its request is being cancelled too."""
    cancelling = asyncio.ensure_future(service.cancel(job.id, job.owner))
    await asyncio.shield(cancelling)
