"""Iterations of a pipeline's loop before its first step, in which no block is run: see `model/hooks/block_calls.py`.

The pipeline's own code between the transformer and the scheduler says which latents belong to a patch, and whether it
hands on the latents that a step returned, or a copy of them. A pipeline that calls another model in some steps, or its
model in another mode, says so in an iteration for each step.

A pipeline for in-painting blends the latents that a step returned with those of a picture under noise, and asks which
step it is in for how much. By itself it would give all patches the noise of the next step whenever one was stepped. So
it gets further iterations, in which it believes to be in the step before that of the patch to come, and nothing is
computed: `BlendIterations`. They also bring its first latents back, which a rehearsal made it blend.

Where tokens of reference pictures are patches of their own, it is found first which they are: those that come out
nowhere. Rows are told apart by the bits of their numbers, in an iteration for each bit.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from diffusers.guiders.guider_utils import BaseGuidance
from torch import Tensor
from torch.utils import _pytree as pytree

from ditile.model.hooks.generation import Generation, RehearsedModel
from ditile.model.hooks.pieces import has_nan
from ditile.parallel import rng_state
from ditile.parallel.pipefusion.other_models import OtherModels
from ditile.parallel.pipefusion.rehearsed_calls import RehearsedCall, describe_lengths, forget_numbers
from ditile.parallel.pipefusion.stepped_latents import SteppedLatents
from ditile.plan.errors import PlanError, StateError
from ditile.plan.schedule import MicroStep


class Rehearsal:
    """The rehearsal of one generation.

    Args:
        now: the generation.
        streams: what schedulers step, each added by the loop when it is first stepped.
        pipeline: the name of the pipeline's class.
        other_models: what else the pipeline calls in its loop.

    Attributes:
        found: what was found for another call that is like this one, or None.
    """

    def __init__(
        self, now: Generation, streams: Sequence[SteppedLatents], pipeline: str, other_models: OtherModels
    ) -> None:
        self._now, self._streams, self._pipeline, self._other_models = now, streams, pipeline, other_models
        self.found: RehearsedCall | None = None
        self._known: Sequence[RehearsedCall] = ()
        self._calls: frozenset[Hashable] = frozenset()
        self._results: Any = None

    def _recognise_call(self, known: Sequence[RehearsedCall], timestep: Tensor) -> Iterator[Tensor]:
        """Two iterations in which no model is called, if their calls are those of a call that was rehearsed before.

        If the call is like one of `known`, the generation and its streams have what was found then.
        """
        now = self._now
        for _ in range(2):
            self._known, self._calls = known, frozenset()
            self._other_models.results.update(known[-1].make_results()[1])
            now.dry.recognises_call = self._recognise_model_call
            yield self._begin_iteration(0, 0, timestep)
            # Or else the pipeline is about to end its loop, and calls the model elsewhere.
            now.dry.recognises_call = None
            if self._steps_no_scheduler():
                return
            self._check_iteration()
            shapes = [each.predicted_shape for each in self._streams]
            known = [each for each in self._known if each.calls == self._calls and each.shapes == shapes]
            if not known:
                break
        if not known:
            self._other_models.forget_results()
            now.forget_layouts()
            return
        self.found = found = known[-1]
        found.restore_findings(now)
        for each, pieces in zip(self._streams, found.pieces, strict=True):
            each.pieces = [*pieces]
        self._end_iterations()

    def _recognise_model_call(self, call: tuple[object, ...], inputs: Mapping[str, Any], latents: str) -> bool:
        """Whether a call of a model was made in some of the calls that this one may be like."""
        now, described = self._now, (call, describe_lengths(inputs))
        self._calls |= {described}
        self._known = [each for each in self._known if described in each.calls]
        if self._known:
            now.dry.results[now.branch] = self._known[-1].make_results()[0][now.branch]
        return bool(self._known)

    def describe_findings(self) -> RehearsedCall | None:
        """What was found, for other calls of the same shapes; None where that cannot be told from numbers."""
        if self.found is not None:
            return self.found
        now, results = self._now, forget_numbers((self._results, self._other_models.results))
        if results is None:
            return None
        return RehearsedCall(
            calls=self._calls,
            results=results,
            shapes=[each.predicted_shape for each in self._streams],
            pieces=[each.pieces for each in self._streams],
            # The forms are shared: those that later steps add are kept too.
            findings=replace(now.findings),
            lets_group_rest=now.shares.warmup_split is None,
        )

    def iterate_calls(
        self,
        timesteps: Sequence[Tensor],
        steps: int,
        patches: int,
        known: Sequence[RehearsedCall] = (),
        *,
        references: bool = False,
    ) -> Iterator[Tensor]:
        """The timestep of each iteration; it ends behind the first one if that did not step a scheduler.

        Args:
            timesteps: of the loop.
            steps: how many of its steps are rehearsed.
            patches: how many pieces of the latents are to be found.
            known: calls that were rehearsed before. One with the same calls of models is not rehearsed again.
            references: whether it is to be found which tokens are of reference pictures.

        Raises:
            PlanError: if no token is.
            StateError: if a later iteration steps no scheduler, or one that calls a model, or if latents are cut and
                steps have calls of other rows.
        """
        now, called = self._now, list[dict[int, RehearsedModel]]()
        if known:
            yield from self._recognise_call(known, timesteps[0])
            if self.found is not None or not self._streams:
                return
        probe = ArgumentProbe(now, self._pipeline)
        for step in range(steps):
            now.dry.recognises_call = None if step else probe.note_first_call
            yield self._begin_iteration(step, 0, timesteps[step])
            now.dry.recognises_call = None
            if self._steps_no_scheduler():
                return
            self._check_iteration()
            if not step:
                self._calls, self._results = frozenset(probe.first_calls), dict(now.dry.results)
            called.append(dict(now.dry.called_models))
        if patches:
            self._check_rows_stay(called)
        now.findings.whole_steps = frozenset(
            step for step, models in enumerate(called) if any(model.is_whole for model in models.values())
        )
        unlike = {step for step in range(1, len(called)) if called[step] != called[step - 1]}
        now.findings.changed_steps = now.findings.whole_steps | unlike
        # Pieces are those of a step that is computed in patches.
        divided = next((step for step in range(steps) if step not in now.findings.whole_steps), 0)
        if references:
            yield from self._find_reference_rows(divided, timesteps[divided])
        for patch in range(patches):
            if patch or divided or references:
                yield self._begin_iteration(divided, patch, timesteps[divided])
            self._check_iteration()
            for each in self._streams:
                each.keep_rehearsed_piece()
        if steps == patches == 1:
            # How the pipeline hands on latents is seen in the second iteration.
            yield self._begin_iteration(0, 0, timesteps[0])
            self._check_iteration()
        if patches:
            yield from self._find_live_arguments(probe, divided, timesteps[divided])
        now.findings.num_references = now.num_references
        self._end_iterations()

    def _check_rows_stay(self, called: Sequence[Mapping[int, RehearsedModel]]) -> None:
        """Checks that each step has as many calls, of as many rows, as the first one."""
        for step, models in enumerate(called):
            first, rows = ([model.rows for model in each.values()] for each in (called[0], models))
            if rows != first:
                raise StateError(
                    f"{self._pipeline} calls its model on {' + '.join(map(str, rows))} rows in step {step} and on "
                    f"{' + '.join(map(str, first))} in the first one, and guidance that begins or ends in mid-run "
                    "cannot be divided into patches; guide all steps, or use a plan without pipefusion and patches"
                )

    def _find_live_arguments(self, probe: ArgumentProbe, step: int, timestep: Tensor) -> Iterator[Tensor]:
        """Iterations without a model whose latents are NaN in a patch, and one that surveys calls again if need be."""
        now, streams = self._now, self._streams
        owned = [[patch for patch, piece in enumerate(each.pieces) if not piece.is_empty] for each in streams]
        marked = sorted({patch for patches in owned for patch in patches[-2:]})
        # What an iteration is given as latents is seen in the next one. The first one has what was predicted before.
        for patch in (*marked, None):
            for each in streams:
                piece = None if patch is None else each.pieces[patch]
                each.is_probed, each.marked_piece = True, None if piece is None or piece.is_empty else piece
            now.dry.recognises_call = probe.look_at_call
            yield self._begin_iteration(step, 0, timestep)
            now.dry.recognises_call = None
            self._check_iteration()
            probe.end_look()
        now.findings.live_arguments = probe.find_live_arguments()
        if now.findings.live_arguments:
            now.dry.surveys_again = True
            yield self._begin_iteration(step, 0, timestep)
            now.dry.surveys_again = False
            self._check_iteration()
            is_fed = any(any(form.fed.values()) for form in now.findings.forms.values())
            now.findings.reads_latents_everywhere |= is_fed
        for each in streams:
            each.is_probed = False

    def _end_iterations(self) -> None:
        for each in self._streams:
            each.set_step_index(0)
        self._now.dry.patch, self._now.is_whole = None, False

    def _find_reference_rows(self, step: int, timestep: Tensor) -> Iterator[Tensor]:
        """Iterations that find the rows of tokens that are made of latents and come out nowhere."""
        now, numbers = self._now, list[Tensor]()
        # A model of one sequence has a text in it, which comes out nowhere either.
        rows = now.dry.latent_rows
        for bit in range((len(rows) - 1).bit_length()):
            now.dry.bit = bit
            yield self._begin_iteration(step, 0, timestep)
            self._check_iteration()
            numbers = numbers or [each.make_element_numbers() for each in self._streams]
            for each, of_elements in zip(self._streams, numbers, strict=True):
                assert each.rehearsed_piece is not None
                each.rehearsed_piece.put(of_elements, each.rehearsed_piece.take(of_elements) + (1 << bit))
        now.dry.bit = None
        found = set(torch.cat([each.flatten() for each in numbers]).tolist()) if numbers else {0}
        out_nowhere = frozenset(row for number, row in enumerate(rows) if number not in found)
        now.findings.reference_rows = out_nowhere - now.dry.padding_rows
        if not now.findings.reference_rows:
            raise PlanError(
                f"references: {self._pipeline} has no tokens of reference pictures here, which go through its blocks "
                "in each step and come out nowhere (some pipelines step them like latents, and put them back); leave "
                "references out, or give the call a picture to refer to"
            )
        now.forget_layouts()

    @property
    def is_stepped(self) -> bool:
        """Whether all schedulers were stepped in the iteration at hand."""
        return bool(self._streams) and all(each.is_stepped for each in self._streams)

    def _begin_iteration(self, step: int, patch: int, timestep: Tensor) -> Tensor:
        self._now.enter_micro_step(MicroStep(step, None))
        self._now.dry.patch = patch
        self._now.dry.called_models.clear()
        for each in self._streams:
            each.rehearsed_piece, each.is_stepped = None, False
            each.set_step_index(step)
        return timestep

    def _steps_no_scheduler(self) -> bool:
        """Whether the first iteration was one without a model, so that it is the pipeline's own.

        Raises:
            StateError: if it called a model, whose blocks were passed by.
        """
        if self._streams:
            return False
        if self._now.branch:
            self._check_iteration()
        self._now.dry.patch = None
        return True

    def _check_iteration(self) -> None:
        if not self.is_stepped:
            raise StateError(f"{self._pipeline} went on without stepping its scheduler")


class SavedState:
    """What iterations in which nothing is computed must leave as it was: random states, and what guiders remember.

    A guider may keep an average of predictions from step to step, as adaptive projected guidance does, and these are
    NaN or zero there.

    Args:
        pipe: the pipeline.
        generators: which it may draw from.
    """

    def __init__(self, pipe: Any, generators: Sequence[torch.Generator]) -> None:
        self._generators, self._random = generators, rng_state.read_generator_states(generators)
        guiders = [part for part in vars(pipe).values() if isinstance(part, BaseGuidance)]
        self._guiders = [(part, copy.deepcopy(vars(part))) for part in guiders]

    def restore(self) -> None:
        """Puts it back."""
        rng_state.restore_generators(self._generators, self._random)
        for guider, state in self._guiders:
            vars(guider).clear()
            vars(guider).update(state)


class ArgumentProbe:
    """Finds what a pipeline makes of its latents, or of its last prediction, for the arguments of its model.

    Stages have other latents at a time: the first one those of the patch at hand, the last one those that it stepped,
    and the others none that are new unless they are sent them. And a patch's latents are one step newer than those of
    the patches behind it. So what is made of a patch must be made of its own latents, unless every step is
    synchronous.

    Args:
        now: the generation.
        pipeline: the name of the pipeline's class, for messages.

    Attributes:
        first_calls: those of the first iteration, as `RehearsedCall.calls`.
    """

    def __init__(self, now: Generation, pipeline: str) -> None:
        self._now, self._pipeline = now, pipeline
        self._always: set[tuple[int, str]] = set()
        self._masks: dict[tuple[int, str], list[Tensor]] = {}
        self._looks: list[dict[tuple[int, str], list[Tensor]]] = []
        self._latents: set[str] = set()
        self.first_calls: set[Hashable] = set()

    def note_first_call(self, call: tuple[object, ...], inputs: Mapping[str, Any], latents: str) -> bool:
        """What is NaN anyway in a call, which is to be made."""
        self.first_calls.add((call, describe_lengths(inputs)))
        self.look_at_call(call, inputs, latents)
        self._always |= self._masks.keys()
        self._masks = {}
        return False

    def look_at_call(self, call: tuple[object, ...], inputs: Mapping[str, Any], latents: str) -> bool:
        """What is NaN now in a call that need not be made."""
        self._latents.add(latents)
        for name, value in inputs.items():
            given = [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor) and x.is_floating_point()]
            if (self._now.branch, name) not in self._always and has_nan(given):
                self._masks[self._now.branch, name] = [torch.isnan(x) for x in given]
        return True

    def end_look(self) -> None:
        """All calls of an iteration were seen."""
        self._looks.append(self._masks)
        self._masks = {}

    def find_live_arguments(self) -> frozenset[str]:
        """The arguments beside the latents that are made of latents in each step.

        Raises:
            StateError: if one is made of the last prediction, or of other latents than those of its patch, and that is
                not exact under the schedule.
        """
        schedule = self._now.schedule
        of_prediction, *of_latents = self._looks
        remedy = "use a plan without pipefusion and patches"
        for _, name in of_prediction:
            if schedule.stages > 1 or schedule.has_stale_steps:
                raise StateError(
                    f"{self._pipeline} makes {name} for its model from what the model predicted last, which other "
                    f"stages and patches have not; {remedy}"
                )
        # What is made of two patches is no patch's own.
        seen: dict[tuple[int, str], list[Tensor]] = {}
        for key, masks in [each for look in of_latents for each in look.items() if schedule.has_stale_steps]:
            before = seen.setdefault(key, [torch.zeros_like(mask) for mask in masks])
            if any(x.shape != y.shape or bool((x & y).any()) for x, y in zip(before, masks, strict=False)):
                raise StateError(
                    f"{self._pipeline} makes {key[1]} of a patch for its model from latents of other patches too, "
                    f"which are of other steps; use warmup={schedule.steps}, or {remedy[4:]}"
                )
            seen[key] = [x | y for x, y in zip(before, masks, strict=False)]
        return frozenset(name for look in of_latents for _, name in look) - self._latents


class BlendIterations:
    """Iterations in which a pipeline blends the latents for a step, and nothing is computed.

    Args:
        now: the generation.
        streams: what schedulers step.
        timesteps: of the loop.
        pipeline: the name of the pipeline's class.
    """

    def __init__(
        self, now: Generation, streams: Sequence[SteppedLatents], timesteps: Sequence[Tensor], pipeline: str
    ) -> None:
        self._now, self._streams, self._timesteps, self._pipeline = now, streams, timesteps, pipeline

    @property
    def are_needed(self) -> bool:
        """Whether the pipeline blends latents."""
        return any(each.is_blended for each in self._streams)

    def iterate_calls(self, step: int) -> Iterator[Tensor]:
        """The timestep of an iteration behind which the pipeline has the latents of a step as that step needs them.

        Raises:
            StateError: if it steps no scheduler in it.
        """
        self._now.dry.blended_step = step
        for each in self._streams:
            each.is_stepped = False
        # The iteration in front of the first step is none that the pipeline makes; its number is -1.
        yield self._timesteps[max(step - 1, 0)]
        if not all(each.is_stepped for each in self._streams):
            raise StateError(f"{self._pipeline} went on without stepping its scheduler")
        self._now.dry.blended_step = None

    def restore_first_latents(self) -> Iterator[Tensor]:
        """Behind a rehearsal: makes the pipeline blend its first latents as they were, and looks at what it has then.

        Raises:
            StateError: if it has other latents than those that it began with.
        """
        yield from self.iterate_calls(0)
        yield from self.iterate_calls(0)
        for each in self._streams:
            each.check_first_latents()
