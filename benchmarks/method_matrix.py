"""Builds the matrix of families and methods. A file keeps it, because building it takes diffusers:

python -m benchmarks.method_matrix > src/ditile/model/assets/matrix.json

"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
from torch import nn

from ditile.model.block_table import find_diffusers_class, read_columns, read_transformer_table
from ditile.model.call_families import FAMILIES
from ditile.model.known import ASSETS
from ditile.model.support import name_family
from ditile.parallel.vae.parallel_vae import PROVEN
from ditile.plan.errors import ModelError
from ditile.plan.shape import CallFamily
from ditile.runner.requests.conditions import CallConditions, read_call_conditions
from ditile.runner.requests.pipelines import find_output_kind

YES = "yes"
NO = "-"
GUIDED_CALL = {"guidance_scale": 5.0, "true_cfg_scale": 5.0, "negative_prompt": ""}
"""Arguments of a call with guidance, under the names of all families."""


RUNGS = ("PipeFusion, ulysses, ring", "ulysses, ring", "caches", "data, cfg")


@dataclass(frozen=True, slots=True)
class Family:
    """A row of `ditile models`: a family, and the rung of the ladder that it is on."""

    name: str
    transformer: str
    pipelines: tuple[str, ...]
    rung: str
    note: str


@dataclass(frozen=True, slots=True)
class MethodColumn:
    """A column: a method, its flag, and a function that says which support of it a family has."""

    name: str
    flag: str
    describe_support: Callable[[type[nn.Module], CallFamily], str]


def _describe_guidance(_: type[nn.Module], family: CallFamily) -> str:
    conditioning = family.conditioning(GUIDED_CALL)
    words = []
    if conditioning.rows > 1:
        words.append("batched")
    if conditioning.calls > 1:
        words.append("two calls")
    return ", ".join(words) or NO


def _describe_blocks(_: type[nn.Module], family: CallFamily) -> str:
    return YES


def _describe_text_attention(_: type[nn.Module], family: CallFamily) -> str:
    return "joint, fresh on every rank" if family.joint != "none" else "cross attention"


def _describe_tensor_parallel(transformer: type[nn.Module], family: CallFamily) -> str:
    return "row, sequence" if read_columns()[transformer.__name__]["token_streams"] else "row"


def _describe_parallel_vae(_: type[nn.Module], family: CallFamily) -> str:
    is_proven = all(_find_vae_class(name) in PROVEN for name in family.pipelines)
    return YES if is_proven else NO


def _find_vae_class(pipeline: str) -> str:
    """The class of a pipeline's VAE."""
    vae = inspect.signature(getattr(diffusers, pipeline).__init__).parameters["vae"].annotation
    return str(getattr(vae, "__name__", vae))


METHOD_COLUMNS = (
    MethodColumn("data", "--data", _describe_blocks),
    MethodColumn("cfg", "--cfg", _describe_guidance),
    MethodColumn("PipeFusion", "--pipefusion", _describe_blocks),
    MethodColumn("Ulysses, uaa", "--ulysses", _describe_blocks),
    MethodColumn("ring", "--ring", _describe_blocks),
    MethodColumn("DistriFusion", "--distrifusion", _describe_blocks),
    MethodColumn("tensor", "--tensor", _describe_tensor_parallel),
    MethodColumn("parallel VAE", "--vae rows", _describe_parallel_vae),
    MethodColumn("cache", "--cache", _describe_blocks),
    MethodColumn("text", "", _describe_text_attention),
)


def list_families() -> list[Family]:
    """Every family with the rung of the ladder that it is on, and why."""
    families = []
    for cls, family in FAMILIES.items():
        note = "its anatomy is derived"
        families.append(Family(family.name, cls.__name__, family.pipelines, RUNGS[0].split(",")[0], note))
    proven = _read_proven_families()
    with_lists = {name for name, entry in read_transformer_table().items() if not entry.refusal}
    described = []
    for name in sorted({*proven, *with_lists} - {cls.__name__ for cls in FAMILIES}):
        transformer = find_diffusers_class(name)
        if transformer is not None:
            described.append(_describe_family(transformer, *proven.get(name, ((), set()))))
    described.sort(key=lambda family: RUNGS.index(family.rung.removesuffix(", caches")))
    unets = ("StableDiffusionPipeline", "StableDiffusionXLPipeline", "...")
    return [*families, *described, Family("any other", "any, U-Nets too", unets, "data, cfg", "nothing need be known")]


def _describe_family(transformer: type[nn.Module], pipelines: tuple[str, ...], columns: set[str]) -> Family:
    """A family without cells."""
    rungs = []
    notes = []
    if columns >= {"ulysses", "ring", "distrifusion"}:
        rungs.append(RUNGS[0] if columns >= {"pipefusion", "stale"} else RUNGS[1])
        notes.append("its anatomy is derived")
    entry = read_transformer_table().get(transformer.__name__)
    if entry is not None and not entry.refusal:
        rungs.append("caches")
        notes.append("its blocks are listed")
    if entry is not None and entry.note:
        notes.append(entry.note)
    rung = ", ".join(rungs) or RUNGS[-1]
    return Family(name_family(transformer), transformer.__name__, pipelines, rung, "; ".join(notes))


def _read_proven_families() -> dict[str, tuple[tuple[str, ...], set[str]]]:
    """Transformer class -> its pipelines, and the columns of `assets/support.json` that one of their calls holds."""
    table = json.loads((ASSETS / "support.json").read_text("utf-8"))
    proven: dict[str, tuple[tuple[str, ...], set[str]]] = {}
    for family in table["families"]:
        pipelines, columns = proven.get(family["transformer"], ((), set()))
        if family["pipeline"] not in pipelines:
            pipelines = (*pipelines, family["pipeline"])
        proven[family["transformer"]] = (pipelines, columns | (set(table["columns"]) - set(family["holes"])))
    return proven


def build_matrix() -> dict[str, Any]:
    """Families and methods, as JSON types.

    Returns:
        methods: (name, flag) of each; families: the fields of each `Family`; cells: family -> a cell for each method;
        conditions: class of pipelines -> the class of its `transformer`, the `options` that give it what it
        takes besides words, and that in `words`.
    """
    return {
        "methods": [[method.name, method.flag] for method in METHOD_COLUMNS],
        "families": [dataclasses.asdict(family) | {"pipelines": [*family.pipelines]} for family in list_families()],
        "cells": {
            family.name: [method.describe_support(cls, family) for method in METHOD_COLUMNS]
            for cls, family in FAMILIES.items()
        },
        "conditions": _collect_conditions(),
    }


def _collect_conditions() -> dict[str, Any]:
    """Of each class that makes images or videos by a transformer, and starts from more than words."""
    rows = {}
    for name in dir(diffusers):
        if not name.endswith("Pipeline"):
            continue
        pipeline: Any = getattr(diffusers, name)
        if name.endswith("ModularPipeline"):
            if not pipeline.default_blocks_name:
                continue
            pipeline = pipeline()
        transformer = find_transformer_class(pipeline)
        # It makes neither images nor videos.
        if transformer is None or not _returns_frames(pipeline):
            continue
        call = read_call_conditions(pipeline)
        if call.arguments:
            words = ", ".join(describe_condition(call, condition) for condition in call.arguments)
            rows[name] = {"transformer": transformer.__name__, "options": [*call.arguments], "words": words}
    return rows


def find_transformer_class(pipeline: Any) -> type | None:
    """Find the class of a pipeline's transformer in its signature, or in the blocks of a modular pipeline."""
    if not hasattr(pipeline, "_get_signature_types"):
        specs = getattr(pipeline, "_component_specs", {})  # of a modular pipeline
        return getattr(specs.get("transformer"), "type_hint", None)
    kinds = pipeline._get_signature_types().get("transformer", ())
    return next((kind for kind in kinds if isinstance(kind, type)), None)


def _returns_frames(pipeline: Any) -> bool:
    try:
        return find_output_kind(pipeline) != "sound"
    except ModelError:
        return False


def describe_condition(call: CallConditions, name: str) -> str:
    """What a class takes for an option, for people; with a star if it cannot run without."""
    words = {"control_image": "control image", "last_image": "last frame"}
    text = words.get(name, name)
    if name == "image" and call.max_pictures > 1:
        text = "images"
    if name in call.needed:
        text += "*"
    return text


if __name__ == "__main__":
    print(json.dumps(build_matrix(), indent=1))
