"""The runner: a pipeline under a plan. Every rank calls it with the pipeline's arguments, and gets the same result.

A call binds the arguments, refuses any it cannot honour exactly, checks that all ranks were called with the same
arguments and use the same random numbers, runs the pipeline, and measures.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import torch
from pydantic import InstanceOf
from torch import Tensor, nn

from ditile.cache.agreement import AgreementGroups
from ditile.distributed import cpus, env
from ditile.distributed.backend import explain_no_graphs, pick_device
from ditile.distributed.heartbeat import note_shared_call
from ditile.distributed.mesh import (
    Communicators,
    Mesh,
    build_mesh,
    check_world_unbroken,
    find_local_rank,
    is_world_broken,
)
from ditile.distributed.trace import TraceEvent, write_chrome_trace
from ditile.distributed.transport import gather_json
from ditile.model import support
from ditile.model.hooks.attention_processors import restore_processors_on_error
from ditile.model.hooks.kv_store import AgeChecks
from ditile.model.hooks.overrides import WatchedMethod, find_plain_class, override_attribute
from ditile.model.hooks.placeholders import list_quantized_parameters
from ditile.model.pipeline_calls import (
    check_call_types,
    count_most_iterations,
    describe_cut_prompts,
    describe_stale_statistics,
    explain_callback_refusal,
    explain_changed_size_refusal,
    explain_condition_refusal,
    explain_empty_call,
    explain_guider_refusal,
    explain_latent_cut,
    explain_replaced_step_refusal,
    explain_scheduler_refusal,
    find_call_owner,
    find_offload_devices,
    find_pipeline_device,
    hide_block_tracebacks,
    is_modular,
    list_call_parameters,
    read_call_values,
    read_guidance_rule,
    skip_decode_blocks,
)
from ditile.model.recording.kept_tapes import SHARE_OF_MEMORY
from ditile.model.recording.recorded_steps import NUM_PREPARING_CALLS, RecordedSteps
from ditile.model.step_memory import explain_hook_refusal
from ditile.model.support import list_unknown_models
from ditile.parallel import rng_state
from ditile.parallel.pipefusion.patch_schedulers import is_custom_scheduler
from ditile.plan import errors
from ditile.plan.cost import PlannedCall
from ditile.plan.errors import (
    DitileError,
    ModelError,
    PlanError,
    ProbeError,
    StateError,
    StoppedError,
    quote_value,
)
from ditile.plan.extras import import_lab
from ditile.plan.option_classes import CallArguments, JsonObject, check_value, checked
from ditile.plan.plan import Facts, Plan, suggest_whole_images
from ditile.plan.shape import CallFamily, Shape, count_images, fill_call_defaults
from ditile.runner import digest
from ditile.runner.callbacks import NOBODY, StepEndCallbacks, StepWatch
from ditile.runner.compose import (
    Composition,
    CompositionOptions,
    check_pipeline,
    compose_strategies,
    find_loop_models,
    move_pipeline,
)
from ditile.runner.graph_segments import GraphSegments, has_room_to_capture
from ditile.runner.report import CallMeter, Report
from ditile.runner.siblings import build_sibling_pipeline, share_settings
from ditile.runner.table import describe_derived_model, describe_plan
from ditile.runner.user_code import describe_own_rows, explain_code_refusal

LOG = logging.getLogger("ditile")
Result = TypeVar("Result")


class Runner:
    """A pipeline under a plan. Call it as the pipeline is called.

    Attributes:
        pipe: the pipeline. Between calls it may be used for anything that does not run its transformer. Load LoRAs with
            `ditile.load_lora`: peft raises on a stage that lacks a block of the LoRA.
        plan: how the pipeline is divided.
        mesh: this rank, its place on each axis, and the process groups of the axes.
        devices: the device of each rank.
        trace: whether the next call records a trace.
        report: the measurements of the last call on this rank; None before the first.
    """

    def __init__(
        self,
        pipe: Any,
        plan: Plan,
        mesh: Mesh,
        device: torch.device,
        compose: Callable[[], Composition],
        *,
        keep_weights: bool,
        deferred: bool = False,
        advised: set[str | None] | None = None,
    ) -> None:
        """Divide the pipeline. A deferred runner derives its models and divides them in its first call.

        Args:
            advised: the lines of advice that were logged already; this runner adds its own.
        """
        self.pipe = pipe
        self.plan = plan
        self.mesh = mesh
        self.trace = False
        self.report: Report | None = None
        self._compose = compose
        self._composition: Composition | None = None
        self._keep_weights = keep_weights
        # Read the device first: dividing the pipeline moves it.
        self._origin = find_pipeline_device(pipe)
        self._restored = False
        # Each call has its own event, so a late stop does not reach the next call.
        self._stop_event: threading.Event | None = None
        self._advised = set() if advised is None else advised
        self._agreement_groups: AgreementGroups | None = None
        # Keep only the shape of the last call: its arguments would keep images and embeddings in memory.
        self._last_shape: Shape | None = None
        # Keep the original classes: enable_cache may later replace a class by one whose call uses this runner.
        self._pipes: dict[tuple[str, str], tuple[Any, type]] = {}
        if not deferred:
            self._divide()
        self.devices: list[str] = gather_json(str(device), mesh.everyone)
        # Use the plain class: `enable_cache` may have replaced it by a class that calls a runner.
        self._use_pipeline(pipe, find_plain_class(pipe))

    def _divide(self) -> None:
        """Divide the pipeline, and note the state of its weights for `restore`."""
        composition = self._compose()
        self._composition = composition
        self.plan = composition.plan
        self._weights = self._describe_weights()
        num_parameters = sum(parameter.numel() for parameter in composition.model.parameters())
        self._parameter_counts = gather_json(num_parameters, self.mesh.everyone)

    @property
    def _parts(self) -> Composition:
        """Return the strategies of the plan. Raises `StateError` before the first call of a deferred runner."""
        if self._composition is None:
            raise StateError(
                f"{type(self.pipe).__name__} is divided at its first call, from whose arguments its model is derived; "
                "call the runner first, or give parallelize the arguments of a call, as example=dict(...)"
            )
        return self._composition

    def _use_pipeline(self, pipe: Any, pipeline_class: type) -> None:
        """Run a pipeline in all later calls, by the `__call__` of a class."""
        self.pipe = pipe
        self._pipeline_class = pipeline_class
        self._pipes[pipeline_class.__module__, pipeline_class.__name__] = (pipe, pipeline_class)
        self._signature = inspect.signature(pipeline_class.__call__.__get__(pipe))
        self._parameters = list_call_parameters(pipe)
        self._kwargs_name = ""
        for parameter in self._signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                self._kwargs_name = parameter.name

    @note_shared_call()
    def __call__(
        self,
        *args: Any,
        output: Any = None,
        output_on: Literal["all", "first"] = "all",
        watch: StepWatch = NOBODY,
        **kwargs: Any,
    ) -> Any:
        """Run the pipeline, with the arguments and the result of `pipe(...)`.

        Args:
            output: as in `pipe(..., output=...)` for a modular pipeline; for others it is another name for `output_on`.
            output_on: "all" gives every rank the result; "first" decodes only on rank 0, and the others get None.
            watch: its functions are called at the ends of steps and for `decode`; they do not change the image.

        Raises:
            ModelError: if an argument cannot be honoured exactly, or latents or images become NaN or infinite.
            PlanError: if the plan does not fit the size of the image, the number of images or the guidance.
            StateError: if the runner was restored or is running, the pipeline's model was replaced, an earlier call on
                several ranks failed in the middle of an image, or the ranks were called with different arguments.
            StoppedError: on every rank, if `stop` ended the call.
        """
        if self._restored:
            raise StateError("this runner was restored; call ditile.parallelize again")
        if self._stop_event is not None:
            raise StateError("this runner is in the middle of a call; one at a time")
        check_world_unbroken()
        # Set the event before models are derived: that takes seconds, and `stop` must reach this call too.
        self._stop_event = threading.Event()
        try:
            if self._composition is None:
                self._derive_and_divide(args, kwargs)
            output_name = "output_on"
            # In modular pipelines `output` has another meaning.
            if output is not None and is_modular(self.pipe):
                kwargs["output"] = output
            elif output is not None:
                output_name = "output"
                output_on = output
            # Sort the steps, so that all ranks compare the same text.
            options = {"output_on": output_on, "latents_at": sorted(getattr(watch, "latents_at", ())) or None}
            call = self._agree_on_call(args, kwargs, output_name, options, watch)
            self._check_call_fits_plan(call)
            try:
                return self._run_pipeline(call, output_on, watch)
            except StoppedError:  # all ranks end after the same step
                raise
            except BaseException:
                # Messages may still be on their way.
                if self.mesh.world > 1:
                    self.mesh.groups.note_failed_call(has_begun=self._parts.pipefusion.broken)
                raise
        finally:
            self._stop_event = None

    def stop(self) -> None:
        """End the current call without an image. One rank is enough, and any thread may do it.

        The call raises `StoppedError` on every rank, at most two steps later, and decodes nothing. The next call is not
        affected. A stop while an image is decoded comes too late: the call returns it. A stop while there is no call
        does nothing.
        """
        # The call may end meanwhile and clear the attribute.
        event = self._stop_event
        if event is not None:
            event.set()

    @property
    def num_preparing_steps(self) -> int:
        """Return how many steps of an image run as code before later steps are played; 0 if nothing is recorded."""
        parts = self._composition
        if parts is None or parts.recorder is None:
            return 0
        return NUM_PREPARING_CALLS

    @property
    def is_running(self) -> bool:
        """Return whether a call is running."""
        return self._stop_event is not None

    @property
    def is_broken(self) -> bool:
        """Return whether a call under NCCL raised in the middle of an image. All ranks must be started again then."""
        return is_world_broken()

    @checked()
    def switch_pipeline(self, kind: type[Any]) -> Any:
        """Run another class of pipelines on the divided model from now on, such as its image-to-image pipeline.

        All ranks must switch to the same class, between calls. The new pipeline has the current components of the old
        one; plan, weights, LoRAs and caches stay. `pipe` is then the new pipeline, and switching back returns the first
        one.

        Args:
            kind: a pipeline class of diffusers, or the first pipeline's class.

        Returns:
            The new pipeline, which is now `pipe`.

        Raises:
            ModelError: if the class needs other components, calls other models, or cannot be divided.
            PlanError: if the plan does not fit the class.
            StateError: if a call is running, or the runner was restored.
        """
        if self._restored:
            raise StateError("this runner was restored; switch its pipeline between calls")
        if self.is_running:
            raise StateError("this runner is in the middle of a call; switch its pipeline between calls")
        components: CallArguments = {}
        # The current pipeline comes last, because its components are the newest.
        for pipe in (*(pipe for pipe, _ in self._pipes.values()), self.pipe):
            # A pipeline class may take only some of the components.
            components |= pipe.components
        key = (getattr(kind, "__module__", ""), getattr(kind, "__name__", ""))
        pipeline_class: type = kind
        if key in self._pipes:
            pipe, pipeline_class = self._pipes[key]
            if pipe is not self.pipe:
                share_settings(self.pipe, pipe, components)
        else:
            pipe = build_sibling_pipeline(kind, self.pipe, components)
            support.check_plan_fits_loop(pipe, self.plan)
            self._parts.guard_pipeline(pipe)
        self._composition = replace(self._parts, pipe=pipe)
        self._last_shape = None
        self._use_pipeline(pipe, pipeline_class)
        return self.pipe

    def forget_recorded_steps(self) -> None:
        """Free the memory of recorded steps, between calls. Later calls record again.

        Raises:
            StateError: if a call is running.
        """
        if self.is_running:
            raise StateError("this runner is in the middle of a call; forget its recorded steps when the call is over")
        if self._composition is not None and self._composition.recorder is not None:
            self._composition.recorder.reset()

    def restore(self) -> None:
        """Restore the pipeline to its state before `parallelize`, bit for bit.

        Raises:
            StateError: if a call is running, the weights of other stages or the text encoders were freed, LoRAs were
                loaded, scaled or fused since, or the model was quantized or converted.
        """
        if self._restored:
            return
        if self.is_running:
            raise StateError("this runner is in the middle of a call; restore it when the call is over")
        if self._composition is not None:
            self._check_restorable()
            # All weights come back before the move, so that they are moved too.
            self._parts.sharded.restore_whole_weights()
            self._parts.block_hooks.restore_blocks()
            self._parts.encoders.refill_foreign_parts()
            self._parts.guards.close()
            self._parts.release_recordings()
            for pipe, _ in self._pipes.values():
                move_pipeline(pipe, self._origin)
        self.mesh.close_groups()
        self._restored = True

    def _check_restorable(self) -> None:
        """Check that the weights can be restored. Raises `StateError` if some were freed or changed."""
        if self._parts.encoders.has_freed_encoders:
            raise StateError("the text encoders were freed; reload the pipeline, or use text_after='offload'")
        if not self.plan.divides_weights:
            return
        if not self._keep_weights:
            raise StateError(
                "the weights of the other stages were freed; reload the pipeline, or use keep_weights=True"
            )
        state = self._describe_weights()
        # LoRAs come first: they rename parameters, and the error should name the LoRA.
        for name in sorted(state | self._weights, key=lambda name: "LoRA" not in name):
            before = self._weights.get(name)
            if state.get(name) != before:
                raise StateError(
                    f"{name} changed from {before} to {state.get(name)} since parallelize, but not in the blocks that "
                    "were kept aside; set it back to what it was, or reload the pipeline"
                )

    @note_shared_call()
    def reports(self) -> list[JsonObject]:
        """Return the reports of all ranks as JSON types, in rank order. All ranks must call it.

        Raises:
            StateError: before the first call.
        """
        if self.report is None:
            raise StateError("there is no report before the first call")
        return gather_json(self.report.to_dict(), self.mesh.everyone)

    @note_shared_call()
    @checked()
    def write_trace(self, path: str | Path) -> None:
        """Write the trace of the last call as Chrome trace JSON, on rank 0. All ranks must call it.

        Raises:
            StateError: if the last call recorded no trace.
        """
        trace = self._parts.trace
        events = None
        if self.trace:
            events = trace.list_events() + trace.list_waits()
        # A rank without a trace takes part too, because the others wait for it.
        everyone = gather_json(events, self.mesh.everyone)
        if None in everyone:
            untraced = everyone.index(None)
            raise StateError(f"no trace was recorded on rank {untraced}; set runner.trace = True before the call")
        if self.mesh.rank == 0:
            write_chrome_trace(path, [list(itertools.starmap(TraceEvent, rank_events)) for rank_events in everyone])

    def job(self) -> PlannedCall | None:
        """Return the numbers of the last call, or of a default call before the first; None without a `CallFamily`."""
        parts = self._composition
        if parts is None or parts.family is None:
            return None
        shape = self._last_shape or self._build_call_shape({}, parts.family)
        if self.report is not None and self.report.text_tokens is not None:
            shape = replace(shape, text=self.report.text_tokens)
        return PlannedCall(
            plan=self.plan,
            family=parts.family,
            shape=shape,
            weights=parts.weights,
            stages=parts.stages,
        )

    def __str__(self) -> str:
        """Format `job` as a table: each rank's device, place, blocks, tokens, parameters, keys and bytes per step."""
        if self._composition is None:
            return f"{self!r}; it is divided at its first call"
        name = type(self.pipe).__name__
        job = self.job()
        if job is not None:
            return describe_plan(name, job, self.devices, self._parameter_counts)
        model = type(self._parts.model).__name__
        return describe_derived_model(name, model, self.plan, self.devices, self._parameter_counts, self._parts.stages)

    def __reduce__(self) -> NoReturn:
        """Raise `StateError`. The runner's groups and hooks belong to this process."""
        raise StateError(
            "a runner cannot be copied or pickled; copy its pipeline before parallelize, and divide the copy"
        )

    def __repr__(self) -> str:
        """Format the pipeline, the plan and this rank on one line."""
        rank = f"rank {self.mesh.rank} of {self.plan.world} on {self.devices[self.mesh.rank]}"
        return f"<Runner of {type(self.pipe).__name__}: {self.plan}; {rank}>"

    def _derive_and_divide(self, args: tuple[Any, ...], kwargs: CallArguments) -> None:
        """Derive unknown models from the arguments of the first call, and divide the pipeline.

        Raises:
            ModelError: if a model cannot be derived, or fails its proof.
            StateError: if the ranks were called with different arguments.
        """

        def describe(call: CallArguments) -> JsonObject:
            return {"call": digest.describe_call(call)}

        call, _ = _agree_on_result(lambda: self._bind_arguments(args, kwargs), self.mesh, describe)
        # Another runner's call on the same groups may have failed since the mesh was made.
        if self.mesh.epoch != self.mesh.groups.epoch:
            self.mesh.renew_groups(self.plan)
        class_now = type(self.pipe)
        # `enable_cache` may have replaced the class by one that calls this runner.
        self.pipe.__class__ = self._pipeline_class
        try:
            _agree_on_result(lambda: _study_models(self.pipe, call), self.mesh)
            self._divide()
        finally:
            self.pipe.__class__ = class_now

    def _run_pipeline(self, call: CallArguments, output_on: str, watcher: StepWatch) -> Any:
        parts = self._parts
        mesh = self.mesh
        first_only = output_on == "first"
        assert self._stop_event is not None
        generators = rng_state.list_generators(call.get("generator"), parts.device)
        meter = CallMeter(parts.device, parts.trace, mesh.traffic, traced=self.trace)
        decodes = DecodeChecks(watcher.on_decode)
        # All ranks continue rank 0's generators, so this comes before any random number is used.
        rng_state.synchronise_generators(generators, 0, mesh.within_calls, mesh.traffic)
        with ExitStack() as stack:
            stack.enter_context(restore_processors_on_error(find_loop_models(self.pipe)))
            step_ends = StepEndCallbacks(self.pipe, mesh, call, parts.device, meter, self._stop_event.is_set, watcher)
            iterations = self._count_iterations(call)
            step_ends.refuses_other_guidance = self.plan.cuts_latents or self.plan.has_stale_steps(iterations)
            step_ends.decodes_alone = self.plan.vae == "whole" and self.plan.data == 1 and not generators
            callbacks = step_ends.install_callbacks(stack, call)
            agreement_groups = None
            if parts.block_caches:
                if self._agreement_groups is None:
                    self._agreement_groups = AgreementGroups.create_groups(self.plan, mesh, parts.device)
                agreement_groups = self._agreement_groups
            hide_block_tracebacks(stack)
            loop = stack.enter_context(parts.install_for_call(callbacks, call, agreement_groups, first=first_only))
            step_ends.loop = loop
            # The checks go around the strategies, so that `on_decode` gets the latents of all images, not a replica's.
            decodes.install_checks(stack, self.pipe)
            # A whole VAE decodes on the first rank of each replica; otherwise every rank decodes its rows.
            if first_only and mesh.image.index != 0 and self.plan.vae == "whole":
                if is_modular(self.pipe):
                    skip_decode_blocks(stack, self.pipe)
                else:
                    call["output_type"] = "latent"
            result = loop.make_count_steps(stack, self._pipeline_class.__call__)(self.pipe, **call)
        # Other ranks may have used fewer random numbers; the last stage of the first replica used the same number as
        # the undivided pipeline.
        last_stage = mesh.image.num_ranks - 1
        rng_state.synchronise_generators(generators, last_stage, mesh.within_calls, mesh.traffic)
        decoding_group = None if step_ends.decodes_alone else mesh.within_calls
        for complaint in gather_json(decodes.complaint, decoding_group):
            if complaint is not None:
                raise DecodeError(complaint)
        kept_bytes = sum(cache.kept_bytes for cache in parts.model_caches)
        recorded = None
        if parts.recorder is not None:
            recorded = parts.recorder.summarize_generation()
        self.report = meter.build_report(*loop.taken_warmup, kept_bytes, recorded)
        if first_only and mesh.rank != 0:
            return None
        return result

    def _agree_on_call(
        self,
        args: tuple[Any, ...],
        kwargs: CallArguments,
        output_name: str,
        options: CallArguments,
        watch: StepWatch,
    ) -> CallArguments:
        """Return the arguments by name. Raises on all ranks if one refuses the call, or the ranks' arguments differ."""
        parts = self._parts
        may_record = parts.prepare_recorder(traced=self.trace)
        bind = functools.partial(self._bind_call, args, kwargs, output_name, options["output_on"], watch)
        if self.mesh.everyone is None:
            return bind()

        def describe(call: CallArguments) -> JsonObject:
            # The class comes first, because the error names the first difference.
            described = digest.describe_call({"pipeline": self._pipeline_class.__name__} | call | options)
            described |= digest.describe_state(self.pipe, parts.device)
            described["cache"] = []
            for cache in parts.model_caches:
                described["cache"] += [context.settings for context in cache.contexts]
            return {
                "call": described,
                "loras": digest.describe_loras(self.pipe.components),
                "cannot_stream": parts.serial_plan is not None and parts.explain_streaming_refusal() is not None,
                "may_record": may_record,
            }

        call, everyone = _agree_on_result(bind, self.mesh, describe)
        # One stage with LoRAs or changed weights is enough to prevent weight streaming.
        parts.loop.lets_group_rest = any(rank["cannot_stream"] for rank in everyone)
        # If one rank gathers a mask in a recorded call, all ranks must gather it.
        parts.attention.records = any(rank["may_record"] for rank in everyone)
        if self.mesh.epoch != self.mesh.groups.epoch:
            parts.renew_groups()
            self._agreement_groups = None
        return call

    def _bind_arguments(self, args: tuple[Any, ...], kwargs: CallArguments) -> CallArguments:
        """Return the arguments of the pipeline's call by name."""
        try:
            call: CallArguments = dict(self._signature.bind(*args, **kwargs).arguments)
        except TypeError as error:
            raise ModelError(f"{self._pipeline_class.__name__}: {error}") from None
        keyword_arguments: CallArguments = call.pop(self._kwargs_name, {})
        return call | keyword_arguments

    def _bind_call(
        self, args: tuple[Any, ...], kwargs: CallArguments, output_name: str, output_on: Any, watch: Any
    ) -> CallArguments:
        """Return the arguments by name. Raises for a fault that this rank can see by itself."""
        if not any(model is self._parts.model for model in find_loop_models(self.pipe)):
            raise StateError("the pipeline has another model than was divided; put that back, or parallelize it again")
        if output_on not in ("all", "first"):
            raise ModelError(f"{output_name}={quote_value(output_on)} is not known; try 'all' or 'first'")
        check_value(InstanceOf[StepWatch], watch, "watch")
        call = self._bind_arguments(args, kwargs)
        check_call_types(call)
        reason = explain_empty_call(read_call_values(call))
        if reason is None and not self._parts.trusts_code:
            iterations = self._count_iterations(call)
            reason = explain_code_refusal(self._parts.list_divided_parts(), self.plan, iterations)
        if reason:
            raise ModelError(reason)
        self._advise_once(describe_own_rows(self._parts.model, self.plan))
        if self.mesh.rank == 0:
            self._advise_once(describe_cut_prompts(self.pipe, read_call_values(call)))
        # A rank that runs the whole model on whole images honours all calls.
        if not self._parts.calls_whole_model:
            self._check_call(call)
        return call

    def _count_iterations(self, call: CallArguments) -> int | None:
        """Return the maximum number of steps in a call; None if it is not known."""
        steps = self._fill_defaults(call).get("num_inference_steps")
        return count_most_iterations(self.pipe, call, steps if isinstance(steps, int) else None)

    def _check_call(self, call: CallArguments) -> None:
        """Check that this rank can run a call exactly. Raises `ModelError` otherwise."""
        filled = self._fill_defaults(call)
        iterations = self._count_iterations(call)
        plan = self.plan
        is_partial = plan.attends_to_stale_keys or plan.pipefusion > 1
        # Without patches or stale steps, all parts of a prediction are of the same step.
        is_fresh = not is_partial or plan.num_patches == 1 or not plan.has_stale_steps(iterations)
        has_blocks = bool(self._parts.block_hooks.chain)
        reasons = [
            explain_hook_refusal(find_loop_models(self.pipe), plan, filled.get("num_inference_steps")),
            explain_guider_refusal(self.pipe, partial=is_partial, fresh=is_fresh, trusts_code=self._parts.trusts_code),
            explain_condition_refusal(self.pipe, call),
        ]
        if is_partial:
            reasons.append(explain_latent_cut(self._pipeline_class, filled))
        # Without known blocks every rank steps whole images.
        if has_blocks and plan.num_patches > 1:
            reasons.append(explain_scheduler_refusal(self.pipe))
        if plan.cuts_latents:
            reasons += [explain_replaced_step_refusal(self.pipe), self._explain_idle_replica(filled)]
        if plan.cuts_latents or plan.has_stale_steps(iterations):
            reasons.append(explain_changed_size_refusal(self.pipe))
            reasons.append(explain_callback_refusal(self.pipe, filled, iterations))
        reasons.append(self._parts.find_refusal_reason())
        for reason in filter(None, reasons):
            raise ModelError(reason)
        if has_blocks and not is_fresh:
            self._advise_once(describe_stale_statistics(self.pipe, filled))

    def _explain_idle_replica(self, call: CallArguments) -> str | None:
        """Return why a replica without images cannot step the images of other replicas, or None."""
        images = count_images(read_call_values(call))
        scheduler = self.pipe.scheduler
        if self.plan.data <= images or not is_custom_scheduler(scheduler):
            return None
        return (
            f"{type(scheduler).__name__} is not diffusers' own code and may compute with all images of a call, which "
            f"replicas without images do not gather: data={self.plan.data} is more than the {images} image(s) of this "
            f"call; use data={images}, or {suggest_whole_images()}"
        )

    def _fill_defaults(self, call: CallArguments) -> CallArguments:
        defaults = {name: parameter.default for name, parameter in self._parameters.items()}
        return defaults | dict(call)

    def _advise_once(self, advice: str | None) -> None:
        """Log a line on the first rank, unless it was logged before."""
        if advice is not None and advice not in self._advised and self.mesh.rank == 0:
            LOG.warning(advice)
        self._advised.add(advice)

    def _describe_weights(self) -> JsonObject:
        """Describe the LoRAs and quantized weights of the divided model, and the type of each parameter."""
        described: JsonObject = digest.describe_loras({"transformer": self._parts.model})
        described["the number of quantized weights"] = len(list_quantized_parameters(self._parts.model))
        for model in self._parts.list_partial_models():
            for name, parameter in model.named_parameters():
                described[f"{type(model).__name__}.{name}"] = parameter.dtype
        return described

    def _check_call_fits_plan(self, call: CallArguments) -> None:
        """Check before anything runs that a call fits the plan. Raises `PlanError` otherwise."""
        rule = None
        if self.plan.cfg > 1:
            rule = read_guidance_rule(find_call_owner(self.pipe), getattr(self.pipe, "config", {}))
        if rule is not None:
            values = self._fill_defaults(read_call_values(call))
            reason = rule.explain_cfg_refusal(self.plan.cfg, self._pipeline_class.__name__, values)
            if reason:
                raise PlanError(reason)
        family = self._parts.family
        if family is None:
            return
        shape = self._build_call_shape(call, family)
        # Prompt embeddings may have any length, so the number of text tokens is not checked.
        facts = replace(shape.collect_facts(type(self._parts.model).__name__), text=0)
        if self._parts.calls_whole_model:
            # Each rank runs the whole model on whole images, so only the number of branches is checked.
            facts = Facts(branches=facts.branches)
        # Resolution binning changes the size that the call asks for.
        if call.get("use_resolution_binning", "use_resolution_binning" in self._parameters):
            facts = replace(facts, rows=None)
        self.plan.check(facts)
        self._last_shape = shape

    def _build_call_shape(self, call: CallArguments, family: CallFamily) -> Shape:
        model = self._parts.model
        config: Any = model.config
        scale = self.pipe.vae_scale_factor
        # Weights quantized in blocks are bytes; the other parameters have the type of the activations.
        plain_parameter = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
        element_size = plain_parameter.element_size()
        arguments = fill_call_defaults(self._parameters, config, scale, read_call_values(call))
        return Shape.from_call(family, config, scale, element_size, arguments)


def _agree_on_result(
    run: Callable[[], Result], mesh: Mesh, describe: Callable[[Result], JsonObject] = lambda result: {}
) -> tuple[Result, list[JsonObject]]:
    """Run a function, and gather a description of its result from each rank. If one rank raises, all ranks raise.

    If all ranks agree, process groups in which a call has failed on any rank are given up.

    Raises:
        StateError: if "call" or "loras" of the descriptions differ.
    """
    try:
        result = run()
        mine = {"refusal": None, "is_spoiled": mesh.groups.is_spoiled} | describe(result)
    # Tell the other ranks, which would wait for this one.
    except (DitileError, TypeError) as error:
        gather_json({"refusal": [type(error).__name__, str(error)]}, mesh.everyone)
        raise
    everyone = gather_json(mine, mesh.everyone)
    for rank, theirs in enumerate(everyone):
        if theirs["refusal"] is not None:
            name, message = theirs["refusal"]
            # The other ranks raise an exception of the same class, so that callers can catch it by its class.
            error_class = getattr(errors, name, None)
            if error_class is None:
                raise StateError(f"rank {rank} raised {name}: {message}")
            raise error_class(message)
    for rank, theirs in enumerate(everyone):
        values = theirs.get("call", {})
        values_of_first = everyone[0].get("call", {})
        for name in (*values_of_first, *values):
            _check_same_value(name, rank, values.get(name), 0, values_of_first.get(name))
    # A rank has only the LoRAs of its stage, so each LoRA is compared with the first rank that has it.
    owners: dict[str, tuple[int, str]] = {}
    for rank, theirs in enumerate(everyone):
        for name, value in theirs.get("loras", {}).items():
            owner, value_of_owner = owners.setdefault(name, (rank, value))
            _check_same_value(name, rank, value, owner, value_of_owner)
    # Messages of a failed call may still be under way in the old groups.
    if any(theirs["is_spoiled"] for theirs in everyone):
        mesh.groups.begin_epoch()
    return result, everyone


def _check_same_value(name: str, rank: int, value: Any, other_rank: int, other: Any) -> None:
    if value != other:
        raise StateError(
            f"rank {rank} was called with {name}={value!s:.200} and rank {other_rank} with {other!s:.200}; call all "
            "ranks alike"
        )


class DecodeError(ModelError):
    """Decoded output that is not finite, on one of the ranks."""


class DecodeChecks:
    """Checks that the decoded output of a pipeline's call is finite: NaN would become a black image.

    Args:
        on_decode: as in `StepWatch`.
    """

    def __init__(self, on_decode: Callable[..., Any] | None = None) -> None:
        self.complaint: str | None = None
        self._on_decode = on_decode

    def install_checks(self, stack: ExitStack, pipe: Any) -> None:
        """Check all decoded output, of a VAE or its substitute, until the stack is closed."""
        for name, coder in pipe.components.items():
            decode = getattr(coder, "decode", None)
            if isinstance(coder, nn.Module) and callable(decode):
                check = functools.partial(self._decode, name, type(coder).__name__)
                override_attribute(stack, coder, "decode", WatchedMethod(check, decode))

    def _decode(self, name: str, cls_name: str, decode: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._on_decode is not None:
            decode = functools.partial(self._on_decode, name, decode)
        result = decode(*args, **kwargs)
        decoded = result
        if not isinstance(result, Tensor):
            decoded = result[0]
        if isinstance(decoded, Tensor) and not decoded.isfinite().all():
            self.complaint = (
                f"{cls_name} decoded the latents into NaN or infinite values, in {decoded.dtype}; decode in float32 or "
                "bfloat16, for example by pipe.vae.to(torch.float32), or lower the guidance; if neither helps, the "
                "weights are damaged"
            )
            # The error is raised later, on all ranks; until then zeros avoid the pipeline's warnings of NaN.
            decoded.zero_()
        return result


@note_shared_call()
@checked(PlanError)
def parallelize(
    pipe: Any,
    plan: Plan | None = None,
    device: str | torch.device | None = None,
    keep_weights: bool = False,
    text_after: Literal["keep", "offload", "free"] = "keep",
    *,
    attention: str | None = None,
    compile: bool | Literal["auto"] = False,
    cuda_graphs: bool = False,
    checks: AgeChecks | None = None,
    groups: Communicators | None = None,
    example: Mapping[str, Any] | None = None,
    trust_code: bool = False,
) -> Runner:
    """Divide a diffusers pipeline over the ranks that torchrun, `ditile.launch` or the script itself started.

    Args:
        pipe: any supported diffusers pipeline, on any device; every rank passes its own.
        plan: how to divide; `Plan()` is one rank.
        device: this rank's device; by default its GPU, or the CPU without one. A GPU becomes torch's current one.
        keep_weights: keep the blocks of other stages aside, so that `Runner.restore` works.
        text_after: the state of the text encoders when denoising begins: they stay, wait on the CPU for the next call,
            or are freed for good, after which calls need prompt embeddings and `restore` refuses.
        attention: the diffusers name of the kernel for all attention that ditile computes; by default the pipeline's.
        compile: `torch.compile` the forward of each block, unless the user compiled the transformer or its blocks;
            "auto" does so on CUDA if a class of blocks makes at most 4 graphs, and otherwise logs why not.
        cuda_graphs: record calls of the model as CUDA graphs, with the messages between them, and play them in later
            steps: the host starts graphs instead of kernels. Keys and values keep their memory between calls. Calls
            that cannot be recorded run as before. No two GPUs have run it yet (docs/gpu.md). The environment
            variable DITILE_CUDA_GRAPHS=0 switches it off.
        checks: asserts and counts the ages of all keys that attention reads; by default as `DITILE_CHECK` says.
        groups: process groups shared by several runners, with only one running at a time; by default its own.
        example: the arguments of a call of the pipeline, from which an unknown transformer is derived if ditile cannot
            make arguments up, for example without a text encoder. By default the first call's arguments are used, and
            until then the pipeline is whole on every rank.
        trust_code: whether the user's hooks, forwards and processors on the models may see parts of a call: some of
            its tokens, images, branches of guidance or heads, or the blocks of one stage. By default a call with
            such code is refused under a plan that divides it.

    Raises:
        PlanError: if an argument has the wrong type, the plan does not use all ranks or does not fit the model, the
            device is not on this machine, or `cuda_graphs` does not fit the device or the plan.
        ModelError: if `pipe` is not a pipeline or cannot be divided by the plan, or the kernel is unsuitable.
        StateError: if an earlier runner cut the pipeline's weights, and was not restored. Runners of whole weights may
            share a pipeline.
        JoinError: if torchrun's ranks cannot connect to each other. After any of these errors nothing has changed.
    """
    plan = plan or Plan()
    check_pipeline(pipe)
    # Choose the GPU before groups are made: their first messages make a CUDA context on the current GPU.
    chosen = pick_device(device, find_local_rank())
    if chosen.type == "cpu":
        cpus.warn_of_spinning_threads()
    mesh = build_mesh(plan, groups, chosen)
    if checks is None and env.should_check_key_ages():
        checks = AgeChecks()
    recorder = build_recorder(cuda_graphs, plan, chosen)
    options = CompositionOptions(keep_weights, text_after, attention, compile, checks, recorder, trust_code)

    def compose() -> Composition:
        composition = compose_strategies(pipe, plan, mesh, chosen, options)
        # Connect after everything that may raise: the other ranks would wait here for a rank that raised.
        mesh.connect_groups(composition.plan, chosen)
        composition.pipefusion.connect_channels(chosen)
        return composition

    needs_anatomy = attention is not None or not plan.divides_the_batch_alone
    deferred = needs_anatomy and not _derive_models(pipe, mesh, example)
    return Runner(pipe, plan, mesh, chosen, compose, keep_weights=keep_weights, deferred=deferred)


def _study_models(pipe: Any, example: Mapping[str, Any] | None) -> None:
    """Derive and prove the anatomies of unknown models."""
    for transformer in list_unknown_models(pipe):
        LOG.info("%s is in no table of ditile: it is studied once, on a small copy", type(transformer).__name__)
    import_lab("study.prove").ensure_anatomies(pipe, build_single_runner, example)


def _derive_models(pipe: Any, mesh: Mesh, example: Mapping[str, Any] | None) -> bool:
    """Derive the unknown models of a pipeline. Returns False on every rank if that needs an example.

    Raises:
        ModelError: if a model cannot be derived, or fails its proof.
    """

    def derive() -> bool:
        try:
            _study_models(pipe, example)
        except ProbeError:
            if example is not None:
                raise
            return False
        return True

    # A rank may already know a model from a pipeline that the other ranks never divided.
    is_unknown = gather_json(bool(list_unknown_models(pipe)), mesh.everyone)
    if not any(is_unknown):
        return True
    _, everyone = _agree_on_result(derive, mesh, lambda is_derived: {"is_derived": is_derived})
    return all(rank["is_derived"] for rank in everyone)


def build_recorder(setting: bool, plan: Plan, device: torch.device) -> RecordedSteps | None:
    """Build the recorder of a model's calls as CUDA graphs; None if nothing is to be recorded.

    Raises:
        PlanError: if `setting` is True, and the device has no graphs or calls under the plan cannot be recorded.
    """
    if not setting or env.forbids_cuda_graphs():
        return None
    if device.type != "cuda":
        raise PlanError(f"cuda_graphs=True needs a GPU, and the device is {device}; leave it out")
    refusal = plan.explain_no_recording() or explain_no_graphs()
    if refusal:
        raise PlanError(refusal)
    memory_bytes = torch.cuda.get_device_properties(device).total_memory
    limit_bytes = int(memory_bytes * SHARE_OF_MEMORY)
    has_room = functools.partial(has_room_to_capture, device)
    checks = env.should_check_key_ages()
    return RecordedSteps(lambda: GraphSegments(device), limit_bytes, has_room, checks=checks)


def build_single_runner(pipe: Any, plan: Plan, advised: set[str | None] | None = None) -> Runner:
    """Build a runner for a plan of one rank on the device of the pipeline's calls, regardless of other ranks."""
    # One rank needs no process group.
    mesh = Mesh(0, 1)
    # A ComponentsManager keeps components on the CPU between calls.
    device = next(iter(find_offload_devices(pipe).values()), None) or find_pipeline_device(pipe)
    # Trust the user's code, because the proof of a model includes the hooks on it.
    options = CompositionOptions(keep_weights=True, trusts_code=True, moves=False)
    compose = functools.partial(compose_strategies, pipe, plan, mesh, device, options)
    return Runner(pipe, plan, mesh, device, compose, keep_weights=True, advised=advised)
