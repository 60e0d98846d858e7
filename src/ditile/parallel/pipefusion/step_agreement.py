"""The work between steps: the loop tells the runner where it is, and ranks agree on when to stop.

Each rank votes at the beginning of a step (one asynchronous all-reduce of 8 bytes on a CPU group), and reads the result
one step later, so that no step waits for a vote. The highest vote wins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ditile.distributed.transport import AsyncReduction, Traffic
from ditile.plan.errors import ModelError, StoppedError

END_EARLY = 1
"""The vote of a rank that stops with the image of the steps so far."""
CANCEL = 2
"""The vote of a rank that stops without an image."""


@dataclass(slots=True)
class StepCallbacks:
    """The functions of the runner that the loop calls.

    Attributes:
        on_loop_begin: called with the number of steps when the loop begins.
        on_step_end: called with (step, timestep, latents) at the end of each step; latents are whole only in steps for
            which `wants_latents` is true.
        wants_latents: returns whether a step needs the whole latents on every rank.
        progress: called at each micro-step, to show that this rank is alive.
        is_stopped: returns whether the call was cancelled on this rank.
        generators: the generators that the pipeline may use.
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
        is_stopped: returns whether the call was cancelled on this rank.

    Attributes:
        ends_early: whether this rank asks to stop with the image so far.
    """

    def __init__(self, group: dist.ProcessGroup | None, traffic: Traffic, is_stopped: Callable[[], bool]) -> None:
        self._group = group
        self._traffic = traffic
        self._is_stopped = is_stopped
        self.ends_early = False
        self._votes: list[AsyncReduction] = []
        self._finite: dict[int, Tensor] = {}  # step -> whether its latents are finite, on the device

    def begin_step(self) -> bool:
        """Vote on stopping; return whether this step is the last, because a rank voted to stop in the step before.

        All ranks call this once per step, in order.
        """
        vote = 0
        if self._is_stopped():
            vote = CANCEL
        elif self.ends_early:
            vote = END_EARLY
        self._votes.append(AsyncReduction(self._group, [vote], self._traffic))
        return len(self._votes) > 1 and self._votes[-2].wait_for_numbers()[0] > 0

    def note_latents(self, step: int, latents: Iterable[Tensor]) -> None:
        """Note whether latents of a step are finite, without a wait for the device. Several calls may note one step."""
        finite = torch.stack([torch.isfinite(x).all() for x in latents]).all()
        if step in self._finite:
            finite = self._finite[step] & finite.to(self._finite[step].device)
        self._finite[step] = finite

    def wait_for_votes(self) -> bool:
        """Wait for all messages under way; return whether any rank cancelled the call."""
        highest_votes = [vote.wait_for_numbers() for vote in self._votes]
        return [CANCEL] in highest_votes

    def check_outcome(self, num_steps: int) -> None:
        """Compare how the steps ended; all ranks raise the same error, or none does.

        Raises:
            StoppedError: if the call was cancelled on a rank.
            ModelError: if latents became NaN or infinite on a rank, which would be decoded to a black image.
        """
        remaining = 0
        if self._finite:
            # All steps are read at once, because each read waits for the GPU.
            finite = torch.stack(list(self._finite.values())).tolist()
            if False in finite:
                remaining = num_steps - finite.index(False)
        if self.wait_for_votes() or self._is_stopped():
            remaining = num_steps + 1
        # The largest wins: a cancelled rank's, then that of the rank whose latents failed first.
        (remaining,) = AsyncReduction(self._group, [remaining], self._traffic).wait_for_numbers()
        if remaining > num_steps:
            raise StoppedError(f"runner.stop() ended the call after step {num_steps}; there is no image")
        if remaining:
            raise ModelError(
                f"the latents have NaN or infinite values since step {num_steps - remaining + 1} of {num_steps}; "
                "lower the guidance, or compute in float32 or bfloat16; if neither helps, the weights are damaged"
            )
