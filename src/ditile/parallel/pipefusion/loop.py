"""The Loop seam: the unmodified pipeline drives, one iteration of its loop being one micro-step (step, patch).

`scheduler.set_timesteps` gives timesteps that know their steps: iterating them yields each synchronous step once and
each asynchronous one M times. `scheduler.step` steps the current patch alone. Whatever the pipeline does in between
(guidance, casts, concatenation) happens in its own code on full-size tensors.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ditile.distributed.mesh import Mesh
from ditile.distributed.trace import Trace
from ditile.distributed.transport import Ballot, broadcast
from ditile.errors import StateError
from ditile.hooks.drift import Drift
from ditile.hooks.generation import Generation
from ditile.hooks.kv_store import Memory
from ditile.hooks.overrides import Watched, override
from ditile.hooks.protocols import Batch
from ditile.parallel.pipefusion.adaptive_warmup import Votes
from ditile.parallel.pipefusion.executor import PipeFusion
from ditile.parallel.pipefusion.patch_schedulers import PatchSchedulers, first, roles, with_latents
from ditile.parallel.pipefusion.timesteps import StepTimesteps
from ditile.plan.layout import Split
from ditile.plan.plan import Plan
from ditile.plan.schedule import Kind, Micro, Schedule

OVERRIDES = ("set_timesteps", "step", "scale_model_input")


@dataclass(slots=True)
class Hooks:
    """What the runner wants to know, or to have, at the ends of steps.

    Attributes:
        begun: called with the number of steps when the loop begins.
        ended: called with (step, timestep, latents) at the end of each step; latents are whole only where wanted.
        wants_latents: which steps need the whole latents on every rank.
        progress: called at each micro-step, to show that this rank is alive.
    """

    begun: Callable[[int], None]
    ended: Callable[[int, Any, Tensor], None]
    wants_latents: Callable[[int], bool]
    progress: Callable[[], None]


class Loop:
    """Drives one scheduler in micro-steps.

    Args:
        scheduler: the pipeline's own.
        pipefusion: this rank's stage.
        mesh: for the votes and the final broadcast.
        plan: patches and warmup.
        split: how ranks share out the tokens.
        batch: which images and calls are this rank's.
        latent_dim: the dimension of the latents that patches cut.
        trace: records each op.

    Attributes:
        when_over: called after the last step.
    """

    def __init__(
        self, scheduler: Any, pipefusion: PipeFusion, mesh: Mesh, plan: Plan, split: Split, batch: Batch, *,
        latent_dim: int, trace: Trace,
    ) -> None:  # fmt: skip
        self._scheduler, self._pipefusion, self._mesh, self._trace = scheduler, pipefusion, mesh, trace
        self._plan, self._split, self._batch, self._dim = plan, split, batch, latent_dim
        self._voters = mesh.everyone if mesh["data"].size > 1 else mesh.control  # replicas meet at the end
        self.when_over: list[Callable[[], None]] = []
        self._generation: Generation | None = None
        self._latents: Tensor | None = None
        self._copies: PatchSchedulers | None = None
        self._votes: Votes | None = None
        self._drift: Drift | None = None

    def install(self, stack: ExitStack, pipe: Any, hooks: Hooks) -> None:
        """Overrides the scheduler of a pipeline until the stack is closed."""
        self._pipe, self._hooks = pipe, hooks
        self._call = inspect.signature(self._scheduler.step)
        self._roles = roles(self._call)
        mine: dict[str, Callable[..., Any]] = {
            "set_timesteps": self._set_timesteps,
            "step": self._step,
            "scale_model_input": self._scale,
        }
        for name in OVERRIDES:
            stock = getattr(self._scheduler, name, None)
            if stock is not None:
                override(stack, self._scheduler, name, Watched(mine[name], stock))
        stack.callback(self.drop)

    def current(self) -> Generation:
        """The generation under way.

        Raises:
            StateError: if the pipeline's loop is not running.
        """
        if self._generation is None:
            raise StateError(
                "the transformer was called outside the pipeline's loop over scheduler.timesteps; "
                "call the runner, or restore() it to use the transformer by itself"
            )
        return self._generation

    @property
    def step_just_ended(self) -> int | None:
        """The step whose last micro-step was just done; None within a step."""
        micro = self.current().micro
        return micro.step if self._schedule.closes(micro) else None

    @property
    def steps(self) -> int:
        """The steps of the generation under way."""
        return self._schedule.steps

    @property
    def images(self) -> int | None:
        """Images of this replica; None before the first step ended."""
        return None if self._latents is None else int(self._batch.own(self._latents).shape[0])

    @property
    def synchronous_steps(self) -> list[int]:
        """The steps of the last generation that were synchronous."""
        return [step for step in range(self._schedule.steps) if self._schedule.synchronous(step)]

    def forget_constants(self) -> None:
        """A callback may have changed what was constant."""
        self.current().memory.forget_constants()

    def drop(self) -> None:
        """Forgets the generation. One that ended by an error leaves its messages behind."""
        if self._generation is not None:
            self._pipefusion.end(clean=False)
        self._generation = self._latents = self._copies = self._votes = self._drift = None
        timesteps = vars(self._scheduler).get("timesteps")
        if isinstance(timesteps, StepTimesteps):
            self._scheduler.timesteps = timesteps.plain()

    def _set_timesteps(self, stock: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self.drop()
        stock(*args, **kwargs)
        self._plain = self._scheduler.timesteps
        self._scheduler.timesteps = StepTimesteps.of(self._plain, self.drive)

    # One iteration of the pipeline's loop

    def drive(self, timesteps: tuple[Tensor, ...]) -> Iterator[Tensor]:
        """Yields the timestep of each micro-step, and does between them what the schedule says.

        A pipeline that asks for the second one without having called the model only looks through them.
        """
        schedule = Schedule.of(self._plan if not self._batch.idle else Plan(), len(timesteps))
        self._batch.begin()
        self._drift = Drift(self._mesh["cfg"].index) if schedule.adaptive else None
        generation = Generation(
            schedule.ages, schedule.keeps_keys, schedule.is_stale, self._split, self._mesh.sequence.index,
            self._batch.branches, Memory(self._drift),
        )  # fmt: skip
        crew = self._pipefusion.crew
        if crew is not None:
            generation.crew, generation.crew_index = Split(crew.size), crew.stage if crew.is_member else 0
        self._schedule, self._generation, self._timesteps = schedule, generation, timesteps
        self._latents = self._copies = None
        self._ballots: list[Ballot] = []
        self._votes = None if self._drift is None else Votes(self._mesh, self._drift, self._plan.warmup_bound)
        self._stop_wanted = False
        self._synced = -1  # the last step after which every rank had the whole latents
        self._pipefusion.begin(schedule, generation)
        self._hooks.begun(len(timesteps))
        step = 0
        while step < self._schedule.steps:
            self._begin_step(step)
            for micro in self._schedule.micros(step):
                yield from self._micro(micro, timesteps[step])
                if not self._stepped:
                    self._finish(stopped=False)
                    yield from timesteps[1:]
                    return
                if self._votes is not None:
                    self._votes.cast()
            generation.memory.end_step()
            if self._votes is not None and self._latents is not None:
                self._votes.end_step(generation, self._latents.shape[0])
            step += 1
        self._finish(stopped=step < len(timesteps))

    def _begin_step(self, step: int) -> None:
        """Votes on stopping; the vote of the step before says whether the next step runs.

        With warmup=auto the ranks of an image vote on changes too: that of the step before says whether this step is
        synchronous.
        """
        assert self._generation is not None
        self._ballots.append(Ballot(self._voters, int(self._stop_wanted), self._mesh.traffic))
        if self._voters is not None:
            self._mesh.traffic.count("control", 8)
        if step > 0 and self._ballots[step - 1].result() and step + 1 < self._schedule.steps:
            self._schedule = replace(self._schedule, steps=step + 1)
            self._generation.keeps_keys = self._schedule.keeps_keys
        if self._votes is not None and self._votes.begin_step(step) and step >= self._schedule.warmup:
            self._schedule = replace(self._schedule, again=self._schedule.again | {step})
            self._generation.is_stale = self._schedule.is_stale
        self._pipefusion.clear_step(step, self._schedule)

    def _micro(self, micro: Micro, timestep: Tensor) -> Iterator[Tensor]:
        """One micro-step: yields until the pipeline has stepped the scheduler."""
        assert self._generation is not None
        self._generation.micro = micro
        self._hooks.progress()
        self._before(micro)
        self._stepped = False
        while not self._stepped:
            yield timestep
            wanted = self._note_interrupt()
            if not self._stepped and not wanted:
                if micro == next(iter(self._schedule.micros(0))) and not self._generation.branch:
                    return
                raise StateError(f"{type(self._pipe).__name__} went on without stepping its scheduler at {micro}")

    def _before(self, micro: Micro) -> None:
        """What goes between stages before the model is called: the latents of the step before."""
        ops = list(self._schedule.before(self._pipefusion.stage, micro))
        if not ops:
            return
        assert self._latents is not None
        own, write, crew = self._batch.own(self._latents), self._synced != micro.step - 1, self._pipefusion.crew
        takes = [op for op in ops if op.kind is Kind.TAKE]
        if takes:
            self._pipefusion.take(own, self._dim, takes, write=write)
        for op in ops:
            if op.kind is Kind.SHARE and crew is not None:
                crew.share(own, op)
            elif op.kind is Kind.ADOPT and crew is not None:
                whole = crew.adopt(own)
                if write:
                    own.copy_(whole)

    def _note_interrupt(self) -> bool:
        """Holds back `pipe._interrupt` until all ranks agree on the step."""
        if not getattr(self._pipe, "_interrupt", False):
            return False
        self._pipe._interrupt = False
        self._stop_wanted = True
        return True

    def _finish(self, *, stopped: bool) -> None:
        for ballot in self._ballots:
            ballot.result()
        if self._votes is not None:
            self._votes.close()
        if stopped:
            self._pipe._interrupt = True
        self._pipefusion.end(clean=True)
        self._generation = None
        for done in self.when_over:
            done()
        self._batch.end()

    # The scheduler

    def _scale(self, stock: Callable[..., Tensor], sample: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        timestep = args[0] if args else kwargs.get("timestep")
        patches = self._schedule.patches_of(self.current().micro) if self._steps_patches else range(1)
        return self._patch_schedulers().scale(sample, timestep, patches, read=self._pipefusion.reads_latents)

    def _step(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = dict(self._call.bind(*args, **kwargs).arguments)
        call |= call.pop("kwargs", {})
        model_output, timestep, sample = (call.pop(name) for name in self._roles)
        now = self.current()
        self._batch.check(model_output, sample)
        self._adopt(sample)
        if self._steps_patches:
            result = self._step_patches(model_output, timestep, call)
        else:
            result = self._shadow(model_output, timestep, call)
        assert self._latents is not None
        last = now.micro.step == self._schedule.steps - 1
        if self._schedule.closes(now.micro):
            self._end_step(now.micro.step, timestep)
        now.end_micro()
        self._stepped = True
        whole = functools.partial(self._whole, last=last)
        return with_latents(result, self._latents, whole, keep=not self._is_cut and self._mesh["data"].size == 1)

    def _whole(self, made: Sequence[Any], *, last: bool) -> list[Any]:
        """What a step made besides latents: of all images after the last step, before it of this replica's."""
        if self._is_cut and made:
            raise StateError(
                f"{type(self._pipe).__name__} takes more than latents from {type(self._scheduler).__name__}, which "
                "has made it of one patch here; use a plan without pipefusion and patches"
            )
        assert self._latents is not None
        own = [self._latents if self._batch.idle else one for one in made]
        return [self._batch.gathered(one) if last and isinstance(one, Tensor) else one for one in own]

    def _step_patches(self, prediction: Tensor, timestep: Any, call: dict[str, Any]) -> Any:
        now = self.current()
        result: Any = None
        patch: Tensor | None = None
        for op in self._schedule.after(self._pipefusion.stage, now.micro):
            assert op.patch is not None and self._latents is not None
            span = self._span(op.patch)
            if op.kind is Kind.RETURN:
                assert patch is not None
                self._pipefusion.give_back(self._batch.own(patch))
                continue
            with self._trace.span("step", op.step, op.patch):
                patch, result = self._patch_schedulers().step(
                    op.patch, prediction, timestep, self._latents, (self._dim, span), call
                )
                self._write(patch, span)
        return result

    def _span(self, patch: int) -> slice:
        """Where a patch is in the latents. Where nothing is cut it is all of them, whatever the model."""
        assert self._latents is not None
        if self._is_cut:
            return self.current().layouts[0].latents(patch)
        return slice(0, self._latents.shape[self._dim])

    @property
    def _steps_patches(self) -> bool:
        """Whether this rank steps the latents, and not only counts along."""
        return self._pipefusion.is_last and not self._batch.idle

    @property
    def _is_cut(self) -> bool:
        """Whether latents are stepped by patches, or not here."""
        return self._schedule.patches > 1 or self._schedule.stages > 1

    def _shadow(self, prediction: Tensor, timestep: Any, call: dict[str, Any]) -> Any:
        assert self._latents is not None
        closes = self._schedule.closes(self.current().micro)
        result = self._patch_schedulers().shadow(prediction, timestep, self._latents, call, closes=closes)
        self._latents = self._latents.to(first(result).dtype)
        return result

    def _adopt(self, sample: Tensor) -> None:
        """Takes over the latents that the pipeline begins with, or that a callback gave it; never the user's own."""
        if sample is self._latents:
            return
        micro = self.current().micro
        after_callback = micro.patch in (None, 0) and self._synced == micro.step - 1
        if self._latents is not None and self._is_cut and not after_callback:
            raise StateError(
                f"{type(self._pipe).__name__} replaced the latents between steps, behind the scheduler, at {micro}; "
                "such a pipeline cannot be divided into patches"
            )
        self._latents = sample.clone()

    def _write(self, patch: Tensor, span: slice) -> None:
        assert self._latents is not None
        if patch.dtype != self._latents.dtype:
            self._latents = self._latents.to(patch.dtype)
        before = self._latents.narrow(self._dim, span.start, span.stop - span.start)
        if self._drift is not None:
            self._drift.note(("latents", 0, 0), self._batch.own(patch), self._batch.own(before))
        before.copy_(patch)

    def _end_step(self, step: int, timestep: Any) -> None:
        """The end of a step: the whole latents go to every rank where they are wanted, and after the last step."""
        assert self._latents is not None
        self._patch_schedulers().count_along(self._scheduler)
        last = step == self._schedule.steps - 1
        wanted = self._hooks.wants_latents(step)
        self._synced = step if wanted else self._synced
        if (last or wanted) and self._pipefusion.is_last:
            self._latents = self._batch.gathered(self._latents)
        stages = self._mesh["pipefusion"]
        if (last or wanted) and stages.group is not None:
            kind = "result" if last else "callback"
            self._latents = broadcast(self._latents, stages.size - 1, stages.group, self._mesh.traffic, kind)
        self._hooks.ended(step, timestep, self._latents)

    def _patch_schedulers(self) -> PatchSchedulers:
        if self._copies is None:
            patches = self._plan.num_patches if self._steps_patches else 1
            self._copies = PatchSchedulers(
                self._scheduler, OVERRIDES, self._plain, patches, len(self._timesteps), self._roles
            )  # fmt: skip
        return self._copies
