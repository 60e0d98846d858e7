"""The `ModelSpec` of each family of transformers; the only place that knows their classes.

`register` adds a family from user code. What a pipeline gets depends on what is known of it (docs/design.md).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import diffusers
from diffusers import FluxTransformer2DModel, PixArtTransformer2DModel, SD3Transformer2DModel
from torch import nn

from ditile.model.block_table import TRANSFORMER_TABLE, find_diffusers_class
from ditile.model.flux import FLUX
from ditile.model.known import ASSETS
from ditile.model.pipeline_calls import find_denoisers, list_call_parameters
from ditile.model.pixart import PIXART
from ditile.model.sd3 import SD3
from ditile.plan.errors import ModelError, PlanError
from ditile.plan.plan import Plan
from ditile.plan.spec import ModelSpec

_SPECS: dict[type, ModelSpec] = {
    FluxTransformer2DModel: FLUX,
    PixArtTransformer2DModel: PIXART,
    SD3Transformer2DModel: SD3,
}

UNKNOWN_MODEL = ModelSpec(
    name="a model without a ModelSpec",
)
"""Nothing is known, so nothing is cut but the batch."""

_CLASS_SUFFIX = re.compile(r"(?<=\w)(Transformer([123]D)?(Model)?|[23]DModel|Model)$")


@dataclass(frozen=True, slots=True)
class Family:
    """A row of `ditile models`: a family, and the rung of the ladder that it is on."""

    name: str
    transformer: str
    pipelines: tuple[str, ...]
    rung: str
    note: str


def register(transformer: type[nn.Module], spec: ModelSpec) -> None:
    """Adds (or replaces) the `ModelSpec` of a transformer class.

    Args:
        transformer: the class.
        spec: what it has beyond its anatomy.

    Raises:
        ModelError: if `transformer` is no module class.
    """
    if not (isinstance(transformer, type) and issubclass(transformer, nn.Module)):
        raise ModelError(f"register needs a class of torch.nn.Module, and got {transformer!r}")
    _SPECS[transformer] = spec


def find_model_spec(transformer: object) -> ModelSpec | None:
    """The `ModelSpec` of a transformer, by its class or the nearest of its bases; None if there is none."""
    return next((_SPECS[cls] for cls in type(transformer).__mro__ if cls in _SPECS), None)


def choose_model_spec(transformer: object) -> ModelSpec:
    """The `ModelSpec` of a transformer; where there is none, one that says nothing."""
    return find_model_spec(transformer) or UNKNOWN_MODEL


def list_model_specs() -> dict[type[nn.Module], ModelSpec]:
    """The `ModelSpec` of each transformer class."""
    return dict(_SPECS)


def list_families() -> list[Family]:
    """Every family with the rung of the ladder that it is on, and why."""
    known = [
        Family(spec.name, cls.__name__, spec.pipelines, "PipeFusion", "has a ModelSpec") for cls, spec in _SPECS.items()
    ]
    proven = read_proven_columns()
    lists = [name for name in TRANSFORMER_TABLE if not TRANSFORMER_TABLE[name].refusal]
    found = {cls.__name__ for cls in _SPECS}
    names = sorted(name for name in {*proven, *lists} - found if find_diffusers_class(name) is not None)
    tables = [
        Family(_CLASS_SUFFIX.sub("", name), name, *_describe_rung(name, *proven.get(name, ((), frozenset()))))
        for name in names
    ]
    tables.sort(key=lambda family: _RUNGS.index(family.rung.removesuffix(", caches")))
    others = ("StableDiffusionPipeline", "StableDiffusionXLPipeline", "...")
    return [*known, *tables, Family("any other", "any, U-Nets too", others, "data, cfg", "nothing need be known")]


def read_proven_columns() -> dict[str, tuple[tuple[str, ...], frozenset[str]]]:
    """Transformer class -> its pipelines, and the columns of `assets/families.json` that one of their calls holds."""
    table = json.loads((ASSETS / "families.json").read_text("utf-8"))
    proven: dict[str, tuple[tuple[str, ...], frozenset[str]]] = {}
    for family in table["families"]:
        pipelines, columns = proven.get(family["transformer"], ((), frozenset()))
        names = tuple(dict.fromkeys((*pipelines, family["pipeline"])))
        proven[family["transformer"]] = (
            names,
            columns | {each for each in table["columns"] if each not in family["holes"]},
        )
    return proven


def find_holes(transformer: type, pipeline: str) -> dict[str, str]:
    """Each column of `assets/families.json` that no call of a pipeline with a transformer holds -> the reason.

    Where the pipeline is not in the table, other pipelines of the class speak for it; a class that is not in it holds
    `data` and `cfg`.
    """
    table = json.loads((ASSETS / "families.json").read_text("utf-8"))
    columns = {*table["columns"], "tensor"}
    rows = [row for row in table["families"] if row["transformer"] == transformer.__name__]
    rows = [row for row in rows if row["pipeline"] == pipeline] or rows
    if not rows:
        return dict.fromkeys(columns - {"data", "cfg"}, "is not in the table of families")
    holes = {name: reason for name, reason in rows[0]["holes"].items() if all(name in row["holes"] for row in rows)}
    unproven = dict.fromkeys(columns - set(table["columns"]), "was not tried with it")
    return unproven | holes


def name_family(transformer: type) -> str:
    """What people call a class of transformers without a `ModelSpec`."""
    return _CLASS_SUFFIX.sub("", transformer.__name__)


_SEQUENCE = {"ulysses", "ring", "distrifusion"}
_RUNGS = ("PipeFusion, ulysses, ring", "ulysses, ring", "caches", "data, cfg")


def _describe_rung(name: str, pipelines: tuple[str, ...], columns: frozenset[str]) -> tuple[tuple[str, ...], str, str]:
    """The pipelines of a transformer without a `ModelSpec`, the rung that it is on, and why."""
    row = TRANSFORMER_TABLE.get(name)
    rungs = []
    notes = []
    if columns >= _SEQUENCE:
        rungs = [_RUNGS[0] if columns >= {"pipefusion", "stale"} else _RUNGS[1]]
        notes = ["its anatomy is derived"]
    if row is not None and not row.refusal:
        rungs = [*rungs, "caches"]
        notes = [*notes, "its blocks are listed"]
    if row is not None and row.note:
        notes.append(row.note)
    return pipelines, ", ".join(rungs) or _RUNGS[-1], "; ".join(notes)


def find_loop_model(pipe: diffusers.DiffusionPipeline) -> nn.Module:
    """The first model that a pipeline calls in its loop; raises as `find_denoisers`."""
    return next(iter(find_denoisers(pipe).values()))


def select_plan_spec(pipe: Any, plan: Plan) -> ModelSpec:
    """The `ModelSpec` of the model of a pipeline, or `UNKNOWN_MODEL` where it has none.

    Raises:
        ModelError: if the pipeline runs what a patch pipeline cannot honour.
        PlanError: if guidance branches are to be shared out that the model itself compares.
    """
    model = find_loop_model(pipe)
    name = type(pipe).__name__
    parameters = list_call_parameters(pipe)
    if plan.cfg > 1 and "pag_scale" in parameters:
        raise PlanError(f"cfg={plan.cfg}: {name} tells branches of guidance apart inside attention; use data instead")
    if plan.divides_the_batch_alone:
        return choose_model_spec(model)
    if "pag_scale" in parameters and (plan.world > plan.data * plan.tensor or plan.num_patches > 1):
        raise ModelError(
            f"{name} puts an attention of its own into the transformer while it runs, which would see this rank's "
            "tokens alone; use data or tensor"
        )
    called = list(find_denoisers(pipe).values())
    others = [part for part in pipe.components.values() if type(part) is type(model) and part not in called]
    if others and plan.pipefusion * plan.num_patches > 1:
        raise ModelError(
            f"{name} calls a second {type(model).__name__} in its loop, which needs the whole fresh latents on every "
            "stage; use a plan with pipefusion=1 and patches=1"
        )
    return choose_model_spec(model)
