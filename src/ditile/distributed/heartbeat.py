"""What a rank reports to its watcher over a pipe: heartbeats, progress and notes.

`failure_detection.py` judges from them which rank hangs.

A heartbeat is one byte every second. It says that the rank lives, and whether it has read from a disk or computed since
the last one: a rank that does either is not stuck. A report of progress is one byte too (`env.report_progress`). A note
is a line of JSON:

    {"enter": 3}                    begins the third call that all ranks must make
    {"leave": 3, "error": [...]}    has left it; with the fields of an error, if it raised
    {"failed": [...], "code": 1}    ends with an error
    {"ended": [...]}                added by its watcher under torchrun: how it ended, or null if it ended well
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ditile.distributed import env
from ditile.plan.errors import StoppedError, join_error_lines, read_message

_PR_SET_PDEATHSIG = 1
HEARTBEAT = b"\0"
READING = b"\1"
"""A heartbeat of a rank that has read from a disk: weights are in mapped files until they are first used."""
COMPUTING = b"\2"
"""A heartbeat of a rank that has computed, itself or by a process that it started, such as a compiler."""
PROGRESS = b"."

PLAIN_ERRORS = ("PlanError", "ModelError", "LoadError", "StateError", "JoinError", "StoppedError")
"""Errors that need no traceback: the watcher raises the same type with the same message."""
BUSY = 0.05
"""A rank computes if it uses at least this share of a core; a waiting rank uses less."""
MEMORY_ERRORS = {"MemoryError", "OutOfMemoryError"}
MEMORY_MESSAGE = re.compile(
    r"DefaultCPUAllocator|not enough memory|[Cc]annot allocate memory|[Cc]an't allocate memory|failed to map segment"
)
LIMIT_MESSAGE = re.compile(
    "Too many open files|No space left on device|quota exceeded|Read-only file system|temporarily unavailable"
    "|can't start new thread"
)
SYSTEM_REFUSED = "the system refused: "
OUT_OF_MEMORY = "out of memory: "
_NOTE = re.compile(rb"\{[^\n]*\n")
# Maximum characters of the traceback and of the message in a note. A write of up to 4096 bytes (PIPE_BUF) is atomic.
_TRACEBACK_SIZE = 2500
_MESSAGE_SIZE = 1000


class RankFailure(NamedTuple):
    """The failure of a rank.

    Attributes:
        at: when, on the monotonic clock that the processes of one machine share.
        cause: the exception type, or how the rank ended.
        message: one line for a person.
        traceback: the rank's own traceback or stack.
        plain: the type of the error if it is in `PLAIN_ERRORS`, otherwise "".
    """

    at: float
    cause: str
    message: str
    traceback: str = ""
    plain: str = ""


def describe_error(error: BaseException) -> RankFailure:
    """Describe an exception of a rank as its failure."""
    error_class = type(error)
    cause = error_class.__qualname__
    if error_class.__module__ != "builtins":
        cause = f"{error_class.__module__}.{cause}"
    text = "".join(traceback.format_exception(error))
    # A user may have derived a class from one of ditile's, so the nearest of ditile's is taken.
    for base in error_class.__mro__:
        if base.__module__ == "ditile.plan.errors":
            if base.__name__ in PLAIN_ERRORS:
                return RankFailure(time.monotonic(), cause, read_message(error), text, base.__name__)
            break
    prefix = choose_system_error_prefix(error)
    message = prefix + "".join(traceback.format_exception_only(error)).strip()
    plain = "StateError" if prefix == SYSTEM_REFUSED else ""
    return RankFailure(time.monotonic(), cause, message, text, plain)


def describe_system_error(error: Exception) -> str:
    """Describe a system error, such as a full disk, in one line; "" for any other error."""
    prefix = choose_system_error_prefix(error)
    if not prefix:
        return ""
    # Libraries put a page of advice on their installation before the reason.
    if isinstance(error, ImportError):
        return prefix + str(error).rstrip().rpartition("\n")[2]
    return prefix + join_error_lines(error)


def choose_system_error_prefix(error: BaseException) -> str:
    """Choose the first words of a line about a system error; "" for any other error."""
    if is_out_of_memory(error):
        return OUT_OF_MEMORY
    if LIMIT_MESSAGE.search(str(error)):
        return SYSTEM_REFUSED
    return ""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that no memory is left. torch's allocator raises a RuntimeError, the system an
    OSError.

    Code that takes an error to mean bad input (a model, a LoRA) must let these pass.
    """
    # Compare names, so that torch need not be imported for its OutOfMemoryError.
    names = {base.__name__ for base in type(error).__mro__}
    if not names.isdisjoint(MEMORY_ERRORS) or MEMORY_MESSAGE.search(str(error)) is not None:
        return True
    # A library in C that gets no memory while it is imported may forget to say why.
    is_limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    return isinstance(error, SystemError) and is_limited


class RankSigns:
    """The signs of life of one rank, as its watcher reads them.

    Attributes:
        started: whether it has reported progress.
        last_sign_of_life: when anything came from it last, on the monotonic clock.
        last_activity: when it last read, computed or reported progress.
        last_progress: when it last read or reported progress.
        call: the number of its current shared call, which all ranks must make; None outside shared calls.
        last_call: the number of the last shared call that it entered.
        raised: number of a shared call -> the error with which it left the call.
        said: its last note about its end ("failed" or "ended").
    """

    def __init__(self) -> None:
        self.started = False
        self.last_sign_of_life = time.monotonic()
        self.last_activity = self.last_sign_of_life
        self.last_progress = self.last_sign_of_life
        self.call: int | None = None
        self.last_call = 0
        self.raised: dict[int, RankFailure] = {}
        self.said: dict[str, Any] = {}
        self._partial = b""

    def read_signs(self, data: bytes) -> int:
        """Read what has come, and count the reports of progress. The first report is not counted: it says that the rank
        has started."""
        now = time.monotonic()
        self.last_sign_of_life = now
        data = self._partial + data
        notes = _NOTE.findall(data)
        # What is left after whole notes: single bytes, and the beginning of a note whose end is yet to come.
        signs, brace, rest = _NOTE.sub(b"", data).partition(b"{")
        self._partial = brace + rest
        for encoded in notes:
            # A note longer than PIPE_BUF can have heartbeat bytes interleaved; strip them.
            note = json.loads(encoded.translate(None, HEARTBEAT + READING + COMPUTING))
            if "enter" in note:
                self.call = note["enter"]
                self.last_call = note["enter"]
            elif "leave" in note:
                self.call = None
                if "error" in note:
                    self.raised[note["leave"]] = RankFailure(now, *note["error"])
            else:
                self.said = note
        if notes or signs.strip(HEARTBEAT):
            self.last_activity = now
        if notes or signs.strip(HEARTBEAT + COMPUTING):
            self.last_progress = now
        reports = signs.count(PROGRESS)
        if reports and not self.started:
            self.started = True
            reports -= 1
        return reports


@dataclass
class CallCount:
    """Counts the calls of this process that all ranks must make.

    Attributes:
        number: how many there were.
        is_inside: whether this process is in one.
        is_local_work: whether the rest of this call is local, so no other rank waits for this one.
    """

    number: int = 0
    is_inside: bool = False
    is_local_work: bool = False


COUNT = CallCount()


@contextmanager
def note_shared_call() -> Iterator[None]:
    """Run what all ranks must do together within this context.

    If one rank leaves the context with an error, even one that the user's code catches, the watcher is told, because
    the other ranks would wait for it. `StoppedError` does not count: all ranks raise it together.
    """
    # A nested call, such as a runner called in a callback, is part of the outer call.
    if env.read_progress_fd() is None or COUNT.is_inside:
        yield
        return
    COUNT.number += 1
    COUNT.is_inside = True
    COUNT.is_local_work = False
    send_note(enter=COUNT.number)
    try:
        yield
    except StoppedError:
        send_note(leave=COUNT.number)
        raise
    except BaseException as error:
        if COUNT.is_local_work:
            send_note(leave=COUNT.number)
        else:
            send_note(leave=COUNT.number, error=list(shorten_failure(describe_error(error))[1:]))
        raise
    else:
        send_note(leave=COUNT.number)
    finally:
        COUNT.is_inside = False


def note_local_work() -> None:
    """Note that the rest of a shared call is local. An error there does not make other ranks wait."""
    COUNT.is_local_work = True


def shorten_failure(failure: RankFailure) -> RankFailure:
    """Shorten the texts of a failure to fit into a note."""
    return failure._replace(message=failure.message[:_MESSAGE_SIZE], traceback=failure.traceback[-_TRACEBACK_SIZE:])


def send_note(**note: Any) -> None:
    """Send a note about this rank. Does nothing if it has no watcher."""
    env.send_to_watcher(json.dumps(note).encode() + b"\n")


def send_heartbeats(pipe: int) -> NoReturn:
    """Send a heartbeat every second, forever."""
    reads = _count_disk_reads()
    cpu_seconds = _measure_cpu_seconds()
    sent_at = time.monotonic()
    while True:
        reads_before = reads
        cpu_seconds_before = cpu_seconds
        sent_before = sent_at
        reads = _count_disk_reads()
        cpu_seconds = _measure_cpu_seconds()
        sent_at = time.monotonic()
        sign = HEARTBEAT
        if reads > reads_before:
            sign = READING
        elif cpu_seconds - cpu_seconds_before > BUSY * (sent_at - sent_before):
            sign = COMPUTING
        os.write(pipe, sign)
        time.sleep(1)


def _count_disk_reads() -> int:
    """Count this process's page faults that waited for a local or network disk, and the blocks it read."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_majflt + used.ru_inblock


def _measure_cpu_seconds() -> float:
    """Measure the CPU seconds of this process and its children, or only of its children if it uses a GPU.

    A thread that waits for a GPU keeps its core busy. Threads that carry messages are not counted.
    """
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = ended.ru_utime + ended.ru_stime
    for child in _list_children("self"):
        seconds += _measure_process_seconds(child)
    # torch may be in the middle of its import, when its module has no such function yet.
    is_initialized = getattr(sys.modules.get("torch.cuda"), "is_initialized", None)
    if is_initialized is None or not is_initialized():
        seconds += time.process_time()
        for thread in Path("/proc/self/task").glob("*"):
            # gloo's reading thread spins while a message has no posted receive.
            if "gloo" in "".join(_read_words(thread / "comm")):
                seconds -= _read_used_seconds(thread)
    return seconds


def _list_children(process: str) -> list[str]:
    """List the child processes of a process, if the system shows them."""
    children = []
    for file in Path("/proc", process, "task").glob("*/children"):
        children += _read_words(file)
    return children


def _measure_process_seconds(pid: str) -> float:
    seconds = _read_used_seconds(Path("/proc", pid))
    for child in _list_children(pid):
        seconds += _measure_process_seconds(child)
    return seconds


def _read_used_seconds(folder: Path) -> float:
    """Return the CPU seconds of a process or a thread, by its folder in /proc. 0 if it has ended."""
    words = read_stat(folder)
    if not words:
        return 0.0
    # In proc(5) the first word is field 3, and these are fields 14 and 15.
    user_ticks = int(words[11])
    system_ticks = int(words[12])
    return (user_ticks + system_ticks) / os.sysconf("SC_CLK_TCK")


def read_stat(folder: Path) -> list[str]:
    """Read the fields of a process or a thread from its state on, by its folder in /proc. Empty if it has ended."""
    try:
        # The name before the state may have spaces.
        return (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _read_words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:  # it has ended
        return []


def die_with_parent() -> None:
    """Let Linux kill this process when its parent dies, even while one of its threads holds the GIL."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
