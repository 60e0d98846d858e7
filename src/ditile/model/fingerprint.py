"""What makes two values equal, at one of three depths.

shape     calls on tensors of equal shapes, in equal modes: they may share what is remembered
memory    calls whose tensors also have equal layouts, and whose numbers are equal: one tape plays them
numbers   all numbers are equal, on whichever device and rank; as short JSON, so that ranks can send it and errors quote
          it
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from collections.abc import Hashable, Mapping, Set
from typing import Any, Literal

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor, nn

SHORT = 300
"""The most characters of JSON that are kept; a longer text is replaced by its beginning and a checksum."""


def fingerprint(value: Any, depth: Literal["shape", "memory", "numbers"]) -> Hashable:
    """Return a value that two arguments share if they are equal at the given depth."""
    if depth == "numbers":
        # NaN goes on to JSON: as a value it would differ from itself.
        if value is None or (isinstance(value, int | float) and value == value):
            return value
        try:
            text = json.dumps(value, default=_describe_object, sort_keys=True, ensure_ascii=False)
        except TypeError:  # a key that JSON cannot hold
            return type(value).__qualname__
        if len(text) <= SHORT:
            return text
        return f"{text[: SHORT // 3]}... #{hash_bytes(text.encode())}"
    if isinstance(value, Tensor):
        if depth == "shape":
            return value.shape
        return value.shape, value.dtype, value.stride(), value.device
    if isinstance(value, list | tuple):
        parts: list[Hashable] = []
        for item in value:
            # This is inline to save a Python call for every argument of every call.
            if depth == "shape" and isinstance(item, Tensor):
                parts.append(item.shape)
            else:
                parts.append(fingerprint(item, depth))
        return tuple(parts)
    if isinstance(value, dict):
        return (*value,), fingerprint([*value.values()], depth)
    # Words name modes of a model; numbers such as the time change from step to step.
    if isinstance(value, str) or depth == "memory":
        return type(value), value
    return type(value).__qualname__


def _describe_object(value: Any) -> Any:
    """Return an object's representation in JSON."""
    match value:
        case enum.Enum():
            return value.value
        case np.generic():
            return value.item()
        case Tensor():
            description = f"{str(value.dtype).removeprefix('torch.')} tensor {list(value.shape)}"
            # Subclasses and sparse tensors have no plain bytes.
            if type(value) not in (Tensor, nn.Parameter) or value.layout != torch.strided or value.is_meta:
                return description
            plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
            # numpy does not know bfloat16, so the numbers are viewed as bytes.
            return f"{description} #{hash_bytes(plain.reshape(-1).view(torch.uint8).numpy())}"
        case np.ndarray():
            if value.dtype.hasobject:
                return value.tolist()
            return f"{value.dtype} array {list(value.shape)} #{hash_bytes(np.ascontiguousarray(value).tobytes())}"
        case Image():
            return f"{value.mode} image {list(value.size)} #{hash_bytes(value.tobytes())}"
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


def hash_bytes(content: Any) -> str:
    """Return the first letters of a checksum."""
    return hashlib.sha256(content).hexdigest()[:16]
