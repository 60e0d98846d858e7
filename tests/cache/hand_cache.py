"""DBCache by hand for the simulation: the first blocks say whether the rest runs, or what it added is added again.

PipeFusion decides on each patch by itself; DistriFusion, whose patches are made at the same time, on the image. In the
synchronous steps the image is decided on as one, except that the last of them is computed: its keys are read next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.parallel.pipefusion.attention import Place
from tests.parallel.pipefusion.simulated_families import Run

Key = tuple[int, int]
"""A guidance branch, and a patch."""


@dataclass
class HandCache:
    """One picture's.

    Attributes:
        first: blocks of the probe; with none it is what comes into the first block.
        last: blocks that always run.
        threshold: a patch that changed by less is not computed.
        spare: steps that are computed anyhow.
        warmup: synchronous steps of the schedule.
        differences: every one that was looked at.
        skipped: the steps that were left out, by branch and patch.
        looking: whether only probes are wanted: DistriFusion's patches wait for each other's.
    """

    first: int
    last: int
    threshold: float
    spare: int
    warmup: int
    steps: int
    place: Place | None = None
    step: int = 0
    differences: list[float] = field(default_factory=list)
    skipped: dict[Key, list[int]] = field(default_factory=dict)
    looking: bool = False
    probes: dict[Key, Tensor] = field(default_factory=dict)
    before: dict[Key, Tensor] = field(default_factory=dict)
    added: dict[Key, tuple[Tensor | None, Tensor]] = field(default_factory=dict)
    decided: dict[int, bool] = field(default_factory=dict)

    def run(self, blocks: Sequence[Any], run: Run, words: Any, tokens: Tensor) -> tuple[Any, Tensor]:
        """In place of the plain chain."""
        place = self.place
        assert place is not None
        start = tokens
        for block in blocks[: self.first]:
            words, tokens = run(block, words, tokens)
        probe, patches = (
            tokens - start if self.first else tokens,
            range(len(place.spans)) if place.patch is None else [place.patch],
        )
        for patch in patches:
            self.probes[place.branch, patch] = probe[:, place.spans[patch]] if place.patch is None else probe
        if self.looking:
            return words, tokens
        if place.apart and place.patch is not None:
            skip = self.decided[place.branch]
        else:
            skip = self.decide(place.branch, list(patches))
        rest = blocks[self.first : len(blocks) - self.last]
        if skip:
            words, tokens = self.add(words, tokens, list(patches))
        else:
            words, tokens = self.compute(rest, run, words, tokens, list(patches))
        for block in blocks[len(blocks) - self.last :] if self.last else []:
            words, tokens = run(block, words, tokens)
        return words, tokens

    def decide(self, branch: int, patches: list[int]) -> bool:
        """Whether these patches, all together, are left out."""
        place = self.place
        assert place is not None
        keys = [(branch, patch) for patch in patches]
        read_next = self.step == self.warmup - 1 and self.warmup < self.steps
        if self.step < self.spare or read_next or any(key not in self.before for key in keys):
            return self.note(keys, False)
        change = sum(float((self.probes[key] - self.before[key]).abs().sum()) for key in keys)
        difference = change / sum(float(self.before[key].abs().sum()) for key in keys)
        self.differences.append(difference)
        return self.note(keys, difference < self.threshold)

    def note(self, keys: list[Key], skip: bool) -> bool:
        for key in keys:
            self.skipped.setdefault(key, []).extend([self.step] if skip else [])
        return skip

    def add(self, words: Any, tokens: Tensor, patches: list[int]) -> tuple[Any, Tensor]:
        place = self.place
        assert place is not None
        added = [self.added[place.branch, patch] for patch in patches]
        text = added[0][0]
        if place.text_here:
            words = None if text is None else words if isinstance(words, type(None)) else words + text
        return words, tokens + torch.cat([image for _, image in added], 1)

    def compute(self, blocks: Sequence[Any], run: Run, words: Any, tokens: Tensor, patches: list[int]) -> Any:
        place = self.place
        assert place is not None
        start, text = tokens, words
        for block in blocks:
            words, tokens = run(block, words, tokens)
        told = None if words is None or text is None else words - text
        for patch in patches:
            key = (place.branch, patch)
            image = (tokens - start)[:, place.spans[patch]] if place.patch is None else tokens - start
            self.before[key], self.added[key] = self.probes[key], (told if patch in (0, place.patch) else None, image)
        return words, tokens
