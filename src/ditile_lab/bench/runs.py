"""Runs and rows: each run is a line of JSON in a folder, and each row summarizes the runs with the same key.

A line is {"key": {...}, "seconds": .., "one_rank_s": ..} for a counted run, or {"key": {...}, "memory": [..]}. The key
has all facts on which the seconds may depend. Runs that are already in the folder are not measured again.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ditile_lab.bench.cells import ONE_RANK, BenchCell
from ditile_lab.rows import Row, RowFile, list_values

RUNS = "runs.jsonl"
ROWS = "rows.jsonl"


class Prediction(NamedTuple):
    """The prediction for a cell; None for a number that cannot be predicted.

    Attributes:
        loop_s: seconds of the denoising loop.
        memory_bytes: peak memory of the rank that needs most, without the VAE.
    """

    loop_s: float | None
    memory_bytes: int | None


def make_run_key(job: Row, cell: BenchCell) -> str:
    """Make the key of a cell's runs, as text, with all facts that could change their seconds and bytes."""
    # The link between hosts is part of every key, so that older folders are resumed; it is empty here.
    about = {"plan": cell.plan, "cache": cell.cache, "link": "", "height": cell.height, "width": cell.width}
    return json.dumps(dict(job) | about, sort_keys=True)


def append_run(folder: str, key: str, record: Row) -> None:
    """Append a run to the file of runs."""
    Path(folder).mkdir(exist_ok=True)
    _open_run_file(folder).append([{"key": json.loads(key)} | dict(record)])


def read_runs(folder: str) -> list[Row]:
    """Read all runs of a folder. Raises `LoadError` if the file cannot be read, or a line is not a run."""
    return _open_run_file(folder).read()


def _open_run_file(folder: str) -> RowFile:
    return RowFile(Path(folder, RUNS), "key")


def _format_key(run: Row) -> str:
    return json.dumps(run["key"], sort_keys=True)


def count_runs_by_key(runs: Iterable[Row]) -> dict[str, int]:
    """Count the timed runs by key."""
    run_counts: dict[str, int] = {}
    for run in runs:
        if "seconds" in run:
            key = _format_key(run)
            run_counts[key] = run_counts.get(key, 0) + 1
    return run_counts


def summarize_runs(runs: Iterable[Row], predictions: Mapping[str, Prediction] | None = None) -> list[Row]:
    """Summarize runs as a row for each key with a timed run, in order of appearance.

    Args:
        runs: the result of `read_runs`.
        predictions: predictions by key, which are added to the rows.
    """
    runs_by_key: dict[str, list[Row]] = {}
    for run in runs:
        runs_by_key.setdefault(_format_key(run), []).append(run)
    rows = []
    for key, key_runs in runs_by_key.items():
        # The other runs are slow, because memory was measured in them.
        timed = [run for run in key_runs if "seconds" in run]
        if not timed:
            continue
        row = _summarize_timed_runs(key, timed)
        memory = list_values(key_runs, "memory")
        if memory:
            row["memory"] = memory[-1]
            row["peak_memory_bytes"] = max(sum(rank.values()) for rank in memory[-1])
        digests = list_values(key_runs, "digest")
        if digests:
            row["digest"] = digests[-1]
        if row["plan"] != ONE_RANK:
            _compare_with_one_rank(row, timed)
        if predictions and key in predictions:
            prediction = predictions[key]
            if prediction.loop_s is not None:
                row["predicted_loop_s"] = prediction.loop_s
                row["predicted_error"] = prediction.loop_s / row["loop_s"] - 1
            if prediction.memory_bytes is not None and "peak_memory_bytes" in row:
                row["predicted_memory_bytes"] = prediction.memory_bytes
                row["predicted_memory_error"] = prediction.memory_bytes / row["peak_memory_bytes"] - 1
        rows.append(row)
    return rows


def write_bench_rows(folder: str, rows: Sequence[Row]) -> Path:
    """Write the rows as JSON lines, all at once; their keys are in them as fields."""
    path = Path(folder, ROWS)
    written = []
    for row in rows:
        written.append({name: value for name, value in row.items() if name != "key"})
    RowFile(path, "model").replace(written)
    return path


def _summarize_timed_runs(key: str, runs: Sequence[Row]) -> Row:
    last = runs[-1]
    seconds = list_values(runs, "seconds")
    row: Row = {"key": key} | json.loads(key)
    row |= {
        "world": last["world"],
        "rounds": len(runs),
        "when": last["when"],
        "load_before": max(list_values(runs, "load"), default=None),
        "seconds": seconds,
        "median_s": statistics.median(seconds),
        "lowest_s": min(seconds),
        "highest_s": max(seconds),
        "loop_s": statistics.median(list_values(runs, "loop")),
    }
    pieces = list_values(runs, "pieces")
    undisturbed = estimate_undisturbed_seconds(pieces)
    # Runs of an older version have no pieces, and no undisturbed seconds.
    if undisturbed is not None and len(pieces) == len(runs):
        row["undisturbed_s"] = undisturbed
    return row


def _compare_with_one_rank(row: Row, runs: Sequence[Row]) -> None:
    """Add the entries of a plan's row: ratios to one rank within rounds, bytes, exposed communication."""
    images = BenchCell(row["plan"]).num_images
    last = runs[-1]
    plain_seconds = list_values(runs, "one_rank_s")
    # Ratios are taken within rounds, so a machine that became slower between two rounds changes none of them.
    ratios = [images * plain / own for plain, own in zip(plain_seconds, row["seconds"], strict=True)]
    plain_pieces = [[pieces] for pieces in list_values(runs, "one_rank_pieces")]
    undisturbed_plain = estimate_undisturbed_seconds(plain_pieces)
    if undisturbed_plain is not None and "undisturbed_s" in row:
        row["undisturbed_ratio"] = images * undisturbed_plain / row["undisturbed_s"]
    row |= {
        # The field's name is older than the word image, and files have it.
        "pictures": images,
        "one_rank_seconds": plain_seconds,
        "one_rank_s": statistics.median(plain_seconds),
        "ratio": statistics.median(ratios),
        "ratio_lowest": min(ratios),
        "ratio_highest": max(ratios),
        "bound": last.get("bound"),
        "steps_run": last["steps"],
        "bytes_sent": last["bytes_sent"],
    }
    # This is the mean over ranks of the median over rounds, so a round that was disturbed on one rank counts little.
    shares = []
    warmup_shares = []
    shares_by_kind: dict[str, float] = {}
    # All runs of a key have the same number of ranks.
    num_ranks = len(last["exposed"])
    for rank in range(num_ranks):
        rounds = [run["exposed"][rank] for run in runs]
        shares.append(statistics.median(list_values(rounds, "share")))
        warmup_shares.append(statistics.median(list_values(rounds, "warmup")))
        kinds = list_values(rounds, "kinds")
        for kind in set[str]().union(*kinds):
            median = statistics.median(shares_of_round.get(kind, 0.0) for shares_of_round in kinds)
            shares_by_kind[kind] = shares_by_kind.get(kind, 0.0) + median / num_ranks
    row["exposed"] = statistics.fmean(shares)
    row["exposed_warmup"] = statistics.fmean(warmup_shares)
    row["exposed_of_rank"] = shares
    row["exposed_kinds"] = dict(sorted(shares_by_kind.items()))


def estimate_undisturbed_seconds(rounds: Sequence[Sequence[Sequence[float]]]) -> float | None:
    """Sum the least seconds of each part of a loop, on the slowest rank: a lower bound for an idle machine.

    The bound becomes better with more rounds. A disturbance that hits another part in each round has no effect on it.

    Args:
        rounds: for each round and each rank, the seconds of each part, in their order.

    Returns:
        None for a single round, or if rounds have different numbers of parts.
    """
    shapes = {tuple(map(len, ranks)) for ranks in rounds}
    if len(rounds) < 2 or len(shapes) > 1:
        return None
    slowest = 0.0
    # This turns rounds of ranks into ranks of rounds.
    for rank_rounds in zip(*rounds, strict=True):
        least = math.fsum(min(piece_rounds) for piece_rounds in zip(*rank_rounds, strict=True))
        slowest = max(slowest, least)
    return slowest
