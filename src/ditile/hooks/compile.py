"""Models that were compiled: whole, in place or block by block, before `parallelize` or after it.

Under a plan a model is no one graph: tokens are cut, sent and kept between its blocks. For the length of a call the
pipeline has the module itself, and whatever was to compile the whole compiles the forward of each block.

What `torch.compile` sees of us: nothing. Where the pipeline is, and what travels, is never traced and never guarded.

Two ways, for two places.

- `opaque(fn)`: dynamo runs it as it is and breaks the graph around it. For what lies between blocks.
- `Hidden(fn)`: tensors in, one tensor out, within a compiled block. It is an operator in the graph, which so stays
  whole: a break inside attention makes four graphs of a block, each with guards to check at every call.

An operator takes tensors and numbers. That of `Hidden` finds its function by a number that is itself a tensor: its
value is data, so one graph serves all layers. The table of functions is the one thing here that belongs to the process.

What `torch.compile` is told for this kind of work. It belongs to the process, as torch has it.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
from collections.abc import Callable, Collection
from contextlib import ExitStack
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from ditile.errors import ModelError
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
    stack: ExitStack,
    block: nn.Module,
    compile_: CompileFunction | None,
    wrap: Callable[[ForwardCall], ForwardCall],
    varying: Callable[[], Collection[str]] = tuple,
) -> bool:
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


LOG = logging.getLogger("ditile")


def set_compile_configs(
    *,
    recompile_limit: int = 1024,
    compute_comm_overlap: bool = True,
    descent_tuning: bool = False,
    cuda_graphs: bool = False,
    force_disable_compile_caches: bool = False,
) -> dict[str, Any]:
    """Sets dynamo's limits and inductor's flags; call it before the first compiled call. Calling it again is harmless.

    Args:
        recompile_limit: graphs of one function after which dynamo gives up on it; a higher one that is set stays.
        compute_comm_overlap: inductor moves collectives that are in a graph away from what waits for them.
        descent_tuning: tunes tiles by descent, and leaves epilogues apart: long to compile.
        cuda_graphs: replays graphs, but not those of blocks under a plan: attention writes one of their inputs, and
            inductor runs such ones eagerly.
        force_disable_compile_caches: compiles anew what was compiled in an earlier process.

    Returns:
        What is set now, by name; it is logged too.

    Raises:
        ModelError: if `recompile_limit` is not a whole number of at least 1.
    """
    if not isinstance(recompile_limit, int) or isinstance(recompile_limit, bool) or recompile_limit < 1:
        raise ModelError(
            f"recompile_limit={recompile_limit!r} is not a whole number of at least 1; try recompile_limit=1024"
        )
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    settings: dict[str, Any] = {
        "recompile_limit": max(dynamo.recompile_limit, recompile_limit),
        "accumulated_recompile_limit": max(dynamo.accumulated_recompile_limit, 8 * recompile_limit),
    }
    for name, value in settings.items():
        setattr(dynamo, name, value)
    flags = {
        "reorder_for_compute_comm_overlap": compute_comm_overlap,
        "coordinate_descent_tuning": descent_tuning,
        "coordinate_descent_check_all_directions": descent_tuning,
        "epilogue_fusion": not descent_tuning,
        "force_disable_caches": force_disable_compile_caches,
    }
    for name, value in flags.items():
        setattr(inductor, name, value)
    inductor.triton.cudagraphs = cuda_graphs
    settings |= flags | {"triton.cudagraphs": cuda_graphs}
    LOG.info("torch.compile: %s", ", ".join(f"{name}={value}" for name, value in settings.items()))
    return settings
