"""The loop of the pipeline, which runs unmodified: each iteration is one micro-step (step, patch).

`scheduler.set_timesteps` leaves timesteps that iterate in micro-steps: they yield each synchronous step once and each
asynchronous one M times. `scheduler.step` steps the current patch alone. Whatever the pipeline does in between
(guidance, casts, concatenation) happens in its own code on full-size tensors.

A pipeline may step other latents by other schedulers in the same iteration, as those of a sound by a copy of its
scheduler. Their pieces are found, stepped and sent as those of the first are: a patch without any of them steps none.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ditile.distributed.mesh import Mesh
from ditile.distributed.trace import GenerationTrace
from ditile.distributed.transport import broadcast_tensor
from ditile.model.hooks.generation import Generation, TokenShares
from ditile.model.hooks.kv_store import GenerationMemory, RelativeChange
from ditile.model.hooks.overrides import WatchedMethod, override_attribute
from ditile.model.hooks.pieces import Piece
from ditile.model.hooks.protocols import BatchShare
from ditile.model.pipeline_calls import list_schedulers, replace_call_globals
from ditile.parallel.pipefusion.adaptive_warmup import AdaptiveWarmup
from ditile.parallel.pipefusion.executor import PipeFusion
from ditile.parallel.pipefusion.other_models import OtherModels
from ditile.parallel.pipefusion.patch_schedulers import (
    PatchExtra,
    PatchSchedulers,
    StepCall,
    StepTimesteps,
    extract_sample,
    raise_changed_size,
    replace_latents,
)
from ditile.parallel.pipefusion.rehearsal import BlendIterations, Rehearsal, SavedState
from ditile.parallel.pipefusion.rehearsed_calls import RehearsedCalls
from ditile.parallel.pipefusion.step_agreement import StepAgreement, StepCallbacks
from ditile.parallel.pipefusion.stepped_latents import OVERRIDES, SteppedLatents
from ditile.plan.errors import StateError
from ditile.plan.layout import Split
from ditile.plan.plan import Plan
from ditile.plan.schedule import MicroStep, OpKind, Schedule


class Loop:
    """Drives the scheduler of a pipeline in micro-steps.

    Args:
        pipefusion: this rank's stage.
        mesh: for decisions and the final broadcast.
        plan: patches and warmup.
        split: how ranks share out the tokens.
        trace: records each op.
        kept_buffers: where keys and values stay from call to call, if they do.
        may_change: whether the pipeline calls another model, or one in another mode, in some steps.
        serial_plan: of calls in which the warmup group rests; None where it never does.

    Attributes:
        when_over: called after the last step.
        lets_group_rest: whether the warmup group rests in the next call.
        call_shapes: of the next call, as `describe_call_shapes` says.
        has_timed_guidance: whether the next call may call the model more often in some steps.
        generation: the one under way, or none.
    """

    def __init__(
        self,
        pipefusion: PipeFusion,
        mesh: Mesh,
        plan: Plan,
        split: Split,
        trace: GenerationTrace,
        kept_buffers: dict[Hashable, Tensor] | None = None,
        *,
        may_change: bool = False,
        serial_plan: Plan | None = None,
    ) -> None:
        self._pipefusion, self._mesh, self._trace = pipefusion, mesh, trace
        self._kept_buffers, self._may_change = kept_buffers, may_change
        self._plan, self._split, self._serial_plan = plan, split, serial_plan
        self.lets_group_rest, self.call_shapes = False, object()
        self.has_timed_guidance = False
        self._owns_timesteps = True
        self.when_over: list[Callable[[], None]] = []
        self.generation = Generation()
        self._other_models = OtherModels(self.generation)
        self._rehearsed_calls = RehearsedCalls()
        self._main: SteppedLatents | None = None
        self._streams: list[SteppedLatents] = []  # in the order in which the pipeline steps them
        self._timestep: Tensor | None = None
        self._adaptive_warmup: AdaptiveWarmup | None = None
        self._relative_change: RelativeChange | None = None

    def install_scheduler_hooks(
        self, stack: ExitStack, pipe: Any, divided: Collection[nn.Module], batch: BatchShare, callbacks: StepCallbacks
    ) -> None:
        """Overrides the schedulers that a pipeline has now, and their copies, until the stack is closed.

        Args:
            divided: the models whose calls are divided.
            batch: which images and calls are this rank's.
        """
        self._pipe, self._scheduler, self._batch, self._callbacks = pipe, pipe.scheduler, batch, callbacks
        if self._plan.num_patches * self._plan.pipefusion > 1:
            self._other_models.install_hooks(stack, pipe, divided)
        for scheduler in list_schedulers(pipe):
            for name in OVERRIDES:
                # Only the timesteps of the pipeline's own scheduler drive its loop.
                if hasattr(scheduler, name) and (name != "set_timesteps" or scheduler is self._scheduler):
                    watched = self._watch_method(scheduler, name, getattr(scheduler, name))
                    override_attribute(stack, scheduler, name, watched)
        stack.callback(self._leave_pipeline)

    def _watch_method(self, scheduler: Any, name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
        """What a scheduler has in place of one of its methods; a copy that is made before the loop has the same."""
        if name == "set_timesteps":
            return WatchedMethod(self._set_timesteps, stock)
        mine = self._step_scheduler if name == "step" else self._scale_model_input

        def watch_copy(copied: Callable[..., Any]) -> Callable[..., Any]:
            owner = getattr(copied, "__self__", None)
            # What is copied in the loop, as by a callback, is nobody's of the pipeline.
            is_for_loop = owner is not None and not self.generation.is_under_way
            return self._watch_method(owner, name, copied) if is_for_loop else copied

        return WatchedMethod(functools.partial(mine, scheduler), stock, watch_copy)

    @property
    def closing_step(self) -> int | None:
        """The step whose last micro-step was just done; None within a step, or where nothing was computed."""
        now = self.generation
        return now.micro_step.step if not now.is_dry and self._schedule.is_last_of_step(now.micro_step) else None

    @property
    def num_steps(self) -> int:
        """The steps of the generation under way."""
        return self._schedule.steps

    @property
    def num_images(self) -> int | None:
        """Images of this replica; None before the first step ended."""
        latents = None if self._main is None else self._main.latents
        return None if latents is None else int(self._batch.view_own_images(latents).shape[0])

    @property
    def taken_warmup(self) -> tuple[list[int], str]:
        """The steps of the last generation that were synchronous, and how they ran."""
        if (schedule := getattr(self, "_schedule", None)) is None:
            raise StateError("the loop of this pipeline was not found; call it as it is, without parallelize")
        return list(filter(schedule.is_synchronous, range(schedule.steps))), schedule.mode

    def forget_constants(self) -> None:
        """Forgets what was constant: a callback may have changed it."""
        self.generation.memory.forget_constants()

    def drop_generation(self) -> None:
        """Forgets the generation. One that ended by an error leaves its messages behind."""
        if self.generation.is_under_way:
            self._pipefusion.end_generation(clean=False)
        self.generation.become(Generation())
        self._main = self._adaptive_warmup = self._relative_change = None
        self._streams = []
        timesteps = vars(self._scheduler).get("timesteps")
        if isinstance(timesteps, StepTimesteps) and self._owns_timesteps:
            self._scheduler.timesteps = timesteps.to_plain_tensor()
        elif isinstance(timesteps, StepTimesteps):
            del self._scheduler.timesteps

    def withdraw_generation(self) -> None:
        """Every rank refuses the first call of a model: nothing of a picture is under way."""
        self._pipefusion.end_generation(clean=True)
        self.generation.become(Generation())

    def _leave_pipeline(self) -> None:
        """Drops what belongs to the call, which this object outlives."""
        self.drop_generation()
        del self._pipe, self._scheduler, self._batch, self._callbacks

    def _set_timesteps(self, stock: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self.drop_generation()
        stock(*args, **kwargs)
        # What the user put around a scheduler hands on its timesteps, and has none of its own.
        self._owns_timesteps = "timesteps" in vars(self._scheduler)
        self._plain = self._scheduler.timesteps
        self._scheduler.timesteps = StepTimesteps.wrap_timesteps(self._plain, self.iterate_micro_steps)

    # One iteration of the pipeline's loop

    def make_count_steps(self, stack: ExitStack, pipeline_call: Callable[..., Any]) -> Callable[..., Any]:
        """A pipeline's `__call__` that counts steps by `enumerate`, as it means to, where it would count micro-steps.

        Pipelines index sigmas and timesteps by that number, and compare it with the number of steps. The blocks of a
        modular pipeline count so until the stack is closed.
        """
        if self._plan.num_patches * self._plan.pipefusion == 1 and not self._rehearses_changes:
            return pipeline_call
        return replace_call_globals(stack, self._pipe, pipeline_call, {"enumerate": self._enumerate_steps})

    def _enumerate_steps(self, iterable: Iterable[Any], start: int = 0) -> Iterator[tuple[int, Any]]:
        """`enumerate`, which numbers the timestep of a micro-step by its step."""
        for count, item in enumerate(iterable, start):
            # By identity: it may come through a progress bar.
            is_driven = self.generation.is_under_way and item is self._timestep
            yield start + self._shown_step if is_driven else count, item

    @property
    def _shown_step(self) -> int:
        """The step that the pipeline takes this iteration for: latents are blended in the step before theirs."""
        blended_step = self.generation.dry.blended_step
        return self.generation.micro_step.step if blended_step is None else blended_step - 1

    def iterate_micro_steps(self, timesteps: tuple[Tensor, ...]) -> Iterator[Tensor]:
        """Yields the timestep of each micro-step, and does between them what the schedule says.

        If the pipeline asks for the second one before it has called the model, it gets the other timesteps as they are.
        """
        generation, saved = self._begin_generation(timesteps), SavedState(self._pipe, self._callbacks.generators)
        main = self._main = SteppedLatents(self._scheduler, type(self._pipe).__name__)
        self._streams = [main]
        if self._has_partial_latents or self._rehearses_changes:
            yield from self._rehearse(timesteps)
            if not self._streams:
                # Nothing is put back: this was no rehearsal, but the pipeline's first iteration.
                self._finish_generation(stopped=False)
                yield from timesteps[1:]
                return
        blends = BlendIterations(generation, self._streams, timesteps, type(self._pipe).__name__)
        if blends.are_needed:
            yield from self._drive_dry_iterations(blends.restore_first_latents())
        else:
            generation.dry.results.clear()
        saved.restore()
        step = 0
        while step < self._schedule.steps:
            self._begin_step(step)
            for number, micro in enumerate(self._schedule.list_micro_steps(step)):
                if number and blends.are_needed:
                    yield from self._drive_dry_iterations(blends.iterate_calls(step))
                yield from self._run_micro_step(micro, timesteps[step])
                if not main.is_stepped:
                    self._finish_generation(stopped=False)
                    yield from timesteps[1:]
                    return
                self._batch.check_streams(len(self._streams))
                if self._adaptive_warmup is not None:
                    self._adaptive_warmup.start_change_sum()
            if self._adaptive_warmup is not None and main.latents is not None:
                self._adaptive_warmup.record_step_changes(generation, main.latents.shape[0])
            step += 1
        self._finish_generation(stopped=step < len(timesteps))

    def _begin_generation(self, timesteps: tuple[Tensor, ...]) -> Generation:
        plan = self._serial_plan if self._serial_plan is not None and self.lets_group_rest else self._plan
        schedule = Schedule.from_plan(plan if not self._batch.is_idle else Plan(), len(timesteps))
        # Whether latents are stepped patch by patch, or on another stage; and here, where others only count steps.
        self._has_partial_latents = schedule.patches > 1 or schedule.stages > 1
        self._is_stepping_rank = self._pipefusion.is_last_stage and not self._batch.is_idle
        self._batch.begin_generation()
        # A replica without images makes no micro-steps.
        cuts_latents = self._plan.num_patches * self._plan.pipefusion > 1
        shares_images = self._mesh["data"].num_ranks > 1 and not (cuts_latents and self._batch.has_idle_replica)
        self._gathers_predictions = shares_images and self._pipefusion.is_last_stage
        self._relative_change = RelativeChange(self._mesh) if schedule.adaptive else None
        generation = self.generation
        generation.become(
            Generation(
                schedule=schedule,
                rounds_otherwise=self._plan.rounds_otherwise,
                is_under_way=True,
                shares=TokenShares(self._split, self._mesh.sequence.index),
                branches=self._batch.select_branches,
                memory=GenerationMemory(self._relative_change, self._kept_buffers),
            )
        )
        warmup_group = self._pipefusion.warmup_group
        if warmup_group is not None and plan is self._plan:
            generation.shares.warmup_split = Split(warmup_group.size)
            generation.shares.warmup_index = warmup_group.stage if warmup_group.is_member else 0
        self._schedule, self._timesteps = schedule, timesteps
        # Replicas exchange latents at the end, so they must stop at the same step.
        stop_group = self._mesh.within_calls if self._mesh["data"].num_ranks > 1 else self._mesh.control
        self._agreement = StepAgreement(stop_group, self._mesh.traffic, self._callbacks.is_stopped)
        change, bound = self._relative_change, self._plan.warmup_bound
        self._adaptive_warmup = None if change is None else AdaptiveWarmup(self._mesh, change, bound)
        self._synced = -1  # the last step after which every rank had the whole latents
        self._pipefusion.begin_generation(schedule, generation)
        self._callbacks.on_loop_begin(len(timesteps))
        return generation

    def _rehearse(self, timesteps: Sequence[Tensor]) -> Iterator[Tensor]:
        """Iterations before the first step: see `rehearsal.py`. Without one the pipeline calls no model in its loop."""
        now, self._streams = self.generation, []  # each is added when it is first stepped
        rehearsal = Rehearsal(now, self._streams, type(self._pipe).__name__, self._other_models)
        steps = self._schedule.steps if self._changes_calls else 1
        patches = self._plan.num_patches if self._has_partial_latents else 0
        # Which model is called in a step may depend on its timestep.
        times = tuple(map(float, timesteps)) if self._changes_calls else None
        shapes = self.call_shapes, now.shares.warmup_split, now.schedule.has_stale_steps, times
        known, references = self._rehearsed_calls.list_calls(shapes), self._plan.references is not None
        calls = rehearsal.iterate_calls(timesteps, steps, patches, known, references=references)
        yield from self._drive_dry_iterations(calls)
        if not self._streams:
            return
        self._rehearsed_calls.note_call(rehearsal.describe_findings())
        if self._serial_plan is not None and self._schedule.warmup_group_size and now.shares.warmup_split is None:
            self._schedule = Schedule.from_plan(self._serial_plan, self._schedule.steps)
        if not self._has_partial_latents:
            for each in self._streams:
                each.restore_step_index()
        again = self._schedule.again | now.findings.changed_steps
        self._schedule = replace(self._schedule, again=again, num_references=now.findings.num_references)
        if self._has_partial_latents:
            adaptive, rows_differ = self._schedule.adaptive, now.findings.have_unlike_rows()
            for each in self._streams:
                each.end_rehearsal(
                    self._plan.num_patches, now.findings.num_references, adaptive=adaptive, rows_differ=rows_differ
                )
            now.pieces = [each.pieces for each in self._streams]
            uneven = any(sum(not piece.is_empty for piece in each) != 1 for each in zip(*now.pieces, strict=True))
            self._schedule = replace(self._schedule, uneven_latents=uneven)
        if now.findings.reads_latents_everywhere:
            self._schedule = replace(self._schedule, shares_latents=True)
            self._pipefusion.share_latents(self._batch.view_own_images(self._streams[0].sample).device)

    def _drive_dry_iterations(self, calls: Iterator[Tensor]) -> Iterator[Tensor]:
        """Iterations in which nothing is computed, each until the pipeline has stepped the scheduler."""
        for timestep in calls:
            self._begin_iteration(timestep)
            yield timestep
            while self._note_interrupt() and not (self._streams and self._is_stepped):
                yield timestep

    def _begin_iteration(self, timestep: Tensor) -> None:
        self._timestep = timestep
        self._callbacks.progress()
        self._other_models.begin_iteration()

    def _begin_step(self, step: int) -> None:
        """Starts to agree on stopping; what was agreed in the step before says whether the next step runs.

        With warmup=auto the ranks of an image agree on changes too, which say whether this step is synchronous.
        """
        if self._agreement.begin_step() and step + 1 < self._schedule.steps:
            self._schedule = replace(self._schedule, steps=step + 1)
        if (
            self._adaptive_warmup is not None
            and self._adaptive_warmup.decide_synchronous_step(step)
            and step >= self._schedule.warmup
        ):
            self._schedule = replace(self._schedule, again=self._schedule.again | {step})
        self.generation.schedule = self._schedule
        self._pipefusion.prepare_step(step, self._schedule)

    def _run_micro_step(self, micro: MicroStep, timestep: Tensor) -> Iterator[Tensor]:
        """One micro-step: yields until the pipeline has stepped the scheduler."""
        self.generation.enter_micro_step(micro)
        self._begin_iteration(timestep)
        if self._schedule.adaptive:
            self._exchange_latents(micro)
        for each in self._streams:
            each.is_stepped = False
        while not self._is_stepped:
            yield timestep
            wanted = self._note_interrupt()
            if not self._is_stepped and not wanted:
                if micro == next(iter(self._schedule.list_micro_steps(0))) and not self.generation.branch:
                    return
                raise StateError(f"{type(self._pipe).__name__} went on without stepping its scheduler at {micro}")

    @property
    def _is_stepped(self) -> bool:
        """Whether all schedulers were stepped in the micro-step at hand."""
        return all(map(operator.attrgetter("is_stepped"), self._streams))

    def _exchange_latents(self, micro: MicroStep) -> None:
        """What goes between stages before the model is called in a micro-step: the latents of the step before.

        It is not known in advance which micro-step follows where warmup decides by itself.
        """
        for each in self._streams:
            each.release_patches(self._schedule.list_patches(micro))
        fusion, write = self._pipefusion, self._synced != micro.step - 1
        if fusion.takes_latents:
            fusion.bring_latents(self._list_own_latents(), micro, is_news=write)
            if fusion.stage == 0:
                return
        ops, warmup_group = list(self._schedule.iter_ops_before_call(fusion.stage, micro)), fusion.warmup_group
        own = self._list_own_latents() if ops else []
        for op in ops:
            for latents in own:
                if op.kind is OpKind.SEND_WHOLE_LATENTS and warmup_group is not None:
                    warmup_group.send_whole_latents(latents, op)
                elif op.kind is OpKind.RECEIVE_WHOLE_LATENTS and warmup_group is not None:
                    whole = warmup_group.receive_whole_latents(latents)
                    if write:
                        latents.copy_(whole)

    def _list_own_latents(self) -> list[Tensor]:
        return [self._batch.view_own_images(each.latents) for each in self._streams if each.latents is not None]

    def _note_interrupt(self) -> bool:
        """Holds back `pipe._interrupt` until all ranks agree on the step."""
        if not getattr(self._pipe, "_interrupt", False):
            return False
        self._pipe._interrupt = False
        self._agreement.ends_early = True
        return True

    def _finish_generation(self, *, stopped: bool) -> None:
        gives_up = self._agreement.wait_for_wishes()
        if self._adaptive_warmup is not None:
            self._adaptive_warmup.wait_for_sums()
        # Other pipelines would never set it back, and end the next call too.
        if stopped and not gives_up and hasattr(type(self._pipe), "interrupt"):
            self._pipe._interrupt = True
        self._pipefusion.end_generation(clean=True)
        if not stopped:
            self._rehearsed_calls.keep_noted_call()
        self.generation.become(Generation())
        self._other_models.forget_results()
        for done in self.when_over:
            done()
        self._batch.end_generation()
        self._agreement.check_outcome(self._schedule.steps)

    # The scheduler

    def _find_stream(self, scheduler: Any) -> SteppedLatents | None:
        """What a scheduler steps; None where its own method will do: outside of the loop, or where all have all of it.

        Raises:
            StateError: if the pipeline's own scheduler is stepped outside of the loop, or another one only now.
        """
        if scheduler is self._scheduler:
            self.generation.check_under_way()
            stream = self._main
        elif not self.generation.is_under_way or not (self._has_partial_latents or self._mesh["data"].num_ranks > 1):
            return None
        else:
            stream = next((each for each in self._streams if each.scheduler is scheduler), None)
        stream = stream or SteppedLatents(scheduler, type(self._pipe).__name__)
        if stream not in self._streams:
            if self._has_partial_latents and self.generation.dry.patch != 0:
                raise StateError(
                    f"{type(self._pipe).__name__} steps a scheduler that it did not step before, so what that steps "
                    "cannot be cut into patches; use a plan without pipefusion and patches"
                )
            self._streams.append(stream)
        return stream

    def _scale_model_input(
        self, scheduler: Any, stock: Callable[..., Tensor], sample: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        timestep = args[0] if args else kwargs.get("timestep")
        if scheduler is self._scheduler:
            self.generation.check_under_way()
        stream = next((each for each in (self._main, *self._streams) if each and each.scheduler is scheduler), None)
        # Where latents are whole, the scheduler itself is stepped.
        if stream is None or not (self._has_partial_latents or self.generation.is_dry):
            return stock(sample, *args, **kwargs)
        patches = self._schedule.list_patches(self.generation.micro_step) if self._is_stepping_rank else range(1)
        stepped = stream.select_stepped_patches(patches) if self._is_stepping_rank else patches
        return self._get_copies(stream).scale_sample(sample, timestep, stepped, read=self._pipefusion.reads_latents)

    def _step_scheduler(self, scheduler: Any, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        stream = self._find_stream(scheduler)
        if stream is None:
            return stock(*args, **kwargs)
        call = stream.signature.bind(args, kwargs)
        if self.generation.is_dry:
            return self._note_dry_step(stream, call)
        if stream is self._main:
            self._batch.check_prediction(call.prediction, call.sample)
        # A user's own code may compute with all images of the batch.
        if stream.is_custom and self._gathers_predictions:
            call = replace(call, prediction=self._batch.gather_latents(call.prediction))
        if not self._has_partial_latents:
            return self._step_whole_latents(stream, stock, call)
        now = self.generation
        # A pipeline may step a first time to see the picture without noise, and count back.
        is_again = stream.is_stepped
        stream.copy_new_latents(call.sample, now, synced=self._synced)
        make_step = self._step_patches if self._is_stepping_rank else self._step_on_corner
        result = make_step(stream, call)
        stream.is_stepped = True
        if self._is_stepped:
            self._send_stepped_patches(now.micro_step)
        if self._schedule.is_last_of_step(now.micro_step):
            self._get_copies(stream).sync_step_index(scheduler)
            self._end_step(stream, now.micro_step.step, call.timestep, is_again=is_again)
        # Already now, so that what the pipeline makes of the latents that it is given has all that is to come. Messages
        # have one order whatever a micro-step brings: what is sent waits for all streams, and all is received at once.
        following = self._schedule.find_following(now.micro_step)
        is_due = self._is_stepped if self._pipefusion.is_last_stage else stream is self._streams[0]
        if following is not None and not self._schedule.adaptive:
            stream.release_patches(self._schedule.list_patches(following))
            if is_due:
                self._exchange_latents(following)
        if stream is self._main and not is_again:
            now.end_micro_step()
        return replace_latents(result, stream.hand_on(is_dry=False), _stand_for_extras)

    def _step_whole_latents(self, stream: SteppedLatents, stock: Callable[..., Any], call: StepCall) -> Any:
        """Steps all of the latents by the scheduler itself, or by what the user has in place of its method."""
        now = self.generation
        step = now.micro_step.step
        is_again = stream.is_stepped
        drives = stream is self._main
        driving = self._scheduler.timesteps
        # A scheduler that iterates its timesteps would drive the loop.
        if drives:
            self._scheduler.timesteps = self._plain
        try:
            with self._trace.record_span("step", step, 0):
                result = call.make(stock, call.prediction, call.sample, call.others)
        finally:
            if drives and self._scheduler.timesteps is self._plain:
                self._scheduler.timesteps = driving
        stream.latents = extract_sample(result)
        stream.is_stepped = True
        if self._relative_change is not None and self._is_stepping_rank:
            self._relative_change.record_change(
                ("latents", 0, 0), *map(self._batch.view_own_images, (stream.latents, call.sample))
            )
        self._end_step(stream, step, call.timestep, is_again=is_again)
        if drives and not is_again:
            now.end_micro_step()
        if self._mesh["data"].num_ranks == 1:
            return result
        whole = functools.partial(self._complete_step_extras, is_last=step == self._schedule.steps - 1)
        return replace_latents(result, stream.latents, whole)

    def _note_dry_step(self, stream: SteppedLatents, call: StepCall) -> Any:
        """Where NaN came out are the latents of a patch that is rehearsed; the latents stay as they are."""
        if self.generation.dry.blended_step is None:
            stream.note_rehearsal(call.prediction, call.sample, is_cut=self._has_partial_latents)
        # Each rehearsal is a first step, before which nothing was made besides latents.
        first = {place: None if isinstance(value, PatchExtra) else value for place, value in call.others.items()}
        zeros = replace(call, prediction=torch.zeros_like(call.prediction), others=first)
        result = self._get_copies(stream).step_on_corner(zeros, call.sample, closes=False)
        # The pipeline may count it back, or ask for the noise of the next step.
        if self.generation.dry.blended_step is None:
            stream.set_step_index(self.generation.micro_step.step + 1)
        else:
            stream.note_blend(call.sample, self.generation.dry.blended_step)
        if stream is self._main:
            self.generation.branch = 0
        whole = _stand_for_extras if self._has_partial_latents else list
        return replace_latents(result, stream.hand_on(is_dry=True), whole)

    def _complete_step_extras(self, extras: Sequence[Any], *, is_last: bool) -> list[Any]:
        """What a step made besides latents: of all images after the last step, of this replica's images before."""
        return [self._batch.gather_latents(one) if is_last and isinstance(one, Tensor) else one for one in extras]

    def _step_patches(self, stream: SteppedLatents, call: StepCall) -> Any:
        now, copies = self.generation, self._get_copies(stream)
        assert stream.latents is not None
        result: Any = None
        stream.stepped_patches.clear()
        for patch in self._schedule.list_patches(now.micro_step):
            piece = stream.pieces[patch]
            if piece.is_empty:  # such as a sound in any patch but the first
                copies.skip_patch(call, stream.latents.device)
                continue
            with self._trace.record_span("step", now.micro_step.step, patch):
                stepped, result = copies.step_patch(patch, call, stream.sample, piece)
                self._record_change(stream, stepped, piece)
            stream.stepped_patches[patch] = stream.held_patches[patch] = stepped
        if self._schedule.patches == 1:
            stream.release_patches(range(1))
        if result is None:
            result = copies.step_on_corner(call, stream.latents, closes=False)
        return result

    def _send_stepped_patches(self, micro: MicroStep) -> None:
        """Sends the patches of a micro-step to the stages that read latents, patch after patch."""
        if not self._is_stepping_rank:
            return
        for op in self._schedule.iter_ops_after_call(self._pipefusion.stage, micro):
            for stream in self._streams:
                patch = None if op.patch is None else stream.stepped_patches.get(op.patch)
                if op.kind is OpKind.SEND_STEPPED_PATCH and patch is not None and op.peer is not None:
                    self._pipefusion.send_stepped_patch(self._batch.view_own_images(patch), op.peer)
        for stream in self._streams:
            stream.stepped_patches.clear()

    @property
    def _rehearses_changes(self) -> bool:
        """Whether no latents are cut, and keys are stale where nothing changed all the same."""
        return (self._changes_calls or self._plan.references is not None) and self._plan.distrifusion > 1

    @property
    def _changes_calls(self) -> bool:
        """Whether the pipeline may call its models otherwise in some steps."""
        return self._may_change or self.has_timed_guidance

    def _step_on_corner(self, stream: SteppedLatents, call: StepCall) -> Any:
        assert stream.latents is not None
        closes = self._schedule.is_last_of_step(self.generation.micro_step)
        result = self._get_copies(stream).step_on_corner(call, stream.latents, closes=closes)
        stepped = extract_sample(result)
        # A user's own scheduler was given all of them.
        if stream.is_custom and stepped.shape != stream.latents.shape:
            raise_changed_size(stream.scheduler, stream.latents, stepped)
        stream.latents = stream.latents.to(stepped.dtype)
        return result

    def _record_change(self, stream: SteppedLatents, patch: Tensor, piece: Piece) -> None:
        assert stream.latents is not None
        if patch.dtype != stream.latents.dtype:
            stream.latents = stream.latents.to(patch.dtype)
        before = piece.take(stream.latents)
        if self._relative_change is not None:
            self._relative_change.record_change(
                ("latents", 0, 0), self._batch.view_own_images(patch), self._batch.view_own_images(before)
            )

    def _end_step(self, stream: SteppedLatents, step: int, timestep: Any, *, is_again: bool) -> None:
        """The end of a step: the whole latents go to every rank where they are wanted, and after the last step."""
        assert stream.latents is not None
        last = step == self._schedule.steps - 1
        if self._is_stepping_rank:
            fresh = [stream.latents, *stream.held_patches.values()]
            self._agreement.note_latents(step, map(self._batch.view_own_images, fresh))
        wanted = self._callbacks.wants_latents(step)
        if last or wanted:
            stream.release_patches(range(self._schedule.patches))
        self._synced = step if wanted else self._synced
        # Over the replicas first, so that the broadcast along the stages carries all images.
        if (last or wanted) and self._pipefusion.is_last_stage:
            stream.latents = self._batch.gather_latents(stream.latents)
        stages = self._mesh["pipefusion"]
        if (last or wanted) and stages.group is not None:
            kind = "result" if last else "callback"
            stream.latents = broadcast_tensor(
                stream.latents, stages.num_ranks - 1, stages.group, self._mesh.traffic, kind
            )
        if stream is self._main and not is_again:
            self._callbacks.on_step_end(step, timestep, stream.latents)

    def _get_copies(self, stream: SteppedLatents) -> PatchSchedulers:
        patches = self._plan.num_patches if self._is_stepping_rank else 1
        timesteps = self._plain if stream is self._main else stream.scheduler.timesteps
        return stream.get_copies(patches, timesteps, len(self._timesteps))


def _stand_for_extras(extras: Sequence[Any]) -> list[Any]:
    """What stands for what a step made of a patch besides latents."""
    return [PatchExtra(index) for index in range(len(extras))]
