"""Tapes: what a call of the model does on this rank, recorded in one step and played in later ones.

A tape is a list of actions. Segments of what the device computes are captured, as CUDA graphs are; between them are
messages, which the host starts and waits for each time. While a call is recorded, the segment ends where a message
begins or is waited for, and a new one begins after it. To play a tape runs no Python code of the call.

What may be recorded goes through three functions: `exchange_tensors` for messages in memory that the call owns,
`Recording.receive_tensors` for those that come in memory of their own, and `Recording.note` for what changes numbers of
the host alone. Without a recording in this thread the action just happens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

Action = Callable[[], object]


class Segments:
    """Captures what is computed on a device. Here nothing: the first call of a form is only watched."""

    def open(self) -> None:
        """Begins a segment; after an error none is open."""

    def close(self) -> Action | None:
        """Ends the segment, whose work is done then; returns what does it again, or None if there was none."""
        return None

    def abandon(self) -> None:
        """Ends the segment, if one is open, without its work: what was captured is of no use. Never raises."""

    def borrow(self, tensor: Tensor) -> Tensor:
        """The same memory, which may be used for something else once the call has dropped the tensor."""
        return tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of the memory that segments share, as far as they did not get it from outside."""
        return 0


class Tape:
    """A recorded call.

    Attributes:
        actions: segments and messages, in order.
        held: memory that is read or written, and what its segments share with other tapes.
        num_segments, num_messages: how many of each.
    """

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.held: list[Any] = []
        self.num_segments = 0
        self.num_messages = 0

    def play(self) -> None:
        """Does what the call did, on the same memory."""
        for action in self.actions:
            action()


class Recording:
    """A tape that is being made.

    Args:
        segments: captures what is computed.
    """

    def __init__(self, segments: Segments) -> None:
        self.tape = Tape()
        self._segments = segments
        self.tape.held.append(segments)

    @contextmanager
    def record_within(self) -> Iterator[Tape]:
        """Records what this thread does within."""
        assert CURRENT.recording is None
        self._segments.open()
        CURRENT.recording = self
        try:
            yield self.tape
        except BaseException:
            CURRENT.recording = None
            self._segments.abandon()
            raise
        CURRENT.recording = None
        self._close_segment()

    def _close_segment(self) -> None:
        replay = self._segments.close()
        if replay is not None:
            self.tape.actions.append(replay)
            self.tape.num_segments += 1

    def borrow(self, tensor: Tensor) -> Tensor:
        """The memory of a tensor for an action on messages; the call must keep the tensor until they are over."""
        with hide_from_recording():
            return self._segments.borrow(tensor)

    def exchange(self, action: Callable[[], object]) -> None:
        """Does an action on messages between two segments, now and in each play."""
        self._add_message(action)

    def send_tensor(self, send: Callable[[Tensor], None], tensor: Tensor, wait: Callable[[Tensor], None]) -> None:
        """Sends a tensor that nothing in the call waits for.

        It leaves from memory outside of all segments, as the segments of other tapes write theirs meanwhile; `wait`
        waits until the last message has left it.
        """
        message = self.borrow(tensor)
        sent: list[Tensor] = []

        def copy_and_send() -> None:
            # Allocated between two segments, and so outside of their memory.
            if not sent:
                sent.append(torch.empty_like(message))
            wait(sent[0])
            send(sent[0].copy_(message))

        self.tape.held.append(sent)
        self._add_message(copy_and_send)

    def receive_tensors(self, receive: Callable[[], Sequence[Tensor]]) -> list[Tensor]:
        """What an action returns, copied to memory that stays: in each play it comes in other memory."""
        landed: list[Tensor] = []

        def receive_and_copy() -> None:
            for index, tensor in enumerate(receive()):
                if index == len(landed):
                    landed.append(torch.empty_like(tensor))
                landed[index].copy_(tensor)

        self.tape.held.append(landed)
        self._add_message(receive_and_copy)
        return list(landed)

    def note(self, action: Action) -> None:
        """Does what changes numbers of the host alone, now and in each play; no segment ends."""
        self.tape.actions.append(action)
        action()

    def _add_message(self, action: Action) -> None:
        self._close_segment()
        self.tape.actions.append(action)
        self.tape.num_messages += 1
        with hide_from_recording():
            action()
        self._segments.open()


class _Current(threading.local):
    """What each thread records. Attributes and no functions, as they are read at every message.

    Attributes:
        recording: the tape that is being made; None where no call is recorded.
        is_exchanging: whether an action on messages is under way, between two segments.
    """

    recording: Recording | None = None
    is_exchanging: bool = False


CURRENT = _Current()


@contextmanager
def hide_from_recording() -> Iterator[None]:
    """Within it, nothing is part of a recorded call: messages, and what is computed once for several calls."""
    was_exchanging = CURRENT.is_exchanging
    CURRENT.is_exchanging = True
    try:
        yield
    finally:
        CURRENT.is_exchanging = was_exchanging


def exchange_tensors(action: Callable[..., None], *tensors: Tensor) -> None:
    """Does an action on messages in these tensors; if a call is recorded, also whenever its tape is played."""
    if CURRENT.recording is None:
        action(*tensors)
    else:
        recording = CURRENT.recording
        recording.exchange(partial(action, *map(recording.borrow, tensors)))


def note_action(action: Action) -> None:
    """Does what changes numbers of the host alone; if a call is recorded, also whenever its tape is played."""
    if CURRENT.recording is None:
        action()
    else:
        CURRENT.recording.note(action)
