"""Clients against servers: OpenAI's own and what real ranks generate for it, the examples, and the requests of Open
WebUI as they were recorded.

A failure means that a program which people use does not work with `ditile serve`.
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from PIL import Image

from ditile.cli import main
from tests.serve.running import PIXART_FILE, PIXART_FLAGS, RunningServer
from tests.serve.servers import Served, serve_painted

# Of the client: it warns of what OpenAI itself ends.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The Sora API:DeprecationWarning", "ignore:deprecated:DeprecationWarning"
)
PROMPT = "a large red circle on the left on a gray background"
EXAMPLES = Path(__file__).parents[2] / "examples"
FAST = {"num_inference_steps": 4, "seed": 7}
COMMANDS = {
    "flux_server": ("--model", "shapes-flux", "--pipefusion", "2"),
    "pixart_server": ("--model", "shapes-pixart", *PIXART_FLAGS),
}
"""What `ditile generate` is told to do as a server does."""
OPEN_WEBUI_HEADERS = {
    "Authorization": "Bearer none",
    "Content-Type": "application/json",
    "X-OpenWebUI-User-Name": "Ann",
    "X-OpenWebUI-User-Id": "7d1c",
    "X-OpenWebUI-User-Email": "ann@example.org",
    "X-OpenWebUI-User-Role": "user",
}


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Ranks that paint: the form of requests and answers does not depend on what is generated."""
    with serve_painted(tmp_path_factory.mktemp("flux"), "shapes-flux") as served:
        yield served


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve_painted(tmp_path_factory.mktemp("wan"), "shapes-wan") as served:
        yield served


@pytest.fixture
def videos(wan_server: RunningServer) -> Iterator[openai.OpenAI]:
    yield from connect_client(wan_server)


def connect_client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with httpx.Client(trust_env=False, timeout=120) as transport:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=transport)


def decode_picture(encoded: str | None) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(encoded or "")))


def encode_picture(mode: str = "RGB", colour: Any = "blue", size: tuple[int, int] = (128, 128)) -> bytes:
    encoded = io.BytesIO()
    Image.new(mode, size, colour).save(encoded, format="PNG")
    return encoded.getvalue()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_picture_is_that_of_the_command(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """By either path, and after a client has left; the metrics know of both, and of every rank."""
    out = tmp_path / "expected.png"
    assert main.main(["generate", PROMPT, *COMMANDS[name], "--steps", "4", "--seed", "7", "--out", str(out)]) == 0
    server: RunningServer = request.getfixturevalue(name)
    with server.client() as client:
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/images/generations", json={"prompt": PROMPT, "num_inference_steps": 200}, timeout=1)
        answer = client.post("/v1/images/generations", json={"prompt": PROMPT, **FAST}).json()
        assert base64.b64decode(answer["data"][0]["b64_json"]) == out.read_bytes()
        assert answer["size"] == "128x128" and 0 < answer["inference_time_s"] < 60
        metrics = client.get("/metrics").text
        components = client.get("/v1/plan").json().get("components", {})
        if name == "pixart_server":
            assert components["transformer"].startswith(PIXART_FILE.name)
    for sample in ('jobs_ended_total{kind="image",state="cancelled"}', 'peak_memory_bytes{group="0",rank="1"}'):
        assert re.search(rf"^ditile_{re.escape(sample)} [1-9]", metrics, re.MULTILINE), metrics


def test_a_request_says_how_many_steps_compute(flux_server: RunningServer, tmp_path: Path) -> None:
    """As the command with the same cache; the next request has the server's own settings again."""
    out = tmp_path / "expected.png"
    words = ["generate", PROMPT, *COMMANDS["flux_server"], "--seed", "7"]
    assert main.main([*words, "--cache-line", "steps=8", "--out", str(out)]) == 0
    body = {"prompt": PROMPT, "seed": 7}

    def post(**bounds: float) -> Image.Image:
        answer = client.post("/v1/images/generations", json=body | bounds)
        return decode_picture(answer.json()["data"][0]["b64_json"])

    with flux_server.client() as client:
        plain = post().tobytes()
        fewer = post(computed_steps=8)
        assert fewer.tobytes() == Image.open(out).tobytes() != plain
        assert json.loads(fewer.info["promise"]) == {"computed_steps": 8}
        assert post().tobytes() == plain
        refusal = client.post("/v1/images/generations", json=body | {"min_psnr": 40})
        assert "not what stale keys of 'pipefusion=2' lose" in refusal.json()["error"]["message"]


# OpenAI's client.


def test_a_video_from_its_request_to_its_end(videos: openai.OpenAI) -> None:
    """Created as a form, polled, fetched, drawn anew with another prompt, listed and deleted."""
    video = videos.videos.create(prompt=PROMPT, seconds="1", size="64x64", model="sora-2", extra_body=FAST)  # type: ignore[call-overload]
    assert (video.object, video.status, video.model, video.prompt) == ("video", "queued", "sora-2", PROMPT)
    video = videos.videos.poll(video.id)
    assert (video.status, video.progress, video.size) == ("completed", 100, "64x64")
    content = videos.videos.download_content(video.id)
    assert content.response.headers["content-type"] == "video/mp4" and content.read()[4:8] == b"ftyp"
    thumbnail = videos.videos.download_content(video.id, variant="thumbnail").read()
    assert Image.open(io.BytesIO(thumbnail)).size == (64, 64)
    sheet = videos.videos.download_content(video.id, variant="spritesheet").read()
    assert Image.open(io.BytesIO(sheet)).size == (4 * 64, 3 * 64), "9 frames, four in a row"
    remix = videos.videos.remix(video.id, prompt="a small blue square on the left on a gray background")
    assert videos.videos.poll(remix.id).remixed_from_video_id == video.id
    listed = [one.id for one in videos.videos.list(limit=2)]
    assert listed[:2] == [remix.id, video.id]
    for one in (remix, video):
        assert videos.videos.delete(one.id).deleted
    with pytest.raises(openai.NotFoundError):
        videos.videos.retrieve(video.id)


@pytest.mark.parametrize("name", ["flux", "wan"])
def test_the_example_of_the_client_runs(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    server: Served = request.getfixturevalue(name)
    command = [sys.executable, "-W", "ignore", str(EXAMPLES / "openai_client.py"), "--address", server.url]
    ran = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    written = {path.name for path in tmp_path.iterdir()}
    expected = {"flux": {"image.png", "edit.png", "streamed.png"}, "wan": {"video.mp4", "video.png"}}
    assert expected[name] <= written


@pytest.mark.parametrize("name", ["flux", "wan"])
def test_the_example_of_curl_runs(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if any(not find_program(tool) for tool in ("bash", "curl", "jq")):
        pytest.skip("bash, curl or jq is not here")
    server: Served = request.getfixturevalue(name)
    command = ["bash", str(EXAMPLES / "serve_curl.sh"), server.url]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (tmp_path / {"flux": "curl-image.png", "wan": "curl-video.mp4"}[name]).stat().st_size > 0


def find_program(name: str) -> bool:
    return any((Path(folder) / name).exists() for folder in os.environ["PATH"].split(os.pathsep))


# Open WebUI, engine "openai", routers/images.py of 0.12.4.


@pytest.mark.parametrize("field", ["image", "image[]"])
def test_open_webui_edits(flux: Served, field: str) -> None:
    body = {"model": "gpt-image-1", "prompt": PROMPT, "n": "1", "size": "128x128", "background": "auto"}
    headers = {name: value for name, value in OPEN_WEBUI_HEADERS.items() if name != "Content-Type"}
    files = {field: ("image.png", encode_picture(), "image/png")}
    answer = flux.client.post("/v1/images/edits", data=body, files=files, headers=headers)
    assert answer.status_code == 200, answer.text
    assert decode_picture(answer.json()["data"][0]["b64_json"]).size == (128, 128)
