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

from ditile.hooks.opaque import unwrap_compiled
from ditile.hooks.overrides import override_attribute

ForwardCall = Callable[..., Any]
CompileFunction = Callable[[ForwardCall], ForwardCall]
"""Makes a function a compiled one, as `torch.compile` does."""

COMPILED_CALL_ATTRIBUTE = "_compiled_call_impl"
"""Where `nn.Module.compile` puts what is called in place of the module's own call."""


def find_compiler(pipe: Any, model: nn.Module) -> CompileFunction | None:
    """What the user compiled a pipeline's whole model with, or None."""
    outers = [outer for _, outer in _find_compiled_wrappers(pipe, model)]
    if isinstance(pipe, nn.Module) and pipe is not model and unwrap_compiled(pipe) is model:
        outers.append(pipe)  # there is no pipeline
    for outer in outers:
        compiler: CompileFunction = outer.dynamo_ctx
        return compiler
    call = get_compiled_call(model)
    return None if call is None else inspect.getclosurevars(call).nonlocals.get("self")


def get_compiled_call(module: nn.Module) -> ForwardCall | None:
    """The compiled call of a module that was compiled in place, or None."""
    return getattr(module, COMPILED_CALL_ATTRIBUTE, None)


def bypass_compiled_model(stack: ExitStack, pipe: Any, model: nn.Module) -> None:
    """The pipeline calls the module itself, which is not compiled as a whole, until the stack is closed."""
    for name, _ in _find_compiled_wrappers(pipe, model):
        override_attribute(stack, pipe, name, model)
    if get_compiled_call(model) is not None:
        override_attribute(stack, model, COMPILED_CALL_ATTRIBUTE, None)


def bypass_all_compiled(stack: ExitStack, pipe: Any, model: nn.Module) -> bool:
    """Nothing in a model is compiled until the stack is closed; returns whether something was."""
    was_compiled = bool(_find_compiled_wrappers(pipe, model))
    bypass_compiled_model(stack, pipe, model)
    for module in model.modules():
        if get_compiled_call(module) is not None:
            override_attribute(stack, module, COMPILED_CALL_ATTRIBUTE, None)
            was_compiled = True
    return was_compiled


def wrap_model_call(stack: ExitStack, pipe: Any, model: nn.Module, wrap: Callable[[ForwardCall], ForwardCall]) -> None:
    """Puts something around a pipeline's calls of its model, compiled or not, until the stack is closed."""
    owner, name = model, "forward" if get_compiled_call(model) is None else COMPILED_CALL_ATTRIBUTE
    for _, outer in _find_compiled_wrappers(pipe, model):
        owner, name = outer, "forward"
    override_attribute(stack, owner, name, wrap(getattr(owner, name)))


def wrap_block_call(
    stack: ExitStack, block: nn.Module, compile_: CompileFunction | None, wrap: Callable[[ForwardCall], ForwardCall],
    varying: Callable[[], Collection[str]] = tuple,
) -> bool:  # fmt: skip
    """Puts something around a block's call until the stack is closed.

    Args:
        compile_: compiles the block's forward, where the block was not compiled by itself.
        varying: the arguments whose number of tokens differs from call to call, so that a graph should serve any.

    Returns:
        Whether what it calls is compiled.
    """
    call = get_compiled_call(block)
    if call is not None:
        override_attribute(stack, block, COMPILED_CALL_ATTRIBUTE, wrap(normalize_call_strides(call, varying)))
    elif compile_ is not None:
        compile_inner = getattr(
            block.forward, "compiled_with", compile_
        )  # of what lies around it and is not to be traced
        compiled_forward = compile_inner(compile_) if compile_inner is not compile_ else compile_(block.forward)
        override_attribute(stack, block, "forward", wrap(normalize_call_strides(compiled_forward, varying)))
    else:
        override_attribute(stack, block, "forward", wrap(block.forward))
    return call is not None or compile_ is not None


def normalize_call_strides(call: ForwardCall, varying: Callable[[], Collection[str]] = tuple) -> ForwardCall:
    """A compiled call, whose tokens lie alike whenever they are of one shape."""

    def call_with_plain_strides(*args: Any, **kwargs: Any) -> Any:
        for name in ("hidden_states", "encoder_hidden_states"):
            if isinstance(x := kwargs.get(name), Tensor):
                kwargs[name] = normalize_strides(x)
        for name in varying():
            _mark_tokens_dynamic(kwargs.get(name))
        return call(*args, **kwargs)

    return call_with_plain_strides


def _mark_tokens_dynamic(value: Any) -> None:
    """Makes the next graph serve any number of tokens; where it cannot, it is made for this one, as ever."""
    if isinstance(value, tuple | list):
        for part in value:
            _mark_tokens_dynamic(part)
    elif isinstance(value, Tensor) and value.ndim > 1:
        torch._dynamo.maybe_mark_dynamic(value, value.ndim - 2)  # channels are last, tokens before them


def normalize_strides(x: Tensor) -> Tensor:
    """A tensor as it would lie in memory if it were new; a view of it, where only dimensions of size 1 lie elsewhere.

    A block's tokens are now a tensor, now a slice of a longer sequence, and a graph is made anew for other strides.
    """
    if not x.is_contiguous():
        return x.contiguous()
    strides = _compute_plain_strides(x.shape)
    return x if x.stride() == strides else x.as_strided(x.shape, strides)


@functools.lru_cache(maxsize=1024)
def _compute_plain_strides(shape: torch.Size) -> tuple[int, ...]:
    return tuple(torch.empty(shape, device="meta").stride())


def _find_compiled_wrappers(pipe: Any, model: nn.Module) -> list[tuple[str, Any]]:
    """What `torch.compile` made around a model, by the name that the pipeline has for it."""
    modules = [(name, part) for name, part in vars(pipe).items() if isinstance(part, nn.Module)]
    return [(name, part) for name, part in modules if part is not model and unwrap_compiled(part) is model]
