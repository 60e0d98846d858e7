"""Receives that are posted ahead, so that a message travels while the one before it is computed on.

Gloo's receives wait for nothing but their message. NCCL's are kernels that spin on the device, and to launch a kernel
for the first time, or to free memory, may wait for all that runs there. So nothing is posted that waits for what this
rank has yet to launch, be it by way of other ranks, which wait for what they have posted. With M patches on their way
round N stages, N - 1 of these may each have one more activation posted if M >= N, and the first stage one more patch
of latents if M > N.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import Tensor

from ditile.distributed.transport import Wire

AHEAD = 2  # receives that are posted before they are needed; where they occupy the device, one


class Key(NamedTuple):
    """Names a message. It does not travel: both ends count alike."""

    step: int
    patch: int
    branch: int = 0
    piece: int = 0


class Inbox:
    """A wire whose receives are posted ahead, in the order in which the schedule expects them.

    Args:
        wire: carries the messages.
        shape: of a message; None if it is not known yet.
        is_free: whether all work of this rank that a message depends on was launched.
        looks_ahead: whether any may be posted ahead where receives occupy the device.
    """

    def __init__(
        self, wire: Wire, shape: Callable[[Key], tuple[int, ...] | None], is_free: Callable[[Key], bool], *,
        looks_ahead: bool,
    ) -> None:  # fmt: skip
        self.wire, self._shape, self._is_free = wire, shape, is_free
        self._looks_ahead = looks_ahead
        self._expected: deque[Key] = deque()

    def expect(self, keys: Iterable[Key]) -> None:
        """More messages are certain to come."""
        self._expected.extend(keys)

    def take(self, key: Key, like: Tensor) -> Tensor:
        """The next message, which must be `key`'s; those behind it are posted meanwhile."""
        ahead = int(self._looks_ahead) if self.wire.occupies(like.device) else AHEAD
        if not self.wire.posted:
            self._post(like)
        self._look_ahead(like, 1 + ahead)
        message = self.wire.take(key)
        self._look_ahead(like, ahead)
        return message

    def clear(self) -> None:
        """Forgets all expectations."""
        self._expected.clear()

    def _look_ahead(self, like: Tensor, number: int) -> None:
        while self.wire.posted < number and self._expected and self._is_free(self._expected[0]):
            if not self._post(like):
                return

    def _post(self, like: Tensor) -> bool:
        """Posts the next one; returns whether its shape is known."""
        shape = self._shape(self._expected[0])
        if shape is not None:
            self.wire.post(self._expected.popleft(), shape, like)
        return shape is not None
