"""Generation: the state of one image (or batch of images) in the making, from `set_timesteps` to the last `step`.

It says which micro-step and which guidance branch the pipeline is at, and owns the memory that survives a step.
Seats, attention and scheduler read it; only the loop writes it. It is dropped when the call ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from ditile.errors import StateError
from ditile.layout import Layout
from ditile.memory import Memory


class Micro(NamedTuple):
    """One iteration of the pipeline's loop: a patch of a step, or the whole step (patch None)."""

    step: int
    patch: int | None


@dataclass(slots=True)
class Generation:
    """Where the pipeline is, and what must survive.

    `branch` counts the transformer calls since the last `scheduler.step`; `calls` is their number in a step, learnt in
    the first one. `ages` and `keeps_keys` come from the schedule.
    """

    ages: Callable[[Micro], tuple[int, ...]]
    keeps_keys: Callable[[int], bool]
    memory: Memory = field(default_factory=Memory)
    micro: Micro = Micro(0, None)
    branch: int = 0
    calls: int | None = None
    layouts: dict[int, Layout] = field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        """The layout of the branch that is being computed."""
        return self.layouts[self.branch]

    def end_call(self) -> None:
        """One transformer call is over."""
        self.branch += 1

    def end_micro(self) -> None:
        """The scheduler stepped: the calls of a micro-step are over, and must be as many as ever.

        Raises:
            StateError: if the pipeline called the transformer more or less often than in its first micro-step.
        """
        if self.calls is None:
            self.calls = self.branch
        elif self.calls != self.branch:
            raise StateError(
                f"the pipeline called the transformer {self.branch} times in step {self.micro.step} and {self.calls} "
                "times before; guidance that changes the number of calls in mid-run cannot be divided into patches"
            )
        self.branch = 0
