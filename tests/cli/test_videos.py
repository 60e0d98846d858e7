"""What `ditile generate` writes for a pipeline of videos, and what it refuses before anything is computed.

A failure would mean a video of other frames, size or rate than asked for, or minutes of denoising for an error.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import av
import diffusers
import numpy as np
import pytest
from PIL import Image

import ditile
from ditile import ModelError
from ditile.cli import main
from ditile.runner.requests import arguments, results, videos
from ditile.runner.requests.facts import collect_call_facts
from ditile.runner.requests.options import GenerateOptions
from ditile.runner.requests.pipelines import find_frame_rate
from tests import tiny
from tests.cli.test_cli import opened, refused
from tests.zoo import ZOO
from training.motion_check import judge_clip

pytestmark = pytest.mark.usefixtures("elsewhere")

PROMPT = "a large red circle moves from left to right on a gray background"
SHORT = ("--model", "shapes-wan", "--steps", "2", "--seed", "7", "--threads", "1")


def decoded(path: str) -> tuple[float, np.ndarray]:
    """The rate and the pictures of an MP4."""
    with av.open(path) as container:
        (stream,) = container.streams.video
        assert stream.average_rate is not None
        return float(stream.average_rate), np.stack([f.to_ndarray(format="rgb24") for f in container.decode(stream)])


def test_an_mp4_and_its_poster(capsys: pytest.CaptureFixture[str]) -> None:
    """On two ranks, of which one writes: a failure under a plan would be a file that both write, or none."""
    size = ("--frames", "5", "--fps", "12.5", "--height", "32", "--width", "48")
    assert main.main(["generate", PROMPT, *SHORT, *size, "--pipefusion", "2", "--out", "a.mp4", "--json", "-"]) == 0
    rate, pictures = decoded("a.mp4")
    assert rate == 12.5 and pictures.shape == (5, 32, 48, 3)
    poster = opened("a.png")
    texts = poster.text  # type: ignore[attr-defined]
    assert texts["prompt"] == PROMPT and (texts["seed"], texts["frames"], texts["fps"]) == ("7", "5", "12.5")
    assert texts["plan"] == "pipefusion=2" and json.loads(texts["settings"])["num_frames"] == 5
    # x264 keeps pictures closely, at half the resolution of colour.
    assert np.abs(np.asarray(poster).astype(float) - pictures[0]).mean() < 8
    found = json.loads(capsys.readouterr().out)
    assert (found["images"], found["videos"]) == (["a.png"], ["a.mp4"])
    assert sorted(path.name for path in Path().iterdir()) == ["a.mp4", "a.png"]


def test_the_bundled_model_draws_its_caption() -> None:
    """On two ranks with stale keys. A failure would mean weights, or an exchange, that are not those of the model."""
    words = ("--model", "shapes-wan", "--seed", "7", "--threads", "1", "--pipefusion", "2", "--patches", "2")
    assert main.main(["generate", PROMPT, *words]) == 0
    assert judge_clip(decoded("ditile-video.mp4")[1], PROMPT).all_right


@pytest.mark.parametrize(("name", "ends"), [("a.gif", 310), ("a.webp", 312)])
def test_an_animation_by_its_name(name: str, ends: int) -> None:
    """Its frames stay for as long as the rate says, which is not a whole number of the format's units."""
    video = np.random.default_rng(0).integers(0, 255, (5, 8, 8, 3), np.uint8)
    results.write_drawn(video, name, 16.0, {"prompt": "a"})
    with Image.open(name) as image:
        durations = []
        for frame in range(image.n_frames):  # type: ignore[attr-defined]
            image.seek(frame)
            image.load()
            durations.append(image.info["duration"])
            if name.endswith("webp"):
                assert np.array_equal(np.asarray(image.convert("RGB")), video[frame])
    assert len(durations) == 5 and sum(durations) == ends
    assert np.array_equal(np.asarray(opened("a.png")), video[0])


def image_to_video() -> diffusers.WanImageToVideoPipeline:
    """A tiny pipeline of the class, with the text encoder and the VAE of the bundled model."""
    pipe: Any = ditile.load("shapes-wan")
    channels = pipe.vae.config.z_dim
    config = dict(pipe.transformer.config) | {"in_channels": 2 * channels + 4, "num_layers": 2}
    transformer = tiny.randomise(diffusers.WanTransformer3DModel.from_config(config))
    parts = {name: getattr(pipe, name) for name in ("tokenizer", "text_encoder", "vae", "scheduler")}
    return diffusers.WanImageToVideoPipeline(**parts, transformer=transformer)


def test_a_video_from_a_picture(capsys: pytest.CaptureFixture[str]) -> None:
    """A failure would mean that the class, which takes a picture itself, is looked for by another's name."""
    image_to_video().save_pretrained("model")
    Image.new("RGB", (64, 64), (200, 30, 30)).save("start.png")
    words = ("generate", PROMPT, "--model", "model", "--steps", "2", "--height", "32", "--width", "32", "--frames", "5")
    assert "WanImageToVideoPipeline cannot start without --image FILE" in refused(capsys, *words)
    assert main.main([*words, "--image", "start.png", "--threads", "1"]) == 0
    rate, pictures = decoded("ditile-video.mp4")
    assert rate == videos.DEFAULT_FPS and pictures.shape == (5, 32, 32, 3)
    Image.new("RGB", (64, 64), (30, 30, 200)).save("end.png")
    words = (*words, "--image", "start.png", "--last-image", "end.png", "--out", "both.mp4", "--threads", "1")
    assert main.main([*words]) == 0 and not np.array_equal(decoded("both.mp4")[1], pictures)


def test_frames_and_rate_under_the_names_of_every_class() -> None:
    """`--frames` and `--fps` reach each class of diffusers by the names that its call has."""
    wanted = GenerateOptions(prompt="a", frames=17, fps=24)
    names = {
        "WanPipeline": {"num_frames": 17},
        "SanaVideoPipeline": {"frames": 17},
        "LTXPipeline": {"num_frames": 17, "frame_rate": 24},
        "LattePipeline": {"video_length": 17},
    }
    for name, expected in names.items():
        call = collect_call_facts(getattr(diffusers, name)).merge_arguments(wanted, {})
        assert {key: value for key, value in call.items() if key != "prompt"} == expected, name
    alone = GenerateOptions(image=("start.png",), frames=17, fps=7)
    call = collect_call_facts(diffusers.StableVideoDiffusionPipeline).merge_arguments(alone, {})
    assert call == {"num_frames": 17, "fps": 7}, "of a picture alone"
    with pytest.raises(ModelError, match="LTXImageToVideoPipeline needs a prompt too; give a PROMPT"):
        collect_call_facts(diffusers.LTXImageToVideoPipeline).merge_arguments(alone, {})
    assert find_frame_rate(diffusers.LTXPipeline, {}) == 25 and find_frame_rate(diffusers.WanPipeline, {}) is None


@pytest.mark.parametrize(("own", "fps", "rate"), [({}, 7, 7), ({"frame_rate": 30}, None, 30)])
def test_the_rate_of_a_model_reaches_its_call(tmp_path: Path, own: dict[str, int], fps: int | None, rate: int) -> None:
    """A failure: a sound, or motion, is computed for another rate than that of the file."""
    (tmp_path / "model_index.json").write_text("{}")
    (tmp_path / "generation.json").write_text('{"fps": 12}')
    wanted = GenerateOptions(prompt="a", model=str(tmp_path), fps=fps)
    assert arguments.build_call_arguments(ZOO["ltx"].make(), wanted, own)["frame_rate"] == rate


def test_sizes_beyond_the_rotary_table_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A failure: a traceback from within the model, behind a load that takes minutes."""
    for size, said in (("--height", "height=512"), ("--width", "width=512"), ("--frames", "num_frames=253")):
        assert main.main(["generate", PROMPT, *SHORT, size, "1025" if size == "--frames" else "1088"]) == 2
        error = capsys.readouterr().err
        assert "is more than the rotary table of WanTransformer3DModel has rows for" in error and said in error
