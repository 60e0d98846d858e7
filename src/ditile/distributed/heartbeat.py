"""What a rank says of itself over a pipe, and what its watcher concludes: heartbeats, reports of progress, and notes.

A heartbeat is one byte every second. It says that the rank lives, and whether it has read from a disk or computed since
the last one: who does either is not stuck. A report of progress is one byte too (`env.report_progress`). A note is a
line of JSON:

    {"enter": 3}                    begins the third call that all ranks must make
    {"leave": 3, "error": [...]}    has left it; with the fields of an error, if it raised
    {"failed": [...], "code": 1}    ends with an error
    {"bye": true}                   ends well
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ditile.distributed import env
from ditile.plan.errors import StoppedError

_PR_SET_PDEATHSIG = 1
HEARTBEAT = b"\0"
READING = b"\1"
"""A heartbeat of a rank that has read from a disk: weights are in mapped files until they are first used."""
COMPUTING = b"\2"
"""A heartbeat of a rank that has computed, itself or by a process that it started, such as a compiler."""
PROGRESS = b"."

PLAIN_ERRORS = ("PlanError", "ModelError", "LoadError", "StateError", "JoinError", "StoppedError")
"""What a rank may raise that needs no traceback: who watches raises the very type with the same message."""
BUSY = 0.05
"""The share of a core that a rank uses at least while it computes. One that waits uses less."""
MEMORY_ERRORS = {"MemoryError", "OutOfMemoryError"}
MEMORY_MESSAGE = re.compile(r"DefaultCPUAllocator|not enough memory|[Cc]annot allocate memory|[Cc]an't allocate memory")
_NOTE = re.compile(rb"\{[^\n]*\n")
_TRACEBACK_SIZE, _MESSAGE_SIZE = 2500, 1000
"""The letters of a note that are kept. A write of up to 4096 bytes is not mixed with that of another thread."""


class RankFailure(NamedTuple):
    """How a rank failed.

    Attributes:
        at: when, on the monotonic clock that the processes of one machine share.
        cause: the exception type, or how the rank ended.
        message: one line for a person.
        traceback: the rank's own traceback or stack.
        plain: the name in `PLAIN_ERRORS` of what it raised, or "".
    """

    at: float
    cause: str
    message: str
    traceback: str = ""
    plain: str = ""


def describe_error(error: BaseException) -> RankFailure:
    """An exception of a rank as its failure."""
    exception_trace = traceback.TracebackException.from_exception(error)
    kind = type(error)
    cause = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    text = "".join(exception_trace.format())
    plain = next((base.__name__ for base in kind.__mro__ if base.__module__ == "ditile.plan.errors"), "")
    if plain in PLAIN_ERRORS:
        return RankFailure(time.monotonic(), cause, str(error), text, plain)
    message = "".join(exception_trace.format_exception_only()).strip()
    if is_out_of_memory(error):
        message = f"out of memory: {message}"
    return RankFailure(time.monotonic(), cause, message, text)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that no memory is left. torch's allocator raises a RuntimeError, the system an OSError.

    What takes an error for one of its input (a model, a LoRA) must let these pass.
    """
    names = {kind.__name__ for kind in type(error).__mro__}
    return not names.isdisjoint(MEMORY_ERRORS) or MEMORY_MESSAGE.search(str(error)) is not None


class RankSigns:
    """The signs of life of one rank, as its watcher reads them.

    Attributes:
        started: whether it has reported progress.
        last_sign_of_life: when anything came from it last, on the monotonic clock.
        last_activity: when it last read, computed or reported progress.
        last_progress: when it last read or reported progress.
        call: the number of the call that it is in, of those that all ranks must make; None outside of them.
        last_call: the number of the last such call that it has entered.
        raised: the errors by which it left such calls, by the number of the call.
        said: the last note that says how it ends.
    """

    def __init__(self) -> None:
        self.started = False
        self.last_sign_of_life = self.last_activity = self.last_progress = time.monotonic()
        self.call: int | None = None
        self.last_call = 0
        self.raised: dict[int, RankFailure] = {}
        self.said: dict[str, Any] = {}
        self._partial = b""

    def read_signs(self, data: bytes) -> int:
        """Reads what has come; returns the number of reports of progress, without the first: that it has started."""
        now = self.last_sign_of_life = time.monotonic()
        data = self._partial + data
        notes, signs = _NOTE.findall(data), _NOTE.sub(b"", data)
        signs, brace, rest = signs.partition(b"{")
        self._partial = brace + rest
        for note in notes:
            # A note that is longer than the system writes at once may have heartbeats within.
            self._read_note(json.loads(note.translate(None, HEARTBEAT + READING + COMPUTING)), now)
        if notes or signs.strip(HEARTBEAT):
            self.last_activity = now
        if notes or signs.strip(HEARTBEAT + COMPUTING):
            self.last_progress = now
        reports = signs.count(PROGRESS)
        if not reports:
            return 0
        first, self.started = not self.started, True
        return reports - first

    def _read_note(self, note: dict[str, Any], now: float) -> None:
        if "enter" in note:
            self.call = self.last_call = note["enter"]
        elif "leave" in note:
            self.call = None
            if "error" in note:
                self.raised[note["leave"]] = RankFailure(now, *note["error"])
        else:
            self.said = note


class CallCount:
    """Counts the calls that all ranks must make, of this process.

    Attributes:
        number: how many there were.
        is_inside: whether this process is in one.
        is_alone: whether no other rank waits for this one any more in the call.
    """

    def __init__(self) -> None:
        self.number, self.is_inside, self.is_alone = 0, False, False


COUNT = CallCount()


@contextmanager
def note_shared_call() -> Iterator[None]:
    """A context around what all ranks must do together.

    If one rank leaves it by an error, even by one that the user's code catches, the others are told, as they would wait
    for it. `StoppedError` is none: all ranks raise it together.
    """
    if env.read_progress_fd() is None or COUNT.is_inside:
        yield
        return
    COUNT.number, COUNT.is_inside, COUNT.is_alone = COUNT.number + 1, True, False
    send_note(enter=COUNT.number)
    try:
        yield
    except StoppedError:
        send_note(leave=COUNT.number)
        raise
    except BaseException as error:
        failure = list(shorten_failure(describe_error(error))[1:])
        send_note(leave=COUNT.number, **({} if COUNT.is_alone else {"error": failure}))
        raise
    else:
        send_note(leave=COUNT.number)
    finally:
        COUNT.is_inside = False


def note_work_alone() -> None:
    """Notes that in the rest of a shared call each rank works for itself: an error there concerns no other."""
    COUNT.is_alone = True


def shorten_failure(failure: RankFailure) -> RankFailure:
    """The failure with as much of its texts as a note may have."""
    return failure._replace(message=failure.message[:_MESSAGE_SIZE], traceback=failure.traceback[-_TRACEBACK_SIZE:])


def send_note(**note: Any) -> None:
    """Sends a note about this rank; does nothing where nobody watches it."""
    env.send_to_watcher(json.dumps(note).encode() + b"\n")


def send_heartbeats(pulse: int) -> NoReturn:
    """Sends a heartbeat every second, for ever."""
    read, used, since = _count_disk_reads(), _measure_cpu_seconds(), time.monotonic()
    while True:
        before, read = read, _count_disk_reads()
        used_before, used = used, _measure_cpu_seconds()
        seconds, since = time.monotonic() - since, time.monotonic()
        computes = used - used_before > BUSY * seconds
        os.write(pulse, READING if read > before else COMPUTING if computes else HEARTBEAT)
        time.sleep(1)


def _count_disk_reads() -> int:
    """Page faults of this process that waited for a disk (or a network's), and blocks that it has read."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_majflt + used.ru_inblock


def _measure_cpu_seconds() -> float:
    """Seconds of processors that this process used, and those that it started; with a GPU, those alone.

    A thread that waits for a GPU uses its core while it waits. Threads that carry messages do not compute.
    """
    # torch may be in the middle of its import.
    is_initialized = getattr(sys.modules.get("torch.cuda"), "is_initialized", None)
    own = 0.0
    if is_initialized is None or not is_initialized():
        own = time.process_time() - _measure_messenger_seconds()
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return own + ended.ru_utime + ended.ru_stime + sum(_measure_process_seconds(pid) for pid in _list_children("self"))


def _measure_messenger_seconds() -> float:
    """Seconds of processors that the threads of gloo used, where the system tells.

    The one that reads from connections spins for as long as there is a message that nobody receives.
    """
    folders = Path("/proc/self/task").glob("*")
    return sum(_read_used_seconds(folder) for folder in folders if "gloo" in "".join(_read_words(folder / "comm")))


def _list_children(process: str) -> list[str]:
    """The processes that a process has started, where the system tells."""
    return [pid for file in Path("/proc", process, "task").glob("*/children") for pid in _read_words(file)]


def _measure_process_seconds(pid: str) -> float:
    own = _read_used_seconds(Path("/proc", pid))
    return own + sum(_measure_process_seconds(child) for child in _list_children(pid))


def _read_used_seconds(folder: Path) -> float:
    """Seconds of processors that a process or a thread used, by its folder in /proc; 0 if it has ended."""
    words = _read_words(folder / "stat")[-50:]
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK") if len(words) == 50 else 0.0


def _read_words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:  # it has ended
        return []


def die_with_parent() -> None:
    """Lets Linux kill this process when its parent dies, even while this process holds its interpreter's lock."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
