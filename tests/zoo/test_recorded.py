"""Every pipeline of the collection under every axis, with recorded calls: the same images as without.

What is not recorded runs its code, and says why.
"""

from __future__ import annotations

import pytest

from tests.pool import Pool
from tests.zoo.recorded import Recorded, record_axes
from tests.zoo.rows import EVERY

pytestmark = pytest.mark.filterwarnings("ignore")

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
