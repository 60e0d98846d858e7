"""Speed of plans against one rank and against each other, one thread a rank, interleaved in one run.

    python -m ditile.bench.speed --plans "pipefusion=2 patches=4; ulysses=2" --rounds 5
    python -m ditile.bench.speed --links 10gbit,1gbit,100mbit      # as root: two hosts in network namespaces

All plans have one number of ranks. Each round runs the plain pipeline on rank 0 while the others wait, then on every
rank at once, then every plan; a speed-up is the median over the rounds of the ratio within a round. A first, short
round is not counted. The model is a real diffusers class with random weights and no text encoder, so that what is
measured is the denoising. Ranks by themselves share nothing but the machine: what they lack of N no plan can have.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
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
from rich.console import Console
from rich.table import Table

from ditile import env
from ditile.bench.links import two_hosts
from ditile.blocks.schedule import Schedule
from ditile.errors import DitileError, PlanError
from ditile.flags import add_arguments, collect, option
from ditile.launch import keep_to_own_cores, launch
from ditile.plan import Plan
from ditile.runner import parallelize

METHODS = (
    "pipefusion=2 patches=4; pipefusion=2 patches=4 warmup_mode=pipelined; distrifusion=2; ulysses=2; "
    "ulysses=2 async_ulysses=true; ring=2; tensor=2; tensor=2 split_scheme=sequence; cfg=2"
)
ALONE, TOGETHER = "", "each rank by itself, at once"
FIRST = 3  # steps of the round that is not counted
Times = dict[str, list[float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What is measured."""

    model: str = option("pixart", "family with random weights", choices=("pixart", "flux"))
    blocks: int = option(16, "blocks; of FLUX a third are double ones")
    heads: int = option(8, "attention heads")
    head_dim: int = option(32, "width of a head")
    size: int = option(512, "pixels of a side; 16 x 16 pixels are a token")
    steps: int = option(20, "denoising steps")


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What is compared.

    Raises:
        PlanError: if the plans need different numbers of ranks.
    """

    plans: str = option(METHODS, "plans, with ; between them", metavar="PLANS")
    links: str | None = option(None, "bandwidths of the link between two hosts, such as 1gbit,100mbit", metavar="RATES")
    rounds: int = option(3, "interleaved rounds", metavar="N")
    out: str | None = option(None, "write the rows as JSON too", metavar="FILE")

    def __post_init__(self) -> None:
        if len({plan.world for plan in self.parsed}) > 1:
            worlds = ", ".join(f"'{plan}' {plan.world}" for plan in self.parsed)
            raise PlanError(f"plans must have one number of ranks, and these have: {worlds}")

    @property
    def parsed(self) -> list[Plan]:
        """The plans."""
        return [Plan.parse(text) for text in self.plans.split(";")]


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


def measure(job: Job, plans: list[Plan], rounds: int) -> Times:
    """Seconds of each counted round on this rank, by plan; the plain pipeline's under ALONE and TOGETHER."""
    plain = pipeline(job)
    several = dist.is_initialized()
    calls: dict[str, Any] = {ALONE: plain, TOGETHER: plain} if several else {ALONE: plain}
    calls |= {str(plan): parallelize(pipeline(job), plan, device="cpu") for plan in plans}
    seconds: Times = {name: [] for name in calls}
    short = dataclasses.replace(job, steps=min(job.steps, FIRST))
    for counted in [False] + [True] * rounds:
        for name, call in calls.items():
            if several:
                dist.barrier()
            if name == ALONE and several and dist.get_rank() > 0:
                continue
            with free_to_move() if name == ALONE else nullcontext():
                began = time.perf_counter()
                call(**arguments(job if counted else short))
                if counted:
                    seconds[name].append(time.perf_counter() - began)
    return seconds


def across(job: Job, plans: list[Plan], rounds: int, rate: str) -> Times:
    """The same with every rank on a host of its own, joined by a link of some bandwidth."""
    world = plans[0].world
    if world != 2:
        raise PlanError(f"links join two hosts of one rank each, and the plans need {world} ranks; give plans of 2")
    with tempfile.TemporaryDirectory() as folder, two_hosts(rate) as hosts:
        found = Path(folder, "seconds.json")
        work = json.dumps([dataclasses.asdict(job), [plan.to_dict() for plan in plans], rounds, str(found)])
        ranks = [
            subprocess.Popen(
                [*host.prefix, sys.executable, "-m", "ditile.bench.speed", "--as-rank", work],
                env=env.for_host(rank, world, hosts[0].address, host.interface),
            )
            for rank, host in enumerate(hosts)
        ]
        codes = [process.wait() for process in ranks]
        if any(codes):
            raise PlanError(f"the ranks across {rate} ended with exit codes {codes}")
        seconds: Times = json.loads(found.read_text())
        return seconds


def as_rank(work: str) -> None:
    """What a rank on a host of its own does."""
    job, plans, rounds, path = json.loads(work)
    place = env.torchrun()
    assert place is not None
    torch.set_num_threads(1)
    keep_to_own_cores(place.rank, place.world, 1)
    dist.init_process_group("gloo")
    seconds = measure(Job(**job), [Plan(**plan) for plan in plans], rounds)
    if place.rank == 0:
        Path(path).write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def free_to_move() -> Iterator[None]:
    """The plain pipeline may use any core, as if it were alone; `launch` binds ranks that fill the machine."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    yield
    os.sched_setaffinity(0, own)


def rows(job: Job, plans: list[Plan], seconds: Times, link: str) -> list[dict[str, Any]]:
    """One row per plan; before them the ranks by themselves, which make as many pictures as there are ranks."""
    found, alone, world = [], seconds[ALONE], plans[0].world
    bounds = {TOGETHER: float(world)} if TOGETHER in seconds else {}
    for name, bound in (bounds | {str(plan): speed_up_bound(job, plan) for plan in plans}).items():
        pictures = world if name == TOGETHER else 1
        ratios = [pictures * one / took for one, took in zip(alone, seconds[name], strict=True)]
        found.append({
            "link": link, "plan": name, "one_rank_s": statistics.median(alone),
            "seconds": statistics.median(seconds[name]), "speedup": statistics.median(ratios), "lowest": min(ratios),
            "highest": max(ratios), "bound": bound,
        })  # fmt: skip
    return found


def speed_up_bound(job: Job, plan: Plan) -> float:
    """Over one rank. PixArt's guidance makes two rows of a call, which `warmup_mode=pipelined` takes apart."""
    rows_of_call = 2 if job.model == "pixart" else 1
    bound = Schedule.of(plan, job.steps, rows_of_call).bound()
    return bound * plan.world / (plan.pipefusion * plan.distrifusion)


def table(found: list[dict[str, Any]]) -> Table:
    """The rows for people."""
    shown = Table("link", "plan", "one rank, s", "divided, s", "speed-up", "range", "bound", "of the bound")
    for row in found:
        shown.add_row(
            row["link"], row["plan"], f"{row['one_rank_s']:.2f}", f"{row['seconds']:.2f}", f"{row['speedup']:.2f}x",
            f"{row['lowest']:.2f} to {row['highest']:.2f}", f"{row['bound']:.2f}x",
            f"{100 * row['speedup'] / row['bound']:.0f} %",
        )  # fmt: skip
    return shown


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, Job, title="job")
    add_arguments(parser, Comparison, title="comparison")
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.as_rank is not None:
        return as_rank(given.as_rank)
    found: list[dict[str, Any]] = []
    try:
        job, wanted = Job(**collect(Job, given)), Comparison(**collect(Comparison, given))
        plans = wanted.parsed
        if wanted.links is None:
            times = launch(measure, plans[0].world, (job, plans, wanted.rounds), threads=1, stall_timeout=3600.0)[0]
            found = rows(job, plans, times, "this machine")
        else:
            for rate in wanted.links.split(","):
                found += rows(job, plans, across(job, plans, wanted.rounds, rate), rate)
    except DitileError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    Console(width=160).print(table(found))
    if wanted.out is not None:
        Path(wanted.out).write_text(json.dumps({"job": dataclasses.asdict(job), "rows": found}, indent=2) + "\n")
    return None


if __name__ == "__main__":
    main()
