"""Fidelity of stale keys on the bundled models: how far images are from those of one process.

    python -m benchmarks.fidelity --captions 100 --ranks 2,4,8 --warmups 0,1,2,3
    python -m benchmarks.fidelity --plans "pipefusion=4; distrifusion=4; pipefusion=4 warmup=2"

Each plan generates the same captions with the same seeds on real gloo ranks. The numbers are PSNR and SSIM against one
process, and caption accuracy. The controls never read keys of another patch after the warmup, which shows that the
numbers tell a right exchange from none. At the end PipeFusion and DistriFusion are compared at equal ranks and warmup.
A run that was interrupted resumes: rows of the same job in `--out` are not measured again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from ditile.distributed.launch import launch
from ditile.model.hooks.generation import LayerTokens
from ditile.model.hooks.key_padding import AttentionOptions
from ditile.parallel.attention.core import StaleKeys
from ditile.plan.flag_parser import add_arguments, collect_arguments
from ditile.plan.option_classes import define_option
from ditile.plan.plan import Plan
from ditile.runner.load import load
from ditile.runner.model_files import defaults
from ditile.runner.runner import parallelize
from ditile_lab.quality.metrics import ImageArrays, compute_psnr, compute_ssim
from ditile_lab.rows import write_json_file
from training.caption_scores import score_images
from training.evaluate import list_captions
from training.motion_check import score_clips

METHODS = ("pipefusion", "distrifusion")
CONTROL = " (control: own patch only)"
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class FidelityJob:
    """What is measured."""

    models: str = define_option("shapes-pixart,shapes-flux", "bundled models")
    captions: int = define_option(100, "captions of the held-out list")
    ranks: str = define_option(
        "2,4,8", "numbers of ranks, each with PipeFusion (as many patches) and with DistriFusion"
    )
    warmups: str = define_option("0,1,2,3", "synchronous steps, each with all of these")
    plans: str | None = define_option(None, "plans instead of those, with ; between them", metavar="PLANS")
    steps: int = define_option(20, "denoising steps")
    size: int = define_option(128, "pixels of a side")
    batch: int = define_option(10, "captions at once")
    out: str | None = define_option(None, "write the rows as JSON, each when it is there", metavar="FILE")

    def parse_plans(self) -> list[Plan]:
        """The plans. Raises `PlanError` if one of them cannot be read."""
        if self.plans is not None:
            return [Plan.parse(text) for text in self.plans.split(";")]
        plans = []
        for warmup in self.warmups.split(","):
            for ranks in self.ranks.split(","):
                plans += [Plan.parse(f"{axis}={ranks} warmup={warmup}") for axis in METHODS]
        return plans

    def controls(self) -> list[Plan]:
        """Plans of one rank for the controls: one for every warmup that is a number."""
        warmups = {plan.warmup for plan in self.parse_plans()}
        return [Plan(patches=4, warmup=warmup) for warmup in sorted(warmups)]

    def list_settings(self) -> dict[str, tuple[Plan, bool]]:
        """The name in rows -> a plan, and whether it is a control; one process comes first."""
        settings = {str(plan): (plan, False) for plan in (Plan(), *self.parse_plans())}
        for plan in self.controls():
            settings[f"{plan}{CONTROL}"] = (plan, True)
        return settings


class OwnPatchOnly(StaleKeys):
    """The control: after the warmup a patch attends to itself (and the text, where it came along)."""

    def attend_to_keys(self, q: Tensor, k: Tensor, v: Tensor, tokens: LayerTokens, extra: AttentionOptions) -> Tensor:
        """Attends to what is fresh in this very call."""
        return self.kernel(q, k, v, scale=extra.scale)


def generate_captions(
    model: str, captions: Sequence[str], job: FidelityJob, plan: Plan, control: bool
) -> tuple[ImageArrays, float] | None:
    """The images `[N, H, W, 3]` of all captions, and the mean number of synchronous steps, on rank 0.

    All frames of a clip are one high image.
    """
    pipe: Any = load(model)
    pipe.set_progress_bar_config(disable=True)
    runner = parallelize(pipe, plan, device="cpu")
    if control:
        runner._parts.attention.stale_keys = OwnPatchOnly
    call = defaults(model) | {"num_inference_steps": job.steps}
    if not is_of_videos(model):
        call |= {"height": job.size, "width": job.size}
    batches = []
    synchronous_steps = []
    for start in range(0, len(captions), job.batch):
        batch = list(captions[start : start + job.batch])
        # The noise of a caption depends on its place only, not on the batch.
        generators = [torch.Generator().manual_seed(start + index) for index in range(len(batch))]
        if call.get("negative_prompt") is not None:
            call["negative_prompt"] = [""] * len(batch)
        result = runner(batch, output="first", output_type="np", generator=generators, **call)
        if result is None or runner.report is None:
            continue
        images = result.frames if is_of_videos(model) else result.images
        images = images.reshape(len(batch), -1, *images.shape[-2:])
        batches.append((images * 255).round().astype(np.uint8))
        synchronous_steps.append(len(runner.report.synchronous))
    if not batches:
        return None
    return np.concatenate(batches), float(np.mean(synchronous_steps))


def is_of_videos(model: str) -> bool:
    """Whether a bundled model generates clips, at its own size."""
    return "num_frames" in defaults(model)


def score_captions(model: str, images: ImageArrays, captions: Sequence[str]) -> dict[str, float]:
    """Per cent of the captions that are right, by what is checked."""
    if not is_of_videos(model):
        return score_images(list(images), captions)
    height = int(defaults(model)["height"])
    clips = [frames.reshape(-1, height, *frames.shape[1:]) for frames in images]
    return score_clips(clips, captions)


def read_rows_of_job(path: Path, captions: Sequence[str], job: FidelityJob) -> list[Row]:
    """The rows of a file that are of the same job."""
    if not path.exists():
        return []
    about = _describe_fidelity_job(captions, job)
    return [row for row in json.loads(path.read_text("utf-8")) if row.items() >= about.items()]


def measure_fidelity_rows(
    model: str, captions: Sequence[str], job: FidelityJob, measured: Sequence[Row] = ()
) -> Iterator[Row]:
    """One row for one process, each plan, and the controls; rows that are measured already are yielded as they are."""
    known = {row["plan"]: row for row in measured if row["model"] == model}
    settings = job.list_settings()
    is_complete = settings.keys() <= known.keys()
    reference = None
    for name, (plan, control) in settings.items():
        # The image of one process is generated again if any other is: they are compared with it.
        if name in known and (is_complete or reference is not None):
            yield known[name]
            continue
        arguments = (model, captions, job, plan, control)
        images, synchronous = launch(generate_captions, plan.world, arguments, threads=1, stall_timeout=3600.0)[0]
        if reference is None:
            reference = images
        decibels = compute_psnr(images, reference)
        yield {
            "model": model,
            **_describe_fidelity_job(captions, job),
            "plan": name,
            "synchronous": synchronous,
            "psnr": float(decibels.mean()),
            "psnr_min": float(decibels.min()),
            "ssim": float(compute_ssim(images, reference).mean()),
            **score_captions(model, images, captions),
        }


def _describe_fidelity_job(captions: Sequence[str], job: FidelityJob) -> dict[str, int]:
    return {"captions": len(captions), "steps": job.steps, "pixels": job.size, "batch": job.batch}


def make_fidelity_table(rows: Sequence[Row]) -> Table:
    """The rows for people."""
    table = Table("model", "plan")
    for name in ("synchronous steps", "mean PSNR, dB", "lowest", "mean SSIM", "all right, %"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row["model"],
            row["plan"],
            f"{row['synchronous']:.1f}",
            f"{row['psnr']:.1f}",
            f"{row['psnr_min']:.1f}",
            f"{row['ssim']:.4f}",
            f"{row['all_right']:.0f}",
        )
    return table


def by_warmup(rows: Sequence[Row]) -> Table:
    """Mean PSNR of each plan over the synchronous steps."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        if row["plan"].endswith(CONTROL):
            continue
        plan = Plan.parse(row["plan"])
        if plan.world == 1:
            continue
        line = cells.setdefault((row["model"], str(dataclasses.replace(plan, warmup=1))), {})
        line[str(plan.warmup)] = f"{row['psnr']:.1f}"
    columns = sorted(set[str]().union(*cells.values()))
    table = Table("model", "plan")
    for name in columns:
        table.add_column(f"W = {name}", justify="right")
    for key, line in cells.items():
        table.add_row(*key, *(line.get(name, "") for name in columns))
    return table


def compared(rows: Sequence[Row]) -> list[str]:
    """For each model, number of ranks and warmup that both methods have: which of them comes closer, in PSNR."""
    psnr = {(row["model"], row["plan"]): float(row["psnr"]) for row in rows}
    lines = []
    for (model, plan), pipefusion in psnr.items():
        distrifusion = psnr.get((model, plan.replace("pipefusion", "distrifusion")))
        if "distrifusion" in plan or "pipefusion" not in plan or distrifusion is None:
            continue
        verdict = "PipeFusion does NOT come closer"
        if pipefusion > distrifusion:
            verdict = "PipeFusion comes closer"
        lines.append(f"{model}, {plan}: {pipefusion:.1f} dB, DistriFusion {distrifusion:.1f} dB: {verdict}")
    return lines


def main() -> None:
    """Measures, prints a line of JSON per row, and compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, FidelityJob, title="job")
    job = FidelityJob(**collect_arguments(FidelityJob, parser.parse_args()))
    rows: dict[tuple[str, str], Row] = {}
    for model in job.models.split(","):
        captions = list_captions(model, job.captions)
        model_job = job
        if is_of_videos(model):
            model_job = dataclasses.replace(job, size=int(defaults(model)["height"]))
        if job.out is not None:
            for row in read_rows_of_job(Path(job.out), captions, model_job):
                rows[row["model"], row["plan"]] = row
        for row in measure_fidelity_rows(model, captions, model_job, list(rows.values())):
            print(json.dumps(row), flush=True)
            rows[row["model"], row["plan"]] = row
            if job.out is not None:
                write_json_file(Path(job.out), list(rows.values()))
    print("\n".join(compared(list(rows.values()))))


if __name__ == "__main__":
    main()
