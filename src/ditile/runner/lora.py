"""LoRAs on a divided pipeline: each rank loads the factors of the modules that it holds.

The pipeline's own `load_lora_weights` runs on a state dict without the keys of placeholders, because peft finds no
target for them. If a component has none of a LoRA's modules on this rank, it gets an empty adapter of the same name.
So every rank can switch, scale, fuse and delete the adapter.
"""

from __future__ import annotations

import logging
import math
import os
import shlex
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import safetensors
from diffusers.loaders.lora_base import LORA_WEIGHT_NAME_SAFE
from torch import nn

from ditile.model.hooks.block_hooks import LOADED_ATTRIBUTE
from ditile.model.hooks.compile import unwrap_compiled
from ditile.model.hooks.overrides import override_attribute
from ditile.model.hooks.placeholders import allow_state_dict, is_placeholder, list_quantized_parameters
from ditile.parallel.tensor.sharding import ShardedTransformer, find_share
from ditile.parallel.text.parts import FREED, read_placement
from ditile.plan.errors import DitileError, ModelError, join_error_lines
from ditile.plan.extras import is_installed, require_extra
from ditile.plan.numbers import is_number
from ditile.plan.option_classes import CallArguments, checked
from ditile.runner.model_files import DENOISERS, TRANSFORMER, is_hub_id, refuse_out_of_memory
from ditile.runner.weights.lora_keys import LoraKeyFilter, NothingHereError

LOG = logging.getLogger(__name__)
SECOND = DENOISERS[1]
_LOAD_ERRORS = (
    *(OSError, ImportError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError),
    *(RuntimeError, AssertionError),
)
"""The exceptions of diffusers and peft for a file that is not a LoRA, is cut short, or has unexpected names or
shapes."""


@checked()
def load_lora(pipe: Any, source: Any, *, adapter_name: str | None = None, **kwargs: Any) -> None:
    """Load a LoRA into a pipeline, divided or not, like `pipe.load_lora_weights`. Every rank must call it.

    A rank with a share of the weights keeps the same share of the LoRA. Keys without a layer in the pipeline are named
    in the log.

    Args:
        pipe: the pipeline, or its runner.
        source: a safetensors file, folder, hub id or state dict, with the names of diffusers, kohya or ComfyUI.
        adapter_name: the name of the adapter; by default peft's own.
        kwargs: the other arguments of `load_lora_weights`, such as `load_into_transformer_2=True`.

    Raises:
        ModelError: if peft is not installed, the pipeline has no loader for LoRAs, the LoRA cannot be read, nothing of
            it fits the pipeline, the pipeline has no second transformer to load it into, or it cannot be cut as the
            plan cuts the weights.
    """
    require_extra("lora", "a LoRA")
    # `enable_cache` and `quantize` take a runner too.
    pipe = getattr(pipe, "pipe", pipe)
    if not hasattr(pipe, "load_lora_weights"):
        raise ModelError(f"{type(pipe).__name__} has no load_lora_weights; load LoRAs with peft before it is divided")
    label = "a state dict" if isinstance(source, Mapping) else str(source)
    if not isinstance(source, Mapping):
        source = _locate_source(source, label, kwargs)
    into_second = kwargs.pop("load_into_transformer_2", None)
    has_second = has_second_transformer(pipe)
    if into_second and not has_second:
        raise ModelError(f"lora={label!r} is for {SECOND}, which this {type(pipe).__name__} has not; load it without")
    parts: dict[str, nn.Module] = {}
    shares: dict[str, ShardedTransformer] = {}
    components = dict(pipe.components)
    if into_second:
        kwargs["load_into_transformer_2"] = True
        # A file for the second transformer calls it transformer too.
        components[TRANSFORMER] = components.pop(SECOND)
    for name, part in components.items():
        if not isinstance(part, nn.Module):
            continue
        parts[name] = part
        model = unwrap_compiled(part)
        share = find_share(model)
        if share is None:
            _check_whole_weights(model)
        else:
            shares[name] = share
    is_divided = bool(shares) or any(is_placeholder(module) for part in parts.values() for module in part.modules())
    if kwargs.get("hotswap") and is_divided:
        raise ModelError("hotswap=True needs a pipeline whose weights are not divided; delete the LoRA and load it")
    if adapter_name is None:
        adapter_name = _choose_adapter_name(list_loaded_loras(pipe))
    key_filter = LoraKeyFilter(pipe, parts, shares, label)
    with _undo_on_failure(pipe, label):
        _load_local_part(pipe, source, key_filter, parts, shares, adapter_name=adapter_name, **kwargs)
    for name in key_filter.dropped - key_filter.kept:
        if read_placement(parts[name]) == FREED:
            LOG.warning("the LoRA changes %s too, which was freed: embed prompts by a pipeline that has both", name)
        _register_empty_adapter(parts[name], adapter_name, key_filter.configs[name])
    # Wan 2.2 has one transformer for the first steps and one for the others, and a file for each.
    if has_second and into_second is None:
        LOG.warning(
            "lora=%r changes the first transformer alone, and transformer_2 of this %s stays as it is; load the file "
            "for that one by --lora transformer_2=FILE, or ditile.load_lora with load_into_transformer_2=True",
            label,
            type(pipe).__name__,
        )


def _locate_source(source: Any, label: str, kwargs: CallArguments) -> str:
    """Return the folder or hub id of a LoRA. If the name of its file is known, it is put into `kwargs`.

    Raises:
        ModelError: if there is no such source, since diffusers would take it for a hub id; for a folder with several
            files of weights, and for a file that is not safetensors.
    """
    path = os.path.expanduser(str(source))
    if os.path.isfile(path):
        kwargs["weight_name"] = Path(path).name
        path = str(Path(path).parent)
    elif not os.path.exists(path) and (path.endswith(".safetensors") or not is_hub_id(path)):
        raise ModelError(f"lora={str(source)!r} is not a file, folder or hub id (owner/name); give a .safetensors file")
    elif os.path.isdir(path) and kwargs.get("weight_name") is None:
        kwargs["weight_name"] = _choose_weight_name(Path(path, kwargs.get("subfolder") or ""), label)
    weight_name = kwargs.get("weight_name")
    if weight_name is not None and not weight_name.endswith(".safetensors"):
        raise ModelError(
            f"lora={label!r} is no .safetensors file ({weight_name}), and other files may run code when they are "
            "read; take one that is"
        )
    return path


def _choose_weight_name(folder: Path, label: str) -> str:
    """Return the only file of weights in a folder, or the one written by `save_lora_weights`."""
    # Leave out hidden files, which some systems put beside others.
    names = sorted(path.name for path in folder.glob("[!.]*.safetensors"))
    candidates = [name for name in names if name.endswith(LORA_WEIGHT_NAME_SAFE)] or names
    if len(candidates) == 1:
        return candidates[0]
    if not names:
        raise ModelError(f"lora={label!r} has no .safetensors file; give a folder with one, or the file")
    raise ModelError(
        f"lora={label!r} has {len(names)} files ({', '.join(names[:3])}), and one of them is a LoRA's; "
        f"give it, such as {shlex.quote(str(folder / names[0]))}"
    )


def _choose_adapter_name(loaded: Collection[str]) -> str:
    # Choose diffusers' default name, even on a rank without layers for the adapter.
    number = 0
    while f"default_{number}" in loaded:
        number += 1
    return f"default_{number}"


def has_second_transformer(pipe: Any) -> bool:
    """Return whether a pipeline calls two transformers in turns, each with LoRAs of its own."""
    return SECOND in getattr(pipe, "_lora_loadable_modules", ()) and getattr(pipe, SECOND, None) is not None


def _load_local_part(
    pipe: Any,
    source: Any,
    key_filter: LoraKeyFilter,
    parts: Mapping[str, nn.Module],
    shares: Mapping[str, ShardedTransformer],
    **kwargs: Any,
) -> None:
    """Load this rank's part of a LoRA through the pipeline's own loader."""
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        # The config names the layers of all ranks.
        warnings.filterwarnings("ignore", r"The following \w+_pattern keys did not match", RuntimeWarning)
        allow_state_dict(stack, map(unwrap_compiled, parts.values()))
        for name, share in shares.items():
            share.lift_lora_guards(stack, pipe, unwrap_compiled(parts[name]))
        override_attribute(stack, pipe, "lora_state_dict", key_filter.filter_state_dict)
        kwargs.setdefault("use_safetensors", True)
        with suppress(NothingHereError):
            pipe.load_lora_weights(source, **kwargs)
    for name, share in shares.items():
        share.sum_loras_over_ranks(unwrap_compiled(parts[name]))


@contextmanager
def _undo_on_failure(pipe: Any, label: str) -> Iterator[None]:
    """Delete the leftovers of a LoRA if it fails to load, and use the earlier ones again.

    Exceptions of diffusers, peft and safetensors become `ModelError`.
    """
    earlier = list_loaded_loras(pipe)
    uses: list[tuple[Any, list[str], bool]] = []
    for part in pipe.components.values():
        if isinstance(part, nn.Module):
            layers: list[Any] = [layer for layer in part.modules() if hasattr(layer, "merged_adapters")]
            uses += [(layer, list(layer.active_adapters), layer.disable_adapters) for layer in layers]
    try:
        yield
    except Exception as error:
        if earlier:
            forget_loras(pipe, list_loaded_loras(pipe) - earlier)
        else:
            # diffusers may have left layers of an adapter after forgetting its name.
            pipe.unload_lora_weights()
        for layer, active, is_disabled in uses:
            layer.set_adapter(active)
            layer.enable_adapters(not is_disabled)
        if isinstance(error, (*_LOAD_ERRORS, safetensors.SafetensorError)) and not isinstance(error, DitileError):
            refuse_out_of_memory(error)
            reason = join_error_lines(error, 300)
            # A converter of diffusers reads a tensor without checking that the file has it.
            if isinstance(error, KeyError):
                reason = f"its names are those of a trainer whose files have {reason} too; save it by save_lora_weights"
            raise ModelError(f"lora={label!r} cannot be loaded: {reason}") from error
        raise


def fuse_loras(pipe: Any) -> None:
    """Add the LoRAs in use to the weights, and unload them. Every rank must call it.

    Raises:
        ModelError: if weights are quantized, to which nothing can be added.
    """
    changed = []
    for name, part in pipe.components.items():
        if not isinstance(part, nn.Module) or not getattr(part, "peft_config", None):
            continue
        changed.append(name)
        quantized = list_quantized_parameters(part)
        if quantized:
            raise ModelError(
                f"fuse_lora=True adds LoRAs to plain weights, and {quantized[0]} of {name} is quantized; leave it out"
            )
    # By default some pipelines only fuse their transformer, and unloading takes the LoRA off the text encoders.
    pipe.fuse_lora(components=changed)
    pipe.unload_lora_weights()


def select_loras(runner: Any, scales: Mapping[str, float]) -> None:
    """Let later calls use some of the loaded LoRAs, and no others. Every rank must call it.

    The results are then the same as if only these LoRAs were loaded. With no scales they are the same as without LoRAs.

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
            raise ModelError(f"LoRA {name!r} is not loaded; there are {', '.join(sorted(loaded)) or 'none'}")
        if not is_number(scale) or not math.isfinite(scale):
            raise ModelError(f"LoRA {name!r} has the scale {scale!r}; give a finite number")
    if not loaded:
        return
    if scales:
        pipe.enable_lora()
        pipe.set_adapters(list(scales), list(map(float, scales.values())))
    else:
        pipe.disable_lora()


def forget_loras(runner: Any, names: Collection[str]) -> None:
    """Delete loaded LoRAs, and free their memory. Every rank must call it.

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
            raise ModelError(f"LoRA {name!r} is not loaded; there are {', '.join(sorted(loaded)) or 'none'}")
    if not names:
        return
    if loaded == set(names):
        pipe.unload_lora_weights()
    else:
        pipe.delete_adapters(list(names))


def list_loaded_loras(pipe: Any) -> set[str]:
    """Return the names of the adapters loaded into a pipeline."""
    # Without peft no LoRA can be loaded, and diffusers raises when asked for a list.
    if not is_installed("peft") or not hasattr(pipe, "get_list_adapters"):
        return set()
    return set().union(*pipe.get_list_adapters().values())


def _check_whole_weights(part: nn.Module) -> None:
    """Raise `ModelError` if a share of a model was loaded and `parallelize` was not called yet."""
    loaded = vars(part).get(LOADED_ATTRIBUTE)
    if loaded is not None and len(loaded.tensor_shares) > 1:
        raise ModelError(
            f"of this {type(part).__name__} only a share of tensor={len(loaded.tensor_shares)} was loaded, and a LoRA "
            "needs whole weights; call parallelize, and load the LoRA into its runner's pipeline"
        )


def _register_empty_adapter(part: Any, name: str, config: Any) -> None:
    """Register an adapter with a component that has none of its layers."""
    require_extra("lora", "a LoRA")
    from peft import inject_adapter_in_model
    from peft.utils.constants import DUMMY_TARGET_MODULES

    if name in getattr(part, "peft_config", {}):
        return
    empty = type(config)(**config.to_dict() | {"target_modules": DUMMY_TARGET_MODULES})
    inject_adapter_in_model(empty, part, adapter_name=name)
    part._hf_peft_config_loaded = True
