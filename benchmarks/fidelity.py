"""Fidelity of stale keys on the bundled models: how far pictures are from those of one process.

    python -m benchmarks.fidelity --captions 100 --ranks 2,4,8 --warmups 0,1,2,auto
    python -m benchmarks.fidelity --plans "pipefusion=4; distrifusion=4; pipefusion=4 warmup=2"

Each plan draws the same captions with the same seeds on real gloo ranks. The numbers are PSNR and SSIM against one
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

from ditile.distributed import files
from ditile.distributed.launch import launch
from ditile.measure.evaluate.caption_check import score_pictures
from ditile.measure.evaluate.metrics import Pictures, compute_psnr, compute_ssim
from ditile.measure.evaluate.motion_check import score_clips
from ditile.model.hooks.generation import LayerTokens
from ditile.model.hooks.key_padding import AttentionOptions
from ditile.parallel.attention.core import StaleKeys
from ditile.plan.flags import add_arguments, collect_arguments, define_option
from ditile.plan.plan import Plan
from ditile.runner.load import defaults, load
from ditile.runner.runner import parallelize
from training.evaluate import list_captions

METHODS = ("pipefusion", "distrifusion")
CONTROL = " (control: own patch only)"


@dataclass(frozen=True, kw_only=True, slots=True)
class FidelityJob:
    """What is measured."""

    models: str = define_option("shapes-pixart,shapes-flux", "bundled models")
    captions: int = define_option(100, "captions of the held-out list")
    ranks: str = define_option(
        "2,4,8", "numbers of ranks, each with PipeFusion (as many patches) and with DistriFusion"
    )
    warmups: str = define_option("0,1,2,auto", "synchronous steps, each with all of these")
    plans: str | None = define_option(None, "plans instead of those, with ; between them", metavar="PLANS")
    steps: int = define_option(20, "denoising steps")
    size: int = define_option(128, "pixels of a side")
    batch: int = define_option(10, "captions at once")
    out: str | None = define_option(None, "write the rows as JSON, each when it is there", metavar="FILE")

    def parse_plans(self) -> list[Plan]:
        """The plans.

        Raises:
            PlanError: if one of them is none.
        """
        if self.plans is not None:
            return [Plan.parse(text) for text in self.plans.split(";")]
        pairs = [(n, w) for w in self.warmups.split(",") for n in self.ranks.split(",")]
        return [Plan.parse(f"{axis}={n} warmup={w}") for n, w in pairs for axis in METHODS]

    def controls(self) -> list[Plan]:
        """Plans of one rank for the controls: one for every warmup that is a number."""
        warmups = {plan.least_warmup for plan in self.parse_plans()}
        return [Plan(patches=4, warmup=warmup) for warmup in sorted(warmups)]


class OwnPatchOnly(StaleKeys):
    """The control: after the warmup a patch attends to itself (and the text, where it came along)."""

    def attend_to_keys(self, q: Tensor, k: Tensor, v: Tensor, tokens: LayerTokens, extra: AttentionOptions) -> Tensor:
        """Attends to what is fresh in this very call."""
        return self.kernel(q, k, v, scale=extra.scale)


def draw_all_captions(
    model: str, captions: Sequence[str], job: FidelityJob, plan: Plan, control: bool
) -> tuple[Pictures, float] | None:
    """The pictures `[n, H, W, 3]` of all captions, and the mean number of synchronous steps, on rank 0.

    Of a clip all frames are one high picture.
    """
    pipe: Any = load(model)
    pipe.set_progress_bar_config(disable=True)
    runner = parallelize(pipe, plan, device="cpu")
    if control:
        runner._parts.attention.stale_keys = OwnPatchOnly
    size = {} if is_of_videos(model) else {"height": job.size, "width": job.size}
    call = defaults(model) | size | {"num_inference_steps": job.steps}
    done, synchronous = [], []
    for start in range(0, len(captions), job.batch):
        some = list(captions[start : start + job.batch])
        generators = [torch.Generator().manual_seed(start + k) for k in range(len(some))]
        if call.get("negative_prompt") is not None:
            call["negative_prompt"] = [""] * len(some)
        result = runner(some, output="first", output_type="np", generator=generators, **call)
        if result is not None and runner.report is not None:
            drawn = result.frames if is_of_videos(model) else result.images
            done.append((drawn.reshape(len(some), -1, *drawn.shape[-2:]) * 255).round().astype(np.uint8))
            synchronous.append(len(runner.report.synchronous))
    return (np.concatenate(done), float(np.mean(synchronous))) if done else None


def is_of_videos(model: str) -> bool:
    """Whether a bundled model draws clips, at its own size."""
    return "num_frames" in defaults(model)


def score_drawn(model: str, pictures: Pictures, captions: Sequence[str]) -> dict[str, float]:
    """Per cent of the captions that are right, by what is checked."""
    if not is_of_videos(model):
        return score_pictures(pictures, captions)
    height = int(defaults(model)["height"])
    return score_clips([each.reshape(-1, height, *each.shape[1:]) for each in pictures], captions)


def read_rows_of_job(path: Path, captions: Sequence[str], job: FidelityJob) -> list[dict[str, Any]]:
    """The rows of a file that are of the same job."""
    found = json.loads(path.read_text("utf-8")) if path.exists() else []
    return [row for row in found if row.items() >= _describe_fidelity_job(captions, job).items()]


def measure_fidelity_rows(
    model: str, captions: Sequence[str], job: FidelityJob, made: Sequence[dict[str, Any]] = ()
) -> Iterator[dict[str, Any]]:
    """One row for one process, each plan, and the controls; those that are made already are not made again."""
    known = {row["plan"]: row for row in made if row["model"] == model}
    plans = [(plan, False) for plan in (Plan(), *job.parse_plans())] + [(plan, True) for plan in job.controls()]
    named = {f"{plan}{CONTROL if control else ''}": (plan, control) for plan, control in plans}
    reference, complete = None, named.keys() <= known.keys()
    for name, (plan, control) in named.items():
        if name in known and (complete or reference is not None):
            yield known[name]
            continue
        work = (model, captions, job, plan, control)
        pictures, synchronous = launch(draw_all_captions, plan.world, work, threads=1, stall_timeout=3600.0)[0]
        reference = pictures if reference is None else reference
        decibels = compute_psnr(pictures, reference)
        yield {
            "model": model,
            **_describe_fidelity_job(captions, job),
            "plan": name,
            "synchronous": synchronous,
            "psnr": float(decibels.mean()),
            "psnr_min": float(decibels.min()),
            "ssim": float(compute_ssim(pictures, reference).mean()),
            **score_drawn(model, pictures, captions),
        }


def _describe_fidelity_job(captions: Sequence[str], job: FidelityJob) -> dict[str, int]:
    return {"captions": len(captions), "steps": job.steps, "pixels": job.size, "batch": job.batch}


def make_fidelity_table(found: Sequence[dict[str, Any]]) -> Table:
    """The rows for people."""
    shown = Table("model", "plan")
    for name in ("synchronous steps", "mean PSNR, dB", "lowest", "mean SSIM", "all right, %"):
        shown.add_column(name, justify="right")
    for row in found:
        numbers = [f"{row['synchronous']:.1f}", f"{row['psnr']:.1f}", f"{row['psnr_min']:.1f}", f"{row['ssim']:.4f}"]
        shown.add_row(row["model"], row["plan"], *numbers, f"{row['all_right']:.0f}")
    return shown


def by_warmup(found: Sequence[dict[str, Any]]) -> Table:
    """Mean PSNR of each plan over the synchronous steps, and how many `auto` chose."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in found:
        if row["plan"].endswith(CONTROL) or (plan := Plan.parse(row["plan"])).world == 1:
            continue
        of_plan = cells.setdefault((row["model"], str(dataclasses.replace(plan, warmup=1))), {})
        of_plan[str(plan.warmup)] = f"{row['psnr']:.1f}"
        if plan.warmup == "auto":
            of_plan["steps of auto"] = f"{row['synchronous']:.1f}"
    columns = sorted({name for of_plan in cells.values() for name in of_plan})
    shown = Table("model", "plan")
    for name in columns:
        shown.add_column(f"W = {name}" if name.isdigit() else name, justify="right")
    for key, of_plan in cells.items():
        shown.add_row(*key, *(of_plan.get(name, "") for name in columns))
    return shown


def compared(table: Sequence[dict[str, Any]]) -> list[str]:
    """For each model, number of ranks and warmup that both methods have: which of them comes closer, in PSNR."""
    found = {(row["model"], row["plan"]): float(row["psnr"]) for row in table}
    lines = []
    for (model, plan), mine in found.items():
        theirs = found.get((model, plan.replace("pipefusion", "distrifusion")))
        if "distrifusion" in plan or "pipefusion" not in plan or theirs is None:
            continue
        verdict = "PipeFusion comes closer" if mine > theirs else "PipeFusion does NOT come closer"
        lines.append(f"{model}, {plan}: {mine:.1f} dB, DistriFusion {theirs:.1f} dB: {verdict}")
    return lines


def main() -> None:
    """Measures, prints a line of JSON per row, and compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, FidelityJob, title="job")
    job = FidelityJob(**collect_arguments(FidelityJob, parser.parse_args()))
    out = None if job.out is None else Path(job.out)
    made: dict[tuple[str, str], dict[str, Any]] = {}
    for model in job.models.split(","):
        captions = list_captions(model, job.captions)
        of_model = dataclasses.replace(job, size=int(defaults(model)["height"])) if is_of_videos(model) else job
        if out is not None:
            made |= {(row["model"], row["plan"]): row for row in read_rows_of_job(out, captions, of_model)}
        for row in measure_fidelity_rows(model, captions, of_model, list(made.values())):
            print(json.dumps(row), flush=True)
            made[row["model"], row["plan"]] = row
            if out is not None:
                files.write_json_file(out, list(made.values()))
    print("\n".join(compared(list(made.values()))))


if __name__ == "__main__":
    main()
