"""What clients of AUTOMATIC1111's web UI call: Open WebUI, SillyTavern and koboldcpp's clients.

Such clients always send steps, a scale and a negative prompt, whether a model takes them or not: what the served model
does not take is left out. So is what this server has not, such as a second pass (`enable_hr`) or a ControlNet
(`alwayson_scripts`). All of it is named in `warnings` of the answer's `info`.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from pydantic import BaseModel, ConfigDict, Field

from ditile.plan.option_classes import JsonObject, drop_missing
from ditile.runner.requests.facts import ModelFacts
from ditile.serve.api.answers import (
    AsciiJSONResponse,
    RequestError,
    await_job_end,
    check_done,
    find_facts,
    find_owner,
    find_served_name,
    find_service,
)
from ditile.serve.api.fields import (
    Count,
    ImageFields,
    Scale,
    Seed,
    Text,
    list_own_values,
    round_side,
    shorten_value,
    shorten_warnings,
    submit_request,
    validate_fields,
)
from ditile.serve.api.images import encode_base64, read_outputs
from ditile.serve.api.uploads import Body, decode_base64, read_json_object
from ditile.serve.jobs import Job

router = APIRouter(prefix="/sdapi/v1")
# The only sampler and scheduler of the lists: the model's own.
OWN_VALUE = "Automatic"
_LISTS = {
    "samplers": [{"name": OWN_VALUE, "aliases": [], "options": {}}],
    "schedulers": [{"name": OWN_VALUE.lower(), "label": OWN_VALUE, "aliases": None}],
    "upscalers": [
        {
            "name": "None",
            "model_name": None,
            "model_path": None,
            "model_url": None,
            "scale": 1,
        }
    ],
}
_LORA = re.compile(r"<lora:([^:<>]{1,100})(?::([\d.]{1,10}))?(?::[^<>]{0,40})?>")
_NUMBER = re.compile(r"\d*\.?\d+|\d+\.")
_MOST_LISTED = 100
# Values that ask for nothing, in a field that this server does not have.
_NEUTRAL: tuple[Any, ...] = (None, "", 0, -1, [], {}, "None", "none", "Automatic", "automatic")
# Fields and settings of which other values ask for nothing.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "s_noise": (1,),
    "initial_noise_multiplier": (1,),
    "mask_round": (True,),
    "inpainting_fill": (1,),
    # The answer has the images, and nothing else is saved.
    "send_images": (True,),
    "do_not_save_samples": (True, False),
    "do_not_save_grid": (True, False),
    "override_settings_restore_afterwards": (True, False),
    "CLIP_stop_at_last_layers": (0, 1),
    "samples_format": ("png",),
}
# Fields that img2img alone uses.
_IMAGE_FIELDS = ("init_images", "mask", "inpainting_mask_invert", "denoising_strength")
# Fields that mean nothing unless another field asks for something.
_DEPENDS_ON = (
    (re.compile(r"hr_.*|firstphase_.*|firstpass_image|denoising_strength"), "enable_hr"),
    (re.compile(r"subseed"), "subseed_strength"),
    (re.compile(r"refiner_switch_at"), "refiner_checkpoint"),
    (re.compile(r"script_args"), "script_name"),
    (re.compile(r"inpaint_full_res_padding"), "inpaint_full_res"),
    (re.compile(r"mask_.*|inpaint.*"), "mask"),
)


class StableDiffusionFields(BaseModel):
    """Fields of txt2img and img2img that are used; others get a warning where they ask for something."""

    model_config = ConfigDict(extra="allow")

    prompt: Text = Field("", examples=["a large red circle on the left on a gray background"])
    negative_prompt: Text = Field("", examples=["blurry"])
    seed: Seed = Field(-1, examples=[7])
    steps: Count | None = Field(None, examples=[20])
    cfg_scale: Scale | None = Field(None, examples=[4.0])
    width: Count | None = Field(None, examples=[1024])
    height: Count | None = Field(None, examples=[1024])
    batch_size: Count = Field(1, examples=[1])
    n_iter: Count = Field(1, examples=[1])
    denoising_strength: Scale | None = Field(None, examples=[0.6])
    init_images: list[Text] = Field(default_factory=list)
    mask: Text | None = None
    sampler_name: Any = None
    scheduler: Any = None
    inpainting_mask_invert: Any = 0


@router.post("/txt2img")
async def generate_from_text(http: HttpRequest) -> Response:
    """Generates images of a prompt."""
    values = await read_json_object(http)
    fields = _validate_fields(http, values)
    return await _generate_and_answer(http, values, fields, Body())


@router.post("/img2img")
async def generate_from_image(http: HttpRequest) -> Response:
    """Generates images that start from an image; with a mask only where that is white."""
    values = await read_json_object(http)
    fields = _validate_fields(http, values)
    if not fields.init_images:
        raise RequestError("init_images is empty; send an image as base64", param="init_images")
    if fields.mask and fields.inpainting_mask_invert not in (0, None, False):
        raise RequestError("inpainting_mask_invert is not known here; invert the mask", param="inpainting_mask_invert")
    body = Body()
    for text in fields.init_images[:_MOST_LISTED]:
        body.images.append(await asyncio.to_thread(decode_base64, text, "init_images"))
    if fields.mask:
        body.masks.append(await asyncio.to_thread(decode_base64, fields.mask, "mask"))
    return await _generate_and_answer(http, values, fields, body)


@router.get("/progress")
async def report_progress(http: HttpRequest) -> Response:
    """How far the oldest running image of a key is."""
    service = find_service(http)
    jobs = service.list_jobs(find_owner(http), "image", limit=_MOST_LISTED)
    state = {
        "skipped": False,
        "interrupted": False,
        "stopping_generation": False,
        "job": "",
        "job_count": sum(not job.has_ended for job in jobs),
        "job_timestamp": "0",
        "job_no": 0,
        "sampling_step": 0,
        "sampling_steps": 0,
    }
    answer = {"progress": 0.0, "eta_relative": 0.0, "state": state, "current_image": None, "textinfo": None}
    running = [job for job in jobs if job.state == "running"]
    if running:
        job = min(running, key=lambda job: job.started or job.created)
        steps = job.request.options.steps or service.facts.find_default("num_inference_steps") or 0
        answer["progress"] = job.progress / 100
        state["job"] = job.id
        state["sampling_step"] = round(steps * job.progress / 100)
        state["sampling_steps"] = steps
        # From the part that is done and the time that it took.
        if job.started is not None and job.progress:
            seconds = max(0.0, time.time() - job.started)
            answer["eta_relative"] = seconds * (100 - job.progress) / job.progress
    return AsciiJSONResponse(answer)


@router.post("/interrupt")
async def interrupt_jobs(http: HttpRequest) -> Response:
    """Cancels the running images of a key."""
    service = find_service(http)
    owner = find_owner(http)
    for job in service.list_jobs(owner, "image", limit=_MOST_LISTED):
        if job.state == "running":
            await service.cancel(job.id, owner)
    return AsciiJSONResponse({})


@router.get("/sd-models")
async def list_sd_models(http: HttpRequest) -> Response:
    """The served model."""
    name = find_served_name(find_service(http).facts.name)
    model = {
        "title": name,
        "model_name": name,
        "hash": None,
        "sha256": None,
        "filename": name,
        "config": None,
    }
    return AsciiJSONResponse([model])


@router.get("/options")
async def read_options(http: HttpRequest) -> Response:
    """The options that clients ask for."""
    name = find_served_name(find_service(http).facts.name)
    return AsciiJSONResponse({"sd_model_checkpoint": name, "samples_format": "png"})


@router.post("/options")
async def write_options(http: HttpRequest) -> Response:
    """Accepts options, and changes none: the served model stays. Warnings name those that ask for a change."""
    values = await read_json_object(http)
    warnings = _list_ignored_settings(values, find_served_name(find_service(http).facts.name), "")
    if not warnings:
        # As AUTOMATIC1111 answers.
        return AsciiJSONResponse(None)
    return AsciiJSONResponse({"warnings": shorten_warnings(warnings)})


@router.get("/samplers")
@router.get("/schedulers")
@router.get("/upscalers")
async def read_list(http: HttpRequest) -> Response:
    """The model's own sampler or scheduler; of upscalers none."""
    name = http.url.path.rpartition("/")[2]
    return AsciiJSONResponse(_LISTS[name])


@router.get("/loras")
async def list_loras(http: HttpRequest) -> Response:
    """The LoRAs that a prompt may name as <lora:name:scale>."""
    service = find_service(http)
    loras = []
    for name in await asyncio.to_thread(service.options.list_lora_names, service.facts):
        loras.append({"name": name, "alias": name, "path": name, "metadata": {}})
    return AsciiJSONResponse(loras)


async def _generate_and_answer(
    http: HttpRequest, values: JsonObject, fields: StableDiffusionFields, body: Body
) -> Response:
    facts = find_facts(http, "image")
    has_image = bool(body.images)
    image_fields, warnings = convert_fields(fields, facts, has_image=has_image)
    warnings += list_ignored_fields(values, find_served_name(facts.name), has_image=has_image)
    if has_image:
        image_fields = image_fields.model_copy(update={"strength": fields.denoising_strength})
    job = await submit_request(http, image_fields, body, resize_mask=True)
    job = await await_job_end(http, job)
    result = check_done(job)
    images = []
    for content in await read_outputs(http, job, result):
        images.append(await asyncio.to_thread(encode_base64, content))
    info = _build_info(job, facts, warnings + job.request.client["warnings"])
    # Without the images, which the client has.
    parameters = {name: value for name, value in values.items() if name not in ("init_images", "mask")}
    return AsciiJSONResponse({"images": images, "parameters": parameters, "info": json.dumps(info)})


def convert_fields(
    fields: StableDiffusionFields, facts: ModelFacts, *, has_image: bool
) -> tuple[ImageFields, list[str]]:
    """The fields as OpenAI's route has them, as far as the model takes them; and warnings of what was left out."""
    warnings = []
    values = {
        "prompt": fields.prompt,
        "seed": fields.seed,
        "n": min(fields.batch_size * fields.n_iter, 2**31),
        "num_inference_steps": fields.steps,
    }
    loras = _read_lora_tags(fields.prompt)
    if loras:
        values["lora"] = loras
        words = _LORA.sub(" ", fields.prompt).split()
        values["prompt"] = " ".join(words)
    for name in ("sampler_name", "scheduler"):
        if getattr(fields, name) not in _NEUTRAL:
            warnings.append(f"{name} was ignored: the model has its own")
    call = facts.call
    if has_image and facts.edit is not None:
        call = facts.edit
    if fields.cfg_scale is not None:
        if "guidance_scale" in call.defaults or "true_cfg_scale" in call.defaults:
            values["guidance_scale"] = fields.cfg_scale
        else:
            warnings.append("cfg_scale was left out, which this model does not take")
    if fields.negative_prompt.strip():
        if call.heeds_negative_prompt(facts.base, fields.cfg_scale):
            values["negative_prompt"] = fields.negative_prompt
        else:
            warnings.append("negative_prompt was left out, which this model does not use at this cfg_scale")
    for name in ("width", "height"):
        side = getattr(fields, name)
        if side is not None:
            values[name] = round_side(side, facts)
            if values[name] != side:
                warnings.append(f"{name} is {values[name]}: this model takes multiples of {facts.size_multiple}")
    return validate_fields(ImageFields, drop_missing(values)), warnings


def list_ignored_fields(values: JsonObject, served: str, *, has_image: bool) -> list[str]:
    """Warnings of fields that ask for something that is not done."""
    used = set(StableDiffusionFields.model_fields)
    if not has_image:
        used.difference_update(_IMAGE_FIELDS)
    warnings = []
    for name in sorted(values):
        value = values[name]
        if name in used or not _asks_for_something(values, name):
            continue
        if name == "override_settings" and isinstance(value, dict):
            warnings += _list_ignored_settings(value, served, "override_settings.")
        elif name == "alwayson_scripts" and isinstance(value, dict):
            for script in sorted(value):
                warnings.append(f"{name}.{script[:60]} was ignored: this server has no scripts")
        else:
            warnings.append(f"{name[:60]}={shorten_value(value)} was ignored")
    return shorten_warnings(warnings)


def _list_ignored_settings(settings: JsonObject, served: str, prefix: str) -> list[str]:
    """Warnings of settings of the web UI that differ from what is served."""
    warnings = []
    for name in sorted(settings):
        value = settings[name]
        if name == "sd_model_checkpoint" and value == served:
            continue
        if _asks_for_something(settings, name):
            warnings.append(f"{prefix}{name[:60]}={shorten_value(value)} was ignored")
    return warnings


def _asks_for_something(values: JsonObject, name: str) -> bool:
    """Whether a field has a value that would change the image."""
    value = values.get(name)
    if value is None or value in _NEUTRAL_VALUES.get(name, _NEUTRAL):
        return False
    for pattern, switch in _DEPENDS_ON:
        if pattern.fullmatch(name):
            return _asks_for_something(values, switch)
    return True


def _read_lora_tags(prompt: str) -> dict[str, float]:
    """The LoRAs that a prompt names: name -> scale."""
    loras = {}
    for name, scale in _LORA.findall(prompt):
        if scale and not _NUMBER.fullmatch(scale):
            raise RequestError(f"<lora:{name}:{scale}> has no number; try <lora:{name}:0.8>", param="prompt")
        loras[name] = float(scale or 1)
    return loras


def _build_info(job: Job, facts: ModelFacts, warnings: list[str]) -> JsonObject:
    options = job.request.options
    result = check_done(job)
    return {
        "prompt": options.prompt,
        "negative_prompt": options.negative_prompt or "",
        "seed": result.seeds[0],
        "all_seeds": result.seeds,
        "all_prompts": [options.prompt] * len(result.seeds),
        "width": result.size[0],
        "height": result.size[1],
        "steps": result.num_steps,
        "cfg_scale": options.guidance,
        "sampler_name": OWN_VALUE,
        "batch_size": len(result.seeds),
        "sd_model_name": find_served_name(facts.name),
        "inference_time_s": result.seconds.get("total"),
        "warnings": warnings,
    }


def _validate_fields(http: HttpRequest, values: JsonObject) -> StableDiffusionFields:
    examples = list_own_values(find_facts(http, "image"))
    sent_names = {"num_inference_steps": "steps", "guidance_scale": "cfg_scale", "strength": "denoising_strength"}
    for name, sent_name in sent_names.items():
        if name in examples:
            examples[sent_name] = examples.pop(name)
    return validate_fields(StableDiffusionFields, drop_missing(values), examples)
