"""warmup=auto: at its limits it is a fixed warmup bit for bit; every rank sees a jump in mid-run at the same step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ditile.distributed.mesh import Mesh
from ditile.model.hooks.generation import Generation
from ditile.model.hooks.kv_store import NOT_FINITE, ChangeCopy, ChangeKey, RelativeChange, find_largest_change
from ditile.parallel.pipefusion.step_agreement import AdaptiveWarmup, should_resynchronise
from ditile.plan.plan import Plan
from ditile.plan.schedule import PatchSchedule
from ditile.runner.load import load
from ditile.runner.model_files import defaults
from ditile.runner.runner import parallelize
from tests.parallel.sequence.test_tokens import close
from tests.pool import Pool
from tests.runner.cases import MAKE, divided, run, same

STEPS = 6
NEVER, ALWAYS = 1e9, 1e-9  # as bounds: no change is as large, every change is


def chosen(name: str, plans: list[dict[str, Any]]) -> list[tuple[Any, list[int]]]:
    """On a rank: the picture under each plan, and the steps that were synchronous; first without a plan."""
    pipe = MAKE[name]()
    results = [(run(pipe, name, num_inference_steps=STEPS), list(range(STEPS)))]
    for plan in plans:
        with divided(pipe, **plan) as runner:
            picture = run(runner, name, num_inference_steps=STEPS)
            assert runner.report is not None
            results.append((picture, runner.report.synchronous))
    return results


AUTO: dict[str, Any] = {"patches": 3, "warmup": "auto"}


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", ["flux true cfg", "sd3.5 medium"])
def test_limits(pool: Pool, name: str, ranks: int) -> None:
    """Every change too large: the plain picture. None: that of three synchronous steps.

    A failure in the first means that the messages of a step depend on its mode; in the second, that measuring changes
    what is measured.
    """
    plans = [AUTO | {"warmup_bound": ALWAYS}, AUTO | {"warmup_bound": NEVER}, {"patches": 3, "warmup": 3}]
    for answer in pool.run(chosen, ranks, name, [{"pipefusion": ranks} | plan for plan in plans]):
        plain, always, never, three = answer
        same(always[0], plain[0])
        same(never[0], three[0])
        assert [steps for _, steps in answer] == [list(range(STEPS))] * 2 + [[0, 1, 2]] * 2


def test_with_other_axes(pool: Pool) -> None:
    """Pieces of rows in synchronous steps, shared tokens, DistriFusion: the same picture and the same choice."""
    name, always = "sd3.5 medium", AUTO | {"warmup_bound": ALWAYS}
    also = [
        {"pipefusion": 4, "warmup_mode": "pipelined"}, {"pipefusion": 2, "ulysses": 2}, {"pipefusion": 2, "ring": 2},
        {"distrifusion": 4, "patches": None},
    ]  # fmt: skip
    for answer in pool.run(chosen, 4, name, [always | plan for plan in also]):
        for (picture, steps), plan in zip(answer, [{}, *also], strict=True):
            close(picture, answer[0][0], plan)
            assert steps == list(range(STEPS)), plan


def jumped(jump: int, plan: dict[str, Any]) -> tuple[list[int], Any]:
    """On a rank: a bundled model whose prompt is another one after step `jump`."""
    pipe: Any = load("shapes-flux")
    pipe.set_progress_bar_config(disable=True)
    other, _, _ = pipe.encode_prompt("a large blue square left of a small green ring", None, max_sequence_length=32)

    def swap(pipe: Any, step: int, timestep: Any, given: dict[str, Any]) -> dict[str, Any]:
        return {"prompt_embeds": other} if step == jump else {}

    runner = parallelize(pipe, Plan(warmup="auto", **plan))
    call = defaults("shapes-flux") | {
        "height": 64,
        "width": 64,
        "num_inference_steps": 14,
        "output_type": "latent",
    }
    call |= {"callback_on_step_end": swap, "callback_on_step_end_tensor_inputs": ["prompt_embeds"]}
    picture = runner("a small red circle", generator=torch.Generator().manual_seed(1), **call).images
    assert runner.report is not None
    return runner.report.synchronous, picture


@pytest.mark.parametrize("plan", [{"pipefusion": 2, "patches": 4}, {"pipefusion": 2, "warmup_mode": "pipelined"}])
def test_a_jump_resynchronises_every_rank_at_the_same_step(pool: Pool, plan: dict[str, Any]) -> None:
    """The step behind the callback changes keys, and the second behind that one is synchronous. None is without it.

    A failure means that a rank runs another mode than its peers and would hang, or that a jump is not noticed.
    """
    still, after_six = (pool.run(jumped, 2, jump, plan) for jump in (99, 6))
    assert [steps for steps, _ in still] == [[0, 1, 2]] * 2
    assert [steps for steps, _ in after_six] == [[0, 1, 2, 9]] * 2
    assert torch.equal(after_six[0][1], after_six[1][1])


def test_the_rule() -> None:
    """By hand, for a bound of 0.6. A failure means that a jump is missed, or that calm steps are synchronous."""
    assert should_resynchronise([], 0.6)
    assert should_resynchronise([0.7], 0.6) and not should_resynchronise([0.5], 0.6)
    assert not should_resynchronise([0.5, 0.1, 0.1, 0.1, 0.24], 0.6)
    assert should_resynchronise([0.5, 0.1, 0.1, 0.1, 0.26], 0.6)
    assert not should_resynchronise([0.03, 0.01, 0.1], 0.6), "small changes may rise"
    entered = [0.17, 0.24, 0.06, 0.08, 0.19, 0.23]  # stale from the third on: shapes-pixart, distrifusion=8
    assert not any(should_resynchronise(entered[:n], 0.6) for n in range(1, len(entered) + 1))


def test_the_row_that_changes_most_counts() -> None:
    """Two rows of two branches; a second rank that saw one of them change. What is no number is a large one."""
    rows = [ChangeKey("keys", 0, branch, row) for branch in (0, 1) for row in (0, 1)]
    relative_change = RelativeChange(Mesh(0, 1))
    stale = torch.ones(2, 3, 1, 1)
    relative_change.record_change(("keys", 0, 0), stale * torch.tensor([1.0, 2.0]).view(2, 1, 1, 1), stale)
    relative_change.record_change(("keys", 1, 1), torch.full((1, 3, 1, 1), torch.nan), stale[:1])
    numbers = relative_change.start_change_copy(rows).wait_for_changes()
    assert numbers == [0, 1, 500_000, 1, 0, 0, NOT_FINITE, 1]
    assert find_largest_change(numbers[:6]) == 0.5
    assert find_largest_change(numbers) == 1000
    assert relative_change.start_change_copy(rows).wait_for_changes() == [0] * 8, "a step begins with nothing"


class Late(ChangeCopy):
    """Changes that are still on a GPU."""

    has_arrived = False

    def __init__(self) -> None:
        self.waited = False

    def wait_for_changes(self) -> list[int]:
        self.waited = True
        return [250_000, 1]


class LateDrift(RelativeChange):
    def start_change_copy(self, rows: Any) -> ChangeCopy:
        return Late()


def test_a_late_number_is_waited_for_when_the_device_has_work() -> None:
    """Not as a step begins, but once its first micro-step is under way; and each vote is cast once."""
    warmup = AdaptiveWarmup(Mesh(0, 1), LateDrift(Mesh(0, 1)), 0.6)
    generation = Generation(PatchSchedule(1, 2, 9, 3))
    for step in range(4):
        warmup.decide_synchronous_step(step)
        late = warmup._changes
        assert late is None or (isinstance(late, Late) and not late.waited)
        warmup.start_change_sum()
        warmup.start_change_sum()
        assert late is None or (isinstance(late, Late) and late.waited)
        warmup.record_step_changes(generation, 1)
    assert warmup._largest_changes == [0.25] and len(warmup._change_sums) == 4
