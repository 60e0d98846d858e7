"""Generation: the state of one image (or batch of images) in the making, from `set_timesteps` to the last `step`.

It says which micro-step and which guidance branch the pipeline is at, and owns the memory that survives a step.
Seats, attention and scheduler read it; only the loop writes it. It is dropped when the call ends.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ditile.errors import StateError
from ditile.hooks.kv_store import Memory
from ditile.plan.layout import DUMMY_TEXT, Layout, Part, Split
from ditile.plan.schedule import Micro


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of an attention layer at a micro-step.

    Attributes:
        runs: of each rank that shares them out, where they are in the layer's whole sequence; in the local order.
        index: this rank among them.
        length: of the whole sequence.
        image: where the image is in it.
        dummies: tokens here that stand for absent text, in front or behind; nobody else sees them.
        dummies_first: whether they are in front.
    """

    runs: tuple[tuple[range, ...], ...]
    index: int
    length: int
    image: range
    dummies: int
    dummies_first: bool

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each rank, dummies apart."""
        return tuple(sum(map(len, runs)) for runs in self.runs)

    @property
    def real(self) -> slice:
        """This rank's tokens without the dummies."""
        if not self.dummies:
            return slice(None)
        return slice(self.dummies, None) if self.dummies_first else slice(0, self.lengths[self.index])


@dataclass(slots=True)
class Generation:
    """Where the pipeline is, and what must survive.

    `branch` counts the transformer calls since the last `scheduler.step`; `calls` is their number in a step, learnt in
    the first one. A call of `batch` rows may be computed in pieces, one after the other: `piece` counts them, and
    `rows` are the rows at hand (None: all). `ages`, `keeps_keys` and `is_stale` come from the schedule; `split` and
    `index` say which tokens this rank computes, and `branches`, of (step, calls), which of the calls; where a crew
    computes whole steps together, `crew` and `crew_index` say which tokens of those.
    """

    ages: Callable[[Micro], tuple[int, ...]]
    keeps_keys: Callable[[int], bool]
    is_stale: Callable[[int], bool] = lambda step: False
    split: Split = Split()
    index: int = 0
    branches: Callable[[int, int], Sequence[int]] = lambda step, calls: range(calls)
    memory: Memory = field(default_factory=Memory)
    micro: Micro = Micro(0, None)
    branch: int = 0
    calls: int | None = None
    batch: int = 1
    piece: int = 0
    rows: range | None = None
    crew: Split | None = None
    crew_index: int = 0
    layouts: dict[int, Layout] = field(default_factory=dict)
    _parts: dict[tuple[int, int | None], tuple[Part, ...]] = field(default_factory=dict)
    _tokens: dict[tuple[int, int | None, bool], Tokens] = field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        """The layout of the branch that is being computed."""
        return self.layouts[self.branch]

    def parts(self, patch: int | None, branch: int | None = None) -> tuple[Part, ...]:
        """What each rank of the sequence axes has of a patch (None: of the image), in the branch at hand or another."""
        branch = self.branch if branch is None else branch
        if (branch, patch) not in self._parts:
            split, _ = self._place(patch)
            self._parts[branch, patch] = split.parts(self.layouts[branch], patch)
        return self._parts[branch, patch]

    def part(self, patch: int | None, branch: int | None = None) -> Part:
        """What this rank has of it."""
        _, index = self._place(patch)
        return self.parts(patch, branch)[index]

    @property
    def is_whole(self) -> bool:
        """Whether this rank computes all tokens of the image at the micro-step at hand."""
        return self.micro.patch is None and self._place(None)[0].ranks == 1

    def _place(self, patch: int | None) -> tuple[Split, int]:
        """How ranks share out a patch (None: the image), and this rank's place among them."""
        if patch is None and self.crew is not None:
            return self.crew, self.crew_index
        return self.split, self.index

    def tokens(self, *, joint: bool) -> Tokens:
        """The tokens of an attention layer that sees the text, or does not, at the micro-step at hand."""
        key = (self.branch, self.micro.patch, joint)
        if key not in self._tokens:
            layout, parts = self.layout, self.parts(self.micro.patch)
            joint = joint and layout.joint != "none"
            runs = tuple(layout.runs(part, joint=joint) for part in parts)
            _, own = self._place(self.micro.patch)
            dummies = 0 if parts[own].text or not joint else DUMMY_TEXT
            length = layout.image + (layout.text if joint else 0)
            first = layout.joint == "text_first"
            start = length - layout.image if first else 0
            image = range(start, start + layout.image)
            self._tokens[key] = Tokens(runs, own, length, image, dummies, first)
        return self._tokens[key]

    def constant(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What does not change in calls of the branch and the piece at hand: made once."""
        return self.memory.constant((key, self.branch, self.piece), make)

    def end_call(self) -> None:
        """One transformer call is over."""
        self.branch += 1
        self.piece, self.rows = 0, None

    def end_micro(self) -> None:
        """The scheduler stepped: the calls of a micro-step are over, and where tokens are cut must be as many as ever.

        Raises:
            StateError: if the pipeline called the transformer more or less often than in its first micro-step.
        """
        if self.calls is None:
            self.calls = self.branch
        elif self.calls != self.branch and self.layouts:  # keys and messages belong to calls
            raise StateError(
                f"the pipeline called the transformer {self.branch} times in step {self.micro.step} and {self.calls} "
                "times before; guidance that changes the number of calls in mid-run cannot be divided into patches"
            )
        self.branch = 0
