"""(pipeline, plan, mesh) -> everything seated in the pipeline, in order. Nothing else knows two strategies at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ditile import env, models
from ditile.attend import dispatch
from ditile.attend.core import AttentionCore
from ditile.attend.kernel import dispatched, native
from ditile.blocks.loop import Hooks, Loop
from ditile.blocks.pipefusion import PipeFusion
from ditile.blocks.stages import cut
from ditile.errors import ModelError, StateError
from ditile.mesh import Mesh
from ditile.plan import Plan
from ditile.seats import Core, Seats
from ditile.shape import Weights
from ditile.spec import ModelSpec
from ditile.trace import Trace
from ditile.weights.text import After, Encoders


@dataclass(frozen=True, slots=True)
class Composition:
    """What a plan makes of a pipeline on this rank.

    Attributes:
        stages: the blocks of every stage, of which this rank owns one.
        weights: the parameters of the undivided transformer.
        attention: what each attention layer becomes.
    """

    pipe: Any
    plan: Plan
    mesh: Mesh
    device: torch.device
    spec: ModelSpec
    seats: Seats
    stages: list[range]
    weights: Weights
    pipefusion: PipeFusion
    trace: Trace
    encoders: Encoders
    attention: type[AttentionCore] = AttentionCore

    @property
    def owned(self) -> range:
        """The blocks of this rank."""
        return self.stages[self.mesh.stage]

    @contextmanager
    def installed(self, hooks: Hooks) -> Iterator[Loop]:
        """Everything in its place for the length of one call. The scheduler is the one that the pipeline has now."""
        loop = Loop(
            self.pipe.scheduler, self.pipefusion, self.mesh,
            latent_dim=self.spec.latent_dim, patches=self.plan.num_patches, warmup=self.plan.warmup, trace=self.trace,
        )  # fmt: skip
        check = env.checks()

        def core(layer: str, backend: Any, *, joint: bool, through_dispatch: bool) -> Core:
            kernel = dispatched(backend) if through_dispatch else native
            return self.attention(loop.current, layer, kernel, joint=joint, check=check)

        with ExitStack() as stack:
            stack.enter_context(self.encoders.installed(self.pipe.transformer))
            stack.enter_context(self.seats.installed(self.pipefusion, self.owned, loop.current, core, dispatch.BACKEND))
            loop.install(stack, self.pipe, hooks)  # outermost: an error in the loop finds the seats still there
            yield loop


def stages_of(seats: Seats, plan: Plan) -> list[range]:
    """The blocks of every stage.

    Raises:
        PlanError: if the plan does not fit the model.
    """
    plan.check_blocks(type(seats.transformer).__name__, len(seats.chain))
    return cut(seats.costs, plan.pipefusion, plan.stage_blocks)


def compose(
    pipe: Any, plan: Plan, mesh: Mesh, device: torch.device, *, keep_weights: bool, text_after: After = "keep"
) -> Composition:
    """Cuts the pipeline's transformer into stages and keeps this rank's.

    Raises:
        ModelError: if the pipeline cannot be divided.
        PlanError: if the plan does not fit the model.
        StateError: if the pipeline was cut before.
    """
    spec = models.support(pipe)  # says no before anything is touched
    seats = Seats(pipe.transformer, spec)
    if seats.is_cut() and seats.loaded is None:
        raise StateError(f"this {type(pipe).__name__} is cut into stages already; restore() its runner, or reload it")
    reason = seats.refuse(range(len(seats.chain)))
    if reason:
        raise ModelError(reason)
    stages = stages_of(seats, plan)
    encoders = Encoders(
        pipe, plan.text, mesh.image, mesh.control, device, mesh.traffic, keep=keep_weights, after=text_after
    )
    weights = seats.take(stages[mesh.stage], keep=keep_weights)
    encoders.take()  # both before anything is moved: a device never sees the rest
    pipe.to(device)
    dispatch.install()
    trace = Trace()
    pipefusion = PipeFusion(mesh, stages[mesh.stage], plan, spec.joint, trace)
    pipefusion.connect(device)
    return Composition(pipe, plan, mesh, device, spec, seats, stages, weights, pipefusion, trace, encoders)
