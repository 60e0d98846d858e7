"""Decides whether blocks are skipped, separately for each image of a call (with all its rows) and each patch.

A probe, such as what the first blocks add to the tokens (first-block caching, as of arXiv 2411.19108), is compared with
the probe of the last computed step, never with the probe of a skipped step. The difference is the mean absolute change
divided by the mean absolute value. It is measured as two sums, because ranks that split tokens, heads or guidance add
their sums before they divide.

A ControlNet adds its outputs between the blocks, after the probe. The relative change of their size, which is never
more than the change of their values, counts as a difference too: it is 1 or more if control begins or ends.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ditile.cache.step_rules import DecisionRecord, RuleVerdict, SkipRules
from ditile.model.hooks.protocols import CallPosition, SkipAgreement


class Unit(NamedTuple):
    """Rows of a call that are decided on together: group number `place` of `among` groups."""

    place: int
    among: int
    batch_slice: slice

    def slice_batch(self, tokens: Tensor) -> Tensor:
        """Return the rows of this unit."""
        if self.among == 1:
            return tokens
        return tokens[self.batch_slice]


WHOLE_BATCH = Unit(0, 1, slice(None))


def split_into_units(batch_size: int, images: int | None, couple: str) -> list[Unit]:
    """Return the units of a call: single rows, images with all their rows of guidance, or the whole batch.

    Args:
        batch_size: rows of the call; the branches of guidance follow each other, as in diffusers.
        images: number of images; if it is unknown, or does not divide the rows, the batch is one unit.
        couple: "row", "image" or "batch".
    """
    if couple == "row":
        return [Unit(row, batch_size, slice(row, row + 1)) for row in range(batch_size)]
    if couple == "batch" or images is None or images < 2 or batch_size % images:
        return [WHOLE_BATCH]
    return [Unit(image, images, slice(image, None, images)) for image in range(images)]


class UnitKey(NamedTuple):
    """The key of a memory: a patch of a unit, in one branch of guidance, in calls of one kind."""

    branch: int
    kind: Hashable
    patch: int
    place: int
    among: int


class CacheCall(NamedTuple):
    """One call of the model.

    Attributes:
        moment: the position of the call in the pipeline's loop.
        step: steps since the blocks were first called, from 0.
        units: groups of rows, each of which is decided on by itself.
        kind: shapes and modes of all arguments of the model.
        control: sizes `[rows, arguments]` of inputs after the probe, such as a ControlNet's; None without such inputs.
        sample: the noisy input, whole on every rank; a list for some models.
        inputs: the arguments that the pipeline gives by name.
        scheduler: the pipeline's scheduler; None without a pipeline.
    """

    moment: CallPosition
    step: int
    units: list[Unit]
    batch_size: int
    kind: Hashable = ()
    control: Tensor | None = None
    model: Any = None
    sample: Any = None
    inputs: Mapping[str, Any] = {}
    scheduler: Any = None

    def split_by_patch(self, image: Tensor) -> list[tuple[int, Tensor]]:
        """Split image tokens `[rows, tokens, channels]` by patch. A later step may decide on each patch by itself."""
        patches = self.moment.patches
        if len(patches) == 1:
            return [(patches[0], image)]
        return list(zip(patches, image.split(list(self.moment.sizes()), dim=1), strict=True))

    def make_unit_key(self, patch: int, unit: Unit) -> UnitKey:
        """Return the key for the memory of a unit's patch."""
        return UnitKey(self.moment.branch, self.kind, patch, unit.place, unit.among)


class Feature(Protocol):
    """A value to compare in place of tokens. It is compared with its value in the previous step, computed or skipped.

    Every rank has the whole value, so all ranks take the differences of the first rank.
    """

    def list_parts(self, call: CacheCall) -> list[tuple[int, Tensor]]:
        """List the parts by patch, with the rows of the batch first."""


@dataclass(slots=True)
class UnitState:
    """The memory of one unit and patch.

    Attributes:
        record: the decisions so far.
        probe: the probe of the last computed step, or the `Feature` of the previous step.
        size: the sum of the absolute values of `probe`; None until it is computed.
        control: the rows of `CacheCall.control` in that step.
    """

    record: DecisionRecord = field(default_factory=DecisionRecord)
    probe: Tensor | None = None
    size: Tensor | None = None
    control: Tensor | None = None


@dataclass(frozen=True, eq=False)
class SkipDecider:
    """Decides in each step whether one set of blocks is left out.

    Attributes:
        rules: when a step may be left out.
        difference: measures how far two probes are apart.
        dtype: the type in which probes are kept; None is their own.
        shares: whether the difference of a step's first branch counts for its other branches too.
        feature: what is compared in place of probes.
    """

    rules: SkipRules
    difference: Difference
    dtype: torch.dtype | None = None
    shares: bool = False
    feature: Feature | None = None
    _states: dict[UnitKey, UnitState] = field(default_factory=dict, init=False, repr=False)

    def decide_skips(
        self, probe: Tensor, call: CacheCall, agreement: SkipAgreement, thresholds: Sequence[float] | None = None
    ) -> list[bool]:
        """Decide which units are left out.

        Args:
            probe: `[rows, tokens, channels]`, of this rank's tokens.
            agreement: sums differences over ranks.
            thresholds: one for each unit, in place of the threshold of the rules.
        """
        states_by_unit = self._collect_states(call)
        verdicts = [self._find_unit_verdict(call, states) for states in states_by_unit]
        differences: Sequence[float | None] = [None] * len(verdicts)
        parts = self._list_parts(probe, call)
        if RuleVerdict.MEASURE in verdicts:
            first_branch: list[float | None] = [None]
            if self.shares and call.moment.branch:
                first_branch = self.get_last_differences(call._replace(moment=call.moment._replace(branch=0)))
            if None not in first_branch:
                differences = first_branch
            else:
                sums = self._sum_changes(parts, call, states_by_unit, verdicts)
                # The sums of all units are one message, even of units that need no difference. A feature is not
                # summed, because each rank has all of it; of the tokens a rank has only a part.
                if self.feature is None:
                    sums = agreement.sum_over_ranks(sums)
                differences = [_find_largest_difference(*unit_numbers) for unit_numbers in sums.tolist()]
                if self.feature is not None:
                    # A unit without a difference has not changed.
                    differences = [*agreement.take_first_numbers([number or 0.0 for number in differences])]
            for place, verdict in enumerate(verdicts):
                if verdict is not RuleVerdict.MEASURE:
                    differences[place] = None
        # A feature is compared with the previous step, even if that was skipped.
        if self.feature is not None:
            self._store_parts(parts, call, [False] * len(verdicts))
        skips: list[bool] = []
        for place, states in enumerate(states_by_unit):
            difference = differences[place]
            skipped = verdicts[place] is RuleVerdict.SKIP
            if difference is not None:
                threshold = None if thresholds is None else thresholds[place]
                # A budget is spent patch by patch, so each patch of the unit must allow the skip.
                allowed = [self.rules.should_skip_step(difference, state.record, threshold) for state in states]
                skipped = all(allowed)
            for state in states:
                self.rules.record_decision(call.step, state.record, skipped=skipped, difference=difference)
            skips.append(skipped)
        return skips

    def decide_by_rules(self, call: CacheCall, decided: Sequence[bool] | None = None) -> list[bool]:
        """Decide which units are left out, without a measurement.

        Args:
            decided: the decision of another stage; None without one.
        """
        skips = []
        for place, states in enumerate(self._collect_states(call)):
            skipped = self._find_unit_verdict(call, states) is RuleVerdict.SKIP if decided is None else decided[place]
            for state in states:
                self.rules.record_decision(call.step, state.record, skipped=skipped, difference=None)
            skips.append(skipped)
        return skips

    def store_probes(self, probe: Tensor, call: CacheCall, skips: Sequence[bool]) -> None:
        """Keep the probe `[rows, tokens, channels]` of the computed units."""
        # A feature is stored when the decision is made.
        if self.feature is None:
            self._store_parts(self._list_parts(probe, call), call, skips)

    def _list_parts(self, probe: Tensor, call: CacheCall) -> list[tuple[int, Tensor]]:
        """List the values that are compared, by patch."""
        if self.feature is None:
            return call.split_by_patch(probe)
        return self.feature.list_parts(call)

    def _store_parts(self, parts: list[tuple[int, Tensor]], call: CacheCall, skips: Sequence[bool]) -> None:
        for patch, tokens in parts:
            for unit, skipped in zip(call.units, skips, strict=True):
                if skipped:
                    continue
                # A slice that is not cloned would keep the probe of the whole batch in memory.
                unit_probe = tokens[unit.batch_slice].clone() if unit.among > 1 else tokens
                if self.dtype is not None:
                    unit_probe = unit_probe.to(self.dtype)
                state = self._get_unit_state(call, patch, unit)
                state.probe = unit_probe
                state.size = None
                state.control = None if call.control is None else call.control[unit.batch_slice]

    def get_last_differences(self, call: CacheCall) -> list[float | None]:
        """Return the difference of each unit in this step; None if it was not measured."""
        return [states[0].record.differences.get(call.step) for states in self._collect_states(call)]

    def iterate_records(self) -> Iterator[tuple[int, int, int, DecisionRecord]]:
        """Yield (branch, patch, unit, record) for each decision."""
        for key, state in self._states.items():
            yield key.branch, key.patch, key.place, state.record

    @property
    def memory_bytes(self) -> int:
        """Return the number of kept bytes."""
        kept_bytes = 0
        for state in self._states.values():
            if state.probe is not None:
                kept_bytes += state.probe.nbytes
        return kept_bytes

    def _find_unit_verdict(self, call: CacheCall, states: list[UnitState]) -> RuleVerdict:
        # The next step reads keys of this one.
        if call.moment.must_compute:
            return RuleVerdict.COMPUTE
        verdicts = []
        for state in states:
            verdicts.append(self.rules.decide_without_difference(call.step, state.record, call.moment.step))
        for verdict in (RuleVerdict.COMPUTE, RuleVerdict.MEASURE):
            if verdict in verdicts:
                return verdict
        return RuleVerdict.SKIP

    def _sum_changes(
        self,
        parts: list[tuple[int, Tensor]],
        call: CacheCall,
        states_by_unit: list[list[UnitState]],
        verdicts: list[RuleVerdict],
    ) -> Tensor:
        """Sum the change and the size of each unit's probe, `[units, 2]`. Units that are not measured have 0.

        With control there are two more columns for each of its sizes.
        """
        _, first_part = parts[0]
        dtype = self.difference.choose_sum_dtype(first_part)
        measured: list[Tensor] = []
        for unit, states, verdict in zip(call.units, states_by_unit, verdicts, strict=True):
            for (_, tokens), state in zip(parts, states, strict=True):
                if verdict is not RuleVerdict.MEASURE or state.probe is None:
                    measured += tokens.new_zeros(2, dtype=dtype)
                    continue
                unit_tokens = unit.slice_batch(tokens)
                change, size = self.difference.sum_change_and_size(state.probe, unit_tokens, state.size)
                if self.difference.important <= 0:
                    # The size of the last computed probe stays the same until the next computed step.
                    state.size = size
                measured += (change, size)
        sums = torch.stack(measured).view(len(verdicts), -1)
        # The patches of a unit are decided on together, so their sums are added.
        if sums.shape[1] > 2:
            sums = sums.double().view(len(verdicts), -1, 2).sum(dim=1)
        if call.control is None:
            return sums
        # The change of each size since the last computed step, and its size then.
        control_sums = []
        for unit, states in zip(call.units, states_by_unit, strict=True):
            now = call.control[unit.batch_slice].sum(dim=0)
            last_control = states[0].control
            before = now if last_control is None else last_control.sum(dim=0)
            control_sums.append(torch.stack([(now - before).abs(), before], dim=1).flatten())
        return torch.cat([sums, torch.stack(control_sums).to(sums)], dim=1)

    def _collect_states(self, call: CacheCall) -> list[list[UnitState]]:
        states_by_unit = []
        for unit in call.units:
            states_by_unit.append([self._get_unit_state(call, patch, unit) for patch in call.moment.patches])
        return states_by_unit

    def _get_unit_state(self, call: CacheCall, patch: int, unit: Unit) -> UnitState:
        key = call.make_unit_key(patch, unit)
        if key in self._states:
            return self._states[key]
        batch_state = None
        if unit.among > 1:
            # The first step was computed as one unit, because the number of images was not known yet.
            batch_state = self._states.pop(call.make_unit_key(patch, WHOLE_BATCH), None)
        for new_unit in call.units:
            state = self._states[call.make_unit_key(patch, new_unit)] = UnitState()
            if batch_state is None:
                continue
            state.record.computed = batch_state.record.computed
            if batch_state.probe is not None:
                state.probe = batch_state.probe[new_unit.batch_slice].clone()
                state.control = None if batch_state.control is None else batch_state.control[new_unit.batch_slice]
        return self._states[key]


@dataclass(frozen=True, slots=True)
class Difference:
    """Measures how far two probes are apart.

    Attributes:
        important: count only tokens that changed by more than this share of themselves; 0 counts all.
        every: count every n-th channel.
    """

    important: float = 0.0
    every: int = 1

    def sum_change_and_size(self, before: Tensor, now: Tensor, size: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the sum of the absolute changes, and the sum of the absolute values in `before`.

        Args:
            before, now: `[rows, tokens, channels]`; sums are in fp32, or in fp64 if these are.
            size: the second sum, if it is known; it can be known only if all tokens count.
        """
        if self.every > 1:
            before = before[..., :: self.every]
            now = now[..., :: self.every]
        before = before.to(now.dtype)
        dtype = self.choose_sum_dtype(now)
        norm = torch.linalg.vector_norm
        if self.important <= 0:
            change = norm(now - before, ord=1, dtype=dtype)
            if size is None:
                size = norm(before, ord=1, dtype=dtype)
            return change, size
        changes = norm(now - before, ord=1, dim=-1, dtype=dtype)
        sizes = norm(before, ord=1, dim=-1, dtype=dtype)
        counted = changes > self.important * sizes
        # If no token counts, the difference is 0 / tiny = 0; only a probe of zeros gives 0 / 0.
        tiny = torch.finfo(dtype).tiny * sizes.any()
        return (changes * counted).sum(), (sizes * counted).sum() + tiny

    @staticmethod
    def choose_sum_dtype(probe: Tensor) -> torch.dtype:
        """Return the type of sums over a probe."""
        if probe.dtype == torch.float64:
            return torch.float64
        return torch.float32


def compute_relative_difference(change: float, size: float) -> float | None:
    """Return the relative difference; infinite if only `size` is 0, and None if both are 0."""
    if size > 0:
        return change / size
    if change == 0:
        return None
    return float("inf")


def _find_largest_difference(change: float, size: float, *control: float) -> float | None:
    """Return the largest relative difference of a probe and of the control sizes."""
    difference = compute_relative_difference(change, size)
    if difference is None:
        return None
    for control_change, control_size in zip(control[::2], control[1::2], strict=True):
        difference = max(difference, compute_relative_difference(control_change, control_size) or 0.0)
    return difference
