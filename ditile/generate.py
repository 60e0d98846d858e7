"""What one rank of `ditile generate` does: load, divide, run, and on rank 0 write the pictures."""

from __future__ import annotations

import contextlib
import inspect
import json
import secrets
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ditile
from ditile import env
from ditile.errors import ModelError
from ditile.load import defaults, load
from ditile.options import Generate, Run
from ditile.plan import Plan

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from PIL import Image
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came out of a run: the files, and every rank's report in rank order."""

    plan: str
    model: str
    seed: int
    images: list[str]
    reports: list[dict[str, Any]]


def draw(wanted: Generate, run: Run, plan: Plan) -> Outcome | None:
    """Runs this rank's part. Rank 0 returns the outcome, the others None.

    Raises:
        DitileError: if the model, the plan or an option does not fit.
    """
    with contextlib.redirect_stdout(sys.stderr):  # the standard output is for the summary alone
        _quiet()
        if run.threads is not None:
            _set_threads(run.threads)
        pipe = load(wanted.model, dtype=run.dtype, plan=plan)
        if wanted.image is not None:
            pipe = image_to_image(pipe)
        runner = ditile.parallelize(pipe, plan, device=run.device, attention=run.attention)
        seed = _agreed_seed(wanted.seed, runner.mesh.everyone)
        call = arguments(pipe, wanted, defaults(wanted.model))
        runner.trace = run.trace is not None
        result = runner(**call, **_objects(wanted, seed), output="first")
        if run.trace is not None:
            runner.write_trace(run.trace)
        reports = runner.reports()
        if result is None:
            return None
        files = _write(result.images, wanted, run, plan, call, seed)
        return Outcome(plan=str(plan), model=wanted.model, seed=seed, images=files, reports=reports)


def image_to_image(pipe: DiffusionPipeline) -> DiffusionPipeline:
    """The image-to-image pipeline of the same family, on the same modules.

    Raises:
        ModelError: if diffusers has none.
    """
    from diffusers import AutoPipelineForImage2Image

    try:
        converted: DiffusionPipeline = AutoPipelineForImage2Image.from_pipe(pipe)
    except ValueError as error:
        raise ModelError(
            f"diffusers has no image-to-image pipeline for {type(pipe).__name__}; leave --image out, "
            "or try a FLUX.1 or SD3 model"
        ) from error
    return converted


def arguments(pipe: DiffusionPipeline, wanted: Generate, base: dict[str, Any]) -> dict[str, Any]:
    """The plain call arguments: the model's own, overridden by what was asked for.

    Raises:
        ModelError: if this pipeline has no use for something that was asked for, or no room for the size.
    """
    known = inspect.signature(type(pipe).__call__).parameters
    kind, scale = type(pipe).__name__, guidance_name(base)
    given = wanted.call() | ({scale: wanted.guidance} if wanted.guidance is not None else {})
    if refused := sorted(set(given) - set(known)):
        raise ModelError(f"{kind} takes no {', '.join(refused)}; leave it out")
    call = {name: value for name, value in base.items() if name in known} | given
    if "true_cfg_scale" in call:
        call.setdefault("negative_prompt", "")  # without one, diffusers does no true guidance
    if wanted.negative_prompt is not None:
        _check_negative(kind, call, known)
    _check_size(pipe, call)
    _check_strength(call, known)
    return call


def guidance_name(base: dict[str, Any]) -> str:
    """The argument that --guidance sets, given a model's own call options."""
    return "true_cfg_scale" if "true_cfg_scale" in base else "guidance_scale"


def _check_negative(kind: str, call: dict[str, Any], known: Any) -> None:
    scale = "true_cfg_scale" if "true_cfg_scale" in known else "guidance_scale"
    value = call.get(scale, known[scale].default if scale in known else 1.0)
    if value <= 1:
        raise ModelError(
            f"{kind} ignores a negative prompt at {scale}={value}; try --guidance above 1, or leave it out"
        )


def _check_size(pipe: DiffusionPipeline, call: dict[str, Any]) -> None:
    config = getattr(getattr(pipe, "transformer", None), "config", None)
    unit = getattr(pipe, "vae_scale_factor", 1) * getattr(config, "patch_size", 1)
    unit *= 2 if hasattr(pipe, "_pack_latents") else 1
    for name in ("height", "width"):
        value = call.get(name)
        if value is not None and value % unit:
            near = max(unit, round(value / unit) * unit)
            raise ModelError(f"{name}={value} is not a multiple of {unit}, a token of this model; try {name}={near}")


def _check_strength(call: dict[str, Any], known: Any) -> None:
    if "strength" in known:
        strength = call.get("strength", known["strength"].default)
        steps = call.get("num_inference_steps", known["num_inference_steps"].default)
        if int(steps * strength) < 1:
            raise ModelError(f"strength={strength} of {steps} steps is less than one step; raise either")


def _objects(wanted: Generate, seed: int) -> dict[str, Any]:
    """The call arguments that are objects: generators, which every rank makes alike, and the picture."""
    import torch

    generators = [torch.Generator("cpu").manual_seed(seed + k) for k in range(wanted.num_images)]
    several = {"num_images_per_prompt": wanted.num_images, "generator": generators}
    call: dict[str, Any] = several if wanted.num_images > 1 else {"generator": generators[0]}
    if wanted.image is not None:
        from PIL import Image

        with Image.open(wanted.image) as image:
            call["image"] = image.convert("RGB")
    return call


def _write(
    images: list[Image.Image], wanted: Generate, run: Run, plan: Plan, call: dict[str, Any], seed: int
) -> list[str]:
    from ditile import png

    paths = run.images(len(images))
    for k, (image, path) in enumerate(zip(images, paths, strict=True)):
        texts = {
            "Software": f"ditile {ditile.__version__}", "prompt": wanted.prompt, "model": wanted.model,
            "seed": str(seed + k), "plan": str(plan), "settings": json.dumps(call),
        }  # fmt: skip
        try:
            png.save(image, path, texts)
        except OSError as error:
            raise ModelError(f"out={str(path)!r} cannot be written: {error}") from error
    return [str(path) for path in paths]


def _agreed_seed(seed: int | None, control: ProcessGroup | None) -> int:
    """The given seed; without one, rank 0's own, which torchrun's ranks have yet to hear."""
    from ditile.transport import gather_json

    if seed is not None:
        return seed
    return int(gather_json(secrets.randbelow(2**31), control)[0])


def _set_threads(count: int) -> None:
    import torch

    torch.set_num_threads(count)


def _quiet() -> None:
    """Leaves the terminal to one progress bar; what diffusers has to say is said by rank 0."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # before diffusers is imported, which is what it would warn about
    logging.disable_progress_bar()
    from diffusers.utils import logging as diffusers_logging

    diffusers_logging.disable_progress_bar()
    place = env.torchrun()
    if place is not None and place.rank:
        diffusers_logging.set_verbosity_error()
