"""The first play of a tape: its results are compared with those of the call's code, bit for bit.

It is made right after the capture, on memory as the code found it, and without other ranks. Messages that the code
received are put in place, and outgoing messages are compared instead of sent. Afterwards the memory has the values left
by the code.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ditile.distributed.recording.tape import CodeCall, Message, Recording

DEVICE_BYTES = 2**28
"""Up to this size, copies for the comparison are on the device; the rest is in the host's memory."""


class TensorKeeper:
    """Makes copies of one call's tensors, which may be too large for the device."""

    def __init__(self) -> None:
        self._num_bytes = 0

    def copy_tensor(self, tensor: Tensor) -> Tensor:
        """Copy a tensor on its device, or to the host if the copies are larger than `DEVICE_BYTES`."""
        self._num_bytes += tensor.nbytes
        device = tensor.device
        if self._num_bytes > DEVICE_BYTES:
            device = torch.device("cpu")
        return tensor.detach().to(device, copy=True)


class FirstPlay(NamedTuple):
    """A call, with which the first play of its tape is compared.

    Attributes:
        code: the call as its code made it, with copies of its messages.
        result: the result of the code.
        written: memory older than the call that the code wrote, with its previous values, in order.
        keeper: copies tensors.
    """

    code: CodeCall
    result: Any
    written: Sequence[tuple[Tensor, Tensor]]
    keeper: TensorKeeper

    def find_difference(self, recording: Recording, result: Any, made: Collection[int]) -> str:
        """Return how the tape's results differ from the code's; empty if they are equal.

        Args:
            recording: the tape.
            result: the result of the tape, in the tape's memory.
            made: addresses of memory that the tape allocated itself.
        """
        if recording.tape.num_messages != len(self.code.messages):
            return "it has another number of messages"
        memories = [memory for memory, _ in self.written]
        for message in recording.messages.values():
            for place in message.received:
                if place.untyped_storage().data_ptr() not in made:
                    memories.append(place)
        after = [self.keeper.copy_tensor(memory) for memory in memories]
        try:
            # Reversed, because the first copy of some memory has the values found by the code.
            for memory, before in reversed(self.written):
                memory.copy_(before)
            difference = self._play_alone(recording)
            leaves, form = pytree.tree_flatten(result)
            code_leaves, code_form = pytree.tree_flatten(self.result)
            if not difference and not (form == code_form and all(map(has_same_bits, leaves, code_leaves))):
                difference = "its result differs"
            for (memory, _), expected in zip(self.written, after, strict=False):
                if not difference and not has_same_bits(memory, expected):
                    difference = "what it writes differs"
        finally:
            for memory, left in zip(memories, after, strict=True):
                memory.copy_(left)
        return difference

    def _play_alone(self, recording: Recording) -> str:
        """Play a tape without exchanging messages; return how its messages differ from the code's, or nothing."""
        code_messages: Iterator[Message] = iter(self.code.messages)
        for index, action in enumerate(recording.tape.actions):
            if index in recording.notes:
                continue
            if index not in recording.messages:
                action()
                continue
            sent, received = next(code_messages)
            message = recording.messages[index]
            if not all(map(has_same_bits, message.sent, sent)):
                return "a message differs"
            for place, tensor in zip(message.received, received, strict=True):
                place.copy_(tensor)
        return ""


def has_same_bits(value: Any, other: Any) -> bool:
    """Return whether two values are equal; tensors by their shape and bits, NaN included."""
    if not isinstance(value, Tensor) or not isinstance(other, Tensor):
        return bool(value == other)
    if value.shape != other.shape or value.dtype != other.dtype:
        return False
    return torch.equal(_view_bytes(value), _view_bytes(other.to(value.device)))


def _view_bytes(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A tensor of one number that was expanded counts as contiguous with a stride of 0, and a view of bytes needs 1.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
