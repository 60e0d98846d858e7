"""Receives that are posted ahead, so that a message is under way while the device still computes on the one before.

A receive of gloo waits only for its message. A receive of NCCL is a kernel that spins on the device, and launching a
kernel for the first time, or freeing memory, may wait for everything that runs there. So a receive is posted only if
its message does not depend, directly or through other ranks, on work that this rank has not launched yet. With M
patches in a round of N stages, each stage but the first may post one more activation if M >= N, and the first stage one
more patch of latents if M > N (`PatchSchedule.takes_ahead`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import Tensor

from ditile.distributed.transport import PeerChannel

RECEIVES_AHEAD = 2
"""How many receives are posted before they are needed; at most one if they occupy the device."""


class MessageKey(NamedTuple):
    """The name of a message. It is not sent: both ends count messages in the same order."""

    step: int
    patch: int
    branch: int = 0
    micro_batch: int = 0


class ReceivePrefetcher:
    """A channel whose receives are posted ahead, in the order in which the schedule expects them.

    Args:
        channel: carries the messages.
        shape: returns the shape of a message; None if it is not known yet.
        can_post: returns whether this rank has launched all its work that a message depends on.

    Attributes:
        looks_ahead: whether one may be posted ahead even if receives occupy the device.
    """

    def __init__(
        self,
        channel: PeerChannel,
        shape: Callable[[MessageKey], tuple[int, ...] | None],
        can_post: Callable[[MessageKey], bool],
    ) -> None:
        self.channel = channel
        self._shape = shape
        self._can_post = can_post
        self.looks_ahead = False
        self._expected: deque[MessageKey] = deque()

    def expect_messages(self, keys: Iterable[MessageKey]) -> None:
        """Add messages that are certain to come, in their order."""
        self._expected.extend(keys)

    def receive_message(self, key: MessageKey, like: Tensor) -> Tensor:
        """Receive the next message, which must be `key`'s, and post later receives meanwhile."""
        # A receive of NCCL occupies the device until its message comes.
        ahead = int(self.looks_ahead) if self.channel.occupies_device(like.device) else RECEIVES_AHEAD
        # This one is needed now, so it is posted whatever it depends on.
        if not self.channel.num_open_receives:
            self._post_receive(like)
        self._prefetch_messages(like, 1 + ahead)
        message = self.channel.receive_message(key)
        self._prefetch_messages(like, ahead)
        return message

    def clear_expectations(self) -> None:
        """Forget all expected messages."""
        self._expected.clear()

    def _prefetch_messages(self, like: Tensor, number: int) -> None:
        while self.channel.num_open_receives < number and self._expected and self._can_post(self._expected[0]):
            # Messages come in order, so one of unknown shape holds up those after it.
            if not self._post_receive(like):
                return

    def _post_receive(self, like: Tensor) -> bool:
        """Post the next receive if its shape is known; return whether it was posted."""
        shape = self._shape(self._expected[0])
        if shape is None:
            return False
        self.channel.post_receive(self._expected.popleft(), shape, like)
        return True
