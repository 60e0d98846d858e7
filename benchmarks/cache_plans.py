"""Speed-ups of a plan, of a cache, and of both together.

    python -m benchmarks.cache_plans --plan "pipefusion=2 patches=2" --setting "F=1 W=3 R=1 MC=2 taylor=1"

A bundled model draws, on ranks of one thread each; seconds are of wall time. Every caption is drawn by one rank alone,
by one rank with the cache, by all ranks, and by all ranks with the cache, in turn. Speed-ups are medians over captions
of the ratio to the first. The last line is the speed-up of both over the product of the two. PSNR is to the picture of
one rank without a cache.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from diffusers.utils.logging import disable_progress_bar
from rich.console import Console
from rich.table import Table

from benchmarks.cache_settings import OURS, CacheSetting
from ditile.distributed.launch import launch
from ditile.model.known import ASSETS
from ditile.plan.errors import DitileError
from ditile.plan.flag_parser import add_arguments, collect_arguments
from ditile.plan.option_classes import define_option
from ditile.plan.plan import Plan
from ditile.runner.caching import enable_cache
from ditile.runner.load import load
from ditile.runner.model_files import defaults
from ditile.runner.runner import parallelize
from ditile_lab.quality.caption_check import judge_image
from ditile_lab.quality.metrics import compute_psnr
from ditile_lab.rows import write_json_file
from ditile_lab.sessions import allow_all_cores

ALONE = "one rank"
CACHED = "cache"
PLANNED = "plan"
BOTH = "plan and cache"
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class CachePlansJob:
    """What is measured."""

    model: str = define_option("shapes-pixart", "bundled model")
    plan: str = define_option("pipefusion=2 patches=2", "plan")
    setting: str = define_option("F=1 W=3 R=1 MC=2 taylor=1", "cache, as in benchmarks.cache_quality")
    captions: int = define_option(10, "captions of the held-out list; one more is drawn first and not counted")
    steps: int = define_option(20, "denoising steps")
    size: int = define_option(256, "pixels of a side")
    out: str | None = define_option(None, "write the rows as JSON", metavar="FILE")


def pipeline(job: CachePlansJob, *, cache: bool) -> Any:
    """The model, with the cache if it is wanted."""
    pipe: Any = load(job.model)
    pipe.set_progress_bar_config(disable=True)
    setting = CacheSetting(OURS, job.setting)
    return enable_cache(pipe, setting.cache_config, setting.calibrator) if cache else pipe


def measure(job: CachePlansJob, captions: list[str]) -> list[Row]:
    """The rows of one rank: one for each counted caption and way; ranks above 0 have no rows of one rank alone."""
    disable_progress_bar()
    plan = Plan.parse(job.plan)
    rank = dist.get_rank()
    calls: dict[str, Any] = {
        ALONE: pipeline(job, cache=False),
        CACHED: pipeline(job, cache=True),
        PLANNED: parallelize(pipeline(job, cache=False), plan, device="cpu"),
        BOTH: parallelize(pipeline(job, cache=True), plan, device="cpu"),
    }
    rows: list[Row] = []
    for place, caption in enumerate(captions):
        reference = None
        for way, call in calls.items():
            dist.barrier()
            by_one = way in (ALONE, CACHED)
            if by_one and rank > 0:
                continue
            with allow_all_cores() if by_one else nullcontext():
                began = time.perf_counter()
                picture = draw_one_caption(call, job, place, caption, by_one=by_one)
                seconds = time.perf_counter() - began
            if picture is None or place == 0:
                continue
            reference = picture if reference is None else reference
            rows.append(
                {
                    "caption": place,
                    "way": way,
                    "seconds": seconds,
                    "psnr": float(compute_psnr(picture, reference)[0]),
                    "all_right": judge_image(picture[0], caption).all_right,
                }
            )
    return rows


def draw_one_caption(call: Any, job: CachePlansJob, place: int, caption: str, *, by_one: bool) -> Any:
    """The picture `[1, H, W, 3]` of a caption; None on ranks that do not get it."""
    options = defaults(job.model) | {
        "height": job.size,
        "width": job.size,
        "num_inference_steps": job.steps,
    }
    options |= {} if by_one else {"output": "first"}
    generator = torch.Generator().manual_seed(place)
    result = call(caption, output_type="np", generator=generator, **options)
    return None if result is None else (result.images * 255).round().astype(np.uint8)


def summed_up(rows: list[Row]) -> list[Row]:
    """One row for each way."""
    of_way: dict[str, list[Row]] = {}
    for row in rows:
        of_way.setdefault(row["way"], []).append(row)
    found = []
    for way, mine in of_way.items():
        ratios = [one["seconds"] / row["seconds"] for one, row in zip(of_way[ALONE], mine, strict=True)]
        found.append(
            {
                "way": way,
                "seconds": statistics.median(row["seconds"] for row in mine),
                "speedup": statistics.median(ratios),
                "lowest": min(ratios),
                "highest": max(ratios),
                "psnr": statistics.fmean(row["psnr"] for row in mine),
                "all_right": 100 * statistics.fmean(row["all_right"] for row in mine),
            }
        )
    return found


def make_cache_plans_table(found: list[Row]) -> Table:
    """The rows for people."""
    shown = Table("way", "seconds", "speed-up", "range", "PSNR, dB", "right, %")
    for row in found:
        shown.add_row(
            row["way"],
            f"{row['seconds']:.2f}",
            f"{row['speedup']:.2f}x",
            f"{row['lowest']:.2f} to {row['highest']:.2f}",
            f"{row['psnr']:.1f}",
            f"{row['all_right']:.0f}",
        )
    return shown


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, CachePlansJob, title="job")
    job = CachePlansJob(**collect_arguments(CachePlansJob, parser.parse_args()))
    captions = (ASSETS / "captions.txt").read_text("utf-8").splitlines()[: job.captions + 1]
    try:
        plan = Plan.parse(job.plan)
        found = summed_up(launch(measure, plan.world, (job, captions), threads=1, stall_timeout=3600.0)[0])
    except DitileError as error:
        raise SystemExit(f"error: {error}") from error
    shown = make_cache_plans_table(found)
    shown.title = f"{job.plan}; {job.setting}"
    Console(width=110).print(shown)
    gains = {row["way"]: row["speedup"] for row in found}
    print(f"of the product: {100 * gains[BOTH] / (gains[PLANNED] * gains[CACHED]):.0f} %")
    if job.out is not None:
        write_json_file(Path(job.out), found)


if __name__ == "__main__":
    main()
