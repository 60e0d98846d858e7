"""Predictions beside measurements: plans of up to two ranks and hybrids of four, on a machine calibrated for each job.

    python -m benchmarks.predictions --out predictions.json

It takes forty minutes on two idle cores, with seven calibrations. A run that was interrupted resumes (`ditile bench`
does, in the folder `predictions`). Errors are those of the seconds of the denoising loop, the median of its rounds. The
error of the speed-up over one rank, which is measured in turn with the plans, does not depend on how the machine's
speed changed since the calibration.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from ditile_lab.bench.cells import ONE_RANK
from ditile_lab.bench.runs import ROWS
from ditile_lab.rows import write_json_file

CACHE = "F=1 W=3 R=1 MC=2 taylor=1"
PATCHED = "pipefusion=2 patches=2; pipefusion=2 patches=4; "
EXACT = "; distrifusion=2; ulysses=2; ring=2; tensor=2"
BUNDLED = (
    f"{PATCHED}pipefusion=2 patches=2 warmup_mode=pipelined; pipefusion=2 patches=4 warmup_mode=sequence{EXACT}; "
    f"cfg=2; pipefusion=1 | {CACHE}; pipefusion=2 patches=2 | {CACHE}; ulysses=2 | {CACHE}"
)
RANDOM = f"{PATCHED}pipefusion=2 patches=8; pipefusion=2 patches=4 warmup_mode=sequence{EXACT}"
HYBRIDS = (
    "cfg=2 pipefusion=2 patches=2; cfg=2 ulysses=2; pipefusion=2 ulysses=2 patches=2; pipefusion=4 patches=4; "
    "ring=2 ulysses=2; pipefusion=2 tensor=2 patches=2"
)
ONE = "one rank"
RANDOM_FLUX = "random-flux blocks=12 heads=4 head_dim=64"


class PredictionJob(NamedTuple):
    """One call, and the plans that it is made under.

    Attributes:
        model, size, steps: the call.
        plans: as `ditile bench` takes them.
        rounds: how often each plan is measured; short calls, which a short disturbance can cover, need more rounds.
    """

    model: str
    size: int
    steps: int
    plans: str
    rounds: int = 3

    @property
    def job_name(self) -> str:
        """For people, and of its folder."""
        return f"{self.model.partition(' ')[0]} {self.size} px {self.steps} steps"


JOBS = (
    PredictionJob("shapes-flux", 128, 12, BUNDLED, 5),
    PredictionJob("shapes-flux", 192, 12, BUNDLED, 5),
    PredictionJob("shapes-pixart", 192, 12, BUNDLED, 5),
    PredictionJob("shapes-pixart", 256, 12, BUNDLED),
    PredictionJob(RANDOM_FLUX, 256, 8, RANDOM),
    PredictionJob(RANDOM_FLUX, 512, 5, RANDOM),
    PredictionJob("shapes-pixart", 256, 8, HYBRIDS),
)
Row = dict[str, Any]


def measure(folder: Path) -> list[Row]:
    """The rows of all jobs.

    Raises:
        SystemExit: if one fails; what others measured is kept.
    """
    results: list[Row] = []
    for job in JOBS:
        out = folder / job.job_name.replace(" ", "-")
        size = str(job.size)
        profile = out.with_suffix(".json")
        if not profile.exists():
            _run_ditile_command("calibrate", "--out", str(profile))
        _run_ditile_command(
            "bench",
            "--model",
            job.model,
            "--height",
            size,
            "--width",
            size,
            "--steps",
            str(job.steps),
            "--output",
            "latent",
            "--rounds",
            str(job.rounds),
            "--profile",
            str(profile),
            "--out",
            str(out),
            "--plans",
            job.plans,
        )
        rows = [json.loads(line) for line in (out / ROWS).read_text("utf-8").splitlines()]
        one = next(row for row in rows if row["plan"] == ONE_RANK)
        results += [_shorten_bench_row(job, row, one) for row in rows]
    return results


def _run_ditile_command(*words: str) -> None:
    print(" ".join(words), file=sys.stderr, flush=True)
    if code := subprocess.run([sys.executable, "-m", "ditile", *words], check=False).returncode:
        raise SystemExit(f"error: ditile {words[0]} ended with exit code {code}")


def _shorten_bench_row(job: PredictionJob, row: Row, one: Row) -> Row:
    names = ("world", "loop_s", "predicted_loop_s", "predicted_error", "predicted_memory_error")
    plan = ONE if row["plan"] == ONE_RANK else row["plan"]
    label = f"{plan} | {row['cache']}" if row["cache"] else plan
    speedup = (1 + one["predicted_error"]) / (1 + row["predicted_error"]) - 1
    return {"job": job.job_name, "plan": label, "speedup_error": speedup} | {name: row.get(name) for name in names}


def make_predictions_table(rows: Sequence[Row]) -> Table:
    """A row for each plan, a column for each job; what they come to below."""
    jobs = list(dict.fromkeys(row["job"] for row in rows))
    shown = Table("plan", *jobs)
    cells = {(row["plan"], row["job"]): f"{row['loop_s']:.2f} s, {row['predicted_error']:+.0%}" for row in rows}
    for plan in dict.fromkeys(row["plan"] for row in rows):
        shown.add_row(plan, *(cells.get((plan, job), "") for job in jobs))
    of_jobs = (
        ("median error, worst", _format_errors),
        ("of the speed-up", _of_speedups),
        ("predicted fastest", _format_predicted_fastest),
        ("memory, worst", _format_memory_error),
    )
    for name, text in of_jobs:
        shown.add_row(name, *(text([row for row in rows if row["job"] == job]) for job in jobs))
    return shown


def _format_errors(rows: Sequence[Row], name: str = "predicted_error") -> str:
    errors = [abs(row[name]) for row in rows]
    return f"{statistics.median(errors):.1%}, {max(errors):.1%}"


def _of_speedups(rows: Sequence[Row]) -> str:
    return _format_errors([row for row in rows if row["plan"] != ONE], "speedup_error")


def find_predicted_fastest(rows: Sequence[Row]) -> tuple[str, float]:
    """The plan of a job that is predicted first, of those that leave nothing out; how far it is behind the fastest."""
    plans = [row for row in rows if "|" not in row["plan"]]
    chosen = min(plans, key=lambda row: float(row["predicted_loop_s"]))
    return chosen["plan"], chosen["loop_s"] / min(row["loop_s"] for row in plans) - 1


def _format_predicted_fastest(rows: Sequence[Row]) -> str:
    plan, behind = find_predicted_fastest(rows)
    return f"{plan}: the fastest" if behind == 0 else f"{plan}: {behind:.0%} behind the fastest"


def _format_memory_error(rows: Sequence[Row]) -> str:
    errors = [abs(row["predicted_memory_error"]) for row in rows if row["predicted_memory_error"] is not None]
    return f"{max(errors):.0%}" if errors else ""


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """What all jobs come to, plans of up to two ranks and of more apart."""
    for name, some in (
        ("up to 2 ranks", [row for row in rows if row["world"] <= 2]),
        ("4 ranks", [row for row in rows if row["world"] > 2]),
    ):
        if some:
            errors = f"error of the loop (median, worst) {_format_errors(some)}, of the speed-up {_of_speedups(some)}"
            yield f"{name}: {len(some)} measured; {errors}; of memory at most {_format_memory_error(some)}"


def main() -> None:
    """Measures, writes the rows, and says what they come to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("predictions.json"), help="the rows as JSON")
    out: Path = parser.parse_args().out
    folder = out.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    rows = measure(folder)
    write_json_file(out, rows)
    shutil.rmtree(folder)
    print("\n".join(summary(rows)))


if __name__ == "__main__":
    main()
