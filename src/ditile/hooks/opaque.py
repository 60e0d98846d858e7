"""What `torch.compile` sees of us: nothing. Where the pipeline is, and what travels, is never traced and never guarded.

Two ways, for two places.

- `opaque(fn)`: dynamo runs it as it is and breaks the graph around it. For what lies between blocks.
- `Hidden(fn)`: tensors in, one tensor out, within a compiled block. It is an operator in the graph, which so stays
  whole: a break inside attention makes four graphs of a block, each with guards to check at every call.

An operator takes tensors and numbers. That of `Hidden` finds its function by a number that is itself a tensor: its
value is data, so one graph serves all layers. The table of functions is the one thing here that belongs to the process.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

F = TypeVar("F", bound=Callable[..., Any])
_COUNT = itertools.count()
_CUSTOM_OPS: WeakValueDictionary[int, CustomOp] = WeakValueDictionary()
_LIBRARY = torch.library.Library("ditile", "DEF")
# `turn` is written and is no static input, so inductor's CUDA graphs run a partition with this operator in it eagerly:
# messages and keys are other ones at the next call, and may not be replayed. That `number` and `turn` are on the CPU
# does not see to it: partitions end at operators whose results are.
_LIBRARY.define(
    "hidden(Tensor?[] tensors, Tensor number, Tensor(a!) turn, float? scale) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag),
)


def exclude_from_compile(fn: F) -> F:
    """A function that is not compiled, nor what it calls, unless that is compiled by itself."""
    excluded_fn: F = torch.compiler.disable(fn)
    return excluded_fn


class CustomOp:
    """A function of tensors, whose result is a new tensor of the shape, type and device of the first.

    Args:
        fn: `(*tensors, scale) -> tensor`.
        turn: an integer that hidden calls add 1 to; those that share one keep their order when compiled.
    """

    def __init__(self, fn: Callable[..., Tensor], turn: Tensor) -> None:
        self.fn, self.turn = fn, turn
        number = next(_COUNT)
        self.number = torch.tensor(number)
        _CUSTOM_OPS[number] = self

    def __call__(self, *tensors: Tensor | None, scale: float | None = None) -> Tensor:
        """Calls the function: as an operator where it is compiled."""
        if not torch.compiler.is_compiling():
            return self.fn(*tensors, scale=scale)
        out: Tensor = torch.ops.ditile.hidden(tensors, self.number, self.turn, scale)
        return out


def unwrap_compiled(module: nn.Module) -> nn.Module:
    """The module itself, where `torch.compile` made another around it."""
    inner = vars(module)["_modules"].get("_orig_mod")
    return module if inner is None else unwrap_compiled(inner)


def _run_custom_op(tensors: list[Tensor | None], number: Tensor, turn: Tensor, scale: float | None) -> Tensor:
    out = _CUSTOM_OPS[int(number)].fn(*tensors, scale=scale).contiguous()
    turn.add_(1)
    input_addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor is not None}
    return out.clone() if out.untyped_storage().data_ptr() in input_addresses else out


def _make_fake_output(tensors: list[Tensor | None], number: Tensor, turn: Tensor, scale: float | None) -> Tensor:
    first_tensor = tensors[0]
    assert first_tensor is not None
    return first_tensor.new_empty(first_tensor.shape)


_LIBRARY.impl("hidden", _run_custom_op, "CompositeExplicitAutograd")
torch.library.register_fake("ditile::hidden", _make_fake_output, lib=_LIBRARY)
