"""The tapes of a runner and their memory, with a limit.

Tapes, and the keys and values that stay at one address for them, are dropped in one order over all models and sizes:
the least recently used first. Time is counted in calls of the pipeline, so nothing of the current call is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakValueDictionary, proxy, ref

import torch
from torch import Tensor

from ditile.distributed.recording.segments import list_tensors
from ditile.distributed.recording.tape import Segments, Tape
from ditile.model.hooks.kv_store import KeptBuffers, SegmentMark
from ditile.model.recording.first_play import has_same_bits
from ditile.plan.errors import StateError

SHARE_OF_MEMORY = 0.25
"""The maximum share of a GPU's memory for tapes, including keys and values kept for them.

On one GPU FLUX.1's stale keys take 3.2 GB at 1024 px and 12 GB at 2048 px, plus what a recorded step allocates. A
quarter of 80 GB holds four sizes like the first or one like the second; the rest is for weights and other steps."""
FORMS_KEPT = 1024
"""The maximum number of known forms. Their tapes have a limit in bytes, so this only keeps the table small."""


class StaticInput:
    """Memory that stays until no tape reads it, and the tensor last copied to it."""

    def __init__(self, like: Tensor) -> None:
        # The tensor is written both in inference mode and outside it.
        with torch.inference_mode(False):
            self.tensor = torch.empty_like(like, requires_grad=False)
        self._source: Tensor | None = None
        self._state: tuple[Any, ...] = ()

    def fill(self, source: Tensor, moment: Hashable, *, checks: bool = False) -> None:
        """Copy a tensor, unless it was also the last one copied in this step, and was not written since.

        Args:
            source: the tensor.
            moment: identifies the step. In a new step a tensor may have changed without a new version, by a callback.
            checks: whether to compare the numbers when a copy is left out.
        """
        # Inference tensors have no version, so their changes are not seen.
        if source.is_inference():
            self._source = None
            self._state = ()
            self.tensor.copy_(source)
            return
        state = (moment, source.data_ptr(), source._version, source.shape, source.stride())
        # Compiled code that replays graphs of its own returns one tensor again and again, with other numbers.
        if state != self._state or torch._C._is_cached_tensor(source):  # type: ignore[attr-defined]
            self.tensor.copy_(source)
        elif checks and not has_same_bits(self.tensor, source):
            raise StateError(f"a tensor {list(source.shape)} was changed within a step, and its version was not")
        # The reference keeps another tensor from getting the source's memory and looking like it.
        self._source = source
        self._state = state


@dataclass(slots=True)
class CallTape:
    """What is known of the calls of one form (their arguments except for the numbers), and their tape if there is one.

    Attributes:
        place: the model, branch, patch, kind of step and cache decision, see `recorded_steps._describe_place`.
        size: the size of the images; tapes of calls with one size share memory.
        problem: why the calls cannot be recorded; empty if they can.
        is_given_up: whether it is certain that they cannot be recorded.
        num_looks: the number of calls that were watched.
        made_stores: (branch, layer) of the key stores that the calls made; they must exist before a tape is recorded.
        model_problem: why the model cannot be recorded with its present adapters and hooks; empty if it can.
        tape: the recording of the calls; None until there is one.
        inputs: memory for each tensor that a call is given.
        marks: (branch and layer, segment, age) of the segments of keys that a call marks as written.
        result: the result of a call, in the tape's memory.
        stored: the state of a cache of blocks after a call, as listed by `BlockCache.list_stored_keys`.
        buffers: the names of the call's buffers that stay from step to step.
        addresses: the addresses of weights, keys and these buffers.
        epoch: the epoch in which the addresses were last compared, see `GenerationMemory`.
        makers: tapes of other patches that must be played before this tape in a step.
        num_lost: the number of steps in which one of them was not played.
    """

    place: Hashable
    size: Hashable
    last_used: int = 0  # the generation
    problem: str = ""
    is_given_up: bool = False
    num_looks: int = 0
    made_stores: set[tuple[int, str]] = field(default_factory=set)
    model_problem: str = ""
    tape: Tape | None = None
    inputs: list[StaticInput] = field(default_factory=list)
    marks: list[SegmentMark] = field(default_factory=list)
    result: Any = None
    stored: Sequence[Any] = ()
    buffers: set[Hashable] = field(default_factory=set)
    addresses: Any = None
    epoch: object = None
    makers: frozenset[ref[Tape]] = frozenset()
    num_lost: int = 0

    def drop_tape(self) -> None:
        """Drop the tape and its result. The inputs stay."""
        self.tape = None
        self.result = None
        self.marks = []
        self.makers = frozenset()

    def give_up(self, problem: str) -> None:
        """Run such calls as code from now on."""
        self.drop_tape()
        self.inputs = []
        self.problem = problem
        self.is_given_up = True


class KeptTapes:
    """The forms of calls that are known, with their tapes and memory.

    Args:
        make_segments: makes the `Segments` that capture calls; one for each size of images.
        limit_bytes: the maximum memory of tapes, including the keys and values kept for them.
        has_room: (bytes of all `Segments`, of those of one size) -> whether one more call of that size has room.

    Attributes:
        generation: the number of the current call of the pipeline.
        kept_buffers: keys and values that stay in place from generation to generation.
    """

    def __init__(
        self, make_segments: Callable[[], Segments], limit_bytes: int, has_room: Callable[[int, int], bool]
    ) -> None:
        self._make_segments = make_segments
        self._limit_bytes = limit_bytes
        self._has_room = has_room
        self.generation = 0
        # The proxy makes no reference cycle, so the buffers are freed at once with this object.
        self.kept_buffers = KeptBuffers(partial(KeptTapes.make_room, proxy(self)))
        self._calls: dict[Hashable, CallTape] = {}
        # Tapes reference the memory they read, so memory that none reads is freed.
        self._statics: WeakValueDictionary[Hashable, StaticInput] = WeakValueDictionary()
        # Tapes of one size share memory. The last of them frees it; a tape that is being recorded holds it too.
        self._segments: WeakValueDictionary[Hashable, Segments] = WeakValueDictionary()
        self._pool_bytes: dict[Hashable, int] = {}
        self._tape_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Return the bytes in use."""
        return self._tape_bytes + self.kept_buffers.num_bytes

    def begin_generation(self) -> None:
        """Begin a call of the pipeline."""
        self.generation += 1
        self.kept_buffers.generation = self.generation

    def end_generation(self) -> None:
        """End a call of the pipeline. Its keys and buffers are kept for the next if a call with a tape was used."""
        if not any(call.last_used == self.generation for call in self._list_taped_calls()):
            self.kept_buffers.drop_memory_of(self.generation)

    def find_call(self, key: Hashable) -> CallTape | None:
        """Return the calls of a form at a place, if there were any."""
        call = self._calls.get(key)
        if call is not None:
            call.last_used = self.generation
        return call

    def add_call(self, key: Hashable, call: CallTape) -> None:
        """Add the calls of a form."""
        if len(self._calls) >= FORMS_KEPT:
            self._drop_calls_of(min(call.last_used for call in self._calls.values()))
        call.last_used = self.generation
        self._calls[key] = call

    def get_segments(self, size: Hashable) -> Segments:
        """Return the `Segments` that capture calls on images of a size. It stays until no tape holds it."""
        segments = self._segments.get(size)
        if segments is None:
            segments = self._make_segments()
            self._segments[size] = segments
        return segments

    def get_static(self, owner: Hashable, like: Tensor) -> StaticInput:
        """Get memory like a tensor's for an owner: an argument of a model in a branch."""
        # Calls of all patches share this memory, so a tensor that all patches are given is copied once.
        key = (owner, like.shape, like.dtype, like.stride())
        static = self._statics.get(key)
        if static is None:
            static = StaticInput(like)
            self._statics[key] = static
        return static

    def enforce_limit(self) -> bool:
        """Count the memory of all tapes, and drop the oldest if they hold too much; return whether the rest fits."""
        self._count_tape_bytes()
        return self.make_room(0)

    def make_room(self, num_bytes: int) -> bool:
        """Forget the least recently used until `num_bytes` more fit; return whether they do."""
        while self.num_bytes + num_bytes > self._limit_bytes:
            if not self._drop_oldest():
                return False
        return True

    def make_room_to_capture(self, size: Hashable) -> bool:
        """Forget the least recently used until a call on images of a size can be captured; return whether it can."""
        while not self._has_room(sum(self._pool_bytes.values()), self._pool_bytes.get(size, 0)):
            if not self._drop_oldest():
                return False
        return True

    def _drop_oldest(self) -> bool:
        """Forget the least recently used; return False if this generation uses all that is left."""
        used = [call.last_used for call in self._list_taped_calls()]
        oldest = min([*used, *self.kept_buffers.list_generations()], default=self.generation)
        if oldest >= self.generation:
            return False
        self._drop_calls_of(oldest)
        self.kept_buffers.drop_memory_of(oldest)
        return True

    def clear(self) -> None:
        """Forget everything, and free the memory."""
        self._calls.clear()
        self._pool_bytes.clear()
        self._tape_bytes = 0
        self.kept_buffers.clear()

    def _list_taped_calls(self) -> list[CallTape]:
        return [call for call in self._calls.values() if call.tape is not None]

    def _drop_calls_of(self, generation: int) -> None:
        # List only keys: a variable for a call would keep its memory alive while memory is counted.
        for key in [key for key, call in self._calls.items() if call.last_used == generation]:
            del self._calls[key]
        self._count_tape_bytes()

    def _count_tape_bytes(self) -> None:
        """Count the memory of all tapes."""
        tapes = [call.tape for call in self._calls.values() if call.tape is not None]
        tensors = list_tensors([tape.held for tape in tapes])
        tensors += [static.tensor for static in self._statics.values()]
        # Several tapes may hold the same memory.
        storages: dict[int, int] = {}
        for tensor in tensors:
            memory = tensor.untyped_storage()
            storages[memory.data_ptr()] = memory.nbytes()
        self._pool_bytes = {size: segments.num_bytes for size, segments in self._segments.items()}
        self._tape_bytes = sum(storages.values()) + sum(self._pool_bytes.values())
