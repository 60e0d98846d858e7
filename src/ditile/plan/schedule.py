"""The schedule of PipeFusion as data: the ops of each stage, in order (arXiv 2405.14430, section 3.4, figures 3 and 4).

A step is synchronous (the whole image at once, exact) or asynchronous (patch by patch; keys and values of the patches
that are not computed yet are from the step before). One iteration of the pipeline's loop is a `MicroStep`: a whole
synchronous step, or one patch of an asynchronous one. `PatchSchedule.iter_ops_before_call`, `iter_call_ops` and
`iter_ops_after_call` say what a stage does in it. The executor runs these ops. `simulate.py` runs them without
processes: it prices them, and proves that no stage waits forever.

The channels carry the same messages in both kinds of step: M patches per step and branch, in patch order. (Branches
come one after the other in a synchronous step, and take turns in an asynchronous one.) A `pipelined` synchronous step
sends them for each micro-batch. Where all stages split the tokens of a synchronous step (`sequence`), this warmup group
computes it without the channels, and its predictions go to the last stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from ditile.plan.layout import split_batch_evenly
from ditile.plan.plan import Plan


class MicroStep(NamedTuple):
    """One iteration of the pipeline's loop: a patch of a step, or the whole step (patch None)."""

    step: int
    patch: int | None


class OpKind(Enum):
    """The kinds of an `Op`."""

    RECEIVE = "receive"  # activations of a patch, from the stage before
    COMPUTE = "compute"  # the stage's own blocks, on a patch or on the whole image (patch None)
    SEND = "send"  # activations of a patch, to the next stage
    STEP = "step"  # the scheduler, on a patch (last stage)
    SEND_STEPPED_PATCH = "return"  # the denoised patch, from the last stage to one that reads latents
    RECEIVE_STEPPED_PATCH = "take"  # the denoised patch of the step before, on a stage that reads latents
    SEND_WHOLE_LATENTS = "share"  # the whole latents, from the last stage to one of the next step's warmup group
    RECEIVE_WHOLE_LATENTS = "adopt"  # the whole latents, on that member of the warmup group
    SEND_PREDICTION = "predict"  # the prediction for the own tokens of a warmup group's member, to the last stage
    RECEIVE_PREDICTION = "collect"  # a member's prediction, on the last stage


SEND_OF_RECEIVE = {
    OpKind.RECEIVE: OpKind.SEND,
    OpKind.RECEIVE_STEPPED_PATCH: OpKind.SEND_STEPPED_PATCH,
    OpKind.RECEIVE_WHOLE_LATENTS: OpKind.SEND_WHOLE_LATENTS,
    OpKind.RECEIVE_PREDICTION: OpKind.SEND_PREDICTION,
}
"""The op that receives a message -> the op that sends it."""


class Op(NamedTuple):
    """One operation of one stage.

    Attributes:
        kind, step, patch: what it does, and on what.
        branch: the transformer call within the step.
        peer: the other stage of a message.
    """

    kind: OpKind
    step: int
    patch: int | None
    branch: int = 0
    peer: int | None = None
    micro_batch: int = 0


@dataclass(frozen=True, slots=True)
class PatchSchedule:
    """N stages, M patches, S steps, the first W of them synchronous.

    Attributes:
        stages, patches, steps, warmup: N, M, S, W.
        distrifusion: the patches of DistriFusion, one per rank; an asynchronous step is one micro-step on every rank.
        mode: how a synchronous step runs; see `Plan.warmup_mode`.
        batch: rows of a transformer call, which a pipelined synchronous step computes in micro-batches.
        again: later steps that are synchronous too.
        references: in which asynchronous steps patches of reference images are computed; see `Plan.references`.
        num_references: how many patches, from the first on, are of reference images, and so have no latents.
        reference_share: the share of these patches in the work of a whole step.
        shares_latents: whether every stage gets the denoised patches, and not only the first.
        late: steps whose denoised patches come back once all of them are denoised, and not one by one.
        uneven_latents: whether some patches have no latents, like the patches of reference images, or are stepped by
            two schedulers, like the patches of a video and its sound.
    """

    stages: int
    patches: int
    steps: int
    warmup: int
    distrifusion: int = 1
    mode: str = "serial"
    batch: int = 1
    again: frozenset[int] = frozenset()
    references: int | None = None
    num_references: int = 0
    reference_share: float = 0.0
    shares_latents: bool = False
    uneven_latents: bool = False
    late: frozenset[int] = frozenset()

    @classmethod
    def from_plan(cls, plan: Plan, steps: int, batch: int = 1) -> PatchSchedule:
        """Build the schedule of a plan over `steps` steps, with `batch` rows in each transformer call."""
        plan = plan.resolve_warmup()
        return cls(
            stages=plan.pipefusion,
            patches=plan.num_patches,
            steps=steps,
            warmup=min(plan.warmup, steps),
            distrifusion=plan.distrifusion,
            mode=plan.warmup_mode,
            batch=batch,
            references=plan.references,
            uneven_latents=plan.references is not None,
        )

    def is_synchronous(self, step: int) -> bool:
        """Return whether nothing is stale in a step. With one patch nothing ever is stale."""
        return step < self.warmup or step in self.again or self.patches * self.distrifusion == 1

    def sends_in_full(self, step: int) -> bool:
        """Return whether no message of a step may be a difference from an earlier one.

        This holds in synchronous steps, if others are asynchronous, and in `again`, the first steps of another model.
        """
        return step in self.again or (self.patches * self.distrifusion > 1 and self.is_synchronous(step))

    @property
    def has_stale_steps(self) -> bool:
        """Return whether keys are stale in some steps."""
        return not all(map(self.is_synchronous, range(self.steps)))

    def computes_references(self, step: int) -> bool:
        """Return whether the patches of reference images are computed in a step. Otherwise their keys stay
        unchanged."""
        if self.references is None or self.is_synchronous(step):
            return True
        # With references=0 they are computed only in synchronous steps.
        return self.references > 0 and step % self.references == 0

    def reads_stale_keys(self, step: int) -> bool:
        """Return whether keys of the previous step are read in a step."""
        return not self.is_synchronous(step)

    def keeps_keys(self, step: int) -> bool:
        """Return whether keys and values of a step are, or may be, read in the next one."""
        if step + 1 == self.steps:
            return False
        return self.reads_stale_keys(step + 1)

    def list_micro_steps(self, step: int) -> list[MicroStep]:
        """List the iterations of the pipeline's loop in a step."""
        if self.is_synchronous(step) or self.distrifusion > 1:
            return [MicroStep(step, None)]
        first = 0
        if self.num_references and not self.computes_references(step):
            first = self.num_references
        return [MicroStep(step, patch) for patch in range(first, self.patches)]

    def find_micro_step(self, step: int, patch: int) -> MicroStep:
        """Find the micro-step that computes a patch."""
        if self.is_synchronous(step) or self.distrifusion > 1:
            return MicroStep(step, None)
        return MicroStep(step, patch)

    def find_following(self, micro: MicroStep) -> MicroStep | None:
        """Find the micro-step after another. None after the last one."""
        if not self.is_last_of_step(micro):
            assert micro.patch is not None
            return MicroStep(micro.step, micro.patch + 1)
        if micro.step + 1 == self.steps:
            return None
        return self.list_micro_steps(micro.step + 1)[0]

    def split_micro_batches(self, micro: MicroStep) -> list[range]:
        """Return the runs of rows that a call of a micro-step computes one after the other."""
        is_split = self.mode == "pipelined" and micro.patch is None and self.distrifusion == 1
        parts = self.stages if is_split else 1
        return split_batch_evenly(self.batch, parts)

    @property
    def warmup_group_size(self) -> int:
        """Return how many stages compute a synchronous step together: all, or none."""
        return self.stages if self.mode == "sequence" else 0

    def select_warmup_group(self, micro: MicroStep) -> range:
        """Select the stages that compute a micro-step together, each its share of the tokens. Empty if the stages
        compute in turn."""
        if micro.patch is not None:
            return range(0)
        return range(self.warmup_group_size)

    @property
    def latent_readers(self) -> range:
        """Return the stages that receive denoised patches from the last one."""
        if self.stages == 1:
            return range(0)
        if self.shares_latents:
            return range(self.stages - 1)
        return range(1)

    def list_patches(self, micro: MicroStep) -> range:
        """List the patches that a micro-step computes."""
        if micro.patch is None:
            return range(self.patches)
        return range(micro.patch, micro.patch + 1)

    def list_denoised_patches(self, micro: MicroStep) -> list[int]:
        """List the patches with latents that a micro-step computes."""
        first = self.num_references if self.distrifusion == 1 else 0
        return [patch for patch in self.list_patches(micro) if patch >= first]

    def is_first_of_step(self, micro: MicroStep) -> bool:
        """Return whether a micro-step is the first of its step."""
        # It computes the whole image, or the first patch.
        if not micro.patch:
            return True
        return micro.patch == self.num_references and not self.computes_references(micro.step)

    def is_last_of_step(self, micro: MicroStep) -> bool:
        """Return whether a micro-step is the last of its step."""
        return micro.patch is None or micro.patch == self.patches - 1

    def compute_key_ages(self, micro: MicroStep) -> tuple[int, ...]:
        """Return the age in steps of each patch's keys while a micro-step attends. 0 is fresh, 1 is from the previous
        step.

        The fresh area grows within a step, as in figure 4 of the paper. Every stage and branch sees the same ages.
        Keys of references grow older in steps that leave them out.
        """
        last = self.patches - 1 if micro.patch is None else micro.patch
        ages = [int(patch > last) for patch in range(self.patches)]
        for patch in range(self.num_references):
            ages[patch] = self.compute_reference_age(micro.step, ages[patch])
        return tuple(ages)

    def compute_reference_age(self, step: int, least: int) -> int:
        """Return how many steps ago references were last computed, at least `least`. Before the first time, they count
        as computed before step 0."""
        for age in range(least, step + 1):
            if self.computes_references(step - age):
                return age
        return step + 1

    def iter_ops_before_call(self, stage: int, micro: MicroStep, calls: int = 1) -> Iterator[Op]:
        """Yield the ops of a stage before the pipeline computes a micro-step.

        Readers of latents take denoised patches; the other members of a warmup group get the whole latents.
        """
        if self.stages == 1:
            return
        if stage in self.latent_readers:
            yield from self.iter_takes(stage, micro, -1, calls)
        last = self.stages - 1
        # Stage 0 gets patches, and the last one has the latents.
        others = [member for member in self.select_warmup_group(micro) if 0 < member < last]
        if micro.step == 0 or not others:
            return
        step = micro.step - 1
        if stage == last:
            for member in others:
                yield Op(OpKind.SEND_WHOLE_LATENTS, step, None, peer=member)
        elif stage in others:
            yield Op(OpKind.RECEIVE_WHOLE_LATENTS, step, None, peer=last)

    def iter_takes(self, stage: int, micro: MicroStep, turn: int, calls: int) -> Iterator[Op]:
        """Yield the denoised patches that a reader of latents takes before a call, each as soon as it may be back.

        A send waits for its receive, and a launch may wait for all messages of a device. So stages would wait for each
        other in a ring if a reader ran far ahead before it took a patch.

        Args:
            turn: the index of the call among the `calls` of this stage in the micro-step; -1 before the pipeline
                computes anything.
        """
        previous = (micro, turn - 1)
        # Before the first call comes the last call of the micro-step before.
        if turn < 0:
            micro_steps = self.list_micro_steps(micro.step)
            index = micro_steps.index(micro)
            if index > 0:
                previous = micro_steps[index - 1], calls - 1
            elif micro.step == 0:
                previous = micro, -1
            else:
                previous = self.list_micro_steps(micro.step - 1)[-1], calls - 1
        first = self.count_taken_patches(stage, *previous, calls)
        num_patches = self.patches - self.num_references
        for taken in range(first, self.count_taken_patches(stage, micro, turn, calls)):
            step, patch = divmod(taken, num_patches)
            yield Op(OpKind.RECEIVE_STEPPED_PATCH, step, self.num_references + patch, peer=self.stages - 1)

    def count_taken_patches(self, stage: int, micro: MicroStep, turn: int, calls: int) -> int:
        """Count the patches of all steps that a reader of latents has taken before a call; see `iter_takes`."""
        step = micro.step
        references = self.num_references
        with_latents = self.patches - references
        taken = step * with_latents
        if micro.patch is not None:
            # In a step that skips references, fewer micro-steps pass before a patch is needed again.
            left_out = 0
            left_out_before = 0
            if references and not self.computes_references(step):
                left_out = references
            if references and step > 0 and not self.computes_references(step - 1):
                left_out_before = references
            has_room = self.warmup > 0 and not (self.uneven_latents or self.shares_latents)
            ahead = _count_calls_ahead(self.stages, self.patches, calls, stage, has_room)
            taken += _count_early_patches(
                micro.patch, turn, calls, ahead, self.patches, references, left_out, left_out_before
            )
        if step in self.late:
            taken = min(taken, step * with_latents)
        return min(max(taken, 0), (self.steps - 1) * with_latents)

    @property
    def takes_ahead(self) -> bool:
        """Return whether the first stage may post the receive of one more denoised patch."""
        comes_at_once = self.uneven_latents or self.shares_latents or bool(self.late)
        return self.patches > self.stages and self.warmup > 0 and not comes_at_once

    def iter_call_ops(self, stage: int, micro: MicroStep, branch: int, micro_batch: int = 0) -> Iterator[Op]:
        """Yield the ops of a stage in one call of the transformer, or in a micro-batch of it."""
        step = micro.step
        last = self.stages - 1
        # A warmup group does not use the channels between stages: its predictions go to the last one.
        if last > 0 and self.select_warmup_group(micro):
            yield Op(OpKind.COMPUTE, step, None, branch)
            if stage == last:
                for member in range(last):
                    yield Op(OpKind.RECEIVE_PREDICTION, step, None, branch, member)
            else:
                yield Op(OpKind.SEND_PREDICTION, step, None, branch, last)
            return
        if stage > 0:
            for patch in self.list_patches(micro):
                yield Op(OpKind.RECEIVE, step, patch, branch, stage - 1, micro_batch)
        yield Op(OpKind.COMPUTE, step, micro.patch, branch, micro_batch=micro_batch)
        if stage < last:
            for patch in self.list_patches(micro):
                yield Op(OpKind.SEND, step, patch, branch, stage + 1, micro_batch)

    def iter_ops_after_call(self, stage: int, micro: MicroStep) -> Iterator[Op]:
        """Yield the ops of a stage when the scheduler steps. The last stage steps, and sends the patches to the
        readers."""
        if stage < self.stages - 1:
            return
        for patch in self.list_denoised_patches(micro):
            yield Op(OpKind.STEP, micro.step, patch)
            # After the last step no stage reads latents: the result goes to all of them at once.
            if micro.step < self.steps - 1:
                for reader in self.latent_readers:
                    yield Op(OpKind.SEND_STEPPED_PATCH, micro.step, patch, peer=reader)

    def iter_step_ops(self, stage: int, step: int, calls: int, branches: Sequence[int] | None = None) -> Iterator[Op]:
        """Yield the ops of a stage in a step of `calls` transformer calls; with `branches`, only of these calls."""
        own = range(calls) if branches is None else branches
        for micro in self.list_micro_steps(step):
            yield from self.iter_ops_before_call(stage, micro, len(own))
            for turn, branch in enumerate(own):
                if stage in self.latent_readers:
                    yield from self.iter_takes(stage, micro, turn, len(own))
                for micro_batch in range(len(self.split_micro_batches(micro))):
                    yield from self.iter_call_ops(stage, micro, branch, micro_batch)
            yield from self.iter_ops_after_call(stage, micro)

    def iter_program(self, stage: int, calls: int | Callable[[int], int] = 1) -> Iterator[Op]:
        """Yield all ops of a stage in a generation. `calls` is the number of calls per step, or a function of it."""
        for step in range(self.steps):
            calls_of_step = calls(step) if callable(calls) else calls
            yield from self.iter_step_ops(stage, step, calls_of_step)


@lru_cache(maxsize=1024)
def _count_calls_ahead(stages: int, patches: int, calls: int, stage: int, has_room: bool) -> int:
    """Count the calls, from the first one for a patch, after which its denoised patch is taken.

    It is back at the first stage after N - 1 + calls, and at each later stage one call earlier. The more calls are
    added, the less a late message delays the first stage. A model of NCCL says how many never hang
    (`tests/parallel/pipefusion/test_hangs.py`).
    """
    least = stages - 1 - stage + calls
    ahead = least
    if has_room and patches >= stages:
        ahead = 2 * stages + calls - 3
        # A further receive may be posted where there are more patches than stages.
        if patches > stages:
            ahead += calls
    return min(max(ahead, least), patches * calls)


@lru_cache(maxsize=4096)
def _count_early_patches(
    patch: int, turn: int, calls: int, ahead: int, patches: int, references: int, left_out: int, left_out_before: int
) -> int:
    """Count the patches of this step that are taken before a call of an asynchronous micro-step.

    The count is negative if patches of the step before have yet to be taken.

    Args:
        ahead: after how many calls a patch is taken.
        patches, references: the number of all patches, and of the first ones that have no latents.
        left_out, left_out_before: how many references are not computed in the step, and in the step before.
    """
    with_latents = patches - references
    # A patch must be back from the step before when its turn comes again.
    due = max(patch + 1 - references, 0) - with_latents
    # The newest patch of this step whose first call was at least `ahead` calls ago.
    newest = patch - left_out - (ahead - turn + calls - 1) // calls
    if newest >= 0:
        early = max(left_out + newest + 1 - references, 0)
    elif newest + patches - left_out_before >= 0:
        # The newest patch is of the step before. Patches of a whole step come back one after the other too.
        early = max(patches + newest + 1 - references, 0) - with_latents
    else:
        early = -with_latents
    return max(early, due)
