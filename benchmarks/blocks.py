"""Block costs measured on this device, and the cut into stages that they give.

    python -m benchmarks.blocks --model black-forest-labs/FLUX.1-dev --stages 8

The whole model runs on one device, in micro-steps of M patches as under PipeFusion, and every block is timed in each of
them. `ditile.parallelize` counts instead (`block_costs.py`); give it what is printed here as `--stage-blocks`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ditile.distributed.backend import pick_device
from ditile.model.anatomies import build_block_hooks
from ditile.model.call_families import find_call_family
from ditile.parallel.pipefusion.block_costs import BlockCosts
from ditile.plan.flag_parser import add_arguments, collect_arguments
from ditile.plan.option_classes import define_option
from ditile.plan.plan import Plan
from ditile.plan.stages import cut_stages
from ditile.runner.load import load
from ditile.runner.model_files import defaults
from ditile.runner.runner import parallelize


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCostsJob:
    """What is measured."""

    model: str = define_option("shapes-flux", "a bundled model, a folder or a hub id")
    stages: int = define_option(2, "stages to cut the blocks into")
    patches: int | None = define_option(None, "patches; as many as stages by default", metavar="M")
    stage_weights: tuple[float, ...] | None = define_option(None, "speed of each stage's device", metavar="A,B,..")
    size: int = define_option(256, "pixels of a side")
    steps: int = define_option(6, "denoising steps; the medians of all but the first count")
    device: str | None = define_option(None, "the GPU where there is one, else cpu", metavar="DEVICE")


def measure(pipe: Any, patches: int, call: Mapping[str, Any]) -> BlockCosts:
    """Seconds of each block in an asynchronous step on the pipeline's device, and of embedding and head.

    Args:
        pipe: an undivided pipeline; it is afterwards what it was.
        patches: M.
        call: arguments of the pipeline, at the real size; of `num_inference_steps` at least 2.
    """
    hooks = build_block_hooks(pipe.transformer)
    family = find_call_family(pipe.transformer)
    assert family is not None
    ends = [pipe.transformer.get_submodule(name) for name in (family.image_tokens, "proj_out")]
    modules = [*(hook.block for hook in hooks.chain), *ends]
    runner = parallelize(pipe, Plan(patches=patches), device=pipe.device, keep_weights=True, trust_code=True)
    try:
        # Before the clock: kernels are chosen and compiled in the first call.
        runner(**call)
        with _time_module_calls(modules, torch.device(pipe.device)) as seconds:
            runner(**call)
        assert runner.report is not None
        steps = runner.report.steps
    finally:
        runner.restore()
    found = [_of_step(times, steps, patches) for times in seconds]
    return BlockCosts(tuple(found[:-2]), found[-2], found[-1])


def _of_step(times: Sequence[float], steps: int, patches: int) -> float:
    """Seconds in a step: of each of its micro-steps the median over the steps, the synchronous first one apart."""
    calls = len(times) // (1 + patches * (steps - 1))
    later = times[calls:]
    size = patches * calls
    return sum(statistics.median(later[k::size]) for k in range(size))


@contextmanager
def _time_module_calls(modules: Sequence[nn.Module], device: torch.device) -> Iterator[list[list[float]]]:
    """Collects the seconds of every call of some modules; they are there when the context ends."""
    cuda = device.type == "cuda"
    found = [list[float]() for _ in modules]
    marks: list[list[Any]] = [[] for _ in modules]

    def record_time_point() -> Any:
        if not cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    hooks = []
    for module, into in zip(modules, marks, strict=True):
        hooks.append(module.register_forward_pre_hook(lambda *_, into=into: into.append(record_time_point())))
        hooks.append(module.register_forward_hook(lambda *_, into=into: into.append(record_time_point())))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
    if cuda:
        torch.cuda.synchronize(device)
    for into, points in zip(found, marks, strict=True):
        pairs = zip(points[::2], points[1::2], strict=True)
        into += [start.elapsed_time(stop) / 1e3 if cuda else stop - start for start, stop in pairs]


def compute_stage_loads(
    costs: Sequence[float],
    stages: Sequence[range],
    speeds: Sequence[float] | None = None,
    ends: tuple[float, float] = (0.0, 0.0),
) -> list[float]:
    """The time of each stage, in the unit of cost over speed."""
    stage_loads = [sum(costs[block] for block in stage) for stage in stages]
    stage_loads[0] += ends[0]
    stage_loads[-1] += ends[1]
    return [load / speed for load, speed in zip(stage_loads, speeds or [1.0] * len(stages), strict=True)]


def main() -> None:
    """Measures, and prints the costs and the cut as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, BlockCostsJob, title="job")
    job = BlockCostsJob(**collect_arguments(BlockCostsJob, parser.parse_args()))
    pipe: Any = load(job.model)
    pipe.set_progress_bar_config(disable=True)
    pipe.to(pick_device(job.device, 0))
    call = defaults(job.model) | {
        "height": job.size,
        "width": job.size,
        "num_inference_steps": job.steps,
    }
    costs = measure(pipe, job.patches or job.stages, {"prompt": "a red circle", "output_type": "latent"} | call)
    ends = (costs.first, costs.last)
    stages = cut_stages(costs.blocks, job.stages, None, job.stage_weights, ends)
    of_stage = compute_stage_loads(costs.blocks, stages, job.stage_weights, ends)
    print(
        json.dumps(
            {
                "milliseconds": [round(cost * 1e3, 3) for cost in costs.blocks],
                "embedding": round(costs.first * 1e3, 3),
                "head": round(costs.last * 1e3, 3),
                "largest over mean": round(max(of_stage) * job.stages / sum(of_stage), 3),
                "--stage-blocks": ",".join(str(len(stage)) for stage in stages),
            }
        )
    )


if __name__ == "__main__":
    main()
