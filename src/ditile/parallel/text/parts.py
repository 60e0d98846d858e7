"""The part of a text encoder that a rank has (everything, nothing, a run of its layers), and who may call it.

A rank empties the modules of other ranks in an encoder that was loaded whole, or never reads them. The first rank has
the modules before the layers (token embeddings), and every rank has the few modules after them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from ditile.model.hooks.compile import exclude_from_compile
from ditile.model.hooks.overrides import IN_CALL
from ditile.model.hooks.placeholders import ModuleContents, is_placeholder, refuse_saving, turn_into_placeholder
from ditile.plan.errors import LoadError, ModelError, StateError
from ditile.plan.layout import pick_weighted_chunk
from ditile.plan.plan import Plan

_LOADER_LOG = logging.getLogger("transformers")
_PLACEHOLDER = "stand_in"
"""The name of a parameter without elements, which gives an encoder without weights a dtype and a device."""


@dataclass(frozen=True, slots=True)
class EncoderModules:
    """The names of an encoder's parts, each the last name in the paths of modules.

    Attributes:
        layers: the list of layers.
        first: the modules before the layers, which only the first rank has.
        every: the modules after the layers, which every rank has.
    """

    layers: str
    first: tuple[str, ...]
    every: tuple[str, ...]


ENCODER_MODULES: dict[type, EncoderModules] = {
    transformers.T5EncoderModel: EncoderModules("block", ("shared", "embed_tokens"), ("final_layer_norm",)),
    transformers.CLIPTextModel: EncoderModules("layers", ("embeddings",), ("final_layer_norm",)),
    transformers.CLIPTextModelWithProjection: EncoderModules(
        "layers", ("embeddings",), ("final_layer_norm", "text_projection")
    ),
}
"""The encoders that can be split."""


def find_encoder_modules(kind: type) -> EncoderModules:
    """Return the names of an encoder's parts, given its class.

    Raises:
        ModelError: if neither the class nor a base of it is known.
    """
    # A user's own subclass has the parts of its nearest known base.
    for cls in kind.__mro__:
        if cls in ENCODER_MODULES:
            return ENCODER_MODULES[cls]
    known = ", ".join(cls.__name__ for cls in ENCODER_MODULES)
    raise ModelError(f"text=split cannot cut a {kind.__name__}; known are {known}; text=first runs any encoder")


def can_split_encoder(kind: type) -> bool:
    """Return whether the parts of an encoder of this class are known."""
    return not ENCODER_MODULES.keys().isdisjoint(kind.__mro__)


def find_encoder_layers(encoder: nn.Module) -> nn.ModuleList:
    """Return the list of layers of an encoder. Raises `ModelError` if the encoder cannot be split."""
    list_name = find_encoder_modules(type(encoder)).layers
    for name, module in encoder.named_modules():
        if name.rpartition(".")[2] == list_name and isinstance(module, nn.ModuleList):
            return module
    raise ModelError(f"{type(encoder).__name__} has no list of layers called {list_name}; use text=first")


def assign_layer_ranks(layers: int, weights: tuple[float, ...]) -> list[int]:
    """Return the rank of each layer, in runs proportional to the ranks' weights."""
    owners: list[int] = []
    # Chunks are picked from the last rank on, so that among equal shares the longer ones go to the last ranks: the
    # first rank has the embeddings too.
    weights_from_last = weights[::-1]
    for index in range(len(weights)):
        run = pick_weighted_chunk(range(layers), weights_from_last, index)
        rank = len(weights) - 1 - index
        owners = [rank] * len(run) + owners
    return owners


def list_foreign_modules(encoder: nn.Module, place: EncoderPlacement) -> list[nn.Module]:
    """List the largest modules that only other ranks need.

    The list of layers stays, because the encoder iterates over it.

    Raises:
        ModelError: if the encoder cannot be split.
    """
    if place.mode == "first":
        if place.has_no_weights:
            return list(encoder.children())
        return []
    module_names = find_encoder_modules(type(encoder))
    layers = find_encoder_layers(encoder)
    owners = assign_layer_ranks(len(layers), place.weights)
    own_modules = {id(layers)}
    for path, module in encoder.named_modules():
        if module._parameters and _find_owner_rank(path.split("."), module_names, owners) in (place.index, None):
            own_modules.add(id(module))
    return list(_iterate_largest_foreign(encoder, own_modules))


def empty_foreign_modules(encoder: nn.Module, place: EncoderPlacement) -> list[tuple[nn.Module, ModuleContents]]:
    """Empty the modules of other ranks, and return them with their contents."""
    # The placeholder parameter gets the dtype and device of a weight, which is found before the modules are emptied.
    weight = next(parameter for parameter in encoder.parameters() if parameter.is_floating_point())
    contents = [(module, turn_into_placeholder(module)) for module in list_foreign_modules(encoder, place)]
    store_placement(encoder, place)
    if place.has_no_weights:
        set_placeholder_parameter(encoder, weight.dtype, weight.device)
    return contents


def set_placeholder_parameter(
    encoder: nn.Module,
    dtype: torch.dtype | None,
    device: torch.device | str | None = None,
) -> None:
    """Give an encoder without weights a dtype and a device; without a dtype, take them away again."""
    encoder._parameters.pop(_PLACEHOLDER, None)
    if dtype is not None:
        empty = torch.empty(0, dtype=dtype, device=device)
        encoder._parameters[_PLACEHOLDER] = nn.Parameter(empty, requires_grad=False)


def read_partial_encoder(
    kind: type[Any],
    source: str,
    place: EncoderPlacement,
    dtype: torch.dtype | None,
    *,
    config_place: Path | None = None,
    **options: Any,
) -> Any:
    """Read only this rank's part of a text encoder from its checkpoint, on the CPU.

    transformers' loader reads the parameters that the partial model has, by its own rules for names and dtypes.

    Args:
        source: a folder or hub id, or the file of a state dict in the options.
        config_place: for such a file, the folder of the config in the options.
        options: for `from_pretrained`, such as `subfolder` and `variant`, or `config` and `state_dict`.

    Raises:
        ModelError: if the encoder cannot be split.
        LoadError: if a weight of this part is missing, or of another shape, or belongs to no layer of the model.
    """
    # Without weights, only the config is read.
    if place.has_no_weights:
        subfolder = options.get("subfolder", "")
        config = options.get("config") or kind.config_class.from_pretrained(source, subfolder=subfolder)
        with torch.device("meta"):
            encoder = kind._from_config(config, dtype=dtype).eval()
        empty_foreign_modules(encoder, place)
        set_placeholder_parameter(encoder, dtype)
        return encoder
    partial_class = _derive_partial_class(kind, place) if place.mode == "split" else kind
    is_file = config_place is not None
    # transformers takes a state dict only if no folder is given.
    folder = None if is_file else source
    # transformers would put random numbers into weights that are missing or do not fit. The loading info has these
    # weights, so the table of them that transformers logs is silenced.
    level = _LOADER_LOG.level
    _LOADER_LOG.setLevel(logging.ERROR)
    try:
        encoder, info = partial_class.from_pretrained(
            folder,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,
        )
    finally:
        _LOADER_LOG.setLevel(level)
    encoder.__class__ = kind
    problem = _describe_misfit(encoder, info, is_file=is_file)
    if problem:
        remedy = "copy it again"
        if is_file:
            remedy = f"take a file of the encoder that {config_place} describes"
        raise LoadError(f"{source} has not the weights of this {kind.__name__}: {problem}; {remedy}")
    store_placement(encoder, place)
    return encoder


def _describe_misfit(encoder: nn.Module, info: Mapping[str, Any], *, is_file: bool) -> str:
    """Return why the weights that were read do not fit an encoder, or an empty text if they fit.

    The reason is taken from transformers' loading info.
    """
    if info["mismatched_keys"]:
        name, stored_shape, own_shape = min(info["mismatched_keys"])
        return f"{name} has the shape {list(stored_shape)}, and the config says {list(own_shape)}"
    missing = info["missing_keys"]
    if missing:
        return f"it lacks {len(missing)} weight(s), such as {min(missing)}"
    # A surplus is weights of a deeper encoder, or of one with more weights in a layer. Weights outside of the encoder's
    # modules do not count: they belong to another part of the encoder's model, such as a decoder.
    surplus = []
    for name in info["unexpected_keys"]:
        path, _, leaf = name.rpartition(".")
        if is_file and leaf in ("weight", "bias") and _find_own_module(encoder, path) is not None:
            surplus.append(name)
    if surplus:
        return f"it has {len(surplus)} more weight(s), such as {min(surplus)}"
    return ""


def _find_own_module(encoder: nn.Module, path: str) -> nn.Module | None:
    """Return the deepest existing module on a path; None if it is the encoder itself, or is on another rank."""
    module = encoder
    for name in path.split("."):
        following = module._modules.get(name)
        if following is None:
            break
        module = following
        # The module is on another rank, so its weights are no surplus on this one.
        if is_placeholder(module):
            return None
    return None if module is encoder else module


def _derive_partial_class(kind: type[Any], place: EncoderPlacement) -> type[Any]:
    """Derive a class of the same name whose instances lose the modules of other ranks when they are made."""

    def initialize_own_part(self: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, *args, **kwargs)
        emptied = {id(module) for module, _ in empty_foreign_modules(self, place)}
        for module in self.modules():
            if not emptied.isdisjoint(map(id, module.modules())):
                # Otherwise transformers generates random weights for the missing ones.
                module._is_hf_initialized = True
        # transformers ties weights by name, and must not look for names that are gone.
        names = {name for name, _ in self.named_parameters(remove_duplicate=False)}
        tied = self.all_tied_weights_keys
        self.all_tied_weights_keys = {key: source for key, source in tied.items() if {key, source} <= names}

    attributes = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__init__": initialize_own_part,
    }
    return type(kind.__name__, (kind,), attributes)


def _find_owner_rank(path: list[str], module_names: EncoderModules, owners: list[int]) -> int | None:
    """Return the rank that has a module; None is every rank."""
    for list_name, name in zip(path, path[1:], strict=False):
        if list_name == module_names.layers and name.isdigit():
            return owners[int(name)]
    if not set(path).isdisjoint(module_names.first):
        return 0
    if not set(path).isdisjoint(module_names.every):
        return None
    raise ModelError(f"text=split does not know where {'.'.join(path)} of this text encoder belongs; use text=first")


def _iterate_largest_foreign(module: nn.Module, own_modules: set[int]) -> Iterator[nn.Module]:
    for child in module.children():
        if not own_modules.isdisjoint(map(id, child.modules())):
            yield from _iterate_largest_foreign(child, own_modules)
        # Modules without parameters, such as activations, cost nothing.
        elif next(child.parameters(), None) is not None:
            yield child


_PLACE = "_place_by_ditile"
"""The attribute in which an encoder's placement is stored."""


@dataclass(frozen=True, slots=True)
class EncoderPlacement:
    """A rank's part of the text encoders: mode, place among the ranks of its image, and their weights."""

    mode: str = "each"
    index: int = 0
    weights: tuple[float, ...] = (1.0,)

    @classmethod
    def choose_placement(cls, plan: Plan, index: int) -> EncoderPlacement:
        """Return the part of a rank; all of it if nothing is split."""
        weights = plan.list_rank_weights()
        if plan.text == "each" or len(weights) == 1:
            return WHOLE
        return cls(plan.text, index, weights)

    @property
    def has_no_weights(self) -> bool:
        """Return whether the rank has no part of the encoders."""
        return self.mode == "first" and self.index > 0

    def __str__(self) -> str:
        if self == FREED:
            return "text_after=free"
        return f"text={self.mode} on rank {self.index} of {len(self.weights)}"


WHOLE = EncoderPlacement()
FREED = EncoderPlacement("freed")


def read_placement(encoder: nn.Module) -> EncoderPlacement | None:
    """Return the placement stored in an encoder; None if there is none."""
    return vars(encoder).get(_PLACE)


def store_placement(encoder: nn.Module, place: EncoderPlacement | None) -> None:
    """Store the placement of an encoder in it; None removes it."""
    vars(encoder).pop(_PLACE, None)
    if place is not None:
        vars(encoder)[_PLACE] = place


def install_guards(stack: ExitStack, encoder: nn.Module, name: str) -> None:
    """Make a partial encoder refuse to be saved, and to be called outside of a runner; a freed one refuses any call."""
    stack.callback(encoder.register_forward_pre_hook(functools.partial(_refuse_partial_call, name)).remove)
    if read_placement(encoder) not in (None, WHOLE):
        refuse_saving(stack, encoder)


@exclude_from_compile
def _refuse_partial_call(name: str, encoder: nn.Module, *_: Any) -> None:
    """Raise `StateError` if an encoder is freed, or if it is partial and the call is not from a runner.

    This function is no closure, so that encoders that have it as a hook can be pickled.
    """
    place = read_placement(encoder)
    if place == FREED:
        raise StateError(
            f"{name} was freed when denoising first began; pass prompt embeddings, or use text_after='offload'"
        )
    is_partial = place is not None and (place.mode == "split" or place.has_no_weights)
    if is_partial and IN_CALL not in vars(encoder):
        raise StateError(
            f"of {name} there is only what {place} leaves, so it works in calls of the runner alone; give the "
            "runner the prompt, or plan with text=each"
        )
