"""Counts this machine's cores and memory, and warns of threads that take cores while they wait."""

from __future__ import annotations

import functools
import logging
import os
import time

from ditile.distributed import env

LOG = logging.getLogger("ditile")
SPARE_CORES = 0.5
"""The number of cores that other programs may use before spinning threads hold them up."""


def count_memory_bytes() -> int:
    """Count the bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def count_usable_cores() -> int:
    """Count the cores that this process may use."""
    return len(list_usable_cores())


def list_usable_cores() -> list[int]:
    """List the numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    # macOS does not say which cores a process may use.
    return list(range(os.cpu_count() or 1))


def warn_of_spinning_threads() -> None:
    """Warn once if this process's OpenMP threads would spin on cores that other programs need.

    A warning is all it can do: OpenMP reads its variables when torch is imported.
    """
    import torch

    threads = torch.get_num_threads()
    if threads == 1 or not env.has_no_wait_policy():
        return
    # The load includes this process; `own` is the most that it can have added to the last minute's.
    own = min(time.process_time() / 60, threads)
    others = max(0.0, os.getloadavg()[0] - own)
    if (env.read_local_world() or 1) * threads + others > count_usable_cores() + SPARE_CORES:
        _warn_once(
            "the cores of this machine are busy, and threads that wait for each other spin on them, which can make a "
            "step many times as long: set OMP_WAIT_POLICY=passive before Python starts (docs/environment.md)"
        )


@functools.cache
def _warn_once(text: str) -> None:
    LOG.warning(text)
