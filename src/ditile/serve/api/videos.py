"""OpenAI's videos: jobs that are asked for, watched, fetched, drawn anew with another prompt, and deleted."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response
from fastapi import Request as HttpRequest

from ditile.serve.api.answers import (
    AsciiJSONResponse,
    RequestError,
    describe_failure,
    find_facts,
    find_owner,
    find_served_name,
    find_service,
)
from ditile.serve.api.fields import (
    RemixFields,
    VideoFields,
    check_prompt,
    list_unknown_fields,
    parse_fields,
    submit_order,
    validate_fields,
)
from ditile.serve.api.images import MEDIA_TYPES
from ditile.serve.api.uploads import read_body
from ditile.serve.jobs import POSTER, SPRITESHEET, Job, JobNotFoundError, State

router = APIRouter()
POLL_MS = 500
"""After which a client may ask again for a video that is drawn."""
STATUSES: dict[State, str] = {
    "queued": "queued",
    "running": "in_progress",
    "done": "completed",
    "failed": "failed",
    "cancelled": "failed",
}
_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            kind: {"schema": VideoFields.model_json_schema()} for kind in ("application/json", "multipart/form-data")
        },
    }
}


@router.post("/v1/videos", openapi_extra=_BODY)
async def create_video(http: HttpRequest) -> Response:
    """Accepts a video, which is drawn when its turn comes."""
    body = await read_body(http)
    fields = parse_fields(VideoFields, body.values, find_facts(http, "video"))
    job, _ = await submit_order(http, fields, body)
    return _answer_video(job)


@router.get("/v1/videos")
async def list_videos(
    http: HttpRequest,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """The videos of a key, the newest first."""
    service = find_service(http)
    # One more says whether there are more.
    jobs = service.list_jobs(find_owner(http), "video", after=after, limit=limit + 1, newest_first=order == "desc")
    data = [describe_video(job) for job in jobs[:limit]]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return AsciiJSONResponse(
        {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": len(jobs) > limit}
    )


@router.get("/v1/videos/{job_id}")
async def read_video(http: HttpRequest, job_id: str) -> Response:
    """A video as it is now; of one that failed too."""
    return _answer_video(_find_video(http, job_id))


@router.delete("/v1/videos/{job_id}")
async def delete_video(http: HttpRequest, job_id: str) -> Response:
    """Ends a video that is drawn, and removes it and its files."""
    job = _find_video(http, job_id)
    await find_service(http).delete(job.id, find_owner(http))
    return AsciiJSONResponse({"id": job.id, "object": "video.deleted", "deleted": True})


@router.get("/v1/videos/{job_id}/content")
async def read_video_content(
    http: HttpRequest, job_id: str, variant: Literal["video", "thumbnail", "spritesheet"] = "video"
) -> Response:
    """The file of a video, or a picture of its first frame or of many frames."""
    job = _find_video(http, job_id)
    if job.drawn is None:
        status = STATUSES[job.state]
        hint = "draw it again" if job.has_ended else "ask for its status until it is completed"
        raise RequestError(f"{job.id} is {status}; {hint}", code="video_not_completed")
    name = {"video": job.drawn.files[0], "thumbnail": POSTER, "spritesheet": SPRITESHEET}[variant]
    content = await asyncio.to_thread(find_service(http).read_output, job, name)
    kind = MEDIA_TYPES[name.rpartition(".")[2]]
    return Response(content, media_type=kind, headers={"x-content-type-options": "nosniff"})


@router.post("/v1/videos/{job_id}/remix")
async def remix_video(http: HttpRequest, job_id: str) -> Response:
    """The same video, with its seed and settings, of another prompt."""
    job, body = _find_video(http, job_id), await read_body(http)
    service, facts = find_service(http), find_facts(http, "video")
    if body.pictures or body.masks:
        raise RequestError(
            "a remix starts from what its video started from; send pictures to /v1/videos",
            param="input_reference",
            code="unsupported_value",
        )
    fields = validate_fields(RemixFields, body.values)
    check_prompt(fields.prompt, service.options)
    if (model := job.request.options.model) != facts.name:  # of a server before this one, whose jobs are in its folder
        raise RequestError(
            f"{job.id} was drawn by {find_served_name(model)}, and {find_served_name(facts.name)} is served; ask for a "
            "new video",
            status=422,
            code="other_model",
        )
    names = job.request.client["inputs"]
    inputs = {name: await asyncio.to_thread(service.read_output, job, name) for name in names}
    request = dataclasses.replace(
        job.request,
        options=dataclasses.replace(job.request.options, prompt=fields.prompt),
        client={**job.request.client, "remixed_from": job.id, "warnings": list_unknown_fields(fields)},
    )
    remix = await service.submit("video", job.owner, request, inputs)
    http.state.job = remix.id
    return _answer_video(remix)


def describe_video(job: Job) -> dict[str, Any]:
    """A video as OpenAI's clients read it, with its seed, rate and seconds of work."""
    options, drawn, client = job.request.options, job.drawn, job.request.client
    frames, fps = (client["frames"], client["fps"]) if drawn is None else (drawn.frames, drawn.fps)
    error = None
    if job.state in ("failed", "cancelled"):
        code, message = describe_failure(job)
        error = {"code": code, "message": message}
    return {
        "id": job.id,
        "object": "video",
        "created_at": int(job.created),
        "completed_at": None if job.ended is None or drawn is None else int(job.ended),
        "expires_at": None if job.expires is None else int(job.expires),
        "status": STATUSES[job.state],
        "progress": job.progress,
        "model": client["model"],
        "prompt": options.prompt,
        "seconds": f"{frames / fps:g}",
        "size": client["size"] if drawn is None else "{}x{}".format(*drawn.size),
        "error": error,
        "remixed_from_video_id": client.get("remixed_from"),
        "seed": options.seed,
        "num_frames": frames,
        "fps": fps,
        "output_format": job.request.output_format,
        "inference_time_s": None if drawn is None else drawn.seconds.get("total"),
        "warnings": client["warnings"],
    }


def _find_video(http: HttpRequest, job_id: str) -> Job:
    job = find_service(http).find_job(job_id, find_owner(http))
    if job.kind != "video":
        raise JobNotFoundError(f"{job_id[:60]} is no video")
    http.state.job = job.id
    return job


def _answer_video(job: Job) -> Response:
    headers = {} if job.has_ended else {"openai-poll-after-ms": str(POLL_MS)}
    return AsciiJSONResponse(describe_video(job), headers=headers)
