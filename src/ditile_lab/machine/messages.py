"""The functions of torch.distributed for a rank whose peers are not there: they send nothing and wait for nobody.

    with replace_torch_distributed(LoneMessages(rank, world, device)) as messages:
        runner = parallelize(pipe, plan, device)

What peers would send arrives by a copy on the device, with random numbers, so that memory is written as by a real
message. Small messages between CPUs, in which ranks agree, are as if every rank said what this one says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ditile.model.hooks.overrides import override_attribute
from ditile.parallel.tensor import collectives
from ditile.plan.errors import StateError

NCCL = "cpu:gloo,cuda:nccl"
GLOO = "cpu:gloo,cuda:gloo"
AGREED = 64
"""Numbers of the largest message between CPUs in which ranks agree; activations are larger."""
LEAST_NOISE = 1 << 16
"""Random numbers that are kept at least; longer messages make more."""


# Compared by identity, as the groups of torch are: after a failed call the world of the next rank is another one.
@dataclass(frozen=True, eq=False)
class LoneGroup:
    """A process group of which only one rank is there."""

    group_name: str
    ranks: tuple[int, ...]
    own_rank: int
    backend: str

    def size(self) -> int:
        """How many ranks it would have."""
        return len(self.ranks)

    def rank(self) -> int:
        """This rank's place in it."""
        return self.ranks.index(self.own_rank)


class FinishedWork:
    """A message that is over as soon as it is started."""

    def wait(self, timeout: Any = None) -> bool:
        """Returns at once."""
        return True

    def is_completed(self) -> bool:
        """Yes."""
        return True


class LonePeerMessage(NamedTuple):
    """One message of a batch, in place of `P2POp`."""

    op: Callable[..., Any]
    tensor: Tensor
    group: Any
    group_peer: int


class LoneMessages:
    """What takes the place of torch.distributed's functions, under their own names.

    Args:
        rank, world: this rank among so many.
        device: where it computes.

    Attributes:
        num_messages: messages and collectives with numbers of the device that were started.
    """

    def __init__(self, rank: int, world: int, device: torch.device) -> None:
        self.num_messages = 0
        self._rank = rank
        self._device = device
        self._backend = NCCL if device.type == "cuda" else GLOO
        self._everyone = LoneGroup("everyone", tuple(range(world)), rank, self._backend)
        self._num_groups = 0
        self._noise: dict[torch.dtype, Tensor] = {}

    def list_replacements(self) -> dict[str, Any]:
        """Name in torch.distributed -> what takes its place."""
        replacements = {
            "group": SimpleNamespace(WORLD=self._everyone),
            "P2POp": LonePeerMessage,
        }
        for name in vars(type(self)):
            if not name.startswith("_") and hasattr(dist, name):
                replacements[name] = getattr(self, name)
        return replacements

    # The functions of torch.distributed, with its names and parameters.

    def is_initialized(self) -> bool:
        """Yes: the ranks have met."""
        return True

    def get_world_size(self, group: Any = None) -> int:
        """The number of ranks of a group."""
        return self._select_group(group).size()

    def get_rank(self, group: Any = None) -> int:
        """This rank's place in a group."""
        return self._select_group(group).rank()

    def get_backend_config(self, group: Any = None) -> str:
        """The backends that a group would have."""
        return self._select_group(group).backend

    def new_group(
        self, ranks: Sequence[int], timeout: Any = None, backend: str | None = None, **options: Any
    ) -> LoneGroup | int:
        """A group of some ranks; torch's number for none if this rank is not among them."""
        if self._rank not in ranks:
            return -100
        self._num_groups += 1
        group_backend = GLOO if backend == "gloo" else self._backend
        return LoneGroup(f"group {self._num_groups}", tuple(ranks), self._rank, group_backend)

    def destroy_process_group(self, group: Any = None) -> None:
        """Does nothing."""

    def barrier(self, group: Any = None, **options: Any) -> None:
        """Waits for nobody."""

    def isend(self, tensor: Tensor, group: Any = None, group_dst: int = 0) -> FinishedWork:
        """Sends nothing."""
        self._count_message(tensor)
        return FinishedWork()

    def irecv(self, tensor: Tensor, group: Any = None, group_src: int = 0) -> FinishedWork:
        """Receives random numbers."""
        self._count_message(tensor)
        self._receive_noise(tensor)
        return FinishedWork()

    def batch_isend_irecv(self, ops: Sequence[LonePeerMessage]) -> list[FinishedWork]:
        """Sends nothing, and receives random numbers; the whole batch is one message."""
        self._count_message(ops[0].tensor)
        for op in ops:
            if op.op == self.irecv:
                self._receive_noise(op.tensor)
        return [FinishedWork()]

    def all_gather(
        self, parts: Sequence[Tensor], x: Tensor, group: Any = None, async_op: bool = False
    ) -> FinishedWork | None:
        """Gathers random numbers, or for each rank what this one says."""
        self._count_message(x)
        for part in parts:
            self._receive(part, own=x)
        return FinishedWork() if async_op else None

    def all_gather_into_tensor(
        self, out: Tensor, x: Tensor, group: Any = None, async_op: bool = False
    ) -> FinishedWork | None:
        """Gathers random numbers, or for each rank what this one says."""
        return self.all_gather(out.chunk(self._select_group(group).size()), x, group, async_op)

    def reduce_scatter_tensor(
        self, out: Tensor, x: Tensor, op: Any = None, group: Any = None, async_op: bool = False
    ) -> FinishedWork | None:
        """Receives random numbers in place of this rank's part of the sum."""
        self._count_message(x)
        self._receive_noise(out)
        return FinishedWork() if async_op else None

    def all_reduce(
        self, x: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> FinishedWork | None:
        """Leaves what this rank has: numbers of the right size in a sum, and the right ones in a maximum."""
        self._count_message(x)
        return FinishedWork() if async_op else None

    def all_to_all_single(
        self,
        out: Tensor,
        x: Tensor,
        receives: Sequence[int] | None = None,
        sends: Sequence[int] | None = None,
        group: Any = None,
        async_op: bool = False,
    ) -> FinishedWork | None:
        """Receives random numbers."""
        self._count_message(x)
        self._receive(out, own=x)
        return FinishedWork() if async_op else None

    def broadcast(
        self, x: Tensor, group: Any = None, group_src: int = 0, async_op: bool = False
    ) -> FinishedWork | None:
        """Receives random numbers of another rank, or sends nothing."""
        self._count_message(x)
        if self._select_group(group).rank() != group_src:
            self._receive(x, own=x)
        return FinishedWork() if async_op else None

    def _select_group(self, group: Any) -> LoneGroup:
        return group or self._everyone

    def _carries_activations(self, tensor: Tensor) -> bool:
        """Whether a message is one of the computation, not one in which ranks agree."""
        if self._device.type == "cuda":
            return tensor.device.type == "cuda"
        return tensor.is_floating_point() and tensor.numel() > AGREED

    def _count_message(self, tensor: Tensor) -> None:
        self.num_messages += self._carries_activations(tensor)

    def _receive(self, tensor: Tensor, own: Tensor) -> None:
        """Receives random numbers, or in a message of agreement what this rank says."""
        if self._carries_activations(tensor):
            self._receive_noise(tensor)
        elif tensor is not own and tensor.shape == own.shape:
            tensor.copy_(own)

    def _receive_noise(self, tensor: Tensor) -> None:
        # Bytes in which numbers were packed decide nothing, but must not be what the memory had before.
        if not tensor.is_floating_point():
            tensor.zero_()
            return
        noise = self._noise.get(tensor.dtype)
        if noise is None or noise.numel() < tensor.numel():
            # A generator of its own: torch's gives a pipeline the same numbers as without these messages.
            generator = torch.Generator(tensor.device).manual_seed(0)
            numbers = torch.randn(max(tensor.numel(), LEAST_NOISE), generator=generator, device=tensor.device)
            noise = self._noise[tensor.dtype] = numbers.to(tensor.dtype)
        tensor.copy_(noise[: tensor.numel()].view(tensor.shape))


@contextmanager
def replace_torch_distributed(messages: LoneMessages) -> Iterator[LoneMessages]:
    """Within the context torch.distributed has these functions; its own are back after it, also after an error.

    It is the one place where ditile replaces functions of a module. torch takes a Python process group only under names
    that differ between its releases, and all ranks of a real one must be there.

    Raises:
        StateError: if this process has a process group, whose messages would be lost.
    """
    if dist.is_initialized():
        raise StateError("this process has a process group of its own; measure a rank alone in a process without one")
    with ExitStack() as stack:
        for name, function in messages.list_replacements().items():
            override_attribute(stack, dist, name, function)
        # This module has them under its own names, as releases of torch differ.
        override_attribute(stack, collectives, "_all_gather", messages.all_gather_into_tensor)
        override_attribute(stack, collectives, "_reduce_scatter", messages.reduce_scatter_tensor)
        yield messages
