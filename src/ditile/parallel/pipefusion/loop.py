"""The loop of the pipeline, which runs unmodified: each iteration is one micro-step (step, patch).

`scheduler.set_timesteps` leaves timesteps that iterate in micro-steps: they yield each synchronous step once and each
asynchronous step M times. `scheduler.step` steps only the current patch. In between, the pipeline's own code (guidance,
casts, concatenation) works on full-size tensors.

A pipeline may step other latents with other schedulers in the same iteration, such as the latents of a sound with a
copy of its scheduler. These are found, stepped and sent in the same way; a patch may contain none of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from ditile.distributed.mesh import Mesh
from ditile.distributed.transport import broadcast_tensor
from ditile.model.hooks.generation import CallRecorder, Generation, TokenShares
from ditile.model.hooks.kv_store import GenerationMemory, KeptBuffers
from ditile.model.hooks.overrides import WatchedMethod, override_attribute
from ditile.model.hooks.protocols import BatchShare, StepForecasts
from ditile.model.pipeline_calls import list_schedulers, replace_call_globals
from ditile.parallel.pipefusion.dry_iterations import DryIterations
from ditile.parallel.pipefusion.executor import PipeFusion
from ditile.parallel.pipefusion.known_calls import KnownCalls
from ditile.parallel.pipefusion.other_models import OtherModels
from ditile.parallel.pipefusion.patch_schedulers import (
    OVERRIDES,
    PatchExtra,
    PatchSchedulers,
    StepCall,
    StepTimesteps,
    check_size,
    extract_sample,
    replace_latents,
)
from ditile.parallel.pipefusion.rehearsal import Rehearsal
from ditile.parallel.pipefusion.step_agreement import StepAgreement, StepCallbacks
from ditile.parallel.pipefusion.stepped_latents import SteppedLatents
from ditile.plan.errors import ModelError, StateError
from ditile.plan.layout import Split
from ditile.plan.plan import Plan, suggest_whole_images
from ditile.plan.schedule import MicroStep, OpKind, PatchSchedule


class Loop:
    """The loop that drives a pipeline's scheduler in micro-steps.

    Args:
        pipefusion: this rank's stage.
        mesh: the groups for agreements and the final broadcast.
        plan: the patches and the warmup.
        split: how ranks split the tokens.
        kept_buffers: memory for keys and values that stays in place between calls, because recorded calls read it.
        may_change: whether the model, or its mode, may change between the steps of a call.
        serial_plan: the plan for calls in which the warmup group rests; None if it never does.

    Attributes:
        when_over: called after the last step.
        lets_group_rest: whether the warmup group rests in the next call.
        call_shapes: the shapes of the next call, see `describe_call_shapes`.
        has_timed_guidance: whether the next call may call the model more often in some steps.
        recorder: records the model's calls in the next call of the pipeline, or says why it does not.
        forecasts: predicts the model's outputs in steps that do not call it; None if every step calls it.
        generation: the current generation; it is not under way outside of the pipeline's loop.
        num_steps: the number of steps of the current generation; it falls when ranks agree to end early.
    """

    _schedule: PatchSchedule
    _has_partial_latents: bool

    def __init__(
        self,
        pipefusion: PipeFusion,
        mesh: Mesh,
        plan: Plan,
        split: Split,
        kept_buffers: KeptBuffers | None = None,
        *,
        may_change: bool = False,
        serial_plan: Plan | None = None,
    ) -> None:
        self._pipefusion = pipefusion
        self._mesh = mesh
        self._plan = plan
        self._split = split
        self._trace = mesh.traffic.trace
        self._kept_buffers = kept_buffers
        self._may_change = may_change
        self._serial_plan = serial_plan
        # Whether latents are denoised patch by patch, or on one of several stages.
        self._divides_latents = plan.cuts_latents
        self.lets_group_rest = False
        self.call_shapes: Hashable = object()  # equal to nothing else until it is set
        self.has_timed_guidance = False
        self.recorder: CallRecorder | None = None
        self.forecasts: StepForecasts | None = None
        self.when_over: list[Callable[[], None]] = []
        self.generation = Generation()
        self._other_models = OtherModels(self.generation)
        self._known_calls: KnownCalls = {}
        self._rehearsal: Rehearsal | None = None
        self._owns_timesteps = True
        self._main: SteppedLatents | None = None
        self._streams: list[SteppedLatents] = []  # in the order in which the pipeline steps them
        self._timestep: Tensor | None = None
        self.num_steps = 0
        # The steps of the loop that compute; micro-steps count only these.
        self._computed_steps: list[int] = []
        self._is_planned = True  # whether these steps are known before the first of them
        # A computed step and the steps without a call after it.
        self._run = range(0)

    def install_scheduler_hooks(
        self, stack: ExitStack, pipe: Any, divided: Collection[nn.Module], batch: BatchShare, callbacks: StepCallbacks
    ) -> None:
        """Override the pipeline's present schedulers, and their copies, until the stack is closed.

        Args:
            divided: the models whose calls are divided.
            batch: the images and calls of this rank.
        """
        self._pipe = pipe
        self._scheduler = pipe.scheduler
        self._batch = batch
        self._callbacks = callbacks
        if self._divides_latents:
            self._other_models.install_hooks(stack, pipe, divided)
        for scheduler in list_schedulers(pipe):
            for name in OVERRIDES:
                # Only the timesteps of the pipeline's own scheduler drive its loop.
                if hasattr(scheduler, name) and (name != "set_timesteps" or scheduler is self._scheduler):
                    watched = self._watch_method(scheduler, name, getattr(scheduler, name))
                    override_attribute(stack, scheduler, name, watched)
        stack.callback(self._leave_pipeline)

    def _watch_method(self, scheduler: Any, name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Return the override of a scheduler's method; copies made before the loop have it too."""
        if name == "set_timesteps":
            return WatchedMethod(self._set_timesteps, stock)
        override = self._step_scheduler if name == "step" else self._scale_model_input

        def watch_copy(copied: Callable[..., Any]) -> Callable[..., Any]:
            owner = getattr(copied, "__self__", None)
            # A copy that is made during the loop, for example by a callback, is not the pipeline's.
            if owner is None or self.generation.is_under_way:
                return copied
            return self._watch_method(owner, name, copied)

        return WatchedMethod(functools.partial(override, scheduler), stock, watch_copy)

    @property
    def _changes_calls(self) -> bool:
        """Return whether the pipeline may call its models differently in some steps."""
        return self._may_change or self.has_timed_guidance

    @property
    def _rehearses_changes(self) -> bool:
        """Return whether whole latents need a rehearsal too, because keys are stale under DistriFusion."""
        return self._plan.distrifusion > 1 and (self._changes_calls or self._plan.references is not None)

    @property
    def closing_step(self) -> int | None:
        """Return the step that just ended; None within a step, or if nothing was computed."""
        now = self.generation
        if now.is_dry or not self._schedule.is_last_of_step(now.micro_step):
            return None
        return now.loop_step

    @property
    def num_images(self) -> int | None:
        """Return the number of this replica's images; None before the first step ended."""
        if self._main is None or self._main.latents is None:
            return None
        return int(self._batch.view_own_images(self._main.latents).shape[0])

    @property
    def taken_warmup(self) -> tuple[list[int], str]:
        """Return the synchronous steps of the last generation, and how they ran."""
        schedule = getattr(self, "_schedule", None)
        if schedule is None:
            raise StateError("the loop of this pipeline was not found; call it as it is, without parallelize")
        synchronous = filter(schedule.is_synchronous, range(schedule.steps))
        return [self._computed_steps[step] for step in synchronous], schedule.mode

    def forget_remembered(self) -> None:
        """Forget remembered outputs, because a callback may have changed their inputs."""
        self.generation.memory.forget_remembered()

    def drop_generation(self) -> None:
        """Forget the generation, and its unsent messages if it ended with an error."""
        if self.generation.is_under_way:
            self._pipefusion.end_generation(clean=False)
        self.generation.become(Generation())
        self._main = None
        self._rehearsal = None
        self._streams = []
        timesteps = vars(self._scheduler).get("timesteps")
        if isinstance(timesteps, StepTimesteps):
            if self._owns_timesteps:
                self._scheduler.timesteps = timesteps.to_plain_tensor()
            else:
                del self._scheduler.timesteps

    def _leave_pipeline(self) -> None:
        """Drop everything that belongs to the call, because this object outlives it."""
        self.drop_generation()
        del self._pipe, self._scheduler, self._batch, self._callbacks

    def _set_timesteps(self, stock: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self.drop_generation()
        stock(*args, **kwargs)
        # A user's wrapper of a scheduler forwards `timesteps` without having the attribute itself.
        self._owns_timesteps = "timesteps" in vars(self._scheduler)
        self._plain_timesteps = self._scheduler.timesteps
        self._scheduler.timesteps = StepTimesteps.wrap_timesteps(self._plain_timesteps, self.iterate_micro_steps)

    # The methods below run one iteration of the pipeline's loop.

    def make_count_steps(self, stack: ExitStack, pipeline_call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a pipeline's `__call__` in which `enumerate` counts steps, not micro-steps.

        Pipelines index sigmas and timesteps by that number, and compare it with the number of steps. The blocks of a
        modular pipeline count in the same way until the stack is closed.
        """
        if not self._divides_latents and not self._rehearses_changes:
            return pipeline_call
        return replace_call_globals(stack, self._pipe, pipeline_call, {"enumerate": self._enumerate_steps})

    def _enumerate_steps(self, iterable: Iterable[Any], start: int = 0) -> Iterator[tuple[int, Any]]:
        """Enumerate like `enumerate`, but number the timestep of a micro-step by its step."""
        for count, item in enumerate(iterable, start):
            number = count
            now = self.generation
            # Compare timesteps by identity: they may come through a progress bar.
            if now.is_under_way and item is self._timestep:
                step = now.loop_step
                # Latents are blended one step before the step that uses them.
                if now.dry.blended_step is not None:
                    step = now.dry.blended_step - 1
                number = start + step
            yield number, item

    def iterate_micro_steps(self, timesteps: tuple[Tensor, ...]) -> Iterator[Tensor]:
        """Yield the timestep of each micro-step, and do the schedule's work between them.

        If the pipeline asks for a second timestep before it called the model, it gets the remaining ones unchanged.
        """
        self._begin_generation(timesteps)
        generation = self.generation
        main = SteppedLatents(self._scheduler, type(self._pipe).__name__)
        self._main = main
        # A rehearsal finds the streams, each when it is first stepped, so the list begins empty.
        needs_rehearsal = self._has_partial_latents or self._rehearses_changes
        self._streams = [] if needs_rehearsal else [main]
        dry = DryIterations(generation, self._streams, self._pipe, timesteps, self._callbacks.generators)
        if needs_rehearsal:
            yield from self._rehearse(dry, timesteps)
            if not self._streams:
                # This was the pipeline's real first iteration, not a rehearsal, so nothing is restored.
                self._finish_generation(stopped=False)
                yield from timesteps[1:]
                return
        if dry.are_blends_needed:
            yield from self._drive_dry_iterations(dry.restore_first_latents())
        else:
            generation.dry.results.clear()
        dry.restore_state()
        self._plan_computed_steps()
        step = 0
        # An agreement may shorten the generation while it runs.
        while self._run.stop < self.num_steps:
            self._begin_step(step)
            for micro, loop_step in self._list_iterations(step):
                if dry.are_blends_needed and not self._schedule.is_first_of_step(micro):
                    yield from self._drive_dry_iterations(dry.blend_for_step(loop_step))
                yield from self._run_micro_step(micro, loop_step)
                if not main.is_stepped:
                    self._finish_generation(stopped=False)
                    yield from timesteps[1:]
                    return
                self._batch.check_streams(len(self._streams))
            if self._is_planned or not generation.is_forecast:
                step += 1
            else:
                # The cache forecast the output of this step, so it was not computed.
                self._computed_steps.remove(self._run.start)
                self._schedule = replace(self._schedule, steps=len(self._computed_steps))
        self._finish_generation(stopped=self._run.stop < len(timesteps))

    def _begin_generation(self, timesteps: tuple[Tensor, ...]) -> None:
        plan = self._plan
        if self._serial_plan is not None and self.lets_group_rest:
            plan = self._serial_plan
        schedule = PatchSchedule.from_plan(plan, len(timesteps))
        self._schedule = schedule
        self._timesteps = timesteps
        self.num_steps = len(timesteps)
        self._computed_steps = list(range(len(timesteps)))
        self._is_planned = True
        self._run = range(0)
        # Whether latents are cut into patches or denoised on another stage; otherwise the scheduler itself steps them.
        self._has_partial_latents = schedule.patches > 1 or schedule.stages > 1
        self._batch.begin_generation()
        splits_images = self._mesh["data"].num_ranks > 1
        self._gathers_predictions = splits_images and self._pipefusion.is_last_stage
        generation = self.generation
        generation.become(
            Generation(
                schedule=schedule,
                is_under_way=True,
                shares=TokenShares(self._split, self._mesh.sequence.index),
                branches=self._batch.select_branches,
                memory=GenerationMemory(self._kept_buffers),
                is_read=self._pipefusion.is_last_stage,
                recorder=self.recorder,
            )
        )
        warmup_group = self._pipefusion.warmup_group
        if warmup_group is not None and plan is self._plan:
            generation.shares.warmup_split = Split(warmup_group.size)
            generation.shares.warmup_index = warmup_group.stage
        # Replicas exchange latents at the end, so they must stop at the same step.
        stop_group = self._mesh.within_calls if splits_images else self._mesh.control
        self._agreement = StepAgreement(stop_group, self._mesh.traffic, self._callbacks.is_stopped)
        self._synced = -1  # the last step after which every rank had the whole latents
        self._pipefusion.begin_generation(schedule, generation)
        self._callbacks.on_loop_begin(len(timesteps))

    def _rehearse(self, dry: DryIterations, timesteps: Sequence[Tensor]) -> Iterator[Tensor]:
        """Run the rehearsal before the first step.

        It finds no stream if the pipeline calls no model in its loop.
        """
        now = self.generation
        # Which model is called in a step may depend on its timestep.
        times = tuple(map(float, timesteps)) if self._changes_calls else None
        shapes = (self.call_shapes, now.shares.warmup_split, now.schedule.has_stale_steps, times)
        rehearsal = Rehearsal(dry, self._other_models, self._known_calls, shapes)
        steps = self._schedule.steps if self._changes_calls else 1
        patches = self._plan.num_patches if self._has_partial_latents else 0
        references = self._plan.references is not None
        dry_timesteps = rehearsal.iterate_timesteps(steps=steps, patches=patches, references=references)
        yield from self._drive_dry_iterations(dry_timesteps)
        if not self._streams:
            return
        self._rehearsal = rehearsal
        # The schedule, the streams and the channels follow from what was found.
        findings = now.findings
        if self._serial_plan is not None and self._schedule.warmup_group_size and now.shares.warmup_split is None:
            self._schedule = PatchSchedule.from_plan(self._serial_plan, self._schedule.steps)
        again = self._schedule.again | findings.changed_steps
        self._schedule = replace(self._schedule, again=again, num_references=findings.num_references)
        for stream in self._streams:
            if not self._has_partial_latents:
                stream.restore_step_index()
                continue
            stream.end_rehearsal(
                self._plan.num_patches,
                findings.num_references,
                rows_differ=findings.have_unlike_rows(),
            )
            now.pieces.append(stream.pieces)
        if self._has_partial_latents:
            uneven = False
            for pieces in zip(*now.pieces, strict=True):
                num_owners = sum(not piece.is_empty for piece in pieces)
                uneven = uneven or num_owners != 1
            self._schedule = replace(self._schedule, uneven_latents=uneven)
        if findings.reads_latents_everywhere:
            self._schedule = replace(self._schedule, shares_latents=True)
            # No message is under way here, and all stages have the same findings, so they can open channels.
            self._pipefusion.share_latents(self._batch.view_own_images(self._streams[0].sample).device)

    def _plan_computed_steps(self) -> None:
        """Decide which steps of the loop compute; from here on micro-steps count only these."""
        if self.forecasts is None:
            return
        planned = self.forecasts.begin_generation(self.num_steps)
        findings = self.generation.findings
        if planned is not None:
            # After a change of model there is no earlier output to forecast from.
            self._computed_steps = sorted({0} | set(planned) | findings.changed_steps)
            self._schedule = replace(self._schedule, steps=len(self._computed_steps))
        elif self._has_partial_latents or self._schedule.has_stale_steps:
            raise ModelError(
                "this cache decides in each step whether the model is called, and stages and stale keys must know that "
                f"before; use a schedule, as steps={self.num_steps // 2} in a cache line, or "
                f"{suggest_whole_images(stale_keys=True)}"
            )
        self._is_planned = planned is not None
        order = {step: number for number, step in enumerate(self._computed_steps)}
        findings.whole_steps = frozenset(order[step] for step in findings.whole_steps)
        findings.changed_steps = frozenset(order[step] for step in findings.changed_steps)
        self._schedule = replace(self._schedule, again=findings.changed_steps)

    def _list_iterations(self, step: int) -> list[tuple[MicroStep, int]]:
        """List the iterations of a computed step and of the forecast steps after it: (micro-step, step of the loop)."""
        micro_steps = self._schedule.list_micro_steps(step)
        if step in self._schedule.late:
            return [(micro, loop_step) for loop_step, micro in product(self._run, micro_steps)]
        # A patch goes through all steps without a call before the next patch does, so that no stage waits for others.
        return list(product(micro_steps, self._run))

    @property
    def _precedes_call(self) -> bool:
        """Return whether the model is called in the next iteration."""
        now = self.generation
        # In a late step all patches finish a step of the loop before any patch begins the next.
        if now.micro_step.step in self._schedule.late and not self._schedule.is_last_of_step(now.micro_step):
            return now.loop_step == self._run.start
        return now.loop_step == self._run[-1]

    def _drive_dry_iterations(self, timesteps: Iterator[Tensor]) -> Iterator[Tensor]:
        """Yield the timesteps, each again if the pipeline was interrupted before it had stepped its schedulers."""
        for timestep in timesteps:
            self._begin_iteration(timestep)
            yield timestep
            while self._note_interrupt() and not (self._streams and self._is_stepped):
                yield timestep

    def _begin_iteration(self, timestep: Tensor) -> None:
        self._timestep = timestep
        self._callbacks.progress()
        self._other_models.begin_iteration()

    def _begin_step(self, step: int) -> None:
        """Start a vote on stopping; the vote that began in the step before decides whether this step is the last."""
        following = self.num_steps
        if step + 1 < len(self._computed_steps):
            following = self._computed_steps[step + 1]
        self._run = range(self._computed_steps[step], following)
        if self._agreement.begin_step() and step + 1 < self._schedule.steps:
            self._schedule = replace(self._schedule, steps=step + 1)
            self.num_steps = self._run.stop
        if self._has_partial_latents and len(self._run) > 1:
            needs_whole = any(stream.is_blended or stream.is_custom for stream in self._streams)
            # All patches finish each of these steps before any patch begins the next.
            if needs_whole or any(map(self._callbacks.wants_latents, self._run[:-1])):
                self._schedule = replace(self._schedule, late=self._schedule.late | {step})
        self.generation.schedule = self._schedule
        self._pipefusion.prepare_step(step, self._schedule)

    def _run_micro_step(self, micro: MicroStep, loop_step: int) -> Iterator[Tensor]:
        """Yield a micro-step's timestep until the pipeline has stepped its schedulers."""
        now = self.generation
        if micro != now.micro_step or now.loop_step == 0:
            now.enter_micro_step(micro)
        now.loop_step = loop_step
        now.computes = loop_step == self._run.start if self._is_planned else None
        now.is_forecast = False
        timestep = self._timesteps[loop_step]
        self._begin_iteration(timestep)
        if now.computes is False:  # `_step_partial_latents` releases patches only before a call
            for stream in self._streams:
                stream.release_patches(self._schedule.list_patches(micro))
        for stream in self._streams:
            stream.is_stepped = False
        while True:
            yield timestep
            was_interrupted = self._note_interrupt()
            if self._is_stepped:
                return
            if not was_interrupted:
                # The first iteration did not call the model, so this loop does not denoise.
                if micro == self._schedule.list_micro_steps(0)[0] and not self.generation.branch:
                    return
                raise StateError(f"{type(self._pipe).__name__} went on without stepping its scheduler at {micro}")

    @property
    def _is_stepped(self) -> bool:
        """Return whether all schedulers were stepped in this micro-step."""
        # A list is faster than a generator here, and this runs several times in each micro-step.
        return all([stream.is_stepped for stream in self._streams])

    def _exchange_latents(self, micro: MicroStep) -> None:
        """Exchange the latents of the step before, ahead of a micro-step's call of the model."""
        for stream in self._streams:
            stream.release_patches(self._schedule.list_patches(micro))
        fusion = self._pipefusion
        # If a callback wanted the whole latents, every rank already has them, and messages are only received.
        writes = self._synced != self._computed_steps[micro.step] - 1
        if fusion.takes_latents:
            fusion.bring_latents(self._list_own_latents(), micro, writes=writes)
            if fusion.stage == 0:
                return
        if fusion.warmup_group is not None:
            ops = self._schedule.iter_ops_before_call(fusion.stage, micro)
            fusion.warmup_group.exchange_whole_latents(ops, self._list_own_latents(), writes=writes)

    def _list_own_latents(self) -> list[Tensor]:
        own = []
        for stream in self._streams:
            if stream.latents is not None:
                own.append(self._batch.view_own_images(stream.latents))
        return own

    def _note_interrupt(self) -> bool:
        """Hold back `pipe._interrupt` until all ranks agree on the last step; return whether it was set."""
        if not getattr(self._pipe, "_interrupt", False):
            return False
        self._pipe._interrupt = False
        self._agreement.ends_early = True
        return True

    def _finish_generation(self, *, stopped: bool) -> None:
        # All agreements are collective: those under way must end before anything may raise.
        is_cancelled = self._agreement.wait_for_votes()
        # Pipelines without `interrupt` would never reset it, and the next call would end too.
        if stopped and not is_cancelled and hasattr(type(self._pipe), "interrupt"):
            self._pipe._interrupt = True
        self._pipefusion.end_generation(clean=True)
        if not stopped and self._rehearsal is not None:
            self._rehearsal.keep_findings()
        self.generation.become(Generation())
        self._other_models.forget_results()
        for callback in self.when_over:
            callback()
        if self.forecasts is not None:
            self.forecasts.end_generation()
        self._batch.end_generation()
        self._agreement.check_outcome(self.num_steps)

    # The methods below override methods of the schedulers.

    def _find_stream(self, scheduler: Any) -> SteppedLatents | None:
        """Return the latents that a scheduler steps; None if its own method steps them.

        Such a scheduler is not the pipeline's own, and steps outside of the loop or on whole latents of one replica.

        Raises:
            StateError: if the pipeline's own scheduler is stepped outside of the loop, or another one for the first
                time after the rehearsal.
        """
        name = type(self._pipe).__name__
        stream = None
        if scheduler is self._scheduler:
            self.generation.check_under_way()
            stream = self._main
        elif not self.generation.is_under_way or not (self._has_partial_latents or self._mesh["data"].num_ranks > 1):
            return None
        for known_stream in self._streams:
            if known_stream.scheduler is scheduler:
                return known_stream
        if self._has_partial_latents and self.generation.dry.patch != 0:
            raise StateError(
                f"{name} steps a scheduler that it did not step before, so what that steps cannot be cut into "
                f"patches; use {suggest_whole_images()}"
            )
        stream = stream or SteppedLatents(scheduler, name)
        self._streams.append(stream)
        return stream

    def _scale_model_input(
        self, scheduler: Any, stock: Callable[..., Tensor], sample: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        timestep = args[0] if args else kwargs.get("timestep")
        if scheduler is self._scheduler:
            self.generation.check_under_way()
        stream = None
        for known_stream in (self._main, *self._streams):
            if known_stream is not None and known_stream.scheduler is scheduler:
                stream = known_stream
                break
        # Whole latents are scaled and stepped by the scheduler itself.
        if stream is None or not (self._has_partial_latents or self.generation.is_dry):
            return stock(sample, *args, **kwargs)
        patches: Sequence[int] = range(1)
        if self._pipefusion.is_last_stage:
            patches = stream.select_stepped_patches(self._schedule.list_patches(self.generation.micro_step))
        return self._get_copies(stream).scale_sample(sample, timestep, patches, read=self._pipefusion.reads_latents)

    def _step_scheduler(self, scheduler: Any, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        stream = self._find_stream(scheduler)
        if stream is None:
            return stock(*args, **kwargs)
        call = stream.signature.bind(args, kwargs)
        if self.generation.is_dry:
            return self._note_dry_step(stream, call)
        if stream is self._main:
            self._batch.check_prediction(call.prediction, call.sample)
        # A user's own scheduler may compute with all images of the batch.
        if stream.is_custom and self._gathers_predictions:
            call = replace(call, prediction=self._batch.gather_latents(call.prediction))
        # A pipeline may step a first time to see the image without noise, and set the step index back.
        is_again = stream.is_stepped
        if self._has_partial_latents:
            result = self._step_partial_latents(stream, call, is_again=is_again)
        else:
            result = self._step_whole_latents(stream, stock, call, is_again=is_again)
        if stream is self._main and not is_again:
            self.generation.end_micro_step()
        return result

    def _step_partial_latents(self, stream: SteppedLatents, call: StepCall, *, is_again: bool) -> Any:
        """Step the patches of this micro-step on the last stage, and exchange latents for the next one."""
        micro = self.generation.micro_step
        stream.copy_new_latents(call.sample, self.generation, synced=self._synced)
        make_step = self._step_patches if self._pipefusion.is_last_stage else self._step_on_corner
        result = make_step(stream, call)
        stream.is_stepped = True
        # The order of messages is fixed, so sends wait until all streams are stepped.
        is_stepped = self._is_stepped
        # The stages that read latents get the stepped patches one by one, but none before a step without a call.
        if is_stepped and self.generation.loop_step == self._run[-1] and self._pipefusion.is_last_stage:
            patches = []
            for op in self._schedule.iter_ops_after_call(self._pipefusion.stage, micro):
                if op.kind is not OpKind.SEND_STEPPED_PATCH:
                    continue
                assert op.patch is not None and op.peer is not None
                for stepped in self._streams:
                    if op.patch in stepped.stepped_patches:
                        own = self._batch.view_own_images(stepped.stepped_patches[op.patch])
                        patches.append((op.peer, own))
            self._pipefusion.send_stepped_patches(patches)
            for stepped in self._streams:
                stepped.stepped_patches.clear()
        if self._schedule.is_last_of_step(micro):
            self._get_copies(stream).sync_step_index(stream.scheduler)
            self._end_step(stream, self.generation.loop_step, call.timestep, is_again=is_again)
        # Latents for the next micro-step are received now, so that whatever the pipeline computes from its latents
        # includes them. All streams are received at once: on the last stage with its sends, elsewhere with the first
        # stream.
        following = self._schedule.find_following(micro)
        if following is not None and self._precedes_call:
            stream.release_patches(self._schedule.list_patches(following))
            is_due = stream is self._streams[0]
            if self._pipefusion.is_last_stage:
                is_due = is_stepped
            if is_due:
                self._exchange_latents(following)
        return replace_latents(result, stream.hand_on(is_dry=False), _stand_for_extras)

    def _step_whole_latents(
        self, stream: SteppedLatents, stock: Callable[..., Any], call: StepCall, *, is_again: bool
    ) -> Any:
        """Step all latents with the scheduler's own method, or with the user's replacement for it."""
        step = self.generation.loop_step
        drives_loop = stream is self._main
        driving_timesteps = self._scheduler.timesteps
        # A scheduler that iterates its timesteps would drive the loop.
        if drives_loop:
            self._scheduler.timesteps = self._plain_timesteps
        try:
            with self._trace.record_span("step", step, 0):
                result = call.make(stock, call.prediction, call.sample, call.extra)
        finally:
            if drives_loop and self._scheduler.timesteps is self._plain_timesteps:
                self._scheduler.timesteps = driving_timesteps
        stream.latents = extract_sample(result)
        stream.is_stepped = True
        self._end_step(stream, step, call.timestep, is_again=is_again)
        if self._mesh["data"].num_ranks == 1:
            return result
        complete = functools.partial(self._complete_step_extras, is_last=step == self.num_steps - 1)
        return replace_latents(result, stream.latents, complete)

    def _note_dry_step(self, stream: SteppedLatents, call: StepCall) -> Any:
        """Note where the prediction of a dry iteration is NaN, without changing the latents."""
        now = self.generation
        blended_step = now.dry.blended_step
        if blended_step is None:
            stream.note_rehearsal(call.prediction, call.sample, is_cut=self._has_partial_latents)
        # Each rehearsal is a first step, so the scheduler has no history yet.
        extra = dict(call.extra)
        for place, value in call.extra.items():
            if isinstance(value, PatchExtra):
                extra[place] = None
        zero_call = replace(call, prediction=torch.zeros_like(call.prediction), extra=extra)
        result = self._get_copies(stream).step_on_corner(zero_call, call.sample, closes=False)
        # The pipeline may set the index back, or ask for the noise of the next step, so the index is set here.
        if blended_step is None:
            stream.set_step_index(now.micro_step.step + 1)
        else:
            stream.note_blend(call.sample, blended_step)
        if stream is self._main:
            now.branch = 0
        complete = _stand_for_extras if self._has_partial_latents else list
        return replace_latents(result, stream.hand_on(is_dry=True), complete)

    def _complete_step_extras(self, extras: Sequence[Any], *, is_last: bool) -> list[Any]:
        """Return a step's results besides latents; after the last step they are gathered from all replicas."""
        if not is_last:
            return list(extras)
        complete = []
        for extra in extras:
            if isinstance(extra, Tensor):
                extra = self._batch.gather_latents(extra)
            complete.append(extra)
        return complete

    def _step_patches(self, stream: SteppedLatents, call: StepCall) -> Any:
        micro = self.generation.micro_step
        copies = self._get_copies(stream)
        assert stream.latents is not None
        result: Any = None
        stream.stepped_patches.clear()
        for patch in self._schedule.list_patches(micro):
            piece = stream.pieces[patch]
            # A patch may contain none of these latents: a sound, for example, belongs to the first patch.
            if piece.is_empty:
                copies.skip_patch(patch, call, stream.latents.device)
                continue
            with self._trace.record_span("step", micro.step, patch):
                denoised, result = copies.step_patch(patch, call, stream.sample, piece)
                assert stream.latents is not None
                if denoised.dtype != stream.latents.dtype:
                    stream.latents = stream.latents.to(denoised.dtype)
            stream.stepped_patches[patch] = denoised
            stream.held_patches[patch] = denoised
        if self._schedule.patches == 1:
            stream.release_patches(range(1))
        if result is None:
            result = copies.step_on_corner(call, stream.latents, closes=False)
        return result

    def _step_on_corner(self, stream: SteppedLatents, call: StepCall) -> Any:
        """Count a step on a rank that does not denoise."""
        assert stream.latents is not None
        closes = self._schedule.is_last_of_step(self.generation.micro_step)
        result = self._get_copies(stream).step_on_corner(call, stream.latents, closes=closes)
        stepped = extract_sample(result)
        # A user's own scheduler got all of the latents, so it may change their size.
        if stream.is_custom:
            check_size(stream.scheduler, stream.latents, stepped)
        # The scheduler may return another dtype, which messages will have too.
        stream.latents = stream.latents.to(stepped.dtype)
        return result

    def _end_step(self, stream: SteppedLatents, step: int, timestep: Any, *, is_again: bool) -> None:
        """End a step; after the last step, or if a callback wants them, gather the whole latents."""
        assert stream.latents is not None
        is_last = step == self.num_steps - 1
        if self._pipefusion.is_last_stage:
            fresh = (stream.latents, *stream.held_patches.values())
            self._agreement.note_latents(step, map(self._batch.view_own_images, fresh))
        syncs = self._callbacks.wants_latents(step)
        if syncs:
            self._synced = step
        if is_last:
            self._gather_latents(stream, "result")
        elif syncs:
            self._gather_latents(stream, "callback")
        if stream is self._main and not is_again:
            self._callbacks.on_step_end(step, timestep, stream.latents)

    def _gather_latents(self, stream: SteppedLatents, kind: str) -> None:
        """Bring the whole latents to every rank."""
        assert stream.latents is not None
        stream.release_patches(range(self._schedule.patches))
        # The replicas come first, so that the broadcast along the stages carries all images.
        if self._pipefusion.is_last_stage:
            stream.latents = self._batch.gather_latents(stream.latents)
        stages = self._mesh["pipefusion"]
        if stages.group is not None:
            stream.latents = broadcast_tensor(
                stream.latents, stages.num_ranks - 1, stages.group, self._mesh.traffic, kind
            )

    def _get_copies(self, stream: SteppedLatents) -> PatchSchedulers:
        patches = self._plan.num_patches if self._pipefusion.is_last_stage else 1
        timesteps = self._plain_timesteps if stream is self._main else stream.scheduler.timesteps
        return stream.get_copies(patches, timesteps, len(self._timesteps))


def _stand_for_extras(extras: Sequence[Any]) -> list[Any]:
    """Return placeholders for a step's results besides latents."""
    return [PatchExtra(index) for index in range(len(extras))]
