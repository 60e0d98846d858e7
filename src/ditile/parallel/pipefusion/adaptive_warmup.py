"""Adaptive warmup: how much the step before changed latents and keys, on all ranks of an image, and what follows.

Every rank gives its changes as a step begins, in one asynchronous sum over a CPU group, and reads the sums when the
next step begins, when they have long arrived. So a step that changed keys by too much makes the second step behind it
synchronous, on all ranks alike. On a GPU that change is computed late: it is given when the first micro-step has been
launched on the GPU, which is busy with it while the host waits for the number of the step before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ditile.distributed.mesh import Mesh
from ditile.distributed.transport import AsyncSum, gather_json
from ditile.model.hooks.generation import Generation
from ditile.model.hooks.kv_store import ChangeCopy, ChangeKey, RelativeChange, find_largest_change

RISE = 2.5
"""A change is a jump if it is this many times each of those before it, and at least a quarter of the bound."""

BEFORE = 3
"""The number of earlier changes that a jump is compared with. The first two stale steps change keys little, as old keys
hold them back; the third makes up for that, which is no jump."""


def should_resynchronise(changes: Sequence[float], bound: float) -> bool:
    """Whether the second step behind the last of these changes, one for each step from step 1 on, is synchronous.

    It is while pictures change by the bound or more, and after a jump: a prompt that changes in mid-run moves keys less
    than the first steps do, but suddenly.
    """
    if not changes:
        return True
    *known, last = changes
    before = max(known[-BEFORE:], default=float("inf"))
    return last >= bound or last >= max(bound / 4, RISE * before)


class AdaptiveWarmup:
    """The decisions of one generation on this rank.

    Args:
        mesh: the ranks of the image.
        relative_change: measures changes.
        bound: of the relative change; see `Plan.warmup_bound`.
    """

    def __init__(self, mesh: Mesh, relative_change: RelativeChange, bound: float) -> None:
        self._mesh = mesh
        self._relative_change = relative_change
        self._bound = bound
        self._change_sums: list[AsyncSum] = []
        self._known: list[float] = []
        self._changes: ChangeCopy | None = None
        self._change_keys: list[ChangeKey] = []
        self._has_started_sum = True

    def decide_synchronous_step(self, step: int) -> bool:
        """A step begins. Starts its sum, unless a number that belongs into it is still on a GPU.

        Returns:
            Whether the step is to be synchronous; the same on every rank. It means nothing before step 3: keys change
            first in step 1, whose sum starts in step 2.
        """
        self._has_started_sum = False
        if self._changes is None or self._changes.has_arrived:
            self.start_change_sum()
        if step > 2:
            self._known.append(find_largest_change(self._change_sums[step - 1].wait_for_sums()))
        return should_resynchronise(self._known, self._bound)

    def start_change_sum(self) -> None:
        """Starts the sum of this step, once; at the latest when its first micro-step is under way."""
        if not self._has_started_sum:
            numbers = [0, 0] if self._changes is None else self._changes.wait_for_changes()
            self._change_sums.append(AsyncSum(self._mesh.control, numbers, self._mesh.traffic))
            self._has_started_sum = True

    def record_step_changes(self, now: Generation, images: int) -> None:
        """A step ended: starts to copy its changes to the host. Latents have `images` rows."""
        if not self._change_keys:  # halves of the guidance may have more rows than others
            counts = zip(*gather_json([now.batch, now.calls or 1, images], self._mesh.control), strict=True)
            self._change_keys = list(_list_change_keys(self._mesh["cfg"].num_ranks, *map(max, counts)))
        self._changes = self._relative_change.start_change_copy(self._change_keys)

    def wait_for_sums(self) -> None:
        """Waits for the sums that nobody read."""
        for change_sum in self._change_sums:
            change_sum.wait_for_sums()


def _list_change_keys(halves: int, batch: int, calls: int, images: int) -> Iterator[ChangeKey]:
    """All rows of keys and of latents, whether they change on this rank or on another."""
    for half in range(halves):
        for branch in range(calls):
            yield from (ChangeKey("keys", half, branch, row) for row in range(batch))
        yield from (ChangeKey("latents", half, 0, row) for row in range(images))
