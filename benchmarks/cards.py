"""Makes the table of docs/cards.md: what the planner predicts for pairs of consumer cards, and what decides there.

    python -m benchmarks.cards                       # about a minute
    python -m benchmarks.cards --only flux.1-dev     # some models; the rows of others stay

The page's own words stay; the rows of a model have their place between `<!-- MODEL -->` and `<!-- end of MODEL -->`.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.model_pages import describe_planned_call
from benchmarks.page import DOCS, fill_page_blocks
from ditile.distributed import files
from ditile.plan.errors import PlanError
from ditile.plan.numbers import format_number
from ditile.plan.plan import Plan
from ditile.planner.hardware import load_profile
from ditile.planner.memory import count_host_memory, count_rank_memory
from ditile.planner.question import PlanQuestion
from ditile.planner.search import PlanSearch, SearchRequest, SearchResult
from ditile.planner.subject import PlanSubject
from ditile.runner.model_files import find_model_source

PAGE = DOCS / "cards.md"
MACHINES = {
    "rtx-3090,rtx-3090": "2 x RTX 3090",
    "rtx-4090,rtx-4090": "2 x RTX 4090",
    "rtx-5090,rtx-5090": "2 x RTX 5090",
    "rtx-5090,rtx-4090": "RTX 5090 + 4090",
    "rtx-4090,rtx-3060": "RTX 4090 + 3060",
}
"""Hardware, as `ditile plan` takes it -> what the page calls it."""
MODELS = {
    "flux.1-dev": "FLUX.1 [dev]",
    "flux.2-klein-4b": "FLUX.2 [klein] 4B",
    "flux.2-klein-9b": "FLUX.2 [klein] 9B",
    "qwen-image": "Qwen-Image",
    "z-image-turbo": "Z-Image Turbo",
    "wan2.2-ti2v-5b": "Wan 2.2 5B",
    "wan2.2-t2v-14b": "Wan 2.2 14B",
}
"""Models, as `--model` takes them -> how people call them."""
LARGE = 0.1
"""A part of a loop that is named, from this share on."""


def write_model_rows(model: str) -> str:
    """The call, and a table with a row for each machine."""
    call = PlanQuestion(model=model).fill_call_arguments()
    subject = PlanSubject.from_configs(model, find_model_source(model, weights=False))
    header = [
        "| cards | seconds | equal shares | memory of each | what decides | plan |",
        "|:--|--:|--:|--:|:--|:--|",
    ]
    return "\n".join(["", describe_planned_call(subject, call), "", *header, *_iterate_rows(subject, call), ""])


def _iterate_rows(subject: PlanSubject, call: dict[str, Any]) -> Iterator[str]:
    for hardware, name in MACHINES.items():
        profile = load_profile(hardware)
        request = SearchRequest(devices=profile.devices, records=True)
        search = PlanSearch(subject, call, profile, request)
        try:
            result = search.find_fastest_plans()
        except PlanError as error:
            yield f"| {name} | | | | memory: {str(error).partition(';')[0]} | |"
            continue
        best = result.prices[0]
        beside = price_equal_shares(best.plan, search)
        job = subject.make_plan_job(best.plan, search.shape)
        peaks = []
        for rank in range(best.plan.world):
            memory = count_rank_memory(
                subject, job, profile, rank, subject.count_text_tokens(call), records=best.is_recorded
            )
            peaks.append(f"{memory.peak_bytes / 1e9:.0f}")
        why = name_limit(result, subject, search)
        yield f"| {name} | {format_number(best.call_s)} | {beside} | {', '.join(peaks)} GB | {why} | `{best.plan}` |"


def price_equal_shares(plan: Plan, search: PlanSearch) -> str:
    """The seconds of a plan with equal shares; nothing where its own are equal."""
    names = ("stage_blocks", "stage_weights", "token_weights", "tensor_weights", "rank_weights")
    equal = dataclasses.replace(plan, **dict.fromkeys(names))
    if equal == plan:
        return ""
    try:
        [price] = search.price_plan(equal).prices
    except PlanError:
        return "does not fit"
    return format_number(price.call_s)


def name_limit(result: SearchResult, subject: PlanSubject, search: PlanSearch) -> str:
    """What a faster machine would need more of."""
    best = result.prices[0]
    if best.plan.offload == "blocks":
        host = count_host_memory(subject, subject.make_plan_job(best.plan, search.shape))
        return f"memory: {host.kept / 1e9:.0f} GB of weights wait in the host's"
    if best.exposed_s > LARGE * best.latency_s:
        return f"link: {best.exposed_s / best.latency_s:.0%} of the loop"
    if best.bubble_s > LARGE * best.latency_s:
        return f"the cards, and {best.bubble_s / best.latency_s:.0%} of the loop that fills the pipeline"
    return "the cards"


def main() -> None:
    """Writes the rows of the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--only", metavar="MODELS", help="with , between them")
    asked = parser.parse_args()
    models = list(MODELS) if asked.only is None else asked.only.split(",")
    blocks = {model: write_model_rows(model) for model in models}
    files.write_atomically(asked.page, fill_page_blocks(asked.page.read_text("utf-8"), blocks))


if __name__ == "__main__":
    main()
