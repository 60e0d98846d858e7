"""Checks of options and arguments. Each raises the caller's error, which names the value and says what would work."""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Iterable
from typing import Any, TypeGuard

from ditile.plan.errors import ModelError

LARGEST = sys.float_info.max
"""Of a number: a whole one above it is no float, and what computes with it fails."""
MOST = {
    "steps": 10_000,
    "num_images": 1024,
    "threads": 1024,
    "ranks": 1024,
    "devices": 1024,
    "hosts": 1024,
    "height": 2**16,
    "width": 2**16,
    "frames": 100_000,
    "rounds": 10_000,
}
"""The largest counts: more than any run needs, and few enough that a slip of the hand does not fill the memory."""


def is_whole_number(value: Any) -> TypeGuard[int]:
    """Whether a value is an int and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether a value is an int or a float and not a bool; NaN and infinity count as numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_whole_number(
    value: Any,
    name: str,
    least: int = 1,
    *,
    most: int | None = None,
    error: type[Exception] = ModelError,
    optional: bool = False,
    hint: str | None = None,
) -> None:
    """Raises `error` unless a value is a whole number of at least `least`, and at most `most`.

    Args:
        value: to check.
        name: of the argument or field.
        least, most: the smallest and the largest number that are allowed; None is no limit.
        error: the class of what is raised.
        optional: whether None is allowed too.
        hint: what the message says after "try"; by default `name` with the smallest number, or 1.
    """
    if optional and value is None:
        return
    if not is_whole_number(value) or value < least:
        hint = hint or f"{name}={max(least, 1)}"
        raise error(f"{name}={value!r} is not a whole number of at least {least}; try {hint}")
    if most is not None and value > most:
        raise error(f"{name}={value} is more than {most}; try {name}={most} or less")


def check_counts(options: Any, *names: str, error: type[Exception] = ModelError) -> None:
    """Raises `error` unless these fields of an object are None or whole numbers of at least 1, and not above `MOST`."""
    for name in names:
        check_whole_number(getattr(options, name), name, most=MOST.get(name), error=error, optional=True)


def check_finite_number(
    value: Any,
    name: str,
    least: float = -math.inf,
    *,
    example: float,
    error: type[Exception] = ModelError,
    optional: bool = False,
) -> None:
    """Raises `error`, with `example`, unless a value is a finite number of at least `least`."""
    if optional and value is None:
        return
    if not is_number(value) or not -LARGEST <= value <= LARGEST or value < least:
        what = "no finite number" if least == -math.inf else f"not a number of at least {least:g}"
        raise error(f"{name}={value!r} is {what}; try {name}={example}")


def check_positive_number(
    value: Any, name: str, what: str, *, example: float, error: type[Exception] = ModelError
) -> None:
    """Raises `error` unless a value is a finite number above 0; the message calls it `what`: "time", "bound"."""
    if not is_number(value) or not 0 < value <= LARGEST:
        raise error(f"{name}={value!r} is no {what}; try {name}={example:g}")


def check_choice(value: Any, name: str, known: Iterable[Any], *, error: type[Exception] = ModelError) -> None:
    """Raises `error` unless a value is one of the known ones: an equal string, or the same None or bool."""
    known = tuple(known)
    if not any(value is word or (isinstance(word, str) and value == word) for word in known):
        raise error(f"{name}={value!r} is not known; {list_choices(known)}")


def list_choices(known: Iterable[Any]) -> str:
    """The known values as the hint of an error: "try one of ..."."""
    return f"try one of {', '.join(map(str, known))}"


def suggest_nearest(name: str, known: Iterable[str], otherwise: str | None = None, *, cutoff: float = 0.6) -> str:
    """The hint of an error about an unknown name: "did you mean ...?", with the nearest known name.

    Args:
        name: what was given.
        known: the known names.
        otherwise: the hint where none is near; by default all of them.
        cutoff: how alike names must be, from 0 to 1; see `difflib.get_close_matches`.
    """
    known = list(known)
    near = find_nearest(name, known, cutoff=cutoff)
    if near is not None:
        return f"did you mean {near}?"
    return list_choices(known) if otherwise is None else otherwise


def find_nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known name that is most like a name; None if none is alike enough."""
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=cutoff)), None)
