"""Videos over HTTP: jobs by OpenAI's client, their progress, files, list, remix and end."""

import base64
import time
from collections.abc import Iterator

import openai
import pytest

from tests.serve.servers import PROMPT, Served, paint_picture, read_error, serve_painted

pytestmark = [
    pytest.mark.usefixtures("full_pace"),
    pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve_painted(tmp_path_factory.mktemp("state"), "shapes-wan", max_frames=33) as served:
        yield served


def test_create_poll_and_download(served: Served, client: openai.OpenAI) -> None:
    served.group.pace = 0.05
    video = client.videos.create(prompt=PROMPT, model="sora-2", seconds="4", size="64x128", extra_body={"seed": 3})
    assert (video.status, video.object, video.progress, video.seconds) == ("queued", "video", 0, "4.125")
    assert (video.size, video.model, video.prompt, video.error) == ("64x128", "sora-2", PROMPT, None)
    seen = {client.videos.retrieve(video.id).progress for _ in range(40) if time.sleep(0.005) is None}
    assert len(seen) > 2 and max(seen) <= 100
    waiting = served.client.get(f"/v1/videos/{video.id}")
    video = client.videos.poll(video.id)
    assert (video.status, video.progress) == ("completed", 100) and video.completed_at and video.expires_at
    assert waiting.json()["status"] == "completed" or int(waiting.headers["openai-poll-after-ms"]) > 0
    options = served.group.batches[-1].jobs[0].request.options
    assert (options.width, options.height, options.frames, options.seed) == (64, 128, 33, 3)
    assert client.videos.download_content(video.id).read() == paint_picture((64, 128), 3, "mp4")
    poster = client.videos.download_content(video.id, variant="thumbnail")
    assert poster.read() == paint_picture((64, 128), 1) and poster.response.headers["content-type"] == "image/png"
    assert client.videos.download_content(video.id, variant="spritesheet").read()


def test_list_remix_and_delete(served: Served, client: openai.OpenAI) -> None:
    first = client.videos.create_and_poll(prompt=PROMPT, extra_body={"num_frames": 5, "fps": 4, "seed": 11})
    assert first.seconds == "1.25"
    second = client.videos.remix(first.id, prompt="a blue square")
    assert second.remixed_from_video_id == first.id and second.prompt == "a blue square"
    assert client.videos.poll(second.id).status == "completed"
    third = served.post(f"/v1/videos/{first.id}/remix", {"prompt": "a ring", "seconds": "8"}).json()
    assert third["warnings"] == ["'seconds' is not known here, and was ignored"]
    assert served.client.delete(f"/v1/videos/{third['id']}").status_code == 200
    assert (
        "takes 8192; shorten it"
        in read_error(served.post(f"/v1/videos/{first.id}/remix", {"prompt": "a" * 9000}))["message"]
    )
    options = served.group.batches[-1].jobs[0].request.options
    assert (options.seed, options.frames, options.fps) == (11, 5, 4)
    page = client.videos.list(limit=1)
    assert [video.id for video in page.data] == [second.id] and page.has_more
    assert [video.id for video in client.videos.list(limit=1, after=second.id).data] == [first.id]
    oldest = client.videos.list(limit=100, order="asc").data
    assert [video.id for video in oldest[-2:]] == [first.id, second.id]
    deleted = client.videos.delete(second.id)
    assert deleted.deleted and deleted.object == "video.deleted"
    with pytest.raises(openai.NotFoundError):
        client.videos.retrieve(second.id)


def test_refusals(served: Served) -> None:
    def ask(**values: object) -> str:
        answer = served.post("/v1/videos", {"prompt": PROMPT, **values})
        assert answer.status_code in (400, 422)
        return str(read_error(answer)["message"])

    assert "num_frames=6: the VAE of WanPipeline makes 1 + a multiple of 4; try num_frames=5" in ask(num_frames=6)
    assert "num_frames=801 is more than this server's 33" in ask(seconds="100")
    answer = served.post("/v1/videos", {"prompt": PROMPT, "seconds": "100"})
    assert read_error(answer)["param"] == "seconds"
    picture = "data:image/png;base64," + base64.b64encode(paint_picture((64, 64), 1)).decode()
    assert "WanPipeline has no relative that starts from an image; leave the image out" in ask(
        input_reference={"image_url": picture}
    )
    assert (
        "generates videos; send this to /v1/videos"
        in read_error(served.post("/v1/images/generations", {"prompt": "a"}))["message"]
    )
    for path in ("/v1/videos/video_x", "/v1/videos/video_x/content", "/v1/videos?after=video_x"):
        assert served.client.get(path).status_code == 404
    assert served.client.get("/v1/videos?limit=0").status_code == 400
