"""Votes: how much the step before changed latents and keys, on all ranks of an image, and what follows from it.

Every rank casts its changes as a step begins, in one asynchronous sum over a CPU group, and reads the sums when the
next step begins, when they have long arrived. So a step that changed keys by too much makes the second step behind it
synchronous, on all ranks alike. On a GPU that change is computed late: the vote is cast when the first micro-step has
been given to the GPU, which is busy with it while the host waits for the number of the step before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ditile.distributed.mesh import Mesh
from ditile.distributed.transport import Tally, gather_json
from ditile.hooks.drift import Copy, Drift, Row, largest
from ditile.hooks.generation import Generation

RISE = 2.5
"""A change that is so many times each of those before it is a jump, if it is at least a quarter of the bound."""

BEFORE = 3
"""So many steps are before it. The first two stale steps change keys little, as old keys hold them back; what the third
then makes up for is no jump."""


def resynchronises(changes: Sequence[float], bound: float) -> bool:
    """Whether the second step behind the last of these changes, one for each step from step 1 on, is synchronous.

    It is while pictures change by the bound or more, and after a jump: a prompt that changes in mid-run moves keys less
    than the first steps do, but suddenly.
    """
    if not changes:
        return True
    *known, last = changes
    before = max(known[-BEFORE:], default=float("inf"))
    return last >= bound or last >= max(bound / 4, RISE * before)


class Votes:
    """The votes of one generation on this rank.

    Args:
        mesh: the ranks of the image.
        drift: measures changes.
        bound: of the relative change; see `Plan.warmup_bound`.
    """

    def __init__(self, mesh: Mesh, drift: Drift, bound: float) -> None:
        self._mesh, self._drift, self._bound = mesh, drift, bound
        self._tallies: list[Tally] = []
        self._known: list[float] = []
        self._changes: Copy | None = None
        self._rows: list[Row] = []
        self._is_cast = True

    def begin_step(self, step: int) -> bool:
        """A step begins. Casts its vote, unless a number that belongs into it is still on a GPU.

        Returns:
            Whether the step is to be synchronous; the same on every rank. It means nothing before step 3: keys change
            first in step 1, which votes in step 2.
        """
        self._is_cast = False
        if self._changes is None or self._changes.is_here:
            self.cast()
        if step > 2:
            self._known.append(largest(self._tallies[step - 1].result()))
        return resynchronises(self._known, self._bound)

    def cast(self) -> None:
        """Casts the vote of this step, once; at the latest when its first micro-step is under way."""
        if not self._is_cast:
            numbers = [0, 0] if self._changes is None else self._changes.wait()
            self._tallies.append(Tally(self._mesh.control, numbers, self._mesh.traffic))
            self._is_cast = True

    def end_step(self, now: Generation, images: int) -> None:
        """A step ended: its changes leave the device. Latents have `images` rows."""
        if not self._rows:  # halves of the guidance may have more rows than others
            everyone = gather_json([now.batch, now.calls or 1, images], self._mesh.control)
            self._rows = list(_rows(self._mesh["cfg"].size, *(max(of_rank) for of_rank in zip(*everyone, strict=True))))
        self._changes = self._drift.close(self._rows)

    def close(self) -> None:
        """Waits for the votes that nobody read."""
        for tally in self._tallies:
            tally.result()


def _rows(halves: int, batch: int, calls: int, images: int) -> Iterator[Row]:
    """All rows of keys and of latents, whether they change on this rank or on another."""
    for half in range(halves):
        for branch in range(calls):
            yield from (Row("keys", half, branch, row) for row in range(batch))
        yield from (Row("latents", half, 0, row) for row in range(images))
