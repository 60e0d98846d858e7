"""Predictions beside published latencies: what transformers get of a GPU, fitted, and held against machines that it
never saw.

    python -m ditile.bench.published               # every row, predicted by shares fitted without its hardware
    python -m ditile.bench.published --fit         # the shares of all rows, for planner/hardware.py

The rows are in assets/published.csv with their sources: seconds of the denoising loop (PipeFusion, arXiv 2405.14430),
and latencies relative to the fastest method (the article of 2024-09), of which a scale of their own is free. A few
rows are set aside, each with its reason.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from ditile.load import ASSETS
from ditile.plan import Plan
from ditile.planner.hardware import EFFICIENCY, SHEETS, Efficiency, Wire, of_sheet, to_json
from ditile.planner.search import pricer_of
from ditile.planner.subject import CONFIGS, Subject

HARDWARE = {
    ("L40-48GB", "PCIe4x16"): "l40-pcie", ("L20-48GB", "PCIe"): "l20-pcie", ("A100-80GB", "PCIe"): "a100-pcie",
    ("A100-80GB", "NVLink"): "a100-nvlink",
}  # fmt: skip
MODELS = {
    "PixArt": "pixart-alpha", "PixArt-alpha": "pixart-alpha", "SD3-medium": "sd3-medium", "Flux.1-dev": "flux.1-dev",
}  # fmt: skip
RELATIVE = "latency relative to fastest"
ROUNDS, FIRST_FACTOR = 6, 1.6
MOST = 0.6  # of an error that counts: beyond it a row does not pull harder

SET_ASIDE: dict[tuple[str, str, str, str], str] = {
    ("l20-pcie", "4096", "Ring", RELATIVE): "8 devices as slow as one, with fewer bytes than at 2048, where it is 4x",
}
"""(hardware, pixels, method, metric) -> why a row contradicts others."""


@dataclass(frozen=True, slots=True)
class Row:
    """A published latency.

    Attributes:
        hardware: a name of `SHEETS`.
        scale: rows of one scale are relative to each other; "" is seconds.
    """

    hardware: str
    devices: int
    model: str
    pixels: int
    steps: int
    method: str
    plan: Plan
    value: float
    scale: str

    def __str__(self) -> str:
        return f"{self.hardware} x{self.devices}, {self.model} {self.pixels}, {self.method}"


def rows() -> list[Row]:
    """All that can be predicted, without those that are set aside."""
    with (ASSETS / "published.csv").open(encoding="utf-8") as file:
        return list(_rows(csv.DictReader(file)))


def _rows(lines: Iterable[dict[str, str]]) -> Iterator[Row]:
    for line in lines:
        hardware, metric = HARDWARE.get((line["hardware"], line["link"])), line["metric"]
        if hardware is None or metric not in ("latency", RELATIVE) or line["value"] == "OOM":
            continue
        if (hardware, line["px"], line["method"], metric) in SET_ASIDE:
            continue
        devices = int(line["devices"])
        scale = f"{hardware} {line['px']}" if metric == RELATIVE else ""
        yield Row(
            hardware, devices, MODELS[line["model"]], int(line["px"]), int(line["steps"]), line["method"],
            plan_of(line["method"], line["plan"], devices), float(line["value"]), scale,
        )  # fmt: skip


def plan_of(method: str, words: str, devices: int) -> Plan:
    """The plan of a row: its method on so many devices, with the degrees that it names."""
    named = dict(word.split("=") for word in words.split() if "=" in word)
    warmup, cfg = int(named.get("warmup", 1)), int(named.get("cfg", 1))
    plans: dict[str, Callable[[], Plan]] = {
        "Single": Plan, "Tensor": lambda: Plan(tensor=devices), "Ulysses": lambda: Plan(ulysses=devices),
        "Ring": lambda: Plan(ring=devices), "DistriFusion": lambda: Plan(distrifusion=devices, warmup=warmup),
        "PipeFusion": lambda: Plan(cfg=cfg, pipefusion=devices // cfg, warmup=warmup),
    }  # fmt: skip
    return plans[method]()


@lru_cache
def _subject(name: str) -> tuple[Subject, dict[str, Any]]:
    call = json.loads((CONFIGS / name / "generation.json").read_text("utf-8"))
    return Subject.of(name, CONFIGS / name), call


def seconds(row: Row, gets: Efficiency) -> float:
    """The predicted latency of a row."""
    subject, own = _subject(row.model)
    call = own | {"height": row.pixels, "width": row.pixels, "num_inference_steps": row.steps}
    profile = of_sheet(row.hardware, SHEETS[row.hardware], gets)
    shape = subject.shape(call, profile.element_size)
    return pricer_of(subject, call, profile).estimate(subject.job(row.plan, shape))


def predicted(some: Sequence[Row], gets: Efficiency) -> list[float]:
    """Of each row, in its own unit: rows of a scale have the factor that fits them best."""
    found = [seconds(row, gets) for row in some]
    for scale in {row.scale for row in some} - {""}:
        mine = [k for k, row in enumerate(some) if row.scale == scale]
        factor = math.exp(statistics.fmean(math.log(some[k].value / found[k]) for k in mine))
        for k in mine:
            found[k] *= factor
    return found


def errors(some: Sequence[Row], gets: Efficiency) -> list[float]:
    """Logarithms of predicted over published."""
    return [math.log(got / row.value) for row, got in zip(some, predicted(some, gets), strict=True)]


def fitted(some: Sequence[Row], start: Efficiency = EFFICIENCY, rounds: int = ROUNDS) -> Efficiency:
    """The shares that come closest to some rows, by a search along each of them in turn."""

    def loss(values: dict[str, float]) -> float:
        found = [abs(error) for error in errors(some, _made(values))]
        return statistics.fmean(min(error, MOST) for error in found) + statistics.median(found) / 2

    values = dict(_flat(start))
    best, factors = loss(values), dict.fromkeys(values, FIRST_FACTOR)
    for _ in range(rounds):
        for name in values:
            for factor in (factors[name], 1 / factors[name]):
                tried = values | {name: min(values[name] * factor, _ceiling(name))}
                if (now := loss(tried)) < best - 1e-5:
                    best, values = now, tried
                    break
            else:
                factors[name] **= 0.5
    return _made(values)


def _flat(gets: Efficiency) -> Iterator[tuple[str, float]]:
    for field in dataclasses.fields(gets):
        value = getattr(gets, field.name)
        if isinstance(value, float):
            yield field.name, value
        else:
            yield from ((f"{field.name}.{part.name}", getattr(value, part.name)) for part in dataclasses.fields(value))


def _made(values: dict[str, float]) -> Efficiency:
    own = {name: value for name, value in values.items() if "." not in name}
    wire = {name.removeprefix("wire."): value for name, value in values.items() if "." in name}
    return Efficiency(**own, wire=Wire(**wire))


def _ceiling(name: str) -> float:
    """Shares end at 1."""
    whole = name.endswith(("_s", "_half"))
    return math.inf if whole else 1.0


def left_out(every: Sequence[Row]) -> list[tuple[Row, float]]:
    """Each row with its prediction by shares that were fitted without its hardware."""
    found = []
    for hardware in track(sorted({row.hardware for row in every}), "hardware left out"):
        gets = fitted([row for row in every if row.hardware != hardware])
        mine = [row for row in every if row.hardware == hardware]
        found += list(zip(mine, predicted(mine, gets), strict=True))
    return found


def ordered(found: Sequence[tuple[Row, float]]) -> tuple[int, int]:
    """Pairs of methods on one machine and job that come in the published order, and all pairs."""
    right = total = 0
    for (one, mine), (other, theirs) in itertools.combinations(found, 2):
        alike = (one.hardware, one.devices, one.model, one.pixels, one.scale) == (
            other.hardware, other.devices, other.model, other.pixels, other.scale,
        )  # fmt: skip
        if alike and one.value != other.value:
            total += 1
            right += (one.value < other.value) == (mine < theirs)
    return right, total


def table(found: Sequence[tuple[Row, float]]) -> Table:
    """The rows for people."""
    shown = Table("row", "plan", "published", "predicted", "error")
    for row, got in found:
        unit = "x" if row.scale else " s"
        off = f"{got / row.value - 1:+.0%}"
        shown.add_row(str(row), str(row.plan), f"{row.value:g}{unit}", f"{got:.3g}{unit}", off)
    return shown


def main() -> None:
    """Fits, or validates and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="fit all rows and print the shares")
    every = rows()
    if parser.parse_args().fit:
        gets = fitted(every)
        print(to_json(gets))
        found = list(zip(every, predicted(every, gets), strict=True))
    else:
        found = left_out(every)
    Console(width=140).print(table(found))
    for hardware in sorted({row.hardware for row in every}):
        off = [abs(got / row.value - 1) for row, got in found if row.hardware == hardware]
        print(f"{hardware}: median error {statistics.median(off):.1%} of {len(off)} rows")
    right, total = ordered(found)
    print(f"order of methods right in {right} of {total} pairs ({right / total:.0%}); set aside: {len(SET_ASIDE)}")


if __name__ == "__main__":
    main()
