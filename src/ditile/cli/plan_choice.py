"""Which plan a command runs: what is given, what is predicted to be fastest, or what a budget allows of an evaluation.

Nothing here imports torch before there is something to ask.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ditile.distributed import env
from ditile.plan.errors import PlanError
from ditile.plan.plan import AUTO, Plan
from ditile.planner.budget import Budget, choose, describe_setting, load_evaluation
from ditile.planner.question import PlanQuestion
from ditile.runner.requests.cache_options import CacheOptions
from ditile.runner.requests.command_options import RunOptions
from ditile.runner.requests.console import make_console
from ditile.runner.requests.options import GenerateOptions


def resolve_plan_option(text: str, wanted: GenerateOptions, run: RunOptions, given: Plan) -> Plan:
    """The plan of `--plan`; for `auto` the first plan of `ditile plan`, which is printed.

    Raises:
        DitileError: if flags say a plan too, or this machine was not measured.
    """
    if given != Plan():
        raise PlanError(f"plan={text!r} is a whole plan, and flags say '{given}' too; leave one of them out")
    if not text.strip():
        raise PlanError(f"plan={text!r} says nothing; write name=value, such as pipefusion=2, or auto")
    if text != AUTO:
        return Plan.parse(text)
    from ditile.planner.answer import answer_question

    size = ("model", "height", "width", "frames", "steps", "num_images", "image")
    request_options = {name: getattr(wanted, name) for name in (*size, "guidance", "true_cfg", "negative_prompt")}

    def find_fastest_plan(hosts: int) -> str:
        place = env.read_torchrun_place()
        ask = PlanQuestion(devices=None if place is None else place.world, hosts=hosts, **request_options)
        plan_answer = answer_question(ask, all_devices=place is not None)
        make_console(stderr=run.json == "-").print(plan_answer.describe_choice(), soft_wrap=True)
        return str(plan_answer.result.prices[0].plan)

    return Plan.parse(_decide_on_first_rank(find_fastest_plan, run))


def _decide_on_first_rank(decide: Callable[[int], Any], run: RunOptions) -> Any:
    """The result of `decide` (number of hosts), which reads files: under torchrun rank 0 decides for all ranks."""
    if env.read_torchrun_place() is None:
        return decide(1)
    from ditile.distributed.torchrun import decide_on_first_rank

    return decide_on_first_rank(decide, run.stall_timeout)


def choose_within_budget(
    budget: Budget, wanted: GenerateOptions, run: RunOptions, plan: Plan, cache: CacheOptions
) -> tuple[Plan, CacheOptions]:
    """The plan and cache that a budget chooses, which are printed.

    Raises:
        DitileError: if there is no evaluation, no setting is within the budget, or a plan or cache is given too.
    """
    if plan != Plan() or cache.build_cache_arguments()["cache_config"] is not None:
        given = f"plan '{plan}'" if plan != Plan() else "cache"
        raise PlanError(f"a budget picks plan and cache, and a {given} is given too; leave one of them out")

    def choose_setting(hosts: int) -> tuple[str, str]:
        evaluation, place = load_evaluation(wanted.model, budget.evaluation), env.read_torchrun_place()
        rows = [row for row in evaluation["settings"] if place is None or row["world"] == place.world]
        ranks = place.world if place is not None else budget.world or _count_devices()
        row = choose(rows, min_psnr=budget.min_psnr, max_latency=budget.max_latency, world=ranks)
        where = evaluation.get("measured", {}).get("machine", "another machine")
        make_console(stderr=run.json == "-").print(
            f"picked: {describe_setting(row)}, as evaluated on {where}", soft_wrap=True
        )
        return row["plan"], row["cache"]

    plan_text, cache_text = _decide_on_first_rank(choose_setting, run)
    others = {name: getattr(cache, name) for name in cache.given}
    return Plan.parse(plan_text), CacheOptions(**others | {"cache_line": cache_text})


def _count_devices() -> int:
    """The number of GPUs, or of cores if there is no GPU."""
    import torch

    return torch.cuda.device_count() or os.cpu_count() or 1
