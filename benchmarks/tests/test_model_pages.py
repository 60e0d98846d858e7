"""The page of recipes is what the planner says, and what it says to type is what the command takes."""

from __future__ import annotations

import re
import shlex

import pytest

from benchmarks import recipes
from benchmarks.page import fill_page_blocks
from ditile.cli.main import build_parser
from ditile.model.known import find_known_model
from ditile.plan.flag_parser import collect_arguments
from ditile.plan.plan import Plan
from ditile.runner.model_files import defaults
from ditile.runner.requests.options import GenerateOptions
from ditile.runner.requests.outputs import RunOptions

COMMANDS = re.findall(r"`(ditile generate [^`]+)`", recipes.PAGE.read_text("utf-8"))


@pytest.mark.parametrize("recipe", recipes.RECIPES, ids=lambda recipe: recipe.model)
def test_the_page_is_what_the_planner_says(recipe: recipes.Recipe) -> None:
    """A failure means that the planner predicts otherwise now: run `python -m benchmarks.recipes`."""
    page = recipes.PAGE.read_text("utf-8")
    assert fill_page_blocks(page, {recipe.model: recipes.write_recipe_section(recipe)}) == page


def test_every_command_is_one_that_the_command_line_takes() -> None:
    """A failure means that a reader who types it gets an error instead of a picture."""
    assert len(COMMANDS) >= 6 * len(recipes.RECIPES)
    for command in COMMANDS:
        arguments = build_parser().parse_args(shlex.split(command)[1:])
        wanted = GenerateOptions(**collect_arguments(GenerateOptions, arguments))
        known = find_known_model(wanted.model)
        assert known is not None, command
        text = RunOptions(**collect_arguments(RunOptions, arguments)).plan
        plan = Plan() if text is None else Plan.parse(text)
        known.check_call(plan, defaults(wanted.model) | wanted.to_call_arguments())
