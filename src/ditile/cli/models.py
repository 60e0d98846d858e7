"""`ditile models`: shows which models work with which methods, from a stored table, so it need not import torch."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ditile.model.known import (
    ASSETS,
    find_known_model,
    list_bundled_models,
    list_known_models,
    list_published_models,
)
from ditile.plan.errors import ModelError, suggest_nearest
from ditile.plan.numbers import format_bytes
from ditile.plan.option_classes import JsonObject
from ditile.runner.model_files import FORMATS, TRANSFORMER, check_model_file
from ditile.runner.requests.options import ModelsOptions

_REASONS = ("has a ModelSpec", "its anatomy is derived", "its blocks are listed", "nothing need be known")
"""What a family of each support level has."""


def show_models(shown: ModelsOptions, console: Console) -> None:
    """Print what can run. Raises `ModelError` if nothing has the name, or Markdown and a name are both given."""
    matrix = read_matrix()
    if shown.markdown:
        if shown.name is not None:
            raise ModelError(f"name={shown.name!r} is for the tables; leave it out, or leave out --markdown")
        print(format_matrix_markdown(matrix, read_families()))
        return
    tables = build_matrix_tables(matrix)
    if shown.name is not None and (os.path.isfile(shown.name) or Path(shown.name).suffix in FORMATS):
        tables = [build_table_of_file(Path(shown.name))]
    elif shown.name is not None:
        tables = _build_tables_of_known_name(matrix, shown.name)
    for table in tables:
        console.print(table)


def _build_tables_of_known_name(matrix: JsonObject, name: str) -> list[Table]:
    try:
        return build_tables_of_name(matrix, name)
    except ModelError:
        if not os.path.isdir(name):
            raise
    raise ModelError(
        f"name={name!r} is a folder, and names and files are shown here; what a folder holds is shown by "
        f"`ditile generate --model {shlex.quote(name)} --dry-run`"
    )


def read_matrix() -> JsonObject:
    """Read the table of models and methods, built by `build_matrix` of the tests."""
    matrix: JsonObject = json.loads((ASSETS / "matrix.json").read_text("utf-8"))
    return matrix


def read_families() -> JsonObject:
    """Read what the tests of all tiny pipelines proved about every family under every axis."""
    families: JsonObject = json.loads((ASSETS / "families.json").read_text("utf-8"))
    return families


def build_matrix_tables(matrix: JsonObject) -> list[Table]:
    """Build the tables of `ditile models`, 80 columns wide. Families without a `ModelSpec` are by support level."""
    specs = []
    others = []
    for family in matrix["families"]:
        if family["name"] in matrix["cells"]:
            specs.append(family)
        else:
            others.append(family)
    conditions = Table("starts from (* needed)")
    conditions.add_column("pipelines", no_wrap=True)
    for words, classes in _group_conditions(matrix).items():
        conditions.add_row(words, "\n".join(classes))
    models = Table("models known by name", show_header=False)
    models.add_row("bundled", ", ".join(list_bundled_models()))
    models.add_row("published", ", ".join(list_published_models()))
    return [*_build_spec_tables(matrix, specs), *_build_level_tables(others), conditions, models]


def _build_spec_tables(matrix: JsonObject, specs: list[JsonObject]) -> list[Table]:
    """Build the tables of families with a `ModelSpec`: their classes, and their methods."""
    classes = Table("family")
    # Users copy class names, so these are not wrapped; family names are, in a narrow terminal.
    classes.add_column("transformer", no_wrap=True)
    classes.add_column("pipelines", no_wrap=True)
    methods = Table("", *(family["name"] for family in specs))
    for family in specs:
        classes.add_row(family["name"], family["transformer"], "\n".join(family["pipelines"]))
    for k, (method, _) in enumerate(matrix["methods"]):
        methods.add_row(method, *(matrix["cells"][family["name"]][k] for family in specs))
    return [classes, methods]


def _build_level_tables(families: list[JsonObject]) -> list[Table]:
    """Build the tables of families by support level, with remarks about them."""
    names_by_level: dict[str, list[str]] = {}
    names_by_remark: dict[str, list[str]] = {}
    for family in families:
        names_by_level.setdefault(family["rung"], []).append(family["name"])
        for remark in family["note"].split("; "):
            if remark and remark not in _REASONS:
                names_by_remark.setdefault(remark, []).append(family["name"])
    levels = Table("support level", "families (transformers of diffusers)")
    for level, names in names_by_level.items():
        levels.add_row(level, ", ".join(names), end_section=True)
    remarks = Table("remark", "families")
    for remark, names in names_by_remark.items():
        remarks.add_row(remark, ", ".join(names))
    return [levels, remarks]


def build_tables_of_name(matrix: JsonObject, name: str) -> list[Table]:
    """Build tables of the models and families with a name, ignoring case and all but letters and digits.

    A part of a name is enough.

    Args:
        matrix: the result of `read_matrix`.
        name: part of a hub id, or of the name of a model, family, transformer or pipeline.

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
        if word and any(word in _simplify(part) for part in names):
            families.add_row("family", family["name"])
            families.add_row("transformer", family["transformer"])
            families.add_row("pipelines", "\n".join(family["pipelines"]))
            families.add_row("support level", family["rung"], end_section=True)
    tables = [table for table in (models, families) if table.row_count]
    if not tables:
        known = [model.name for model in list_known_models()]
        known += [family["name"] for family in matrix["families"]]
        hint = suggest_nearest(name, known, "")
        raise ModelError(f"no model or family has {name!r} in its name; {hint} ditile models lists all")
    return tables


def build_table_of_file(path: Path) -> Table:
    """Build a table of the contents of a component's weight file. For a transformer it includes what is missing.

    Raises:
        DitileError: if it is not such a file, or not the transformer of a published model.
    """
    check_model_file(path, "name")
    from ditile.runner.requests.prepare import silence_libraries

    silence_libraries()
    from ditile.runner.weights.single_file import SingleFile, find_base_models

    file = SingleFile.read_header(path)
    numbers = file.count_types()
    types = [f"{name} {count / numbers.total():.0%}" for name, count in numbers.most_common()]
    table = Table("file", path.name)
    table.add_row("size", f"{format_bytes(path.stat().st_size)}, {numbers.total() / 1e9:.2f} billion numbers")
    table.add_row("types", ", ".join(types))
    component = file.guess_component()
    if component != TRANSFORMER:
        table.add_row("component", f"{component}: --model FOLDER --component {component}=FILE")
        return table
    base, *others = find_base_models(path)
    known = find_known_model(base)
    assert known is not None
    table.add_row("transformer of", f"{known.name} ({known.hub_id})")
    if others:
        table.add_row("or of", f"{', '.join(others)} (the same shapes)")
    table.add_row("class", known.transformer)
    table.add_row("lacks", "text encoders and VAE: --model FOLDER --transformer FILE, or --model FILE with those")
    table.add_row("", f"of {known.hub_id}")
    return table


def _simplify(name: str) -> str:
    """Return the letters and digits of a name, in lower case. Qwen-Image and qwenimage are the same."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _group_conditions(matrix: JsonObject) -> dict[str, list[str]]:
    """Group the classes of pipelines by the inputs of their calls, in words."""
    groups: dict[str, list[str]] = {}
    for name, row in matrix["conditions"].items():
        groups.setdefault(row["words"], []).append(name)
    return groups


def format_matrix_markdown(matrix: JsonObject, proven: JsonObject) -> str:
    """Return the text of docs/matrix.md.

    Args:
        matrix: the result of `read_matrix`.
        proven: the result of `read_families`.
    """
    methods = matrix["methods"]
    cells = [["family"], ["---"], [""]]
    for method, flag in methods:
        cells[0].append(method)
        cells[1].append("---")
        shown = f"`{flag}`" if flag else ""
        cells[2].append(shown)
    cells += [[family, *row] for family, row in matrix["cells"].items()]
    known = [["family", "transformer", "pipelines", "support level", "why"], ["---"] * 5]
    for family in matrix["families"]:
        pipelines = ", ".join(family["pipelines"])
        known.append([family["name"], family["transformer"], pipelines, family["rung"], family["note"]])
    parts = [_HEAD, *_format_markdown_rows(known), _MIDDLE, *_format_markdown_rows(cells), _END]
    return "\n".join([*parts, *_format_families(proven), *_format_conditions(matrix)])


def _format_families(proven: JsonObject) -> list[str]:
    """Format a row for each pipeline, and the reasons.

    Where a column does not hold, the row has the number of the reason.
    """
    columns = proven["columns"]
    table = [["pipeline", *columns], ["---", *[":-:"] * len(columns)]]
    numbers: dict[str, str] = {}
    # Transformer -> the columns that hold for none of its pipelines.
    missing: dict[str, set[str]] = {}
    single_image: set[str] = set()
    num_whole = 0
    for family in proven["families"]:
        holes = family["holes"]
        row = [f"{family['pipeline']} ({family['name']})"]
        for reason in holes.values():
            numbers.setdefault(reason, f"({len(numbers) + 1})")
        for column in columns:
            cell = numbers[holes[column]] if column in holes else "+"
            row.append(cell)
        table.append(row)
        if not holes:
            num_whole += 1
        # A column holds for a class of transformers if it holds for one of its pipelines.
        missing.setdefault(family["transformer"], set(columns)).intersection_update(holes)
        if holes.get("data") == ONE_PICTURE:
            single_image.add(family["transformer"])
    heading = _FAMILIES.format(
        pipelines=len(proven["families"]),
        whole=num_whole,
        classes=len(missing),
        proven_classes=sum(not columns for columns in missing.values()),
        but_data=sum(missing[name] == {"data"} for name in single_image),
    )
    notes = ["\nA number stands for the reason: such a pipeline\n"]
    notes += [f"- {number} {reason}" for reason, number in numbers.items()]
    return [heading, *_format_markdown_rows(table), *notes, *_format_references(proven)]


def _format_references(proven: JsonObject) -> list[str]:
    """Format which calls with reference images hold `references`, and why the others do not."""
    pipelines = {family["name"]: f"{family['pipeline']} ({family['name']})" for family in proven["families"]}
    answers: dict[str, list[str]] = {}
    for name, reason in proven["references"].items():
        answer = f"no, it {reason}" if reason else "+"
        answers.setdefault(answer, []).append(pipelines[name])
    rows = [["references", "pipelines"], ["---", "---"]]
    rows += [[answer, ", ".join(names)] for answer, names in answers.items()]
    return [_REFERENCES, *_format_markdown_rows(rows)]


def _format_conditions(matrix: JsonObject) -> list[str]:
    rows = [["starts from", "pipelines"], ["---", "---"]]
    for words, names in _group_conditions(matrix).items():
        # Markdown would read an asterisk as emphasis.
        escaped = words.replace("*", "\\*")
        rows.append([escaped, ", ".join(names)])
    return [_CONDITIONS, *_format_markdown_rows(rows)]


def _format_markdown_rows(table: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in table]


ONE_PICTURE = "makes one picture at a time"
"""Why a pipeline has no call for the column `data`."""

_FAMILIES = """
## Every family under every axis

Made from `model/assets/families.json`; `make nightly` proves each cell on tiny models. Of {pipelines} calls of
pipelines {whole} hold every column. A transformer class holds a column where one of its calls does: of {classes}
classes {proven_classes} hold every column, and {but_data} more every one but `data`, because its pipelines make one
picture at a time. If a class also has distilled models, which are called without guidance, its call with guidance
counts for `cfg`.

- proof: a call computed patch by patch, with keys that do not change, gives the same result as the whole call
- pipefusion: two stages with nothing stale are bit-identical to the pipeline
- stale: two stages with stale keys are bit-identical to one, and differ from the pipeline
- ulysses, ring, distrifusion (nothing stale), tensor, cfg, data: two ranks equal the pipeline up to rounding
- cache: bit-identical on two stages with a threshold of 0, and two ranks skip the same steps as one
"""
_REFERENCES = """
The reference images of a call may be separate patches (`--references K`, [pipefusion.md](pipefusion.md#references)).
+: two stages that compute them only in synchronous steps, with nothing stale, are bit-identical to the pipeline. The
other pipelines refuse it.
"""
_CONDITIONS = """
## What calls start from

Read from the signatures of the calls. A star marks an input that a class requires; a class that takes several images
composes them. `ditile generate` chooses the class of the model's family that takes the given inputs, and names it.
"""
_HEAD = """# Which models work with which methods

Made by `ditile models --markdown` from `model/assets/matrix.json`, which is made from the families' tables (`model/`).
A test fails if this page is not up to date.
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

In steps with stale keys, guidance that computes a statistic of the whole prediction (`guidance_rescale`, and similar
guiders) uses a prediction of which a part is one step old. A line of the log names this approximation, whether the
value is given or the pipeline's default. Guiders that remember earlier predictions are refused there. With `warmup`
equal to the steps both are exact, as they are with all other axes. Schedulers with `thresholding=True` or
a `noise_sampler_seed` are refused with patches. SD3's skip-layer guidance goes with data and cfg alone. IP-adapters
of FLUX.1 and SD3 that are loaded before `parallelize` go with every plan, but SD3's with `warmup_mode=separate`.
Perturbed-attention guidance goes with data and tensor only. A ControlNet in the loop goes with every plan; in a step
of patches it is computed once, of the latents as they are when the step begins ([pipefusion.md](pipefusion.md)).
Wan-Animate 2 (modular) goes with cfg alone: its blocks attend to keys that a call in front of the loop kept, and not
all calls run the same blocks."""
