"""Says which values count as numbers, and writes numbers for people."""

from __future__ import annotations

from typing import Any, TypeGuard


def is_whole_number(value: Any) -> TypeGuard[int]:
    """Return whether a value is an int and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> TypeGuard[int | float]:
    """Return whether a value is an int or a float and not a bool. NaN and infinity count as numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def format_bytes(count: float) -> str:
    """Format a number of bytes for a person."""
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("KB", "MB"):
        count /= 1000
        if count < 1000:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:.2f} GB"


def format_number(value: float, digits: int = 3) -> str:
    """Format a number for a person, without an exponent below a million."""
    return f"{float(f'{value:.{digits}g}'):g}"
