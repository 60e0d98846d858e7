"""Chooses a plan and a cache from a stored evaluation (`ditile evaluate`) for a budget of quality or time.

choose(rows, min_psnr=30)      the fastest setting whose mean PSNR to the original pipeline is at least 30 dB
choose(rows, max_latency=5)    of the settings that took at most 5 s, the one whose images are closest to the original's
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ditile.distributed import files
from ditile.plan.errors import LoadError, ModelError, PlanError
from ditile.plan.option_classes import JsonObject, Ranks, Seconds, define_option, options

FILE = "evaluation.json"
STORED = Path(__file__).parents[1] / "model" / "assets" / "evaluations"
IN_A_ROW = {"plan": str, "cache": str, "world": int, "psnr": float, "seconds": float, "latency_ratio": float}
"""The keys of a row that `choose` reads, with their types; JSON may hold a whole number instead of a float."""


Decibels = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@options()
class Budget:
    """Bounds on the quality or the time of an image, by which a plan and a cache are chosen from an evaluation.

    Raises:
        ModelError: if a value is out of its range, or an option is given that only works with a bound.
    """

    min_psnr: Decibels | None = define_option(
        None,
        "pick the fastest evaluated plan and cache with at least this mean PSNR to the original",
        metavar="DB",
        example=30,
    )
    max_latency: Seconds | None = define_option(
        None, "pick the evaluated plan and cache closest to the original in at most this time", metavar="S", example=30
    )
    evaluation: str | None = define_option(
        None,
        "what to pick from: what ditile evaluate wrote; by default what comes with ditile",
        metavar="FOLDER",
        reads=True,
    )
    world: Ranks | None = define_option(
        None, "ranks to pick for, at most; by default as many as there are devices", metavar="N"
    )

    def __post_init__(self) -> None:
        for name in ("evaluation", "world"):
            if getattr(self, name) is not None and not self.has_bound:
                raise ModelError(
                    f"{name}={getattr(self, name)!r} is for a budget; add --min-psnr DB or --max-latency S"
                )

    @property
    def has_bound(self) -> bool:
        """Whether a bound is given."""
        return self.min_psnr is not None or self.max_latency is not None


def choose(
    rows: Iterable[JsonObject],
    *,
    min_psnr: Decibels | None = None,
    max_latency: Seconds | None = None,
    world: Ranks | None = None,
) -> JsonObject:
    """Picks the setting of an evaluation that fits a budget best.

    Args:
        rows: the `settings` of an `evaluation.json`, including the original pipeline.
        min_psnr: the least mean PSNR over captions, in dB; of the settings that reach it, the fastest is chosen.
        max_latency: the most seconds that a setting may have taken. Without `min_psnr` the one with the highest PSNR is
            chosen, and of several the fastest.
        world: how many ranks are available; settings with more ranks are not considered.

    Raises:
        PlanError: if no setting is within the bounds; the message names the one that comes closest.
    """
    there = [row for row in rows if world is None or row["world"] <= world]
    if not there:
        raise PlanError(f"the evaluation has no setting of at most {world} rank(s); evaluate one, or raise --world")
    fits = [row for row in there if min_psnr is None or row["psnr"] >= min_psnr]
    if not fits:
        best = max(there, key=lambda row: (row["psnr"], -row["latency_ratio"]))
        raise PlanError(
            f"no evaluated setting has min_psnr={min_psnr:g} dB; the best there is: {describe_setting(best)}"
        )
    soon = [row for row in fits if max_latency is None or row["seconds"] <= max_latency]
    if not soon:
        best = min(fits, key=lambda row: row["seconds"])
        also = "" if min_psnr is None else f" with {min_psnr:g} dB"
        raise PlanError(
            f"no evaluated setting{also} took max_latency={max_latency:g} s; the fastest: {describe_setting(best)}"
        )
    if min_psnr is None and max_latency is not None:
        return max(soon, key=lambda row: (row["psnr"], -row["latency_ratio"]))
    return min(soon, key=lambda row: (row["latency_ratio"], -row["psnr"]))


def describe_setting(row: JsonObject) -> str:
    """A setting with its measured quality and time, on one line."""
    cache = "no cache" if row["cache"] == "none" else f"cache {row['cache']}"
    return f"{row['plan']}, {cache} ({row['psnr']:.1f} dB, {row['seconds']:.2f} s, {1 / row['latency_ratio']:.2f}x)"


def load_evaluation(model: str, source: str | None = None) -> JsonObject:
    """Loads an evaluation of a model.

    Args:
        model: the model, as `--model` names it.
        source: the folder or file of the evaluation; by default the one that comes with this package.

    Raises:
        LoadError: if there is none, or it cannot be read.
        ModelError: if it is the evaluation of another model.
    """
    path = STORED / f"{model}.json" if source is None else Path(source)
    path = path / FILE if os.path.isdir(path) else path
    if source is None and not os.path.isfile(path):
        raise LoadError(
            f"no evaluation of {model!r} comes with ditile; run ditile evaluate, and add --evaluation FOLDER"
        )
    try:
        evaluation = files.parse_json(files.read_text(path))
    except (OSError, ValueError) as error:
        raise LoadError(f"evaluation={str(path)!r} cannot be read: {' '.join(str(error).split())}") from error
    rows = evaluation.get("settings") if isinstance(evaluation, dict) else None
    if not isinstance(rows, list) or not rows or not all(map(_is_valid_setting, rows)):
        raise LoadError(f"evaluation={str(path)!r} is no evaluation; give what ditile evaluate wrote as {FILE}")
    if evaluation.get("model") != model:
        raise ModelError(
            f"evaluation={str(path)!r} is of model {evaluation.get('model')!r}, not of {model!r}; evaluate it"
        )
    checked: JsonObject = evaluation
    return checked


def _is_valid_setting(row: Any) -> bool:
    """Whether a row has the keys that `choose` reads, with values of the right types."""
    if not isinstance(row, dict):
        return False
    for name, kind in IN_A_ROW.items():
        value = row.get(name)
        kinds = (int, float) if kind is float else kind
        if not isinstance(value, kinds) or isinstance(value, bool):
            return False
    return bool(row["latency_ratio"] > 0)
