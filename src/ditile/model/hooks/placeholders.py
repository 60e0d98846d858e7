"""The contents of a module: how to remove and restore them, their size in bytes, and which of them are quantized.

A placeholder is a module without weights and children that stays in its place: nothing of it is saved, moved or
counted. It keeps the parts that the model's forward computes with outside of the module. Quantized weights are treated
alike, whether ditile, diffusers or the user has quantized them.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
from diffusers.models.modeling_utils import no_init_weights
from torch import Tensor, nn

from ditile.model.hooks.overrides import WatchedMethod, override_attribute
from ditile.plan.errors import ModelError, StateError

_MARK = "_is_placeholder_of_ditile"

ModuleContents = tuple[dict[str, Any], ...]
"""The contents of a module: children, parameters, buffers."""


class ReplacementBlock(Protocol):
    """Computes a block whose own module is a placeholder."""

    block: nn.Module

    def __call__(self, **call: Any) -> Any:
        """Run the block's forward."""


def turn_into_placeholder(module: nn.Module, kept: Iterable[str] = ()) -> ModuleContents:
    """Remove everything from a module except the parts at the paths `kept`, and return all of its contents."""
    parts = {path: module.get_submodule(path) for path in kept}
    containers = _list_contents(module)
    contents = tuple(dict(container) for container in containers)
    for container in containers:
        container.clear()
    for path, part in parts.items():
        owner = module
        children = contents[0]
        *parents, name = path.split(".")
        for parent in parents:
            # A part that is kept needs a path of modules to it.
            if parent not in owner._modules:
                copied = copy.copy(children[parent])
                # Otherwise the copy would share the containers of its original.
                vars(copied).update(_modules={}, _parameters={}, _buffers={})
                vars(copied)[_MARK] = True
                owner._modules[parent] = copied
            owner = owner.get_submodule(parent)
            children = children[parent]._modules
        owner._modules[name] = part
    vars(module)[_MARK] = True
    return contents


def restore_contents(module: nn.Module, contents: ModuleContents) -> None:
    """Put back the contents that `turn_into_placeholder` returned."""
    vars(module).pop(_MARK, None)
    for container, content in zip(_list_contents(module), contents, strict=True):
        container.clear()
        container.update(content)


class PartView:
    """A view of the attributes of a block's part that are not weights, such as its attention processor.

    Args:
        part: the part of another block of the same class.
        kept: the part that the block itself kept, if any.
    """

    def __init__(self, part: nn.Module, kept: nn.Module | None) -> None:
        self._part = part
        self._kept = kept

    def __getattr__(self, name: str) -> Any:
        if self._kept is not None and name in self._kept._modules:
            return self._kept._modules[name]
        value = getattr(self._part, name)
        if isinstance(value, nn.Module | Tensor):
            raise ModelError(
                f"the model's forward computes with {name} of {type(self._part).__name__} outside of its block, "
                "which is on another stage; use a plan with pipefusion=1"
            )
        return value


def lend_parts(stack: contextlib.ExitStack, placeholder: nn.Module, block: nn.Module) -> None:
    """Let a model's forward read the common attributes of all its blocks from a placeholder, until the stack is closed.

    Args:
        placeholder: the block without parts.
        block: a block of the same class that has its parts.
    """
    for name, part in block.named_children():
        override_attribute(stack, placeholder, name, PartView(part, placeholder._modules.get(name)))


SAVING_METHODS = {
    "save_pretrained": "save_pretrained",
    "push_to_hub": "push_to_hub",
    # `pickle`, `torch.save` and `copy.deepcopy` ask an object for this.
    "__reduce_ex__": "a pickle or copy",
}
"""The methods that write all contents of an object, with a name for each."""


LORA_LOADERS = ("load_lora_weights", "load_lora_adapter")
"""The methods of a pipeline and a model that only read the names in a model's state dict, and do not save."""

_LOADS_LORA = "_loads_lora_for_ditile"
"""The attribute of a model that marks it while a LoRA is being loaded."""


def refuse_saving(stack: contextlib.ExitStack, owner: Any, models: Iterable[nn.Module] = ()) -> None:
    """Make a model or a pipeline refuse to be saved or copied, until the stack is closed.

    Args:
        owner: a model that is partly on this rank, or a pipeline.
        models: the models of a pipeline that are partly on this rank.
    """
    name = type(owner).__name__
    if isinstance(owner, nn.Module):
        models = (owner,)
        # Other libraries save the result of `state_dict`.
        stack.callback(owner.register_state_dict_pre_hook(_refuse_state_dict).remove)
    for method, what in SAVING_METHODS.items():
        if hasattr(owner, method):
            override_attribute(stack, owner, method, partial(_refuse_saving, name, what))
    for method in LORA_LOADERS:
        if hasattr(owner, method):
            load_with_names = partial(_load_lora, tuple(models))
            override_attribute(stack, owner, method, WatchedMethod(load_with_names, getattr(owner, method)))


def allow_state_dict(stack: contextlib.ExitStack, models: Iterable[nn.Module]) -> None:
    """Let partial models return their state dict, for a LoRA, until the stack is closed."""
    for model in models:
        override_attribute(stack, model, _LOADS_LORA, True)


def _load_lora(models: Iterable[nn.Module], load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with contextlib.ExitStack() as stack:
        allow_state_dict(stack, models)
        return load(*args, **kwargs)


def _refuse_state_dict(model: nn.Module, prefix: str, _keep_vars: bool) -> None:
    # To load a LoRA, peft asks the module that it puts around a model, so the prefix is not empty.
    if prefix == "" and _LOADS_LORA not in vars(model):
        _refuse_saving(type(model).__name__, "state_dict")


def _refuse_saving(name: str, what: str, *_: Any, **__: Any) -> NoReturn:
    raise StateError(
        f"{what} of this {name} would lack weights, of which this rank has a part; do it before parallelize, or after "
        "runner.restore(), which with stages needs parallelize(..., keep_weights=True)"
    )


def is_placeholder(module: nn.Module) -> bool:
    """Return whether a module was turned into a placeholder."""
    return _MARK in vars(module)


@contextlib.contextmanager
def init_on_meta_device() -> Iterator[None]:
    """Build models on the meta device: they have only structure and shapes, and no values are initialized."""
    with no_init_weights(), torch.device("meta"):
        yield


def build_meta_model(transformer: nn.Module) -> nn.Module:
    """Build the whole structure of a transformer from its config, without weights."""
    model: Any = transformer
    with init_on_meta_device():
        return type(model).from_config(model.config)  # type: ignore[no-any-return]


def _list_contents(module: nn.Module) -> ModuleContents:
    return (module._modules, module._parameters, module._buffers)


def list_quantized_parameters(module: nn.Module) -> list[str]:
    """Return the names of the quantized parameters: those with a tensor class other than torch's own."""
    return [name for name, parameter in module.named_parameters() if not is_plain_parameter(parameter)]


def is_plain_parameter(parameter: Tensor) -> bool:
    """Return whether a parameter is an ordinary tensor of floating point numbers."""
    is_plain = type(parameter) in (nn.Parameter, Tensor) or getattr(parameter, "holds_plain_numbers", False)
    return is_plain and parameter.is_floating_point()


def count_parameter_bytes(module: nn.Module) -> int:
    """Count the bytes of a module's parameters, with scales and zero points."""
    return sum(count_tensor_bytes(parameter) for parameter in module.parameters())


def count_tensor_bytes(tensor: Any) -> int:
    """Count the bytes of a tensor and its parts: torchao has them in a subclass, bitsandbytes in a state."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return sum(count_tensor_bytes(getattr(tensor, name)) for name in names)
    num_bytes = int(tensor.numel() * tensor.element_size())
    state = getattr(tensor, "quant_state", None)
    # bitsandbytes may quantize the scales again.
    while state is not None:
        num_bytes += count_tensor_bytes(state.absmax)
        state = state.state2
    return num_bytes
