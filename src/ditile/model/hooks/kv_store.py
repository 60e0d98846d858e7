"""The memory that survives a step: stale keys and values, and remembered outputs. Each generation has its own.

The keys of the whole image are in one buffer `[B, S, N, H]`, and so are the values, in the order of the sequence, so
that a patch attends to them without a copy. Each head is contiguous, which attention reads faster. Every segment (a
patch; text belongs to patch 0) records the step that wrote it.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ditile.distributed.transport import PendingMessages
from ditile.distributed.wire import SiteBases
from ditile.model.hooks.token_arguments import group_runs, view_frames, write_runs
from ditile.plan.errors import StateError
from ditile.plan.plan import suggest_whole_images

NEVER = -1
"""The step of a segment that has not been written yet."""

READ_SHAPE = operator.attrgetter("shape")
READ_VERSION = operator.attrgetter("_version")
"""PyTorch's count of the writes into a tensor's memory."""


BUFFER_OWNER = "buffer"
MESSAGE_OWNER = "message"
"""The owners of buffers and of messages in `GenerationMemory.list_addresses`; a branch owns keys and values."""

SegmentMark = tuple[tuple[int, str], int, int]
"""(branch and layer, segment, age in steps) of a written segment."""
MakeZeros = Callable[[str, tuple[int, ...], Tensor], Tensor]


class _KeyPlace(NamedTuple):
    """The place of some fresh keys and values.

    Attributes:
        part: the fresh tokens that belong there; None is all of them.
        shape: number of runs and their length, for several runs at equal distances.
        k, v: views of the stale keys and values.
    """

    part: slice | None
    shape: tuple[int, int] | None
    k: Tensor
    v: Tensor


class KeyStore:
    """Keys and values of one attention layer of one guidance branch, by segment (patch).

    Args:
        length: tokens of the whole sequence.
        segments: number of patches, each written separately.
        make_zeros: (purpose, shape, like) -> zeros.

    Attributes:
        buffers: keys and values of the whole sequence; None before the first are written.
        buffer_bytes: bytes of keys and values together.
        incoming: keys of other ranks that are under way.
        incoming_runs: the places of each rank's keys in the sequence.
    """

    def __init__(
        self,
        length: int,
        segments: int,
        make_zeros: MakeZeros = lambda _, shape, like: like.new_zeros(shape),
    ) -> None:
        self._length = length
        self._make_zeros = make_zeros
        self.buffers: tuple[Tensor, Tensor] | None = None
        self.buffer_bytes = 0
        self.mask: Tensor | None = None
        self.incoming: PendingMessages | None = None
        self.incoming_runs: Sequence[tuple[range, ...]] = ()
        # The step that wrote each segment.
        self.written = [NEVER] * segments
        # Segment -> step, for all segments that a recorded call marks, even if the step is the old one.
        self.marks: dict[int, int] | None = None
        self._places: dict[tuple[tuple[range, ...], range | None], list[_KeyPlace]] = {}

    def write_keys(
        self, k: Tensor, v: Tensor, runs: Iterable[range], batch_range: range | None = None, batch_size: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Write k and v `[B, n, N, H]` over stale ones; return the keys and values of the whole sequence.

        Raises `StateError` for another batch size.

        Args:
            k, v: the fresh keys and values.
            runs: the places of their tokens in the sequence.
            batch_range: their rows in a batch of `batch_size` rows; None is all rows.
        """
        runs = tuple(runs)
        rows = k.shape[0] if batch_range is None else batch_size
        buffers = self.buffers
        if buffers is None or buffers[0].shape[0] != rows:
            if buffers is not None:
                raise StateError(
                    f"the batch changed from {buffers[0].shape[0]} to {rows} rows in mid-run, and stale "
                    "keys belong to rows; keep guidance on for the whole run, or use "
                    f"{suggest_whole_images(stale_keys=True)}"
                )
            # Zeros at first: with warmup 0 the first step attends to zeros, like in the paper.
            # Heads come before tokens, so that the memory of a head is contiguous.
            buffer_shape = (rows, k.shape[2], self._length, k.shape[3])
            k_buffer = self._make_zeros("k", buffer_shape, k).transpose(1, 2)
            v_buffer = self._make_zeros("v", buffer_shape, k).transpose(1, 2)
            self.buffers = buffers = (k_buffer, v_buffer)
            self.buffer_bytes = k_buffer.nbytes + v_buffer.nbytes
        places = self._places.get((runs, batch_range))
        if places is None:
            places = self._places[runs, batch_range] = self._find_places(buffers, runs, batch_range)
        for part, shape, *stale in places:
            for new, old in zip((k, v), stale, strict=True):
                if part is not None:
                    new = new[:, part]
                if shape is not None:
                    new = new.unflatten(1, shape)
                old.copy_(new)
        return buffers

    def drop_keys(self) -> None:
        """Drop all keys, before keys of a batch of another size are written."""
        self.buffers = None
        self.mask = None
        self._places.clear()

    @staticmethod
    def _find_places(
        buffers: tuple[Tensor, Tensor], runs: tuple[range, ...], batch_range: range | None
    ) -> list[_KeyPlace]:
        """Find the places of tokens in these runs: views of the buffers, made once."""
        k, v = buffers
        if batch_range is not None:
            k = k[batch_range.start : batch_range.stop]
            v = v[batch_range.start : batch_range.stop]
        groups = group_runs(runs)
        places: list[_KeyPlace] = []
        start = 0
        for frames in groups:
            first = frames.first
            stop = start + frames.number * len(first)
            part = None if len(groups) == 1 else slice(start, stop)
            if frames.number == 1:
                k_place = k[:, first.start : first.stop]
                v_place = v[:, first.start : first.stop]
                places.append(_KeyPlace(part, None, k_place, v_place))
            else:
                shape = (frames.number, len(first))
                places.append(_KeyPlace(part, shape, view_frames(k, frames, 1), view_frames(v, frames, 1)))
            start = stop
        return places

    def write_mask(
        self, mask: Tensor, runs: Iterable[range], batch_range: range | None = None, batch_size: int = 0
    ) -> Tensor:
        """Write a mask `[B or 1, N or 1, 1, n]` of the keys that are attended to; return the mask of all keys.

        Args:
            mask: the mask for the keys that were just written.
            runs, batch_range, batch_size: as in `write_keys`. A mask of one row counts for all rows; in a micro-batch
                it is written to all rows of the micro-batch.
        """
        rows = mask.shape[0] if batch_range is None else batch_size
        if self.mask is None:
            self.mask = self._make_zeros("mask", (rows, *mask.shape[1:3], self._length), mask)
        elif self.mask.shape[0] < rows:
            # One row has counted for all rows until now.
            self.mask = self.mask.repeat(rows, 1, 1, 1)
        own_rows = self.mask
        if batch_range is not None:
            own_rows = own_rows[batch_range.start : batch_range.stop]
        write_runs(own_rows, mask, tuple(runs), own_rows.ndim - 1)
        return own_rows

    def list_tensors(self) -> list[Tensor]:
        """Return keys, values, and their mask if there is one."""
        tensors = list(self.buffers or ())
        if self.mask is not None:
            tensors.append(self.mask)
        return tensors

    def mark_written(self, step: int, segment: int | None = None) -> None:
        """Note the step that wrote a segment, or all segments."""
        if segment is None:
            self.written = [step] * len(self.written)
        else:
            self.written[segment] = step
        if self.marks is not None:
            segments = range(len(self.written)) if segment is None else (segment,)
            self.marks.update(dict.fromkeys(segments, step))

    def segment_ages(self, step: int) -> tuple[int | None, ...]:
        """Return the age of each segment in steps; None if it was never written."""
        ages: list[int | None] = []
        for written_step in self.written:
            age = None if written_step == NEVER else step - written_step
            ages.append(age)
        return tuple(ages)


class StoreState(NamedTuple):
    """What the host knows of a layer's keys; see `KeyStore`."""

    written: list[int]
    incoming: PendingMessages | None
    incoming_runs: Sequence[tuple[range, ...]]


class AgeChecks:
    """Asserts that keys have the ages in the schedule, and counts the checks.

    Attributes:
        passed: number of reads of keys that had the scheduled age.
    """

    def __init__(self) -> None:
        self.passed = 0

    def expect_ages(self, store: KeyStore, step: int, ages: Iterable[int], where: str) -> None:
        """Raise `StateError` unless a store's segments have these ages; one older than the first step has no age."""
        scheduled: list[int | None] = []
        for age in ages:
            # A key from before the first step was never written.
            scheduled_age = None if age > step else age
            scheduled.append(scheduled_age)
        scheduled_ages = tuple(scheduled)
        if store.segment_ages(step) != scheduled_ages:
            raise StateError(
                f"{where} reads keys of ages {store.segment_ages(step)}, and the schedule says {scheduled_ages}"
            )
        self.passed += 1


class SliceEntry(NamedTuple):
    """A part that was cut from a source, the source, and the source's values if it is a dictionary."""

    value: Any
    source: Any
    source_values: tuple[Any, ...]


class RememberedOutput:
    """The output of a module, which it gives again for the same inputs if these are unchanged tensors and plain values.

    Args:
        given: the module's inputs, if they must be compared.

    Attributes:
        step: the step that last used it.
        tensors, versions: the output's tensors, and their versions when it was remembered.
        given_ids: the inputs' ids; None if an input is neither a plain value nor a tensor whose writes are counted.
        given_tensors, given_versions: the inputs' tensors, and their versions when the output was remembered.
    """

    def __init__(self, output: Any, given: tuple[Any, ...]) -> None:
        self.output = output
        # The reference keeps the id of a tensor from being reused.
        self._given = given
        self.step = NEVER
        self._read_versions()

    def _read_versions(self) -> None:
        """Note the tensors, and how often each was written to."""
        # Tensors of inference mode have no version.
        self.tensors = []
        for leaf in pytree.tree_leaves(self.output):
            if isinstance(leaf, Tensor) and not leaf.is_inference():
                self.tensors.append(leaf)
        self.versions = tuple(map(READ_VERSION, self.tensors))
        self.given_ids: tuple[int, ...] | None = tuple(map(id, self._given))
        self.given_tensors = []
        for value in self._given:
            if isinstance(value, Tensor) and not value.is_inference():
                self.given_tensors.append(value)
            elif not isinstance(value, int | float | str | None):
                self.given_ids = None
        self.given_versions = tuple(map(READ_VERSION, self.given_tensors))

    def replace_tensors(self, replacements: Mapping[int, Tensor]) -> None:
        """Replace tensors of the output and the inputs, by id, with others that hold the same numbers."""
        self.output = pytree.tree_map_only(Tensor, lambda x: replacements.get(id(x), x), self.output)
        self._given = tuple(replacements.get(id(value), value) for value in self._given)
        self._read_versions()


class GenerationMemory:
    """The key stores and the remembered outputs of one generation.

    Args:
        kept_buffers: memory for keys and values that stays in place between generations; None if it need not.

    Attributes:
        outputs: remembered outputs of modules.
        epoch: an object that is replaced after anything that may have changed the model.
        begun_models: the models that were called, each with a branch of guidance. Recorded calls note them.
        bases: the last message of each site whose messages travel as differences.
    """

    def __init__(self, kept_buffers: KeptBuffers | None = None) -> None:
        self._kept_buffers = kept_buffers
        self._stores: dict[tuple[int, str], KeyStore] = {}
        self._buffers: dict[Hashable, Tensor] = {}
        self._messages: dict[Hashable, Tensor] = {}
        self._asked_buffers: set[Hashable] | None = None
        self.outputs: dict[Hashable, RememberedOutput] = {}
        self.epoch = object()
        self.begun_models: set[Hashable] = set()
        self.bases: dict[Hashable, SiteBases] = {}
        self._slices: dict[Hashable, SliceEntry] = {}

    def get_key_store(self, branch: int, layer: str, length: int, segments: int) -> KeyStore:
        """Return the keys and values of a layer."""
        key = (branch, layer)
        if key not in self._stores:
            # A bound method would make a reference cycle, and stores must be freed at once.
            make_zeros = functools.partial(_make_zeros, self._kept_buffers, key)
            self._stores[key] = KeyStore(length, segments, make_zeros)
        return self._stores[key]

    def reuse_stale_keys(self, branch: int, layers: Sequence[str], step: int, patches: Sequence[int | None]) -> None:
        """Mark the old keys of skipped layers (given by prefix) as written now, for some patches (None: all)."""
        prefixes = tuple(layers)
        for (store_branch, layer), store in self._stores.items():
            if store_branch == branch and layer.startswith(prefixes):
                for patch in patches:
                    store.mark_written(step, patch)

    @property
    def key_bytes(self) -> int:
        """Return the bytes of all keys and values."""
        # A list is faster than a generator, and this runs in each step.
        return sum([store.buffer_bytes for store in self._stores.values()])

    def forget_branch_keys(self, branch: int) -> None:
        """Drop the keys and values of a guidance branch that this rank will not compute again."""
        for key in list(self._stores):
            if key[0] != branch:
                continue
            incoming = self._stores.pop(key).incoming
            if incoming is not None:
                # A receive that is under way writes into its tensors.
                incoming.wait_for_tensors()

    def get_persistent_buffer(self, key: Hashable, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return a buffer that keeps its content from call to call; zeros at first."""
        if self._asked_buffers is not None:
            self._asked_buffers.add(key)
        persistent = self._buffers.get(key)
        # The batch changes when guidance ends.
        if persistent is None or persistent.shape != torch.Size(shape) or persistent.dtype != like.dtype:
            persistent = _make_zeros(self._kept_buffers, key, "buffer", shape, like)
            self._buffers[key] = persistent
        return persistent

    @contextmanager
    def note_asked_buffers(self) -> Iterator[set[Hashable]]:
        """Collect, within the context, the keys of the buffers that are requested."""
        asked: set[Hashable] = set()
        self._asked_buffers = asked
        try:
            yield asked
        finally:
            self._asked_buffers = None

    def adopt_buffers(self, addresses: Mapping[Any, tuple[int, ...]]) -> None:
        """Take over an earlier generation's buffers that are still at these addresses, a result of `list_addresses`."""
        if self._kept_buffers is None:
            return
        for (owner, key), buffer_addresses in addresses.items():
            if owner != BUFFER_OWNER or key in self._buffers:
                continue
            buffer = self._kept_buffers.find_memory((key, "buffer"), buffer_addresses[0])
            if buffer is not None:
                # A new buffer would be zero, so this one is zeroed.
                self._buffers[key] = buffer.zero_()

    @property
    def keeps_buffers(self) -> bool:
        """Return whether memory stays from one generation to the next, because recorded calls read it."""
        return self._kept_buffers is not None

    def keep_message(self, key: Hashable, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return memory for a message that outlives a recorded call; it contains the last message sent."""
        assert self._kept_buffers is not None
        self._messages[key] = self._kept_buffers.get_memory(key, shape, like)
        return self._messages[key]

    # Below is the information about keys that a recorded call needs.

    def list_incoming_layers(self, branch: int) -> tuple[str, ...]:
        """Return the layers with other ranks' keys under way, as in the stale steps of DistriFusion."""
        # A list is faster than a generator, and this runs in every call.
        stores = self._stores.items()
        return tuple([layer for (owner, layer), store in stores if store.incoming is not None and owner == branch])

    def list_addresses(self, branch: int, buffers: Collection[Hashable]) -> dict[Any, tuple[int, ...]]:
        """Return the addresses of a branch's keys, values and masks, of some buffers, and of messages that stay."""
        addresses: dict[Any, tuple[int, ...]] = {}
        for key, store in self._stores.items():
            if key[0] == branch:
                addresses[key] = tuple(tensor.data_ptr() for tensor in store.list_tensors())
        for name in buffers:
            if name in self._buffers:
                addresses[BUFFER_OWNER, name] = (self._buffers[name].data_ptr(),)
        for name, memory in self._messages.items():
            addresses[MESSAGE_OWNER, name] = (memory.data_ptr(),)
        return addresses

    def list_storage_addresses(self, branch: int) -> list[int]:
        """Return the storage addresses of a branch's keys, values and masks, and of all buffers and messages."""
        tensors = [*self._buffers.values(), *self._messages.values()]
        for key, store in self._stores.items():
            if key[0] == branch:
                tensors += store.list_tensors()
        return [tensor.untyped_storage().data_ptr() for tensor in tensors]

    def copy_store_states(self, branch: int) -> dict[tuple[int, str], StoreState]:
        """Return what the host knows of the keys of a branch's layers."""
        states: dict[tuple[int, str], StoreState] = {}
        for key, store in self._stores.items():
            if key[0] == branch:
                states[key] = StoreState(list(store.written), store.incoming, store.incoming_runs)
        return states

    def restore_store_states(self, states: Mapping[tuple[int, str], StoreState]) -> None:
        """Restore the result of `copy_store_states`."""
        for key, state in states.items():
            store = self._stores[key]
            store.written = list(state.written)
            store.incoming = state.incoming
            store.incoming_runs = state.incoming_runs

    @contextmanager
    def list_marks(self, step: int) -> Iterator[list[SegmentMark]]:
        """List the segments that are marked within the context, with their age in a step; filled at its end."""
        stores = dict(self._stores)
        marks: list[SegmentMark] = []
        for store in stores.values():
            store.marks = {}
        try:
            yield marks
        finally:
            for key, store in stores.items():
                for segment, written_step in (store.marks or {}).items():
                    marks.append((key, segment, step - written_step))
                store.marks = None

    def mark_segments(self, marks: Iterable[SegmentMark], step: int) -> None:
        """Mark the segments of `list_marks` as written in a step, or before it by their age."""
        for key, segment, age in marks:
            self._stores[key].written[segment] = step - age

    def get_cached_slice(self, key: Hashable, source: Any, make: Callable[[], Any]) -> Any:
        """Return a patch's part of `source`, cut again only when `source` is another object."""
        entry = self._slices.get(key)
        # A model may fill one dictionary again for each of its blocks.
        source_values = tuple(source.values()) if isinstance(source, dict) else ()
        if entry is None or entry.source is not source or any(map(operator.is_not, source_values, entry.source_values)):
            entry = self._slices[key] = SliceEntry(make(), source, source_values)
        return entry.value

    @contextmanager
    def hide_remembered(self, shared: dict[Hashable, RememberedOutput]) -> Iterator[None]:
        """Hide remembered outputs and slices for a time, except the outputs in `shared`, which also collects new ones.

        Keys and values are still remembered.
        """
        outputs = self.outputs
        slices = self._slices
        self.outputs = shared
        self._slices = {}
        try:
            yield
        finally:
            self.outputs = outputs
            self._slices = slices

    def forget_remembered(self) -> None:
        """Forget remembered outputs and slices, because a callback may have changed what they were made of."""
        self.outputs.clear()
        self._slices.clear()
        # Calls that were recorded before must look at the model again.
        self.epoch = object()


class _KeptMemory(NamedTuple):
    """Memory, and the last generation that requested it."""

    memory: Tensor
    generation: int


class KeptBuffers:
    """Memory that stays in place from one generation to the next, because recorded calls read it there.

    Args:
        make_room: called with the bytes about to be allocated; drops memory of older generations.

    Attributes:
        generation: the number of the current generation.
    """

    def __init__(self, make_room: Callable[[int], object]) -> None:
        self._make_room = make_room
        self.generation = 0
        self.num_bytes = 0
        self._memory: dict[Hashable, dict[Hashable, _KeptMemory]] = {}

    def get_memory(self, key: Hashable, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return memory of a shape and `like`'s type, for one purpose; new memory is zero."""
        shapes = self._memory.setdefault(key, {})
        form = (tuple(shape), like.dtype, like.device)
        if form in shapes:
            memory = shapes[form].memory
        else:
            self._make_room(math.prod(shape) * like.element_size())
            # The memory is written both in inference mode and outside it.
            with torch.inference_mode(False):
                memory = torch.zeros(tuple(shape), dtype=like.dtype, device=like.device)
            self.num_bytes += memory.nbytes
        shapes[form] = _KeptMemory(memory, self.generation)
        return memory

    def find_memory(self, key: Hashable, address: int) -> Tensor | None:
        """Return the memory of a purpose at an address; None if it is gone."""
        shapes = self._memory.get(key, {})
        for form, kept in shapes.items():
            if kept.memory.data_ptr() == address:
                shapes[form] = _KeptMemory(kept.memory, self.generation)
                return kept.memory
        return None

    def list_generations(self) -> set[int]:
        """Return the generations that were the last users of some memory."""
        generations: set[int] = set()
        for shapes in self._memory.values():
            for kept in shapes.values():
                generations.add(kept.generation)
        return generations

    def drop_memory_of(self, generation: int) -> None:
        """Drop the memory last used by a generation."""
        for shapes in self._memory.values():
            for form, kept in list(shapes.items()):
                if kept.generation == generation:
                    self.num_bytes -= kept.memory.nbytes
                    del shapes[form]

    def clear(self) -> None:
        """Free the memory."""
        self._memory.clear()
        self.num_bytes = 0


def _make_zeros(
    kept_buffers: KeptBuffers | None, store: Hashable, name: str, shape: tuple[int, ...], like: Tensor
) -> Tensor:
    """Return zeros for a key store; if buffers are kept, in the memory that the last generation used for them."""
    if kept_buffers is None:
        return like.new_zeros(shape)
    return kept_buffers.get_memory((store, name), shape, like).zero_()
