"""What a user put on a model, and copies of a model with it, whose calls change nothing of what it keeps."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

from diffusers.models.attention_dispatch import AttentionBackendName
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ditile.cache.cached import find_model_cache
from ditile.model.hooks.attention_processors import find_attention_processors
from ditile.model.hooks.overrides import IN_CALL
from ditile.model.hooks.placeholders import allow_copies
from ditile.model.source import list_pipeline_parts
from ditile.plan.errors import ModelError, describe_class_and_text

KNOWN_PACKAGES = sys.stdlib_module_names | {
    "accelerate", "bitsandbytes", "diffusers", "ditile", "huggingface_hub", "peft", "torch", "torchao", "transformers",
}  # fmt: skip
"""Their code computes each row by itself, and tokens as the anatomies say."""

CANNOT_CALL = (RuntimeError, ValueError, IndexError, TypeError, KeyError, AttributeError, AssertionError)
"""What a model raises that cannot be copied, or whose call cannot be repeated on a copy."""

_HOOK_TABLES = ("_forward_pre_hooks", "_forward_hooks")
"""Where torch keeps the hooks of a module."""


class UserCode(NamedTuple):
    """Something on a model that none of the known packages put there.

    Attributes:
        path: of the module that has it, within the model.
        description: in words, for errors.
        code: itself.
        is_of_class: whether it belongs to the class of a module, not to an instance.
    """

    path: str
    description: str
    code: object
    is_of_class: bool = False


def list_user_code(model: nn.Module) -> list[UserCode]:
    """What on a model and its parts is not of the known packages."""
    codes: list[UserCode] = []
    classes: dict[type, str] = {}
    for path, module in model.named_modules():
        classes.setdefault(type(module), path)
        codes += _list_unknown_hooks(path, _list_torch_hooks(module))
        codes += _list_unknown_attributes(path, module)
        # Such a norm makes each image depend on the others of the batch.
        if isinstance(module, _NormBase) and (module.training or module.running_mean is None):
            description = f"a {type(module).__name__} of the statistics of its input"
            codes.append(UserCode(path, description, type(module)))
    for cls, path in classes.items():
        codes += _list_class_code(cls, path)
    return codes


def _list_torch_hooks(module: nn.Module) -> list[Any]:
    hooks: list[Any] = []
    for table in _HOOK_TABLES:
        hooks += vars(module)[table].values()
    return hooks


def _list_unknown_hooks(path: str, hooks: Sequence[Any]) -> list[UserCode]:
    return [UserCode(path, f"the hook {_find_name(hook)}", hook) for hook in hooks if _is_unknown(hook)]


def _list_unknown_attributes(path: str, module: nn.Module) -> Iterator[UserCode]:
    """What a module has as an attribute of its own: a forward, a processor, hooks of diffusers or accelerate."""
    for name, value in vars(module).items():
        if name == "_diffusers_hook":
            yield from _list_unknown_hooks(path, list(value.hooks.values()))
        elif name == "_hf_hook":
            yield from _list_unknown_hooks(path, list(getattr(value, "hooks", [value])))
        elif callable(value) and not isinstance(value, type | nn.Module) and _is_unknown(value):
            attribute = "attention processor" if name == "processor" else name
            yield UserCode(path, f"the {attribute} {_find_name(value)}", value)


def _list_class_code(cls: type, path: str) -> Iterator[UserCode]:
    """A class of the user's, or functions of the user's in a class of diffusers."""
    if cls.__module__.split(".")[0] not in KNOWN_PACKAGES:
        yield UserCode(path, f"the class {cls.__name__}", cls, is_of_class=True)
        return
    for base in cls.__mro__:
        if not base.__module__.startswith("diffusers."):
            continue
        for name, function in vars(base).items():
            if isinstance(function, FunctionType) and _is_unknown(function):
                yield UserCode(path, f"another {base.__name__}.{name}", function)


def list_code_of_tokens(model: nn.Module, codes: Sequence[UserCode]) -> list[UserCode]:
    """The code of which nothing is known for tokens: the classes in a user's own model were proven when derived."""
    if _find_package(model) in KNOWN_PACKAGES:
        return list(codes)
    return [code for code in codes if not code.is_of_class]


def _is_unknown(code: Any) -> bool:
    return _find_package(code) not in KNOWN_PACKAGES


def _find_package(code: Any) -> str:
    """The package of a function, or of the class of an object."""
    code = _unwrap_function(code)
    module = type(code).__module__
    if isinstance(code, FunctionType):
        # Not by `__module__`: a function that wraps another one has that one's.
        module = str(code.__globals__.get("__name__", ""))
    return module.split(".")[0]


def _unwrap_function(code: Any) -> Any:
    """The function of a method or a partial call."""
    while isinstance(code, functools.partial):
        code = code.func
    return getattr(code, "__func__", code)


def _find_name(code: Any) -> str:
    code = _unwrap_function(code)
    return str(getattr(code, "__name__", type(code).__name__))


def copy_model(pipe: Any, model: nn.Module, codes: Sequence[UserCode]) -> nn.Module:
    """A copy of a pipeline's model that shares its weights, and what on it belongs to the pipeline or to ditile.

    Raises:
        ModelError: if something on it cannot be copied.
    """
    shared = [pipe, *model.parameters(), *model.buffers()]
    shared += [part for part in list_pipeline_parts(pipe).values() if part is not model]
    for module in model.modules():
        for value in (*vars(module).values(), *_list_torch_hooks(module)):
            # Ranks and their messages cannot be copied.
            if _find_package(value) == "ditile" and not isinstance(value, nn.Module):
                shared.append(value)
    functions = _FunctionCopies(model)
    # `deepcopy` takes what it finds in `memo` instead of a copy.
    memo = {id(value): value for value in shared} | functions.copies
    cache = find_model_cache(model)
    try:
        with ExitStack() as stack:
            if cache is not None:
                stack.enter_context(cache.lift_hooks())
            stack.enter_context(allow_copies(model))
            copied = copy.deepcopy(model, memo)
    except CANNOT_CALL as error:
        descriptions = " and ".join(code.description for code in codes[:2])
        raise ModelError(
            f"{type(model).__name__} has {descriptions}, and cannot be copied to try that: "
            f"{describe_class_and_text(error)}; take it off"
        ) from error
    # After the copy: variables of functions may refer to modules, of which there are copies now.
    functions.fill_variables(memo)
    for module in copied.modules():
        functions.rebind_methods(module)
    # The copy attends by diffusers' own kernel, not by the plan's.
    for _, _, processor in find_attention_processors(copied):
        if hasattr(processor, "_attention_backend"):
            processor._attention_backend = AttentionBackendName.NATIVE
    # A model of which this rank has a part refuses other calls.
    vars(copied)[IN_CALL] = True
    return copied


class _FunctionCopies:
    """Copies of the functions on a model, with variables of their own instead of the functions' variables.

    Attributes:
        copies: by the `id` of each function.
    """

    def __init__(self, model: nn.Module) -> None:
        self.copies: dict[int, Any] = {}
        self._functions: list[FunctionType] = []
        self._cells: dict[int, tuple[CellType, CellType]] = {}
        for module in model.modules():
            for value in (*vars(module).values(), *_list_torch_hooks(module)):
                function = _unwrap_function(value)
                # What ditile put on the model knows its ranks, and stays.
                if isinstance(function, FunctionType) and _find_package(function) != "ditile":
                    self._copy_function(function)

    def _copy_function(self, function: FunctionType) -> None:
        if id(function) in self.copies:
            return
        closure = []
        for cell in function.__closure__ or ():
            _, copied_cell = self._cells.setdefault(id(cell), (cell, CellType()))
            closure.append(copied_cell)
        self.copies[id(function)] = FunctionType(
            function.__code__, function.__globals__, function.__name__, None, tuple(closure) or None
        )
        self._functions.append(function)

    def fill_variables(self, memo: dict[int, Any]) -> None:
        """Gives the copies what the functions keep in their variables, once the model was copied."""
        for cell, copied_cell in self._cells.values():
            try:
                value = cell.cell_contents
            except ValueError:  # nothing is in it yet
                continue
            copied_cell.cell_contents = _copy_value(value, memo)
        for function in self._functions:
            copied = self.copies[id(function)]
            if function.__defaults__ is not None:
                copied.__defaults__ = tuple(_copy_value(value, memo) for value in function.__defaults__)
            if function.__kwdefaults__ is not None:
                defaults = function.__kwdefaults__.items()
                copied.__kwdefaults__ = {name: _copy_value(value, memo) for name, value in defaults}

    def rebind_methods(self, module: nn.Module) -> None:
        """Puts copies of functions into the methods that were made of them for a module."""
        tables = [vars(module)]
        tables += [vars(module)[table] for table in _HOOK_TABLES]
        for table in tables:
            for name, value in table.items():
                if isinstance(value, MethodType) and id(value.__func__) in self.copies:
                    table[name] = MethodType(self.copies[id(value.__func__)], value.__self__)


def _copy_value(value: Any, memo: dict[int, Any]) -> Any:
    """A copy of what a function keeps; what cannot be copied, such as a file, is shared."""
    try:
        return copy.deepcopy(value, memo)
    except CANNOT_CALL:
        return value


@contextmanager
def keep_globals(codes: Sequence[UserCode]) -> Iterator[None]:
    """Puts numbers and containers back that functions on a model keep in variables of their module."""
    variables: list[tuple[dict[str, Any], str, Any, Any]] = []
    for code in codes:
        function = _unwrap_function(code.code)
        if not isinstance(function, FunctionType):
            continue
        for name in function.__code__.co_names:
            value = function.__globals__.get(name)
            if isinstance(value, int | float | list | dict | set):
                variables.append((function.__globals__, name, value, copy.copy(value)))
    try:
        yield
    finally:
        for namespace, name, value, before in variables:
            namespace[name] = value
            # Other code may refer to the container, so that this one gets its content back.
            if isinstance(value, list):
                value[:] = before
            elif isinstance(value, dict | set):
                value.clear()
                value.update(before)
