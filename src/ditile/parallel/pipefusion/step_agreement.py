"""What happens between steps: the runner is told, and ranks agree on when to stop and which steps are synchronous.

Each rank votes at the beginning of a step (one asynchronous all-reduce of 8 bytes on a CPU group), and reads the result
one step later, so that no step waits for it. The highest vote counts.

With warmup=auto ranks also sum how much each step changed latents and keys. Every rank adds its changes as a step
begins, and reads the sums when the next step begins, when they have long arrived. So a step that changed keys by too
much makes the second step after it synchronous, on all ranks. On a GPU the change is known late: it is added once the
first micro-step has been launched on the GPU, which is busy with it while the host waits for the number of the step
before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ditile.distributed.mesh import Mesh
from ditile.distributed.transport import AsyncReduction, Traffic, gather_json
from ditile.model.hooks.generation import Generation
from ditile.model.hooks.kv_store import ChangeCopy, ChangeKey, RelativeChange, find_largest_change
from ditile.plan.errors import ModelError, StoppedError

END_EARLY = 1
"""The vote of a rank that stops with the image of the steps so far."""
CANCEL = 2
"""The vote of a rank that stops without an image."""


JUMP_RATIO = 2.5
"""A change is a jump if it is this many times each of those before it, and at least a quarter of the bound."""

COMPARED_CHANGES = 3
"""How many earlier changes a jump is compared with. The first two stale steps change keys little, because they are made
of old keys; the third makes up for that, which is no jump."""


@dataclass(slots=True)
class StepCallbacks:
    """What the loop calls of the runner.

    Attributes:
        on_loop_begin: called with the number of steps when the loop begins.
        on_step_end: called with (step, timestep, latents) at the end of each step; latents are whole only in steps for
            which `wants_latents` is true.
        wants_latents: whether a step needs the whole latents on every rank.
        progress: called at each micro-step, to show that this rank is alive.
        is_stopped: whether the call was cancelled on this rank.
        generators: the sources of random numbers that the pipeline may use.
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
        is_stopped: whether the call was cancelled on this rank.

    Attributes:
        ends_early: whether this rank asks to stop with the image so far.
    """

    def __init__(self, group: dist.ProcessGroup | None, traffic: Traffic, is_stopped: Callable[[], bool]) -> None:
        self._group = group
        self._traffic = traffic
        self._is_stopped = is_stopped
        self.ends_early = False
        self._votes: list[AsyncReduction] = []
        self._finite: dict[int, Tensor] = {}  # of each step, on the device until the end

    def begin_step(self) -> bool:
        """Votes; returns whether some rank voted in the step before, so that this step is the last.

        All ranks call it once per step, in order.
        """
        vote = 0
        if self._is_stopped():
            vote = CANCEL
        elif self.ends_early:
            vote = END_EARLY
        self._votes.append(AsyncReduction(self._group, [vote], self._traffic))
        return len(self._votes) > 1 and self._votes[-2].wait_for_numbers()[0] > 0

    def note_latents(self, step: int, latents: Iterable[Tensor]) -> None:
        """Notes whether latents of a step are finite, without waiting for the device."""
        finite = torch.stack([torch.isfinite(x).all() for x in latents]).all()
        if step in self._finite:
            finite = self._finite[step] & finite.to(self._finite[step].device)
        self._finite[step] = finite

    def wait_for_votes(self) -> bool:
        """Waits for all messages under way; returns whether some rank cancelled the call."""
        votes = [vote.wait_for_numbers() for vote in self._votes]
        return [CANCEL] in votes

    def check_outcome(self, num_steps: int) -> None:
        """Compares how the steps ended, after `wait_for_votes`; all ranks raise the same, or none does.

        Raises:
            StoppedError: if the call was cancelled on a rank.
            ModelError: if latents became NaN or infinite on one, from which a black image would be decoded.
        """
        remaining = 0
        if self._finite:
            # Read once for all steps, because reading waits for a GPU.
            finite = torch.stack(list(self._finite.values())).tolist()
            if False in finite:
                remaining = num_steps - finite.index(False)
        if self.wait_for_votes() or self._is_stopped():
            remaining = num_steps + 1
        # The rank whose latents failed first has most steps remaining, and a cancelled one has more than all.
        (remaining,) = AsyncReduction(self._group, [remaining], self._traffic).wait_for_numbers()
        if remaining > num_steps:
            raise StoppedError(f"runner.stop() ended the call after step {num_steps}; there is no image")
        if remaining:
            raise ModelError(
                f"the latents have NaN or infinite numbers since step {num_steps - remaining + 1} of {num_steps}; "
                "lower the guidance, or compute in float32 or bfloat16; if neither helps, the weights are damaged"
            )


def should_resynchronise(changes: Sequence[float], bound: float) -> bool:
    """Whether the second step after the last of these changes, one for each step from step 1 on, is synchronous."""
    if not changes:
        return True
    *earlier, last = changes
    if last >= bound:
        return True
    # A prompt that changes during the run moves keys less than the first steps do, but suddenly.
    largest = max(earlier[-COMPARED_CHANGES:], default=float("inf"))
    return last >= max(bound / 4, JUMP_RATIO * largest)


class AdaptiveWarmup:
    """The decisions of one generation on this rank.

    Args:
        relative_change: measures changes.
        bound: of the relative change; see `Plan.warmup_bound`.
    """

    def __init__(self, mesh: Mesh, relative_change: RelativeChange, bound: float) -> None:
        self._mesh = mesh
        self._relative_change = relative_change
        self._bound = bound
        self._change_sums: list[AsyncReduction] = []
        self._largest_changes: list[float] = []
        self._changes: ChangeCopy | None = None
        self._change_keys: list[ChangeKey] = []
        self._has_started_sum = True

    def decide_synchronous_step(self, step: int) -> bool:
        """Whether a step that begins is synchronous, the same on every rank; it means nothing before step 3.

        Starts the sum of the step, unless a number for it is still on a GPU.
        """
        self._has_started_sum = False
        if self._changes is None or self._changes.has_arrived:
            self.start_change_sum()
        # Keys change first in step 1, and the sum of that change starts in step 2.
        if step > 2:
            self._largest_changes.append(find_largest_change(self._change_sums[step - 1].wait_for_numbers()))
        return should_resynchronise(self._largest_changes, self._bound)

    def start_change_sum(self) -> None:
        """Starts the sum of this step, once; at the latest after its first micro-step was launched."""
        if not self._has_started_sum:
            numbers = [0, 0] if self._changes is None else self._changes.wait_for_changes()
            change_sum = AsyncReduction(self._mesh.control, numbers, self._mesh.traffic, dist.ReduceOp.SUM)
            self._change_sums.append(change_sum)
            self._has_started_sum = True

    def record_step_changes(self, now: Generation, images: int) -> None:
        """A step ended: starts to copy its changes to the host. Latents have `images` rows."""
        if not self._change_keys:
            # Sums need the same keys on all ranks, and halves of the guidance may have more rows than others.
            counts = zip(*gather_json([now.batch, now.calls or 1, images], self._mesh.control), strict=True)
            self._change_keys = list(_list_change_keys(self._mesh["cfg"].num_ranks, *map(max, counts)))
        self._changes = self._relative_change.start_change_copy(self._change_keys)

    def wait_for_sums(self) -> None:
        """Waits for the sums that no step has read."""
        for change_sum in self._change_sums:
            change_sum.wait_for_numbers()


def _list_change_keys(halves: int, batch: int, calls: int, images: int) -> Iterator[ChangeKey]:
    """All rows of keys and of latents, whether they change on this rank or on another."""
    for half in range(halves):
        for branch in range(calls):
            for row in range(batch):
                yield ChangeKey("keys", half, branch, row)
        for row in range(images):
            yield ChangeKey("latents", half, 0, row)
