"""The sound of videos in their MP4, and pipelines of sound alone as WAV.

A failure would mean a video that is mute, or whose sound ends before it, or minutes of denoising without a file.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import av
import diffusers
import numpy as np
import pytest
import torch

from ditile import ModelError, Plan, parallelize
from ditile.cli import main
from ditile.runner.requests import results, videos
from ditile.runner.requests.cache_options import CacheOptions
from ditile.runner.requests.facts import collect_call_facts
from ditile.runner.requests.options import GenerateOptions
from ditile.runner.sounds import Sound, find_sample_rate, list_sounds
from ditile.serve import worker
from ditile.serve.jobs import Request
from ditile.serve.link import BatchJob, WorkerSetup
from ditile.serve.options import ServeOptions
from tests import tiny
from tests.cli.test_cli import refused
from tests.pool import Pool, on_ranks
from tests.serve.test_warm_up import Answers
from tests.zoo import ZOO, sounds

pytestmark = pytest.mark.usefixtures("elsewhere")

RATE = 16_000


def ltx_2() -> Any:
    """The tiny LTX-2, with a vocoder that makes as many samples as its spectrograms describe."""
    pipe = ZOO["ltx-2"].make()
    vocoder = diffusers.pipelines.ltx2.LTX2Vocoder(
        in_channels=16, hidden_channels=8, upsample_kernel_sizes=[16, 11, 8], upsample_factors=[8, 5, 4],
        resnet_kernel_sizes=[3], resnet_dilations=[[1]], output_sampling_rate=RATE,
    )  # fmt: skip
    pipe.register_modules(vocoder=tiny.randomise(vocoder, gain=1.0).eval())
    return pipe


def call(**changes: Any) -> dict[str, Any]:
    return ZOO["ltx-2"].call() | {"num_inference_steps": 2, "output_type": "np"} | changes


def noise(channels: int, samples: int) -> Sound:
    return Sound(np.random.default_rng(0).uniform(-0.5, 0.5, (channels, samples)).astype(np.float32), RATE)


def measure_seconds(stream: Any) -> float:
    return float(stream.duration * stream.time_base)


def check_streams(path: str, frames: int, fps: float, channels: int) -> None:
    """Check that both streams last as long as the frames, as PyAV and ffprobe see them."""
    with av.open(path) as container:
        (video,) = container.streams.video
        (audio,) = container.streams.audio
        assert (audio.codec_context.name, audio.rate, audio.channels) == ("aac", RATE, channels)
        for stream in (video, audio):
            assert abs(measure_seconds(stream) - frames / fps) < 1 / fps
        assert json.loads(container.metadata["comment"])["prompt"] == "a"
    if shutil.which("ffprobe"):
        words = ("ffprobe", "-v", "error", "-show_streams", "-of", "json", path)
        found = json.loads(subprocess.run(words, capture_output=True, check=True).stdout)["streams"]
        assert [stream["codec_type"] for stream in found] == ["video", "audio"]
        assert found[1]["sample_rate"] == str(RATE)
        for stream in found:
            assert abs(float(stream["duration"]) - frames / fps) < 1 / fps


def test_a_video_keeps_the_sound_of_its_pipeline() -> None:
    pipe = ltx_2()
    result = pipe(**call())
    ((video, sound),) = results.list_outputs(pipe, result)
    assert isinstance(video, np.ndarray) and sound is not None and sound.rate == RATE
    assert np.array_equal(sound.samples, result.audio[0].detach().numpy()) and sound.samples.std() > 0
    results.write_drawn(video, "a.mp4", 24.0, {"prompt": "a"}, sound)
    check_streams("a.mp4", len(video), 24.0, 2)


@pytest.mark.parametrize("seconds", [0.2, 12.0, 31.5])
@pytest.mark.parametrize("channels", [1, 2])
def test_a_sound_is_as_long_as_its_picture(channels: int, seconds: float) -> None:
    """One that is too long is cut, and one that is too short is followed by silence, not by an early end."""
    video = np.zeros((100, 16, 16, 3), np.uint8)
    sound = noise(channels, round(seconds * RATE))
    results.write_drawn(video, "a.mp4", 8.0, {"prompt": "a"}, sound)
    check_streams("a.mp4", 100, 8.0, channels)
    with av.open("a.mp4") as container:
        samples = np.concatenate([frame.to_ndarray() for frame in container.decode(audio=0)], axis=1)
    heard = round(min(seconds, 12.5) * RATE)
    assert np.abs(samples[:, : heard // 2]).mean() > 0.1
    # The codec rings for a frame of its own.
    assert np.abs(samples[:, heard + 2048 : round(12.5 * RATE)]).max(initial=0) < 0.01


@pytest.mark.parametrize(
    ("sound", "says"),
    [
        (noise(2, 0), "a sound of 2 x 0 samples at 16000 Hz is empty"),
        (noise(6, 9), "has 6 channels, and 1 or 2 are written"),
        (Sound(np.full((1, 3), np.nan, np.float32), RATE), "a sound of 1 x 3 samples at 16000 Hz has 3 that are NaN"),
        (Sound(np.zeros((1, 3), np.float32), 0), "its pipeline does not tell the sample rate"),
    ],
)
def test_what_cannot_be_heard_is_refused(sound: Sound, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        videos.encode_video(np.zeros((2, 16, 16, 3), np.uint8), "mp4", 8.0, {}, sound)
    with pytest.raises(ModelError, match=says):
        results.write_drawn(sound, "a.wav", 8.0, {})
    assert not Path("a.wav").exists()


def test_a_rate_that_aac_lacks() -> None:
    video = np.zeros((80, 16, 16, 3), np.uint8)
    for rate, kept in ((30_000, 32_000), (44_100, 44_100)):
        results.write_drawn(video, "a.mp4", 16.0, {}, Sound(noise(2, 5 * rate).samples, rate))
        with av.open("a.mp4") as container:
            (stream,) = container.streams.audio
            assert stream.rate == kept and abs(measure_seconds(stream) - 5) < 1 / 16
    with pytest.raises(ModelError, match="a sound at 40 Hz: AAC holds 8000 to 96000 Hz; name the video"):
        videos.encode_video(video, "mp4", 16.0, {}, Sound(noise(1, 9).samples, 40))


@on_ranks(2)
def test_replicas_and_stages_keep_the_sound() -> None:
    """Only the first rank has a result: a failure there would be a video whose sound another rank has."""
    text = {name: value.repeat(2, 1, 1) if value.ndim == 3 else value.repeat(2, 1) for name, value in text_of().items()}
    pipe = ltx_2()
    expected = [sound.samples for sound in list_sounds(pipe, pipe(**call(**text)))]
    for plan in (Plan(data=2), Plan(pipefusion=2, warmup=2)):
        pipe = ltx_2()
        runner = parallelize(pipe, plan)
        result = runner(**call(**text), output_on="first")
        found = [sound.samples for sound in list_sounds(pipe, result)]
        assert len(found) == (2 if runner.mesh.rank == 0 else 0)
        for sound, own in zip(found, expected, strict=False):
            np.testing.assert_allclose(sound, own, rtol=1e-4, atol=1e-5)


def text_of() -> dict[str, torch.Tensor]:
    return {name: value for name, value in call().items() if isinstance(value, torch.Tensor)}


def test_rates_of_pipelines() -> None:
    """A vocoder's own rate comes before that of the spectrograms, which it may exceed."""
    rates = {name: find_sample_rate(ZOO[name].make()) for name in ("kandinsky-6", "ace-step", "stable-audio-3")}
    assert rates == {"kandinsky-6": 800, "ace-step": 40, "stable-audio-3": 16}
    pipe = ltx_2()
    pipe.vocoder.register_to_config(output_sampling_rate=24_000)
    assert find_sample_rate(pipe) == 24_000


def test_a_pipeline_of_sound_writes_a_wav(capsys: pytest.CaptureFixture[str]) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sounds.ace_step().save_pretrained("model")
    capsys.readouterr()
    words = ("generate", "a large red circle", "--model", "model", "--steps", "2", "--seed", "7")
    assert "this model makes sounds; name it a.wav" in refused(capsys, *words, "--out", "a.mp4")
    assert "makes sounds, which have no rate" in refused(capsys, *words, "--fps", "8")
    assert main.main([*words, "--threads", "1", "--json", "-"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["images"], summary["sounds"]) == ([], ["ditile-sound.wav"])
    with av.open("ditile-sound.wav") as container:
        (stream,) = container.streams.audio
        texts = json.loads(container.metadata["comment"])
        assert stream.rate == 40 and next(container.decode(stream)).samples
    assert (texts["prompt"], texts["seed"], texts["plan"]) == ("a large red circle", "7", "pipefusion=1")
    Path("prompts.txt").write_text("a circle\na square\n")
    words = ("generate", "--prompts-file", "prompts.txt", "--model", "model", "--steps", "2", "--threads", "1")
    for skipped in (0, 2):
        assert main.main([*words, "--json", "-"]) == 0
        assert json.loads(capsys.readouterr().out)["skipped"] == skipped


def serve_sounds(rates: list[int]) -> list[tuple[dict[str, Any], Any]]:
    """The last answers of a server's rank to requests whose videos come with sounds of some rates."""
    link = Answers()
    options = ServeOptions(model="shapes-wan", device="cpu")
    server = worker.RankWorker(WorkerSetup(options=options, plan=Plan(), cache=CacheOptions()), link)
    answers = []
    for rate in rates:

        def list_with_sound(pipe: Any, result: Any, rate: int = rate) -> Any:
            return [(video, Sound(noise(2, RATE).samples, rate)) for video in results.list_drawn(pipe, result)]

        wanted = GenerateOptions(model="shapes-wan", prompt="a red circle", seed=1, steps=1, frames=5)
        server._running_id = "batch"
        with mock.patch.object(worker, "list_outputs", list_with_sound):
            server._generate_batch([BatchJob("video_x", Request(options=wanted, output_format="mp4"))])
        answers += link.sent[-1:]
    return answers


def test_a_server_answers_a_video_with_its_sound(pool: Pool) -> None:
    """A failure would mean mute videos from a server, or ranks that end because of a sound that cannot be written."""
    [[(done, files), (refused, _)]] = pool.run(serve_sounds, 1, [RATE, 40])
    assert done["kind"] == "done", done
    with av.open(io.BytesIO(files["0.mp4"])) as container:
        (stream,) = container.streams.audio
        fps = done["result"]["fps"]
        assert abs(measure_seconds(stream) - 5 / fps) < 1 / fps
    assert refused["kind"] == "failed" and "a sound at 40 Hz: AAC" in refused["failure"]["message"]


@pytest.mark.parametrize(
    ("name", "argument"),
    [("stable-audio", "audio_end_in_s"), ("stable-audio-3", "duration"), ("ace-step", "audio_duration"),
     ("longcat-audio", "audio_duration_s")],
)  # fmt: skip
def test_a_sound_has_the_length_that_is_asked_for(name: str, argument: str) -> None:
    """Under the name of its class; a class of videos or images has none."""
    facts = collect_call_facts(type(ZOO[name].make()))
    request = GenerateOptions(model="model", prompt="rain", sound_seconds=2.5)
    assert facts.merge_arguments(request, {})[argument] == 2.5
    with pytest.raises(ModelError, match="FluxPipeline takes no --sound-seconds"):
        collect_call_facts(diffusers.FluxPipeline).merge_arguments(request, {})
