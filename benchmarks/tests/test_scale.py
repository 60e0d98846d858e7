"""The page of larger clusters: every group has its best plan, and no group is better than all together."""

from __future__ import annotations

from benchmarks.scale import CLUSTERS, Best, as_markdown, find_best_plans, make_flux_task, make_wan_task
from ditile.plan.plan import Plan


def test_all_together_is_the_best_of_all() -> None:
    """Other ways to run the synchronous steps are among the plans, as in a search. A failure means that a column shows
    plans that another column was not allowed."""
    found = find_best_plans(make_flux_task(), CLUSTERS[0], 8)
    assert set(found) >= {"sequence", "PipeFusion", "all together"}
    assert all(found["all together"].seconds <= 1.01 * one.seconds for one in found.values())
    assert found["PipeFusion"].plan.warmup_mode == "sequence", "blocks are lent faster than 4096 pixels are computed"


def test_every_group_can_divide_the_model_of_videos() -> None:
    """A failure means that the page's command ends in an error instead of tables."""
    task = make_wan_task()
    job = task.subject.make_plan_job(Plan(tensor=8), task.subject.make_call_shape(task.call, 2))
    assert sum(task.subject.sharded_parameters) > 0.9 * sum(job.weights.blocks)
    plan = find_best_plans(task, CLUSTERS[1], 8)["tensor"].plan
    assert plan.tensor * plan.cfg == 8


def test_seconds_have_three_digits_and_no_exponent() -> None:
    plan = Plan(tensor=8)
    groups = {"tensor": Best(plan, 1404.2, 1), "sequence": Best(plan, 17.96, 1), "all together": Best(plan, 3.951, 1)}
    row = list(as_markdown(make_wan_task(), CLUSTERS[0], {8: groups}))[3]
    assert row.startswith("| 8 | 1400 s | 18 s |  |  | 3.95 s |")
