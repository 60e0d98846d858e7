"""CPU time of a micro-step outside of the blocks: embedding, constants, head, scheduler copies, the loop itself.

    python -m benchmarks.overhead
    python -m benchmarks.overhead --runner    # what a runner of one rank costs beside the plain pipeline, instead

The model has FLUX's real widths and random weights: 4096 image and 512 text tokens, 8 patches, one thread, fp32. Two
blocks run, and their time is scaled to the share of the 57 blocks that one of 8 stages has. With `--runner` the model
is a random PixArt of 16 blocks, 8 heads of 32 channels, 256 image tokens, 4 steps with guidance. The plain pipeline and
the runner take turns, and each is first in every other round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from rich.console import Console
from rich.table import Table
from torch import nn

from ditile.plan.plan import Plan
from ditile.runner.runner import parallelize
from ditile_lab.bench.random_models import RandomModel
from ditile_lab.rows import write_json_file

DOUBLE = 19
SINGLE = 38
STAGES = 8
PATCHES = 8
SIDE = 256
STEPS = 4


def pipeline() -> Any:
    """One double and one single block of FLUX.1-dev's widths."""
    torch.manual_seed(0)
    transformer: Any = FluxTransformer2DModel(num_layers=1, num_single_layers=1, guidance_embeds=True)
    vae = AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=(8, 8, 8, 8),
        norm_num_groups=4,
        latent_channels=16,
    )
    parts = dict.fromkeys(("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2"))
    pipe: Any = FluxPipeline(
        vae=vae, transformer=transformer.eval(), scheduler=FlowMatchEulerDiscreteScheduler(), **parts
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


class BlockClock:
    """CPU seconds spent in a list of blocks, per call."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        self.seconds: list[float] = []
        for block in blocks:
            block.register_forward_pre_hook(self._start_clock)
            block.register_forward_hook(self._stop_clock)

    def _start_clock(self, *_: Any) -> None:
        self._began = time.thread_time()

    def _stop_clock(self, *_: Any) -> None:
        self.seconds.append(time.thread_time() - self._began)


def runner_overhead(model: RandomModel, side: int, steps: int, rounds: int) -> dict[str, float]:
    """CPU seconds of a call of the plain pipeline and of a runner of one rank; the median of their ratios, less 1."""
    pipe = model.create_pipeline(side)
    ways: dict[str, Any] = {"plain": pipe, "runner": parallelize(pipe, Plan(), device="cpu", trust_code=True)}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for k in range(-1, rounds):  # the first is not counted
        for way in sorted(ways, reverse=bool(k % 2)):
            call = model.make_call_arguments(side, side, steps)
            began = time.thread_time()
            ways[way](**call)
            if k >= 0:
                seconds[way].append(time.thread_time() - began)
    ratios = [runner / plain for plain, runner in zip(seconds["plain"], seconds["runner"], strict=True)]
    medians = {f"{way}_s": statistics.median(taken) for way, taken in seconds.items()}
    return medians | {"rounds": rounds, "overhead": statistics.median(ratios) - 1}


def runner_table(found: Mapping[str, float]) -> Table:
    """What it costs, for people."""
    shown = Table("plain pipeline, s", "runner of one rank, s", "rounds", "more")
    shown.add_row(
        f"{found['plain_s']:.3f}", f"{found['runner_s']:.3f}", f"{found['rounds']:.0f}", f"{found['overhead']:+.1%}"
    )
    return shown


def make_outside_blocks_table(found: Mapping[str, float]) -> Table:
    """What was found, for people."""
    shown = Table("outside the blocks, s", "in the blocks of a stage, s", "outside")
    shown.add_row(f"{found['outside_s']:.3f}", f"{found['blocks_of_a_stage_s']:.3f}", f"{found['outside_share']:.1%}")
    return shown


def outside() -> dict[str, float]:
    """Measures one asynchronous step from zero keys."""
    pipe = pipeline()
    double = BlockClock(pipe.transformer.transformer_blocks)
    single = BlockClock(pipe.transformer.single_transformer_blocks)
    runner = parallelize(pipe, Plan(patches=PATCHES, warmup=0), device="cpu", trust_code=True)
    embeds = torch.randn(1, 512, 4096)
    began = time.thread_time()
    runner(
        prompt_embeds=embeds,
        pooled_prompt_embeds=embeds[:, 0, :768],
        height=1024,
        width=1024,
        output_type="latent",
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(0),
    )
    total = time.thread_time() - began
    micro_steps = len(double.seconds)
    beside = (total - sum(double.seconds) - sum(single.seconds)) / micro_steps
    of_stage = (DOUBLE * statistics.median(double.seconds) + SINGLE * statistics.median(single.seconds)) / STAGES
    return {"outside_s": beside, "blocks_of_a_stage_s": of_stage, "outside_share": beside / (beside + of_stage)}


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write it as JSON", metavar="FILE")
    parser.add_argument("--runner", action="store_true", help="a runner of one rank beside the plain pipeline, instead")
    parser.add_argument("--rounds", type=int, default=15, help="of --runner")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.runner:
        found = runner_overhead(
            RandomModel.parse_model_name("random-pixart blocks=16 heads=8"), SIDE, STEPS, given.rounds
        )
    else:
        found = outside()
    Console().print(runner_table(found) if given.runner else make_outside_blocks_table(found))
    if given.out is not None:
        write_json_file(given.out, found)


if __name__ == "__main__":
    main()
