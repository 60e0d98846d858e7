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
from typing import Any, Protocol

import torch
from torch import Tensor

Action = Callable[[], object]


class Segments(Protocol):
    """Captures what is computed on a device."""

    def open(self) -> None:
        """Begins a segment."""

    def close(self) -> Action | None:
        """Ends the segment, whose work is done then; returns what does it again, or None if there was none."""

    def borrow(self, tensor: Tensor) -> Tensor:
        """The same memory, which may be used for something else once nobody but the tape knows the tensor."""


class NoSegments:
    """Captures nothing: for a look at a call before it is recorded."""

    def open(self) -> None:
        """Nothing begins."""

    def close(self) -> Action | None:
        """Nothing ends."""
        return None

    def borrow(self, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor


class Tape:
    """A recorded call.

    Attributes:
        actions: segments and messages, in order.
        before: what must have happened before the first segment overwrites the memory of the last play.
        held: memory that is read or written, and is nobody else's.
        num_segments, num_messages: how many of each.
    """

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.before: list[Action] = []
        self.held: list[Any] = []
        self.num_segments = 0
        self.num_messages = 0

    def play(self) -> None:
        """Does what the call did, on the same memory."""
        for action in self.before:
            action()
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

    @contextmanager
    def record_within(self) -> Iterator[Tape]:
        """Records what this thread does within."""
        assert CURRENT.recording is None
        CURRENT.recording = self
        self._segments.open()
        try:
            yield self.tape
        finally:
            CURRENT.recording = None
            self._close_segment()

    def _close_segment(self) -> None:
        replay = self._segments.close()
        if replay is not None:
            self.tape.actions.append(replay)
            self.tape.num_segments += 1

    def borrow(self, tensor: Tensor) -> Tensor:
        """The memory of a tensor for an action on messages; the call must keep the tensor until they are over."""
        return self._segments.borrow(tensor)

    def exchange(self, action: Callable[[], object]) -> None:
        """Does an action on messages between two segments, now and in each play."""
        self._add_message(action)

    def send_tensor(self, action: Callable[[Tensor], None], tensor: Tensor, wait: Callable[[Tensor], None]) -> None:
        """Sends a tensor that nothing in the call waits for, so that the next play must: `wait` does."""
        self.tape.held.append(tensor)
        self.tape.before.append(partial(wait, tensor))
        self._add_message(partial(action, tensor))

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
        CURRENT.is_exchanging = True
        try:
            action()
        finally:
            CURRENT.is_exchanging = False
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
