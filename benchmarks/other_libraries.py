"""Seconds of other libraries beside ditile's, on the pipeline of `ditile bench --suite gpu`, where they are installed.

    python -m benchmarks.other_libraries --size 1024 --ranks 8 --out others.jsonl      # diffusers and xDiT, Ulysses

What a library raises ends its line, and the others are measured. The suite itself times cache-dit's cache.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ditile.distributed.launch import launch
from ditile.measure.bench.gpu.items import SuiteTask
from ditile.measure.bench.gpu.rank_session import SuiteSession, open_suite_file
from ditile.measure.bench.gpu.suite import fill_workload
from ditile.measure.bench.options import Workload
from ditile.measure.rows import Row
from ditile.plan.errors import DitileError
from ditile.plan.extras import is_installed


@contextmanager
def use_diffusers_parallelism(pipe: Any, ranks: int) -> Iterator[Callable[..., Any]]:
    """diffusers' context parallelism, with Ulysses."""
    from diffusers import ContextParallelConfig

    pipe.transformer.enable_parallelism(config=ContextParallelConfig(ulysses_degree=ranks))
    yield pipe


@contextmanager
def use_xdit(pipe: Any, ranks: int) -> Iterator[Callable[..., Any]]:
    """xDiT's wrapper around the pipeline, with Ulysses."""
    xfuser: Any = import_module("xfuser")
    engine, call = xfuser.xFuserArgs(model="", ulysses_degree=ranks).create_config()
    yield xfuser.xDiTParallel(pipe, engine, call)


class Library(NamedTuple):
    """Another library: its package, and the function that applies it to a pipeline."""

    package: str
    use: Callable[[Any, int], AbstractContextManager[Callable[..., Any]]]


LIBRARIES = {
    "diffusers, ulysses": Library("diffusers", use_diffusers_parallelism),
    "xDiT, ulysses": Library("xfuser", use_xdit),
}


def measure_library(task: SuiteTask, name: str, size: int) -> None:
    """Measures a library on these ranks; rank 0 writes its line."""
    session = SuiteSession(task)
    library = LIBRARIES[name]
    # The plain pipeline is timed first: a library may change the pipeline for good.
    session.time_plain(size)
    with library.use(session.pipe, session.world) as target:
        row = session.compare_with_plain(target, size)
    if session.rank == 0:
        about = {"part": "others", "what": name, "size": size, "ranks": session.world}
        open_suite_file(task.out).append([about | row])


def explain_skip(name: str, ranks: int, *, gpu: bool) -> str | None:
    """Why a library is not measured here; None if it is."""
    package = LIBRARIES[name].package
    if not is_installed(package):
        return f"{package} is not installed"
    if ranks == 1:
        return "it needs several ranks"
    if not gpu:
        return "it divides images over GPUs only"
    return None


def measure_libraries(work: Workload, size: int, ranks: int, out: Path, *, small: bool = False) -> list[Row]:
    """The lines of all libraries, which are added to a file."""
    gpus = 0
    if not (work.device or "cuda").startswith("cpu"):
        gpus = torch.cuda.device_count()
    work = fill_workload(work, gpus, ranks, small=small)
    task = SuiteTask(items=(), work=work, out=str(out), ends_at=0.0, small=small)
    file = open_suite_file(out)
    lines_before = len(file.read())
    for name in LIBRARIES:
        about = {"part": "others", "what": name, "size": size, "ranks": ranks}
        reason = explain_skip(name, ranks, gpu=gpus > 0)
        if reason is not None:
            file.append([about | {"skipped": reason}])
            continue
        try:
            launch(measure_library, ranks, (task, name, size), threads=work.threads)
        except DitileError as error:
            file.append([about | {"error": " ".join(str(error).split())[-600:]}])
    return file.read()[lines_before:]


def main() -> None:
    """Measures, and prints the lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=Workload().model, help="as for ditile bench --suite gpu")
    parser.add_argument("--size", type=int, default=1024, help="pixels of a side")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", help="such as cuda:0 or cpu")
    parser.add_argument("--out", type=Path, default=Path("others.jsonl"))
    options = parser.parse_args()
    work = Workload(model=options.model, device=options.device)
    for row in measure_libraries(work, options.size, options.ranks, options.out):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
