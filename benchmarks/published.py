"""Predictions beside published latencies: fits the shares of a GPU that transformers reach, and tests them on hardware
that the fit did not see.

    python -m benchmarks.published               # every row, predicted by shares fitted without its hardware
    python -m benchmarks.published --fit         # fits again: shares for planner/hardware.py, left_out.json

The rows are in model/assets/published.csv with their sources: seconds of the denoising loop and speed-ups
(PipeFusion, arXiv 2405.14430), and latencies relative to the fastest method (the article of 2024-09), which get a
common factor that fits best. A few rows are left out, each with its reason.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import itertools
import json
import math
import statistics
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from ditile.model.known import ASSETS, CONFIGS
from ditile.plan.cost import PlannedCall
from ditile.plan.plan import Plan
from ditile.planner.hardware import Efficiency, LinkEfficiency, make_datasheet_profile, read_datasheets
from ditile.planner.price import Pricer
from ditile.planner.search import make_pricer
from ditile.planner.subject import PlanSubject
from ditile_lab.rows import write_json_file

HARDWARE = {
    ("L40-48GB", "PCIe4x16"): "l40-pcie",
    ("L20-48GB", "PCIe"): "l20-pcie",
    ("A100-80GB", "PCIe"): "a100-pcie",
    ("A100-80GB", "NVLink"): "a100-nvlink",
}
MODELS = {
    "PixArt": "pixart-alpha",
    "PixArt-alpha": "pixart-alpha",
    "SD3-medium": "sd3-medium",
    "Flux.1-dev": "flux.1-dev",
}
LEFT_OUT = ASSETS / "left_out.json"
"""Of each hardware, the shares that were fitted without it."""
RELATIVE = "latency relative to fastest"
SPEEDUP = "speedup over "
SLOWER = "slower than"
TIE = 0.03  # figures that differ by less have no order: means of five runs, in two or three digits
SEARCH = ((7, 1.6), (2, 1.12))  # rounds, and the first factor of each
MOST = 0.6  # of an error that counts: beyond it a row does not pull harder
PRIOR = 0.03  # of the mean square of how many times shares doubled
ORDER, CLEAR, LOST = 0.6, 0.05, -0.5  # weight of the order; a pair is right beyond the first, as wrong as can be below

START = Efficiency(
    matmul=0.6,
    matmul_half=300e3,
    attention=0.5,
    attention_half=150.0,
    memory=0.6,
    kernel_s=2e-5,
    micro_s=1e-3,
    wire=LinkEfficiency(latency_s=1e-4, call_s=3e-4, exchange=0.5, crossing=0.5, reduce=0.7, overlap=0.2),
)
"""The start of each fit, to which it keeps where rows say nothing: guesses that were made without any row."""

_SWAPPED = (
    "the article has this figure, to its third digit, as the other one's of Ring and Ulysses, and says that Ulysses is "
    "the faster on NVLink; the two columns changed places in one of both"
)
_BEYOND = (
    "more than 6.7x as fast as one device, where 8 stages of at most 4 of 28 blocks and a synchronous step of 20 allow "
    "5.4x; at 8192 it is 4.4x"
)
_FEWER = "slower than one device, though it is 4x as fast as one at 2048, where it sends 4x the bytes"
SET_ASIDE: dict[tuple[str, str, str, str], str] = {
    **{
        ("a100-nvlink", pixels, method, "latency"): _SWAPPED
        for pixels in ("1024", "2048")
        for method in ("Ring", "Ulysses")
    },
    ("a100-nvlink", "4096", "PipeFusion", "latency"): _BEYOND,
    ("a100-nvlink", "4096", "PipeFusion", RELATIVE): _BEYOND,
    ("a100-nvlink", "4096", "Ring", RELATIVE): "1.6x the slowest of both sequence parallels in the paper's seconds",
    ("l20-pcie", "4096", "Ring", RELATIVE): "as slow as one device, though it is 4x as fast as one at 2048",
    ("l20-pcie", "1024", "Ring", RELATIVE): _FEWER,
    ("l20-pcie", "1024", "DistriFusion", RELATIVE): _FEWER,
}
"""(hardware, pixels, method, metric) -> why a row contradicts others."""


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """A published figure.

    Attributes:
        hardware: a card with a datasheet.
        value: of `plan`: seconds, or their ratio to others; nan where it is only said to take longer than `base`.
        scale: rows of one scale are relative to each other; "" is seconds, or a speedup.
        base: the plan that a speedup is over, or that takes less.
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
    base: Plan | None = None

    def __str__(self) -> str:
        return f"{self.hardware} x{self.devices}, {self.model} {self.pixels}, {self.method}"

    @property
    def has_order_only(self) -> bool:
        """Whether it has no figure, only an order."""
        return math.isnan(self.value)

    @property
    def comparison_key(self) -> tuple[Any, ...]:
        """The facts that rows must have in common so that their order can be compared."""
        return self.hardware, self.devices, self.model, self.pixels, self.scale


Predictions = Sequence[tuple[PublishedRow, float]]
"""Rows with their predicted values, each in the row's unit."""


def read_published_rows() -> list[PublishedRow]:
    """All that can be predicted, without those that are set aside."""
    return list(read_rows_except(SET_ASIDE))


def read_rows_except(set_aside: Collection[tuple[str, str, str, str]]) -> Iterator[PublishedRow]:
    """All that can be predicted, but for (hardware, pixels, method, metric)."""
    with (ASSETS / "published.csv").open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    for line in lines:
        hardware = HARDWARE.get((line["hardware"], line["link"]))
        metric = line["metric"]
        if hardware is None or line["value"] == "OOM" or (hardware, line["px"], line["method"], metric) in set_aside:
            continue
        devices = int(line["devices"])
        words, _, other = line["plan"].partition(" vs ")
        yield PublishedRow(
            hardware,
            devices,
            MODELS[line["model"]],
            int(line["px"]),
            int(line["steps"]),
            line["method"],
            plan_of(line["method"], words, devices),
            math.nan if metric == SLOWER else float(line["value"]),
            f"{hardware} {line['px']}" if metric == RELATIVE else "",
            Plan.parse(other) if metric.startswith((SPEEDUP, SLOWER)) else None,
        )


def plan_of(method: str, words: str, devices: int) -> Plan:
    """The plan of a row: its method on so many devices, with the degrees that it names."""
    named = dict(word.split("=") for word in words.split() if "=" in word)
    warmup = int(named.get("warmup", 1))
    cfg = int(named.get("cfg", 1))
    plans: dict[str, Callable[[], Plan]] = {
        "Single": Plan,
        "Tensor": lambda: Plan(tensor=devices),
        "Ulysses": lambda: Plan(ulysses=devices),
        "Ring": lambda: Plan(ring=devices),
        "DistriFusion": lambda: Plan(distrifusion=devices, warmup=warmup),
        "PipeFusion": lambda: Plan(cfg=cfg, pipefusion=devices // cfg, warmup=warmup),
    }
    return plans[method.removesuffix("+CFG")]()


@lru_cache
def _subject(name: str) -> tuple[PlanSubject, dict[str, Any]]:
    call = json.loads((CONFIGS / name / "generation.json").read_text("utf-8"))
    return PlanSubject.from_configs(name, CONFIGS / name), call


@cache
def _build_published_job(model: str, pixels: int, steps: int, plan: Plan) -> PlannedCall:
    subject, own = _subject(model)
    call = own | {"height": pixels, "width": pixels, "num_inference_steps": steps}
    return subject.make_plan_job(plan, subject.make_call_shape(call, 2))


@lru_cache(maxsize=16)
def _pricer(hardware: str, model: str, gets: Efficiency) -> Pricer:
    subject, own = _subject(model)
    return make_pricer(subject, own, make_datasheet_profile(hardware, read_datasheets()[hardware], gets))


def seconds(row: PublishedRow, plan: Plan, gets: Efficiency) -> float:
    """The predicted latency of a plan on the hardware and the job of a row."""
    pricer = _pricer(row.hardware, row.model, gets)
    return pricer.predict_latency(_build_published_job(row.model, row.pixels, row.steps, plan))


def predicted(some: Sequence[PublishedRow], gets: Efficiency) -> list[float]:
    """Of each row, in its own unit: rows of a scale have the factor that fits them best."""
    predictions = [seconds(row, row.plan, gets) for row in some]
    for k, row in enumerate(some):
        if row.base is not None:
            predictions[k] = seconds(row, row.base, gets) / predictions[k]
    for scale in {row.scale for row in some} - {""}:
        mine = [k for k, row in enumerate(some) if row.scale == scale]
        factor = math.exp(statistics.fmean(math.log(some[k].value / predictions[k]) for k in mine))
        for k in mine:
            predictions[k] *= factor
    return predictions


def margins(predictions: Predictions) -> Iterator[float]:
    """For two methods on one machine and job, the log of predicted seconds of the published slower over the faster one.

    Above 0 the order is right. Methods whose published figures differ by less than `TIE` have no order.
    """
    alike: dict[tuple[Any, ...], list[tuple[PublishedRow, float]]] = {}
    for row, estimate in predictions:
        if row.base is not None:
            yield math.copysign(1, -1 if row.has_order_only else math.log(row.value)) * math.log(estimate)
        else:
            alike.setdefault(row.comparison_key, []).append((row, estimate))
    for those in alike.values():
        for (one, mine), (other, theirs) in itertools.combinations(those, 2):
            apart = math.log(one.value / other.value)
            if abs(apart) > TIE:
                yield math.copysign(1, apart) * math.log(mine / theirs)


def ordered(predictions: Predictions) -> tuple[int, int]:
    """Pairs of methods that come in the published order, and all pairs."""
    every = list(margins(predictions))
    return sum(margin > 0 for margin in every), len(every)


def fit_efficiency(some: Sequence[PublishedRow]) -> Efficiency:
    """The shares that come closest to some rows, and to their order, by a search along each of them in turn."""
    first = dict(_flatten_efficiency(START))

    def compute_fit_loss(values: dict[str, float]) -> float:
        predictions = predicted(some, _build_efficiency(values))
        off = [
            abs(math.log(estimate / row.value))
            for row, estimate in zip(some, predictions, strict=True)
            if not row.has_order_only
        ]
        wrong = [
            min(1.0, max(0.0, (CLEAR - m) / (CLEAR - LOST))) for m in margins(list(zip(some, predictions, strict=True)))
        ]
        near = statistics.fmean(min(each, MOST) for each in off) + statistics.median(off) / 2
        doubled = statistics.fmean(math.log2(value / first[name]) ** 2 for name, value in values.items())
        return near + ORDER * statistics.fmean(wrong) + PRIOR * doubled

    values = first
    for rounds, first_factor in SEARCH:
        best = compute_fit_loss(values)
        factors = dict.fromkeys(values, first_factor)
        for name in list(values) * rounds:
            for factor in (factors[name], 1 / factors[name]):
                tried = values | {name: min(values[name] * factor, _ceiling(name))}
                if (now := compute_fit_loss(tried)) < best - 1e-5:
                    best = now
                    values = tried
                    break
            else:
                factors[name] **= 0.5
    return _build_efficiency({name: float(f"{value:.3g}") for name, value in values.items()})


def _flatten_efficiency(gets: Efficiency) -> Iterator[tuple[str, float]]:
    values = dataclasses.asdict(gets)
    wire: dict[str, float] = values.pop("wire")
    yield from values.items()
    yield from ((f"wire.{name}", value) for name, value in wire.items())


def _build_efficiency(values: dict[str, float]) -> Efficiency:
    own = {name: value for name, value in values.items() if "." not in name}
    wire = {name.removeprefix("wire."): value for name, value in values.items() if "." in name}
    return Efficiency(**own, wire=LinkEfficiency(**wire))


def _ceiling(name: str) -> float:
    """Shares end at 1."""
    whole = name.endswith(("_s", "_half"))
    return math.inf if whole else 1.0


def fit_left_out(every: Sequence[PublishedRow]) -> dict[str, Efficiency]:
    """Of each hardware, the shares that were fitted without it."""
    names = sorted({row.hardware for row in every})
    return {
        name: fit_efficiency([row for row in every if row.hardware != name])
        for name in track(names, "hardware left out")
    }


def left_out() -> dict[str, Efficiency]:
    """The same, as they were fitted last."""
    kept = json.loads(LEFT_OUT.read_text("utf-8"))
    return {name: Efficiency(**(gets | {"wire": LinkEfficiency(**gets["wire"])})) for name, gets in kept.items()}


def predict_unseen_hardware(
    every: Sequence[PublishedRow], gets: dict[str, Efficiency]
) -> list[tuple[PublishedRow, float]]:
    """Each row with its prediction by the shares that were fitted without its hardware."""
    predictions: list[tuple[PublishedRow, float]] = []
    for hardware, own in gets.items():
        mine = [row for row in every if row.hardware == hardware]
        predictions += zip(mine, predicted(mine, own), strict=True)
    return predictions


def compute_median_error(predictions: Predictions) -> float:
    """The median of how far predictions are off, as a share of the published figures."""
    return statistics.median(abs(estimate / row.value - 1) for row, estimate in predictions if not row.has_order_only)


def make_published_table(predictions: Predictions) -> Table:
    """The rows for people."""
    shown = Table("row", "plan", "published", "predicted", "error")
    for row, estimate in predictions:
        plan = str(row.plan)
        unit = "x" if row.scale or row.base is not None else " s"
        if row.base is not None:
            plan += f" over {row.base}" if row.base.world > 1 else " over one device"
        value, off = ("below 1", "") if row.has_order_only else (f"{row.value:g}", f"{estimate / row.value - 1:+.0%}")
        shown.add_row(str(row), plan, f"{value}{unit}", f"{estimate:.3g}{unit}", off)
    return shown


def summary(predictions: Predictions) -> Iterator[str]:
    """Errors and order by hardware, and of all."""
    for name in (*sorted({row.hardware for row, _ in predictions}), ""):
        mine = [(row, estimate) for row, estimate in predictions if name in ("", row.hardware)]
        right, total = ordered(mine)
        yield (
            f"{name or 'all'}: median error {compute_median_error(mine):.1%} of {_count_figures(mine)} figures, "
            f"order right in {right} of {total} pairs ({right / total:.0%})"
        )
    yield f"set aside: {len(SET_ASIDE)} of {len(SET_ASIDE) + _count_figures(predictions)} figures"


def _count_figures(predictions: Predictions) -> int:
    return sum(not row.has_order_only for row, _ in predictions)


def main() -> None:
    """Fits, or validates and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="fit anew; prints the shares of all rows")
    every = read_published_rows()
    if parser.parse_args().fit:
        gets = fit_efficiency(every)
        print(json.dumps(dataclasses.asdict(gets), indent=1))
        print(*summary(list(zip(every, predicted(every, gets), strict=True))), sep="\n")
        kept = {name: dataclasses.asdict(own) for name, own in fit_left_out(every).items()}
        write_json_file(LEFT_OUT, kept)
    predictions = predict_unseen_hardware(every, left_out())
    Console(width=150).print(make_published_table(predictions))
    print(*summary(predictions), sep="\n")


if __name__ == "__main__":
    main()
