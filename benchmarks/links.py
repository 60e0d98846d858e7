"""Plans between two hosts, over the bandwidth of their link: `ditile bench` in two network namespaces of this machine.

    sudo .venv/bin/python -m benchmarks.links --rates 100mbit 1gbit --plans "pipefusion=2 patches=4; ring=2" --out links

Each host has one rank, and the link limits what each sends. For the ranks the link is real; the two hosts share the
cores of this machine. It needs Linux, root and iproute2. For each rate `ditile bench` resumes a folder in `--out`; the
rows of all rates, with their links, are in `rows.jsonl` there, and the figure is `links.png`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.two_hosts import check_namespace_rights, create_two_hosts, parse_link_rate
from ditile.distributed import env, files
from ditile.distributed.launch import unwind_on_signals
from ditile.plan.errors import DitileError, PlanError, RankError
from ditile.plan.plan import Plan
from ditile.planner.hardware import add_interlink
from ditile.runner.requests.prepare import silence_libraries
from ditile_lab.bench.cells import BenchCell, parse_cells
from ditile_lab.bench.command import load_prediction_profile, predict_cell
from ditile_lab.bench.options import Comparison, Workload
from ditile_lab.bench.runs import ROWS
from ditile_lab.bench.subjects import BenchSubject, create_bench_subject
from ditile_lab.bench.sweeps import list_representative_plans, make_fit_check
from ditile_lab.bench.tables import make_bench_tables

RANKS = 2
RATES = ("100mbit", "1gbit", "10gbit")
# Seconds in which a rank may end by itself after the other one failed: it then says why.
PATIENCE = 5.0
Row = dict[str, Any]


def list_link_plans(subject: BenchSubject, height: int | None, width: int | None) -> list[Plan]:
    """One plan of two ranks for each method, and PipeFusion with a pipelined warmup too; those that fit the model."""
    fits = make_fit_check(lambda plan: subject.make_cost_job(BenchCell(str(plan), "", height, width)))
    pipefusion, *others = list_representative_plans(RANKS, fits)
    plans = [pipefusion, replace(pipefusion, warmup_mode="pipelined"), *others, Plan(cfg=2)]
    return [plan for plan in dict.fromkeys(plans) if fits(plan)]


def build_host_environment(rank: int, master: str, interface: str) -> dict[str, str]:
    """The whole environment of the one rank of a host, whose connections go through `interface` to the others."""
    place = {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    meeting = {"MASTER_ADDR": master, "MASTER_PORT": "29577"}
    interfaces = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    # torch warns of hosts without names, as these are.
    quiet = {"TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")}
    own = env.build_actor_environment() | {"OMP_NUM_THREADS": "1"}
    return {**os.environ, **own, **place, **meeting, **interfaces, **quiet}


def run_across_link(words: Sequence[str], rate: str) -> None:
    """Runs a command of `ditile` with one rank at each end of a link. Raises `RankError` if a rank fails."""
    with unwind_on_signals() as check, create_two_hosts(rate) as hosts:
        ranks = [
            subprocess.Popen(
                [*host.prefix, sys.executable, "-m", "ditile", *words],
                env=build_host_environment(rank, hosts[0].address, host.interface),
                stdout=subprocess.DEVNULL,
            )
            for rank, host in enumerate(hosts)
        ]
        try:
            _wait_for_ranks(ranks, check)
        finally:
            _end_ranks(ranks)
    for rank, process in enumerate(ranks):
        if process.returncode:
            raise RankError(rank, "exit", f"ended with code {process.returncode} across {rate}")


def _wait_for_ranks(ranks: Sequence[subprocess.Popen[bytes]], check: Callable[[], None]) -> None:
    """Waits until all ranks have ended, or one has failed."""
    while any(process.poll() is None for process in ranks):
        check()
        if any(process.poll() for process in ranks):
            return
        time.sleep(0.05)


def _end_ranks(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kills the ranks that still run after `PATIENCE`."""
    until = time.monotonic() + PATIENCE
    while any(process.poll() is None for process in ranks) and time.monotonic() < until:
        time.sleep(0.05)
    for process in ranks:
        if process.poll() is None:
            process.kill()
        process.wait()


def measure_links(options: argparse.Namespace) -> list[Row]:
    """Measures all rates, and writes their rows and the figure to the folder."""
    work = Workload(
        model=options.model, height=options.height, width=options.width, steps=options.steps, output="latent"
    )
    for rate in options.rates:
        parse_link_rate(rate)
    check_namespace_rights()
    silence_libraries()
    subject = create_bench_subject(work)
    plans = options.plans or "; ".join(map(str, list_link_plans(subject, work.height, work.width)))
    for cell in parse_cells(plans):
        if cell.num_ranks != RANKS:
            raise PlanError(
                f"links join two hosts of one rank each, and {cell.display_label!r} needs {cell.num_ranks} rank(s); "
                "give plans of 2"
            )
    words = ["bench", "--plans", plans, "--model", work.model, "--output", "latent"]
    words += ["--rounds", str(options.rounds), "--threads", str(options.threads)]
    for name in ("height", "width", "steps"):
        if getattr(options, name) is not None:
            words += [f"--{name}", str(getattr(options, name))]
    rows: list[Row] = []
    for rate in options.rates:
        folder = options.out / rate
        folder.mkdir(parents=True, exist_ok=True)
        run_across_link([*words, "--out", str(folder)], rate)
        rows += _read_link_rows(folder, rate, subject, plain=not rows)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    files.write_atomically(options.out / ROWS, text)
    return rows


def _read_link_rows(folder: Path, rate: str, subject: BenchSubject, *, plain: bool) -> list[Row]:
    """The rows of one rate, with predictions for its link; the plain pipeline's only if `plain`, as it uses none."""
    profile = load_prediction_profile(Comparison(plans="cfg=2"))
    rows = []
    for line in (folder / ROWS).read_text("utf-8").splitlines():
        row = json.loads(line)
        if not row["plan"]:
            if plain:
                rows.append(row)
            continue
        row["link"] = rate
        if profile is not None:
            cell = BenchCell(row["plan"], row["cache"], row["height"], row["width"])
            job = subject.make_cost_job(cell)
            linked = add_interlink(profile, rate)
            prediction = None if job is None else predict_cell(subject, cell, job, linked, ranks_per_host=1)
            if prediction is not None and prediction.loop_s is not None:
                row["predicted_loop_s"] = prediction.loop_s
                row["predicted_error"] = prediction.loop_s / row["loop_s"] - 1
        rows.append(row)
    return rows


def main() -> None:
    """Measures, draws the figure, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=RATES, help="of the link, such as 100mbit")
    parser.add_argument("--plans", help="of two ranks, with ; between them; by default one of each method")
    parser.add_argument("--model", default="random-pixart", help="as for ditile bench")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds that count")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of a rank")
    for name in ("height", "width", "steps"):
        parser.add_argument(f"--{name}", type=int, help="of a call; the model's own by default")
    parser.add_argument("--out", type=Path, default=Path("links"), help="folder for rows and figure")
    options = parser.parse_args()
    try:
        rows = measure_links(options)
    except DitileError as error:
        raise SystemExit(f"error: {error}") from None
    from benchmarks.sweep_figures import draw_sweep_files

    draw_sweep_files("links", rows, options.out)
    for part in make_bench_tables(rows):
        Console().print(part)


if __name__ == "__main__":
    main()
