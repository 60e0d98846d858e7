"""The rehearsal of a generation: dry iterations before its first step show which latents belong to which patch.

That depends on the pipeline's own code between the transformer and the scheduler. The same code decides whether the
next step gets the latents of the last one, or a copy of them. Tokens of a patch are made NaN after the blocks, and its
latents are those that come to the scheduler as NaN. A pipeline that calls another model in some steps, or its model in
another mode, is rehearsed in an iteration for each step, to see which.

If tokens of reference images are separate patches, these tokens have to be found first: they are those that do not
reach the scheduler. Rows are told apart by the bits of their numbers, in an iteration for each bit.

`known_calls.py` keeps the findings: for a call with the same shapes two iterations without a model are enough.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ditile.distributed.recording.segments import list_tensors
from ditile.model.hooks.generation import Generation, RehearsedModel
from ditile.model.hooks.pieces import has_nan
from ditile.parallel.pipefusion.dry_iterations import DryIterations
from ditile.parallel.pipefusion.known_calls import (
    MAX_KNOWN_CALLS,
    KnownCall,
    KnownCalls,
    describe_lengths,
)
from ditile.parallel.pipefusion.other_models import OtherModels
from ditile.plan.errors import PlanError, StateError
from ditile.plan.plan import suggest_whole_images


@dataclasses.dataclass(eq=False, slots=True)
class Rehearsal:
    """The rehearsal of one generation, `dry.now`; what its model calls leave is in `dry.now.dry`.

    Attributes:
        other_models: the other models that the pipeline calls in its loop.
        known_calls: calls that were rehearsed before.
        shapes: everything in this call that a rehearsal depends on.
    """

    dry: DryIterations
    other_models: OtherModels
    known_calls: KnownCalls
    shapes: Hashable
    _found: KnownCall | None = dataclasses.field(default=None, init=False)

    def keep_findings(self) -> None:
        """Keep the findings for later calls like this one, now that all of its steps were made."""
        if self._found is None:
            return
        key = (self.shapes, self._found.calls)
        self.known_calls.pop(key, None)
        self.known_calls[key] = self._found
        if len(self.known_calls) > MAX_KNOWN_CALLS:
            del self.known_calls[next(iter(self.known_calls))]

    def iterate_timesteps(self, *, steps: int, patches: int, references: bool) -> Iterator[Tensor]:
        """Yield the timestep of each iteration; stop after the first one if it did not step a scheduler.

        Args:
            steps: how many steps of the call are rehearsed.
            patches: how many pieces of the latents must be found.
            references: whether tokens of reference images must be found.

        Raises:
            PlanError: if tokens of reference images must be found, and there are none.
            StateError: if an iteration after the first, or one that calls a model, steps no scheduler; or if latents
                are cut and calls have other numbers of rows in some steps.
        """
        dry = self.dry
        now = dry.now
        candidates = [call for (shapes, _), call in self.known_calls.items() if shapes == self.shapes]
        if candidates:
            yield from self._recognise_call(candidates)
            if self._found is not None or not dry.streams:
                return
        probe = ArgumentProbe(now, dry.pipeline)
        called_models: list[dict[int, RehearsedModel]] = []
        results: dict[int, Any] = {}
        for step in range(steps):
            if step == 0:
                now.dry.recognises_call = probe.note_first_call
            yield dry.begin(step, 0)
            now.dry.recognises_call = None
            if dry.is_plain_loop():
                return
            dry.check_stepped()
            if step == 0:
                results = dict(now.dry.results)
            called_models.append(dict(now.dry.called_models))
        self._find_changed_steps(called_models, is_cut=patches > 0)
        # Pieces are found in a step that is computed in patches.
        divided = next((step for step in range(steps) if step not in now.findings.whole_steps), 0)
        if references:
            yield from self._find_reference_rows(divided)
        # The last iteration above rehearsed patch 0, with this layout unless references were found or it was whole.
        is_rehearsed = not (divided or references or steps - 1 in now.findings.whole_steps)
        for patch in range(patches):
            if patch or not is_rehearsed:
                yield dry.begin(divided, patch)
            dry.check_stepped()
            for stream in dry.streams:
                assert stream.rehearsed_piece is not None
                stream.pieces.append(stream.rehearsed_piece)
        if steps == patches == 1:
            # There was only one iteration, and a second one shows how the pipeline passes latents on.
            yield dry.begin(0, 0)
            dry.check_stepped()
        if patches:
            yield from self._find_live_arguments(probe, divided)
        now.findings.num_references = now.num_references
        dry.end()
        calls = frozenset(probe.first_calls)
        self._found = KnownCall.from_rehearsal(dry, calls, results, self.other_models)

    def _recognise_call(self, candidates: list[KnownCall]) -> Iterator[Tensor]:
        """Run two iterations in which no model is called, to find out which known call this one equals, if any."""
        dry = self.dry
        now = dry.now
        calls: set[Hashable] = set()

        def recognise_model_call(call: tuple[object, ...], inputs: Mapping[str, Any], latents_name: str) -> bool:
            """Return whether a candidate had this call of a model too; zeros of its result's shape replace it."""
            described = (call, describe_lengths(inputs))
            calls.add(described)
            candidates[:] = [candidate for candidate in candidates if described in candidate.calls]
            if not candidates:
                return False
            results, _ = candidates[-1].make_results()
            now.dry.results[now.branch] = results[now.branch]
            return True

        # The second iteration shows how the pipeline passes latents on.
        for _ in range(2):
            calls.clear()
            _, other_results = candidates[-1].make_results()
            self.other_models.results.update(other_results)
            self.other_models.inputs.update(candidates[-1].other_inputs)
            now.dry.recognises_call = recognise_model_call
            yield dry.begin(0, 0)
            # From here on the pipeline may leave its loop, and call the model elsewhere.
            now.dry.recognises_call = None
            if dry.is_plain_loop():
                return
            dry.check_stepped()
            shapes = [stream.predicted_shape for stream in dry.streams]
            candidates[:] = [known for known in candidates if known.calls == calls and known.shapes == shapes]
            if not candidates:
                self.other_models.forget_results()
                now.forget_layouts()
                return
        known = candidates[-1]
        now.findings = dataclasses.replace(known.findings)
        if known.lets_group_rest:
            now.shares.warmup_split = None
        for stream, pieces in zip(dry.streams, known.pieces, strict=True):
            stream.pieces = list(pieces)
        self._found = known
        dry.end()

    def _find_changed_steps(self, called_models: Sequence[Mapping[int, RehearsedModel]], *, is_cut: bool) -> None:
        """Find the steps computed whole, and the steps with other model calls than the step before.

        If latents are cut, all steps must have the same number of calls and of rows.
        """
        findings = self.dry.now.findings
        first_rows = [model.rows for model in called_models[0].values()]
        whole_steps = set()
        changed_steps = set()
        for step, models in enumerate(called_models):
            rows = [model.rows for model in models.values()]
            if is_cut and rows != first_rows:
                raise StateError(
                    f"{self.dry.pipeline} calls its model on {rows} rows in step {step} and on {first_rows} in the "
                    "first one, and guidance that begins or ends during the run cannot be divided into patches; guide "
                    f"all steps, or use {suggest_whole_images()}"
                )

            if any(model.is_whole for model in models.values()):
                whole_steps.add(step)
            if step and models != called_models[step - 1]:
                changed_steps.add(step)
        findings.whole_steps = frozenset(whole_steps)
        findings.changed_steps = frozenset(whole_steps | changed_steps)

    def _find_live_arguments(self, probe: ArgumentProbe, step: int) -> Iterator[Tensor]:
        """Run iterations without a model to find its arguments that depend on latents in each step."""
        dry = self.dry
        now = dry.now
        marked_patches = set[int]()
        for stream in dry.streams:
            stream.is_probed = True
            # Two patches show whether an argument depends on more than its own patch. The first may be references.
            marked_patches.update(stream.list_owning_patches()[-2:])
        # What is marked in one iteration is seen in the next. So the first still sees the NaN of the prediction made
        # before it, and the final one (None) marks nothing.
        for patch in (*sorted(marked_patches), None):
            for stream in dry.streams:
                stream.marked_piece = None
                if patch is not None and not stream.pieces[patch].is_empty:
                    stream.marked_piece = stream.pieces[patch]
            now.dry.recognises_call = probe.look_at_call
            yield dry.begin(step, 0)
            now.dry.recognises_call = None
            dry.check_stepped()
            probe.masks_by_iteration.append(probe.masks)
            probe.masks = {}
        now.findings.live_arguments = probe.find_live_arguments()
        if now.findings.live_arguments:
            # The first passes of these calls (surveys) put no NaN into these arguments, and blocks may depend on them.
            now.dry.surveys_again = True
            yield dry.begin(step, 0)
            now.dry.surveys_again = False
            dry.check_stepped()
            for form in now.findings.forms.values():
                if form.list_fed_blocks():
                    now.findings.reads_latents_everywhere = True
        for stream in dry.streams:
            stream.is_probed = False

    def _find_reference_rows(self, step: int) -> Iterator[Tensor]:
        """Run iterations to find the rows of reference tokens: those whose predictions never reach the scheduler."""
        dry = self.dry
        now = dry.now
        # Each element of a prediction gets the number of its row.
        row_numbers: list[Tensor] = []
        # In a model with one sequence the other rows are text, which does not reach the scheduler either.
        rows = now.dry.latent_rows
        for bit in range((len(rows) - 1).bit_length()):
            now.dry.bit = bit
            yield dry.begin(step, 0)
            dry.check_stepped()
            if not row_numbers:
                row_numbers = [stream.make_element_numbers() for stream in dry.streams]
            for stream, numbers in zip(dry.streams, row_numbers, strict=True):
                piece = stream.rehearsed_piece
                assert piece is not None
                piece.put(numbers, piece.take(numbers) + (1 << bit))
        now.dry.bit = None
        # A single row needs no bit, because it must be an image.
        reached = {0}
        if row_numbers:
            reached = set(torch.cat([numbers.flatten() for numbers in row_numbers]).tolist())
        unreached = frozenset(row for number, row in enumerate(rows) if number not in reached)
        now.findings.reference_rows = unreached - now.dry.padding_rows
        if not now.findings.reference_rows:
            raise PlanError(
                f"references: {dry.pipeline} has no reference tokens in this call: tokens that its blocks see in each "
                "step, and that its scheduler never steps (some pipelines step them and put the old ones back); leave "
                "references out, or give the call an image to refer to"
            )
        # Patches must be cut again, around the references.
        now.forget_layouts()


Masks = dict[tuple[int, str], list[Tensor]]
"""The places of NaN in the tensors of an argument, by branch and name."""


class ArgumentProbe:
    """The search for arguments of a model that a pipeline makes from its latents, or from its last prediction.

    Stages have different latents at a time. The first one has those of the current patch, and the last one those that
    it denoised. The others have no new ones unless they are sent. And a patch's latents are one step newer than those
    of later patches. So an argument for a patch must be made only from its own latents, unless all steps are
    synchronous.

    Args:
        pipeline: the name of the pipeline's class, for messages.

    Attributes:
        first_calls: the calls of the first iteration, as in `KnownCall.calls`.
        masks: the places of NaN in the calls of the iteration under way.
        masks_by_iteration: the masks of each iteration of `Rehearsal._find_live_arguments`.
    """

    def __init__(self, now: Generation, pipeline: str) -> None:
        self._now = now
        self._pipeline = pipeline
        self._always_nan: set[tuple[int, str]] = set()
        self.masks: Masks = {}
        self.masks_by_iteration: list[Masks] = []
        self._latents_names: set[str] = set()
        self.first_calls: set[Hashable] = set()

    def note_first_call(self, call: tuple[object, ...], inputs: Mapping[str, Any], latents_name: str) -> bool:
        """Note which arguments of a call are NaN before anything was marked; the call has to be made."""
        self.first_calls.add((call, describe_lengths(inputs)))
        self.look_at_call(call, inputs, latents_name)
        self._always_nan |= self.masks.keys()
        self.masks = {}
        return False

    def look_at_call(self, call: tuple[object, ...], inputs: Mapping[str, Any], latents_name: str) -> bool:
        """Note where arguments of a call are NaN; the call need not be made."""
        self._latents_names.add(latents_name)
        for name, value in inputs.items():
            key = (self._now.branch, name)
            tensors = [x for x in list_tensors(value) if x.is_floating_point()]
            if key not in self._always_nan and has_nan(tensors):
                self.masks[key] = [torch.isnan(x) for x in tensors]
        return True

    def find_live_arguments(self) -> frozenset[str]:
        """Return the arguments, apart from the latents, that depend on latents in each step.

        Raises:
            StateError: if one depends on the last prediction, or on other latents than those of its patch, and that is
                not exact under the schedule.
        """
        schedule = self._now.schedule
        of_prediction, *of_latents = self.masks_by_iteration
        remedy = suggest_whole_images()
        if of_prediction and (schedule.stages > 1 or schedule.has_stale_steps):
            _, name = next(iter(of_prediction))
            raise StateError(
                f"{self._pipeline} makes {name} for its model from what the model predicted last, which other "
                f"stages and patches do not have; use {remedy}"
            )
        live_arguments = set[str]()
        union: Masks = {}
        for masks_by_argument in of_latents:
            for key, masks in masks_by_argument.items():
                _, name = key
                live_arguments.add(name)
                earlier = union.setdefault(key, masks)
                # Without stale steps all latents belong to one step, and any of them may be used.
                if earlier is masks or not schedule.has_stale_steps:
                    continue
                # A value that depends on two patches belongs to neither, nor one whose shapes differ between them.
                is_same = [x.shape for x in earlier] == [x.shape for x in masks]
                if not is_same or any(bool((x & y).any()) for x, y in zip(earlier, masks, strict=True)):
                    raise StateError(
                        f"{self._pipeline} makes {name} of a patch for its model from latents of other patches too, "
                        f"which are of other steps; use warmup={schedule.steps}, or {remedy}"
                    )
                union[key] = [x | y for x, y in zip(earlier, masks, strict=True)]
        return frozenset(live_arguments - self._latents_names)
