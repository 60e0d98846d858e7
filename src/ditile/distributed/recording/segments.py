"""Watches the operators of a call: which of them cannot be recorded, and what they read and write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ditile.distributed.recording.tape import CURRENT

UNFIT_TAGS = {
    torch.Tag.data_dependent_output: "whose result the host reads",
    torch.Tag.dynamic_output_shape: "whose numbers decide on a size",
    torch.Tag.nondeterministic_seeded: "which is random",
}
"""Operators of these kinds would repeat what they gave when they were recorded."""
INDEXING = ("aten::index", "aten::index_put", "aten::index_put_")
"""Operators whose sizes depend on numbers only where they index by a mask."""


OPERATORS_IN_PYTHON: dict[Any, Callable[..., Any]] = {}
"""An operator that calls others, such as attention within compiled code -> its function. A watch looks into it."""


class OperatorWatch(TorchDispatchMode):
    """A mode that sees the operators of a call: what cannot be recorded, and the memory from outside that they use.

    Args:
        copy: copies memory from outside before it is written in place; by default nothing is copied.

    Attributes:
        problem: why the call cannot be recorded; empty if it can.
        overwritten: memory from outside that was written in place, with what was in it.
        read: tensors from outside that were read, by the address of their memory.
        written, made: addresses of memory that was written in place, and of memory that the call made.
    """

    def __init__(self, copy: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._copy = copy
        self.problem = ""
        self.overwritten: list[tuple[Tensor, Tensor]] = []
        self.read: dict[int, Tensor] = {}
        self.written: set[int] = set()
        self.made: set[int] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: compiled code stays compiled under the watch."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Quantized weights then run operators on their parts, which this mode sees.
        if any(map(has_own_operators, types)):
            return NotImplemented
        # Operations of messages on tensors are not part of a segment.
        if CURRENT.is_exchanging:
            return func(*args, **(kwargs or {}))
        if func in OPERATORS_IN_PYTHON:
            with self:
                return OPERATORS_IN_PYTHON[func](*args, **(kwargs or {}))
        for tensor in list_written_tensors(func, args, kwargs or {}):
            address = tensor.untyped_storage().data_ptr()
            self.written.add(address)
            if self._copy is not None and address not in self.made:
                self.overwritten.append((tensor, self._copy(tensor)))
        result = func(*args, **(kwargs or {}))
        inputs = list_tensors((args, kwargs))
        outputs = list_tensors(result)
        self.problem = self.problem or _find_operator_problem(func, inputs, outputs)
        addresses = set()
        for tensor in inputs:
            address = tensor.untyped_storage().data_ptr()
            addresses.add(address)
            if address not in self.made:
                self.read.setdefault(address, tensor)
        for tensor in outputs:
            address = tensor.untyped_storage().data_ptr()
            if address not in addresses:
                self.made.add(address)
        return result


def has_own_operators(tensor_class: type) -> bool:
    """Return whether tensors of a class consist of others, as quantized weights do."""
    return hasattr(tensor_class, "__tensor_flatten__")


def list_written_tensors(operator: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """List the tensors that a call of an operator writes in place."""
    written: list[Tensor] = []
    if operator._schema.is_mutable:
        for index, argument in enumerate(operator._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = kwargs.get(argument.name)
                if index < len(args):
                    value = args[index]
                written += list_tensors(value)
    return written


def _find_operator_problem(operator: Any, inputs: list[Tensor], outputs: list[Tensor]) -> str:
    """Return the reason why a call of an operator cannot be recorded. Empty if it can."""
    name = operator._schema.name
    is_by_mask = any(tensor.dtype in (torch.bool, torch.uint8) for tensor in inputs[1:])
    # Attention counts as random because of its dropout, which models of diffusers do not use.
    is_fit = "attention" in name or (name in INDEXING and not is_by_mask)
    for tag, description in UNFIT_TAGS.items():
        if tag in operator.tags and not is_fit:
            return f"it calls {name}, {description}"
    if "attention" in name:
        # Some kernels return, after the result and its logsumexp, the seed of an unused dropout, on the CPU.
        outputs = outputs[:2]
    if len({tensor.device.type for tensor in (*inputs, *outputs)}) > 1:
        return f"{name} has tensors on the CPU and on the device"
    # `torch.tensor(..., device="cuda")` copies from the CPU before any operator sees it.
    if name == "aten::lift_fresh" and outputs[0].device.type != "cpu":
        return "it makes a tensor of numbers of the host"
    return ""


def list_tensors(values: Any) -> list[Tensor]:
    """List the tensors within nested values, in order."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
