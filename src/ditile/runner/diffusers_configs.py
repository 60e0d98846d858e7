"""Takes the configs of diffusers' `model.enable_parallelism`, for any pipeline of ditile.

diffusers divides only classes that have a table (`_cp_plan`, `_tp_plan`); ditile derives what it divides.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ditile.plan.errors import PlanError
from ditile.plan.plan import Plan
from ditile.plan.single_calls import choose_call_plan
from ditile.runner.runner import Runner, parallelize
from ditile.runner.transformer_calls import build_transformer_calls

# Names, because not every supported release of diffusers has all of these classes.
NAMES = ("ParallelConfig", "ContextParallelConfig", "TensorParallelConfig")
DEGREES = {"ring_degree": "ring", "ulysses_degree": "ulysses", "tp_degree": "tensor"}
"""Field of a config -> the degree of a plan."""
ONLY_VALUES = {
    "mesh": (None, "ditile makes the groups of its plan itself"),
    "convert_to_fp32": (True, "partial results of ring are always merged in float32"),
    "rotate_method": ("allgather", "keys and values go round a ring"),
}
"""Field of a config -> the one value that it may have, and why."""


def enable_parallelism(pipe: Any, config: Any, **options: Any) -> Runner:
    """Divide a pipeline as one of diffusers' configs says: `parallelize` with the same degrees.

    `ulysses_anything` and `ring_anything` are not needed, as every length and number of heads is divided.

    Args:
        pipe: as in `parallelize`; or only a transformer, whose calls are then `runner(arguments=dict(...))`, with the
            arguments of its forward. Each call is exact by itself, as nothing says where an image begins.
        config: a `ContextParallelConfig`, a `TensorParallelConfig`, or a `ParallelConfig` with one of them.
        options: further arguments of `parallelize`, such as `attention` or `trust_code`.

    Raises:
        PlanError: if it is another kind of config, has a value that ditile cannot honour, or does not fit.
        ModelError: if `pipe` is neither a pipeline nor a model.
        StateError, JoinError: as `parallelize`.
    """
    plan = convert_config(config)
    if isinstance(pipe, nn.Module):
        pipe = build_transformer_calls(pipe)
        plan = choose_call_plan(plan)
    return parallelize(pipe, plan, **options)


def convert_config(config: Any) -> Plan:
    """Return the plan that a config of diffusers stands for.

    Raises:
        PlanError: if it is no such config, or has a value that ditile cannot honour.
    """
    name = type(config).__name__
    if name not in NAMES:
        raise PlanError(f"config={config!r} is not a {', '.join(NAMES[:-1])} or {NAMES[-1]} of diffusers")
    if name == "ParallelConfig":
        parts = [config.context_parallel_config, getattr(config, "tensor_parallel_config", None)]
        parts = [part for part in parts if part is not None]
        return convert_config(parts[0]) if parts else Plan()
    for field, (only, reason) in ONLY_VALUES.items():
        value = getattr(config, field, only)
        if value != only:
            raise PlanError(f"{name}: {field}={value!r} cannot be honoured: {reason}; leave it at {only!r}")
    degrees = {axis: getattr(config, field) for field, axis in DEGREES.items() if hasattr(config, field)}
    return Plan(**degrees)
