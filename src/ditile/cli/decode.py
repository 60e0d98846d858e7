"""The work of one rank of `ditile decode`: load what decodes, decode what a file of latents holds, and write."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import safetensors.torch
import torch
from diffusers.image_processor import PixArtImageProcessor
from diffusers.video_processor import VideoProcessor
from torch import Tensor

from ditile.cli.generate import show_decoded_frames
from ditile.cli.latents import LatentsFacts, describe_config, read_facts
from ditile.distributed.backend import pick_device
from ditile.distributed.mesh import build_mesh, find_local_rank
from ditile.parallel.vae.host_frames import install_host_frames
from ditile.parallel.vae.parallel_vae import ParallelVAE
from ditile.plan.errors import ModelError
from ditile.plan.plan import Plan
from ditile.runner.load import convert_build_errors, load_component
from ditile.runner.requests.options import DecodeOptions, GenerateOptions
from ditile.runner.requests.outputs import RunOptions
from ditile.runner.requests.prepare import set_up_rank, silence_libraries
from ditile.runner.requests.results import list_outputs
from ditile.runner.requests.videos import check_encoder
from ditile.runner.runner import DecodeChecks


def check_decode(options: DecodeOptions) -> tuple[LatentsFacts, list[str]]:
    """Read the facts of a file of latents, and name the files that its decode writes.

    Raises:
        LoadError: if it is not a file of latents.
        ModelError: if there are too many ranks, or an output cannot be written.
    """
    silence_libraries()
    facts, rows = read_facts(Path(options.file))
    if options.ranks > rows:
        raise ModelError(f"ranks={options.ranks}: each rank needs a row of the latents, which have {rows}")
    run = RunOptions(out=options.out).name_output(GenerateOptions(model=facts.model), facts.kind)
    check_encoder(Path(run.out or ""), facts.fps)
    paths = run.list_image_paths(len(facts.pictures), facts.pictures[0][1], facts.model)
    run.check_output_paths(paths, options, video=facts.kind == "video")
    return facts, [*map(str, paths)]


def decode_latents(options: DecodeOptions, plan: Plan, facts: LatentsFacts, paths: list[str]) -> list[str]:
    """Run this rank's part, and return the lines of a summary.

    Raises `DitileError` if the model does not fit the latents, or what is decoded cannot be written.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        set_up_rank(options)
        device = pick_device(options.device, find_local_rank())
        mesh = build_mesh(plan, None, device)
        mesh.connect_groups(plan, device)
        pipe = _load_parts(options, plan, facts, device)
        begin = time.perf_counter()
        stack.enter_context(convert_build_errors(facts.model, f"cannot decode {options.file}"))
        checks = DecodeChecks()
        checks.install_checks(stack, pipe)
        for name in ("tiling", "slicing"):
            if getattr(options, name):
                getattr(pipe.vae, f"enable_{name}")()
        if plan.world > 1 or options.vae_block_size is not None:
            parallel = ParallelVAE(pipe.vae, mesh.image, mesh.traffic, block_size=options.vae_block_size)
            stack.enter_context(parallel.install_forwards())
        install_host_frames(stack, pipe.vae)
        is_first = mesh.rank == 0
        stack.enter_context(show_decoded_frames(pipe.vae, facts.frames * len(paths), shown=is_first))
        result = decode_inputs(pipe, facts, safetensors.torch.load_file(options.file))
        if checks.complaint is not None:
            raise ModelError(checks.complaint)
        if not is_first:
            return []
        seconds = time.perf_counter() - begin
        if len(list_outputs(pipe, result)) < len(paths):
            raise ModelError(f"{options.file} has more prompts than latents")
        facts.write_outputs(pipe, result, paths)
        return [f"{facts.kind + 's':<15}{' '.join(paths)}", f"{'seconds':<15}{seconds:.2f}  (decode)"]


def _load_parts(options: DecodeOptions, plan: Plan, facts: LatentsFacts, device: torch.device) -> Any:
    """Load the models that decode. Raises `ModelError` if a config differs from the one in the file."""
    model = options.model or facts.model
    files = facts.components | options.components
    parts = {}
    for name, config in facts.parts.items():
        part, _ = load_component(model, name, dtype=options.dtype or facts.dtype, plan=plan, components=files)
        if describe_config(part) != config:
            raise ModelError(f"the {name} of {model} has another config than that of {options.file}")
        parts[name] = part.to(device)
    return SimpleNamespace(components=parts, **parts)


@torch.no_grad()
def decode_inputs(pipe: Any, facts: LatentsFacts, tensors: Mapping[str, Tensor]) -> Any:
    """Decode what the VAEs of a call were given, and return its images, or its videos with their sound."""
    inputs: Any = defaultdict(dict)
    for name, tensor in tensors.items():
        part, _, argument = name.partition(".")
        vae = getattr(pipe, part)
        inputs[part][argument] = tensor.to(vae.device, vae.dtype)
    drawn = pipe.vae.decode(**inputs["vae"], return_dict=False)[0]
    processor: Any = VideoProcessor()
    if facts.kind == "image":
        processor = PixArtImageProcessor()
        # Some VAEs make an image as a video of one frame.
        if drawn.ndim == 5:
            drawn = drawn[:, :, 0]
    if facts.size:
        drawn = processor.resize_and_crop_tensor(drawn, *facts.size)
    if facts.kind == "image":
        return SimpleNamespace(images=processor.postprocess(drawn))
    result = SimpleNamespace(frames=processor.postprocess_video(drawn))
    if "audio_vae" in inputs:
        result.audio = pipe.vocoder(pipe.audio_vae.decode(**inputs["audio_vae"], return_dict=False)[0])
    elif "audio_vae" in facts.parts:
        print("the process ended before its sound was kept: the video is mute", file=sys.stderr)
    return result
