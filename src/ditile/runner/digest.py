"""A call and the state of a pipeline as short JSON that ranks compare: equal JSON means an equal image.

Each value is given as a fingerprint of its numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ditile.model.fingerprint import fingerprint, hash_bytes
from ditile.model.hooks.compile import unwrap_compiled
from ditile.plan.option_classes import CallArguments, JsonObject

ITEMS_OF_A_RANK = ("target_modules", "base_model_name_or_path", "revision", "inference_mode")
"""The items of an adapter's config that may differ between ranks."""


def describe_call(call: CallArguments) -> JsonObject:
    """Describe each argument that is not None. Callbacks are left out, since only one rank may have them."""
    described = {}
    for name, value in call.items():
        if value is not None and not name.startswith("callback"):
            described[name] = fingerprint(value, "numbers")
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
            state[f"{name}.config"] = fingerprint(config, "numbers")
            state[f"{name}.dtype"] = str(getattr(part, "dtype", ""))
            state[f"{name}.use_tiling"] = bool(getattr(part, "use_tiling", False))
            continue
        # The scheduler's config is compared item by item: users change it, and an error should name the item.
        for key, value in config.items():
            state[f"{name}.{key}"] = fingerprint(value, "numbers")
        # `set_shift` changes this and not the config.
        if hasattr(part, "shift"):
            state[f"{name}.shift"] = fingerprint(part.shift, "numbers")
    return state


def describe_loras(components: Mapping[str, Any]) -> dict[str, str]:
    """Describe how this rank uses LoRAs: in each block, and in each list or model whose layers all use a LoRA alike.

    Two ranks may have only some blocks in common, so only keys that both have can be compared.
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
            # The config is compared without its origin and the names of a rank's layers.
            values = config.to_dict()
            for item in ITEMS_OF_A_RANK:
                values.pop(item, None)
            described[f"config of LoRA {lora} in {name}"] = str(fingerprint(values, "numbers"))
        for path, layer in model.named_modules():
            segments = f"{name}.{path}".split(".")
            for lora, use in _iterate_lora_uses(layer):
                layers_of_blocks.setdefault(_name_block(segments), []).append(f"{path} {lora} {use}")
                uses.setdefault(f"LoRA {lora} in {name}", set()).add(use)
                uses.setdefault(f"LoRA {lora} in {'.'.join(segments[:2])}", set()).add(use)
    for place, uses_in_place in uses.items():
        if len(uses_in_place) == 1:
            described[place] = uses_in_place.pop()
    for block, layers in layers_of_blocks.items():
        described[f"LoRA layers in {block}"] = hash_bytes(str(layers).encode())
    return described


def _name_block(segments: Sequence[str]) -> str:
    """Return the model, list and block in a path such as transformer.blocks.3.attn.to_q."""
    # The layers of text encoders are in lists further down.
    for index, segment in enumerate(segments):
        if segment.isdecimal():
            return ".".join(segments[: index + 1])
    return ".".join(segments[:3])


def _iterate_lora_uses(layer: Any) -> Iterator[tuple[str, str]]:
    """Yield the name and use of each adapter of a peft layer, in words that do not depend on the factors' rank."""
    if not hasattr(layer, "merged_adapters"):
        return
    # LoRA and its relatives have an alpha; others, such as IA3, have none. An alpha from a file is a tensor.
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
