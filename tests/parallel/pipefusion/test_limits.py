"""PipeFusion at the limits where nothing is stale: the plain pipeline's picture, bit for bit, on every rank.

All in fp32 and bitwise: stages and patches reorder no sum.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.pool import Pool, on_ranks
from tests.runner.cases import MAKE, call_of, different, divided, draw_plain, equal_over_ranks, run, same

SMALL = {"height": 40, "width": 56}  # 10 token rows of 14
STEPS = 4


def like_plain(name: str, plans: list[dict[str, Any]], calls: list[dict[str, Any]]) -> None:
    pipe = MAKE[name]()
    wanted = [draw_plain(name, **call) for call in calls]
    for plan in plans:
        with divided(pipe, **plan) as runner:
            for call, want in zip(calls, wanted, strict=True):
                same(run(runner, name, **call), want, f"{name} {plan} {call}")


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "ranks"), list(itertools.product(MAKE, (1, 2, 4))))
def test_nothing_stale_is_the_plain_pipeline(pool: Pool, name: str, ranks: int) -> None:
    """A failure means that dividing blocks over stages, or stepping the scheduler by patches, changes the picture."""
    all_synchronous = [{"warmup": STEPS, "patches": m} for m in (3, 7)]
    one_patch = {"warmup": 0, "patches": 1}
    plans = [plan | {"pipefusion": ranks} for plan in (*all_synchronous, one_patch)]
    pool.run(like_plain, ranks, name, plans, [SMALL])


@pytest.mark.nightly
@pytest.mark.parametrize("name", MAKE)
def test_any_number_of_stages_is_one_stage(pool: Pool, name: str) -> None:
    """With stale keys too. A failure means that a stage reads keys of another age, or another patch's tokens."""
    plans = [{"warmup": w, "patches": m} for w, m in ((0, 3), (1, 7))]
    results = equal_over_ranks(pool, (2, 3, 4) if name in ("flux", "pixart sigma") else (3,), name, plans, [SMALL])
    for one, other in zip(results, results[1:], strict=False):
        different(one, other, "patches or warmup had no effect")


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["flux", "pixart sigma", "sd3.5 medium"])
def test_stages_cut_by_hand(pool: Pool, name: str) -> None:
    """Stages of one block, and uneven ones. A failure means that a seat at a boundary hands over the wrong tokens."""
    blocks = 5 if name == "flux" else 4
    [stale] = equal_over_ranks(pool, (), name, [{"patches": 3}], [SMALL])
    for cuts in ([(1,) * blocks], [(1, blocks - 1), (blocks - 1, 1)], [(1, blocks - 2, 1)]):
        ranks = len(cuts[0])
        plans = [{"pipefusion": ranks, "stage_blocks": cut, "patches": 3} for cut in cuts]
        pool.run(like_given, ranks, name, plans[0], stale)
        pool.run(like_plain, ranks, name, [plan | {"warmup": STEPS} for plan in plans], [SMALL])


def like_given(name: str, plan: dict[str, Any], wanted: Any) -> None:
    with divided(MAKE[name](), **plan) as runner:
        same(run(runner, name, **SMALL), wanted, plan)


VARIETY: list[dict[str, Any]] = [
    {"num_images_per_prompt": 2, "seeds": [1, 2]},
    {"prompt": ["a red circle", "a blue square above the green ring"], "num_images_per_prompt": 2},
    {"prompt": ["a red circle"] * 3, "num_inference_steps": 2},
    {"embeds": 5},
    {"embeds": 9, "seed": 3},
    {"embeds": 150},
    {"max_sequence_length": 150},  # most of it is padding
    {"height": 56, "width": 16},  # 14 token rows
    {"height": 16, "width": 56},
    {"num_inference_steps": 5},
    {"num_inference_steps": 1},
    {"return_dict": True, "max_sequence_length": 7},
]


def unlike_before(name: str, plan: dict[str, Any], calls: list[dict[str, Any]]) -> list[Any]:
    """Calls one runner again and again, each time otherwise, and twice in a row, and a fresh runner."""
    pipe, results = MAKE[name](), []
    with divided(pipe, **plan) as runner:
        for call in calls:
            results.append(run(runner, name, **call))
            same(run(runner, name, **call), results[-1], f"second call {call}")
    for call, wanted in zip(calls, results, strict=True):
        with divided(pipe, **plan) as runner:
            same(run(runner, name, **call), wanted, f"fresh runner {call}")
    return results


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["flux", "pixart sigma", "flux true cfg", "sd3.5 medium"])
def test_every_way_to_call(pool: Pool, name: str) -> None:
    """Batches, prompts, embeddings, sizes, steps, one after the other with one runner.

    A failure means that something of one call (shapes, keys, constants) reaches the next.
    """
    exact = [{"pipefusion": 2, "patches": 3, "warmup": 9}]
    calls = [call for call in VARIETY if not ("embeds" in call and name == "flux true cfg")]
    if not name.startswith("pixart"):  # which rounds to 8 pixels, that is to two token rows
        calls += [{"height": 44, "width": 36, "num_inference_steps": 3}, {"height": 12, "width": 60}]
    pool.run(like_plain, 2, name, exact, calls)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "warmup"), [("flux", 0), ("flux", 1), ("pixart sigma", 1), ("sd3.5 medium", 0)])
def test_a_call_knows_nothing_of_the_one_before(pool: Pool, name: str, warmup: int) -> None:
    """With stale keys. A failure means that keys or constants of an earlier picture reach a later one."""
    calls = [{}, {"prompt": "a blue square"}, {"num_inference_steps": 3, **SMALL}, VARIETY[0], VARIETY[3], {}]
    plan = {"pipefusion": 2, "patches": 3, "warmup": warmup}
    for results in pool.run(unlike_before, 2, name, plan, calls):
        same(results[0], results[-1], "the same prompt, with others in between")


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["flux", "pixart sigma", "sd3"])
def test_output_types(pool: Pool, name: str) -> None:
    """A failure means that the picture is not the plain one's after decoding, or in another container."""
    calls = [{"output_type": kind} for kind in ("pil", "np", "pt", "latent")]
    pool.run(like_plain, 2, name, [{"pipefusion": 2, "patches": 3, "warmup": STEPS}], calls)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["flux", "pixart sigma"])
@on_ranks(2)
def test_tuples_and_the_first_rank_alone(name: str) -> None:
    """A failure means that the runner's result is not what the pipeline returns."""
    pipe = MAKE[name]()
    wanted = pipe(**call_of(name, output_type="np")).images
    with divided(pipe, pipefusion=2, warmup=STEPS) as runner:
        (got,) = runner(**call_of(name, output_type="np", return_dict=False))
        same(got, wanted, "return_dict=False")
        first = runner(output="first", **call_of(name, output_type="np"))
        assert (first is None) == (runner.mesh.rank != 0)
        if first is not None:
            same(first.images, wanted, "output='first'")
        call = call_of(name, output_type="np")
        same(runner(call.pop("prompt"), **call).images, wanted, "a positional prompt")


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["pixart sigma", "pixart alpha", "sd3.5 medium"])
def test_without_guidance(pool: Pool, name: str) -> None:
    """xDiT cannot run PixArt at guidance of 1 or less. A failure means that ditile divides only doubled batches."""
    calls = [{"guidance_scale": 1.0}, {"guidance_scale": 0.0}, {"guidance_scale": 3.0}]
    pool.run(like_plain, 2, name, [{"pipefusion": 2, "patches": 3, "warmup": STEPS}], calls)
    equal_over_ranks(pool, (2,), name, [{"patches": 3}], calls)
