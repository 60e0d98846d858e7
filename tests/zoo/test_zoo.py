"""Every pipeline of the collection draws something that can be written, and its variants differ in what they say."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import diffusers
import numpy
import numpy as np
import pytest
import torch
from torch import Tensor

from ditile.plan.shape import FRAME_COUNTS
from ditile.runner.requests import results
from ditile.runner.requests.pipelines import check_num_frames, enable_required_tiling, find_argument, returns_videos
from tests.zoo import LEFT_OUT, ZOO, Entry, more_videos, videos

pytestmark = pytest.mark.filterwarnings("ignore")
TEXTS = ("encoder_hidden_states", "cap_feats", "text_bth", "encoder_hidden_states_t5", "input_ids")


class FirstCallError(Exception):
    """Ends a pipeline at the first call of its transformer."""


@contextmanager
def stopped(pipe: Any, names: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """The arguments of the first call of a transformer, by name, once the pipeline ran; the call itself is not done."""
    arguments: dict[str, Any] = {}

    def stop(stock: Callable[..., Any]) -> Callable[..., None]:
        signature = inspect.signature(stock)

        @functools.wraps(stock)  # a pipeline of blocks gives what it names
        def forward(*args: Any, **kwargs: Any) -> None:
            arguments.update(signature.bind(*args, **kwargs).arguments)
            raise FirstCallError

        return forward

    for name in names:
        model = getattr(pipe, name)
        model.forward = stop(model.forward)
    try:
        yield arguments
    finally:
        for name in names:
            del getattr(pipe, name).forward


def first_call(pipe: Any, entry: Entry, call: dict[str, Any]) -> dict[str, Any]:
    with stopped(pipe, entry.transformers) as arguments, pytest.raises(FirstCallError):
        pipe(**call)
    return arguments


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, numpy.ndarray):
        return [torch.from_numpy(value)]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [found for one in values for found in tensors(one)]


def image(arguments: dict[str, Any]) -> Any:
    """What of the arguments is the image, video or sound: the first one, or what it is called where all are one row."""
    return arguments.get("vision_tokens", next(iter(arguments.values())))


def elements(arguments: dict[str, Any]) -> int:
    return sum(found.numel() for found in tensors(image(arguments)))


def text_shapes(arguments: dict[str, Any]) -> list[tuple[int, ...]]:
    text = next(arguments[name] for name in TEXTS if name in arguments)
    return [tuple(found.shape) for found in tensors(text)]


def draw(pipe: Any, call: dict[str, Any]) -> list[Tensor]:
    drawn = tensors(pipe(**call, return_dict=False))
    assert drawn and all(found.isfinite().all() for found in drawn)
    return drawn


@pytest.mark.parametrize("name", ZOO)
def test_an_entry_draws_and_its_variants_differ_in_one_thing(name: str) -> None:
    """The same each time, with every transformer, and what the variants say: else a probe learns what is false."""
    entry = ZOO[name]
    pipe = entry.make()
    called = set()
    handles = [
        getattr(pipe, one).register_forward_pre_hook(lambda *_, one=one: called.add(one)) for one in entry.transformers
    ]
    drawn = draw(pipe, entry.call())
    assert called == set(entry.transformers)
    for handle in handles:
        handle.remove()
    assert all(torch.equal(*pair) for pair in zip(drawn, draw(entry.make(), entry.call()), strict=True))

    base = first_call(pipe, entry, entry.call())
    if entry.larger:
        assert elements(first_call(pipe, entry, entry.larger())) > elements(base)
    if entry.other_prompt:
        assert text_shapes(first_call(pipe, entry, entry.other_prompt())) != text_shapes(base)
    for variant in (entry.two_images, entry.padded_prompt):
        if variant:
            assert len(image(first_call(pipe, entry, variant()))) == 2 * len(image(base))
            draw(pipe, variant())


def test_what_an_entry_leaves_out_has_a_reason() -> None:
    """A variant is there, or the entry says why it is not."""
    for entry in ZOO.values():
        for variant in ("larger", "other_prompt", "two_images", "padded_prompt"):
            assert (getattr(entry, variant) is None) == bool(entry.holes.get(variant)), f"{entry.name}: {variant}"


def test_every_pipeline_of_diffusers_is_here_or_is_left_out_with_a_reason() -> None:
    """A pipeline of a newer diffusers that calls a transformer must come into one of the two."""
    here = {type(entry.make()).__name__ for entry in ZOO.values()}
    assert not here & set(LEFT_OUT)
    pipelines = {name: getattr(diffusers, name) for name in dir(diffusers) if name.endswith("Pipeline")}
    found = {name for name, cls in pipelines.items() if "transformer" in inspect.signature(cls).parameters}
    assert found <= here | set(LEFT_OUT), sorted(found - here - set(LEFT_OUT))


NOT_DECODED = {
    **dict.fromkeys(("ltx-2", "ltx-2-image-to-video", "ltx-2-condition"), "has no vocoder here"),
    "mochi": "has means and deviations of twelve channels, and four of them here",
}
OWN_COUNT = {"hunyuan-video-framepack": "draws whole windows", "sana-wm": "counts the camera's frames"}

VIDEOS = [one for one in (*videos.ENTRIES, *more_videos.ENTRIES) if one.name not in NOT_DECODED]


@pytest.mark.parametrize("each", VIDEOS, ids=lambda each: each.name)
def test_videos_are_written(each: Entry) -> None:
    pipe = each.make()
    if not returns_videos(type(pipe)):
        pytest.skip("it draws pictures with a video's classes")
    call: dict[str, Any] = each.call() | {"num_inference_steps": 2}
    del call["output_type"]
    check_num_frames(pipe, call)
    enable_required_tiling(pipe)
    known = inspect.signature(type(pipe).__call__).parameters
    (video,) = results.list_drawn(pipe, pipe(**{name: value for name, value in call.items() if name in known}))
    assert video.dtype == np.uint8 and video.ndim == 4 and video.shape[3] == 3
    name = find_argument(type(pipe), FRAME_COUNTS)
    if name in call and each.name not in OWN_COUNT:
        assert len(video) == call[name]
