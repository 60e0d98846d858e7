"""LoRAs on a divided pipeline: loaded before or after, switched, scaled, fused and unloaded, as on the plain one.

In fp32 and, at the limit where nothing is stale, bitwise: each stage does the plain pipeline's sums on its blocks. Sums
over shares of weights are in another order: 1e-4 in these models.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from ditile.plan.plan import Plan
from ditile.runner.runner import parallelize
from tests.pool import Pool, on_ranks, share
from tests.runner.cases import MAKE, different, run, same
from tests.runner.loras import NAMES, edits, folders_of, load

EXACT = {"patches": 3, "warmup": 4}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return folders_of(NAMES, tmp_path_factory)


def draw_states(name: str, folder: Path) -> list[Any]:
    """The plain pictures before all edits and after each."""
    pipe = MAKE[name]()
    pictures = [run(pipe, name)]
    for edit in edits(name).values():
        edit(pipe, folder)
        pictures.append(run(pipe, name))
    return pictures


def check(got: Any, wanted: Any, what: str, *, is_exact: bool) -> None:
    if is_exact:
        same(got, wanted, what)
    else:
        assert float((got - wanted).abs().max() / wanted.abs().max()) < 1e-4, what


def in_every_state(name: str, folder: Path, plan: dict[str, Any], before: list[int]) -> None:
    is_exact = "tensor" not in plan
    todo, pictures = edits(name), share(f"{name} in every state of LoRAs", draw_states, name, folder)
    for (was, one), (now, other) in itertools.pairwise(zip(["plain", *todo], pictures, strict=True)):
        different(one, other, f"plain {name}, {was} and {now}")
    for first in before:
        pipe = MAKE[name]()
        steps = list(zip(todo.items(), pictures[1:], strict=True))
        for (_, edit), _ in steps[:first]:
            edit(pipe, folder)
        runner = parallelize(pipe, Plan(**plan))
        check(run(runner, name), pictures[first], f"{name} divided after {first} edits", is_exact=is_exact)
        for (what, edit), picture in steps[first:]:
            edit(pipe, folder)
            check(run(runner, name), picture, f"{name} {what}, divided after {first} edits", is_exact=is_exact)


PLANS: list[dict[str, Any]] = [{"pipefusion": 2, **EXACT}, {"tensor": 2}, {"tensor": 2, "split_scheme": "sequence"}]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_state_of_loras_is_the_plain_pipelines(
    pool: Pool, folders: dict[str, Path], name: str, plan: dict[str, Any]
) -> None:
    """A failure means that a LoRA reaches some ranks only, that a constant of an older state is used, or that a factor
    is not cut, or a sum lost with the layer of a LoRA that went."""
    states = list(edits(name))
    before = [0, 1 + states.index("fused")]
    if "tensor" in plan:  # what diffusers loads needs whole weights
        before = [1 + max(states.index(state) for state in ("loaded", "a second one") if state in states)]
    pool.run(in_every_state, 2, name, folders[name], plan, before)


@pytest.mark.parametrize("name", ["flux", "sd3.5 medium"])
@on_ranks(2)
def test_scales_of_a_call_and_of_its_steps(folders: dict[str, Path], name: str) -> None:
    """A failure means that what is remembered of an earlier step outlives a LoRA that a callback changed."""
    folder = folders[name]
    pipe = MAKE[name]()
    load("one")(pipe, folder)

    def fade(pipe: Any, step: int, *_: Any) -> dict[str, Any]:
        pipe.set_adapters("one", 0.5 - 0.2 * step)
        return {}

    calls: list[dict[str, Any]] = [
        {"joint_attention_kwargs": {"scale": 0.4}},
        {"callback_on_step_end": fade, "callback_on_step_end_tensor_inputs": []},
    ]
    pictures = [run(pipe, name)]
    for call in calls:
        pipe.set_adapters("one", 1.0)
        pictures.append(run(pipe, name, **call))
        different(pictures[-1], pictures[0], f"{name} {list(call)}")
    runner = parallelize(pipe, Plan(pipefusion=2, **EXACT))
    for call, wanted in zip([{}, *calls], pictures, strict=True):
        pipe.set_adapters("one", 1.0)
        same(run(runner, name, **call), wanted, f"{name} {list(call)}")
