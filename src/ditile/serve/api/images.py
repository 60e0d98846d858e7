"""OpenAI's pictures: generations, edits and variations, answered at once or as server-sent events."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from sse_starlette import EventSourceResponse, ServerSentEvent

from ditile.plan.errors import DitileError
from ditile.serve.api.answers import (
    AsciiJSONResponse,
    RequestError,
    await_job_end,
    build_error_body,
    cancel_job_of_gone_client,
    check_done,
    convert_error,
    find_facts,
    find_service,
)
from ditile.serve.api.fields import ImageFields, parse_fields, submit_order
from ditile.serve.api.uploads import Body, convert_png, read_body
from ditile.serve.jobs import Job, JobEvent, JobNotFoundError

router = APIRouter()
MEDIA_TYPES = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp", "mp4": "video/mp4", "gif": "image/gif"}
VARIATION_PROMPT = "a variation of this picture"
NO_USAGE = {
    "input_tokens": 0,
    "output_tokens": 0,
    "total_tokens": 0,
    "input_tokens_details": {"text_tokens": 0, "image_tokens": 0},
}
"""Nothing is counted in tokens here; OpenAI's clients read the fields."""
_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            kind: {"schema": ImageFields.model_json_schema()} for kind in ("application/json", "multipart/form-data")
        },
    }
}


@router.post("/v1/images/generations", openapi_extra=_BODY)
async def generate_images(http: HttpRequest) -> Response:
    """Draws pictures of a prompt."""
    body = await read_body(http)
    _refuse_pictures("image", body.pictures, "/v1/images/edits")
    _refuse_pictures("mask", body.masks, "/v1/images/edits")
    return await _draw_and_answer(http, body, "image_generation")


@router.post("/v1/images/edits", openapi_extra=_BODY)
async def edit_images(http: HttpRequest) -> Response:
    """Draws pictures of a prompt that start from a picture; with a mask only where that is."""
    body = await read_body(http)
    _require_picture(body)
    return await _draw_and_answer(http, body, "image_edit")


@router.post("/v1/images/variations", openapi_extra=_BODY)
async def vary_images(http: HttpRequest) -> Response:
    """Draws pictures that start from a picture; a prompt may say more."""
    body = await read_body(http)
    _require_picture(body)
    _refuse_pictures("mask", body.masks, "/v1/images/edits")
    prompt = body.values.get("prompt") or VARIATION_PROMPT
    return await _draw_and_answer(
        http, Body(values={**body.values, "prompt": prompt}, pictures=body.pictures), "image_edit"
    )


@router.get("/v1/images/{job_id}/content/{index}")
async def read_image(http: HttpRequest, job_id: str, index: int) -> Response:
    """A picture that an answer gave the address of. Its 24 random letters are the key to it, as who shows a picture by
    its address sends no other."""
    service = find_service(http)
    job = service.find_job(job_id, None)
    if job.kind != "image" or job.drawn is None or not 0 <= index < len(job.drawn.files):
        raise JobNotFoundError(f"{job_id} has no picture {index}")
    content = await asyncio.to_thread(service.read_output, job, job.drawn.files[index])
    headers = {"cache-control": "private", "x-content-type-options": "nosniff"}
    return Response(content, media_type=MEDIA_TYPES[job.request.output_format], headers=headers)


def encode_base64(content: bytes) -> str:
    """Bytes as JSON holds them."""
    return base64.b64encode(content).decode("ascii")


async def read_outputs(http: HttpRequest, job: Job) -> list[bytes]:
    """The files of a job that is done."""
    service = find_service(http)
    assert job.drawn is not None
    return [await asyncio.to_thread(service.read_output, job, name) for name in job.drawn.files]


async def _draw_and_answer(http: HttpRequest, body: Body, event_name: str) -> Response:
    fields = parse_fields(ImageFields, body.values, find_facts(http, "image"))
    job, order = await submit_order(http, fields, body)
    if fields.stream:
        return EventSourceResponse(_stream_events(http, job, event_name), sep="\n")
    job = check_done(await await_job_end(http, job))
    return AsciiJSONResponse(await _build_answer(http, job, fields, order.warnings))


async def _build_answer(http: HttpRequest, job: Job, fields: ImageFields, warnings: list[str]) -> dict[str, Any]:
    assert job.drawn is not None
    base = str(http.base_url).rstrip("/")
    as_url = fields.response_format == "url"
    contents = [b""] * len(job.drawn.files) if as_url else await read_outputs(http, job)
    data = [
        {
            "b64_json": None if as_url else await asyncio.to_thread(encode_base64, content),
            "url": f"{base}/v1/images/{job.id}/content/{k}" if as_url else None,
            "revised_prompt": None,
            "seed": seed,
        }
        for k, (content, seed) in enumerate(zip(contents, job.drawn.seeds, strict=True))
    ]
    return {
        "created": int(job.created),
        "data": data,
        "output_format": job.request.output_format,
        "size": _format_size(job),
        "seed": job.drawn.seeds[0],
        "inference_time_s": job.drawn.seconds.get("total"),
        "usage": NO_USAGE,
        "warnings": warnings,
    }


async def _stream_events(http: HttpRequest, job: Job, event_name: str) -> AsyncIterator[ServerSentEvent]:
    """Previews as they come, and then the pictures. A client that goes away ends the job."""
    ended = False
    try:
        async for event in find_service(http).watch(job.id):
            if event.preview is not None and not event.job.has_ended:
                yield await _build_preview_event(event, f"{event_name}.partial_image")
            ended = event.job.has_ended
            job = event.job
        try:
            contents = await read_outputs(http, check_done(job))
        except DitileError as error:
            failure = convert_error(error)
            body = build_error_body(failure.message, failure.status, failure.param, failure.code)
            yield ServerSentEvent(json.dumps(body), event="error")
            return
        for k, content in enumerate(contents):
            yield _build_completed_event(job, content, k, f"{event_name}.completed")
    finally:
        if not ended:
            await cancel_job_of_gone_client(find_service(http), job)


async def _build_preview_event(event: JobEvent, name: str) -> ServerSentEvent:
    request = event.job.request
    content = await asyncio.to_thread(
        convert_png, event.preview or b"", request.output_format, request.output_compression
    )
    fields = _list_event_fields(event.job, content, name)
    return ServerSentEvent(json.dumps(fields | {"partial_image_index": event.preview_index}), event=name)


def _build_completed_event(job: Job, content: bytes, index: int, name: str) -> ServerSentEvent:
    assert job.drawn is not None
    more = {
        "usage": NO_USAGE,
        "seed": job.drawn.seeds[index],
        "inference_time_s": job.drawn.seconds.get("total"),
        "warnings": job.request.client.get("warnings", []),
    }
    return ServerSentEvent(json.dumps(_list_event_fields(job, content, name) | more), event=name)


def _list_event_fields(job: Job, content: bytes, name: str) -> dict[str, Any]:
    return {
        "type": name,
        "b64_json": encode_base64(content),
        "created_at": int(job.created),
        "size": _format_size(job),
        "quality": "auto",
        "background": "auto",
        "output_format": job.request.output_format,
    }


def _format_size(job: Job) -> str:
    """As WxH; "auto" as long as only the ranks know."""
    return str(job.request.client["size"]) if job.drawn is None else "{}x{}".format(*job.drawn.size)


def _refuse_pictures(param: str, pictures: list[bytes], path: str) -> None:
    """Raises `RequestError` for pictures that a route does not take: another picture would be drawn without them."""
    if pictures:
        raise RequestError(f"{param} is not taken here; send it to {path}", param=param, code="unsupported_value")


def _require_picture(body: Body) -> None:
    if not body.pictures:
        raise RequestError(
            "image is missing; send a file as image, or data:image/png;base64,...",
            param="image",
            code="missing_required_parameter",
        )
