"""Receives that are posted ahead, so that a message is under way while the device still computes on the one before.

A receive of gloo waits only for its message. A receive of NCCL is a kernel that spins on the device until its message
comes, and a send spins until it is received. Launching a kernel for the first time, or freeing memory, may wait for
everything that runs there, and a pipeline launches kernels of its own behind each call. So

- a receive is posted only if its message does not depend, directly or through other ranks, on work that this rank has
  not launched yet. With M patches travelling round N stages, each stage but the first may post one more activation if
  M >= N, and the first stage one more patch of latents if M > N (`PatchSchedule.takes_ahead`);
- what a stage receives next is posted just before the last send of a call, so that no stage waits in a launch for a
  send whose receiver waits in one too (`tests/parallel/pipefusion/test_hangs.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import Tensor

from ditile.distributed.transport import PeerChannel
from ditile.distributed.wire import SiteBases

RECEIVES_AHEAD = 2
"""How many receives are posted before they are needed; at most one if they occupy the device."""


class MessageKey(NamedTuple):
    """The name of a message. It is not sent: both ends count messages in the same order."""

    step: int
    patch: int
    branch: int = 0
    micro_batch: int = 0


class MessageForm(NamedTuple):
    """The shape of a message, a tensor that has its dtype and device, and what it may be a difference from."""

    shape: tuple[int, ...]
    like: Tensor
    bases: SiteBases | None = None


class ReceivePrefetcher:
    """A channel whose receives are posted ahead, in the order in which the schedule expects them.

    Args:
        channel: carries the messages.
        find_form: returns the form of a message; None if it is not known yet.
        can_post: returns whether this rank has launched all its work that a message depends on. By default it always
            has, as for activations: only those of the current step are expected.

    Attributes:
        looks_ahead: whether one receive may be posted ahead even if receives occupy the device.
    """

    def __init__(
        self,
        channel: PeerChannel,
        find_form: Callable[[MessageKey], MessageForm | None],
        can_post: Callable[[MessageKey], bool] = lambda key: True,
    ) -> None:
        self.channel = channel
        self._find_form = find_form
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
        # The next message is needed now, so its receive is posted whatever it depends on.
        if not self.channel.num_open_receives:
            self._post_receive()
        self.post_ahead(1 + ahead)
        message = self.channel.receive_message(key)
        self.post_ahead(ahead)
        return message

    def post_due(self, is_due: Callable[[MessageKey], bool]) -> None:
        """Post the next receives, as many as are due."""
        while self._expected and is_due(self._expected[0]) and self._post_receive():
            pass

    def clear_expectations(self) -> None:
        """Forget all expected messages."""
        self._expected.clear()

    def post_ahead(self, number: int) -> None:
        """Post receives until `number` of them are open, or the next one cannot be posted yet."""
        while self.channel.num_open_receives < number and self._expected and self._can_post(self._expected[0]):
            # Messages come in order, so one of unknown form holds up those after it.
            if not self._post_receive():
                return

    def _post_receive(self) -> bool:
        """Post the next receive if its form is known; return whether it was posted."""
        form = self._find_form(self._expected[0])
        if form is None:
            return False
        self.channel.post_receive(self._expected.popleft(), *form)
        return True
