"""`ditile models`: shows which models work with which methods, from a stored table, so it need not import torch."""

from __future__ import annotations

import json
import os
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

SUPPORT_REASONS = ("its anatomy is derived", "its blocks are listed", "nothing need be known")
"""The remarks that only repeat a support level."""


def show_models(options: ModelsOptions, console: Console) -> None:
    """Print what can run. Raises `ModelError` if nothing has the name."""
    matrix = read_matrix()
    if options.name is None:
        tables = build_matrix_tables(matrix)
    elif os.path.isfile(options.name) or Path(options.name).suffix in FORMATS:
        tables = [build_table_of_file(Path(options.name))]
    else:
        tables = build_tables_of_name(matrix, options.name)
    for table in tables:
        console.print(table)


def read_matrix() -> JsonObject:
    """Read the table of models and methods, which `build_matrix` of benchmarks/method_matrix.py builds."""
    matrix: JsonObject = json.loads((ASSETS / "matrix.json").read_text("utf-8"))
    return matrix


def build_matrix_tables(matrix: JsonObject) -> list[Table]:
    """Build the tables of `ditile models`, 80 columns wide, with a level of support for families without methods."""
    classes = Table("family")
    # Users copy class names, so these are not wrapped; family names are, in a narrow terminal.
    classes.add_column("transformer", no_wrap=True)
    classes.add_column("pipelines", no_wrap=True)
    methods = Table("", *matrix["cells"])
    names_by_level: dict[str, list[str]] = {}
    names_by_remark: dict[str, list[str]] = {}
    for family in matrix["families"]:
        if family["name"] in matrix["cells"]:
            classes.add_row(family["name"], family["transformer"], "\n".join(family["pipelines"]))
            continue
        names_by_level.setdefault(family["rung"], []).append(family["name"])
        for remark in family["note"].split("; "):
            if remark and remark not in SUPPORT_REASONS:
                names_by_remark.setdefault(remark, []).append(family["name"])
    for k, (method, _) in enumerate(matrix["methods"]):
        methods.add_row(method, *(cells[k] for cells in matrix["cells"].values()))
    levels = Table("support level", "families (transformers of diffusers)")
    for level, names in names_by_level.items():
        levels.add_row(level, ", ".join(names), end_section=True)
    remarks = Table("remark", "families")
    for remark, names in names_by_remark.items():
        remarks.add_row(remark, ", ".join(names))
    conditions = Table("starts from (* needed)")
    conditions.add_column("pipelines", no_wrap=True)
    for words, pipelines in group_conditions(matrix).items():
        conditions.add_row(words, "\n".join(pipelines))
    models = Table("models known by name", show_header=False)
    models.add_row("bundled", ", ".join(list_bundled_models()))
    models.add_row("published", ", ".join(list_published_models()))
    return [classes, methods, levels, remarks, conditions, models]


def build_tables_of_name(matrix: JsonObject, name: str) -> list[Table]:
    """Build tables of the models and families with a name, comparing only letters and digits, without case.

    A part of a name is enough.

    Args:
        name: part of a hub id, or of the name of a model, family, transformer or pipeline.

    Raises:
        ModelError: if nothing has this name.
    """
    word = _simplify(name)
    known = []
    models = Table("model", "where its weights are")
    for model in list_known_models():
        known.append(model.name)
        if word and word in _simplify(f"{model.name} {model.hub_id}"):
            models.add_row(model.name, model.hub_id or "with ditile")
    families = Table("families", show_header=False)
    for family in matrix["families"]:
        known.append(family["name"])
        names = [family["name"], family["transformer"], *family["pipelines"]]
        if word and any(word in _simplify(part) for part in names):
            families.add_row("family", family["name"])
            families.add_row("transformer", family["transformer"])
            families.add_row("pipelines", "\n".join(family["pipelines"]))
            families.add_row("support level", family["rung"], end_section=True)
    tables = []
    for table in (models, families):
        if table.row_count:
            tables.append(table)
    if not tables:
        hint = suggest_nearest(name, known, "")
        raise ModelError(f"no model or family has {name!r} in its name; {hint} ditile models lists all")
    return tables


def build_table_of_file(path: Path) -> Table:
    """Build a table of a weight file's contents. For a transformer it also lists the missing components.

    Raises `DitileError` if it is not such a file, or not the transformer of a published model.
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
    return "".join(filter(str.isalnum, name.lower()))


def group_conditions(matrix: JsonObject) -> dict[str, list[str]]:
    """Group the classes of pipelines by the inputs of their calls, in words."""
    groups: dict[str, list[str]] = {}
    for name, row in matrix["conditions"].items():
        groups.setdefault(row["words"], []).append(name)
    return groups
