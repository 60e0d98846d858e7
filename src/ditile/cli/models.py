"""`ditile models`: what can run. It shows a table that `matrix.py` has built, so that it need not import torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from ditile.model.known import ASSETS, list_bundled_models, list_known_models, list_published_models
from ditile.plan.checks import suggest_nearest
from ditile.plan.errors import ModelError

_REASONS = ("has a ModelSpec", "its anatomy is derived", "its blocks are listed", "nothing need be known")
"""Of a support level; every family of it has them."""


def read_matrix() -> dict[str, Any]:
    """What `build_matrix` has built."""
    matrix: dict[str, Any] = json.loads((ASSETS / "matrix.json").read_text("utf-8"))
    return matrix


def read_families() -> dict[str, Any]:
    """What every family holds under every axis, as the tests of all tiny pipelines prove it."""
    families: dict[str, Any] = json.loads((ASSETS / "families.json").read_text("utf-8"))
    return families


def build_matrix_tables(matrix: Mapping[str, Any]) -> Iterator[Table]:
    """The tables of `ditile models`, for 80 columns: families with a `ModelSpec`, and all others by support level."""
    families = matrix["families"]
    cells = matrix["cells"]
    specs = [family for family in families if family["name"] in cells]
    names = Table("family")
    # Names of classes are copied, so that they are whole, and the family's is broken where columns are few.
    for title in ("transformer", "pipelines"):
        names.add_column(title, no_wrap=True)
    for family in specs:
        names.add_row(family["name"], family["transformer"], "\n".join(family["pipelines"]))
    yield names
    known = Table("", *(family["name"] for family in specs))
    for k, (method, _) in enumerate(matrix["methods"]):
        known.add_row(method, *(cells[family["name"]][k] for family in specs))
    yield known
    others = Table("support level", "families (transformers of diffusers)")
    remarks: dict[str, list[str]] = {}
    for rung in dict.fromkeys(family["rung"] for family in families if family not in specs):
        of_rung = [family for family in families if family["rung"] == rung]
        others.add_row(rung, ", ".join(family["name"] for family in of_rung), end_section=True)
        for family in of_rung:
            for remark in family["note"].split("; "):
                if remark and remark not in _REASONS:
                    remarks.setdefault(remark, []).append(family["name"])
    yield others
    notes = Table("remark", "families")
    for remark, of_remark in remarks.items():
        notes.add_row(remark, ", ".join(of_remark))
    yield notes
    started = Table("starts from (* needed)")
    started.add_column("pipelines", no_wrap=True)
    for words, classes in _group_conditions(matrix).items():
        started.add_row(words, "\n".join(classes))
    yield started
    models = Table("models known by name", show_header=False)
    models.add_row("bundled", ", ".join(list_bundled_models()))
    models.add_row("published", ", ".join(list_published_models()))
    yield models


def build_tables_of_name(matrix: Mapping[str, Any], name: str) -> list[Table]:
    """The models and families whose names have these letters, without regard to case and to what is no letter.

    Args:
        matrix: what `read_matrix` gives.
        name: a part of a model's name or hub id, or of a family, a transformer or a pipeline.

    Raises:
        ModelError: if there is none.
    """
    word = _simplify(name)
    models = Table("model", "where its weights are")
    for model in list_known_models():
        if word and word in _simplify(f"{model.name} {model.hub_id}"):
            models.add_row(model.name, model.hub_id or "with ditile")
    families = Table("families", show_header=False)
    for family in matrix["families"]:
        names = [family["name"], family["transformer"], *family["pipelines"]]
        if word and any(word in _simplify(each) for each in names):
            families.add_row("family", family["name"])
            families.add_row("transformer", family["transformer"])
            families.add_row("pipelines", "\n".join(family["pipelines"]))
            families.add_row("support level", family["rung"], end_section=True)
    tables = [table for table in (models, families) if table.row_count]
    if not tables:
        known = [*(model.name for model in list_known_models()), *(family["name"] for family in matrix["families"])]
        hint = suggest_nearest(name, known, "")
        raise ModelError(f"no model or family has {name!r} in its name; {hint and hint + ' '}ditile models lists all")
    return tables


def _simplify(name: str) -> str:
    """The letters and digits of a name, in lower case: Qwen-Image and qwenimage are the same."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _group_conditions(matrix: Mapping[str, Any]) -> dict[str, list[str]]:
    """What calls start from, in words -> the classes of pipelines that do."""
    groups: dict[str, list[str]] = {}
    for name, each in matrix["conditions"].items():
        groups.setdefault(each["words"], []).append(name)
    return groups


def format_matrix_markdown(matrix: Mapping[str, Any], proven: Mapping[str, Any]) -> str:
    """The text of docs/matrix.md.

    Args:
        matrix: what `read_matrix` gives.
        proven: what `read_families` gives.
    """
    methods = matrix["methods"]
    table = [["family", *(name for name, _ in methods)], ["---"] * (len(methods) + 1)]
    table += [["", *(f"`{flag}`" if flag else "" for _, flag in methods)]]
    table += [[name, *cells] for name, cells in matrix["cells"].items()]
    known: list[list[str]] = [["family", "transformer", "pipelines", "support level", "why"], ["---"] * 5]
    known += [
        [f["name"], f["transformer"], ", ".join(f["pipelines"]), f["rung"], f["note"]] for f in matrix["families"]
    ]
    return "\n".join(
        [
            _HEAD,
            *_format_markdown_rows(known),
            _MIDDLE,
            *_format_markdown_rows(table),
            _END,
            *_format_families(proven),
            *_format_conditions(matrix),
        ]
    )


def _format_families(proven: Mapping[str, Any]) -> list[str]:
    """A row for each pipeline, with the number of the reason where it does not hold a column, and the reasons."""
    columns = proven["columns"]
    families = proven["families"]
    reasons = {reason: 0 for family in families for reason in family["holes"].values()}
    numbers = {reason: f"({k})" for k, reason in enumerate(reasons, start=1)}
    table = [["pipeline", *columns], ["---", *[":-:"] * len(columns)]]
    for family in families:
        cells = [numbers[family["holes"][c]] if c in family["holes"] else "+" for c in columns]
        table.append([f"{family['pipeline']} ({family['name']})", *cells])
    whole = sum(not family["holes"] for family in families)
    missing = {family["transformer"]: set(columns) for family in families}
    for family in families:
        missing[family["transformer"]] &= family["holes"].keys()
    one_at_a_time = {f["transformer"] for f in families if f["holes"].get("data") == ONE_PICTURE}
    heading = _FAMILIES.format(
        pipelines=len(families),
        whole=whole,
        classes=len(missing),
        proven_classes=sum(not columns for columns in missing.values()),
        but_data=sum(columns == {"data"} and cls in one_at_a_time for cls, columns in missing.items()),
    )
    notes = [f"- {number} {reason}" for reason, number in numbers.items()]
    notes = ["\nA number stands for the reason: such a pipeline\n", *notes]
    return [heading, *_format_markdown_rows(table), *notes, *_format_references(proven)]


def _format_references(proven: Mapping[str, Any]) -> list[str]:
    """Which calls with pictures to refer to hold `references`, and the reason of those that do not."""
    pipelines = {family["name"]: f"{family['pipeline']} ({family['name']})" for family in proven["families"]}
    answers: dict[str, list[str]] = {}
    for name, reason in proven["references"].items():
        answers.setdefault(f"no, it {reason}" if reason else "+", []).append(pipelines[name])
    rows = [["references", "pipelines"], ["---", "---"]]
    rows += [[answer, ", ".join(names)] for answer, names in answers.items()]
    return [_REFERENCES, *_format_markdown_rows(rows)]


def _format_conditions(matrix: Mapping[str, Any]) -> list[str]:
    rows = [["starts from", "pipelines"], ["---", "---"]]
    rows += [[words.replace("*", "\\*"), ", ".join(names)] for words, names in _group_conditions(matrix).items()]
    return [_CONDITIONS, *_format_markdown_rows(rows)]


def _format_markdown_rows(table: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in table]


ONE_PICTURE = "makes one picture at a time"
"""Why a pipeline has no call for the column `data`."""

_FAMILIES = """
## Every family under every axis

Made from `model/assets/families.json`; `make test-families` proves each cell on tiny models. Of {pipelines} calls of
pipelines {whole} hold every column. A transformer class holds a column where one of its calls does: of {classes}
classes {proven_classes} hold every column, and {but_data} more every one but `data`, because its pipelines make one
picture at a time. A class of which there are distilled models too, which are called without guidance, holds `cfg` by
the call with guidance.

- proof: a call computed patch by patch with keys that did not change is the whole call
- pipefusion: two stages with nothing stale are bit-identical to the pipeline
- stale: two stages with stale keys are bit-identical to one, and differ from the pipeline
- ulysses, ring, distrifusion (nothing stale), tensor, cfg, data: two ranks are the pipeline up to rounding
- cache: with a threshold of 0 bit-identical on two stages, and on two ranks the steps are skipped that one skips
"""
_REFERENCES = """
Pictures that a call refers to may be patches of their own (`--references K`,
[pipefusion.md](pipefusion.md#references)). +: two stages that compute them in synchronous steps alone, with nothing
stale, are bit-identical to the pipeline. Others refuse it.
"""
_CONDITIONS = """
## What calls start from

Read off the signatures of the calls. A star marks what a class cannot draw without; a class of several pictures
composes them. `ditile generate` takes the class of the model's family that takes what is given, and says so.
"""
_HEAD = """# Which models work with which methods

Made by `ditile models --markdown` from `model/assets/matrix.json`, which says what the families' tables (`model/`)
say. A test fails when it is not up to date.
"""
_MIDDLE = """
What a family has:
"""
_END = """
Any product of the degrees of a row works: data x cfg x (PipeFusion x ring | DistriFusion) x Ulysses x tensor. Only
DistriFusion excludes others: it takes the place of ring and PipeFusion. If a plan does not fit a model or a size, an
error says so before anything runs, with the degrees that fit. `ditile verify` checks a plan on your machine. A cache
goes with every plan of a family whose support level is PipeFusion or names caches, and of a transformer of your own
whose blocks are read from its source or named by a `BlockAdapter` ([caching.md](caching.md)).

Where steps are stale, guidance that takes a statistic of the whole prediction (`guidance_rescale`, and guiders of
that kind) takes that of one which is partly a step old, an approximation that a line of the log names, whether the
value is given or the default of the pipeline; guiders that remember earlier predictions are refused there. With
`warmup` equal to the steps both are exact, as they are with all other axes. Schedulers with `thresholding=True` or
a `noise_sampler_seed` are refused with patches. SD3's skip-layer guidance goes with data and cfg alone. IP-adapters
of FLUX.1 and SD3 that are loaded before `parallelize` go with every plan, but SD3's with `warmup_mode=separate`.
Perturbed-attention guidance goes with data and tensor only. A ControlNet in the loop goes with every plan; in a step
of patches it is computed once, of the latents as they are when the step begins ([pipefusion.md](pipefusion.md)).
Wan-Animate 2 (modular) goes with cfg alone: its blocks attend to keys that a call in front of the loop kept, and not
all calls run the same blocks."""
