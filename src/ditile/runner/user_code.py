"""User code on a model: hooks, forwards, processors and classes outside of all tables.

The table of anatomies says of diffusers' own code that images of a batch do not see each other, and tokens see each
other only in attention; for a user's own model the derivation proves it. Other code may do anything, so a plan that
divides a call refuses it, unless the user trusts it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.batchnorm import _NormBase

from ditile.model.hooks.compile import unwrap_compiled
from ditile.plan.plan import Plan

KNOWN_PACKAGES = sys.stdlib_module_names | {
    "accelerate", "bitsandbytes", "diffusers", "ditile", "huggingface_hub", "optimum", "peft", "torch", "torchao",
    "transformers",
}  # fmt: skip
"""Their code computes each row by itself, and tokens as the anatomies say."""

_HOOK_TABLES = ("_forward_pre_hooks", "_forward_hooks")
"""torch's tables for the hooks of a module."""


class UserCode(NamedTuple):
    """Something on a model that none of the known packages put there.

    Attributes:
        path: the path, within the model, of the module that has it.
        description: what it is, in words for errors.
        is_of_class: whether it is the class of a module.
    """

    path: str
    description: str
    is_of_class: bool = False


def explain_code_refusal(parts: Iterable[nn.Module], plan: Plan, steps: int | None) -> str | None:
    """Return why a plan cannot divide the calls of models with a user's code on them, or None.

    Args:
        parts: the models; compiled ones stay wrapped, because hooks may be on torch's wrapper.
        steps: the steps of the call, if they are known.
    """
    # A single rank without stale keys calls every module like the pipeline itself.
    if plan.world == 1 and not plan.has_stale_steps(steps):
        return None
    for part in parts:
        model = unwrap_compiled(part)
        is_user_class = _find_package(type(model)) not in KNOWN_PACKAGES
        for code in list_user_code(part):
            # The classes in a user's own model were proven when it was derived.
            if code.is_of_class and is_user_class:
                continue
            path = f"{type(model).__name__}.{code.path}".rstrip(".")
            return (
                f"{path} has {code.description}, which is not diffusers' own code, and '{plan}' computes parts of a "
                "call apart; take it off, or call parallelize(..., trust_code=True) if it is right with parts"
            )
    return None


def describe_own_rows(model: nn.Module, plan: Plan) -> str | None:
    """Return what a plan that only divides the batch assumes of a user's own class, or None."""
    if _find_package(type(model)) in KNOWN_PACKAGES or plan.data * plan.cfg == 1 or not plan.divides_the_batch_alone:
        return None
    return f"{type(model).__name__} is not diffusers' own code: '{plan}' takes it that no row of its batch sees another"


def list_user_code(model: nn.Module) -> list[UserCode]:
    """List code on a model and its parts from outside the known packages."""
    codes = _list_unknown_hooks("", [*torch_module._global_forward_pre_hooks.values()])
    codes += _list_unknown_hooks("", [*torch_module._global_forward_hooks.values()])
    classes: dict[type, str] = {}
    for name, module in model.named_modules():
        # torch.compile puts a module around the model.
        path = name.removeprefix("_orig_mod").removeprefix(".")
        classes.setdefault(type(module), path)
        for table in _HOOK_TABLES:
            codes += _list_unknown_hooks(path, vars(module)[table].values())
        codes += _iterate_unknown_attributes(path, module)
        # Such a norm makes each image depend on the others of the batch.
        if isinstance(module, _NormBase) and (module.training or module.running_mean is None):
            codes.append(UserCode(path, f"a {type(module).__name__} of the statistics of its input"))
    for cls, path in classes.items():
        if _find_package(cls) not in KNOWN_PACKAGES:
            codes.append(UserCode(path, f"the class {cls.__name__}", is_of_class=True))
            continue
        # The user may have set functions on a known class.
        for base in cls.__mro__:
            for attribute, function in vars(base).items():
                if isinstance(function, FunctionType) and any(_iterate_unknown_functions(function)):
                    codes.append(UserCode(path, f"another {base.__name__}.{attribute}"))
    return codes


def _list_unknown_hooks(path: str, hooks: Iterable[Any]) -> list[UserCode]:
    codes = []
    for hook in hooks:
        for name in _iterate_unknown_functions(hook):
            codes.append(UserCode(path, f"the hook {name}"))
    return codes


def _iterate_unknown_attributes(path: str, module: nn.Module) -> Iterator[UserCode]:
    """Yield unknown code in a module's own attributes: a forward, a processor, hooks of diffusers or accelerate."""
    for attribute, value in vars(module).items():
        if attribute == "_diffusers_hook":
            yield from _list_unknown_hooks(path, value.hooks.values())
        elif attribute == "_hf_hook":
            yield from _list_unknown_hooks(path, getattr(value, "hooks", [value]))
        elif callable(value) and not isinstance(value, type | nn.Module):
            noun = "attention processor" if attribute == "processor" else attribute
            for name in _iterate_unknown_functions(value, type(module)):
                yield UserCode(path, f"the {noun} {name}")


def _iterate_unknown_functions(code: Any, owner: type = object) -> Iterator[str]:
    """Yield the names of called functions from neither the known packages nor the owner's class."""
    for function in _iterate_functions(code):
        name = str(getattr(function, "__name__", type(function).__name__))
        is_of_class = any(vars(base).get(name) is function for base in owner.__mro__)
        if not is_of_class and _find_package(function) not in KNOWN_PACKAGES:
            yield name


def _iterate_functions(code: Any) -> Iterator[Any]:
    """Yield the function of a method or a partial call, and any functions wrapped by it."""
    wrapped = getattr(code, "__wrapped__", None)
    if wrapped is not None:
        yield from _iterate_functions(wrapped)
    if isinstance(code, functools.partial):
        yield from _iterate_functions(code.func)
    else:
        yield getattr(code, "__func__", code)


def _find_package(code: Any) -> str:
    """Return the package of a class, a function, or the class of an object."""
    module = type(code).__module__
    if isinstance(code, type):
        module = code.__module__
    elif isinstance(code, FunctionType):
        # Not by `__module__`: a function that wraps another one has the `__module__` of that one.
        module = str(code.__globals__.get("__name__", ""))
    return module.split(".")[0]
