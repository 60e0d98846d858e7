"""Compiled models under a plan, whether they were compiled whole, in place or block by block, before or afterwards.

Under a plan a model is not one graph: tokens are cut, sent and kept between its blocks. During a call the pipeline has
the module itself, and the compiler of the whole compiles the forward of each block. `torch.compile` must not trace or
guard the position of the pipeline or the messages. There are two ways to hide that:

- `exclude_from_compile(fn)`: dynamo runs the function unchanged and breaks the graph around it. This is for code
  between blocks.
- `CustomOp(fn)`: tensors in, one tensor out, within a compiled block. It is an operator, so the graph stays whole: a
  break inside attention makes four graphs of a block, each with guards to check at every call.

An operator takes tensors and numbers. The operator of `CustomOp` finds its function by a number that is itself a
tensor: its value is data, so one graph serves all layers. The table of functions and the settings belong to the
process.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from typing import Any, Literal, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from ditile.distributed.recording.segments import OPERATORS_IN_PYTHON
from ditile.distributed.recording.tape import hide_from_recording
from ditile.model.hooks.overrides import override_attribute
from ditile.plan.errors import ModelError, suggest_nearest
from ditile.plan.option_classes import Count, check_value, drop_missing
from ditile.plan.plan import Plan

LOG = logging.getLogger("ditile")
F = TypeVar("F", bound=Callable[..., Any])
ForwardCall = Callable[..., Any]
CompileFunction = Callable[[ForwardCall], ForwardCall]
"""Compiles a function, like `torch.compile`."""

COMPILE_AUTO: Literal["auto"] = "auto"
"""Blocks are compiled on CUDA, where each class of them is at most four graphs."""

COMPILED_INSIDE_ATTRIBUTE = "_compiled_inside"
"""The attribute of a block's call that runs a compiled forward and must not be traced itself."""

COMPILED_CALL_ATTRIBUTE = "_compiled_call_impl"
"""The attribute in which `nn.Module.compile` puts the function that is called in place of the module's own call."""


def decide_compile(
    setting: bool | Literal["auto"],
    model: nn.Module,
    blocks: Sequence[object],
    plan: Plan,
    device: torch.device,
    rank: int,
) -> bool:
    """Return whether the blocks of a model are compiled.

    Args:
        setting: True, False, or "auto", which compiles only if that makes few graphs, on a device where it pays.
        model, blocks: the model that is divided, and its known blocks.
        plan, device, rank: how and where the model runs. Rank 0 logs why "auto" compiles nothing.

    Raises:
        ModelError: if `setting` is none of them, or it is True and the blocks are not known.
    """
    if setting not in (True, False, COMPILE_AUTO):
        raise ModelError(f"compile={setting!r} is not known; try True, False or 'auto'")
    unknown = f"nothing is known of the blocks of {type(model).__name__}"
    if setting != COMPILE_AUTO:
        if setting and not blocks:
            raise ModelError(
                f"compile=True: {unknown}; leave it out, and compile the whole: "
                "pipe.transformer = torch.compile(pipe.transformer)"
            )
        return bool(setting)
    reason = "" if blocks else unknown
    if plan.tensor > 1:
        reason = f"each sum of tensor={plan.tensor} would break a graph; compile=True makes many"
    if device.type != "cuda":
        reason = f"the device is {device} and no GPU; compile=True does it on any"
    if reason and rank == 0:
        LOG.warning("compile=%r compiles nothing: %s", COMPILE_AUTO, reason)
    return not reason


def find_compiler(pipe: Any, model: nn.Module) -> CompileFunction | None:
    """Return the compiler that the user applied to a pipeline's whole model, or None."""
    wrappers = [wrapper for _, wrapper in _find_compiled_wrappers(pipe, model)]
    # A cache may be on a transformer without a pipeline.
    if isinstance(pipe, nn.Module) and pipe is not model and unwrap_compiled(pipe) is model:
        wrappers.append(pipe)
    if wrappers:
        compiler: CompileFunction = wrappers[0].dynamo_ctx
        return compiler
    call = get_compiled_call(model)
    if call is None:
        return None
    # `nn.Module.compile` keeps the compiler only in the closure of the call.
    return inspect.getclosurevars(call).nonlocals.get("self")


def get_compiled_call(module: nn.Module) -> ForwardCall | None:
    """Return the compiled call of a module that was compiled in place, or None."""
    return getattr(module, COMPILED_CALL_ATTRIBUTE, None)


def bypass_compiled_model(stack: ExitStack, pipe: Any, model: nn.Module) -> None:
    """Make the pipeline call the module itself until the stack is closed, not compiled as a whole."""
    for name, _ in _find_compiled_wrappers(pipe, model):
        override_attribute(stack, pipe, name, model)
    # A module that was compiled in place calls this attribute instead.
    if get_compiled_call(model) is not None:
        override_attribute(stack, model, COMPILED_CALL_ATTRIBUTE, None)


def wrap_model_call(stack: ExitStack, pipe: Any, model: nn.Module, wrap: Callable[[ForwardCall], ForwardCall]) -> None:
    """Wrap a pipeline's calls of its model, compiled or not, until the stack is closed."""
    owner = model
    name = "forward" if get_compiled_call(model) is None else COMPILED_CALL_ATTRIBUTE
    # `torch.compile` makes a module around the model, and the pipeline calls that module.
    for _, outer in _find_compiled_wrappers(pipe, model):
        owner = outer
        name = "forward"
    override_attribute(stack, owner, name, wrap(getattr(owner, name)))


def wrap_block_call(
    stack: ExitStack,
    block: nn.Module,
    compile_: CompileFunction | None,
    wrap: Callable[[ForwardCall], ForwardCall],
    varying: Callable[[], Collection[str]] = tuple,
) -> bool:
    """Wrap a block's call until the stack is closed.

    Args:
        block, wrap: the block, and a function that makes the new call from the block's own.
        compile_: compiles the block's forward, if the block was not compiled by itself.
        varying: the arguments whose number of tokens differs from call to call: a graph should serve any number.

    Returns:
        Whether the wrapped call is compiled.
    """
    call = get_compiled_call(block)
    if call is not None:
        override_attribute(stack, block, COMPILED_CALL_ATTRIBUTE, wrap(normalize_call_strides(call, varying)))
    elif compile_ is not None:
        forward = block.forward
        # The hook of a cache must not be traced, and has compiled the forward inside it.
        if not hasattr(forward, COMPILED_INSIDE_ATTRIBUTE):
            forward = compile_(forward)
        override_attribute(stack, block, "forward", wrap(normalize_call_strides(forward, varying)))
    else:
        override_attribute(stack, block, "forward", wrap(block.forward))
    return call is not None or compile_ is not None


def normalize_call_strides(call: ForwardCall, varying: Callable[[], Collection[str]] = tuple) -> ForwardCall:
    """Wrap a compiled call so that equal shapes get equal strides and hit one graph."""

    def call_with_plain_strides(*args: Any, **kwargs: Any) -> Any:
        for name in ("hidden_states", "encoder_hidden_states"):
            x = kwargs.get(name)
            if isinstance(x, Tensor):
                # A block's tokens are a tensor, or a slice of a longer sequence. A graph is guarded on strides, also on
                # those of dimensions of size 1, which differ in contiguous tensors.
                x = x.contiguous()
                strides = _compute_plain_strides(x.shape)
                if x.stride() != strides:
                    x = x.as_strided(x.shape, strides)
                kwargs[name] = x
        for name in varying():
            _mark_tokens_dynamic(kwargs.get(name))
        return call(*args, **kwargs)

    return call_with_plain_strides


def _mark_tokens_dynamic(value: Any) -> None:
    """Make the next graph serve any number of tokens, or only this number if that is impossible."""
    if isinstance(value, tuple | list):
        for part in value:
            _mark_tokens_dynamic(part)
    elif isinstance(value, Tensor) and value.ndim > 1:
        # Channels are the last dimension, tokens the one before.
        torch._dynamo.maybe_mark_dynamic(value, value.ndim - 2)


@functools.lru_cache(maxsize=1024)
def _compute_plain_strides(shape: torch.Size) -> tuple[int, ...]:
    return tuple(torch.empty(shape, device="meta").stride())


def _find_compiled_wrappers(pipe: Any, model: nn.Module) -> list[tuple[str, Any]]:
    """Return the wrappers that `torch.compile` made around a model, with their names in the pipeline."""
    wrappers: list[tuple[str, Any]] = []
    for name, part in vars(pipe).items():
        if isinstance(part, nn.Module) and part is not model and unwrap_compiled(part) is model:
            wrappers.append((name, part))
    return wrappers


_COUNT = itertools.count()
_CUSTOM_OPS: WeakValueDictionary[int, CustomOp] = WeakValueDictionary()
_LIBRARY = torch.library.Library("ditile", "DEF")
# Messages and keys differ from call to call, so this operator may not be replayed. `turn` is written and is not a
# static input, so inductor's CUDA graphs run a partition with it eagerly. It is not enough that `number` and `turn` are
# on the CPU: a partition ends at operators whose results are on the CPU.
_LIBRARY.define(
    "hidden(Tensor?[] tensors, Tensor number, Tensor(a!) turn, float? scale) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag),
)


def exclude_from_compile(fn: F) -> F:
    """Exclude a function from compilation. The functions it calls run uncompiled too, unless compiled by themselves."""
    excluded_fn: F = torch.compiler.disable(fn)
    return excluded_fn


class CustomOp:
    """A function of tensors whose result is a new tensor with the shape, type and device of the first.

    Args:
        fn: `(*tensors, mask, scale) -> tensor`.
        turn: an integer tensor that every call adds 1 to; compiled calls that share it keep their order.
    """

    def __init__(self, fn: Callable[..., Tensor], turn: Tensor) -> None:
        self.fn = fn
        self.turn = turn
        number = next(_COUNT)
        self.number = torch.tensor(number)
        # A weak reference: the table must not keep layers of pipelines that are gone.
        _CUSTOM_OPS[number] = self

    def __call__(self, *tensors: Tensor, mask: Tensor | None = None, scale: float | None = None) -> Tensor:
        """Call the function, in compiled code as an operator."""
        if not torch.compiler.is_compiling():
            return self.fn(*tensors, mask, scale=scale)
        out: Tensor = torch.ops.ditile.hidden([*tensors, mask], self.number, self.turn, scale)
        return out


def unwrap_compiled(module: nn.Module) -> nn.Module:
    """Return the module inside the wrappers made by `torch.compile`."""
    inner = vars(module)["_modules"].get("_orig_mod")
    if inner is None:
        return module
    return unwrap_compiled(inner)


def _run_custom_op(tensors: list[Tensor | None], number: Tensor, turn: Tensor, scale: float | None) -> Tensor:
    # These tensors are on the CPU and have no influence on the computed values.
    with hide_from_recording():
        place = int(number)
        turn.add_(1)
    out = _CUSTOM_OPS[place].fn(*tensors, scale=scale).contiguous()
    # An operator may not return memory of its inputs.
    input_addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor is not None}
    if out.untyped_storage().data_ptr() in input_addresses:
        return out.clone()
    return out


def _make_fake_output(tensors: list[Tensor | None], number: Tensor, turn: Tensor, scale: float | None) -> Tensor:
    first_tensor = tensors[0]
    assert first_tensor is not None
    return first_tensor.new_empty(first_tensor.shape)


_LIBRARY.impl("hidden", _run_custom_op, "CompositeExplicitAutograd")
torch.library.register_fake("ditile::hidden", _make_fake_output, lib=_LIBRARY)
OPERATORS_IN_PYTHON[torch.ops.ditile.hidden.default] = _run_custom_op


def set_compile_configs(
    *,
    recompile_limit: int = 1024,
    compute_comm_overlap: bool = True,
    descent_tuning: bool = False,
    cuda_graphs: bool = False,
    force_disable_compile_caches: bool = False,
    **torch_flags: bool | None,
) -> dict[str, Any]:
    """Set dynamo's limits and inductor's flags for this process; call it before the first compiled call.

    Args:
        recompile_limit: graphs of one function after which dynamo gives up on it; a higher limit that is set stays.
        compute_comm_overlap: inductor moves collectives in a graph away from the operators that wait for them.
        descent_tuning: tunes tiles by coordinate descent and does not fuse epilogues; compiling takes long.
        cuda_graphs: replays graphs, but not those of blocks under a plan: attention writes one of their inputs, and
            inductor runs such graphs eagerly.
        force_disable_compile_caches: recompiles graphs that an earlier process compiled.
        torch_flags: more flags of inductor or dynamo that are on or off, by their names in torch: use_fast_math,
            fx_graph_cache, capture_scalar_outputs and others. None, like a missing flag, leaves the flag as it is.

    Returns:
        The settings by name; they are logged too.

    Raises:
        ModelError: if `recompile_limit` is not a whole number of at least 1, or a flag is not one of torch's.
    """
    check_value(Count, recompile_limit, "recompile_limit", example=1024)
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    owners = dict.fromkeys(dynamo.get_config_copy(), dynamo) | dict.fromkeys(inductor.get_config_copy(), inductor)
    more = drop_missing(torch_flags)
    for name, value in more.items():
        if name not in owners:
            hint = suggest_nearest(name, owners, "see torch._inductor.config")
            raise ModelError(f"{name}={value!r} is not a flag of this torch's inductor or dynamo; {hint}")
        if not isinstance(value, bool):
            raise ModelError(f"{name}={value!r} is neither on nor off; try {name}=True")
    dynamo.recompile_limit = max(dynamo.recompile_limit, recompile_limit)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, 8 * recompile_limit)
    limits = {name: getattr(dynamo, name) for name in ("recompile_limit", "accumulated_recompile_limit")}
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
    for name, value in more.items():
        setattr(owners[name], name, value)
    settings = limits | flags | more | {"triton.cudagraphs": cuda_graphs}
    LOG.info("torch.compile: %s", ", ".join(f"{name}={value}" for name, value in settings.items()))
    return settings
