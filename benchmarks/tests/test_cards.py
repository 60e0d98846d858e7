"""The page of cards at home is what the planner says."""

from __future__ import annotations

import re

import pytest

from benchmarks import cards
from benchmarks.page import fill_page_blocks
from ditile.plan.plan import Plan

PAGE = cards.PAGE.read_text("utf-8")


@pytest.mark.parametrize("model", cards.MODELS)
def test_the_rows_are_what_the_planner_says(model: str) -> None:
    """A failure means that the planner predicts otherwise now: run `python -m benchmarks.cards`."""
    assert fill_page_blocks(PAGE, {model: cards.write_model_rows(model)}) == PAGE


def test_every_plan_of_the_page_is_one() -> None:
    plans = re.findall(r"\| `([^`|]+)` \|$", PAGE, re.MULTILINE)
    assert len(plans) > 2 * len(cards.MODELS) and all(Plan.parse(plan) for plan in plans if plan != str(Plan()))
