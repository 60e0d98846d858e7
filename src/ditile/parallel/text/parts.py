"""Which part of a text encoder a rank has (everything, nothing, a run of its layers), and who may call it.

Modules of other ranks are emptied in a whole encoder, or are never read. The first rank has what comes before the
layers (token embeddings), every rank the little that comes after them.
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
"""A parameter without elements: an encoder without weights still has a dtype and a device."""


@dataclass(frozen=True, slots=True)
class EncoderModules:
    """The parts of an encoder, by the last names of its modules.

    Attributes:
        layers: the list of layers.
        first: what comes before the layers.
        every: what comes after them.
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
    """The parts of an encoder, by its class or the nearest of its bases.

    Raises:
        ModelError: if none of these is known.
    """
    # A user's own subclass has the parts of its nearest known base.
    for cls in kind.__mro__:
        if cls in ENCODER_MODULES:
            return ENCODER_MODULES[cls]
    known = ", ".join(cls.__name__ for cls in ENCODER_MODULES)
    raise ModelError(f"text=split cannot cut a {kind.__name__}; known are {known}; text=first runs any encoder")


def can_split_encoder(kind: type) -> bool:
    """Whether the parts of an encoder of a class are known."""
    return not ENCODER_MODULES.keys().isdisjoint(kind.__mro__)


def find_encoder_layers(encoder: nn.Module) -> nn.ModuleList:
    """The list of layers of an encoder. Raises `ModelError` if the encoder cannot be split."""
    list_name = find_encoder_modules(type(encoder)).layers
    for name, module in encoder.named_modules():
        if name.rpartition(".")[2] == list_name and isinstance(module, nn.ModuleList):
            return module
    raise ModelError(f"{type(encoder).__name__} has no list of layers called {list_name}; use text=first")


def assign_layer_ranks(layers: int, weights: tuple[float, ...]) -> list[int]:
    """The rank of each layer: runs in proportion to the ranks' weights."""
    owners: list[int] = []
    # From the last rank on: of equal shares the first ones are longer, and the first rank has the embeddings.
    from_last = weights[::-1]
    for place in range(len(weights)):
        run = pick_weighted_chunk(range(layers), from_last, place)
        rank = len(weights) - 1 - place
        owners = [rank] * len(run) + owners
    return owners


def list_foreign_modules(encoder: nn.Module, place: EncoderPlacement) -> list[nn.Module]:
    """The largest modules that only other ranks need; the list of layers stays, because the encoder iterates over it.

    Raises:
        ModelError: if the encoder cannot be split.
    """
    if place.mode == "first":
        return list(encoder.children()) if place.has_no_weights else []
    module_names = find_encoder_modules(type(encoder))
    layers = find_encoder_layers(encoder)
    owners = assign_layer_ranks(len(layers), place.weights)
    own_modules = {id(layers)}
    for path, module in encoder.named_modules():
        if module._parameters and _find_owner_rank(path.split("."), module_names, owners) in (place.index, None):
            own_modules.add(id(module))
    return list(_iterate_largest_foreign(encoder, own_modules))


def empty_foreign_modules(encoder: nn.Module, place: EncoderPlacement) -> list[tuple[nn.Module, ModuleContents]]:
    """Empties the modules of other ranks, and returns these with their contents."""
    # Read before the modules are empty: an encoder takes its dtype and device from its parameters.
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
    """Gives an encoder without weights a dtype and a device; without a dtype, takes them away again."""
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
    """A text encoder of which only this rank's part is read from its checkpoint, on the CPU.

    transformers' own loader does it, by its own rules of names and dtypes: it reads the parameters that the model has.

    Args:
        source: folder, or hub id; or the file of a state dict in the options.
        config_place: of such a file the folder with the config in the options.
        options: of `from_pretrained`, such as `subfolder` and `variant`, or `config` and `state_dict`.

    Raises:
        ModelError: if it cannot be split.
        LoadError: if a weight of this part is missing, or of another shape, or belongs to no layer of the model.
    """
    # Only the config is read.
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
    # transformers takes a state dict only without a folder.
    folder = None if is_file else source
    # The loading info has the weights that are missing or do not fit, which transformers would draw at random. It
    # logs them as a table too.
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
    """Why an encoder cannot have the weights that were read, by transformers' loading info; empty if it can."""
    if info["mismatched_keys"]:
        name, stored_shape, own_shape = min(info["mismatched_keys"])
        return f"{name} has the shape {list(stored_shape)}, and the config says {list(own_shape)}"
    missing = info["missing_keys"]
    if missing:
        return f"it lacks {len(missing)} weight(s), such as {min(missing)}"
    # Those of a deeper encoder, or of one with more in a layer. What is beside all layers is another part of the model
    # that the encoder is of, such as a decoder.
    surplus = []
    for name in info["unexpected_keys"]:
        path, _, leaf = name.rpartition(".")
        if is_file and leaf in ("weight", "bias") and _find_own_module(encoder, path) is not None:
            surplus.append(name)
    if surplus:
        return f"it has {len(surplus)} more weight(s), such as {min(surplus)}"
    return ""


def _find_own_module(encoder: nn.Module, path: str) -> nn.Module | None:
    """The module of this rank that is nearest to a path that may not be there; None for the encoder itself."""
    module = encoder
    for name in path.split("."):
        following = module._modules.get(name)
        if following is None:
            break
        module = following
        # It is on another rank.
        if is_placeholder(module):
            return None
    return None if module is encoder else module


def _derive_partial_class(kind: type[Any], place: EncoderPlacement) -> type[Any]:
    """The class under its own name, but its instances lose the modules of other ranks when they are made."""

    def initialize_own_part(self: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, *args, **kwargs)
        emptied = {id(module) for module, _ in empty_foreign_modules(self, place)}
        for module in self.modules():
            if not emptied.isdisjoint(map(id, module.modules())):
                # Otherwise transformers draws random weights for what is not there.
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
    """The rank that has a module; None is every rank."""
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
"""The attribute of an encoder that says which part of it there is."""


@dataclass(frozen=True, slots=True)
class EncoderPlacement:
    """Which part of the text encoders a rank has: mode, place among the ranks of its image, and their weights."""

    mode: str = "each"
    index: int = 0
    weights: tuple[float, ...] = (1.0,)

    @classmethod
    def choose_placement(cls, plan: Plan, index: int) -> EncoderPlacement:
        """The part of a rank; all of it where nothing is split."""
        weights = plan.list_rank_weights()
        if plan.text == "each" or len(weights) == 1:
            return WHOLE
        return cls(plan.text, index, weights)

    @property
    def has_no_weights(self) -> bool:
        """Whether the rank has nothing."""
        return self.mode == "first" and self.index > 0

    def __str__(self) -> str:
        if self == FREED:
            return "text_after=free"
        return f"text={self.mode} on rank {self.index} of {len(self.weights)}"


WHOLE = EncoderPlacement()
FREED = EncoderPlacement("freed")


def read_placement(encoder: nn.Module) -> EncoderPlacement | None:
    """The placement that was stored in an encoder; None if there is none."""
    return vars(encoder).get(_PLACE)


def store_placement(encoder: nn.Module, place: EncoderPlacement | None) -> None:
    """Stores in an encoder which part of it there is; None removes that."""
    vars(encoder).pop(_PLACE, None)
    if place is not None:
        vars(encoder)[_PLACE] = place


def install_guards(stack: ExitStack, encoder: nn.Module, name: str) -> None:
    """Makes an encoder that is not there or not whole refuse calls outside of a runner, and to be saved."""
    stack.callback(encoder.register_forward_pre_hook(functools.partial(_refuse_partial_call, name)).remove)
    if read_placement(encoder) not in (None, WHOLE):
        refuse_saving(stack, encoder)


@exclude_from_compile
def _refuse_partial_call(name: str, encoder: nn.Module, *_: Any) -> None:
    """Raises `StateError` outside of a runner's call. A function of the module, so that encoders can be pickled."""
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
