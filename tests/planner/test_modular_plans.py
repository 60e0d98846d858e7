"""Folders of pipelines that are blocks alone: their calls, the work of a call, and the frames of a VAE of chunks."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import diffusers
import pytest
import torch
from diffusers.modular_pipelines import modular_pipeline
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ditile.cli.main import main
from ditile.plan.errors import ModelError
from ditile.planner.footprint import VaeScale, measure_vae_scale
from ditile.planner.recording.capture import capture_call
from ditile.planner.seconds import RankTokens, merge_work
from ditile.planner.subject import PlanSubject
from tests.planner.test_planner import count_work_flops
from tests.zoo import ZOO, encoders
from tests.zoo.modular import modular
from tests.zoo.videos import ltx_2_vae

pytestmark = pytest.mark.filterwarnings("ignore")
H3_VAE = {
    "block_out_channels": (8,) * 6, "layers_per_block": 1, "norm_num_groups": 2, "decoder_num_layers": 1,
    "decoder_num_attention_heads": 2, "decoder_attention_head_dim": 32,
}  # fmt: skip


class Planned(NamedTuple):
    """A pipeline of blocks, and what is known of its call by hand.

    Attributes:
        blocks: those of the whole pipeline; the collection has the part that denoises.
        encodes: the blocks that encode a prompt, which have models of transformers.
        sizes: of the call.
        tokens: of the image, or of the sequence if there is one alone.
        text: tokens of a second stream.
        calls: of the transformer in a step.
        is_counted: whether the work of its text is told apart from that of the second stream.
    """

    name: str
    blocks: Any
    encodes: tuple[str, ...]
    vae: Callable[[], Any]
    sizes: dict[str, int]
    tokens: int
    text: int
    calls: int
    is_counted: bool = True


def anima_vae() -> Any:
    """Makes pictures smaller by 8."""
    return encoders.qwen_image_vae(dim_mult=[1, 1, 1, 1], temperal_downsample=[False, True, True])


PLANNED = [
    # 7 latent frames of 4 x 2 tokens (22 frames would be too short a video), 7 of text, and two channels of sound.
    Planned(
        "minimax-h3", diffusers.MiniMaxH3Blocks, ("text_encoder",), lambda: diffusers.AutoencoderKLMiniMaxH3(**H3_VAE),
        {"height": 64, "width": 32, "num_frames": 124}, 37 * 2 * 1 + 7 + 2 * round(124 / 24 * 40), 0, 1,
    ),
    Planned("anima", diffusers.AnimaAutoBlocks, ("text_encoder",), anima_vae,
            {"height": 48, "width": 80}, 3 * 5, 0, 2),
    # The second stream is the sound.
    Planned(
        "ltx-2.5", diffusers.LTX25AutoBlocks,
        ("prompt_enhancer", "text_encoder", "vae_encoder", "condition_encoder", "duration"), ltx_2_vae,
        {"height": 96, "width": 160, "num_frames": 9}, 5 * 3 * 5, round(9 / 24 * 25), 4, is_counted=False,
    ),
]  # fmt: skip


def save(row: Planned, folder: Path) -> Any:
    """Saves the whole pipeline without what encodes a prompt, under the name of its own blocks."""
    pipe = ZOO[row.name].make()
    blocks = row.blocks()
    for name in row.encodes:
        blocks.sub_blocks.pop(name)
    modular(blocks, **pipe.components | {"vae": row.vae()}).save_pretrained(str(folder), overwrite_modular_index=True)
    path = folder / "modular_model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"_blocks_class_name": row.blocks.__name__}))
    return pipe


@pytest.mark.parametrize("row", PLANNED, ids=lambda row: row.name)
def test_blocks_alone_are_planned_for(row: Planned, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tokens and calls are those of the call, and its work is that of a real forward.

    A failure means that a model is refused, or that its plans are priced for another call."""
    pipe = save(row, tmp_path)
    subject = PlanSubject.from_configs(row.name, tmp_path)
    text = next(value.shape[1] for name, value in ZOO[row.name].call().items() if name.endswith("prompt_embeds"))
    shape = subject.make_call_shape({"prompt": "", "max_sequence_length": text, **row.sizes})
    assert (shape.grid.num_tokens, shape.text, shape.calls) == (row.tokens, row.text, row.calls)
    call = capture_call(pipe, pipe.transformer, ZOO[row.name].call() | row.sizes)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        pipe.transformer(**call)
    work = subject.transformer_work
    rest = (work.first, work.last, work.every, work.step, work.once)
    every = merge_work([*work.blocks, *work.block_steps, *work.block_once, *rest])
    tokens = RankTokens(1, row.tokens, row.text or text, row.tokens, row.text or text)
    # Sound and text in one sequence count as the image's tokens there, in layers that they do not pass.
    if row.is_counted:
        assert count_work_flops(every, tokens) == pytest.approx(counter.get_total_flops(), rel=0.1)
    sizes = [f"--{name.removeprefix('num_')}={value}" for name, value in row.sizes.items()]
    words = ("--model", str(tmp_path), *sizes, "--steps", "4", "--hardware", "l40-pcie", "--devices", "2")
    assert main(["plan", *words, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["plans"][0]["latency_s"] > 0
    if row.name == "minimax-h3":
        # What a block refuses is said once, and not by each block around it.
        logger = logging.getLogger(modular_pipeline.__name__)
        too_few = pytest.raises(ModelError, match="must be between 120 and 360, got 22")
        with mock.patch.object(logger, "callHandlers") as logged, too_few:
            subject.make_call_shape({"prompt": "", **row.sizes, "num_frames": 22})
        assert not logged.called


def test_frames_of_a_vae_of_chunks() -> None:
    """17 frames are 5 latent frames, and the last 5 are 2, for any sizes of its layers; of other VAEs each latent frame
    has as many.

    A failure means that a video is refused that the model makes, or priced with other tokens."""
    scale = measure_vae_scale(diffusers.AutoencoderKLMiniMaxH3, H3_VAE)
    assert scale == VaeScale(16, 17, 5, "latent_channels", 5, 2) and scale.counted_frames == (7, 12)
    assert [scale.count_latent_frames(frames) for frames in (22, 39, 124)] == [7, 12, 37]
    for frames, near in ((121, 124), (110, 107), (4, 5)):
        with pytest.raises(ModelError, match=f"frames={frames} are not a multiple of 17 and 5 more; try frames={near}"):
            scale.count_latent_frames(frames)
    assert VaeScale(8, 4).count_latent_frames(81) == 21 and VaeScale(8, 4).counted_frames == (3, 4)
