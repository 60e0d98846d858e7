"""Temporary overrides of attributes of the user's instances, and where to put them."""

from __future__ import annotations

import copy
import functools
import inspect
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn

_ABSENT = object()
_PLAIN_CLASS = "_class_without_ditile"

ACCELERATE_FORWARD = "_old_forward"
"""The attribute in which accelerate's hooks keep the forward that they wrap.

An offloaded pipeline removes these hooks after each call and adds new ones: an override outside of them is then gone.
"""


IN_CALL = "_called_by_ditile"
"""The attribute that marks a model while a runner is in the middle of a call."""


class WatchedMethod:
    """A replacement for a method of an instance. A copy of the instance gets the plain method, bound to the copy.

    Args:
        watch: is called in place of the method, with the method as its first argument.
        on_copy: (plain method of the copy) -> the method that the copy gets instead; called by a copy of the instance.
    """

    def __init__(
        self,
        watch: Callable[..., Any],
        stock: Callable[..., Any],
        on_copy: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda stock: stock,
    ) -> None:
        functools.update_wrapper(self, stock)
        self._watch = watch
        self.stock = stock
        self._on_copy = on_copy

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._watch(self.stock, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._on_copy(copy.deepcopy(self.stock, memo))


def override_attribute(stack: ExitStack, owner: Any, name: str, value: Any, *, yields_to_newer: bool = False) -> None:
    """Set an attribute on an instance until the stack is closed.

    Args:
        yields_to_newer: whether a value that the user sets in the meantime stays after that.
    """
    before = vars(owner).get(name, _ABSENT)
    vars(owner)[name] = value

    def undo_override() -> None:
        if yields_to_newer and vars(owner).get(name, _ABSENT) is not value:
            return
        if before is _ABSENT:
            # This uncovers the attribute of the class.
            vars(owner).pop(name, None)
        else:
            vars(owner)[name] = before

    stack.callback(undo_override)


def give_own_class(stack: ExitStack, owner: Any, attributes: Mapping[str, Any]) -> None:
    """Give an instance its own subclass with other attributes, such as `__call__`, until the stack is closed."""
    cls = type(owner)
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, _PLAIN_CLASS: find_plain_class(owner)}
    owner.__class__ = type(cls.__name__, (cls,), names | dict(attributes))
    stack.callback(setattr, owner, "__class__", cls)


def find_plain_class(owner: Any) -> type:
    """Return the class that an instance had before `give_own_class`."""
    cls: type = vars(type(owner)).get(_PLAIN_CLASS, type(owner))
    return cls


def replace_pipeline_call(stack: ExitStack, pipe: Any, call: Callable[..., Any]) -> None:
    """Replace a pipeline's call until the stack is closed; `call` receives the pipeline's own call first."""
    # Python looks `__call__` up on the class, so the instance needs a class of its own.
    stock = type(pipe).__call__

    @functools.wraps(stock)
    def run_call(this: Any, *args: Any, **kwargs: Any) -> Any:
        # A copy of the pipeline has this class too.
        if this is not pipe:
            return stock(this, *args, **kwargs)
        return call(functools.partial(stock, this), *args, **kwargs)

    give_own_class(stack, pipe, {"__call__": run_call})


def list_replaced_methods(owner: Any) -> list[str]:
    """Return the methods that the user replaced on an instance (`scheduler.step`); ditile's own do not count."""
    replaced = []
    for name, value in vars(owner).items():
        method = getattr(type(owner), name, None)
        # A user's override may lie below ditile's own.
        while isinstance(value, WatchedMethod):
            value = value.stock
        is_own = getattr(value, "__func__", None) is method and getattr(value, "__self__", None) is owner
        if inspect.isfunction(method) and not is_own:
            replaced.append(name)
    return replaced


def replace_globals(function: Callable[..., Any], values: Mapping[str, Any]) -> Callable[..., Any]:
    """Copy a function with other values for some global names; its module stays unchanged.

    A decorated function is copied with the function inside it. Anything but a Python function is returned unchanged.
    """
    if not isinstance(function, types.FunctionType):
        return function
    inner = getattr(function, "__wrapped__", None)
    closure = function.__closure__
    # A decorator calls the function that it wraps through a cell of its closure.
    if inner is not None and closure is not None:
        inner_cell = types.CellType(replace_globals(inner, values))
        cells = list(closure)
        for place, cell in enumerate(closure):
            if cell.cell_contents is inner:
                cells[place] = inner_cell
        closure = tuple(cells)
    namespace = {**function.__globals__, **values}
    copied_function = types.FunctionType(
        function.__code__, namespace, function.__name__, function.__defaults__, closure
    )
    copied_function.__kwdefaults__ = function.__kwdefaults__
    return copied_function


def has_forward_hooks(module: nn.Module) -> bool:
    """Return whether something wraps the forward of a module, which may count its calls."""
    return "forward" in vars(module) or bool(module._forward_hooks or module._forward_pre_hooks)


def find_innermost_forward(module: nn.Module) -> tuple[Any, str]:
    """Return the owner and the attribute that hold a module's own forward, inside the hooks of accelerate and
    diffusers.

    An override there stays when such hooks are removed, and new hooks wrap it.
    """
    if ACCELERATE_FORWARD in vars(module):
        return module, ACCELERATE_FORWARD
    # The function references of diffusers' hooks, the innermost first.
    references = getattr(vars(module).get("_diffusers_hook"), "_fn_refs", ())
    if not references:
        return module, "forward"
    # A hook that replaces the forward keeps the one that it replaces; any other hook calls it.
    innermost = references[0]
    name = "forward" if innermost.original_forward is None else "original_forward"
    return innermost, name


def bind_arguments(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of a module's own forward, by parameter."""
    signature = inspect.signature(type(module).forward)
    call = dict[str, Any]()
    for name, value in signature.bind(module, *args, **kwargs).arguments.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            call.update(value)
        else:
            call[name] = value
    call.pop(next(iter(signature.parameters)))  # `self`
    return call


def list_parameter_names(module: nn.Module) -> list[str]:
    """Return the parameters of a module's own forward, whatever hooks wrap it."""
    return list(inspect.signature(type(module).forward).parameters)[1:]


_TIME_OR_TEXT = re.compile(
    r"(t|time|time_?steps?|sigmas?|temb|text|text_embeds?|txt|context|cond|prompt_embeds|encoder_hidden_states|y|labels?)"
)
"""Parameters that a user's own model or block may have before its latents."""


def find_latents_parameter(transformer: nn.Module) -> str:
    """Return the parameter of a transformer that takes its latents."""
    return find_first_input(list_parameter_names(transformer))


def find_first_input(names: Sequence[str]) -> str:
    """Return the first parameter with a name for neither time nor text; the first of all if there is none."""
    for name in names:
        if not _TIME_OR_TEXT.fullmatch(name):
            return name
    return names[0]


def match_modules(root: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the sub-modules whose path matches a pattern, in the order of the model; `*` stands for one name."""
    first, _, rest = pattern.partition(".")
    for name, child in root.named_children():
        if first not in ("*", name):
            continue
        if not rest:
            yield name, child
        else:
            for path, module in match_modules(child, rest):
                yield f"{name}.{path}", module
