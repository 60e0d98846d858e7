"""What the host of each stage asks of its device, in order, without a process: messages, waits for them, and launches.

Made by the real `PatchSchedule` and the real `ReceivePrefetcher`; the calls of these are those of `PipeFusion` and
`Loop`, written down once more, and a test compares their messages with those of real ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ditile.parallel.pipefusion.prefetch import MessageForm, MessageKey, ReceivePrefetcher
from ditile.parallel.pipefusion.shared_warmup import LATENTS, PREDICTION
from ditile.plan.schedule import MicroStep, Op, OpKind, PatchSchedule

ACTIVATIONS, STEPPED, EXCHANGED = "activations", "stepped", "exchanged"
KINDS = {ACTIVATIONS, STEPPED, EXCHANGED, PREDICTION, LATENTS}
LAUNCH, SEND, RECEIVE, WAIT = "launch", "send", "receive", "wait"
HERE = torch.empty(0)
NONE: Mapping[int, int] = {}


class Message(NamedTuple):
    """A message: its kind, who sends it to whom, and its number among those."""

    kind: str
    sender: int
    receiver: int
    number: int


class Action(NamedTuple):
    """One thing that a host does.

    Attributes:
        what: `LAUNCH`, `SEND`, `RECEIVE` or `WAIT`. Device and host go on but for what they wait for.
        message: that is sent, received or waited for.
        communicator: which does what it is asked in turn.
    """

    what: str
    message: Message | None = None
    communicator: object = None


class RecordedChannel:
    """A `PeerChannel` that writes down what is asked of it."""

    def __init__(self, actions: list[Action], kind: str, sender: int, receiver: int, communicator: object) -> None:
        self._actions, self._way, self._communicator = actions, (kind, sender, receiver), communicator
        self._posted: list[tuple[Any, Message]] = []
        self._sending: list[Message] = []
        self._count = self._sent_before = 0
        self.before_send: Callable[[], None] | None = None

    @property
    def num_open_receives(self) -> int:
        return len(self._posted)

    def occupies_device(self, device: torch.device) -> bool:
        return True

    def post_receive(self, key: Any, *_: Any) -> None:
        self._posted.append((key, self._start(RECEIVE)))

    def receive_message(self, key: Any) -> torch.Tensor:
        first, message = self._posted.pop(0)
        assert key == first, f"{key} was expected and {first} was posted first"
        self._actions.append(Action(WAIT, message))
        return HERE

    def send_tensor(self) -> Message:
        if self.before_send is not None:
            self.before_send()
        self._sending.append(self._start(SEND))
        return self._sending[-1]

    def exchange(self, *, sends: bool) -> Message:
        """One half of an exchange, in which a rank sends and receives at once."""
        return self._start(SEND if sends else RECEIVE)

    def release_old_sends(self) -> None:
        while len(self._sending) > self._count - self._sent_before:
            self._actions.append(Action(WAIT, self._sending.pop(0)))
        self._sent_before = self._count

    def _start(self, what: str) -> Message:
        message = Message(*self._way, self._count)
        self._count += 1
        self._actions.append(Action(what, message, self._communicator))
        return message


class HostProgram:
    """The program of one stage.

    Args:
        schedule: the schedule.
        stage: whose.
        calls: transformer calls of a step.
        eager: whether everything in a group is one queue, and not what each pair of ranks sends each other.
        streams: patch -> how many schedulers step some of it, where it is not one: none of a reference picture, two of
            a video with sound.
        recorded: whether calls are played, which send from memory that stays.
        place: which rank of the stage, of how many that split its tokens and exchange some in each computation.

    Attributes:
        actions: the program.
    """

    def __init__(
        self,
        schedule: PatchSchedule,
        stage: int,
        calls: int,
        *,
        eager: bool,
        streams: Mapping[int, int] = NONE,
        recorded: bool = False,
        place: tuple[int, int] = (0, 1),
    ) -> None:
        self._streams = streams
        self._recorded, self._place = recorded, place
        self._last_sent: dict[tuple[Any, ...], Message] = {}  # by the send of a tape
        self._schedule, self._stage, self._calls, self._eager = schedule, stage, calls, eager
        self.actions: list[Action] = []
        self._now, self._last = MicroStep(0, None), schedule.stages - 1
        self._expected, self._num_sends_due, self._branch = 0, 0, 0
        self._channels: dict[tuple[str, int, int], RecordedChannel] = {}
        self._activations_in = self._latents_in = None
        self._activations_out: RecordedChannel | None = None
        self._latents_out: list[RecordedChannel] = []  # by stage
        if schedule.stages > 1:
            self._open_channels()
        self._write_program()

    def _open_channels(self) -> None:
        stage, last = self._stage, self._last
        if stage > 0:
            self._activations_in = self._prefetch(self._open_channel(ACTIVATIONS, stage - 1, stage))
            fewest = self._schedule.patches - (self._schedule.references not in (None, 1))
            self._activations_in.looks_ahead = fewest >= self._schedule.stages
        if stage < last:
            self._activations_out = self._open_channel(ACTIVATIONS, stage, stage + 1)
            self._activations_out.before_send = self._post_before_send
        readers = self._schedule.latent_readers
        if stage in readers:
            self._latents_in = self._prefetch(self._open_channel(STEPPED, last, stage), self._can_post_latents)
            self._latents_in.looks_ahead = self._schedule.takes_ahead
        if stage == last:
            self._latents_out = [self._open_channel(STEPPED, last, reader) for reader in readers]
            for channel in self._latents_out:
                channel.before_send = self._post_before_send

    def _open_channel(self, kind: str, sender: int, receiver: int) -> RecordedChannel:
        index, ranks = self._place
        way = (kind, sender * ranks + index, receiver * ranks + index)
        if way not in self._channels:
            back = kind in (STEPPED, LATENTS)
            group = "latents" if back else f"downstream {sender % min(2, self._last) if self._eager else 0}"
            pair = None if self._eager else frozenset((sender, receiver))
            self._channels[way] = RecordedChannel(self.actions, *way, (group, pair))
        return self._channels[way]

    @staticmethod
    def _prefetch(channel: RecordedChannel, *can_post: Callable[[MessageKey], bool]) -> ReceivePrefetcher:
        form = MessageForm((1,), HERE)
        return ReceivePrefetcher(channel, lambda key: form, *can_post)  # type: ignore[arg-type]

    def _can_post_latents(self, key: MessageKey) -> bool:
        return (key.step, key.patch) < (self._now.step, self._now.patch or 0)

    # The loop

    def _write_program(self) -> None:
        schedule = self._schedule
        returned = -1
        for step in range(schedule.steps):
            for channel in self._list_senders():
                channel.release_old_sends()
            if step > 0 and self._activations_in is not None:
                self._activations_in.expect_messages(self._list_activations(step)[self._expected == step :])
                self._expected = step
            for sure in range(returned + 1, min(step + 1, schedule.steps - 1)):
                if self._latents_in is not None:
                    for patch in range(schedule.num_references, schedule.patches):
                        self._latents_in.expect_messages(self._list_latents(sure, patch))
                returned = sure
            for micro in schedule.list_micro_steps(step):
                self._write_micro_step(micro)

    def _list_senders(self) -> list[RecordedChannel]:
        first = [each for each in (self._activations_out, *self._latents_out) if each is not None]
        return first + [each for each in self._channels.values() if each not in first]

    def _list_activations(self, step: int) -> list[MessageKey]:
        ops = self._schedule.iter_step_ops(self._stage, step, self._calls)
        return [
            MessageKey(op.step, op.patch, op.branch, op.micro_batch)
            for op in ops
            if op.kind is OpKind.RECEIVE and op.patch is not None
        ]

    def _write_micro_step(self, micro: MicroStep) -> None:
        schedule, self._now = self._schedule, micro
        for branch in range(self._calls):
            self._branch, micro_batches = branch, len(schedule.split_micro_batches(micro))
            self._num_sends_due = micro_batches * len(schedule.list_patches(micro))
            for micro_batch in range(micro_batches):
                self._write_call(micro, branch, micro_batch)
        ops = list(schedule.iter_ops_after_call(self._stage, micro))
        for op in ops:
            if op.kind is OpKind.STEP and op.patch is not None:
                for _ in self._list_latents(op.step, op.patch):
                    self._launch()
        # Once all schedulers have stepped.
        stepped = []
        for op in ops:
            if op.kind is OpKind.SEND_STEPPED_PATCH and op.patch is not None and op.peer is not None:
                stepped += [self._latents_out[op.peer]] * len(self._list_latents(op.step, op.patch))
        self._num_sends_due = len(stepped)
        for channel in stepped:
            channel.send_tensor()
        following = schedule.find_following(micro)
        if following is not None:
            self._exchange_latents(following)

    def _exchange_latents(self, micro: MicroStep) -> None:
        for op in self._schedule.iter_ops_before_call(self._stage, micro, self._calls):
            if op.kind is OpKind.RECEIVE_STEPPED_PATCH:
                self._take_patch(op)
            elif op.kind is OpKind.SEND_WHOLE_LATENTS and op.peer is not None:
                self._open_channel(LATENTS, self._stage, op.peer).send_tensor()
            elif op.peer is not None:
                self._receive_tensor(LATENTS, op.peer)

    def _list_latents(self, step: int, patch: int) -> list[MessageKey]:
        return [MessageKey(step, patch, stream) for stream in range(self._streams.get(patch, 1))]

    def _take_patch(self, op: Op) -> None:
        assert self._latents_in is not None and op.patch is not None
        for key in self._list_latents(op.step, op.patch):
            self._latents_in.receive_message(key, HERE)
        self._launch()

    def _write_call(self, micro: MicroStep, branch: int, micro_batch: int) -> None:
        if self._latents_in is not None and not micro_batch:
            for op in self._schedule.iter_takes(self._stage, micro, branch, self._calls):
                self._take_patch(op)
        self._launch()  # embeddings and modulation, before anything is received
        ops = list(self._schedule.iter_call_ops(self._stage, micro, branch, micro_batch))
        if self._activations_in is not None and micro.step == 0 and not self._schedule.select_warmup_group(micro):
            patches = self._schedule.list_patches(micro)
            self._activations_in.expect_messages([MessageKey(0, patch, branch, micro_batch) for patch in patches])
        for op in ops:
            self._write_op(op)
        # What the model computes behind its blocks, and the pipeline of what it returns, on every stage.
        self._launch()

    def _write_op(self, op: Op) -> None:
        if op.kind is OpKind.COMPUTE:
            self._launch()
            self._exchange_tokens()
        elif op.kind is OpKind.RECEIVE:
            assert self._activations_in is not None and op.patch is not None
            self._activations_in.receive_message(MessageKey(op.step, op.patch, op.branch, op.micro_batch), HERE)
        elif op.kind is OpKind.SEND:
            self._launch()
            assert self._activations_out is not None
            self._send_activations(op)
        elif op.peer is not None and op.kind is OpKind.SEND_PREDICTION:
            self._open_channel(PREDICTION, self._stage, op.peer).send_tensor()
        elif op.peer is not None and op.kind is OpKind.RECEIVE_PREDICTION:
            self._receive_tensor(PREDICTION, op.peer)

    def _send_activations(self, op: Op) -> None:
        assert self._activations_out is not None
        key = (self._now.patch, op.patch, op.branch, op.micro_batch)
        if self._recorded and key in self._last_sent:
            # A tape has one piece of memory for what it sends.
            self.actions.append(Action(WAIT, self._last_sent[key]))
            self._launch()
        self._last_sent[key] = self._activations_out.send_tensor()

    def _post_before_send(self) -> None:
        self._num_sends_due -= 1
        micro, schedule, turn = self._now, self._schedule, 0
        is_last, is_first_step = self._stage == self._last, self._now == self._schedule.list_micro_steps(0)[0]
        if self._num_sends_due or (is_first_step and not is_last):
            return
        following: MicroStep | None = micro
        if not is_last:
            turn = (self._branch + 1) % self._calls
        if turn == 0:
            following = schedule.find_following(micro)
        if following is None:
            return
        if self._activations_in is not None:
            if following.step > self._expected:
                self._activations_in.expect_messages(self._list_activations(following.step)[:1])
                self._expected = following.step
            self._activations_in.post_ahead(1)
        if self._latents_in is not None:
            due = schedule.count_taken_patches(self._stage, following, turn, self._calls)
            self._latents_in.post_due(lambda key: self._number_patch(key) < due)

    def _number_patch(self, key: MessageKey) -> int:
        references = self._schedule.num_references
        return key.step * (self._schedule.patches - references) + key.patch - references

    def _exchange_tokens(self) -> None:
        index, ranks = self._place
        own = self._stage * ranks + index
        messages = []
        for other in range(self._stage * ranks, (self._stage + 1) * ranks):
            for way in ((own, other), (other, own)):
                if own != other:
                    key = (EXCHANGED, *way)
                    channel = self._channels.setdefault(key, RecordedChannel(self.actions, *key, key))
                    messages.append(channel.exchange(sends=way[0] == own))
        self.actions += [Action(WAIT, message) for message in messages]
        if messages:
            self._launch()

    def _receive_tensor(self, kind: str, sender: int) -> None:
        channel = self._open_channel(kind, sender, self._stage)
        channel.post_receive(kind, (1,), HERE)
        channel.receive_message(kind)
        self._launch()

    def _launch(self) -> None:
        self.actions.append(Action(LAUNCH))


def write_programs(
    schedule: PatchSchedule,
    calls: int,
    *,
    eager: bool = False,
    streams: Mapping[int, int] = NONE,
    recorded: bool = False,
    sequence: int = 1,
) -> list[list[Action]]:
    """The programs of all ranks, stage by stage, of which each has `sequence`; see `HostProgram`."""
    programs = []
    for stage in range(schedule.stages):
        for index in range(sequence):
            place = (index, sequence)
            program = HostProgram(schedule, stage, calls, eager=eager, streams=streams, recorded=recorded, place=place)
            programs.append(program.actions)
    return programs


def find_hang(programs: list[list[Action]], unbuffered: set[str], *, launches_wait: bool) -> list[str] | None:
    """Runs programs against each other as NCCL does; None if every rank comes to its end, else where each stands.

    A rank has a host, one stream, and a queue for each communicator. A message starts when it is the first of its queue
    and all that was launched before it is done. A receive ends when its send has started; a send when its receive has,
    or at once where it fits the buffer. To wait for a message is the stream's, not the host's. A launch may wait for
    all of the device, as when a kernel is loaded or memory is freed. Waits only add order: programs that end where
    every launch waits end whichever do.

    Args:
        programs: of each rank.
        unbuffered: kinds of messages that do not fit the buffer.
        launches_wait: whether every launch waits for the whole device.
    """
    ranks = [SimpleNamespace(at=0, stream=[], head=0, queues={}, own={}) for _ in programs]
    started: set[tuple[str, Message]] = set()
    ended: set[tuple[str, Message]] = set()
    has_moved = True
    while has_moved:
        has_moved = False
        for program, rank in zip(programs, ranks, strict=True):
            while _advance_device(rank, started, ended, unbuffered) | _advance_host(program, rank, launches_wait):
                has_moved = True
    if all(rank.at == len(program) and _is_idle(rank) for program, rank in zip(programs, ranks, strict=True)):
        return None
    return [str(p[rank.at]) if rank.at < len(p) else "end" for p, rank in zip(programs, ranks, strict=True)]


def _is_idle(rank: SimpleNamespace) -> bool:
    return rank.head == len(rank.stream) and not any(rank.queues.values())


def _advance_device(rank: SimpleNamespace, started: set[Any], ended: set[Any], unbuffered: set[str]) -> bool:
    """The stream and the queues go on as far as they can."""
    has_moved = False
    while rank.head < len(rank.stream) and (rank.stream[rank.head] is None or rank.stream[rank.head] in ended):
        rank.head += 1
        has_moved = True
    for queue in rank.queues.values():
        while queue:
            what, message, after = queue[0]
            if (what, message) not in started:
                if rank.head < after:
                    break
                started.add((what, message))
                has_moved = True
            other = (RECEIVE if what == SEND else SEND, message)
            if other not in started and not (what == SEND and message.kind not in unbuffered):
                break
            ended.add((what, message))
            queue.pop(0)
            has_moved = True
    return has_moved


def _advance_host(program: list[Action], rank: SimpleNamespace, launches_wait: bool) -> bool:
    """The host does what comes next; False if it waits, or is done."""
    if rank.at == len(program):
        return False
    action = program[rank.at]
    if action.what == LAUNCH:
        if launches_wait and not _is_idle(rank):
            return False
        rank.stream.append(None)
    elif action.what == WAIT:
        rank.stream.append((rank.own[action.message], action.message))
    else:
        rank.queues.setdefault(action.communicator, []).append((action.what, action.message, len(rank.stream)))
        rank.own[action.message] = action.what
    rank.at += 1
    return True
