"""Makes an image with a FLUX pipeline of diffusers, by one method at a time.

python examples/mini/generate.py "a large red circle on the left on a gray background"
python examples/mini/generate.py "..." --method dbcache
torchrun --nproc_per_node 2 examples/mini/generate.py "..." --method pipefusion --patches 4
torchrun --nproc_per_node 4 examples/mini/generate.py "..." --method ulysses --cfg 2
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from guidance import Guidance
from mesh import ALONE, Axis, Mesh, join_processes, make_mesh
from model import Model, Part, Prompt
from pipefusion import Pipeline, StaleKeys, cut_patches
from sequence import Ring, Ulysses, take_share
from skipping import DBCache, FittedSchedule, Outputs, read_schedule
from torch import Tensor

BUNDLED = Path(__file__).parents[2] / "src" / "ditile" / "model" / "assets"
# Those of FLUX.1-schnell, for a model whose folder has no generation.json.
DEFAULTS = {"height": 1024, "width": 1024, "num_inference_steps": 4, "max_sequence_length": 256}
METHODS = ("plain", "ulysses", "ring", "pipefusion", "dbcache", "fitted")


class Request:
    """What is to be generated: encoded prompts, noise, positions and a scheduler with its timesteps.

    Args:
        pipe: a `FluxPipeline`.
        prompt, negative: the prompt, and that of the other branch; None has no other branch.
        steps: of denoising.
        height, width: of the image, in pixels.
        seed: of the noise.
        text: text tokens.
    """

    def __init__(
        self, pipe: Any, prompt: str, negative: str | None, *, steps: int, height: int, width: int, seed: int, text: int
    ) -> None:
        self.prompts = []
        for each in (prompt,) if negative is None else (prompt, negative):
            self.prompts.append(Prompt(*pipe.encode_prompt(each, None, max_sequence_length=text)))
        channels = pipe.transformer.config.in_channels // 4
        noise = torch.Generator().manual_seed(seed)
        device, dtype = pipe._execution_device, self.prompts[0].tokens.dtype
        self.latents, self.image_ids = pipe.prepare_latents(1, channels, height, width, dtype, device, noise)
        self.rows = height // (2 * pipe.vae_scale_factor)
        self.scheduler = copy.deepcopy(pipe.scheduler)
        # A scheduler that shifts by the size of the image is given mu by the pipeline; see FluxPipeline.__call__.
        if self.scheduler.config.use_dynamic_shifting:
            raise ValueError("this example has no dynamic shift")
        self.scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), device=device)
        self.scheduler.set_begin_index(0)


@torch.no_grad()
def denoise(model: Model, request: Request, guidance: Guidance, axis: Axis, part: Part) -> Tensor:
    """Denoise with one call of the model per step and branch, shared by the ranks of an axis.

    `part` is this rank's share of the tokens.
    """
    latents = request.latents
    prompts = guidance.select_own(request.prompts)
    every = range(len(model.blocks))
    for timestep in request.scheduler.timesteps:
        predictions = []
        for prompt in prompts:
            context = model.embed_context(timestep.expand(latents.shape[0]), prompt, request.image_ids, part)
            tokens = model.run_blocks(every, model.embed_tokens(latents, prompt, part), context)
            predictions.append(torch.cat(axis.gather(model.predict(tokens, context)), dim=1))
        prediction = guidance.combine(predictions)
        latents = request.scheduler.step(prediction, timestep, latents, return_dict=False)[0]
    return latents


@torch.no_grad()
def denoise_with_less(
    model: Model, request: Request, guidance: Guidance, cache: DBCache | None, schedule: FittedSchedule | None
) -> Tensor:
    """Denoise with blocks or steps left out, on one rank or on one rank per branch."""
    latents = request.latents
    prompts = guidance.select_own(request.prompts)
    whole = Part(slice(0, prompts[0].tokens.shape[1]), slice(0, latents.shape[1]))
    kept = Outputs()
    for step, timestep in enumerate(request.scheduler.timesteps):
        predictions = []
        for branch, prompt in enumerate(prompts):
            if schedule is not None and step not in schedule.computed:
                predictions.append(schedule.forecast(step, kept.get(branch)))
                continue
            context = model.embed_context(timestep.expand(latents.shape[0]), prompt, request.image_ids, whole)
            tokens = model.embed_tokens(latents, prompt, whole)
            if cache is None:
                tokens = model.run_blocks(range(len(model.blocks)), tokens, context)
            else:
                tokens = cache.run_blocks(step, branch, tokens, context)
            predictions.append(kept.keep(branch, model.predict(tokens, context)))
        prediction = guidance.combine(predictions)
        latents = request.scheduler.step(prediction, timestep, latents, return_dict=False)[0]
    return latents


def run_method(pipe: Any, request: Request, method: str, mesh: Mesh, scale: float, options: Any) -> Tensor:
    """Return the latents of a method; of `pipefusion` they are right on the last stage.

    Args:
        method: of `METHODS`.
        scale: of guidance.
        options: `patches`, `warmup`, `threshold`, `computed` and `schedule`, as the command has them.
    """
    guidance = Guidance(scale, mesh.cfg)
    text, image = request.prompts[0].tokens.shape[1], request.latents.shape[1]
    whole = Part(slice(0, text), slice(0, image))
    if method == "plain":
        return denoise(Model(pipe.transformer), request, guidance, ALONE, whole)
    if method in ("ulysses", "ring"):
        attend = Ulysses(mesh.inner) if method == "ulysses" else Ring(mesh.inner)
        share = take_share(text, image, mesh.inner)
        return denoise(Model(pipe.transformer, attend), request, guidance, mesh.inner, share)
    if method == "pipefusion":
        keys = StaleKeys(text, image)
        model = Model(pipe.transformer, keys)
        parts = cut_patches(request.rows, options.patches, text, image // request.rows)
        pipeline = Pipeline(model, keys, mesh.inner, guidance, parts, options.warmup)
        prompts = guidance.select_own(request.prompts)
        return pipeline.denoise(request.scheduler, request.latents, request.image_ids, prompts)
    model = Model(pipe.transformer)
    if method == "dbcache":
        cache = DBCache(model, threshold=options.threshold, warmup=options.warmup)
        return denoise_with_less(model, request, guidance, cache, None)
    schedule = read_schedule(Path(options.schedule), options.computed)
    fitted, steps = len(schedule.computed) + len(schedule.weights), len(request.scheduler.timesteps)
    if fitted != steps:
        raise ValueError(f"{options.schedule} is fitted to {fitted} steps, and there are {steps}")
    return denoise_with_less(model, request, guidance, None, schedule)


def decode(pipe: Any, latents: Tensor, height: int, width: int) -> Any:
    """Return the image of the final latents."""
    latents = pipe._unpack_latents(latents, height, width, pipe.vae_scale_factor)
    latents = latents / pipe.vae.config.scaling_factor + pipe.vae.config.shift_factor
    with torch.no_grad():
        pixels = pipe.vae.decode(latents, return_dict=False)[0]
    return pipe.image_processor.postprocess(pixels)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt")
    parser.add_argument("--method", choices=METHODS, default="plain")
    parser.add_argument(
        "--model", default=str(BUNDLED / "shapes-flux"), help="a FluxPipeline (generation.json optional)"
    )
    parser.add_argument("--cfg", type=int, choices=(1, 2), default=1, help="ranks for the branches of guidance")
    parser.add_argument("--patches", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=1, help="first steps that compute everything")
    parser.add_argument("--threshold", type=float, default=0.1, help="of dbcache")
    parser.add_argument("--computed", type=int, default=10, help="steps of a fitted schedule that compute")
    parser.add_argument("--schedule", default=str(BUNDLED / "schedules" / "shapes-flux-20.json"))
    parser.add_argument("--out", default="mini.png")
    options = parser.parse_args()
    from diffusers import FluxPipeline

    join_processes()
    world = dist.get_world_size()
    if world % options.cfg:
        parser.error(f"--cfg {options.cfg} needs a multiple of {options.cfg} processes, and there are {world}")
    mesh = make_mesh(options.cfg, world // options.cfg)
    if mesh.inner.size > 1 and options.method in ("plain", "dbcache", "fitted"):
        parser.error(f"--method {options.method} takes one process per branch: {options.cfg}, and there are {world}")
    pipe = FluxPipeline.from_pretrained(options.model)
    defaults = dict(DEFAULTS)
    settings = Path(options.model) / "generation.json"
    if settings.exists():
        defaults.update(json.loads(settings.read_text("utf-8")))
    request = Request(
        pipe,
        options.prompt,
        defaults.get("negative_prompt"),
        steps=defaults["num_inference_steps"],
        height=defaults["height"],
        width=defaults["width"],
        seed=0,
        text=defaults["max_sequence_length"],
    )
    scale = defaults.get("true_cfg_scale", 1.0)
    latents = run_method(pipe, request, options.method, mesh, scale, options)
    # The last rank has the image whatever the method.
    if dist.get_rank() == dist.get_world_size() - 1:
        decode(pipe, latents, defaults["height"], defaults["width"]).save(options.out)
        print(f"the image is {options.out}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
