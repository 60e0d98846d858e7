"""Transport: point-to-point messages and the few collectives, over gloo or NCCL, with every byte counted.

A `PeerChannel` is a one-way, ordered channel between two ranks: messages need no tags. Both ranks know their shapes
from the layout, so shapes are never sent. CUDA tensors over gloo (several ranks on one GPU) go through the CPU. A sent
tensor is kept until its work is done; each receive has a buffer of its own.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ditile.distributed.recording.tape import CURRENT
from ditile.distributed.trace import GenerationTrace
from ditile.distributed.wire import MessagePacking, SiteBases

Unpack = Callable[..., Tensor]
"""(a packed message, index=its number) -> the tensor that was packed."""
OutgoingTensors = Sequence[tuple[int, Tensor]]
"""(peer, tensor) of each message to send."""
IncomingShapes = Sequence[tuple[int, Sequence[int]]]
"""(peer, shape) of each message to receive."""
StartWorks = Callable[[], Sequence[dist.Work]]
"""Starts the messages whose memory `Prepare` was given, and returns their works."""
Prepare = Callable[[Sequence[Tensor], Sequence[Tensor]], StartWorks]
"""(tensors to send, memory for what arrives) -> a function that starts the messages."""
KeepMessage = Callable[[int, Sequence[int], Tensor], Tensor]
"""(number of a message, its shape, a tensor with its dtype and device) -> memory that stays from step to step."""


@dataclass(slots=True)
class Traffic:
    """The bytes and messages that this rank has sent, by kind.

    Attributes:
        trace: records the times of waits while it is on; code that waits for messages runs within its `record_wait`.
        packings: kind of message -> how it is packed into fewer bytes. All ranks have the same packings.
    """

    bytes: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    trace: GenerationTrace = field(default_factory=GenerationTrace, compare=False)
    packings: Mapping[str, MessagePacking] = field(default_factory=dict, compare=False)

    def count_message(self, kind: str, size: int) -> None:
        """Add one message."""
        self.bytes[kind] = self.bytes.get(kind, 0) + size
        self.calls[kind] = self.calls.get(kind, 0) + 1

    def begin_message(self, kind: str, bases: SiteBases | None) -> MessagePacking | None:
        """Return the packing for the next message of a kind at a site; None if it travels unpacked."""
        packing = self.packings.get(kind)
        return None if packing is None else packing.begin_message(bases)

    def reset_counts(self) -> None:
        """Reset the counts to zero."""
        self.bytes.clear()
        self.calls.clear()


class PostedReceive(NamedTuple):
    """A posted receive."""

    key: Any
    work: dist.Work
    buffer: Tensor
    device: torch.device
    unpack: Unpack | None

    def wait_for_message(self) -> Tensor:
        """Wait for the message, and return it on the device that `post_receive` was asked for."""
        self.work.wait()
        message = self.buffer.to(self.device)
        return message if self.unpack is None else self.unpack(message, index=0)


class PeerChannel:
    """An ordered one-way channel to or from one peer of a group.

    After an error it keeps the receives that were posted: gloo's thread spins over a message whose receive is gone.

    Args:
        group, peer: the group and the peer's rank in it; NCCL makes a pair's communicator when both ranks first use it.
        kind, traffic: how and where its bytes are counted.
        shared: whether it uses the communicator of the whole group, which `connect_group` has made.
        before_send: called when a message is ready to leave, right before the send; `tuple` does nothing.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        peer: int,
        kind: str,
        traffic: Traffic,
        *,
        shared: bool = False,
        before_send: Callable[[], object] = tuple,
    ) -> None:
        self._group = group
        self._peer = peer
        self._kind = kind
        self._traffic = traffic
        self._shared = shared
        self._before_send = before_send
        # (work, tensor that is sent, message): gloo sends a copy on the CPU if the message is on a GPU.
        self._sending: deque[tuple[dist.Work, Tensor, Tensor]] = deque()
        self._posted: deque[PostedReceive] = deque()
        self._sent = 0
        self._sent_before = 0

    @property
    def num_open_receives(self) -> int:
        """Count the receives whose message was not yet asked for."""
        return len(self._posted)

    def occupies_device(self, device: torch.device) -> bool:
        """Return whether a receive occupies a device until its message is there, as NCCL's does."""
        return is_on_gpu(device, self._group)

    def open_connection(self, device: torch.device, *, sends: bool) -> None:
        """Send or receive one uncounted byte, at which NCCL makes the communicator of the pair."""
        byte = torch.zeros(1, dtype=torch.uint8, device=choose_transfer_device(device, self._group))
        self._start_transfer(byte, sends=sends).wait()

    def send_tensor(self, message: Tensor, bases: SiteBases | None = None) -> None:
        """Start to send a message, and return at once."""
        packing = self._traffic.begin_message(self._kind, bases)
        if packing is not None:
            message = packing.pack_vectors(message)
        message = message.contiguous()
        if CURRENT.recording is None:
            self._start_send(message)
        else:
            CURRENT.recording.send_tensor(self._start_send, message, self._wait_for_send)

    def _start_send(self, message: Tensor) -> None:
        # A recorded call runs this between two segments: under NCCL `is_completed` asks the GPU, which ends a capture.
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()
        staged = message.to(choose_transfer_device(message.device, self._group))
        self._before_send()
        self._sending.append((self._start_transfer(staged, sends=True), staged, message))
        self._sent += 1
        self._traffic.count_message(self._kind, staged.nbytes)

    def _wait_for_send(self, message: Tensor) -> None:
        """Wait until a tensor has left, if it is being sent."""
        # Sends end in their order, so those that began later may stay under way.
        for later_sends, (_, _, sent) in enumerate(reversed(self._sending)):
            if sent is message:
                self._wait_for_sends(later_sends)
                return

    def release_old_sends(self) -> None:
        """Release tensors that were sent before this was last called. They must have arrived, so this never waits."""
        # gloo completes a send only for code that waits for it: without this wait all sent tensors would be kept.
        self._wait_for_sends(self._sent - self._sent_before)
        self._sent_before = self._sent

    def post_receive(self, key: Any, shape: Sequence[int], like: Tensor, bases: SiteBases | None = None) -> None:
        """Start to receive the next message, which has this shape and the dtype and device of `like`."""
        dtype = like.dtype
        unpack: Unpack | None = None
        packing = self._traffic.begin_message(self._kind, bases)
        if packing is not None:
            unpack = _make_unpack(packing, shape[-1], dtype)
            shape = packing.pack_shape(shape)
            dtype = packing.dtype or dtype
        buffer = torch.empty(shape, dtype=dtype, device=choose_transfer_device(like.device, self._group))
        self._posted.append(PostedReceive(key, self._start_transfer(buffer, sends=False), buffer, like.device, unpack))

    def receive_message(self, key: Any) -> Tensor:
        """Wait for the first posted message. Raises `RuntimeError` if it was not posted as `key`'s."""
        posted = self._posted.popleft()
        if posted.key != key:
            raise RuntimeError(f"message {key} was expected and {posted.key} was posted first")
        with self._traffic.trace.record_wait(self._kind):
            return posted.wait_for_message()

    def flush_sends(self) -> None:
        """Wait until all sends are done."""
        with self._traffic.trace.record_wait(self._kind):
            self._wait_for_sends(0)

    def _wait_for_sends(self, remaining: int) -> None:
        """Wait until at most `remaining` sends are under way."""
        while len(self._sending) > remaining:
            work, *messages = self._sending.popleft()
            work.wait()
            # The tensors must live until their work is done.
            del messages

    def _start_transfer(self, message: Tensor, *, sends: bool) -> dist.Work:
        if self._shared:
            # NCCL sends a batch over the communicator of the group; for a message by itself it would make another one
            # for the pair.
            start = dist.isend if sends else dist.irecv
            (work,) = dist.batch_isend_irecv([dist.P2POp(start, message, group=self._group, group_peer=self._peer)])
            return work
        if sends:
            started = dist.isend(message, group=self._group, group_dst=self._peer)
        else:
            started = dist.irecv(message, group=self._group, group_src=self._peer)
        # torch starts nothing on a rank that is not in the group.
        assert started is not None
        return started


class AsyncReduction:
    """An all-reduce under way, which makes each of some whole numbers the largest of all ranks.

    Args:
        group: the ranks; None stands for only this rank.
    """

    def __init__(self, group: dist.ProcessGroup | None, numbers: Sequence[int], traffic: Traffic) -> None:
        self._numbers = torch.tensor(numbers, dtype=torch.int64)
        self._traffic = traffic
        self._work: dist.Work | None = None
        if group is not None:
            self._work = dist.all_reduce(self._numbers, dist.ReduceOp.MAX, group, async_op=True)
            traffic.count_message("control", self._numbers.nbytes)

    def wait_for_numbers(self) -> list[int]:
        """Wait for all ranks, and return the reduced numbers."""
        if self._work is not None:
            with self._traffic.trace.record_wait("control"):
                self._work.wait()
            self._work = None
        return list(self._numbers.tolist())


@dataclass(slots=True)
class PendingMessages:
    """Messages under way.

    Attributes:
        prepare: (what is sent, memory for what arrives) -> what starts torch's works, each time with the same memory.
        sizes: the counted bytes of each message.
        sent: the tensors to send, on `device`; kept until the messages are done.
        received: memory for what arrives, on `device`.
        device: the device of this rank.
        group: the ranks that exchange messages; None if there is only this rank, and nothing is under way.
        traffic, kind: where messages are counted and waits recorded, and the kind that they count as.
        unpack: unpacks what arrives; None if it was not packed.
        existed: whether the memory for what arrives is older than the messages.
        own_part: (this rank, its own tensor) to put among what arrives; None if nothing has to be put there.
        start_works: what `prepare` returned.
        staged, landing: what is sent and what arrives, on the device that the transport needs.
        recorded: the copy of these messages that a tape starts again; it owns none of the tensors.
    """

    prepare: Prepare
    sizes: Sequence[int]
    sent: Sequence[Tensor]
    received: list[Tensor]
    device: torch.device
    group: dist.ProcessGroup | None
    traffic: Traffic
    kind: str
    unpack: Unpack | None = None
    existed: bool = False
    own_part: tuple[int, Tensor] | None = None
    works: Sequence[dist.Work] = ()
    start_works: StartWorks | None = None
    staged: Sequence[Tensor] = ()
    landing: Sequence[Tensor] = ()
    recorded: PendingMessages | None = None

    def start(self) -> PendingMessages:
        """Start the messages now or, while a call is captured, whenever its tape is played."""
        recording = CURRENT.recording
        if recording is not None and not CURRENT.is_exchanging:
            borrowed = [recording.borrow(x) for x in self.sent]
            received = [recording.borrow(x) for x in self.received]
            self.recorded = replace(self, sent=borrowed, received=received)
            recording.exchange(self.recorded.start, borrowed, (), self.recorded.wait_for_works)
            return self
        for size in self.sizes:
            self.traffic.count_message(self.kind, size)
        if self.start_works is None:
            assert self.group is not None
            self.staged = self.sent
            self.landing = self.received
            transfer_device = choose_transfer_device(self.device, self.group)
            if transfer_device != self.device:
                self.staged = [x.to(transfer_device) for x in self.sent]
                self.landing = [torch.empty_like(x, device=transfer_device) for x in self.received]
            self.start_works = self.prepare(self.staged, self.landing)
        # When a tape starts the works again, they send from the memory that was staged first.
        elif self.staged is not self.sent:
            for copy, x in zip(self.staged, self.sent, strict=True):
                copy.copy_(x)
        self.works = self.start_works()
        return self

    def wait_for_tensors(self) -> list[Tensor]:
        """Wait, and return the received tensors, in order."""
        if CURRENT.recording is None:
            self.wait_for_works()
        elif self.recorded is not None:
            CURRENT.recording.exchange(self.recorded.wait_for_works, (), self.recorded.received)
        if self.unpack is None and self.own_part is None:
            return self.received
        return self.list_received()

    def list_received(self) -> list[Tensor]:
        """Return the received tensors, in order, after the wait for their messages."""
        tensors = self.received
        if self.own_part is not None:
            rank, own = self.own_part
            tensors = [*tensors[:rank], own, *tensors[rank:]]
        if self.unpack is None:
            return tensors
        return [self.unpack(x, index=index) for index, x in enumerate(tensors)]

    def wait_for_works(self) -> None:
        """Wait until everything that arrives is in its memory."""
        messages = self.recorded or self
        works = messages.works
        # A work must not be waited for twice: gloo would wait for another message.
        messages.works = ()
        with self.traffic.trace.record_wait(self.kind):
            for work in works:
                work.wait()
            if messages.landing is not messages.received:
                # If there is only this rank, nothing has landed.
                for target, landed in zip(messages.received, messages.landing, strict=False):
                    target.copy_(landed)
        if self.existed:
            # torch does not count writes by messages in a tensor's version.
            torch.autograd.graph.increment_version(messages.received)


def start_all_to_all(
    x: Tensor,
    sends: Sequence[int],
    receives: Sequence[int],
    group: dist.ProcessGroup,
    traffic: Traffic,
    kind: str,
    bases: SiteBases | None = None,
) -> PendingMessages:
    """Start to send consecutive runs of vectors to the ranks of a group, and to receive runs from them.

    Args:
        x: `[vectors, n]`, contiguous: the runs to send, in rank order.
        sends, receives: the lengths of the runs, in vectors.
        group, traffic, kind: with whom, and where and how bytes are counted.
        bases: the bases of the message's site. The message may travel as a difference from them.

    Returns:
        The messages. Their only tensor, `[vectors, n]`, has the received runs in rank order.
    """
    packing = traffic.begin_message(kind, bases)
    unpack: Unpack | None = None
    if packing is not None:
        unpack = _make_unpack(packing, x.shape[-1], x.dtype)
        x = packing.pack_vectors(x)
    received = x.new_empty((sum(receives), x.shape[1]))
    # What a rank sends to itself does not travel.
    num_sent = sum(sends) - sends[dist.get_rank(group)]
    size = num_sent * x.shape[1] * x.element_size()

    def prepare(sent: Sequence[Tensor], landing: Sequence[Tensor]) -> StartWorks:
        lengths = (list(receives), list(sends))
        return partial(_start_collective, dist.all_to_all_single, landing[0], sent[0], *lengths, group=group)

    return PendingMessages(prepare, [size], [x], [received], x.device, group, traffic, kind, unpack).start()


def start_exchange(
    sends: OutgoingTensors,
    receives: IncomingShapes,
    like: Tensor,
    group: dist.ProcessGroup | None,
    traffic: Traffic,
    kind: str,
    keep: KeepMessage | None = None,
    bases: SiteBases | None = None,
) -> PendingMessages:
    """Start messages to and from several peers at once.

    Args:
        sends: what goes to whom.
        receives: the peers and shapes of what comes.
        like: has the dtype and device of what comes.
        group, traffic, kind: with whom, and where and how bytes are counted.
        keep: gives the messages memory that outlives a recorded call; by default their memory is the call's own.
        bases: as in `start_all_to_all`; an exchange with bases sends one tensor, to one peer or several.
    """
    if group is None:
        return PendingMessages(_prepare_nothing, [], [], [], like.device, None, traffic, kind)
    packing = traffic.begin_message(kind, bases)
    unpack: Unpack | None = None
    if packing is not None:
        unpack = _make_unpack(packing, like.shape[-1], like.dtype)
        # A message that goes to several peers is packed once.
        packed: dict[int, Tensor] = {}
        for _, message in sends:
            if id(message) not in packed:
                packed[id(message)] = packing.pack_vectors(message)
        sends = [(peer, packed[id(message)]) for peer, message in sends]
        receives = [(peer, packing.pack_shape(shape)) for peer, shape in receives]
        like = like.new_empty(0, dtype=packing.dtype)
    sizes = [message.nbytes for _, message in sends]
    return _start_messages(sends, receives, like, group, traffic, kind, sizes, keep=keep, unpack=unpack)


def start_gather(
    x: Tensor,
    shapes: Sequence[tuple[int, ...]],
    group: dist.ProcessGroup | None,
    traffic: Traffic,
    kind: str,
    bases: SiteBases | None = None,
) -> PendingMessages:
    """Start to gather `x` of every rank of a group, in rank order. `shapes` are its shapes on all ranks.

    Counted as one message, of the bytes of `x` times the number of other ranks.
    """
    if group is None:
        return PendingMessages(_prepare_nothing, [], [], [x], x.device, None, traffic, kind)
    packing = traffic.begin_message(kind, bases)
    unpack: Unpack | None = None
    if packing is not None:
        # This rank's own part is packed too, so that all ranks have the same bits of it.
        unpack = _make_unpack(packing, x.shape[-1], x.dtype)
        shapes = [packing.pack_shape(shape) for shape in shapes]
        x = packing.pack_vectors(x)
    size = (len(shapes) - 1) * x.nbytes
    # `all_gather` takes only parts of one shape.
    if len(set(shapes)) == 1:
        x = x.contiguous()
        received = [torch.empty_like(x) for _ in shapes]

        def prepare(sent: Sequence[Tensor], landing: Sequence[Tensor]) -> StartWorks:
            return partial(_start_collective, dist.all_gather, list(landing), sent[0], group=group)

        return PendingMessages(prepare, [size], [x], received, x.device, group, traffic, kind, unpack).start()
    own_rank = dist.get_rank(group)
    receives = list(enumerate(shapes))
    del receives[own_rank]
    sends = [(peer, x) for peer, _ in receives]
    pending = _start_messages(sends, receives, x, group, traffic, kind, [size], unpack=unpack)
    pending.own_part = (own_rank, x)
    return pending


def connect_group(group: dist.ProcessGroup, device: torch.device, *, pairs: bool = False) -> None:
    """Exchange one uncounted byte in a group, at which NCCL makes its communicator.

    Args:
        group: the group; all its ranks must call this.
        device: the device of what they will send.
        pairs: whether they will send each other messages; NCCL connects two ranks when they first do.
    """
    byte = torch.zeros(1, dtype=torch.uint8, device=device)
    start_gather(byte, [(1,)] * group.size(), group, Traffic(), "control").wait_for_tensors()
    if pairs and is_on_gpu(device, group):
        peers = [rank for rank in range(group.size()) if rank != dist.get_rank(group)]
        sends = [(peer, byte) for peer in peers]
        receives = [(peer, (1,)) for peer in peers]
        _start_messages(sends, receives, byte, group, Traffic(), "control", []).wait_for_tensors()


def start_shift(
    x: Tensor,
    shape: Sequence[int],
    group: dist.ProcessGroup,
    traffic: Traffic,
    kind: str,
    bases: SiteBases | None = None,
) -> PendingMessages:
    """Start to send `x` to the next rank of a ring, and to receive a tensor of `shape` from the rank before."""
    own_rank = dist.get_rank(group)
    next_rank = (own_rank + 1) % group.size()
    rank_before = (own_rank - 1) % group.size()
    return start_exchange([(next_rank, x)], [(rank_before, shape)], x, group, traffic, kind, bases=bases)


def _start_messages(
    sends: OutgoingTensors,
    receives: IncomingShapes,
    like: Tensor,
    group: dist.ProcessGroup,
    traffic: Traffic,
    kind: str,
    sizes: Sequence[int],
    *,
    keep: KeepMessage | None = None,
    unpack: Unpack | None = None,
) -> PendingMessages:
    """Start all messages in one batch: under NCCL two ranks that both send first would hang. Empty ones are left out.

    `sizes` are the counted bytes of each message.
    """
    peers: list[int] = []
    messages: list[Tensor] = []
    for peer, x in sends:
        if x.numel():
            peers.append(peer)
            messages.append(x.contiguous())
    if keep is not None:
        # A message that goes to several peers is copied once.
        kept: dict[int, Tensor] = {}
        for index, message in enumerate(messages):
            if id(message) not in kept:
                kept[id(message)] = keep(index, message.shape, message).copy_(message)
        messages = [kept[id(message)] for message in messages]
    received: list[Tensor] = []
    for index, (_, shape) in enumerate(receives):
        if keep is None:
            received.append(torch.empty(shape, dtype=like.dtype, device=like.device))
        else:
            # The numbers of received messages follow those of sent ones.
            received.append(keep(len(messages) + index, shape, like))

    def prepare(sent: Sequence[Tensor], landing: Sequence[Tensor]) -> StartWorks:
        operations = []
        for peer, x in zip(peers, sent, strict=True):
            operations.append(dist.P2POp(dist.isend, x, group=group, group_peer=peer))
        for (peer, _), buffer in zip(receives, landing, strict=True):
            if buffer.numel():
                operations.append(dist.P2POp(dist.irecv, buffer, group=group, group_peer=peer))
        if not operations:
            return tuple  # which makes an empty sequence of works
        return partial(dist.batch_isend_irecv, operations)

    existed = keep is not None
    return PendingMessages(
        prepare, sizes, messages, received, like.device, group, traffic, kind, unpack, existed
    ).start()


def _prepare_nothing(sent: Sequence[Tensor], landing: Sequence[Tensor]) -> StartWorks:
    return tuple


def _start_collective(collective: Callable[..., dist.Work | None], *tensors: Any, group: Any) -> list[dist.Work]:
    work = collective(*tensors, group=group, async_op=True)
    assert work is not None
    return [work]


def start_broadcast(x: Tensor, source: int, group: dist.ProcessGroup, traffic: Traffic, kind: str) -> PendingMessages:
    """Start to send `x` of group rank `source` into `x` of every other rank, which has the same shape."""
    sizes = []
    if dist.get_rank(group) == source:
        sizes.append((group.size() - 1) * x.nbytes)

    def prepare(sent: Sequence[Tensor], landing: Sequence[Tensor]) -> StartWorks:
        # Where gloo cannot see the device, what is sent and what arrives are two copies of one tensor.
        if landing[0] is not sent[0]:
            landing[0].copy_(sent[0])
        return partial(_start_collective, partial(dist.broadcast, group_src=source), landing[0], group=group)

    return PendingMessages(prepare, sizes, [x], [x], x.device, group, traffic, kind, existed=True).start()


def broadcast_tensor(tensor: Tensor, source: int, group: dist.ProcessGroup, traffic: Traffic, kind: str) -> Tensor:
    """Broadcast `tensor` of group rank `source` to every rank. The others pass one of the same shape and dtype."""
    staged = tensor.contiguous().to(choose_transfer_device(tensor.device, group))
    with traffic.trace.record_wait(kind):
        dist.broadcast(staged, group=group, group_src=source)
    # torch does not count writes by messages in a tensor's version.
    torch.autograd.graph.increment_version(staged)
    if dist.get_rank(group) == source:
        traffic.count_message(kind, staged.nbytes)
    return staged.to(tensor.device)


def gather_numbers(numbers: Tensor, group: dist.ProcessGroup | None, traffic: Traffic, kind: str) -> Tensor:
    """Gather a small CPU tensor of every rank of a CPU group, stacked in rank order: `[ranks, ...]`."""
    if group is None:
        return numbers[None]
    parts = [torch.empty_like(numbers) for _ in range(group.size())]
    with traffic.trace.record_wait(kind):
        dist.all_gather(parts, numbers.contiguous(), group=group)
    traffic.count_message(kind, (group.size() - 1) * numbers.nbytes)
    return torch.stack(parts)


def gather_json(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Gather `value` of every rank, in rank order, on every rank. It is sent as JSON, not pickle, over a CPU group."""
    if group is None:
        return [value]
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(sizes, torch.tensor([data.numel()]), group=group)
    # All parts of a gather have one size, so the texts are padded to the longest.
    padded = torch.zeros(max(map(int, sizes)), dtype=torch.uint8)
    padded[: data.numel()] = data
    parts = [torch.zeros_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    values = []
    for part, size in zip(parts, sizes, strict=True):
        text = bytes(part[: int(size)].numpy())
        values.append(json.loads(text))
    return values


def describe_dtype(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype in `torch`, as it is written in JSON."""
    return str(tensor.dtype).removeprefix("torch.")


def broadcast_named_tensors(
    tensors: dict[str, Tensor],
    group: dist.ProcessGroup | None,
    control: dist.ProcessGroup | None,
    device: torch.device,
    traffic: Traffic,
) -> dict[str, Tensor]:
    """Broadcast the named tensors that a callback returned on group rank 0. Their names, dtypes and shapes are sent as
    JSON, since other ranks do not know them."""
    if group is None:
        return tensors
    own_headers = {name: [describe_dtype(t), list(t.shape)] for name, t in tensors.items()}
    headers = gather_json(own_headers, control)[0]
    received = {}
    for name, (dtype, shape) in headers.items():
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        if dist.get_rank(group) == 0:
            tensor = tensors[name].to(device)
        received[name] = broadcast_tensor(tensor, 0, group, traffic, "callback")
    return received


def _make_unpack(packing: MessagePacking, size: int, dtype: torch.dtype) -> Unpack:
    return partial(packing.unpack_vectors, size=size, dtype=dtype)


def is_on_gpu(device: torch.device, group: dist.ProcessGroup) -> bool:
    """Return whether messages of a device are sent and received on a GPU, as NCCL's are."""
    return choose_transfer_device(device, group).type != "cpu"


def choose_transfer_device(device: torch.device, group: dist.ProcessGroup) -> torch.device:
    """Choose the device on which a message must be. gloo cannot see a GPU, and NCCL by itself sees nothing else."""
    backends = dist.get_backend_config(group)
    if device.type == "cuda" and "nccl" not in backends:
        return torch.device("cpu")
    if device.type == "cpu" and "nccl" in backends and "gloo" not in backends:
        return torch.device("cuda", torch.cuda.current_device())
    return device
