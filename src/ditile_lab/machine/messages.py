"""Replacements of torch.distributed's functions for a rank without its peers: they send nothing and wait for nobody.

    with replace_torch_distributed(LoneMessages(rank, world, device)) as messages:
        runner = parallelize(pipe, plan, device)

The data of peers arrives as random numbers by a copy on the device, so that memory is written like by a real message.
In small messages between CPUs, by which ranks agree, every rank seems to send the values of this one.
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
"""The size in numbers of the largest message between CPUs by which ranks agree; activations are larger."""
LEAST_NOISE = 1 << 16
"""How many random numbers are kept at least; longer messages make more."""


# Groups are compared by identity like torch's, so the world in which a rank's call has failed is not the next rank's.
@dataclass(frozen=True, eq=False)
class LoneGroup:
    """A process group with only one rank present."""

    group_name: str
    ranks: tuple[int, ...]
    own_rank: int
    backend: str

    def size(self) -> int:
        """Return the number of ranks it would have."""
        return len(self.ranks)

    def rank(self) -> int:
        """Return this rank's place in it."""
        return self.ranks.index(self.own_rank)


class FinishedWork:
    """A message that is complete as soon as it is started."""

    def wait(self, timeout: Any = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True


class LonePeerMessage(NamedTuple):
    """One message of a batch, in place of `P2POp`."""

    op: Callable[..., Any]
    tensor: Tensor
    group: Any
    group_peer: int


class LoneMessages:
    """Replacements of torch.distributed's functions, under their own names.

    Args:
        rank, world: this rank, and the number of ranks.
        device: the device on which it computes.

    Attributes:
        num_messages: the number of started messages and collectives with numbers on the device.
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
        """Return the replacements by their names in torch.distributed."""
        replacements = {
            "group": SimpleNamespace(WORLD=self._everyone),
            "P2POp": LonePeerMessage,
        }
        for name in vars(type(self)):
            if not name.startswith("_") and hasattr(dist, name):
                replacements[name] = getattr(self, name)
        return replacements

    # These methods have the names and parameters of torch.distributed's functions.

    def is_initialized(self) -> bool:
        """Return True: the ranks have met."""
        return True

    def get_world_size(self, group: Any = None) -> int:
        """Return the number of ranks in a group."""
        return self._select_group(group).size()

    def get_rank(self, group: Any = None) -> int:
        """Return this rank's place in a group."""
        return self._select_group(group).rank()

    def get_backend_config(self, group: Any = None) -> str:
        """Return the backends that a group would have."""
        return self._select_group(group).backend

    def new_group(
        self, ranks: Sequence[int], timeout: Any = None, backend: str | None = None, **options: Any
    ) -> LoneGroup | int:
        """Make a group of some ranks; return torch's number for no group if this rank is not among them."""
        if self._rank not in ranks:
            return -100
        self._num_groups += 1
        group_backend = GLOO if backend == "gloo" else self._backend
        return LoneGroup(f"group {self._num_groups}", tuple(ranks), self._rank, group_backend)

    def destroy_process_group(self, group: Any = None) -> None:
        """Do nothing."""

    def barrier(self, group: Any = None, **options: Any) -> None:
        """Return without waiting."""

    def isend(self, tensor: Tensor, group: Any = None, group_dst: int = 0) -> FinishedWork:
        """Pretend to send."""
        self._count_message(tensor)
        return FinishedWork()

    def irecv(self, tensor: Tensor, group: Any = None, group_src: int = 0) -> FinishedWork:
        """Receive random numbers."""
        self._count_message(tensor)
        self._receive_noise(tensor)
        return FinishedWork()

    def batch_isend_irecv(self, ops: Sequence[LonePeerMessage]) -> list[FinishedWork]:
        """Pretend to send, and receive random numbers; the whole batch is one message."""
        self._count_message(ops[0].tensor)
        for op in ops:
            if op.op == self.irecv:
                self._receive_noise(op.tensor)
        return [FinishedWork()]

    def all_gather(
        self, parts: Sequence[Tensor], x: Tensor, group: Any = None, async_op: bool = False
    ) -> FinishedWork | None:
        """Gather random numbers, or this rank's value for each rank."""
        self._count_message(x)
        for part in parts:
            self._receive(part, own=x)
        return FinishedWork() if async_op else None

    def all_gather_into_tensor(
        self, out: Tensor, x: Tensor, group: Any = None, async_op: bool = False
    ) -> FinishedWork | None:
        """Gather random numbers, or this rank's value for each rank."""
        return self.all_gather(out.chunk(self._select_group(group).size()), x, group, async_op)

    def reduce_scatter_tensor(
        self, out: Tensor, x: Tensor, op: Any = None, group: Any = None, async_op: bool = False
    ) -> FinishedWork | None:
        """Receive random numbers in place of this rank's part of the sum."""
        self._count_message(x)
        self._receive_noise(out)
        return FinishedWork() if async_op else None

    def all_reduce(
        self, x: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> FinishedWork | None:
        """Keep this rank's numbers: they have the right size for a sum, and are right for a maximum."""
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
        """Receive random numbers."""
        self._count_message(x)
        self._receive(out, own=x)
        return FinishedWork() if async_op else None

    def broadcast(
        self, x: Tensor, group: Any = None, group_src: int = 0, async_op: bool = False
    ) -> FinishedWork | None:
        """Receive random numbers from another rank, or pretend to send."""
        self._count_message(x)
        if self._select_group(group).rank() != group_src:
            self._receive(x, own=x)
        return FinishedWork() if async_op else None

    def _select_group(self, group: Any) -> LoneGroup:
        return group or self._everyone

    def _carries_activations(self, tensor: Tensor) -> bool:
        """Return whether a message belongs to the computation, rather than to an agreement of ranks."""
        if self._device.type == "cuda":
            return tensor.device.type == "cuda"
        return tensor.is_floating_point() and tensor.numel() > AGREED

    def _count_message(self, tensor: Tensor) -> None:
        self.num_messages += self._carries_activations(tensor)

    def _receive(self, tensor: Tensor, own: Tensor) -> None:
        """Receive random numbers, or this rank's values in a message of agreement."""
        if self._carries_activations(tensor):
            self._receive_noise(tensor)
        elif tensor is not own and tensor.shape == own.shape:
            tensor.copy_(own)

    def _receive_noise(self, tensor: Tensor) -> None:
        # Packed bytes decide nothing, but must not keep the old content of the memory.
        if not tensor.is_floating_point():
            tensor.zero_()
            return
        noise = self._noise.get(tensor.dtype)
        if noise is None or noise.numel() < tensor.numel():
            # A separate generator keeps torch's own numbers for the pipeline unchanged.
            generator = torch.Generator(tensor.device).manual_seed(0)
            numbers = torch.randn(max(tensor.numel(), LEAST_NOISE), generator=generator, device=tensor.device)
            noise = self._noise[tensor.dtype] = numbers.to(tensor.dtype)
        tensor.copy_(noise[: tensor.numel()].view(tensor.shape))


@contextmanager
def replace_torch_distributed(messages: LoneMessages) -> Iterator[LoneMessages]:
    """Replace torch.distributed's functions within the context; they are restored after it, also after an error.

    It is the only place where ditile replaces functions of a module. torch accepts a Python process group only under
    names that differ between its releases, and a real group needs all its ranks.

    Raises:
        StateError: if this process has a process group, whose messages would be lost.
    """
    if dist.is_initialized():
        raise StateError("this process has a process group of its own; measure a rank alone in a process without one")
    with ExitStack() as stack:
        for name, function in messages.list_replacements().items():
            override_attribute(stack, dist, name, function)
        # That module has its own names for these, because releases of torch differ.
        override_attribute(stack, collectives, "_all_gather", messages.all_gather_into_tensor)
        override_attribute(stack, collectives, "_reduce_scatter", messages.reduce_scatter_tensor)
        yield messages
