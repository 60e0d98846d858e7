"""OpenAI's images: generations, edits and variations, answered at once or as server-sent events."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
from collections.abc import AsyncIterator

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from pydantic import BaseModel
from sse_starlette import EventSourceResponse, ServerSentEvent

from ditile.plan.errors import DitileError
from ditile.plan.option_classes import JsonObject
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
from ditile.serve.api.fields import ImageFields, parse_fields
from ditile.serve.api.requests import submit_request
from ditile.serve.api.uploads import Body, convert_png, read_body
from ditile.serve.jobs import Job, JobNotFoundError, JobResult

router = APIRouter()
MEDIA_TYPES = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp", "mp4": "video/mp4", "gif": "image/gif"}
VARIATION_PROMPT = "a variation of this picture"
# OpenAI's clients read these fields, though nothing is counted in tokens here.
NO_USAGE = {
    "input_tokens": 0,
    "output_tokens": 0,
    "total_tokens": 0,
    "input_tokens_details": {"text_tokens": 0, "image_tokens": 0},
}


def describe_body(fields: type[BaseModel]) -> JsonObject:
    """Return the entry in /openapi.json for a body, which the routes read themselves."""
    schema = {"schema": fields.model_json_schema()}
    content = {"application/json": schema, "multipart/form-data": schema}
    return {"requestBody": {"required": True, "content": content}}


_BODY = describe_body(ImageFields)


@router.post("/v1/images/generations", openapi_extra=_BODY)
async def generate_images(http: HttpRequest) -> Response:
    """Generate images from a prompt."""
    body = await read_body(http)
    _check_uploads(body)
    return await _generate_and_answer(http, body, "image_generation")


@router.post("/v1/images/edits", openapi_extra=_BODY)
async def edit_images(http: HttpRequest) -> Response:
    """Generate images from a prompt and an image. With a mask only its white part changes."""
    body = await read_body(http)
    _check_uploads(body, "image", "mask")
    return await _generate_and_answer(http, body, "image_edit")


@router.post("/v1/images/variations", openapi_extra=_BODY)
async def vary_images(http: HttpRequest) -> Response:
    """Generate images from an image, with an optional prompt."""
    body = await read_body(http)
    _check_uploads(body, "image")
    if not body.values.get("prompt"):
        body = dataclasses.replace(body, values=body.values | {"prompt": VARIATION_PROMPT})
    return await _generate_and_answer(http, body, "image_edit")


@router.get("/v1/images/{job_id}/content/{index}")
async def read_image(http: HttpRequest, job_id: str, index: int) -> Response:
    """Return an image at the address from an answer.

    The 24 random letters of the address are its key, since a page that shows an image by its address sends no other.
    """
    service = find_service(http)
    job = service.find_job(job_id, None)
    names = []
    if job.kind == "image" and job.result is not None:
        names = job.result.files
    if not 0 <= index < len(names):
        raise JobNotFoundError(f"{job_id} has no image {index}")
    content = await asyncio.to_thread(service.read_output, job, names[index])
    headers = {"cache-control": "private", "x-content-type-options": "nosniff"}
    return Response(content, media_type=MEDIA_TYPES[job.request.output_format], headers=headers)


def encode_base64(content: bytes) -> str:
    """Encode bytes for JSON."""
    return base64.b64encode(content).decode("ascii")


async def read_outputs(http: HttpRequest, job: Job, result: JobResult) -> list[bytes]:
    """Return the files of a job that is done."""
    service = find_service(http)
    return [await asyncio.to_thread(service.read_output, job, name) for name in result.files]


async def _generate_and_answer(http: HttpRequest, body: Body, event_name: str) -> Response:
    fields = parse_fields(ImageFields, body.values, find_facts(http, "image"))
    job = await submit_request(http, fields, body)
    if fields.stream:
        return EventSourceResponse(_stream_events(http, job, event_name), sep="\n")
    job = await await_job_end(http, job)
    result = check_done(job)
    data: list[JsonObject] = []
    if fields.response_format == "url":
        base = str(http.base_url).rstrip("/")
        for index in range(len(result.files)):
            data.append({"b64_json": None, "url": f"{base}/v1/images/{job.id}/content/{index}"})
    else:
        for content in await read_outputs(http, job, result):
            text = await asyncio.to_thread(encode_base64, content)
            data.append({"b64_json": text, "url": None})
    for image, seed in zip(data, result.seeds, strict=True):
        image |= {"revised_prompt": None, "seed": seed}
    return AsciiJSONResponse(
        {
            "created": int(job.created),
            "data": data,
            "output_format": job.request.output_format,
            "size": _format_size(job),
            "seed": result.seeds[0],
            "inference_time_s": result.seconds.get("total"),
            "usage": NO_USAGE,
            "warnings": job.warnings,
        }
    )


async def _stream_events(http: HttpRequest, job: Job, event_name: str) -> AsyncIterator[ServerSentEvent]:
    """Yield previews as they arrive, and then the images. The job ends if the client disconnects."""
    try:
        async for news in find_service(http).watch(job.id):
            job = news
            if job.has_ended:
                continue
            if job.num_steps:
                # OpenAI has no event for a step; clients skip comments.
                yield ServerSentEvent(comment=f"step {job.step} of {job.num_steps}")
            if job.preview is not None:
                name = f"{event_name}.partial_image"
                quality = job.request.output_compression
                content = await asyncio.to_thread(convert_png, job.preview, job.request.output_format, quality)
                fields = _list_event_fields(job, content, name) | {"partial_image_index": job.preview_index}
                yield ServerSentEvent(json.dumps(fields), event=name)
        try:
            result = check_done(job)
            contents = await read_outputs(http, job, result)
        except DitileError as error:
            body = build_error_body(convert_error(error))
            yield ServerSentEvent(json.dumps(body), event="error")
            return
        for content, seed in zip(contents, result.seeds, strict=True):
            fields = _list_event_fields(job, content, f"{event_name}.completed") | {
                "usage": NO_USAGE,
                "seed": seed,
                "inference_time_s": result.seconds.get("total"),
                "warnings": job.warnings,
            }
            yield ServerSentEvent(json.dumps(fields), event=fields["type"])
    finally:
        if not job.has_ended:
            await cancel_job_of_gone_client(find_service(http), job)


def _list_event_fields(job: Job, content: bytes, name: str) -> JsonObject:
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
    """Return the size as WxH; "auto" while only the ranks know it."""
    if job.result is None:
        return str(job.request.client["size"])
    return "{}x{}".format(*job.result.size)


def _check_uploads(body: Body, *taken: str) -> None:
    """Check that a body has only uploads that are taken, and an image if anything is taken."""
    for param, uploads in (("image", body.images), ("mask", body.masks)):
        # Ignored, they would give another image than the client wanted.
        if uploads and param not in taken:
            message = f"{param} is not taken here; send it to /v1/images/edits"
            raise RequestError(message, param=param, code="unsupported_value")
    if taken and not body.images:
        message = "image is missing; send a file as image, or data:image/png;base64,..."
        raise RequestError(message, param="image", code="missing_required_parameter")
