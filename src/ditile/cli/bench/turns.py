"""What measurements that take turns share: a cache for one call, the loop's seconds, a progress bar."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from ditile.cache.cached import IdleCacheWarning
from ditile.distributed import env
from ditile.distributed.trace import GenerationTrace
from ditile.errors import ModelError
from ditile.runner.caching import disable_cache, enable_cache


@contextmanager
def use_cache_within(target: Any, configs: Mapping[str, Any], name: str = "") -> Iterator[None]:
    """A pipeline or runner has a cache within; none where the config is None.

    Args:
        target: the pipeline or runner.
        configs: as `enable_cache` takes them.
        name: what it is called if it will not do.

    Raises:
        ModelError: if it could never leave anything out.
    """
    if configs["cache_config"] is None:
        yield
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", IdleCacheWarning)
            enable_cache(target, **configs)
    except IdleCacheWarning as warning:
        raise ModelError(f"{name!r}: {warning}" if name else str(warning)) from warning
    try:
        yield
    finally:
        disable_cache(target)


@contextmanager
def time_denoising_loop(model: nn.Module) -> Iterator[Callable[[], list[float]]]:
    """Yields what says, after a call of the pipeline, how many seconds its loop took, piece by piece.

    The pieces are the calls of the transformer and what lies between them, up to the end of the last call: a runner's
    loop, but for the last step of the scheduler.
    """
    trace = GenerationTrace()
    trace.on = True
    hooks = [
        model.register_forward_pre_hook(lambda *_: trace.mark_step()),
        model.register_forward_hook(lambda *_: trace.mark_step()),
        model.register_forward_pre_hook(lambda *_: env.report_progress()),
    ]
    try:
        yield lambda: trace.measure_waits()[0]
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def show_progress_bar(title: str, total: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar; yields what moves it on."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as progress:
        task = progress.add_task(title, total=total)
        yield lambda count: progress.advance(task, count)
