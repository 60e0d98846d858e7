"""What a report says of recorded calls, and its line in the summary of a command."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

import ditile
from ditile.cli.outcome import list_outcome_lines, sum_reports, summarize_outcome
from ditile.model.recording.recorded_calls import format_recorded_calls
from ditile.plan.plan import Plan
from tests.model.test_recorded_steps import add_hook, generate
from tests.recorded_calls import record_on_cpu
from tests.zoo import ZOO

pytestmark = pytest.mark.filterwarnings("ignore")


def generate_reports(change: Any = None, plan: Plan | None = None) -> list[Any]:
    """The reports of two images of five steps."""
    with record_on_cpu():
        pipe = ZOO["flux"].make()
        if change is not None:
            change(pipe)
        runner = ditile.parallelize(pipe, plan or Plan(), cuda_graphs=True)
    reports = []
    for seed in range(2):
        generate(runner, "flux", seed)
        reports.append(runner.report)
    return reports


def test_every_call_is_accounted_for() -> None:
    first, second = generate_reports()
    # Two branches of guidance.
    assert (first.recorded.calls, first.recorded.recorded, first.recorded.played) == (10, 2, 4)
    assert first.recorded.as_code == {"the first step": 2, "the first call of its form": 2}
    assert (second.recorded.calls, second.recorded.recorded, second.recorded.played) == (10, 0, 10)
    assert second.recorded.as_code == {}
    assert second.recorded.tape_bytes > 1000
    assert json.loads(json.dumps(second.to_dict()))["recorded"] == asdict(second.recorded)
    reports = [[first.to_dict()], [second.to_dict()]]
    (total,) = sum_reports(reports)
    outcome = summarize_outcome(plan="", model="flux", seed=0, images=["a.png"], reports=[total])
    (line,) = [line for line in list_outcome_lines(outcome) if line.startswith("recorded steps")]
    assert line == "recorded steps 14 of 20 calls played; 2 ran as code: the first step"
    assert len(line) <= 80
    assert outcome["recorded"][0]["calls"] == 20


def test_the_reason_is_told() -> None:
    report = generate_reports(add_hook)[1]
    assert report.recorded.as_code == {"code of the user is on the model": 10}
    line = format_recorded_calls([asdict(report.recorded)])
    assert line == "0 of 10 calls played; 10 ran as code: code of the user is on the model"


def test_a_call_that_makes_the_first_keys_is_not_recorded() -> None:
    """A failure means that later images capture it, and drop the tape."""
    first, second = generate_reports(plan=Plan(patches=2, warmup=2))
    assert first.recorded.recorded
    assert second.recorded.recorded == 0
    assert second.recorded.as_code == {"the first step": 2, "it makes its first keys": 2}


def test_a_rank_without_an_image_does_not_count() -> None:
    ranks = [{"calls": 0, "played": 0, "as_code": {}}, {"calls": 10, "played": 9, "as_code": {"the first step": 1}}]
    assert format_recorded_calls(ranks) == "9 of 10 calls played; 1 ran as code: the first step"
    assert format_recorded_calls(ranks[:1]) == "0 of 0 calls played"


def test_without_a_recorder_nothing_is_told() -> None:
    runner = ditile.parallelize(ZOO["flux"].make(), Plan())
    generate(runner, "flux")
    assert runner.report is not None
    assert runner.report.recorded is None
    outcome = summarize_outcome(plan="", model="flux", seed=0, images=["a.png"], reports=[runner.report.to_dict()])
    assert "recorded" not in outcome
    assert not [line for line in list_outcome_lines(outcome) if "recorded" in line]
