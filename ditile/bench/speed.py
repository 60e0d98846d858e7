"""Speed of PipeFusion on one machine: N ranks x 1 thread against 1 rank x 1 thread, interleaved in one run.

    python -m ditile.bench.speed --ranks 2 --patches 4 --warmup 1 --rounds 5

Rank 0 runs the plain pipeline while the others wait; then all run the divided one; and so on, medians in the
end. The model is a real diffusers class with random weights and no text encoder, so that what is measured is
the denoising.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from diffusers import (
    AutoencoderKL,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
)

from ditile.blocks.schedule import Schedule
from ditile.flags import add_arguments, collect, option
from ditile.launch import launch
from ditile.plan import Plan
from ditile.runner import parallelize


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What is measured."""

    model: str = option("pixart", "family with random weights", choices=("pixart", "flux"))
    blocks: int = option(16, "blocks; of FLUX a third are double ones")
    heads: int = option(8, "attention heads")
    head_dim: int = option(32, "width of a head")
    size: int = option(512, "pixels of a side; 16 x 16 pixels are a token")
    steps: int = option(20, "denoising steps")
    ranks: int = option(2, "ranks, one thread each")
    patches: int = option(4, "patches")
    warmup: int = option(1, "synchronous steps")
    rounds: int = option(5, "interleaved rounds")


def pipeline(job: Job) -> Any:
    """The pipeline with random weights, the same on every rank."""
    torch.manual_seed(0)
    vae = AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=(8, 8, 8, 8), norm_num_groups=4, latent_channels=4,
    )  # fmt: skip
    width = job.heads * job.head_dim
    if job.model == "pixart":
        transformer: Any = PixArtTransformer2DModel(
            num_attention_heads=job.heads, attention_head_dim=job.head_dim, num_layers=job.blocks,
            cross_attention_dim=width, caption_channels=64, sample_size=job.size // 8,
        )  # fmt: skip
        parts: dict[str, Any] = {
            "scheduler": DPMSolverMultistepScheduler(),
            "tokenizer": None,
            "text_encoder": None,
        }
        pipe: Any = PixArtSigmaPipeline(vae=vae, transformer=transformer.eval(), **parts)
    else:
        double = job.blocks // 3
        transformer = FluxTransformer2DModel(
            in_channels=16, num_layers=double, num_single_layers=job.blocks - double,
            attention_head_dim=job.head_dim, num_attention_heads=job.heads, joint_attention_dim=64,
            pooled_projection_dim=64, axes_dims_rope=(job.head_dim - 2 * (job.head_dim // 4 // 2 * 2 * 3 // 2),)
            + (job.head_dim // 4 // 2 * 2 * 3 // 2,) * 2,
        )  # fmt: skip
        parts = dict.fromkeys(("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2"))
        scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
        pipe = FluxPipeline(vae=vae, transformer=transformer.eval(), scheduler=scheduler, **parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def arguments(job: Job) -> dict[str, Any]:
    """The call: 300 text tokens with PixArt (batched guidance), 512 with FLUX (embedded guidance)."""
    generator = torch.Generator().manual_seed(1)
    call: dict[str, Any] = {
        "height": job.size, "width": job.size, "num_inference_steps": job.steps, "output_type": "latent",
        "generator": torch.Generator().manual_seed(0),
    }  # fmt: skip
    if job.model == "flux":
        embeds = torch.randn(1, 512, 64, generator=generator)
        return call | {"prompt_embeds": embeds, "pooled_prompt_embeds": embeds[:, 0]}
    embeds, mask = torch.randn(1, 300, 64, generator=generator), torch.ones(1, 300)
    return call | {
        "prompt": None, "negative_prompt": None, "prompt_embeds": embeds, "prompt_attention_mask": mask,
        "negative_prompt_embeds": embeds.flip(1), "negative_prompt_attention_mask": mask,
        "use_resolution_binning": False, "guidance_scale": 4.5,
    }  # fmt: skip


def measure(job: Job) -> dict[str, list[float]]:
    """Seconds of each round, on this rank. The first round of each is not counted."""
    plain = pipeline(job)
    plan = Plan(pipefusion=job.ranks, patches=job.patches, warmup=job.warmup)
    runner = parallelize(pipeline(job), plan, device="cpu")
    seconds: dict[str, list[float]] = {"plain": [], "divided": []}
    for counted in [False] + [True] * job.rounds:
        for name, call in (("plain", plain), ("divided", runner)):
            if dist.is_initialized():
                dist.barrier()
            if name == "plain" and dist.is_initialized() and dist.get_rank() > 0:
                continue
            with free_to_move() if name == "plain" else nullcontext():
                began = time.perf_counter()
                call(**arguments(job))
                if counted:
                    seconds[name].append(time.perf_counter() - began)
    return seconds


@contextmanager
def free_to_move() -> Iterator[None]:
    """The plain pipeline may use any core, as if it were alone; `launch` binds ranks that fill the machine."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    yield
    os.sched_setaffinity(0, own)


def main() -> None:
    """Measures and prints one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, Job, title="job")
    job = Job(**collect(Job, parser.parse_args()))
    seconds = launch(measure, job.ranks, (job,), threads=1, stall_timeout=1800.0)[0]
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    bound = Schedule(job.ranks, job.patches, job.steps, job.warmup).bound()
    ratios = [a / b for a, b in zip(seconds["plain"], seconds["divided"], strict=True)]
    speedup = statistics.median(ratios)
    result = {"job": asdict(job), "seconds": seconds, "medians": medians, "speedup": speedup, "bound": bound}
    print(json.dumps(result | {"of_bound": speedup / bound}))


if __name__ == "__main__":
    main()
