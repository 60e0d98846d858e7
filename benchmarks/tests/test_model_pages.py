"""The page of each model is what the planner and the tables say, and the command line takes its commands."""

from __future__ import annotations

import re
import shlex

import pytest

from benchmarks import model_pages
from benchmarks.page import fill_page_blocks
from ditile.cli.main import build_parser
from ditile.model.known import find_known_model, list_published_models
from ditile.plan.flag_parser import collect_arguments
from ditile.plan.plan import Plan
from ditile.runner.model_files import defaults
from ditile.runner.requests.options import GenerateOptions
from ditile.runner.requests.outputs import RunOptions

PUBLISHED = list_published_models()


def read_page(model: str) -> str:
    return (model_pages.PAGES / f"{model}.md").read_text("utf-8")


def test_each_published_model_has_a_page() -> None:
    """A failure means: add its name to `NAMES`, and run `python -m benchmarks.model_pages`."""
    assert sorted(path.stem for path in model_pages.PAGES.glob("*.md")) == sorted(PUBLISHED)
    assert set(model_pages.NAMES) == set(PUBLISHED)


def test_the_index_has_the_figures_of_the_pages() -> None:
    index = model_pages.INDEX.read_text("utf-8")
    assert fill_page_blocks(index, {"models": model_pages.write_index(PUBLISHED)}) == index


@pytest.mark.parametrize("model", PUBLISHED)
def test_a_page_is_what_the_planner_says(model: str) -> None:
    """A failure means that the planner predicts otherwise now: run `python -m benchmarks.model_pages`."""
    assert model_pages.ModelPage.from_name(model).write_text() == read_page(model)


@pytest.mark.parametrize("model", PUBLISHED)
def test_every_command_of_a_page_is_one_that_the_command_line_takes(model: str) -> None:
    """A failure means that a reader who types it gets an error instead of an image."""
    page = read_page(model)
    commands = re.findall(r"^    ditile (.+)$", page, re.MULTILINE) + re.findall(r"`ditile ([^`]*--[^`]*)`", page)
    assert len(commands) >= 6
    for command in commands:
        arguments = build_parser().parse_args(shlex.split(command))
        if not command.startswith("generate"):
            continue
        options = GenerateOptions(**collect_arguments(GenerateOptions, arguments))
        known = find_known_model(options.model)
        assert known is not None, command
        text = RunOptions(**collect_arguments(RunOptions, arguments)).plan
        plan = Plan() if text is None else Plan.parse(text)
        known.check_call(plan, defaults(options.model) | options.to_call_arguments())


@pytest.mark.parametrize("model", PUBLISHED)
def test_the_plan_of_a_script_is_a_plan(model: str) -> None:
    [fields] = re.findall(r"ditile\.Plan\((.*)\)$", read_page(model), re.MULTILINE)
    assert eval(f"Plan({fields})", {"Plan": Plan}).world >= 1
