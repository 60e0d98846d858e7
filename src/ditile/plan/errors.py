"""Every error that ditile raises on purpose.

    DitileError
     ├── PlanError    a plan that cannot run: degrees, patches, warmup (also a ValueError)
     ├── ModelError   a pipeline, model or call option that is not known or not supported (also a ValueError)
     ├── LoadError    weights or configs that are missing or corrupt
     ├── StateError   something was called out of order, or edited without ditile's knowledge
     │    └── JoinError   ranks that cannot connect to each other
     ├── StoppedError a call that `Runner.stop` ended: nothing failed
     └── RankError    a rank raised, died, hung or made no progress; carries that rank's own traceback

A message says what is wrong, the value, and what would work; `suggest_nearest` proposes a known name for an unknown
one. The command line prints a `RankError` with its traceback and exits with 1; it prints any other of these errors as
one line and exits with 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MAX_QUOTED = 200
"""The most letters that a message quotes from a value."""


class DitileError(Exception):
    """The root: `except DitileError` catches every error that ditile raises on purpose."""


class PlanError(DitileError, ValueError):
    """A plan that cannot run at all, or not on this model, size or world."""


class ModelError(DitileError, ValueError):
    """A pipeline, model or call option that is not known, or that the support level of the model does not offer."""


class ProbeError(ModelError):
    """A pipeline could not be called to examine its model; the arguments of a call that works would help."""


class LoadError(DitileError):
    """Weights or configs that are missing, unreadable or corrupt."""


class StateError(DitileError):
    """Something was called out of order, or edited without ditile's knowledge."""


class JoinError(StateError):
    """Ranks that cannot connect to each other."""


class StoppedError(DitileError):
    """A call that `Runner.stop` ended, on every rank. Nothing failed, and the next call works."""


class RankError(DitileError):
    """One rank of a run failed, and the run was ended.

    Attributes:
        rank: the first rank that failed.
        cause: the exception type that it raised, as `module.Name`, or how it ended ("killed by SIGKILL").
        message: what went wrong, without the rank.
        traceback: the rank's own traceback or stack, as text; empty if it left none.
    """

    def __init__(self, rank: int, cause: str, message: str, traceback: str = "") -> None:
        super().__init__(f"rank {rank}: {message}")
        self.rank = rank
        self.cause = cause
        self.message = message
        self.traceback = traceback

    def __reduce__(self) -> tuple[type[RankError], tuple[int, str, str, str]]:
        return type(self), (self.rank, self.cause, self.message, self.traceback)


def add_note(error: BaseException, note: str) -> None:
    """Add a line to an error, like `BaseException.add_note`, which Python 3.10 lacks."""
    error.__notes__ = [*getattr(error, "__notes__", []), note]  # type: ignore[attr-defined]


def read_message(error: BaseException) -> str:
    """Return an error's message with its notes."""
    return "; ".join([str(error), *getattr(error, "__notes__", [])])


def join_error_lines(error: BaseException, limit: int | None = None) -> str:
    """Return an error's message on one line of at most `limit` letters; the name of its class, if it has no message."""
    return (_join_lines(read_message(error)) or type(error).__name__)[:limit]


def describe_class_and_text(error: BaseException) -> str:
    """Describe an error that is not ditile's on one line, by its class and at most 200 letters of its message."""
    return f"{type(error).__name__}: {_join_lines(str(error))[:200]}"


def _join_lines(text: str) -> str:
    return escape_controls(" ".join(text.split()))


def escape_controls(text: str) -> str:
    """Escape the letters of a text that a terminal would not print, such as moves of the cursor; keep line ends."""
    if all(line.isprintable() for line in text.split("\n")):
        return text
    return "".join(letter if letter.isprintable() or letter == "\n" else ascii(letter)[1:-1] for letter in text)


def quote_value(value: object) -> str:
    """Return a value as messages show it, on one line of at most `MAX_QUOTED` letters."""
    try:
        text = _join_lines(repr(value))
    except ValueError:  # Python writes no whole number of thousands of digits
        return "a number of thousands of digits"
    if len(text) > MAX_QUOTED:
        text = f"{text[: MAX_QUOTED // 2]} .. {text[4 - MAX_QUOTED // 2 :]}"
    return text


def suggest_nearest(name: str, known: Iterable[str], otherwise: str | None = None, *, cutoff: float = 0.6) -> str:
    """Return the hint in a message about an unknown name: "did you mean ...?", with the most similar known name.

    Args:
        otherwise: the hint if no known name is like it; by default the list of all known names.
        cutoff: how similar two names must be, from 0 to 1; see `difflib.get_close_matches`.
    """
    known = list(known)
    nearest = find_nearest(name, known, cutoff=cutoff)
    if nearest is not None:
        return f"did you mean {nearest}?"
    if otherwise is not None:
        return otherwise
    return f"try one of {', '.join(known)}"


def find_nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known name that is most like `name`. None if no name is similar enough."""
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=cutoff)), None)
