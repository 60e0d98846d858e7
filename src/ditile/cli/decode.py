"""The work of one rank of `ditile decode`: load what decodes, run the end of the pipeline's call, and write."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ditile.cli.generate import show_decoded_frames
from ditile.cli.latents import LatentsFacts, digest_config, read_facts, read_values
from ditile.distributed.backend import pick_device
from ditile.distributed.mesh import Mesh, build_mesh, find_local_rank
from ditile.model.decode_tail import DecodeTail
from ditile.parallel.vae.host_frames import install_host_frames
from ditile.parallel.vae.parallel_vae import ParallelVAE
from ditile.plan.errors import ModelError, join_error_lines
from ditile.plan.plan import Plan
from ditile.runner.load import load_decoder
from ditile.runner.model_files import refuse_out_of_memory
from ditile.runner.requests.options import DecodeOptions, GenerateOptions
from ditile.runner.requests.outputs import RunOptions
from ditile.runner.requests.pipelines import enable_required_tiling
from ditile.runner.requests.prepare import silence_libraries
from ditile.runner.requests.results import add_picture_texts, list_outputs, write_drawn
from ditile.runner.requests.videos import check_encoder
from ditile.runner.runner import DecodeChecks


def check_decode(options: DecodeOptions) -> tuple[LatentsFacts, list[Path]]:
    """Read the facts of a file of latents, and name the files that its decode writes.

    Raises:
        LoadError: if it is not a file of latents.
        ModelError: if its decode is not that of the installed diffusers, or an output cannot be written.
    """
    silence_libraries()
    facts = read_facts(Path(options.file))
    facts.find_tail()
    run = RunOptions(out=options.out).name_output(GenerateOptions(model=facts.model), facts.kind)
    if facts.kind != "image":
        check_encoder(Path(run.out or ""), facts.fps)
    paths = run.list_image_paths(len(facts.pictures), facts.pictures[0][1], facts.model)
    run.check_output_paths(paths, options, video=facts.kind == "video")
    return facts, paths


def decode_latents(
    options: DecodeOptions, plan: Plan, facts: LatentsFacts, paths: list[Path]
) -> list[tuple[str, str]] | None:
    """Run this rank's part. Rank 0 returns the rows of a summary, the others None.

    Raises:
        DitileError: if the model does not fit the latents, or what is decoded cannot be written.
    """
    with contextlib.redirect_stdout(sys.stderr):
        silence_libraries()
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        device = pick_device(options.device, find_local_rank())
        mesh = build_mesh(plan, None, device)
        mesh.connect_groups(plan, device)
        tail = facts.find_tail()
        pipe = _load_parts(options, facts, tail).to(device)
        begin = time.perf_counter()
        values = read_values(Path(options.file), facts, device)
        vars(pipe).update({name: value for name, value in facts.attributes.items() if name in tail.attributes})
        checks = DecodeChecks()
        with contextlib.ExitStack() as stack:
            checks.install_checks(stack, pipe)
            _prepare_vae(stack, pipe, options, mesh)
            stack.enter_context(show_decoded_frames(pipe, facts.call, len(facts.pictures), shown=mesh.rank == 0))
            result = _run_tail(tail, pipe, values, options)
        if checks.complaint is not None:
            raise ModelError(checks.complaint)
        if mesh.rank != 0:
            return None
        seconds = time.perf_counter() - begin
        outputs = list_outputs(pipe, result)
        if len(outputs) < len(paths):
            raise ModelError(f"{options.file} has prompts of {len(paths)} {facts.kind}s, and latents of {len(outputs)}")
        # A call may return more than `ditile generate` writes.
        for (drawn, sound), path, (prompt, seed) in zip(outputs, paths, facts.pictures, strict=False):
            texts = add_picture_texts(facts.texts, pipe, facts.call, prompt, seed, drawn)
            write_drawn(drawn, str(path), facts.fps, texts, sound)
        return [(f"{facts.kind}s", " ".join(map(str, paths))), ("seconds", f"{seconds:.2f}  (decode)")]


def _load_parts(options: DecodeOptions, facts: LatentsFacts, tail: DecodeTail) -> Any:
    """Load the models that decode. Raises `ModelError` if they are of other configs than those of the file."""
    model = options.model or facts.model
    files = facts.components | options.components
    pipe = load_decoder(model, tail.pipeline, tail.attributes, options.dtype or facts.dtype, files)
    for name, digest in facts.parts.items():
        if digest_config(getattr(pipe, name, None)) != digest:
            raise ModelError(f"{options.file} is of {facts.model}, and the {name} of {model} has another config")
    enable_required_tiling(pipe)
    return pipe


def _prepare_vae(stack: contextlib.ExitStack, pipe: Any, options: DecodeOptions, mesh: Mesh) -> None:
    """Let the VAE decode as the options say, until the stack is closed."""
    vae = getattr(pipe, "vae", None)
    for name in ("tiling", "slicing"):
        if getattr(options, name):
            enable = getattr(vae, f"enable_{name}", None)
            if enable is None:
                raise ModelError(f"{name}=True: {type(vae).__name__} has no enable_{name}(); leave it out")
            enable()
    if mesh.world > 1 or options.vae_block_size is not None:
        parallel = ParallelVAE(vae, mesh.image, mesh.traffic, block_size=options.vae_block_size)
        stack.enter_context(parallel.install_forwards())
    install_host_frames(stack, vae)


def _run_tail(tail: DecodeTail, pipe: Any, values: dict[str, Any], options: DecodeOptions) -> Any:
    try:
        with torch.no_grad():
            return tail.run(pipe, values)
    except (ValueError, TypeError, LookupError, AttributeError, NameError, RuntimeError) as error:
        refuse_out_of_memory(error)
        reason = f"{type(error).__name__}: {join_error_lines(error)}"
        raise ModelError(f"{options.file} cannot be decoded: {reason}") from error
