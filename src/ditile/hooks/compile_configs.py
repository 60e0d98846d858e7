"""What `torch.compile` is told for this kind of work. It belongs to the process, as torch has it."""

from __future__ import annotations

import logging
from typing import Any

from ditile.errors import ModelError

LOG = logging.getLogger("ditile")


def set_compile_configs(
    *, recompile_limit: int = 1024, compute_comm_overlap: bool = True, descent_tuning: bool = False,
    cuda_graphs: bool = False, force_disable_compile_caches: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Sets dynamo's limits and inductor's flags; call it before the first compiled call. Calling it again is harmless.

    Args:
        recompile_limit: graphs of one function after which dynamo gives up on it; a higher one that is set stays.
        compute_comm_overlap: inductor moves collectives that are in a graph away from what waits for them.
        descent_tuning: tunes tiles by descent, and leaves epilogues apart: long to compile.
        cuda_graphs: replays graphs, but not those of blocks under a plan: attention writes one of their inputs, and
            inductor runs such ones eagerly.
        force_disable_compile_caches: compiles anew what was compiled in an earlier process.

    Returns:
        What is set now, by name; it is logged too.

    Raises:
        ModelError: if `recompile_limit` is not a whole number of at least 1.
    """
    if not isinstance(recompile_limit, int) or isinstance(recompile_limit, bool) or recompile_limit < 1:
        raise ModelError(
            f"recompile_limit={recompile_limit!r} is not a whole number of at least 1; try recompile_limit=1024"
        )
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    settings: dict[str, Any] = {
        "recompile_limit": max(dynamo.recompile_limit, recompile_limit),
        "accumulated_recompile_limit": max(dynamo.accumulated_recompile_limit, 8 * recompile_limit),
    }
    for name, value in settings.items():
        setattr(dynamo, name, value)
    flags = {
        "reorder_for_compute_comm_overlap": compute_comm_overlap,
        "coordinate_descent_tuning": descent_tuning,
        "coordinate_descent_check_all_directions": descent_tuning,
        "epilogue_fusion": not descent_tuning,
        "force_disable_caches": force_disable_compile_caches,
    }
    for name, value in flags.items():
        setattr(inductor, name, value)
    inductor.triton.cudagraphs = cuda_graphs
    settings |= flags | {"triton.cudagraphs": cuda_graphs}
    LOG.info("torch.compile: %s", ", ".join(f"{name}={value}" for name, value in settings.items()))
    return settings
