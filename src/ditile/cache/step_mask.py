"""Step masks: which steps of a generation compute (1), and which may reuse an earlier one (0).

Early steps shape the image, and their errors stay in later steps. So masks compute most of the early steps and fewer
of the later ones (LeMiCa, arXiv 2511.00090; EasyCache, arXiv 2507.02860). The presets are those that cache-dit
published for 28 steps. For any other number the times of their computed steps are interpolated over normalised time,
and computed steps are added where a hole (a run of cached steps) would be too long.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from ditile.plan.errors import ModelError, suggest_nearest
from ditile.plan.option_classes import Steps, check_value, checked

REFERENCE_STEPS = 28
"""The number of steps for which the presets were published."""

PRESET_BINS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "slow": ((8, 3, 3, 2, 1, 1), (1, 2, 2, 2, 3)),
    "medium": ((6, 2, 2, 2, 2, 1), (1, 3, 3, 3, 3)),
    "fast": ((6, 1, 1, 1, 1, 1), (1, 3, 4, 5, 4)),
    "ultra": ((4, 1, 1, 1, 1), (2, 5, 6, 7)),
}
"""The compute bins and the cache bins of each preset. The first preset computes most, and the last one least."""


@checked()
def steps_mask(
    compute_bins: Sequence[Steps] | None = None,
    cache_bins: Sequence[Steps] | None = None,
    total_steps: Steps | None = None,
    mask_policy: str | None = None,
) -> list[int]:
    """Build a mask from bins, or from a preset.

    Args:
        compute_bins: lengths, in steps, of the runs that compute.
        cache_bins: lengths of the runs between them, which may be cached; as many, or one fewer.
        total_steps: the length of the mask, which a preset needs; by default the sum of the bins. Bins that cover more
            steps are cut off.
        mask_policy: a preset: slow, medium, fast or ultra.

    Returns:
        A 1 for each step that computes, a 0 for each that may be cached. The last step always computes.

    Raises:
        ModelError: if bins and a preset are given, or neither, a bin is not a whole number from 1, bins do not
            interleave or cover fewer steps than `total_steps`, or the preset is not known.
    """
    has_bins = compute_bins is not None or cache_bins is not None
    if has_bins == (mask_policy is not None):
        presets = ", ".join(PRESET_BINS)
        raise ModelError(
            f"compute_bins={compute_bins!r} and mask_policy={mask_policy!r}: give bins, or one of {presets}"
        )
    if mask_policy is not None:
        if total_steps is None:
            raise ModelError(f"mask_policy={mask_policy!r} fits any number of steps; say which, as in total_steps=28")
        return list(build_preset_mask(mask_policy, total_steps))
    if not compute_bins or not cache_bins:
        raise ModelError("bins are missing; give compute_bins and cache_bins, such as [6, 1, 1] and [1, 2]")
    check_value(Steps, sum(compute_bins) + sum(cache_bins), "steps in the bins")
    mask = _interleave_bins(compute_bins, cache_bins)
    total = total_steps or len(mask)
    if total > len(mask):
        raise ModelError(f"the bins cover {len(mask)} steps and total_steps={total}; lengthen them, or leave it out")
    # No step after the last one could correct it.
    return [*mask[: total - 1], 1]


def build_preset_mask(name: str, steps: int) -> tuple[int, ...]:
    """Build the mask of a preset for any number of steps, at least 1.

    With 28 steps it is the published one. With any other number n the first and the last step compute. The share of
    computed steps is that for 28 steps, to within three steps. No hole is longer than the longest one times n / 28,
    rounded up. A faster preset computes no more steps than a slower one.

    Raises:
        ModelError: if the name is not known.
    """
    bins = PRESET_BINS[check_preset_name(name)]
    reference = _interleave_bins(*bins)
    times = [step for step, computes in enumerate(reference) if computes]
    # The first and the last step compute, if there are two.
    count = max(min(steps, 2), round(len(times) * steps / REFERENCE_STEPS))
    chosen: list[int] = []
    for number in range(count):
        place = number * (len(times) - 1) / max(count - 1, 1)
        low = min(int(place), len(times) - 2)
        time = times[low] + (place - low) * (times[low + 1] - times[low])
        step = round(time * (steps - 1) / (REFERENCE_STEPS - 1))
        # Each step differs from the one before, and leaves room for the remaining ones.
        least = chosen[-1] + 1 if chosen else 0
        chosen.append(min(max(step, least), steps - count + number))
    longest = math.ceil(max(bins[1]) * steps / REFERENCE_STEPS)
    filled = set(chosen)
    for start, step in itertools.pairwise(chosen):
        gap = step - start
        # With this many steps added, no part of the gap is longer than the longest hole.
        num_added = max(0, math.ceil((gap - 1 - longest) / (longest + 1)))
        for number in range(1, num_added + 1):
            filled.add(start + round(gap * number / (num_added + 1)))
    return tuple(int(step in filled) for step in range(steps))


def check_preset_name(name: str) -> str:
    """Return the name of a preset unchanged. Raises `ModelError`, with the nearest name, if it is not known."""
    if name not in PRESET_BINS:
        raise ModelError(f"the step mask {name!r} is not known; {suggest_nearest(name, PRESET_BINS)}")
    return name


def check_step_mask(mask: Any) -> tuple[int, ...] | str | None:
    """Return a mask in the form of a config: None, the name of a preset, or a 1 or 0 for each step.

    Text may also be bins, as in `6,1,1,1,1/1,2,5,5,5`.

    Raises:
        ModelError: if it is none of these.
    """
    if mask is None:
        return None
    if isinstance(mask, str):
        compute, slash, cache = mask.partition("/")
        if not slash:
            return check_preset_name(mask)
        try:
            runs = list(map(int, compute.split(",")))
            holes = list(map(int, cache.split(",")))
        except ValueError:
            raise ModelError(f"{mask!r} are not bins; write them as in 6,1,1,1,1/1,2,5,5,5, or name a preset") from None
        return tuple(steps_mask(runs, holes))
    is_list = isinstance(mask, Sequence) and len(mask) > 0
    # 1.0 equals 1, but a mask has whole numbers only.
    if not is_list or not all(isinstance(step, int) for step in mask) or not {0, 1}.issuperset(mask):
        raise ModelError(
            f"steps_computation_mask={mask!r} is not a mask; give a 1 or 0 for each step, as steps_mask(..) does, or "
            "name a preset"
        )
    return tuple(map(int, mask))


def resolve_step_mask(mask: Sequence[int] | str | None, steps: int) -> tuple[int, ...] | None:
    """Return the mask of a generation: the preset for its number of steps, or the user's mask, cut to that number.

    Args:
        mask: as `DBCacheConfig.steps_computation_mask`; None stands for no mask.
        steps: transformer steps of the generation.

    Raises:
        ModelError: if the mask is shorter than the generation.
    """
    if mask is None:
        return None
    if isinstance(mask, str):
        return build_preset_mask(mask, steps)
    if len(mask) < steps:
        raise ModelError(
            f"steps_computation_mask has {len(mask)} steps and the generation {steps}; make it with "
            f"steps_mask(total_steps={steps}, ..), or name a preset: {', '.join(PRESET_BINS)}"
        )
    return tuple(mask[:steps])


def _interleave_bins(compute: Sequence[int], cache: Sequence[int]) -> list[int]:
    """Interleave bins, computed ones first."""
    if len(compute) - len(cache) not in (0, 1):
        raise ModelError(
            f"{len(compute)} compute_bins and {len(cache)} cache_bins do not interleave; give as many of both, or one "
            "more of compute_bins"
        )
    mask = []
    for run, hole in itertools.zip_longest(compute, cache, fillvalue=0):
        mask += [1] * run + [0] * hole
    return mask
