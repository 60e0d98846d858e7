"""Compares the images of two checkouts of ditile, bit for bit: 40 calls of plans, caches, videos, edits and weights.

    git worktree add ../before COMMIT
    python -m benchmarks.same_images ../before .
    python -m benchmarks.same_images ../before . --only edit,video

Each checkout runs in processes of its own on this machine, as another processor gives other bits: no hash is stored.
The exit status is 1 if an image differs or a call fails.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

PROMPT = "a large red circle on the left on a gray background"
SECOND_PROMPT = "a small blue square on the right on a white background"
MOTION_PROMPT = "a large red circle moves from left to right on a gray background"
SIZE = {"height": 128, "width": 128}


class ImageCall(NamedTuple):
    """What is drawn: a bundled model, its plan as text, arguments of the call, and a cache.

    `task` is the pipeline's task: "text", "edit" (image to image), "inpaint", "reference" (FLUX Kontext), "control"
    (ControlNet) or "two models" (Wan 2.2). `weights` says what is done to the model first: "lora", "int8" or "offload".
    """

    name: str
    model: str
    plan: str
    call: dict[str, Any]
    cache: dict[str, Any]
    task: str = "text"
    weights: str = ""


STEPS = {"num_inference_steps": 6, **SIZE}
LONG = {"num_inference_steps": 12}
FITTED = {**STEPS, "num_inference_steps": 20, "true_cfg_scale": 2.0, "negative_prompt": ""}
FITTED_CFG = {**STEPS, "num_inference_steps": 20, "guidance_scale": 2.0, "use_resolution_binning": False}
EIGHT = {"class": "FittedScheduleConfig", "steps": 8}
FEW = {"num_inference_steps": 4, **SIZE}
CFG = {**STEPS, "guidance_scale": 4.0}
CACHE = {"Fn_compute_blocks": 1, "residual_diff_threshold": 0.3, "max_warmup_steps": 2}
CLIP = {"num_inference_steps": 4, "height": 64, "width": 64, "num_frames": 9}
CALLS = (
    ImageCall("flux", "shapes-flux", "", STEPS, {}),
    ImageCall("pixart", "shapes-pixart", "", CFG, {}),
    ImageCall("stages", "shapes-flux", "pipefusion=2 patches=4 warmup=1", STEPS, {}),
    ImageCall("three stages", "shapes-pixart", "pipefusion=3 patches=3 warmup=2", CFG, {}),
    ImageCall("stages and sequence", "shapes-flux", "pipefusion=2 patches=2 warmup=1 ulysses=2", STEPS, {}),
    ImageCall("distrifusion", "shapes-pixart", "distrifusion=2 warmup=1", CFG, {}),
    ImageCall("cfg", "shapes-pixart", "cfg=2 pipefusion=2 patches=2 warmup=1", CFG, {}),
    ImageCall("ulysses", "shapes-flux", "ulysses=2", STEPS, {}),
    ImageCall("ring", "shapes-flux", "ring=2", STEPS, {}),
    ImageCall("tensor", "shapes-flux", "tensor=2", STEPS, {}),
    ImageCall("decode by rows", "shapes-flux", "ulysses=2 vae=rows", STEPS, {}),
    ImageCall("prompts over replicas", "shapes-pixart", "data=2", {**CFG, "prompt": [PROMPT, SECOND_PROMPT]}, {}),
    ImageCall("few steps", "shapes-flux-turbo", "pipefusion=2 patches=4 warmup=1", FEW, {}),
    ImageCall("cache", "shapes-flux", "", {**STEPS, **LONG}, CACHE),
    ImageCall("cache on stages", "shapes-pixart", "pipefusion=2 patches=2 warmup=1", {**CFG, **LONG}, CACHE),
    ImageCall("video", "shapes-wan", "", CLIP, {}),
    ImageCall("video on stages", "shapes-wan", "pipefusion=2 patches=2 warmup=1", CLIP, {}),
    ImageCall("edit", "shapes-flux", "pipefusion=2 patches=2 warmup=1", {**STEPS, "strength": 0.8}, {}, "edit"),
    ImageCall("inpaint", "shapes-flux", "pipefusion=2 patches=2 warmup=1", {**STEPS, "strength": 0.9}, {}, "inpaint"),
    ImageCall("reference", "shapes-flux", "pipefusion=2 patches=2 warmup=1 references=2", STEPS, {}, "reference"),
    ImageCall("both sequences", "shapes-flux", "ulysses=2 ring=2", STEPS, {}),
    ImageCall("tensor and stages", "shapes-pixart", "tensor=2 pipefusion=2 patches=2 warmup=1", CFG, {}),
    ImageCall("all warmup at once", "shapes-flux", "pipefusion=2 patches=4 warmup=2 warmup_mode=pipelined", STEPS, {}),
    ImageCall("messages in int8", "shapes-flux", "ulysses=2 wire_dtype=int8", STEPS, {}),
    ImageCall("unlike shares", "shapes-pixart", "ulysses=2 token_weights=1,2", CFG, {}),
    ImageCall("video over ranks", "shapes-wan", "ulysses=2 vae=rows", CLIP, {}),
    ImageCall("video and cfg", "shapes-wan", "cfg=2", {**CLIP, "guidance_scale": 4.0}, {}),
    ImageCall("fitted", "shapes-flux", "", FITTED, EIGHT),
    ImageCall("fitted on stages", "shapes-pixart", "pipefusion=2 patches=2", FITTED_CFG, EIGHT),
    ImageCall("forecasts", "shapes-flux", "", {**STEPS, **LONG}, {**CACHE, "taylor": 1}),
    ImageCall("pruned blocks", "shapes-flux", "", {**STEPS, **LONG}, {"class": "DBPruneConfig", **CACHE}),
    ImageCall("whole calls left out", "shapes-pixart", "", {**CFG, **LONG}, {"class": "EasyCacheConfig"}),
    ImageCall("cache of a video", "shapes-wan", "ulysses=2", {**CLIP, "num_inference_steps": 8}, CACHE),
    ImageCall("edit over ranks", "shapes-flux", "ulysses=2", {**STEPS, "strength": 0.6}, {}, "edit"),
    ImageCall("control", "shapes-flux", "ulysses=2", STEPS, {}, "control"),
    ImageCall("control on stages", "shapes-flux", "pipefusion=2 patches=2 warmup=1", STEPS, {}, "control"),
    ImageCall("two models", "shapes-wan", "pipefusion=2 patches=2 warmup=1", CLIP, {}, "two models"),
    ImageCall("lora", "shapes-flux", "tensor=2", STEPS, {}, "text", "lora"),
    ImageCall("quantized", "shapes-flux", "ulysses=2", STEPS, {}, "text", "int8"),
    ImageCall("offloaded", "shapes-flux", "pipefusion=2 patches=2 warmup=1 offload=blocks", STEPS, {}),
)  # fmt: skip


def run_calls(only: Sequence[str]) -> None:
    """Prints a line of JSON for each call: its name, and the digest of each rank's result or the error."""
    import ditile

    for number, call in enumerate(CALLS):
        if only and call.name not in only:
            continue
        plan = ditile.Plan.parse(call.plan)
        try:
            digests = ditile.launch(draw, plan.world, (number,))
        except ditile.DitileError as error:
            digests = [f"{type(error).__name__}: {error}"]
        print(json.dumps({"name": call.name, "ranks": digests}), flush=True)


def draw(number: int) -> str:
    """Draws a call on every rank; returns the SHA-256 of the image's or the clip's bytes, or `nothing`."""
    import ditile

    call = CALLS[number]
    plan = ditile.Plan.parse(call.plan)
    pipe = build_pipeline(call)
    arguments = build_arguments(call, pipe)
    if call.cache:
        fields = dict(call.cache)
        config_class = getattr(ditile, fields.pop("class", "DBCacheConfig"))
        order = fields.pop("taylor", None)
        calibrator = None if order is None else ditile.TaylorSeerCalibratorConfig(taylorseer_order=order)
        ditile.enable_cache(pipe, config_class(**fields), calibrator)
    runner = ditile.parallelize(pipe, plan, device="cpu")
    result = runner(**arguments)
    images = getattr(result, "images", None)
    if images is None:
        images = getattr(result, "frames", None)
    return compute_digest(images)


def build_pipeline(call: ImageCall) -> Any:
    """The pipeline of the call's task, with the weights of the bundled model."""
    import diffusers
    import torch

    import ditile

    pipe = ditile.load(call.model)
    torch.manual_seed(5)
    if call.weights == "int8":
        ditile.quantize(pipe, "int8_weight_only")
    if call.weights == "lora":
        import peft

        targets = ["attn.to_q", "attn.to_v", "ff.net.2"]
        pipe.transformer.add_adapter(peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    if call.task == "control":
        parameters = inspect.signature(diffusers.FluxControlNetModel.__init__).parameters
        config = {name: value for name, value in pipe.transformer.config.items() if name in parameters}
        control = diffusers.FluxControlNetModel(**config | {"num_layers": 1, "num_single_layers": 1})
        for weight in control.parameters():
            weight.data = 0.05 * torch.randn_like(weight)
        pipe = diffusers.FluxControlNetPipeline(**pipe.components, controlnet=control)
    if call.task == "two models":
        second = copy.deepcopy(pipe.transformer)
        for weight in second.parameters():
            weight.data *= 1.02
        pipe.register_modules(transformer_2=second)
        pipe.register_to_config(boundary_ratio=0.5)
    classes = {
        "edit": diffusers.FluxImg2ImgPipeline,
        "inpaint": diffusers.FluxInpaintPipeline,
        "reference": diffusers.FluxKontextPipeline,
    }
    if call.task in classes:
        pipe = classes[call.task](**pipe.components)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def build_arguments(call: ImageCall, pipe: Any) -> dict[str, Any]:
    """What the pipeline is called with: the same seed, prompt and start image on every rank."""
    import torch
    from PIL import Image, ImageDraw

    prompt = MOTION_PROMPT if call.model == "shapes-wan" else PROMPT
    arguments = {"prompt": prompt, "output_type": "np", "generator": torch.Generator("cpu").manual_seed(7), **call.call}
    if call.task == "text":
        return arguments
    image = Image.new("RGB", (SIZE["width"], SIZE["height"]), "gray")
    ImageDraw.Draw(image).ellipse((20, 30, 80, 90), fill="green")
    if call.task == "two models":
        return arguments
    arguments["control_image" if call.task == "control" else "image"] = image
    if call.task == "inpaint":
        mask = Image.new("L", image.size, 0)
        ImageDraw.Draw(mask).rectangle((64, 0, 127, 127), fill=255)
        arguments["mask_image"] = mask
    if call.task == "reference":
        # Otherwise the pipeline scales the image to about a million pixels, which takes minutes on a CPU.
        arguments.update(max_area=SIZE["height"] * SIZE["width"], _auto_resize=False)
    return arguments


def compute_digest(images: Any) -> str:
    """The SHA-256 of all numbers of images or clips, with their shape."""
    import numpy

    if images is None:
        return "nothing"
    array = numpy.ascontiguousarray(numpy.asarray(images))
    if array.dtype == object or not array.size:
        return "nothing"
    return hashlib.sha256(repr(array.shape).encode() + array.tobytes()).hexdigest()[:16]


def start_checkout(checkout: Path, only: Sequence[str]) -> dict[str, list[str]]:
    """Runs the calls with the package of a checkout; name of a call -> what each rank returned."""
    source = checkout.resolve() / "src"
    if not (source / "ditile").is_dir():
        raise SystemExit(f"{checkout} is not a checkout of ditile: it has no folder src/ditile")
    command = [sys.executable, str(Path(__file__).resolve()), "--run", ",".join(only)]
    environ = os.environ | {
        "PYTHONPATH": str(source),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TQDM_DISABLE": "1",
    }
    results = dict[str, list[str]]()
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            row = json.loads(line)
            results[row["name"]] = row["ranks"]
            print(f"{checkout}: {row['name']}: {', '.join(row['ranks'])}", file=sys.stderr)
    return results


def compare(before: Path, after: Path, only: Sequence[str]) -> int:
    """Prints a line for each call; returns how many differ, or failed in one of the checkouts."""
    first, second = start_checkout(before, only), start_checkout(after, only)
    names = [call.name for call in CALLS if not only or call.name in only]
    different = 0
    for name in names:
        ranks = first.get(name)
        drawn = ranks is not None and any(len(digest) == 16 for digest in ranks)
        is_equal = drawn and ranks == second.get(name)
        different += not is_equal
        print(f"{name:24} {'equal' if is_equal else 'DIFFERENT'}")
    print(f"{len(names) - different} of {len(names)} calls are equal bit for bit")
    return different


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("before", type=Path, nargs="?", help="a checkout of ditile")
    parser.add_argument("after", type=Path, nargs="?", help="another one")
    parser.add_argument("--only", default="", help="names of calls, separated by commas")
    parser.add_argument("--run", default=None, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.run is not None:
        run_calls([name for name in asked.run.split(",") if name])
        return 0
    if asked.before is None or asked.after is None:
        parser.error("give the folders of two checkouts")
    only = [name for name in asked.only.split(",") if name]
    return min(compare(asked.before, asked.after, only), 1)


if __name__ == "__main__":
    raise SystemExit(main())
