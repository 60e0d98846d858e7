"""Pictures and videos of real ranks over HTTP: what OpenAI's client gets is what `ditile generate` draws."""

from __future__ import annotations

import base64
import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from PIL import Image

from ditile.cli import main
from ditile.plan.plan import Plan
from ditile.runner.requests.cache_options import CacheOptions
from ditile.serve.link import WorkerSetup
from ditile.serve.options import ServeOptions
from ditile.serve.replica import LocalReplica
from tests.serve.servers import PROMPT, Served, read_error, read_metric, serve_groups

SETTINGS = {"seed": 5, "num_inference_steps": 4}
WORDS = ["--seed", "5", "--steps", "4"]


@contextlib.contextmanager
def serve_model(folder: Path, model: str, plan: str, **cache: Any) -> Iterator[tuple[Served, openai.OpenAI]]:
    """A server with ranks of its own, and the client of OpenAI."""
    options = ServeOptions(model=model, port=0, state=str(folder / "state"))

    def make_replica(name: str, tell: Any) -> LocalReplica:
        setup = WorkerSetup(
            model=model, engine=options, plan=Plan.parse(plan), cache=CacheOptions(**cache), lora_dir=None, max_loras=1
        )
        return LocalReplica(name, setup, tell)

    with serve_groups(options, make_replica) as served, httpx.Client(trust_env=False, timeout=120) as transport:
        url = f"{served.url}/v1"
        yield served, openai.OpenAI(base_url=url, api_key="none", max_retries=0, http_client=transport)


def generate(folder: Path, *words: str) -> bytes:
    """The file that `ditile generate` writes."""
    out = folder / "expected.png"
    assert main.main(["generate", PROMPT, *WORDS, *words, "--out", str(out)]) == 0
    return out.read_bytes()


def ask_as_other_clients(served: Served, expected: bytes) -> None:
    """Requests of Open WebUI's two engines, with what its admin adds to them."""
    values = {
        "model": "gpt-image",
        "prompt": PROMPT,
        "n": 1,
        "size": "128x128",
        "response_format": "b64_json",
        **SETTINGS,
    }
    headers = {"authorization": "Bearer none", "x-openwebui-user-name": "ann"}
    answer = served.post("/v1/images/generations?api-version=2025-04-01-preview", values, headers=headers).json()
    assert base64.b64decode(answer["data"][0]["b64_json"]) == expected
    values = {"prompt": PROMPT, "batch_size": 1, "width": 128, "height": 128, "steps": 4, "seed": 5}
    answer = served.post("/sdapi/v1/txt2img", values).json()
    assert base64.b64decode(answer["images"][0]) == expected


@pytest.mark.parametrize(
    ("model", "plan", "cache"),
    [
        ("shapes-flux", "pipefusion=2", {}),
        ("shapes-pixart", "cfg=2", {"cache": True, "max_warmup_steps": 1, "rdt": 0.5}),
    ],
)
def test_a_picture_is_that_of_the_command(tmp_path: Path, model: str, plan: str, cache: dict[str, Any]) -> None:
    name, value = plan.split("=")
    flags = ["--cache", "--max-warmup-steps", "1", "--rdt", "0.5"] if cache else []
    expected = generate(tmp_path, "--model", model, f"--{name}", value, *flags)
    with serve_model(tmp_path, model, plan, **cache) as (served, client):
        for count in (1, 2, 1):
            answer = client.images.generate(prompt=PROMPT, n=count, extra_body=SETTINGS)
            assert answer.data is not None and len(answer.data) == count
            if count == 1:
                assert base64.b64decode(answer.data[0].b64_json or "") == expected
        events: list[Any] = list(client.images.generate(prompt=PROMPT, stream=True, extra_body=SETTINGS))
        assert events[-1].type == "image_generation.completed" and base64.b64decode(events[-1].b64_json) == expected
        with pytest.raises(httpx.ReadTimeout):
            served.client.post("/v1/images/generations", json={"prompt": PROMPT, "num_inference_steps": 200}, timeout=1)
        again = served.post("/v1/images/generations", {"prompt": PROMPT, **SETTINGS}).json()
        assert base64.b64decode(again["data"][0]["b64_json"]) == expected
        ask_as_other_clients(served, expected)
        assert again["size"] == "128x128" and 0 < again["inference_time_s"] < 60
        metrics = served.service.metrics
        assert (
            read_metric(metrics, "ditile_jobs_ended_total", kind="image", state="cancelled") == 1
            and read_metric(metrics, "ditile_jobs_ended_total", kind="image", state="done") == 7
        )
        assert read_metric(metrics, "ditile_peak_memory_bytes", group="0", rank="1") > 0
        answer = served.post("/v1/images/generations", {"prompt": PROMPT, "size": "100x100"})
        assert answer.status_code == 422 and "try height=" in read_error(answer)["message"]


@pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")
def test_a_video_of_real_ranks(tmp_path: Path) -> None:
    with serve_model(tmp_path, "shapes-wan", "ulysses=2") as (_, client):
        video = client.videos.create(prompt=PROMPT, seconds="1", extra_body=SETTINGS | {"output_format": "gif"})
        assert (video.size, video.seconds) == ("64x64", "1.125")
        video = client.videos.poll(video.id, poll_interval_ms=100)
        assert video.status == "completed", video.error
        film: Any = Image.open(io.BytesIO(client.videos.download_content(video.id).read()))
        assert (film.format, film.size) == ("GIF", (64, 64)) and film.n_frames > 1
        poster = Image.open(io.BytesIO(client.videos.download_content(video.id, variant="thumbnail").read()))
        sheet = Image.open(io.BytesIO(client.videos.download_content(video.id, variant="spritesheet").read()))
        assert sheet.size[0] % poster.size[0] == sheet.size[1] % poster.size[1] == 0
        assert sheet.size > poster.size
        assert poster.size == (64, 64)
        remix = client.videos.poll(client.videos.remix(video.id, prompt="a small blue square").id, poll_interval_ms=100)
        assert (remix.status, remix.remixed_from_video_id) == ("completed", video.id)


def test_an_edit_of_real_ranks(tmp_path: Path) -> None:
    start = tmp_path / "start.png"
    Image.new("RGB", (128, 128), "blue").save(start)
    words = ["--model", "shapes-flux", "--pipefusion", "2", "--image", str(start), "--strength", "0.5"]
    expected = generate(tmp_path, *words)
    with serve_model(tmp_path, "shapes-flux", "pipefusion=2") as (_, client):
        answer = client.images.edit(
            image=("start.png", start.read_bytes(), "image/png"), prompt=PROMPT, extra_body=SETTINGS | {"strength": 0.5}
        )
        assert answer.data is not None
        assert base64.b64decode(answer.data[0].b64_json or "") == expected
