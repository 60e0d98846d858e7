"""Every pipeline of the collection under every axis, with recorded calls: the same images as without.

What is not recorded runs its code, and says why.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import ditile
from ditile import Plan
from ditile.plan.errors import DitileError
from ditile.runner.runner import build_single_runner
from ditile_lab.study.prove import ensure_anatomies
from tests.pool import Pool
from tests.recorded_calls import record_on_cpu
from tests.zoo.entry import Entry
from tests.zoo.own import OWN
from tests.zoo.rows import EVERY, list_tensors

pytestmark = pytest.mark.filterwarnings("ignore")

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


TIMEOUT = 240.0
RECORDED = {
    "ace-step", "allegro", "any-flow", "any-flow-far", "aura-flow", "bria", "bria-fibo", "bria-fibo-2",
    "chroma", "chrono-edit", "cogvideox", "cogview-3", "cogview-4", "cosmos", "cosmos-3", "dit", "easy-animate",
    "ernie-image", "flux", "flux-2", "flux-3", "helios", "hunyuan-dit", "hunyuan-video", "ideogram-4",
    "joyimage-edit", "joyimage-edit-plus", "kandinsky-5", "kandinsky-6", "kandinsky-6-super-resolution",
    "latte", "longcat-audio", "longcat-image", "ltx", "ltx-2", "lumina-2", "lumina-next", "motif-video",
    "nucleus-moe", "ovis-image", "pixart-alpha", "proteina", "prx", "qwen-image", "sana", "sana-video",
    "skyreels-v2", "stable-audio", "stable-diffusion-3", "wan-2.1", "wan-animate", "wan-vace", "z-image",
}  # fmt: skip
"""Entries, nearly all of classes of their own, of which every call under every axis is recorded."""
RUNS_CODE = {
    "flux-2-klein-kv": "an argument is neither a tensor nor a number",
    "flux-ip-adapter": "hooks are on a FluxTransformerBlock",
    "glm-image": "an argument is neither a tensor nor a number",
    "hidream": "aten::bincount",
    "hunyuan-image": "aten::index,",
    "hunyuan-video-1.5": "aten::_local_scalar_dense",
    "hunyuan-video-framepack": "aten::_local_scalar_dense",
    "mochi": "aten::nonzero",
    "qwen-image-2.1": "an argument is neither a tensor nor a number",
    "stable-audio-3": "hooks are on a StableAudio3DiTBlock",
}
"""Entries whose calls are not recorded where ditile is between their blocks, and why."""


@pytest.mark.parametrize("name", EVERY)
def test_every_axis_is_recorded(pool: Pool, name: str) -> None:
    """A failure means another image than without tapes, or a pipeline that is not recorded any more."""
    wrong: list[str] = []
    for rank, found in enumerate(pool.run(record_axes, 2, name, timeout=TIMEOUT)):
        for axis, outcome in found.items():
            problem = find_problem(name, outcome)
            if problem:
                wrong.append(f"{axis}, rank {rank}: {problem}")
    assert not wrong, "\n".join(wrong)


def find_problem(name: str, outcome: Recorded) -> str:
    """What is wrong with an axis, in words; empty where nothing is."""
    if not outcome.is_equal:
        return f"another image, {outcome.refusals}"
    if outcome.refusals:
        return ""
    played = f"{outcome.played} played, {outcome.problems}"
    reason = RUNS_CODE.get(name)
    if reason is not None and not outcome.played and any(reason in problem for problem in outcome.problems):
        return ""
    is_known = name in RECORDED or reason is not None
    if is_known and (outcome.problems or not outcome.played):
        return played
    return ""
