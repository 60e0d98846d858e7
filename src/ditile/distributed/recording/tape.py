"""Tapes: the actions of a call of the model on this rank, captured once and played in later steps.

A tape is a list of actions. Segments of what the device computes are captured, as CUDA graphs are; between them are
messages, which the host starts and waits for each time. Playing a tape runs no Python code of the call.

A call that is to be recorded is made by its code first, with its messages (`CodeCall`). Then it is captured without any
of them (`Recording`): the segment ends where a message begins or is waited for, and a new one begins after it. Nothing
that is captured is computed. The first play is compared with the code, see `first_play.py`.

Messages in memory that the call owns go through `exchange_tensors` or the recording's `exchange`, those that arrive in
memory of their own through its `receive_tensors`; what changes only numbers of the host goes through `note_action`.
Without a recording in this thread the action just happens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

Action = Callable[[], object]


class Segments(Protocol):
    """Captures what is computed on a device."""

    def open(self) -> None:
        """Begin a segment."""

    def close(self) -> Action | None:
        """End the segment, which was captured and not computed. Returns what computes it; None if it is empty."""

    def abandon(self) -> None:
        """End the segment, if one is open. Its capture is dropped. Never raises."""

    def borrow(self, tensor: Tensor) -> Tensor:
        """Return the same memory. It may be used for something else once the call has dropped the tensor."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the memory that all segments share."""


class Message(NamedTuple):
    """The tensors of an action on messages.

    Attributes:
        sent: the tensors that must be filled before it.
        received: the tensors that it fills.
    """

    sent: Sequence[Tensor]
    received: Sequence[Tensor]


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
        """Repeat the call on the same memory."""
        for action in self.actions:
            action()


class CodeCall:
    """A call that is made by its code.

    Args:
        keep: copies a tensor of a message; None keeps none.

    Attributes:
        messages: copies of what was sent and received, in order.
        under_way: for each exchange, what waits for its messages; None if they are done after its action.
    """

    def __init__(self, keep: Callable[[Tensor], Tensor] | None = None) -> None:
        self._keep = keep
        self.messages: list[Message] = []
        self.under_way: list[Action | None] = []

    @contextmanager
    def listen(self) -> Iterator[None]:
        """Record the messages of this thread within this context."""
        CURRENT.recording = self
        try:
            yield
        finally:
            CURRENT.recording = None

    def borrow(self, tensor: Tensor) -> Tensor:
        """Return the tensor unchanged. The call's code keeps what it needs."""
        return tensor

    def exchange(
        self, action: Action, sent: Sequence[Tensor], received: Sequence[Tensor], wait: Action | None = None
    ) -> None:
        """Do an action on messages. `wait` waits for them, if they are under way after it."""
        with hide_from_recording():
            copies = self._keep_all(sent)
            action()
            self.messages.append(Message(copies, self._keep_all(received)))
        self.under_way.append(wait)

    def send_tensor(self, send: Callable[[Tensor], None], tensor: Tensor, wait: Callable[[Tensor], None]) -> None:
        """Send a tensor. Nothing in the call waits for it to leave."""
        self.exchange(partial(send, tensor), [tensor], [])

    def receive_tensors(self, receive: Callable[[], Sequence[Tensor]], pass_over: Action) -> list[Tensor]:
        """Call `receive`, and return the tensors that it receives."""
        with hide_from_recording():
            received = list(receive())
            self.messages.append(Message([], self._keep_all(received)))
        return received

    def note(self, action: Action, *, captures: bool = True) -> None:
        """Do an action that changes only numbers of the host."""
        action()

    def _keep_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        if self._keep is None:
            return []
        return list(map(self._keep, tensors))


class Recording:
    """A tape that is being captured, of a call that was made by its code.

    Args:
        segments: captures what is computed.
        code: the call as its code made it.
        device: the device of the call.

    Attributes:
        messages: the tensors of each message, by the index of its action.
        notes: the indices of actions that change only numbers of the host.
    """

    def __init__(self, segments: Segments, code: CodeCall, device: torch.device) -> None:
        self.tape = Tape()
        self.messages: dict[int, Message] = {}
        self.notes: set[int] = set()
        self._segments = segments
        self._code = code
        self._device = device
        self.tape.held = [segments]

    @contextmanager
    def record_within(self) -> Iterator[None]:
        """Capture the work of this thread within this context."""
        try:
            self._segments.open()
            CURRENT.recording = self
            yield
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
        """Return the memory of a tensor for messages. The call must keep the tensor until they are over."""
        with hide_from_recording():
            return self._segments.borrow(tensor)

    def exchange(
        self, action: Action, sent: Sequence[Tensor], received: Sequence[Tensor], wait: Action | None = None
    ) -> None:
        """Put an action on messages between two segments."""
        self._close_segment()
        self._add_message(action, Message(sent, received))
        self._segments.open()

    def send_tensor(self, send: Callable[[Tensor], None], tensor: Tensor, wait: Callable[[Tensor], None]) -> None:
        """Put a message between two segments. Nothing in the call waits for it to leave.

        It leaves from memory outside of all segments, because other tapes may write the shared memory meanwhile; `wait`
        waits until the message of the play before has left that memory.
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
        self.exchange(copy_and_send, [message], [])

    def receive_tensors(self, receive: Callable[[], Sequence[Tensor]], pass_over: Action) -> list[Tensor]:
        """Return memory into which each play copies the tensors that `receive` returns.

        `pass_over` does what the action does to numbers of the host.
        """
        self._close_segment()
        pass_over()
        landed: list[Tensor] = []
        with hide_from_recording():
            # This message has the same number in the code's call, where its shapes are known.
            for heard in self._code.messages[self.tape.num_messages].received:
                landed.append(torch.empty_like(heard, device=self._device))

        def receive_and_copy() -> None:
            for place, tensor in zip(landed, receive(), strict=True):
                place.copy_(tensor)

        self.tape.held.append(landed)
        self._add_message(receive_and_copy, Message([], landed))
        self._segments.open()
        return landed

    def note(self, action: Action, *, captures: bool = True) -> None:
        """Put an action that changes only numbers of the host into the tape. No segment ends."""
        self.notes.add(len(self.tape.actions))
        self.tape.actions.append(action)
        if captures:
            action()

    def _add_message(self, action: Action, message: Message) -> None:
        self.messages[len(self.tape.actions)] = message
        self.tape.actions.append(action)
        self.tape.num_messages += 1


class _Current(threading.local):
    """What each thread records. It has no methods, because it is read at every message.

    Attributes:
        recording: the call that is heard or captured; None where no call is recorded.
        is_exchanging: whether an action on messages is under way, between two segments.
    """

    recording: CodeCall | Recording | None = None
    is_exchanging: bool = False


CURRENT = _Current()


@contextmanager
def hide_from_recording() -> Iterator[None]:
    """Hide from a recorded call the work within this context: messages, and counters on the CPU."""
    was_exchanging = CURRENT.is_exchanging
    CURRENT.is_exchanging = True
    try:
        yield
    finally:
        CURRENT.is_exchanging = was_exchanging


def exchange_tensors(action: Callable[..., None], sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
    """Do an action on messages in these tensors. If a call is recorded, do it whenever its tape is played.

    Args:
        action: called with the tensors.
        sent: what leaves.
        received: where something arrives.
    """
    recording = CURRENT.recording
    if recording is None:
        action(*sent, *received)
        return
    leaving = list(map(recording.borrow, sent))
    landing = list(map(recording.borrow, received))
    recording.exchange(partial(action, *leaving, *landing), leaving, landing)


def note_action(action: Action, *, captures: bool = True) -> None:
    """Do an action that changes only numbers of the host. If a call is recorded, do it whenever its tape is played.

    `captures` says whether it is also done while the call is captured, after its code has done it.
    """
    if CURRENT.recording is None:
        action()
    else:
        CURRENT.recording.note(action, captures=captures)
