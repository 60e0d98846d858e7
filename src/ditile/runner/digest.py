"""A call and the state of a pipeline as short JSON that ranks compare: equal JSON means an equal image.

Numbers and short texts stand for themselves, so that an error can quote them. Tensors and images become a checksum of
all their bits, which does not depend on the device.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor, nn

from ditile.model.hooks.compile import unwrap_compiled
from ditile.plan.option_classes import CallArguments, JsonObject

SHORT = 300
"""Characters of a description sent in full; of a longer one the beginning and a checksum are sent."""
PLACES_OF_ADAPTERS = ("target_modules", "base_model_name_or_path", "revision", "inference_mode")
"""The items of an adapter's config that may differ between ranks."""


def describe_call(call: CallArguments) -> JsonObject:
    """Describe each argument that is not None. Callbacks are left out, since only one rank may have them."""
    described = {}
    for name, value in call.items():
        if value is not None and not name.startswith("callback"):
            described[name] = describe_value(value)
    return described


def describe_state(pipe: Any, device: torch.device) -> JsonObject:
    """Describe the scheduler, configs, dtypes, autocast and type of device. Besides the arguments, an image depends
    on these."""
    state: JsonObject = {"device": device.type, "autocast": "off"}
    if torch.is_autocast_enabled(device.type):
        state["autocast"] = str(torch.get_autocast_dtype(device.type))
    for name, part in pipe.components.items():
        if isinstance(part, nn.Module):
            part = unwrap_compiled(part)
        if loras := _name_loras(part):
            state[f"LoRAs of {name}"] = loras
        config = getattr(part, "config", None)
        # Tokenizers, and models of transformers, have none of diffusers' configs.
        if not isinstance(config, Mapping) or not hasattr(part, "config_name"):
            continue
        state[name] = type(part).__name__
        # Private items are the origin of a part. Ranks may load from different places.
        config = {key: value for key, value in config.items() if not key.startswith("_")}
        if isinstance(part, nn.Module):
            state[f"{name}.config"] = describe_value(config)
            state[f"{name}.dtype"] = str(getattr(part, "dtype", ""))
            state[f"{name}.use_tiling"] = bool(getattr(part, "use_tiling", False))
            continue
        # The scheduler's config is compared item by item: users change it, and an error should name the item.
        for key, value in config.items():
            state[f"{name}.{key}"] = describe_value(value)
        # `set_shift` changes this and not the config.
        if hasattr(part, "shift"):
            state[f"{name}.shift"] = describe_value(part.shift)
    return state


def describe_loras(components: Mapping[str, Any]) -> dict[str, str]:
    """Describe the use of LoRAs on this rank: in each block, and in each list and model with one use throughout.

    Ranks have some blocks in common, and others not; keys that only one of two ranks has say nothing.
    """
    described: dict[str, str] = {}
    layers_of_blocks: dict[str, list[str]] = {}
    uses: dict[str, set[str]] = {}
    for name, part in components.items():
        model = unwrap_compiled(part) if isinstance(part, nn.Module) else None
        if model is None or not hasattr(model, "peft_config"):
            continue
        described[f"LoRAs of {name}"] = _name_loras(model)
        configs: Any = model.peft_config
        for lora, config in configs.items():
            # Without its origin and the names of a rank's layers.
            values = config.to_dict()
            for place in PLACES_OF_ADAPTERS:
                values.pop(place, None)
            described[f"config of LoRA {lora} in {name}"] = describe_value(values)
        for path, layer in model.named_modules():
            places = f"{name}.{path}".split(".")
            for lora, use in _iterate_lora_uses(layer):
                layers_of_blocks.setdefault(_name_block(places), []).append(f"{path} {lora} {use}")
                uses.setdefault(f"LoRA {lora} in {name}", set()).add(use)
                uses.setdefault(f"LoRA {lora} in {'.'.join(places[:2])}", set()).add(use)
    for place, uses_in_place in uses.items():
        if len(uses_in_place) == 1:
            described[place] = uses_in_place.pop()
    for block, layers in layers_of_blocks.items():
        described[f"LoRA layers in {block}"] = _hash_text(str(layers))
    return described


def _name_block(places: Sequence[str]) -> str:
    """Return the model, list and block in a path such as transformer.blocks.3.attn.to_q."""
    # The layers of text encoders are in lists further down.
    for index, place in enumerate(places):
        if place.isdecimal():
            return ".".join(places[: index + 1])
    return ".".join(places[:3])


def _iterate_lora_uses(layer: Any) -> Iterator[tuple[str, str]]:
    """Yield the name and use of each adapter of a peft layer, in words independent of its rank."""
    if not hasattr(layer, "merged_adapters"):
        return
    # LoRA and its relatives have a factor; others, such as IA3, have none. An alpha of a file is a tensor.
    alphas = getattr(layer, "lora_alpha", getattr(layer, "alpha", {}))
    for name in sorted(layer._get_available_adapters()):
        scale = float(getattr(layer, "scaling", {}).get(name, 1.0))
        if name in alphas:
            rank = layer.r[name]
            # rsLoRA divides alpha by the root of the rank.
            if getattr(layer, "use_rslora", {}).get(name):
                rank = rank**0.5
            scale *= rank / (float(alphas[name]) or 1)
        if layer.disable_adapters:
            state = "disabled"
        elif name in layer.merged_adapters:
            state = "fused"
        elif name in layer.active_adapters:
            state = "on"
        else:
            state = "off"
        yield name, f"scale {round(scale, 6):g}, {state}"


def _name_loras(part: Any) -> str:
    return ", ".join(sorted(getattr(part, "peft_config", ())))


def describe_value(value: Any) -> Any:
    """Return a number unchanged, and anything else in canonical JSON. A value not known to be data becomes its type."""
    # NaN is left out: it would differ from itself.
    if value is None or (isinstance(value, int | float) and value == value):
        return value
    try:
        text = json.dumps(value, default=_describe_object, sort_keys=True, ensure_ascii=False)
    except TypeError:  # keys that JSON has not
        return type(value).__qualname__
    if len(text) <= SHORT:
        return text
    return f"{text[: SHORT // 3]}... #{_hash_text(text)}"


def _describe_object(value: Any) -> Any:
    """Return an object's representation in JSON."""
    match value:
        case enum.Enum():
            return value.value
        case np.generic():
            return value.item()
        case Tensor():
            return _describe_tensor(value)
        case np.ndarray():
            if value.dtype.hasobject:
                return value.tolist()
            return f"{value.dtype} array {list(value.shape)} #{_hash_bytes(np.ascontiguousarray(value).tobytes())}"
        case Image():
            return f"{value.mode} image {list(value.size)} #{_hash_bytes(value.tobytes())}"
        case torch.Generator():
            # Not its state: all ranks continue the generator of rank 0.
            return f"generator on {value.device.type}"
        case torch.device():
            return value.type
        case torch.dtype():
            return str(value)
        case Mapping():
            return dict(value)
        case Set():
            return sorted(value, key=str)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {type(value).__name__: fields}
    return type(value).__qualname__


def _describe_tensor(tensor: Tensor) -> str:
    description = f"{str(tensor.dtype).removeprefix('torch.')} tensor {list(tensor.shape)}"
    # Subclasses and sparse tensors have no plain bytes.
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided or tensor.is_meta:
        return description
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # numpy does not know bfloat16, so the numbers are viewed as bytes.
    return f"{description} #{_hash_bytes(plain.reshape(-1).view(torch.uint8).numpy())}"


def _hash_text(text: str) -> str:
    return _hash_bytes(text.encode())


def _hash_bytes(content: Any) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
