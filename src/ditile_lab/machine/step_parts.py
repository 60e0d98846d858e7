"""The predicted step of a plan, from the measured seconds of its ranks and the prices of messages between them.

Each stage takes as long as one of its ranks took alone. Links and waiting are computed: exchanges within a call by the
prices of `ops`, messages between stages and the gaps between them by the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ditile.plan.cost import MicroStepShare, PlannedCall
from ditile.plan.schedule import Op, OpKind
from ditile.planner.ops import CacheSkips, MachineWork, OpPricer
from ditile.planner.price import find_step_ends, simulate_steps
from ditile.planner.seconds import DeviceLoad


class StepParts(NamedTuple):
    """Seconds of a step of a plan.

    Attributes:
        step_s: until the step is done on all ranks.
        link_s: the part that messages add to it.
        waiting_s: the part in which the slowest rank waits for others even if messages take no time.
    """

    step_s: float
    link_s: float
    waiting_s: float


class MeasuredOpPricer(OpPricer):
    """Seconds of ops with measured computation.

    Args:
        basis: the model and the machine, whose links count.
        stage_loads: the device's and the host's seconds of a step, for each stage.
    """

    def __init__(self, basis: MachineWork, job: PlannedCall, stage_loads: Sequence[DeviceLoad]) -> None:
        super().__init__(basis, job, CacheSkips())
        self._stage_loads = stage_loads

    @property
    def first_alike_stages(self) -> list[int]:
        """Return every stage, because each has its own seconds."""
        return list(range(self.job.plan.pipefusion))

    @property
    def iteration_seconds(self) -> float:
        """Return 0: the measured seconds include them."""
        return 0.0

    def compute_stage_load(self, share: MicroStepShare, op: Op) -> DeviceLoad:
        """Return an even share of the measured step for each of its calls."""
        calls = self.job.count_calls_in_step(op.step)
        stage = share.rank.stage
        ops = self.schedule.iter_step_ops(stage, op.step, calls)
        num_computed = sum(step_op.kind is OpKind.COMPUTE for step_op in ops)
        return DeviceLoad(0.0, 0.0).combine_loads(self._stage_loads[stage], 1 / num_computed)


def compute_step_parts(basis: MachineWork, job: PlannedCall, stage_loads: Sequence[DeviceLoad]) -> StepParts:
    """Compute the parts of a step from the measured seconds of its stages."""
    ops = MeasuredOpPricer(basis, job, stage_loads)
    step = predict_step_seconds(ops, free=False)
    without_links = predict_step_seconds(ops, free=True)
    slowest = max(load.get_busy_seconds(basis.profile) for load in stage_loads)
    return StepParts(step, step - without_links, max(0.0, without_links - slowest))


def predict_step_seconds(ops: OpPricer, *, free: bool) -> float:
    """Predict the seconds of a step after the synchronous ones, in a full pipeline. With `free`, messages take no
    time."""
    shown, spans = simulate_steps(ops, free=free)
    ends = find_step_ends(spans, shown)
    if shown == 1:
        return ends[-1]
    return ends[-1] - ends[-2]


def find_busiest_stage(basis: MachineWork, job: PlannedCall) -> int:
    """Return the stage with the most computation in a step, by the prices of the planner."""
    ops = OpPricer(basis, job, CacheSkips())
    step = job.shape.steps - 1
    seconds = []
    for stage in range(job.plan.pipefusion):
        step_ops = ops.schedule.iter_step_ops(stage, step, job.count_calls_in_step(step))
        seconds.append(sum(ops.get_op_seconds(stage, op, free=True) for op in step_ops))
    return seconds.index(max(seconds))
