"""Runs and rows: each run is a line of JSON in a folder, and each row summarizes the runs with the same key.

A line is {"key": {...}, "seconds": .., "one_rank_s": ..} for a counted run, or {"key": {...}, "memory": [..]}. The key
has all facts on which the seconds may depend. Runs that the folder has are not measured again.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ditile.distributed import files
from ditile.measure.bench.cells import ONE_RANK, BenchCell
from ditile.plan.errors import LoadError
from ditile.planner.calibrate import LIMIT

RUNS = "runs.jsonl"
ROWS = "rows.jsonl"
MAX_RUNS_BYTES = 2**30
Run = dict[str, Any]
Row = dict[str, Any]
_BEGINS = '{"key": '


class Prediction(NamedTuple):
    """The prediction for a cell; None for what cannot be predicted.

    Attributes:
        loop_s: seconds of the denoising loop.
        memory_bytes: peak memory of the rank that needs most, without the VAE.
    """

    loop_s: float | None
    memory_bytes: int | None


def make_run_key(job: Mapping[str, Any], cell: BenchCell) -> str:
    """The key of a cell's runs, as text: all that could change their seconds and bytes."""
    one = {"plan": cell.plan, "cache": cell.cache, "link": cell.link, "height": cell.height, "width": cell.width}
    return json.dumps(dict(job) | one, sort_keys=True)


def append_run(folder: str, key: str, record: Mapping[str, Any]) -> None:
    """Appends a run to the file of runs."""
    path = Path(folder, RUNS)
    path.parent.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"key": json.loads(key)} | dict(record)) + "\n")


def read_runs(folder: str) -> list[Run]:
    """All runs of a folder. A last line that was cut short, because writing was interrupted, is removed from the file.

    Raises:
        LoadError: if the file cannot be read, or a line is no run.
    """
    path = Path(folder, RUNS)
    if not path.exists():
        return []
    try:
        text = files.read_file(path, MAX_RUNS_BYTES).decode()
    except (OSError, ValueError) as error:
        raise LoadError(f"{path} cannot be read: {error}") from error
    whole, _, rest = text.rpartition("\n")
    try:
        runs = [files.parse_json(line) for line in whole.splitlines() if line.strip()]
    except ValueError as error:
        raise LoadError(f"{path} has a line that is no JSON ({error}); mend it, or give another --out") from error
    if not all(isinstance(run, dict) and isinstance(run.get("key"), dict) for run in runs):
        raise LoadError(f"{path} has lines that are no runs of ditile bench; give another --out")
    if rest and not rest.startswith(_BEGINS) and not _BEGINS.startswith(rest):
        raise LoadError(f"{path} ends in what is no run of ditile bench; give another --out")
    if rest:
        files.write_atomically(path, whole + "\n" if whole else "")
    return runs


def count_runs_by_key(runs: Iterable[Run]) -> dict[str, int]:
    """The number of counted runs, by key."""
    run_counts: dict[str, int] = {}
    for run in runs:
        if "seconds" in run:
            key = json.dumps(run["key"], sort_keys=True)
            run_counts[key] = run_counts.get(key, 0) + 1
    return run_counts


def summarize_runs(runs: Iterable[Run], predicted: Mapping[str, Prediction] | None = None) -> list[Row]:
    """A row for each key, in the order in which they came.

    Args:
        runs: as `read_runs` returns them.
        predicted: predictions by key, which are added to the rows.
    """
    grouped: dict[str, list[Run]] = {}
    for run in runs:
        grouped.setdefault(json.dumps(run["key"], sort_keys=True), []).append(run)
    summary_rows = [
        _summarize_runs_of_key(key, of_key)
        for key, of_key in grouped.items()
        if any("seconds" in run for run in of_key)
    ]
    for row in summary_rows:
        loop, memory = (predicted or {}).get(row["key"], Prediction(None, None))
        if loop is not None:
            row["predicted_loop_s"], row["predicted_error"] = loop, loop / row["loop_s"] - 1
        if memory is not None and "peak_memory_bytes" in row:
            row["predicted_memory_bytes"] = memory
            row["predicted_memory_error"] = memory / row["peak_memory_bytes"] - 1
    return summary_rows


def write_bench_rows(folder: str, bench_rows: Sequence[Row]) -> Path:
    """Writes the rows as JSON lines, all at once."""
    path = Path(folder, ROWS)
    files.write_atomically(
        path, "".join(json.dumps({k: v for k, v in row.items() if k != "key"}) + "\n" for row in bench_rows)
    )
    return path


def _summarize_runs_of_key(key: str, runs: Sequence[Run]) -> Row:
    timed = [run for run in runs if "seconds" in run]
    seconds = [run["seconds"] for run in timed]
    row: Row = {"key": key} | json.loads(key)
    row |= {
        "world": timed[-1]["world"],
        "rounds": len(timed),
        "when": timed[-1]["when"],
        "load_before": max((run["load"] for run in timed if run.get("load") is not None), default=None),
        "seconds": seconds,
        "median_s": statistics.median(seconds),
        "lowest_s": min(seconds),
        "highest_s": max(seconds),
        "loop_s": statistics.median(run["loop"] for run in timed),
    }
    watched = [run for run in timed if "again" in run]
    if watched:
        row["again"] = sum(run["again"] for run in watched)
        row["disturbed"] = sum(run["slower"] > LIMIT for run in watched)
        row["product_s"] = min(run["product_s"] for run in watched)
    least = estimate_undisturbed_seconds([run.get("pieces") for run in timed])
    if least is not None:
        row["undisturbed_s"] = least
    memory = [run["memory"] for run in runs if "memory" in run]
    if memory:
        row["memory"] = memory[-1]
        row["peak_memory_bytes"] = max(sum(rank.values()) for rank in memory[-1])
    return row if row["plan"] == ONE_RANK else row | _compare_with_one_rank(row, timed)


def _compare_with_one_rank(row: Row, timed: Sequence[Run]) -> Row:
    """The entries of a plan's row: ratios to one rank within rounds, bytes, exposed communication."""
    pictures = BenchCell(row["plan"]).num_pictures
    last = timed[-1]
    ratios = [pictures * run["one_rank_s"] / run["seconds"] for run in timed]
    of_ranks = [[run["exposed"][rank] for run in timed] for rank in range(len(last["exposed"]))]
    shares, warmups = (
        [statistics.median(run[name] for run in of_rank) for of_rank in of_ranks] for name in ("share", "warmup")
    )
    kinds = dict.fromkeys(kind for of_rank in of_ranks for run in of_rank for kind in run["kinds"])
    alone = estimate_undisturbed_seconds([[run["one_rank_pieces"]] for run in timed if "one_rank_pieces" in run])
    least = row.get("undisturbed_s")
    quiet = {} if alone is None or least is None else {"undisturbed_ratio": pictures * alone / least}
    return quiet | {
        "pictures": pictures,
        "one_rank_seconds": [run["one_rank_s"] for run in timed],
        "one_rank_s": statistics.median(run["one_rank_s"] for run in timed),
        "ratio": statistics.median(ratios),
        "ratio_lowest": min(ratios),
        "ratio_highest": max(ratios),
        "bound": last.get("bound"),
        "steps_run": last["steps"],
        "bytes_sent": last["bytes_sent"],
        "exposed": statistics.fmean(shares),
        "exposed_warmup": statistics.fmean(warmups),
        "exposed_of_rank": shares,
        "exposed_kinds": {
            kind: statistics.fmean(
                statistics.median(run["kinds"].get(kind, 0.0) for run in of_rank) for of_rank in of_ranks
            )
            for kind in kinds
        },
    }


def estimate_undisturbed_seconds(rounds: Sequence[Sequence[Sequence[float]] | None]) -> float | None:
    """The sum of the least seconds of each part of a loop, on the slowest rank: a lower bound for an idle machine.

    The bound becomes better with more rounds. A disturbance that hits another part in each round has no effect on it.

    Args:
        rounds: for each round and each rank, the seconds of each part, in their order.

    Returns:
        None for a single round, or if rounds have different numbers of parts.
    """
    known = [of_ranks for of_ranks in rounds if of_ranks is not None]
    shapes = {tuple(len(pieces) for pieces in of_ranks) for of_ranks in known}
    if len(known) < 2 or len(known) < len(rounds) or len(shapes) > 1:
        return None
    ranks = zip(*known, strict=True)
    return max(math.fsum(min(times) for times in zip(*of_rank, strict=True)) for of_rank in ranks)
