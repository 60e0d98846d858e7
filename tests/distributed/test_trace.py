"""The trace of a real run: complete, well formed, in the order of the schedule, and with the overlap in it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import ditile
from ditile.distributed.trace import TraceEvent, sum_waits_by_step
from ditile.plan.errors import StateError
from ditile.plan.schedule import OpKind, PatchSchedule
from tests import tiny
from tests.pool import Pool

SCHEDULE = PatchSchedule(stages=2, patches=8, steps=5, warmup=1)


def make_runner(plan: str, seconds: float) -> Any:
    """A runner whose second rank is slow."""
    pipe = tiny.pixart()
    if dist.get_rank() == 1:
        pipe.transformer.transformer_blocks[-1].register_forward_pre_hook(lambda *_: time.sleep(seconds))
    return ditile.parallelize(pipe, ditile.Plan.parse(plan), trust_code=True)


def draw(path: str) -> str:
    # What overlaps does so for 0.1 s, however busy the machine is.
    runner = make_runner("pipefusion=2 patches=8 warmup=1", 0.02)
    with pytest.raises(StateError, match="no trace"):
        runner.write_trace(path)
    runner.trace = True
    runner(**tiny.arguments("pixart", num_inference_steps=5))
    runner.write_trace(path)
    dist.barrier()
    return Path(path).read_text()


@pytest.fixture(scope="module")
def slices(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """The slices of each stage, in order of time."""
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    events = json.loads(pool.run(draw, 2, str(path))[0])["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {0: "stage 0", 1: "stage 1"}
    complete = [event for event in events if event["ph"] == "X"]
    return [sorted((e for e in complete if e["tid"] == rank), key=lambda e: e["ts"]) for rank in (0, 1)]


def shown(slices: list[dict[str, Any]], kind: str) -> list[tuple[int, int | None, int]]:
    return [(e["args"]["step"], e["args"]["patch"], e["args"]["branch"]) for e in slices if e["cat"] == kind]


@pytest.mark.parametrize("kind", ["compute", "receive", "take", "step"])
def test_complete(slices: list[list[dict[str, Any]]], kind: str) -> None:
    """Each stage shows each op of its program once and in order. A failure means that the picture of a run lies."""
    for stage, of_stage in enumerate(slices):
        wanted = [op for op in SCHEDULE.iter_program(stage) if op.kind is OpKind(kind)]
        assert shown(of_stage, kind) == [(op.step, op.patch, op.branch) for op in wanted]


def test_steps_overlap(slices: list[list[dict[str, Any]]]) -> None:
    """In at least one of the steps stage 0 is at work on the next one before stage 1 has ended this one.

    A failure means that patches do not follow each other through the stages: correct, and no faster than one rank.
    """

    def computes(stage: int, step: int, patch: int) -> dict[str, Any]:
        wanted = {"step": step, "patch": patch, "branch": 0}
        return next(e for e in slices[stage] if e["cat"] == "compute" and e["args"] == wanted)

    ends = {step: (last := computes(1, step, 7))["ts"] + last["dur"] for step in range(1, 4)}
    assert any(computes(0, step + 1, 0)["ts"] < end for step, end in ends.items())


def test_waits_by_hand() -> None:
    """Two steps, from 1 to 3 and from 3 to 6. What is outside does not count, and nothing counts twice.

    A failure means that the share of exposed communication of every method is wrong.
    """
    waits = [
        TraceEvent("ring", 0, None, 0, 0.0, 1.5),  # half a second of step 0
        TraceEvent("ring", 0, None, 0, 2.5, 4.0),  # half a second of step 0, one of step 1
        TraceEvent("control", 1, None, 0, 3.5, 4.5),  # half of it is ring's already
        TraceEvent("ring", 1, None, 0, 4.0, 4.25),  # all of it is control's already
        TraceEvent("result", 1, None, 0, 5.5, 9.0),
    ]
    assert sum_waits_by_step(waits[::-1], [1.0, 3.0, 6.0]) == {
        "ring": [1.0, 1.0],
        "control": [0.0, 0.5],
        "result": [0.0, 0.5],
    }
    assert sum_waits_by_step(waits, []) == {} == sum_waits_by_step([], [1.0, 3.0])


def test_a_rank_that_waits_for_another_says_for_what(pool: Pool) -> None:
    """Rank 1 is slow, so that rank 0 waits in every kind of exchange. A failure means that a method is not covered."""
    for plan, kind in ((plan, kind) for kind, plans in WAITS.items() for plan in plans):
        fast, _ = pool.run(waiting, 2, plan)
        assert len(fast["step_seconds"]) == 3 and all(len(each) == 3 for each in fast["waited"].values()), plan
        assert sum(fast["waited"][kind]) > 0.02, (plan, fast)  # of 3 x 0.05 s
        assert sum(map(sum, fast["waited"].values())) < sum(fast["step_seconds"])


WAITS = {
    "ulysses": ["ulysses=2", "ulysses=2 async_ulysses=true"], "ring": ["ring=2"], "distrifusion": ["distrifusion=2"],
    "tensor": ["tensor=2", "tensor=2 split_scheme=sequence"], "cfg": ["cfg=2"], "latents": ["pipefusion=2 patches=2"],
}  # fmt: skip


def waiting(plan: str) -> dict[str, Any]:
    runner = make_runner(plan, 0.05)
    runner.trace = True
    runner(**tiny.arguments("pixart", num_inference_steps=3))
    report: dict[str, Any] = runner.report.to_dict()
    return report
