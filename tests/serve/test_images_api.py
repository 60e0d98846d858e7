"""Pictures over HTTP: OpenAI's fields and answers, by its own client and by hand."""

import base64
import io
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from PIL import Image

from ditile.planner.promise import Bounds
from ditile.serve.jobs import Request
from tests.serve.servers import PROMPT, Served, open_picture, paint_picture, read_error, read_metric, serve_painted

pytestmark = pytest.mark.usefixtures("full_pace")
PICTURE = paint_picture((128, 128), 5)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    loras = tmp_path_factory.mktemp("loras")
    (loras / "style.safetensors").touch()
    with serve_painted(tmp_path_factory.mktemp("state"), max_images=4, max_queue=8, lora_dir=str(loras)) as served:
        yield served


def test_generate_by_the_client(served: Served, client: openai.OpenAI) -> None:
    answer = client.images.generate(
        prompt=PROMPT, model="dall-e-3", n=3, size="64x32", output_format="webp", output_compression=90, quality="hd",
        style="vivid", background="opaque", moderation="low", user="ann",
        extra_body={"seed": 7, "num_inference_steps": 3, "guidance_scale": 2.5, "true_cfg_scale": 3.0,
                    "negative_prompt": "blue"},
        extra_query={"api-version": "2025-01-01"},
    )  # fmt: skip
    assert answer.data is not None and len(answer.data) == 3
    pictures = [open_picture(one.b64_json or "") for one in answer.data]
    assert {(picture.size, picture.format) for picture in pictures} == {((64, 32), "WEBP")}
    assert (answer.size, answer.output_format) == ("64x32", "webp") and abs(answer.created - time.time()) < 60
    extra = answer.model_extra or {}
    assert extra["seed"] == 7 and extra["inference_time_s"] == 1.0
    assert extra["warnings"] == ["quality='hd' was ignored: it has no meaning for an open model"]
    assert [(one.model_extra or {})["seed"] for one in answer.data] == [7, 8, 9]
    options = served.group.batches[-1].jobs[0].request.options
    assert (options.steps, options.guidance, options.true_cfg, options.negative_prompt) == (3, 2.5, 3.0, "blue")


def test_computed_steps_and_bounds_reach_the_ranks(served: Served) -> None:
    values = {"prompt": PROMPT, "computed_steps": 10, "within_seconds": 4, "min_psnr": 45.0}
    answer = served.post("/v1/images/generations", values).json()
    assert answer["warnings"] == ["within_seconds and min_psnr were ignored, as computed_steps says the steps"]
    request = served.group.batches[-1].jobs[0].request
    assert (request.computed_steps, request.bounds) == (10, Bounds(seconds=4.0, min_psnr=45.0))
    assert Request.from_json(request.to_json()) == request
    refusal = read_error(served.post("/v1/images/generations", {"prompt": PROMPT, "within_seconds": -1}))
    assert refusal["message"].endswith("; try within_seconds=4")


def test_what_is_ignored_is_named(served: Served) -> None:
    values = {"prompt": PROMPT, "model": "flux-9", "sampler": "ddim", "\u00e4": 1, "size": "auto", "seed": -1}
    answer = served.client.post("/v1/images/generations", content=json.dumps(values)).json()
    assert len(answer["warnings"]) == 3
    assert "model 'flux-9' is not served; shapes-flux answers" in answer["warnings"]
    assert "'sampler' is not known here, and was ignored" in answer["warnings"]
    assert served.post("/v1/images/generations", {"prompt": PROMPT, "model": "gpt-image-1"}).json()["warnings"] == []
    (note,) = served.post("/v1/images/generations", {"prompt": "a lighthouse at dawn"}).json()["warnings"]
    assert note.startswith("shapes-flux is small and knows ")
    asks = {
        "background": "transparent",
        "style": "natural",
        "input_fidelity": "high",
        "partial_images": 2,
        "timeout": 1e5,
    }
    answer = served.post("/v1/images/generations?seed=3", {"prompt": PROMPT, **asks}).json()
    assert [text.partition(" was ignored")[0].partition("=")[0].partition(" is")[0] for text in answer["warnings"]] == [
        "partial_images", "timeout", "background", "style", "input_fidelity", "parameter 'seed' of the address",
    ]  # fmt: skip


def test_pictures_are_refused_where_they_would_not_be_drawn_from(served: Served) -> None:
    """A failure would be a picture of the prompt alone, and no word of the one that was sent."""
    text = base64.b64encode(PICTURE).decode()
    for path, values, param in (
        ("generations", {"image": text}, "image"),
        ("generations", {"mask": text}, "mask"),
        ("variations", {"image": text, "mask": text}, "mask"),
    ):
        answer = served.post(f"/v1/images/{path}", {"prompt": PROMPT, **values})
        assert (answer.status_code, read_error(answer)["param"]) == (400, param)
        assert "send it to /v1/images/edits" in read_error(answer)["message"]


def test_a_picture_by_its_address(served: Served) -> None:
    answer = served.post(
        "/v1/images/generations", {"prompt": PROMPT, "response_format": "url", "n": 2, "seed": 3}
    ).json()
    urls = [one["url"] for one in answer["data"]]
    assert urls[0].startswith(f"{served.url}/v1/images/image_") and answer["data"][0]["b64_json"] is None
    with httpx.Client(trust_env=False) as other:
        found = [other.get(url) for url in urls]
    assert [one.headers["content-type"] for one in found] == ["image/png"] * 2
    assert found[1].content == paint_picture((128, 128), 4)
    assert read_error(served.client.get(urls[0][:-1] + "7"))["code"] == "not_found"
    assert served.client.get(urls[0][:-1] + "-1").status_code == 404


def test_edits_by_the_client(served: Served, client: openai.OpenAI) -> None:
    """A file as `image`, its mask of alpha, and fields of a form, which are texts."""
    mask = Image.new("RGBA", (128, 128), (0, 0, 0, 255))
    mask.paste((0, 0, 0, 0), (0, 0, 64, 128))
    encoded = io.BytesIO()
    mask.save(encoded, "png")
    answer = client.images.edit(
        image=("start.png", PICTURE, "image/png"), mask=("mask.png", encoded.getvalue(), "image/png"), prompt=PROMPT,
        n=2, extra_body={"strength": 0.5, "seed": 1},
    )  # fmt: skip
    assert answer.data is not None and len(answer.data) == 2
    batch = served.group.batches[-1]
    files = batch.jobs[0].inputs
    assert set(files) == {"image", "mask"} and batch.jobs[0].request.options.strength == 0.5
    white = Image.open(io.BytesIO(files["mask"]))
    assert white.mode == "L" and white.getpixel((10, 10)) == 255 and white.getpixel((100, 10)) == 0
    with pytest.warns(DeprecationWarning):
        variation = client.images.create_variation(image=("start.png", PICTURE, "image/png"))
    assert variation.data is not None and len(variation.data) == 1


@pytest.mark.parametrize("how", ["image", "image[]", "data URL", "url"])
def test_edits_in_every_form(served: Served, how: str) -> None:
    """The forms are those of Open WebUI (engine "openai", routers/images.py of 0.12.4)."""
    text = "data:image/png;base64," + base64.b64encode(PICTURE).decode()
    if how.startswith("image"):
        fields = {"model": "gpt-image-1", "prompt": PROMPT, "n": "1", "size": "128x128", "background": "auto"}
        headers = {"authorization": "Bearer none", "x-openwebui-user-email": "ann@example.org"}
        files = [(how, ("a.png", PICTURE, "image/png"))]
        answer = served.client.post("/v1/images/edits", data=fields, files=files, headers=headers)
    else:
        picture: dict[str, Any] = {"data URL": {"image": text}, "url": {"url": [text]}}
        answer = served.post("/v1/images/edits", {"prompt": PROMPT, **picture[how]})
    assert answer.status_code == 200, answer.text
    batch = served.group.batches[-1]
    first = Image.open(io.BytesIO(batch.jobs[0].inputs["image"]))
    assert (first.format, first.mode, first.size, first.getpixel((0, 0))) == ("PNG", "RGB", (128, 128), (5, 0, 7))


def test_an_edit_keeps_the_form_of_its_picture(served: Served) -> None:
    """A photograph on its side is turned, and drawn in its own form at the model's area."""
    exif = Image.Exif()
    exif[0x0112] = 6
    encoded = io.BytesIO()
    Image.new("RGB", (400, 100), "red").save(encoded, "jpeg", exif=exif)
    answer = served.client.post("/v1/images/edits", data={"prompt": PROMPT}, files={"image": encoded.getvalue()})
    assert answer.json()["size"] == "64x256"
    answer = served.client.post(
        "/v1/images/edits", data={"prompt": PROMPT, "size": "128x64"}, files={"image": encoded.getvalue()}
    )
    assert answer.json()["size"] == "128x64"


def test_streams_by_the_client(served: Served, client: openai.OpenAI) -> None:
    served.group.pace = 0.02
    events: list[Any] = list(client.images.generate(prompt=PROMPT, stream=True, partial_images=2, size="64x64"))
    assert [event.type for event in events] == ["image_generation.partial_image"] * 2 + ["image_generation.completed"]
    assert [event.partial_image_index for event in events[:2]] == [0, 1]
    assert open_picture(events[2].b64_json).size == (64, 64) and events[2].usage.total_tokens == 0
    with open_picture(events[0].b64_json) as preview:
        assert preview.size == (8, 8)
    edits: list[Any] = list(
        client.images.edit(image=("a.png", PICTURE, "image/png"), prompt=PROMPT, stream=True, partial_images=1)
    )
    assert [event.type for event in edits] == ["image_edit.partial_image", "image_edit.completed"]
    served.fail_next_jobs("rank_failed", "a rank died")
    with pytest.raises(openai.APIError, match="a rank died"):
        list(client.images.generate(prompt=PROMPT, stream=True))


@pytest.mark.parametrize(("code", "status"), [("refused", 422), ("rank_failed", 503)])
def test_failures(served: Served, code: str, status: int) -> None:
    served.fail_next_jobs(code, "steps=3 is wrong; try --guidance 2")
    answer = served.post("/v1/images/generations", {"prompt": PROMPT})
    assert answer.status_code == status
    assert read_error(answer)["message"] == "num_inference_steps=3 is wrong; try guidance_scale 2"


@pytest.mark.parametrize("how", ["answer", "stream"])
def test_a_client_that_goes_away_ends_its_job(served: Served, how: str) -> None:
    served.group.pace = 0.05
    values = {"prompt": PROMPT, "num_inference_steps": 200, "stream": how == "stream", "partial_images": 2}
    if how == "stream":
        with served.client.stream("POST", "/v1/images/generations", json=values) as stream:
            next(stream.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            served.client.post("/v1/images/generations", json=values, timeout=0.3)
    deadline = time.monotonic() + 10
    while read_metric(served.service.metrics, "ditile_jobs", state="running") and time.monotonic() < deadline:
        time.sleep(0.02)
    job = served.service.find_job(served.group.batches[-1].jobs[0].id, "")
    assert job.state == "cancelled" and job.progress < 50
    served.group.pace = 0.0
    assert served.post("/v1/images/generations", {"prompt": PROMPT}).status_code == 200


@pytest.mark.parametrize(
    ("values", "status", "message"),
    [
        ({"n": 5}, 422, "n=5 is more than this server's 4; try n=4 or less"),
        ({"size": "100x100"}, 422, "height=100 is not a multiple of 8, a token of this model; try height=96 or 104"),
        ({"size": "large"}, 400, "size='large' is not a size; try size='128x128' or 'auto'"),
        ({"seed": 10**4000}, 400, "seed=a number of many digits should be less than"),
        ({"strength": 0.5}, 422, "strength=0.5 goes with an image; add image"),
        ({"prompt": "a\0b"}, 400, "holds U+0000, which is not text; leave it out"),
        ({"lora": "stile"}, 422, "lora='stile' is not known; did you mean style?"),
    ],
)  # fmt: skip
def test_refusals_say_what_would_work(served: Served, values: dict[str, Any], status: int, message: str) -> None:
    count = len(served.group.batches)
    body = json.dumps({"prompt": PROMPT} | values)  # httpx cannot write half a surrogate pair
    answer = served.client.post("/v1/images/generations", content=body)
    assert answer.status_code == status and message in read_error(answer)["message"]
    assert len(served.group.batches) == count
