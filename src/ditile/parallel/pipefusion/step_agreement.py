"""What happens at the ends of steps: the runner is told, and ranks agree on when to end and that latents are finite.

Each rank says at the beginning of a step what it wants (one asynchronous all-reduce of 8 bytes on a CPU group), and
reads what all want one step later, so that no step waits for the answer. The strongest wish counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ditile.distributed.transport import AsyncMax, Traffic
from ditile.plan.errors import ModelError, StoppedError

END_EARLY, GIVE_UP = 1, 2
"""What a rank may want: a picture of the steps that were made, or none at all."""


@dataclass(slots=True)
class StepCallbacks:
    """What the loop calls of the runner.

    Attributes:
        on_loop_begin: called with the number of steps when the loop begins.
        on_step_end: called with (step, timestep, latents) at the end of each step; latents are whole only where wanted.
        wants_latents: which steps need the whole latents on every rank.
        progress: called at each micro-step, to show that this rank is alive.
        is_stopped: whether this rank wants no picture any more.
        generators: which the pipeline may draw from.
    """

    on_loop_begin: Callable[[int], None]
    on_step_end: Callable[[int, Any, Tensor], None]
    wants_latents: Callable[[int], bool]
    progress: Callable[[], None]
    is_stopped: Callable[[], bool]
    generators: Sequence[torch.Generator] = ()


class StepAgreement:
    """The agreements of one generation.

    Args:
        group: the ranks that must end at the same step; None for one rank.
        traffic: counts the messages.
        is_stopped: whether this rank wants no picture any more.

    Attributes:
        ends_early: whether this rank wants to end with a picture.
    """

    def __init__(self, group: dist.ProcessGroup | None, traffic: Traffic, is_stopped: Callable[[], bool]) -> None:
        self._group = group
        self._traffic = traffic
        self._is_stopped = is_stopped
        self.ends_early = False
        self._wishes: list[AsyncMax] = []
        self._finite: dict[int, Tensor] = {}  # of each step on the device, where they wait to be read

    def begin_step(self) -> bool:
        """Says what this rank wants; returns whether the step is to be the last: some rank wanted it in the one before.

        All ranks call it once per step, in order.
        """
        wish = GIVE_UP if self._is_stopped() else END_EARLY * self.ends_early
        self._wishes.append(AsyncMax(self._group, wish, self._traffic))
        return len(self._wishes) > 1 and self._wishes[-2].wait_for_max() > 0

    def note_latents(self, step: int, latents: Iterable[Tensor]) -> None:
        """Notes whether latents of a step are finite, without waiting for the device."""
        finite = torch.stack([torch.isfinite(x).all() for x in latents]).all()
        known = self._finite.get(step)
        self._finite[step] = finite if known is None else known & finite.to(known.device)

    def wait_for_wishes(self) -> bool:
        """Waits for all messages under way; returns whether some rank wants no picture."""
        return max((wish.wait_for_max() for wish in self._wishes), default=0) == GIVE_UP

    def check_outcome(self, num_steps: int) -> None:
        """Compares how the steps ended, behind `wait_for_wishes`; all ranks raise the same, or none does.

        Raises:
            StoppedError: if a rank wants no picture.
            ModelError: if latents became NaN or infinite on one: they would be a black picture.
        """
        # Read once for all steps, because reading waits for a GPU.
        finite = torch.stack([*self._finite.values()]).tolist() if self._finite else []
        left = num_steps - finite.index(False) if False in finite else 0
        gives_up = self.wait_for_wishes() or self._is_stopped()
        most_left = AsyncMax(self._group, num_steps + 1 if gives_up else left, self._traffic).wait_for_max()
        if most_left > num_steps:
            raise StoppedError(f"runner.stop() ended the call after step {num_steps}; there is no picture")
        if most_left:
            raise ModelError(
                f"the latents have NaN or infinite numbers since step {num_steps - most_left + 1} of {num_steps}; "
                "lower the guidance, or compute in float32 or bfloat16; if neither helps, the weights are damaged"
            )
