"""What every router answers alike: errors as OpenAI's clients read them, and the end of a job for whom waits for it."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from ditile.plan.errors import DitileError, LoadError, ModelError, PlanError
from ditile.runner.requests.facts import ModelFacts
from ditile.runner.requests.pictures import hide_local_path
from ditile.serve.jobs import Job, JobNotFoundError, Kind, NotReadyError, QueueFullError, RanksFailedError

if TYPE_CHECKING:
    from ditile.serve.service import Service

NAMES_OF_OPTIONS = {
    "steps": "num_inference_steps",
    "guidance": "guidance_scale",
    "true_cfg": "true_cfg_scale",
    "frames": "num_frames",
    "num_images": "n",
}
"""Options of the command line -> fields of a request, where they differ."""
STATUS_BY_FAILURE = {"refused": 422, "out_of_memory": 422, "timeout": 408, "cancelled": 409}
"""Code of a job's failure -> status; 503 for all others, which are the server's fault."""
NOT_READY_SECONDS = 5
"""After which a client may try again while ranks start."""
_TYPES = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}


class RequestError(DitileError):
    """A request that is answered with an error.

    Attributes:
        message: one line, which says what would work.
        status: of HTTP.
        param: the field that is wrong.
        code: a word for programs.
        retry_after: seconds.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str = "invalid_value",
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code
        self.retry_after = retry_after


class AsciiJSONResponse(JSONResponse):
    """JSON of ASCII letters alone: what came may hold half a surrogate pair, which UTF-8 cannot."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


def find_service(http: HttpRequest) -> Service:
    """The service of the app that a request came to."""
    service: Service = http.app.state.service
    return service


def find_owner(http: HttpRequest) -> str:
    """The name of the key that a request came with; empty where keys are not asked for."""
    return str(getattr(http.state, "owner", ""))


def find_served_name(name: str) -> str:
    """The name of the served model that clients are told: of a local folder only the last part."""
    return hide_local_path(name).partition(" (")[0]


def find_facts(http: HttpRequest, kind: Kind) -> ModelFacts:
    """The facts of the served model.

    Raises:
        RequestError: if it does not draw this kind.
        NotReadyError: before the ranks have loaded it.
    """
    facts = find_service(http).facts
    if facts.is_video != (kind == "video"):
        name = find_served_name(facts.name)
        route = "videos; send this to /v1/videos" if facts.is_video else "pictures; send this to /v1/images/generations"
        raise RequestError(f"{name} draws {route}", status=422, param="model", code="wrong_kind_of_model")
    return facts


def convert_error(error: Exception) -> RequestError:
    """An error of ditile or of the routes as what a client is told."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, QueueFullError):
        return RequestError(str(error), status=429, code="queue_full", retry_after=error.retry_after)
    if isinstance(error, RanksFailedError):
        return RequestError(str(error), status=503, code="ranks_failed")
    if isinstance(error, NotReadyError):
        return RequestError(str(error), status=503, code="not_ready", retry_after=NOT_READY_SECONDS)
    if isinstance(error, JobNotFoundError):
        return RequestError(str(error), status=404, code="not_found")
    if isinstance(error, ModelError | PlanError | LoadError):
        message = rename_options(str(error))
        return RequestError(message, status=422, param=find_param(message), code="unsupported_value")
    if isinstance(error, HTTPException):
        return RequestError(str(error.detail), status=error.status_code, code=f"http_{error.status_code}")
    return RequestError(str(error), status=503, code="unavailable", retry_after=NOT_READY_SECONDS)


def build_error_body(message: str, status: int, param: str | None, code: str) -> dict[str, Any]:
    """The body of an error, as OpenAI has it."""
    kind = _TYPES.get(status, "invalid_request_error")
    line = " ".join(message.split())
    return {"error": {"message": line, "type": kind, "param": param, "code": code}}


def answer_error(error: RequestError, headers: dict[str, str] | None = None) -> AsciiJSONResponse:
    """The answer of an error."""
    headers = dict(headers or {})
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    if error.status in (408, 409):
        headers["x-should-retry"] = "false"  # OpenAI's clients would ask for the same again
    body = build_error_body(error.message, error.status, error.param, error.code)
    return AsciiJSONResponse(body, status_code=error.status, headers=headers)


def rename_options(message: str) -> str:
    """A message of the command line's options with the names that a request has."""

    def rename(found: re.Match[str]) -> str:
        name = found[1].replace("-", "_")
        return NAMES_OF_OPTIONS.get(name, name)

    message = re.sub(r"--([a-z-]+)(?: FILE)?", rename, message)
    return re.sub(rf"\b({'|'.join(NAMES_OF_OPTIONS)})(?==)", rename, message)


def find_param(message: str) -> str | None:
    """The field that a message is about: those of options begin with it."""
    found = re.match(r"(\w+)=", message)
    return None if found is None else found[1]


def check_done(job: Job) -> Job:
    """The job, if it is done.

    Raises:
        RequestError: if it failed or was cancelled.
    """
    if job.state == "done" and job.drawn is not None:
        return job
    code, message = describe_failure(job)
    status = STATUS_BY_FAILURE.get(code, 503)
    raise RequestError(message, status=status, code=code, retry_after=NOT_READY_SECONDS if status == 503 else None)


def describe_failure(job: Job) -> tuple[str, str]:
    """Code and message of a job that did not end as it should."""
    if job.failure is not None:
        return job.failure.code, rename_options(job.failure.message)
    if not job.has_ended:
        return "restarted", "the server ends; send it again in a minute"
    return "cancelled", "the job was cancelled before it was done"


async def await_job_end(http: HttpRequest, job: Job) -> Job:
    """The job as it ended; a client that goes away meanwhile ends it.

    Raises:
        RequestError: if the client is gone; nobody reads the answer.
    """
    service = find_service(http)
    http.state.job = job.id
    end, gone = asyncio.ensure_future(_watch_until_end(service, job)), asyncio.ensure_future(await_disconnect(http))
    try:
        await asyncio.wait({end, gone}, return_when=asyncio.FIRST_COMPLETED)
        if end.done():
            return end.result()
        raise RequestError("the client is gone", status=499, code="disconnected")
    finally:
        finished = end.done()
        end.cancel()
        gone.cancel()
        if not finished:
            await cancel_job_of_gone_client(service, job)


async def await_disconnect(http: HttpRequest) -> None:
    """Returns when the client is gone. The body of the request was read before."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def cancel_job_of_gone_client(service: Service, job: Job) -> None:
    """Cancels a job although the task of its request may be cancelled too."""
    await asyncio.shield(asyncio.ensure_future(service.cancel(job.id, job.owner)))


async def _watch_until_end(service: Service, job: Job) -> Job:
    async for event in service.watch(job.id):
        job = event.job
    return job
