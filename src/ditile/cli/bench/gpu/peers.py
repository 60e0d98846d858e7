"""Other libraries on the same pipeline: cache-dit's cache, and the parallelism of diffusers and xDiT."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ditile.cli.bench.gpu.items import CACHE_DIT, DIFFUSERS, XDIT

Peer = Callable[[Any, int], AbstractContextManager[Callable[..., Any]]]
"""(pipeline of its own, ranks) -> what draws, within a context."""
PACKAGES = {CACHE_DIT: "cache_dit", XDIT: "xfuser", DIFFUSERS: "diffusers"}


def find_missing_package(name: str) -> str | None:
    """The package that a library needs, if it is not installed."""
    return None if find_spec(PACKAGES[name]) else PACKAGES[name]


@contextmanager
def use_cache_dit(pipe: Any, ranks: int) -> Iterator[Callable[..., Any]]:
    """cache-dit's cache with its own defaults."""
    cache_dit: Any = import_module("cache_dit")
    cache_dit.enable_cache(pipe)
    try:
        yield pipe
    finally:
        cache_dit.disable_cache(pipe)


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


PEERS: Mapping[str, Peer] = {CACHE_DIT: use_cache_dit, DIFFUSERS: use_diffusers_parallelism, XDIT: use_xdit}
