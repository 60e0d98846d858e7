"""Numbers as a person reads them."""

from __future__ import annotations


def format_bytes(count: float) -> str:
    """A number of bytes for a person."""
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("KB", "MB"):
        count /= 1000
        if count < 1000:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:.2f} GB"


def format_number(value: float, digits: int = 3) -> str:
    """A number for a person, without an exponent below a million."""
    return f"{float(f'{value:.{digits}g}'):g}"
