"""Makes docs/matrix.md, the page of models and methods: `python -m benchmarks.matrix_page > docs/matrix.md`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from textwrap import wrap

from ditile.cli.models import SUPPORT_REASONS, group_conditions, read_matrix
from ditile.model.known import ASSETS
from ditile.plan.option_classes import JsonObject

ONE_PICTURE = "makes one image at a time"
"""Why a pipeline has no call for the column `data`."""


def read_families() -> JsonObject:
    """Read what the tests of all tiny pipelines proved about every family under every axis."""
    families: JsonObject = json.loads((ASSETS / "support.json").read_text("utf-8"))
    return families


def format_page(matrix: JsonObject, proven: JsonObject) -> str:
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
    known = [["family", "transformer", "support level"], ["---"] * 3]
    pipelines: dict[str, list[str]] = {}
    remarks: dict[str, list[str]] = {}
    for family in matrix["families"]:
        known.append([family["name"], family["transformer"], family["rung"]])
        if family["pipelines"]:
            pipelines[family["name"]] = family["pipelines"]
        for remark in family["note"].split("; "):
            if remark and remark not in SUPPORT_REASONS:
                remarks.setdefault(remark, []).append(family["name"])
    parts = [_HEAD, *_format_markdown_rows(known), _PIPELINES, *_format_lists(pipelines)]
    parts += [_REMARKS, *_format_lists(remarks), _MIDDLE, *_format_markdown_rows(cells), _END]
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
    num_calls = Counter(family["pipeline"] for family in proven["families"])
    num_whole = 0
    for family in proven["families"]:
        holes = family["holes"]
        row = [family["pipeline"]]
        # Several calls of one class differ by what they are given.
        if num_calls[family["pipeline"]] > 1:
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
    return [_REFERENCES, *_format_lists(answers)]


def _format_conditions(matrix: JsonObject) -> list[str]:
    # Markdown would read an asterisk as emphasis.
    groups = {words.replace("*", "\\*"): names for words, names in group_conditions(matrix).items()}
    return [_CONDITIONS, *_format_lists(groups)]


def _format_lists(groups: Mapping[str, Sequence[str]]) -> list[str]:
    """Format an item for each group of names; in a table the longest would be a row of hundreds of letters."""
    lines = []
    for title, names in groups.items():
        item = f"- {title}: {', '.join(names)}"
        lines += wrap(item, 100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return lines


def _format_markdown_rows(table: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in table]


_FAMILIES = """
## Every family under every axis

Made from `model/assets/support.json`; `make nightly` proves each cell on tiny models. Of {pipelines} calls of
pipelines {whole} hold every column. A transformer class holds a column where one of its calls does: of {classes}
classes {proven_classes} hold every column, and {but_data} more every one but `data`, because its pipelines make one
image at a time. If a class also has distilled models, which are called without guidance, its call with guidance
counts for `cfg`.

- proof: a call computed patch by patch, with keys that do not change, gives the same result as the whole call
- pipefusion: two stages with nothing stale are bit-identical to the pipeline
- stale: two stages with stale keys are bit-identical to one, and differ from the pipeline
- ulysses, ring, gather, distrifusion (nothing stale), tensor, cfg, data: two ranks equal the pipeline up to rounding
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

Made by `python -m benchmarks.matrix_page` from `model/assets/matrix.json`, which is made from the families' tables
(`model/`). A test fails if this page is not up to date.
"""
_PIPELINES = """
The anatomy of a family with PipeFusion is derived; a family with caches alone has blocks that are listed.
The pipelines of each family:
"""
_REMARKS = """
Remarks about families:
"""
_MIDDLE = """
What a family has:
"""
_END = """
Any product of the degrees of a row works: data x cfg x (PipeFusion x (ring | gather) | DistriFusion) x Ulysses x
tensor. Gather takes the place of ring, and DistriFusion that of both and of PipeFusion. If a plan does not fit a model
or a size, an error says so before anything runs, with the degrees that fit. `ditile verify` checks a plan on your
machine. A cache goes with every plan of a family whose support level is PipeFusion or names caches, and of a
transformer of your own whose blocks are read from its source or named by a `BlockAdapter` ([caching.md](caching.md)).

In steps with stale keys, guidance that computes a statistic of the whole prediction (`guidance_rescale`, and similar
guiders) uses a prediction of which a part is one step old. A line of the log names this approximation, whether the
value is given or the pipeline's default. Guiders that remember earlier predictions are refused there. With `warmup`
equal to the steps both are exact, as they are with all other axes. Schedulers with `thresholding=True` or
a `noise_sampler_seed` are refused with patches. SD3's skip-layer guidance goes with data and cfg alone. IP-adapters
of FLUX.1 and SD3 that are loaded before `parallelize` go with every plan.
Perturbed-attention guidance goes with data and tensor only. A ControlNet in the loop goes with every plan; in a step
of patches it is computed once, of the latents as they are when the step begins ([pipefusion.md](pipefusion.md)).
Wan-Animate 2 (modular) goes with cfg alone: its blocks attend to keys that a call in front of the loop kept, and not
all calls run the same blocks.
Echo (modular) steps its latents in a loop of its own, without a scheduler, and is refused in one line; its transformer
is that of LTX-2.3, which has the same blocks as LTX-2.5."""


if __name__ == "__main__":
    print(format_page(read_matrix(), read_families()))
