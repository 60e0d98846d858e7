"""Rehearsals: how many there are, and that a call of the same shapes, which makes none, draws the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from diffusers import ClassifierFreeGuidance, FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

from ditile.model.hooks.block_calls import BlockCalls
from ditile.parallel.pipefusion.known_calls import describe_lengths
from ditile.plan.errors import StateError
from ditile.plan.plan import Plan
from ditile.runner.runner import parallelize
from tests import tiny
from tests.parallel.pipefusion.test_blends import draw
from tests.parallel.pipefusion.test_loops import flux_inpaint
from tests.pool import Pool
from tests.runner.cases import MAKE, call_of, different, divided, run, same
from tests.zoo import ZOO
from tests.zoo.rows import list_tensors

pytestmark = pytest.mark.filterwarnings("ignore")
PATCHES = 3


@contextmanager
def counted_passes() -> Iterator[list[str]]:
    """The calls of models in which blocks are passed by: rehearsals and surveys."""
    made: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        run_pass = BlockCalls._run_pass

        def run_and_count(self: Any, visit_block: Any, *args: Any) -> Any:
            made.append(getattr(visit_block, "func", visit_block).__name__)
            return run_pass(self, visit_block, *args)

        patch.setattr(BlockCalls, "_run_pass", run_and_count)
        yield made


def count_passes(made: list[str]) -> tuple[int, int]:
    """Rehearsals and surveys since the last time."""
    rehearsals, every = made.count("_rehearse_block"), len(made)
    made.clear()
    return rehearsals, every - rehearsals


def test_a_call_is_rehearsed_once_for_its_shapes() -> None:
    """Once for each patch and branch of guidance; not for other prompts, seeds or steps; again for another size.

    A failure means that each picture pays for it, or that one is drawn by what belongs to another.
    """
    again: list[dict[str, Any]] = [
        {},
        {"prompt": "a green ring", "negative_prompt": "a circle"},
        {"generator": torch.Generator().manual_seed(4), "num_inference_steps": 6, "output_type": "pt"},
    ]
    anew: list[dict[str, Any]] = [{"height": 48, "width": 64}, {"prompt": ["a ring"] * 2}, {"true_cfg_scale": 2.0}]
    pipe = MAKE["flux true cfg"]()
    with counted_passes() as made, divided(pipe, patches=PATCHES, warmup=1) as runner:
        run(runner, "flux true cfg")
        assert count_passes(made) == (2 * PATCHES, 2)
        for change in again:
            run(runner, "flux true cfg", **change)
            assert count_passes(made) == (0, 0), change
        for change in anew:
            run(runner, "flux true cfg", **change)
            assert count_passes(made) == (2 * PATCHES, 2), change
        runner(**call_of("flux", **anew[0]))
        assert count_passes(made) == (PATCHES, 1), "without guidance"
        for change in again + anew:
            run(runner, "flux true cfg", **change)
            assert count_passes(made) == (0, 0), "known still"
        pipe.scheduler = FlowMatchEulerDiscreteScheduler.from_config(pipe.scheduler.config, shift=2.0)
        run(runner, "flux true cfg")
        assert count_passes(made)[0] == 2 * PATCHES, "another scheduler"


def test_a_guider_of_other_settings_is_rehearsed_anew() -> None:
    """Whether they are its own or set beside; a failure means that what a guider does now was never looked at."""
    entry = ZOO["qwen-image-modular"]
    pipe = entry.make()
    with counted_passes() as made, divided(pipe, patches=PATCHES, warmup=1) as runner:
        for scale, rehearsals in ((3.0, 6), (3.0, 0), (2.0, 6), (3.0, 0)):
            pipe.update_components(guider=ClassifierFreeGuidance(guidance_scale=scale))
            runner(**entry.call())
            assert count_passes(made)[0] == rehearsals, scale
        pipe.guider.guidance_scale = 4.0
        runner(**entry.call())
        assert count_passes(made)[0] == 6


def draw_twice(name: str, stages: int) -> None:
    """On a rank: behind a call of other numbers, which rehearses, each draws what it draws first."""
    entry, plan = ZOO[name], Plan(pipefusion=stages, patches=PATCHES, warmup=1)
    pipe = entry.make()

    def other() -> dict[str, Any]:
        return entry.call() | {"generator": torch.Generator().manual_seed(4)}

    drawn = []
    for calls in ((other, entry.call), (entry.call, other)):
        runner = parallelize(pipe, plan, keep_weights=True)
        with counted_passes() as made:
            drawn += [list_tensors(runner(**calls[0]()))]
            count_passes(made)
            drawn += [list_tensors(runner(**calls[1]()))]
            assert count_passes(made) == (0, 0), name
        runner.restore()
    same(drawn[1], drawn[2], name)
    same(drawn[3], drawn[0], name)
    different(drawn[0][0], drawn[1][0], name)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name",
    ["qwen-image-edit", "z-image-inpaint", "wan-2.2", "flux-controlnet", "qwen-image-2.1", "ltx-2", "minimax-h3"],
)
def test_what_is_known_of_a_call_draws_the_same(name: str) -> None:
    """References, blends, two models, a ControlNet, a cache of keys, sound, a modular pipeline of two schedulers."""
    draw_twice(name, 1)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["flux-controlnet", "stable-diffusion-3-inpaint", "wan-2.2-image-to-video"])
def test_the_same_on_three_ranks(pool: Pool, name: str) -> None:
    """Latents on every stage, blends, two models. A failure means that stages disagree on what is known."""
    pool.run(draw_twice, 3, name, 3)


def test_a_mask_that_keeps_nothing_says_nothing_of_another() -> None:
    """With it the pipeline blends nothing. A failure means lost latents, or ones with another step's noise."""
    pipe, call = flux_inpaint()
    tiny.quiet(pipe)
    whole = call | {"mask_image": torch.ones_like(call["mask_image"])}
    with divided(pipe, patches=PATCHES, warmup=1) as runner:
        wanted = [draw(runner, each) for each in (call, whole)]
    for first, second, want in ((whole, call, wanted[0]), (call, whole, wanted[1])):
        with counted_passes() as made, divided(pipe, patches=PATCHES, warmup=1) as runner:
            draw(runner, first)
            count_passes(made)
            same(draw(runner, second), want)
            assert count_passes(made) == (0, 0)


TURNS = (
    "lumina-2", "z-image", "z-image-controlnet", "bria-fibo", "qwen-image", "flux-2-klein", "hunyuan-video", "wan-2.1",
)  # fmt: skip
OF_TWO = ("pixart-sigma",)


def list_turns(name: str) -> list[Callable[[], dict[str, Any]]]:
    """Calls with a short prompt, a long one, and the short one; Lumina 2 pads both to one length and gives a mask.

    Those of `OF_TWO` have two prompts of unlike length; in the call between, both are the first one.
    """
    entry = ZOO[name]
    if name in OF_TWO:
        assert entry.padded_prompt is not None
        return [entry.padded_prompt, lambda: _repeat_first_prompt(entry.padded_prompt), entry.padded_prompt]
    assert entry.other_prompt is not None
    length = {"max_sequence_length": 29} if name == "lumina-2" else {}
    return [entry.call, lambda other=entry.other_prompt: other() | length, entry.call]


def _repeat_first_prompt(make: Any) -> dict[str, Any]:
    call: dict[str, Any] = make()
    return call | {"prompt": [call["prompt"][0]] * len(call["prompt"])}


def draw_in_turns(name: str, plan: dict[str, Any]) -> list[tuple[int, int]]:
    """On a rank: each call draws what a fresh runner draws, bit for bit; rehearsals and surveys of each."""
    turns, counts = list_turns(name), list[tuple[int, int]]()
    wanted = []
    for make in turns[:2]:
        with divided(ZOO[name].make(), **plan) as runner:
            wanted.append(list_tensors(runner(**make())))
    different(wanted[0][0], wanted[1][0], name)
    with divided(ZOO[name].make(), **plan) as runner, counted_passes() as made:
        for make, want in zip(turns, (*wanted, wanted[0]), strict=True):
            same(list_tensors(runner(**make())), want, name)
            counts.append(count_passes(made))
    return counts


@pytest.mark.nightly
@pytest.mark.parametrize("name", TURNS)
def test_prompts_of_other_lengths_take_turns(name: str) -> None:
    """As text, or as embeddings and a mask. A failure: a picture is drawn by the patches of another prompt."""
    first, other, again = draw_in_turns(name, {"patches": 2, "warmup": 1})
    assert min(first) and min(other) and again == (0, 0)


@pytest.mark.parametrize(
    ("name", "degrees"),
    [("lumina-2", {"cfg": 2}), ("lumina-2", {"pipefusion": 2}), ("pixart-sigma", {"data": 2})],
    ids=str,
)
def test_ranks_of_prompts_of_other_lengths(pool: Pool, name: str, degrees: dict[str, int]) -> None:
    """A failure means that ranks wait for each other: one knows its part of a call, the other does not."""
    first, other, again = pool.run(draw_in_turns, 2, name, degrees | {"patches": 2, "warmup": 1})[0]
    assert min(first) and min(other) and again == (0, 0)


def test_prompts_of_unlike_length_in_front_of_their_pictures() -> None:
    """In one call of guidance. A failure means that what would work is not said, or does not work."""
    entry, words = ZOO["z-image-omni"], " ".join(["a large red circle"] * 10)
    assert entry.other_prompt is not None
    runner = parallelize(entry.make(), Plan(patches=3, warmup=99))
    with pytest.raises(StateError, match="give prompts, and a negative prompt, of one length"):
        runner(**entry.other_prompt())
    # The pipeline writes into lists of prompts.
    calls = [entry.other_prompt() | {"negative_prompt": [words]} for _ in range(2)]
    got, want = (list(list_tensors(made(**call))) for made, call in zip((runner, entry.make()), calls, strict=True))
    assert all(map(torch.equal, got, want)) and got


def test_lengths_of_a_mask_are_its_numbers() -> None:
    """However they lie in memory. A failure: a rehearsal of another length is taken, or a mask is refused."""
    wide = torch.ones(2, 1).expand(2, 8)
    assert describe_lengths({"text_mask": wide}) == describe_lengths({"text_mask": wide.clone()})
    assert describe_lengths({"text_mask": torch.ones(16)[::2]}) == describe_lengths({"text_mask": torch.ones(8)})
    assert describe_lengths({"text_mask": wide}) != describe_lengths({"text_mask": wide * 0})


class Drawing(StableDiffusion3Pipeline):  # type: ignore[misc]
    """Takes a random number in each iteration of its loop, as pipelines do that add noise themselves."""

    @property
    def interrupt(self) -> bool:
        torch.rand(1)
        return False


def test_a_rehearsal_leaves_random_states_alone() -> None:
    """A failure means that the first picture of a seed, which is rehearsed, is another one than the next."""
    parts = {name: part for name, part in tiny.sd3().components.items() if part is not None}
    pipe = tiny.quiet(Drawing(**parts))
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(stochastic_sampling=True)
    drawn = []
    with divided(pipe, patches=PATCHES, warmup=1) as runner:
        for _ in range(2):
            torch.manual_seed(3)
            drawn.append(runner(**call_of("sd3") | {"generator": None}).images)
    same(*drawn)
