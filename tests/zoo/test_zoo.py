"""Every pipeline of diffusers is in the collection or has a reason, and its videos can be written."""

from __future__ import annotations

import inspect
from typing import Any

import diffusers
import numpy as np
import pytest

from ditile.plan.shape import FRAME_COUNTS
from ditile.runner.requests import results
from ditile.runner.requests.pipelines import (
    check_num_frames,
    enable_required_tiling,
    find_argument,
    find_output_kind,
)
from tests.zoo import LEFT_OUT, ZOO, Entry, more_videos, videos

pytestmark = pytest.mark.filterwarnings("ignore")


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
    if find_output_kind(type(pipe)) != "video":
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
