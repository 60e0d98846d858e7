"""What makes two calls equal, at one of several depths.

shape     calls on tensors of equal shapes, in equal modes: they may share what is remembered
memory    calls whose tensors also have equal layouts, and whose numbers are equal: one tape plays them
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Literal

from torch import Tensor


def fingerprint(value: Any, depth: Literal["shape", "memory"]) -> Hashable:
    """Return a value that is equal for arguments that are equal at a depth."""
    if isinstance(value, Tensor):
        if depth == "shape":
            return value.shape
        return value.shape, value.dtype, value.stride(), value.device
    if isinstance(value, list | tuple):
        return tuple([fingerprint(item, depth) for item in value])
    if isinstance(value, dict):
        return tuple([(name, fingerprint(item, depth)) for name, item in value.items()])
    # Words name modes of a model; numbers such as the time change from step to step.
    if isinstance(value, str) or depth == "memory":
        return type(value), value
    return type(value).__qualname__
