"""Models that were compiled: whole, in place or block by block, before `parallelize` or after it.

Under a plan a model is no one graph: tokens are cut, sent and kept between its blocks. For the length of a call the
pipeline has the module itself, and whatever was to compile the whole compiles the forward of each block.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ditile.hooks.opaque import uncompiled
from ditile.hooks.overrides import override

Call = Callable[..., Any]
Compile = Callable[[Call], Call]
"""Makes a function a compiled one, as `torch.compile` does."""

CALL = "_compiled_call_impl"
"""Where `nn.Module.compile` puts what is called in place of the module's own call."""


def compiler_of(pipe: Any, model: nn.Module) -> Compile | None:
    """What the user compiled a pipeline's whole model with, or None."""
    outers = [outer for _, outer in _around(pipe, model)]
    if isinstance(pipe, nn.Module) and pipe is not model and uncompiled(pipe) is model:
        outers.append(pipe)  # there is no pipeline
    for outer in outers:
        compiler: Compile = outer.dynamo_ctx
        return compiler
    call = own_call(model)
    return None if call is None else inspect.getclosurevars(call).nonlocals.get("self")


def own_call(module: nn.Module) -> Call | None:
    """The compiled call of a module that was compiled in place, or None."""
    return getattr(module, CALL, None)


def set_aside(stack: ExitStack, pipe: Any, model: nn.Module) -> None:
    """The pipeline calls the module itself, which is not compiled as a whole, until the stack is closed."""
    for name, _ in _around(pipe, model):
        override(stack, pipe, name, model)
    if own_call(model) is not None:
        override(stack, model, CALL, None)


def set_all_aside(stack: ExitStack, pipe: Any, model: nn.Module) -> bool:
    """Nothing in a model is compiled until the stack is closed; returns whether something was."""
    found = bool(_around(pipe, model))
    set_aside(stack, pipe, model)
    for module in model.modules():
        if own_call(module) is not None:
            override(stack, module, CALL, None)
            found = True
    return found


def seat_around(stack: ExitStack, pipe: Any, model: nn.Module, wrap: Callable[[Call], Call]) -> None:
    """Puts something around a pipeline's calls of its model, compiled or not, until the stack is closed."""
    owner, name = model, "forward" if own_call(model) is None else CALL
    for _, outer in _around(pipe, model):
        owner, name = outer, "forward"
    override(stack, owner, name, wrap(getattr(owner, name)))


def seat_block(
    stack: ExitStack, block: nn.Module, compile_: Compile | None, wrap: Callable[[Call], Call],
    varying: Callable[[], Collection[str]] = tuple,
) -> bool:  # fmt: skip
    """Puts something around a block's call until the stack is closed.

    Args:
        compile_: compiles the block's forward, where the block was not compiled by itself.
        varying: the arguments whose number of tokens differs from call to call, so that a graph should serve any.

    Returns:
        Whether what it calls is compiled.
    """
    call = own_call(block)
    if call is not None:
        override(stack, block, CALL, wrap(steady(call, varying)))
    elif compile_ is not None:
        inside = getattr(block.forward, "compiled_with", compile_)  # of what lies around it and is not to be traced
        made = inside(compile_) if inside is not compile_ else compile_(block.forward)
        override(stack, block, "forward", wrap(steady(made, varying)))
    else:
        override(stack, block, "forward", wrap(block.forward))
    return call is not None or compile_ is not None


def steady(call: Call, varying: Callable[[], Collection[str]] = tuple) -> Call:
    """A compiled call, whose tokens lie alike whenever they are of one shape."""

    def laid(*args: Any, **kwargs: Any) -> Any:
        for name in ("hidden_states", "encoder_hidden_states"):
            if isinstance(x := kwargs.get(name), Tensor):
                kwargs[name] = plain_strides(x)
        for name in varying():
            _let_vary(kwargs.get(name))
        return call(*args, **kwargs)

    return laid


def _let_vary(value: Any) -> None:
    """Makes the next graph serve any number of tokens; where it cannot, it is made for this one, as ever."""
    if isinstance(value, tuple | list):
        for part in value:
            _let_vary(part)
    elif isinstance(value, Tensor) and value.ndim > 1:
        torch._dynamo.maybe_mark_dynamic(value, value.ndim - 2)  # channels are last, tokens before them


def plain_strides(x: Tensor) -> Tensor:
    """A tensor as it would lie in memory if it were new; a view of it, where only dimensions of size 1 lie elsewhere.

    A block's tokens are now a tensor, now a slice of a longer sequence, and a graph is made anew for other strides.
    """
    if not x.is_contiguous():
        return x.contiguous()
    strides = _strides(x.shape)
    return x if x.stride() == strides else x.as_strided(x.shape, strides)


@functools.lru_cache(maxsize=1024)
def _strides(shape: torch.Size) -> tuple[int, ...]:
    return tuple(torch.empty(shape, device="meta").stride())


def _around(pipe: Any, model: nn.Module) -> list[tuple[str, Any]]:
    """What `torch.compile` made around a model, by the name that the pipeline has for it."""
    modules = [(name, part) for name, part in vars(pipe).items() if isinstance(part, nn.Module)]
    return [(name, part) for name, part in modules if part is not model and uncompiled(part) is model]
