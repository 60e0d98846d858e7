"""What clients of AUTOMATIC1111's web UI call: Open WebUI, SillyTavern and those of koboldcpp.

Such clients always send steps, a scale and a negative prompt, whether a model takes them or not: what the served model
does not take is left out. So is what this server has not, such as a second pass (`enable_hr`) or a ControlNet
(`alwayson_scripts`). All of it is named in `warnings` of the answer's `info`.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from pydantic import BaseModel, ConfigDict, Field

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
    Text,
    list_own_values,
    shorten_value,
    shorten_warnings,
    submit_order,
    validate_fields,
    warn_of_unknown_field,
)
from ditile.serve.api.images import encode_base64, read_outputs
from ditile.serve.api.uploads import Body, decode_base64, read_json_object
from ditile.serve.jobs import Job

router = APIRouter(prefix="/sdapi/v1")
OWN_VALUE = "Automatic"
"""The only sampler and scheduler of the lists: the model's own."""
_LORA = re.compile(r"<lora:([^:<>]{1,100})(?::([\d.]{1,10}))?(?::[^<>]{0,40})?>")
_MOST_LISTED = 100
_NAMES_OF_NONE = ("", "None", "none", "Automatic", "automatic")
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "mask": ("",),
    "init_images": ([],),
    "sampler_name": _NAMES_OF_NONE,
    "sampler_index": _NAMES_OF_NONE,
    "scheduler": _NAMES_OF_NONE,
    "denoising_strength": (),
    # Seeds and styles.
    "styles": ([],),
    "subseed": (-1,),
    "subseed_strength": (0,),
    "seed_resize_from_h": (-1, 0),
    "seed_resize_from_w": (-1, 0),
    # How the sampler adds noise.
    "eta": (0,),
    "s_min_uncond": (0,),
    "s_churn": (0,),
    "s_tmin": (0,),
    "s_tmax": (0,),
    "s_noise": (1,),
    "initial_noise_multiplier": (1,),
    "image_cfg_scale": (),
    # What is done besides.
    "restore_faces": (False,),
    "tiling": (False,),
    "disable_extra_networks": (False,),
    "refiner_checkpoint": _NAMES_OF_NONE,
    "refiner_switch_at": (),
    "script_name": _NAMES_OF_NONE,
    "script_args": ([],),
    "infotext": ("",),
    "comments": ({},),
    # A second pass.
    "enable_hr": (False,),
    "firstpass_image": ("",),
    "firstphase_width": (0,),
    "firstphase_height": (0,),
    "hr_scale": (),
    "hr_upscaler": _NAMES_OF_NONE,
    "hr_second_pass_steps": (0,),
    "hr_resize_x": (0,),
    "hr_resize_y": (0,),
    "hr_checkpoint_name": _NAMES_OF_NONE,
    "hr_sampler_name": _NAMES_OF_NONE,
    "hr_scheduler": _NAMES_OF_NONE,
    "hr_prompt": ("",),
    "hr_negative_prompt": ("",),
    "hr_additional_modules": ([],),
    # Pictures to start from: the whole picture is brought to the size, and drawn anew where the mask is white.
    "resize_mode": (0,),
    "latent_mask": ("",),
    "mask_blur": (0,),
    "mask_blur_x": (0,),
    "mask_blur_y": (0,),
    "mask_round": (True,),
    "inpainting_fill": (1,),
    "inpaint_full_res": (False,),
    "inpaint_full_res_padding": (0,),
    "inpainting_mask_invert": (0,),
    # What comes back, and what is kept: the answer has the pictures, and nothing else is saved.
    "send_images": (True,),
    "save_images": (False,),
    "do_not_save_samples": (True, False),
    "do_not_save_grid": (True, False),
    "include_init_images": (False,),
    "override_settings_restore_afterwards": (True, False),
    "force_task_id": ("",),
}
"""Fields that are not heeded, or on one route alone -> values that ask for nothing, which clients always send."""
PICTURE_FIELDS = ("init_images", "mask", "inpainting_mask_invert", "denoising_strength")
"""Fields that img2img alone heeds."""
_DEPENDS_ON = (
    (re.compile(r"hr_.*|firstphase_.*|firstpass_image|denoising_strength"), "enable_hr"),
    (re.compile(r"subseed"), "subseed_strength"),
    (re.compile(r"refiner_switch_at"), "refiner_checkpoint"),
    (re.compile(r"script_args"), "script_name"),
    (re.compile(r"inpaint_full_res_padding"), "inpaint_full_res"),
    (re.compile(r"mask_.*|inpaint.*"), "mask"),
)
"""Fields that mean nothing unless another field asks for something."""
NEUTRAL_SETTINGS: dict[str, tuple[Any, ...]] = {
    "CLIP_stop_at_last_layers": (0, 1),
    "sd_vae": _NAMES_OF_NONE,
    "samples_format": ("png",),
}
"""Settings of the web UI -> values that ask for nothing."""


class StableDiffusionFields(BaseModel):
    """Fields of txt2img and img2img that are heeded; others get a warning where they ask for something."""

    model_config = ConfigDict(extra="allow")

    prompt: Text = Field("", examples=["a large red circle on the left on a gray background"])
    negative_prompt: Text = Field("", examples=["blurry"])
    seed: Annotated[int, Field(ge=-1, lt=2**63)] = Field(-1, examples=[7])
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
async def draw_from_text(http: HttpRequest) -> Response:
    """Draws pictures of a prompt."""
    values = await read_json_object(http)
    fields = _validate_fields(http, values)
    return await _draw_and_answer(http, values, fields, Body(values={}), PICTURE_FIELDS)


@router.post("/img2img")
async def draw_from_picture(http: HttpRequest) -> Response:
    """Draws pictures that start from a picture; with a mask only where that is white."""
    values = await read_json_object(http)
    fields = _validate_fields(http, values)
    if not fields.init_images:
        raise RequestError("init_images is empty; send a picture as base64", param="init_images")
    if fields.mask and fields.inpainting_mask_invert not in (0, None, False):
        raise RequestError("inpainting_mask_invert is not known here; invert the mask", param="inpainting_mask_invert")
    pictures = [
        await asyncio.to_thread(decode_base64, text, "init_images") for text in fields.init_images[:_MOST_LISTED]
    ]
    masks = [await asyncio.to_thread(decode_base64, fields.mask, "mask")] if fields.mask else []
    body = Body(values={}, pictures=pictures, masks=masks)
    return await _draw_and_answer(http, values, fields, body, ())


@router.get("/progress")
async def report_progress(http: HttpRequest) -> Response:
    """How far the oldest running picture of a key is."""
    jobs = find_service(http).list_jobs(find_owner(http), "image", limit=_MOST_LISTED)
    running = [job for job in jobs if job.state == "running"]
    waiting = [job for job in jobs if job.state == "queued"]
    job = min(running, key=lambda job: job.started or job.created, default=None)
    progress = 0.0 if job is None else job.progress / 100
    steps = (
        0
        if job is None
        else (job.request.options.steps or find_service(http).facts.find_default("num_inference_steps") or 0)
    )
    state = {
        "skipped": False,
        "interrupted": False,
        "stopping_generation": False,
        "job": "" if job is None else job.id,
        "job_count": len(running) + len(waiting),
        "job_timestamp": "0",
        "job_no": 0,
        "sampling_step": round(progress * steps),
        "sampling_steps": steps,
    }
    eta = _estimate_seconds_left(job)
    return AsciiJSONResponse(
        {"progress": progress, "eta_relative": eta, "state": state, "current_image": None, "textinfo": None}
    )


@router.post("/interrupt")
async def interrupt_jobs(http: HttpRequest) -> Response:
    """Cancels the running pictures of a key."""
    service, owner = find_service(http), find_owner(http)
    for job in service.list_jobs(owner, "image", limit=_MOST_LISTED):
        if job.state == "running":
            await service.cancel(job.id, owner)
    return AsciiJSONResponse({})


@router.get("/sd-models")
async def list_sd_models(http: HttpRequest) -> Response:
    """The served model."""
    name = find_served_name(find_service(http).facts.name)
    model = {"title": name, "model_name": name, "hash": None, "sha256": None, "filename": name, "config": None}
    return AsciiJSONResponse([model])


@router.get("/options")
async def read_options(http: HttpRequest) -> Response:
    """The options that clients ask for."""
    return AsciiJSONResponse(
        {"sd_model_checkpoint": find_served_name(find_service(http).facts.name), "samples_format": "png"}
    )


@router.post("/options")
async def write_options(http: HttpRequest) -> Response:
    """Takes options, and changes none: the served model stays. Those that ask for something else are named."""
    values = await read_json_object(http)
    warnings = list_unheeded_settings(values, find_served_name(find_service(http).facts.name), "")
    return AsciiJSONResponse({"warnings": shorten_warnings(warnings)} if warnings else None)


@router.get("/samplers")
async def list_samplers() -> Response:
    """The model's own sampler."""
    return AsciiJSONResponse([{"name": OWN_VALUE, "aliases": [], "options": {}}])


@router.get("/schedulers")
async def list_schedulers() -> Response:
    """The model's own scheduler."""
    return AsciiJSONResponse([{"name": OWN_VALUE.lower(), "label": OWN_VALUE, "aliases": None}])


@router.get("/upscalers")
async def list_upscalers() -> Response:
    """None is served."""
    return AsciiJSONResponse([{"name": "None", "model_name": None, "model_path": None, "model_url": None, "scale": 1}])


@router.get("/loras")
async def list_loras(http: HttpRequest) -> Response:
    """The LoRAs that a prompt may name as <lora:name:scale>."""
    names = sorted(await asyncio.to_thread(find_service(http).options.find_lora_files))
    return AsciiJSONResponse([{"name": name, "alias": name, "path": name, "metadata": {}} for name in names])


async def _draw_and_answer(
    http: HttpRequest, values: dict[str, Any], fields: StableDiffusionFields, body: Body, unheeded: tuple[str, ...]
) -> Response:
    """Draws what the fields say, but for those of the other route, which are named where they ask for something."""
    facts, has_picture = find_facts(http, "image"), bool(body.pictures)
    image_fields, warnings = convert_fields(fields, facts, has_picture=has_picture)
    warnings += list_unheeded_fields(values, find_served_name(facts.name), unheeded)
    image_fields = image_fields.model_copy(update={"strength": fields.denoising_strength if has_picture else None})
    job, order = await submit_order(http, image_fields, body, resize_mask=True)
    job = check_done(await await_job_end(http, job))
    images = [await asyncio.to_thread(encode_base64, content) for content in await read_outputs(http, job)]
    info = _build_info(job, facts, warnings + order.warnings)
    parameters = {name: value for name, value in values.items() if name not in ("init_images", "mask")}
    return AsciiJSONResponse({"images": images, "parameters": parameters, "info": json.dumps(info)})


def convert_fields(
    fields: StableDiffusionFields, facts: ModelFacts, *, has_picture: bool
) -> tuple[ImageFields, list[str]]:
    """The fields as OpenAI's route has them, as far as the model takes them; and what was left out.

    Args:
        fields: as they came.
        facts: of the served model.
        has_picture: whether it starts from a picture.
    """
    warnings, loras = [], {name: float(scale or 1) for name, scale in _read_lora_tags(fields.prompt)}
    values: dict[str, Any] = {
        "prompt": " ".join(_LORA.sub(" ", fields.prompt).split()) if loras else fields.prompt,
        "seed": fields.seed,
        "n": min(fields.batch_size * fields.n_iter, 2**31),
        "num_inference_steps": fields.steps,
        "lora": loras or None,
    }
    for name in ("sampler_name", "scheduler"):
        if getattr(fields, name) not in (None, *_NAMES_OF_NONE):
            warnings.append(f"{name} was not heeded: the model draws by its own")
    call = (facts.edit if has_picture else facts.call) or facts.call
    if fields.cfg_scale is not None and ("guidance_scale" in call.defaults or "true_cfg_scale" in call.defaults):
        values["guidance_scale"] = fields.cfg_scale
    elif fields.cfg_scale is not None:
        warnings.append("cfg_scale was left out, which this model does not take")
    if fields.negative_prompt.strip():
        if call.heeds_negative_prompt(facts.base, fields.cfg_scale):
            values["negative_prompt"] = fields.negative_prompt
        else:
            warnings.append("negative_prompt was left out, which this model does not heed at this cfg_scale")
    for name in ("width", "height"):
        side = getattr(fields, name)
        if side is not None:
            values[name] = max(1, round(side / facts.size_multiple)) * facts.size_multiple
            if values[name] != side:
                warnings.append(f"{name} is {values[name]}: this model draws multiples of {facts.size_multiple}")
    return validate_fields(ImageFields, _drop_nulls(values)), warnings


def list_unheeded_fields(values: Mapping[str, Any], served: str, unheeded: Iterable[str]) -> list[str]:
    """Warnings of fields that ask for something that is not done.

    Args:
        values: fields of the request.
        served: the name of the served model.
        unheeded: fields that are heeded on the other route alone.
    """
    warnings: list[str] = []
    for name in sorted(values):
        value = values[name]
        if name in StableDiffusionFields.model_fields and name not in unheeded:
            continue
        if name == "override_settings" and isinstance(value, dict):
            warnings += list_unheeded_settings(value, served, "override_settings.")
        elif name == "alwayson_scripts" and isinstance(value, dict):
            warnings += [f"{name}.{script[:60]} was not heeded: this server has no scripts" for script in sorted(value)]
        elif not _asks_for_something(values, name):
            continue
        elif name in (*NEUTRAL_VALUES, "override_settings", "alwayson_scripts"):
            warnings.append(f"{name}={shorten_value(value)} was not heeded")
        else:
            warnings.append(warn_of_unknown_field(name))
    return shorten_warnings(warnings)


def list_unheeded_settings(settings: Mapping[str, Any], served: str, prefix: str) -> list[str]:
    """Warnings of settings of the web UI that ask for something else than what is served."""
    neutral = NEUTRAL_SETTINGS | {"sd_model_checkpoint": (served, "")}
    return [
        f"{prefix}{name[:60]}={shorten_value(settings[name])} was not heeded"
        for name in sorted(settings)
        if settings[name] is not None and settings[name] not in neutral.get(name, ())
    ]


def _asks_for_something(values: Mapping[str, Any], name: str) -> bool:
    """Whether a field has a value that a picture would have to heed."""
    value = values.get(name)
    if value is None or value in NEUTRAL_VALUES.get(name, ()):
        return False
    switches = [switch for pattern, switch in _DEPENDS_ON if pattern.fullmatch(name)]
    return not switches or _asks_for_something(values, switches[0])


def _read_lora_tags(prompt: str) -> list[tuple[str, str]]:
    found = _LORA.findall(prompt)
    for name, scale in found:
        if scale and not re.fullmatch(r"\d*\.?\d+|\d+\.", scale):
            raise RequestError(f"<lora:{name}:{scale}> has no number; try <lora:{name}:0.8>", param="prompt")
    return found


def _build_info(job: Job, facts: ModelFacts, warnings: list[str]) -> dict[str, Any]:
    options, drawn = job.request.options, job.drawn
    assert drawn is not None
    return {
        "prompt": options.prompt,
        "negative_prompt": options.negative_prompt or "",
        "seed": drawn.seeds[0],
        "all_seeds": drawn.seeds,
        "all_prompts": [options.prompt] * len(drawn.seeds),
        "width": drawn.size[0],
        "height": drawn.size[1],
        "steps": drawn.num_steps,
        "cfg_scale": options.guidance,
        "sampler_name": OWN_VALUE,
        "batch_size": len(drawn.seeds),
        "sd_model_name": find_served_name(facts.name),
        "inference_time_s": drawn.seconds.get("total"),
        "warnings": warnings,
    }


def _estimate_seconds_left(job: Job | None) -> float:
    """From the part that is done and the time that it took; 0 if nothing is known."""
    if job is None or job.started is None or not job.progress:
        return 0.0
    spent = max(0.0, time.time() - job.started)
    return spent * (100 - job.progress) / job.progress


def _validate_fields(http: HttpRequest, values: Mapping[str, Any]) -> StableDiffusionFields:
    own = list_own_values(find_facts(http, "image"))
    sent_names = {"num_inference_steps": "steps", "guidance_scale": "cfg_scale", "strength": "denoising_strength"}
    examples = {sent_names.get(name, name): value for name, value in own.items()}
    return validate_fields(StableDiffusionFields, _drop_nulls(values), examples)


def _drop_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
