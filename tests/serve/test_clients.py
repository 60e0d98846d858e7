"""Clients against servers: OpenAI's own and what real ranks generate for it, and the examples.

A failure means that a program which people use does not work with `ditile serve`.
"""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from PIL import Image

from ditile.cli import main
from tests.serve.running import PIXART_FILE, PIXART_FLAGS, RunningServer
from tests.serve.servers import connect_openai, open_picture, serve_painted

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
    """As the command with the same cache and steps; the next request has the server's own settings again.

    Where no steps are given, the server takes the model's 20, and the command the 48 of the finer run.
    """
    words = ["generate", PROMPT, *COMMANDS["flux_server"], "--seed", "7", "--cache-line", "steps=8"]
    body = {"prompt": PROMPT, "seed": 7}

    def post(**fields: float) -> Image.Image:
        answer = client.post("/v1/images/generations", json=body | fields)
        return open_picture(answer.json()["data"][0]["b64_json"])

    with flux_server.client() as client:
        plain = post().tobytes()
        drawn = {plain}
        for flags, fields in ((["--steps", "20"], {}), ([], {"num_inference_steps": 48})):
            out = tmp_path / f"{len(drawn)}.png"
            assert main.main([*words, *flags, "--out", str(out)]) == 0
            fewer = post(computed_steps=8, **fields)
            assert fewer.tobytes() == Image.open(out).tobytes()
            assert json.loads(fewer.info["promise"]) == {"computed_steps": 8}
            drawn.add(fewer.tobytes())
        assert len(drawn) == 3
        assert post().tobytes() == plain
        refusal = client.post("/v1/images/generations", json=body | {"min_psnr": 40})
        assert "not what stale keys of 'pipefusion=2' lose" in refusal.json()["error"]["message"]


def test_a_video_from_its_request_to_its_end(wan_server: RunningServer) -> None:
    """Created as a form, polled, fetched, and drawn anew with another prompt; of real ranks the files are real too."""
    with connect_openai(wan_server.url) as client:
        videos = client.videos
        video = videos.create(prompt=PROMPT, seconds="1", size="64x64", model="sora-2", extra_body=FAST)
        video = videos.poll(video.id)
        assert (video.status, video.progress, video.size) == ("completed", 100, "64x64")
        content = videos.download_content(video.id)
        assert content.response.headers["content-type"] == "video/mp4" and content.read()[4:8] == b"ftyp"
        # Of 9 frames, four are in a row of the sheet.
        for variant, size in (("thumbnail", (64, 64)), ("spritesheet", (4 * 64, 3 * 64))):
            assert Image.open(io.BytesIO(videos.download_content(video.id, variant=variant).read())).size == size
        remix = videos.remix(video.id, prompt="a small blue square on the left on a gray background")
        assert videos.poll(remix.id).remixed_from_video_id == video.id


WRITTEN = {
    ("openai_client.py", "flux"): {"image.png", "edit.png", "streamed.png"},
    ("openai_client.py", "wan"): {"video.mp4", "video.png"},
    ("serve_curl.sh", "flux"): {"curl-image.png"},
    ("serve_curl.sh", "wan"): {"curl-video.mp4"},
}


@pytest.mark.parametrize(("example", "name"), WRITTEN)
def test_an_example_runs(example: str, name: str, tmp_path: Path) -> None:
    """On ranks that paint: the form of requests and answers does not depend on what is generated."""
    is_script = example.endswith(".sh")
    if is_script and not all(map(shutil.which, ("bash", "curl", "jq"))):
        pytest.skip("bash, curl or jq is not here")
    with serve_painted(tmp_path / "state", f"shapes-{name}") as server:
        words = ["bash", str(EXAMPLES / example), server.url]
        if not is_script:
            words = [sys.executable, "-W", "ignore", str(EXAMPLES / example), "--address", server.url, "--out", "."]
        ran = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert WRITTEN[example, name] <= {path.name for path in tmp_path.iterdir() if path.stat().st_size}
