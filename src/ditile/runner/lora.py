"""LoRAs on a divided pipeline: each rank loads the factors of the modules that it holds.

The pipeline's own `load_lora_weights` runs on a state dict without the keys of placeholders, because peft finds no
target for them. If a component has none of a LoRA's modules on this rank, it gets an empty adapter of the same name.
So every rank can switch, scale, fuse and delete the adapter.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from contextlib import ExitStack, suppress
from typing import Any

from torch import Tensor, nn

from ditile.model.hooks.block_hooks import LOADED_ATTRIBUTE
from ditile.model.hooks.compile import unwrap_compiled
from ditile.model.hooks.overrides import override_attribute
from ditile.model.hooks.placeholders import allow_state_dict, is_placeholder
from ditile.parallel.tensor.sharding import ShardedTransformer, find_share
from ditile.parallel.text.parts import FREED, read_placement
from ditile.plan.errors import ModelError
from ditile.plan.extras import is_installed, require_extra
from ditile.plan.numbers import is_number

LOG = logging.getLogger(__name__)


def load_lora(pipe: Any, source: Any, *, adapter_name: str | None = None, **kwargs: Any) -> None:
    """Loads a LoRA into a pipeline, divided or not, as `pipe.load_lora_weights` does. Every rank must call it.

    A rank that holds a share of the weights keeps the same share of the LoRA.

    Args:
        pipe: the pipeline.
        source: a safetensors file, folder, hub id or state dict, as `load_lora_weights` takes it.
        adapter_name: the name of the adapter; by default peft's own.
        kwargs: the other arguments of `load_lora_weights`.

    Raises:
        ModelError: if peft is not installed, the pipeline has no loader for LoRAs, or the plan cuts weights in a way in
            which the LoRA cannot be cut.
    """
    require_extra("lora", "a LoRA")
    if not hasattr(pipe, "load_lora_weights"):
        raise ModelError(f"{type(pipe).__name__} has no load_lora_weights; load LoRAs with peft before it is divided")
    parts: dict[str, nn.Module] = {}
    models: dict[str, nn.Module] = {}
    shares: dict[str, ShardedTransformer] = {}
    for name, part in pipe.components.items():
        if not isinstance(part, nn.Module):
            continue
        parts[name] = part
        models[name] = unwrap_compiled(part)
        share = find_share(models[name])
        if share is None:
            _check_whole_weights(models[name])
        else:
            shares[name] = share
    key_filter = _LoraKeyFilter(pipe, parts, shares)
    with ExitStack() as stack:
        allow_state_dict(stack, models.values())
        for name, share in shares.items():
            share.lift_lora_guards(stack, pipe, models[name])
        override_attribute(stack, pipe, "lora_state_dict", key_filter.filter_state_dict)
        kwargs.setdefault("use_safetensors", True)
        with suppress(_NothingHereError):
            pipe.load_lora_weights(source, adapter_name=adapter_name, **kwargs)
    for name, share in shares.items():
        share.sum_loras_over_ranks(models[name])
    for name in key_filter.list_components_elsewhere():
        if read_placement(parts[name]) == FREED:
            LOG.warning("the LoRA changes %s too, which was freed: embed prompts by a pipeline that has both", name)
        _register_empty_adapter(parts[name], adapter_name)


def select_loras(runner: Any, scales: Mapping[str, float]) -> None:
    """Makes the following calls use these of the loaded LoRAs, and no others. Every rank must call it.

    The results are then the same as if only these had been loaded; with no LoRA, the same as without LoRAs.

    Args:
        runner: a runner, or a pipeline.
        scales: the name of each adapter -> its scale.

    Raises:
        ModelError: if one is not loaded, or a scale is not a finite number.
    """
    pipe = getattr(runner, "pipe", runner)
    loaded = list_loaded_loras(pipe)
    for name, scale in scales.items():
        if name not in loaded:
            raise ModelError(f"LoRA {name!r} is not loaded; {_name_choices(loaded)}")
        if not is_number(scale) or not math.isfinite(scale):
            raise ModelError(f"LoRA {name!r} has the scale {scale!r}; give a finite number")
    if not loaded:
        return
    if scales:
        pipe.enable_lora()
        pipe.set_adapters(list(scales), [float(scale) for scale in scales.values()])
    else:
        pipe.disable_lora()


def forget_loras(runner: Any, names: Collection[str]) -> None:
    """Deletes LoRAs that are loaded, and frees their memory. Every rank must call it.

    When the last one is deleted, the layers are the plain ones again.

    Args:
        runner: a runner, or a pipeline.
        names: the names of the adapters.

    Raises:
        ModelError: if one is not loaded.
    """
    pipe = getattr(runner, "pipe", runner)
    loaded = list_loaded_loras(pipe)
    for name in sorted(names):
        if name not in loaded:
            raise ModelError(f"LoRA {name!r} is not loaded; {_name_choices(loaded)}")
    if not names:
        return
    if loaded == set(names):
        pipe.unload_lora_weights()
    else:
        pipe.delete_adapters(list(names))


def list_loaded_loras(pipe: Any) -> set[str]:
    """The names of the adapters that are loaded into a pipeline."""
    # Without peft no LoRA can be loaded, and diffusers raises when asked for a list.
    if not is_installed("peft") or not hasattr(pipe, "get_list_adapters"):
        return set()
    return set().union(*pipe.get_list_adapters().values())


def _name_choices(loaded: Collection[str]) -> str:
    if not loaded:
        return "load it with ditile.load_lora"
    return f"there are {', '.join(sorted(loaded))}"


def _check_whole_weights(part: nn.Module) -> None:
    """Raises `ModelError` if only a share of the weights was loaded, and `parallelize` has not been called yet."""
    loaded = vars(part).get(LOADED_ATTRIBUTE)
    if loaded is not None and loaded.shard[1] > 1:
        raise ModelError(
            f"of this {type(part).__name__} only a share for tensor={loaded.shard[1]} was loaded, and a LoRA needs "
            "whole weights; call parallelize, and load the LoRA into its runner's pipeline"
        )


class _NothingHereError(Exception):
    """All modules of a LoRA are on other ranks. Raised to end the loading, as pipelines refuse an empty state dict."""


class _LoraKeyFilter:
    """Removes the keys of placeholders from a LoRA, and notes which components the kept and the removed keys belong to.

    If this rank holds a share of a layer, the factors for that layer are cut in the same way.
    """

    def __init__(self, pipe: Any, parts: dict[str, nn.Module], shares: Mapping[str, ShardedTransformer]) -> None:
        self._read = pipe.lora_state_dict
        self._parts = parts
        self._shares = shares
        self._kept: set[str] = set()
        self._dropped: set[str] = set()

    def filter_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """What the pipeline's `lora_state_dict` returns, without those keys."""
        loaded_state = self._read(*args, **kwargs)
        # Some pipelines return a tuple: the state dict, and alphas or more.
        state = loaded_state
        if isinstance(loaded_state, tuple):
            state = loaded_state[0]
        local = self._select_local_keys(state)
        for key in state:
            component = key.split(".")[0]
            if component in self._parts:
                components = self._kept if key in local else self._dropped
                components.add(component)
        if state and not local:
            raise _NothingHereError
        if not isinstance(loaded_state, tuple):
            return local
        others = []
        for other in loaded_state[1:]:
            if isinstance(other, dict):
                other = self._select_local_keys(other)
            others.append(other)
        return local, *others

    def list_components_elsewhere(self) -> set[str]:
        """The components that a LoRA changes on other ranks but not on this one."""
        return self._dropped - self._kept

    def _select_local_keys(self, values: dict[str, Any]) -> dict[str, Any]:
        return {key: self._cut_value(key, value) for key, value in values.items() if self._is_key_local(key)}

    def _cut_value(self, key: str, value: Any) -> Any:
        """This rank's part of a factor; other values, such as alphas, are returned as they are."""
        component, _, name = key.partition(".")
        share = self._shares.get(component)
        if share is None or not isinstance(value, Tensor):
            return value
        return share.cut_lora_factor(name, value)

    def _is_key_local(self, key: str) -> bool:
        """Whether the path of a key leads to a module of this rank, and not to a placeholder."""
        first, *path = key.split(".")
        module = self._parts.get(first)
        # In most LoRAs the names of CLIP's layers begin with `text_model`. Some versions of transformers have no such
        # module, and diffusers then removes it from the names.
        if module is not None and path[:1] == ["text_model"] and "text_model" not in module._modules:
            del path[0]
        while module is not None and path and path[0] in module._modules:
            module = module._modules[path.pop(0)]
        return module is None or not path or not is_placeholder(module)


def _register_empty_adapter(part: Any, adapter_name: str | None) -> None:
    """Registers an adapter with a component that has none of its layers."""
    require_extra("lora", "a LoRA")
    from diffusers.utils.peft_utils import get_adapter_name
    from peft import LoraConfig, inject_adapter_in_model
    from peft.utils.constants import DUMMY_TARGET_MODULES

    name = adapter_name or get_adapter_name(part)
    if name in getattr(part, "peft_config", {}):
        return
    inject_adapter_in_model(LoraConfig(target_modules=DUMMY_TARGET_MODULES), part, adapter_name=name)
    part._hf_peft_config_loaded = True
