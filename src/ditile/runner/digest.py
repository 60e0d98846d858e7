"""What a call and the state of a pipeline bring, as short JSON that ranks compare: equal JSON means an equal picture.

Numbers and short texts stand for themselves, so that an error can quote them. Tensors and pictures become a checksum of
all their bits, which does not depend on the device: one pass where they are, and one number that leaves it.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import math
from collections.abc import Iterator, Mapping, Set
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor, nn

from ditile.model.hooks.compile import unwrap_compiled

SHORT = 300
"""Characters of a description that is sent as it is; of a longer one the beginning, and a checksum."""
_CHUNK = 2**22
_STRIDE = 0x9E3779B97F4A7C15 - 2**64
_MIXES = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
"""The constants of splitmix64, as signed numbers."""


def describe_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Each argument, without those that are None, and without callbacks, which one rank alone may have."""
    return {
        name: describe_value(value)
        for name, value in call.items()
        if value is not None and not name.startswith("callback")
    }


def describe_state(pipe: Any, device: torch.device) -> dict[str, Any]:
    """What a picture depends on beside the arguments: the scheduler, configs, dtypes, autocast, the kind of device."""
    autocast = torch.is_autocast_enabled(device.type)
    state: dict[str, Any] = {
        "device": device.type,
        "autocast": str(torch.get_autocast_dtype(device.type)) if autocast else "off",
    }
    for name, part in pipe.components.items():
        part = unwrap_compiled(part) if isinstance(part, nn.Module) else part
        if names := _name_loras(part):
            state[f"LoRAs of {name}"] = names
        config = getattr(part, "config", None)
        if not isinstance(config, Mapping) or not hasattr(part, "config_name"):  # tokenizers, models of transformers
            continue
        state[name] = type(part).__name__
        plain = {key: describe_value(value) for key, value in config.items() if not key.startswith("_")}
        # The scheduler's item by item: it is what users change, and an error should name the item.
        if not isinstance(part, nn.Module):
            state |= {f"{name}.{key}": value for key, value in plain.items()}
            if hasattr(part, "shift"):  # which `set_shift` changes beside the config
                state[f"{name}.shift"] = describe_value(part.shift)
        else:
            state |= {f"{name}.config": describe_value(plain), f"{name}.dtype": str(getattr(part, "dtype", ""))}
            state[f"{name}.use_tiling"] = bool(getattr(part, "use_tiling", False))
    return state


def describe_loras(components: Mapping[str, Any]) -> dict[str, str]:
    """How LoRAs are used on this rank: in each block, and in each list and model that use one alike throughout.

    Ranks have some blocks in common, and others not; keys that only one of two ranks has say nothing.
    """
    models = {name: unwrap_compiled(part) for name, part in components.items() if isinstance(part, nn.Module)}
    parts = {name: model for name, model in models.items() if hasattr(model, "peft_config")}
    described = {f"LoRAs of {name}": _name_loras(part) for name, part in parts.items()}
    blocks: dict[str, list[str]] = {}
    lists: dict[str, set[str]] = {}
    for name, part in parts.items():
        for path, layer in part.named_modules():
            for lora, use in _describe_uses(layer) if hasattr(layer, "merged_adapters") else ():
                whole_path = f"{name}.{path}".split(".")
                blocks.setdefault(".".join(whole_path[:3]), []).append(f"{path} {lora} {use}")
                for depth in (1, 2):
                    lists.setdefault(f"LoRA {lora} in {'.'.join(whole_path[:depth])}", set()).add(use)
    described |= {what: uses.pop() for what, uses in lists.items() if len(uses) == 1}
    return described | {f"LoRA layers in {block}": _hash_text(str(layers)) for block, layers in blocks.items()}


def _describe_uses(layer: Any) -> Iterator[tuple[str, str]]:
    """(name, how it is used) of each LoRA of a layer of peft's, in words that do not depend on the rank of the LoRA."""
    for name, scaling in layer.scaling.items():
        rank = layer.r[name] ** 0.5 if getattr(layer, "use_rslora", {}).get(name) else layer.r[name]
        scale = round(scaling * rank / (layer.lora_alpha[name] or 1), 6)
        state = "fused" if name in layer.merged_adapters else "on" if name in layer.active_adapters else "off"
        yield name, f"scale {scale:g}, {'disabled' if layer.disable_adapters else state}"


def _name_loras(part: Any) -> str:
    return ", ".join(sorted(getattr(part, "peft_config", ())))


def describe_value(value: Any) -> Any:
    """A value as a number, a text or None, as errors show it. What is not known to be data is described by its type."""
    match value:
        case None | bool() | int():
            return value
        case str():
            return _shorten_text(repr(value))
        case float():
            return str(value) if math.isnan(value) else value
        case np.generic() | enum.Enum():
            return describe_value(value.item() if isinstance(value, np.generic) else value.value)
        case Tensor():
            return _describe_tensor(value)
        case np.ndarray():
            if value.dtype.hasobject:
                return describe_value(value.tolist())
            # numpy has types that torch has not; their bytes are all that is needed.
            octets = torch.from_numpy(np.ascontiguousarray(value).reshape(-1).view(np.uint8).copy())
            return f"{value.dtype} array {list(value.shape)} #{sum_bits(octets):016x}"
        case Image():
            octets = torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8)
            return f"{value.mode} picture {list(value.size)} #{sum_bits(octets):016x}"
        case torch.Generator():
            # Not its state: all ranks draw what rank 0 would.
            return f"generator on {value.device.type}"
        case torch.device():
            return value.type
        case torch.dtype():
            return str(value)
        case Mapping():
            return _shorten_text("{" + ", ".join(_describe_items(value)) + "}")
        case list() | tuple():
            return _shorten_text("[" + ", ".join(str(describe_value(part)) for part in value) + "]")
        case Set():
            return _shorten_text("{" + ", ".join(sorted(str(describe_value(part)) for part in value)) + "}")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return _shorten_text(f"{type(value).__name__}({', '.join(_describe_items(items))})")
    return type(value).__qualname__


def _describe_items(items: Mapping[Any, Any]) -> Iterator[str]:
    return (f"{key}={describe_value(items[key])}" for key in sorted(items, key=str))


def _describe_tensor(tensor: Tensor) -> str:
    kind = f"{str(tensor.dtype).removeprefix('torch.')} tensor {list(tensor.shape)}"
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided or tensor.is_meta:
        return kind
    octets = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return f"{kind} #{sum_bits(octets):016x}"


def sum_bits(octets: Tensor) -> int:
    """A checksum of bytes `[n]`, computed where they are: words mixed with their places, added up modulo 2**64.

    The mixing is splitmix64's, which is one to one: a word that differs always changes the sum, and several do but for
    a chance of 2**-64.
    """
    total = torch.zeros((), dtype=torch.int64, device=octets.device)
    for index, chunk in enumerate(octets.split(_CHUNK)):
        padded = chunk.new_zeros(-(-chunk.numel() // 8) * 8)
        padded[: chunk.numel()] = chunk
        words = padded.view(torch.int64)
        places = torch.arange(1, len(words) + 1, device=octets.device) + index * _CHUNK
        words = words + places * _STRIDE
        for shift, factor in _MIXES:
            words = (words ^ _shift_right(words, shift)) * factor
        total += (words ^ _shift_right(words, 31)).sum()
    return int(total) % 2**64


def _shift_right(words: Tensor, bits: int) -> Tensor:
    """Without the sign, which torch's shift repeats."""
    return torch.bitwise_and(words >> bits, 2 ** (64 - bits) - 1)


def _shorten_text(text: str) -> str:
    return text if len(text) <= SHORT else f"{text[: SHORT // 3]}... #{_hash_text(text)}"


def _hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
