"""Compiled pipelines under a plan: the picture of the uncompiled one, few graphs, and none in the second picture.

The counting backend runs what dynamo captured op by op, so pictures are equal bit for bit.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._dynamo import config as dynamo
from torch._inductor import config as inductor

import ditile
from ditile.plan.errors import PlanError
from ditile.plan.plan import Plan
from ditile.runner.runner import parallelize
from tests import tiny
from tests.model.hooks.compiling import WAYS, Counting
from tests.pool import Pool
from tests.recorded_calls import draw_both_ways
from tests.runner.cases import MAKE, run, same

UNEVEN = {"patches": 3, "warmup": 1}  # 12 rows and the text: no two patches have equally many tokens
MOST_GRAPHS = 4  # of a class of blocks


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """What one test compiled is none of the next one's."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def uncompiled(name: str, plan: dict[str, Any], **changes: Any) -> list[Tensor]:
    """Two pictures, of two seeds."""
    runner = parallelize(MAKE[name](), Plan(**plan))
    return [run(runner, name, seed=seed, **changes) for seed in (7, 8)]


def compiled(
    name: str, plan: dict[str, Any], way: str, order: str = "before", **changes: Any
) -> tuple[list[Tensor], list[Counter[str]]]:
    """The same two compiled, with the graphs of each picture."""
    torch._dynamo.reset()
    backend, pipe = Counting(), MAKE[name]()
    if order == "before":
        WAYS[way](pipe, backend=backend)
    runner = parallelize(pipe, Plan(**plan))
    if order == "after":
        WAYS[way](pipe, backend=backend)
    actual = [(run(runner, name, seed=seed, **changes), backend.take()) for seed in (7, 8)]
    return [picture for picture, _ in actual], [graphs for _, graphs in actual]


def check(wanted: list[Tensor], got: tuple[list[Tensor], list[Counter[str]]], breaks: bool = False) -> None:
    pictures, (first, second) = got
    same(pictures, wanted)
    assert first
    if not breaks:
        assert max(first.values()) <= MOST_GRAPHS, first
        assert all(name.endswith("Block") for name in first), f"something beside the blocks was captured: {first}"
    assert not second, f"captured anew for a second picture of the same size: {second}"


@pytest.mark.parametrize(
    ("order", "way"), [("before", "whole"), ("after", "whole"), ("before", "in place"), ("after", "blocks")]
)
def test_a_compiled_transformer_works_before_and_after(order: str, way: str) -> None:
    """A failure: a compiled module was not looked through, or a hook became part of a graph."""
    check(uncompiled("flux", UNEVEN), compiled("flux", UNEVEN, way, order))


def on_ranks(name: str, plan: dict[str, Any], way: str) -> tuple[list[Tensor], tuple[list[Tensor], list[Counter[str]]]]:
    return uncompiled(name, plan), compiled(name, plan, way)


PLANS: dict[str, dict[str, Any]] = {
    "stages": {"pipefusion": 2, "patches": 3, "warmup": 4},
    "stale": {"pipefusion": 2, "patches": 3, "warmup": 1},
    "ring": {"ring": 2},
    "distrifusion": {"distrifusion": 2, "warmup": 1},
    # Every sum over the ranks breaks a block's graph.
    "tensor row": {"tensor": 2, "split_scheme": "row"},
    "tensor sequence": {"tensor": 2, "split_scheme": "sequence"},
}


@pytest.mark.parametrize("plan", PLANS)
def test_graphs_on_two_ranks(pool: Pool, plan: str) -> None:
    """A failure: where the pipeline is, or what travels, was guarded."""
    name = "flux" if plan != "stale" else "sd3.5 medium"
    breaks = "tensor" in plan
    for wanted, got in pool.run(on_ranks, 2, name, PLANS[plan], "blocks" if breaks else "whole"):
        check(wanted, got, breaks)


def test_a_runner_compiles_the_blocks_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """`compile=True` is `torch.compile` of each block's forward, here with the counting backend."""
    backend, real = Counting(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda fn: real(fn, backend=backend))
    for plan in ({}, UNEVEN):
        torch._dynamo.reset()
        pipe = MAKE["flux"]()
        runner = parallelize(pipe, Plan(**plan), compile=True)
        pictures = [(run(runner, "flux", seed=seed), backend.take()) for seed in (7, 8)]
        check(uncompiled("flux", plan), ([p for p, _ in pictures], [g for _, g in pictures]))
        assert not any("forward" in vars(module) for module in pipe.transformer.modules()), "gone after the call"


def test_another_word_than_auto_is_refused() -> None:
    with pytest.raises(PlanError, match="compile='atuo' should be a valid boolean or 'auto'"):
        parallelize(MAKE["pixart sigma"](), Plan(), compile="atuo")  # type: ignore[arg-type]


def test_a_compiled_pipeline_is_left_as_it_was() -> None:
    pipe, backend = MAKE["flux"](), Counting()
    WAYS["whole"](pipe, backend=backend)
    WAYS["blocks"](pipe, backend=backend)
    outer, calls = pipe.transformer, [module._compiled_call_impl for module in pipe.transformer.modules()]
    runner = parallelize(pipe, Plan(**UNEVEN), keep_weights=True)
    run(runner, "flux")
    runner.restore()
    assert pipe.transformer is outer
    assert [module._compiled_call_impl for module in pipe.transformer.modules()] == calls


@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_makes_the_same_picture() -> None:
    """Sums in other orders: 1e-4, as the tiny model's guidance and steps add them up."""
    plain = run(parallelize(tiny.pixart(1), Plan(**UNEVEN)), "pixart", num_inference_steps=2)
    with inductor.patch(compile_threads=1):  # no pool of processes
        got = run(parallelize(tiny.pixart(1), Plan(**UNEVEN), compile=True), "pixart", num_inference_steps=2)
    assert float((got - plain).norm() / plain.norm()) < 1e-4


def draw_recorded(plan: dict[str, Any]) -> bool:
    """Whether calls with compiled blocks are recorded and played; two pictures are equal."""
    torch._dynamo.reset()
    with mock.patch.object(torch, "compile", partial(torch.compile, backend=Counting())):
        _, recorder = draw_both_ways(
            MAKE["flux"], Plan(**plan), lambda runner: [run(runner, "flux", seed=seed) for seed in (7, 8)], compile=True
        )
    return min(recorder.num_recorded, recorder.num_played) > 0


@pytest.mark.parametrize("plan", [UNEVEN, {"pipefusion": 2, "patches": 2, "warmup": 1}], ids=str)
def test_compiled_blocks_are_recorded(pool: Pool, plan: dict[str, Any]) -> None:
    """Attention is an operator in compiled code. A failure means that a tape does not see what it does and sends."""
    assert all(pool.run(draw_recorded, Plan(**plan).world, plan))


def test_the_configs_say_what_they_set() -> None:
    before = dynamo.save_config(), inductor.save_config()
    try:
        actual = ditile.set_compile_configs(descent_tuning=True)
        assert actual == ditile.set_compile_configs(descent_tuning=True), "idempotent"
        assert actual["recompile_limit"] == dynamo.recompile_limit == 1024
        assert actual["reorder_for_compute_comm_overlap"] is inductor.reorder_for_compute_comm_overlap is True
        assert not inductor.epilogue_fusion and inductor.coordinate_descent_tuning
        dynamo.recompile_limit = 4096
        assert ditile.set_compile_configs()["recompile_limit"] == 4096, "never lowered"
    finally:
        dynamo.load_config(before[0])
        inductor.load_config(before[1])
