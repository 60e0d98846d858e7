"""Calls with recorded steps against the same calls without, bit for bit, on one rank of a plan.

recorded            the same call until it is played
with a callback     a step callback that returns its tensors unchanged, as previews do
a capture fails     on the first rank, by an operation that CUDA does not permit in a capture
after that          recorded steps are forgotten, and recorded again on what the failed capture left
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ditile.distributed import env
from ditile.distributed.transport import gather_json
from ditile.model.recording.first_play import has_same_bits
from ditile.model.recording.recorded_calls import RecordedCalls
from ditile.plan.errors import DitileError, ModelError, PlanError
from ditile.plan.option_classes import CallArguments
from ditile.plan.plan import Plan
from ditile.runner.runner import Runner

PLANS = [
    "pipefusion=2 patches=2",
    "pipefusion=3 patches=3",
    "ulysses=2",
    "ring=2",
    "tensor=2",
    "distrifusion=2",
    "cfg=2",
]
FAILS = "a capture fails"
CASES: dict[str, CallArguments] = {
    "recorded": {},
    "with a callback": {"callback_on_step_end": lambda pipe, step, timestep, tensors: tensors},
    FAILS: {},
    "after that": {},
}


def compare_recorded_calls(
    make_runner: Callable[[bool], Runner], call: Callable[[Runner, CallArguments], Tensor]
) -> list[tuple[str, bool, str]]:
    """Compare calls with recorded steps on this rank with those without; every rank must call it.

    Returns the name of each case, whether it is right on all ranks, and what was found on the worst.

    Args:
        make_runner: (whether steps are recorded) -> a runner; the runner made before may then be gone.
        call: (runner, further arguments) -> the first result of a call, the same each time.
    """
    runner = make_runner(False)
    expected = {name: call(runner, more) for name, more in CASES.items()}
    runner = make_runner(True)
    cases = []
    for name, more in CASES.items():
        fails = name == FAILS and runner.mesh.rank == 0
        runner.forget_recorded_steps()
        with ExitStack() as stack:
            if fails:
                stack.enter_context(FailingCaptures())
            # The form of a last step is watched in the first call, recorded in the second and played in the third.
            answers = [has_same_bits(call(runner, more), expected[name]) for _ in range(3)]
        report: Any = runner.report
        finding = _judge(report.recorded, are_equal=all(answers), fails=fails)
        # Ranks play unlike numbers of calls. `min` takes a rank that failed, if there is one.
        is_right, says = min(gather_json(finding, runner.mesh.everyone))
        cases.append((name, is_right, says))
    return cases


def _judge(recorded: RecordedCalls, *, are_equal: bool, fails: bool) -> tuple[bool, str]:
    """Return whether the calls of a case are right, and what was found.

    Args:
        are_equal: whether their results equal those without recorded steps.
        fails: whether their captures must fail.
    """
    says = ", ".join(recorded.as_code)
    is_expected = recorded.played > 0
    if fails:
        is_expected = says.startswith("a recording failed")
    if recorded.played:
        says = f"played {recorded.played} of {recorded.calls} calls"
    if not are_equal:
        says = f"the result differs: {says}"
    return are_equal and is_expected, says


def compare_plans(
    plan: Plan, num_cards: int, run: Callable[[Plan], list[tuple[str, bool, str]]]
) -> list[tuple[str, bool | None, str]]:
    """Compare the calls of each axis, or of a plan, on ranks that end before the next ones start.

    Returns what `compare_recorded_calls` does, and a line for each plan that cannot run.

    Args:
        plan: one rank without patches stands for all axes.
        num_cards: the number of GPUs in this machine.
        run: makes the comparison on a plan's ranks.
    """
    findings: list[tuple[str, bool | None, str]] = []
    plans = PLANS
    if plan != Plan():
        plans = [str(plan)]
    for text in plans:
        plan = Plan.parse(text)
        try:
            if plan.world > num_cards:
                raise PlanError(f"needs {plan.world} GPUs")
            for name, is_right, says in run(plan):
                findings.append((f"{text}: {name}", is_right, says))
        except (ModelError, PlanError) as error:
            findings.append((text, None, str(error)))
        except DitileError as error:
            findings.append((text, False, str(error)))
    return findings


def count_cards(device: str | None) -> int:
    """Return the number of GPUs; `device` is the one that was asked for.

    Raises:
        PlanError: if they are too few, or the environment forbids to record.
    """
    num_cards = torch.cuda.device_count()
    if num_cards < 2 or device == "cpu":
        raise PlanError(
            f"recorded=True needs 2 GPUs (3 for all), no device=cpu; here: {num_cards}. For one: ditile bench --alone"
        )
    if env.forbids_cuda_graphs():
        raise PlanError("recorded=True records steps, and DITILE_CUDA_GRAPHS=0 forbids it; unset it")
    return num_cards


class FailingCaptures(TorchFunctionMode):
    """Reads a number of a layer's result within a capture, for which the host would have to wait."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is functional.linear and torch.cuda.is_current_stream_capturing():
            result.sum().item()
        return result
