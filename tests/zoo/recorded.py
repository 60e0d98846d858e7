"""What comes of recorded calls of a pipeline under every axis, on one of two ranks."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

import ditile
from ditile import Plan
from ditile.plan.errors import DitileError
from ditile.runner.runner import build_single_runner
from ditile_lab.study.prove import ensure_anatomies
from tests.recorded_calls import record_on_cpu
from tests.zoo.entry import Entry
from tests.zoo.own import OWN
from tests.zoo.rows import EVERY, list_tensors

STEPS = 5
AXES: dict[str, Mapping[str, Any]] = {
    "ulysses": {"ulysses": 2},
    "ring": {"ring": 2},
    "tensor": {"tensor": 2},
    "distrifusion": {"distrifusion": 2, "warmup": 1},
    "pipefusion": {"pipefusion": 2, "patches": 2, "warmup": 1},
    "cfg": {"cfg": 2},
}


class Recorded(NamedTuple):
    """What came of an axis on a rank.

    Attributes:
        refusals: of the plan without tapes, and with them.
        is_equal: whether all images are those without tapes.
        played: calls that were played.
        problems: why others were not.
    """

    refusals: tuple[str, ...]
    is_equal: bool
    played: int
    problems: tuple[str, ...]


def generate_three(pipe: Any, entry: Entry, plan: Plan, recorded: bool) -> list[Tensor]:
    """Images of three seeds, the last one of another prompt where the entry has one."""
    runner = ditile.parallelize(pipe, plan, keep_weights=True, cuda_graphs=recorded)
    images: list[Tensor] = []
    try:
        for seed, make_call in enumerate((entry.call, entry.call, entry.other_prompt or entry.call)):
            call = make_call() | {"num_inference_steps": STEPS, "generator": torch.Generator().manual_seed(seed)}
            images += [tensor.clone() for tensor in list_tensors(runner(**call))]
    finally:
        runner.restore()
    return images


def record_axes(name: str) -> dict[str, Recorded]:
    """On a rank: every axis with recorded calls and without."""
    warnings.simplefilter("ignore")
    entry = EVERY[name]
    pipe = entry.make()
    if name in OWN:
        ensure_anatomies(pipe, build_single_runner)
    found: dict[str, Recorded] = {}
    for axis, degrees in AXES.items():
        images: list[list[Tensor]] = []
        refusals: list[str] = []
        with record_on_cpu() as recorders:
            for recorded in (False, True):
                try:
                    images.append(generate_three(pipe, entry, Plan(**degrees), recorded))
                except DitileError as error:
                    refusals.append(str(error))
        if len(images) == 2:
            is_equal = len(images[0]) == len(images[1]) and all(map(torch.equal, *images))
        else:
            is_equal = len(set(refusals)) == 1 and not images
        played = sum(recorder.num_played for recorder in recorders)
        problems = {problem for recorder in recorders for problem in recorder.problems}
        found[axis] = Recorded(tuple(refusals), is_equal, played, tuple(sorted(problems)))
    return found
