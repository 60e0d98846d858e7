"""What a value is, and which known name is most like an unknown one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, TypeGuard


def is_whole_number(value: Any) -> TypeGuard[int]:
    """Whether a value is an int and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether a value is an int or a float and not a bool; NaN and infinity count as numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def suggest_nearest(name: str, known: Iterable[str], otherwise: str | None = None, *, cutoff: float = 0.6) -> str:
    """The hint of an error about an unknown name: "did you mean ...?", with the nearest known name.

    Args:
        name: the unknown one.
        known: the known names.
        otherwise: the hint where none is near; by default all of them.
        cutoff: how alike names must be, from 0 to 1; see `difflib.get_close_matches`.
    """
    known = list(known)
    nearest = find_nearest(name, known, cutoff=cutoff)
    if nearest is not None:
        return f"did you mean {nearest}?"
    if otherwise is not None:
        return otherwise
    return f"try one of {', '.join(known)}"


def find_nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known name that is most like a name; None if none is alike enough."""
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=cutoff)), None)
