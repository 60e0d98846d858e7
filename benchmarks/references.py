"""What `Plan(references=K)` costs and gains on one rank: FLUX Kontext's pipeline with the weights of shapes-flux.

    python -m benchmarks.references --pictures 4 --size 256

The model draws captions and was not trained for edits: a reference, which is a picture of another caption that it drew,
changes its pictures in an untrained way. So PSNR against the plain pipeline says how near frozen references come to
fresh ones here, and nothing of edits. All plans draw each picture in turn, and ratios are of these turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import diffusers
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from ditile.plan.flag_parser import add_arguments, collect_arguments
from ditile.plan.option_classes import define_option
from ditile.plan.plan import Plan
from ditile.runner.load import load
from ditile.runner.model_files import defaults
from ditile.runner.runner import parallelize
from ditile_lab.quality.metrics import compute_psnr
from ditile_lab.rows import write_json_file
from training.evaluate import list_captions

MODEL = "shapes-flux"
PLANS = ("plain", "references=1", "references=4", "references=2", "references=0", "references=0 warmup=2")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceJob:
    """What is measured."""

    pictures: int = define_option(4, "images, each of a held-out caption with the image of another one")
    size: int = define_option(256, "pixels of the side of image and reference")
    steps: int = define_option(20, "denoising steps")
    out: str | None = define_option(None, "write the rows as JSON", metavar="FILE")


def generate_under_plans(job: ReferenceJob, plans: Sequence[str]) -> list[dict[str, Any]]:
    """The seconds of the loop and the PSNR against the first plan, which is plain, of each plan; medians."""
    base = load(MODEL)
    base.set_progress_bar_config(disable=True)
    pipe = diffusers.FluxKontextPipeline(**base.components)
    pipe.set_progress_bar_config(disable=True)
    size = {"height": job.size, "width": job.size}
    call = defaults(MODEL) | size | {"num_inference_steps": job.steps}
    captions = list_captions(MODEL, job.pictures + 1)
    seconds: dict[str, list[float]] = {plan: [] for plan in plans}
    psnr: dict[str, list[float]] = {plan: [] for plan in plans}
    for index in range(job.pictures):
        generator = torch.Generator().manual_seed(1000 + index)
        reference = base(captions[index + 1], **call, generator=generator).images[0]
        edit = call | {"image": reference, "max_area": job.size**2, "_auto_resize": False}
        plain = None
        for plan in plans:
            image, loop_s = generate_with_reference(pipe, plan, captions[index], edit, seed=index)
            if plain is None:
                plain = image
            seconds[plan].append(loop_s)
            psnr[plan].append(float(compute_psnr(plain[None], image[None])[0]))
    rows = []
    for plan in plans:
        # Ratios of the same caption.
        ratios = [plain_s / loop_s for plain_s, loop_s in zip(seconds[plans[0]], seconds[plan], strict=True)]
        row = {"plan": plan, "seconds": median(seconds[plan]), "speedup": median(ratios), "psnr": None}
        if plan != plans[0]:
            row["psnr"] = median(psnr[plan])
        rows.append(row)
    return rows


def generate_with_reference(
    pipe: Any, plan: str, caption: str, call: Mapping[str, Any], seed: int
) -> tuple[Any, float]:
    """An image `[H, W, 3]` of bytes, and the seconds of its denoising loop."""
    parsed = Plan() if plan == "plain" else Plan.parse(plan)
    runner = parallelize(pipe, parsed)
    image = runner(prompt=caption, **call, generator=torch.Generator().manual_seed(seed)).images[0]
    seconds = runner.report.seconds["denoise"]
    runner.restore()
    return np.asarray(image), seconds


def show_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints the rows as a table."""
    table = Table("plan", "seconds of the loop", "speed-up", "PSNR, dB")
    for row in rows:
        near = "" if row["psnr"] is None else f"{row['psnr']:.1f}"
        table.add_row(row["plan"], f"{row['seconds']:.2f}", f"{row['speedup']:.2f}x", near)
    Console().print(table)


def main() -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, ReferenceJob, title="options")
    job = ReferenceJob(**collect_arguments(ReferenceJob, parser.parse_args()))
    rows = generate_under_plans(job, PLANS)
    show_rows(rows)
    if job.out is not None:
        write_json_file(Path(job.out), rows)


if __name__ == "__main__":
    main()
