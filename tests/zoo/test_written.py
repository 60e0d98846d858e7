"""Every pipeline of videos, with its default kind of output, gives videos that `ditile generate` can write.

A failure would mean that a class is drawn to the last step and then ends in a traceback, or has frames refused that it
makes.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from ditile.plan.shape import FRAME_COUNTS
from ditile.runner.requests import results
from ditile.runner.requests.pipelines import (
    check_num_frames,
    enable_required_tiling,
    find_argument,
    returns_videos,
)
from tests.zoo import more_videos, videos
from tests.zoo.entry import Entry

pytestmark = pytest.mark.filterwarnings("ignore")
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
    (video,) = results.list_drawn(pipe(**{name: value for name, value in call.items() if name in known}))
    assert video.dtype == np.uint8 and video.ndim == 4 and video.shape[3] == 3
    name = find_argument(type(pipe), FRAME_COUNTS)
    if name in call and each.name not in OWN_COUNT:
        assert len(video) == call[name]
