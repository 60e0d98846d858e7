"""Calls of AUTOMATIC1111's clients, as Open WebUI and SillyTavern send them."""

import base64
import dataclasses
import io
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image

from tests.serve.servers import PROMPT, Served, paint_picture, read_error, serve_painted

PICTURE = base64.b64encode(paint_picture((128, 128), 5)).decode()
SILLY_TAVERN = {
    "prompt": PROMPT, "negative_prompt": "blurry", "sampler_name": "Euler a", "scheduler": "normal", "steps": 6,
    "cfg_scale": 7, "width": 102, "height": 64, "seed": None, "enable_hr": False, "hr_upscaler": "Latent",
    "denoising_strength": 0.7, "override_settings": {"CLIP_stop_at_last_layers": 1}, "restore_faces": False,
    "save_images": True, "send_images": True, "do_not_save_grid": False,
}  # fmt: skip
OWN = {"sampler_name": "Automatic", "scheduler": "automatic"}
"""What the lists of samplers and schedulers name."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    loras = tmp_path_factory.mktemp("loras")
    (loras / "style.safetensors").touch()
    with serve_painted(tmp_path_factory.mktemp("state"), max_images=4, lora_dir=str(loras)) as served:
        yield served


@pytest.fixture(autouse=True)
def at_full_pace(served: Served) -> None:
    served.group.pace = 0.0


def test_what_open_webui_asks(served: Served) -> None:
    assert served.client.get("/sdapi/v1/options").json()["sd_model_checkpoint"] == "shapes-flux"
    assert served.post("/sdapi/v1/options", {"sd_model_checkpoint": "shapes-flux"}).status_code == 200
    assert [model["model_name"] for model in served.client.get("/sdapi/v1/sd-models").json()] == ["shapes-flux"]
    values = {"prompt": PROMPT, "batch_size": 2, "width": 64, "height": 64, "steps": 3, "negative_prompt": ""}
    answer = served.post("/sdapi/v1/txt2img", values).json()
    assert [Image.open(io.BytesIO(base64.b64decode(text))).size for text in answer["images"]] == [(64, 64)] * 2
    info = json.loads(answer["info"])
    assert info["all_seeds"] == [info["seed"], info["seed"] + 1] and info["warnings"] == []


def test_what_a_model_does_not_take_is_left_out_and_named(served: Served) -> None:
    info = json.loads(served.post("/sdapi/v1/txt2img", SILLY_TAVERN).json()["info"])
    own = [f"{name} was ignored: the model has its own" for name in ("sampler_name", "scheduler")]
    size = "width is 104: this model takes multiples of 8"
    assert info["warnings"] == [*own, size, "save_images=True was ignored"]
    options = served.group.batches[-1].jobs[0].request.options
    assert (options.steps, options.guidance, options.negative_prompt, options.strength) == (6, 7.0, "blurry", None)
    info = json.loads(
        served.post(
            "/sdapi/v1/txt2img", SILLY_TAVERN | {"cfg_scale": 1, "width": 96, "save_images": False} | OWN
        ).json()["info"]
    )
    assert info["warnings"] == ["negative_prompt was left out, which this model does not use at this cfg_scale"]


ASKS: list[tuple[str, Any]] = [
    ("enable_hr", True), ("alwayson_scripts", {"controlnet": {"args": [{"module": "canny"}]}}), ("styles", ["a"]),
    ("subseed_strength", 0.5), ("override_settings", {"sd_vae": "other.pt"}), ("refiner_checkpoint", "other"),
    ("restore_faces", True), ("tiling", True), ("s_churn", 0.2), ("s_noise", 1.01), ("eta", 0.3),
    ("script_name", "x/y"), ("seed_resize_from_h", 64), ("sampler_index", "DDIM"),
    ("infotext", "Steps: 3"), ("send_images", False),
    ("init_images", [PICTURE]), ("mask", PICTURE), ("resize_mode", 2), ("disable_extra_networks", True),
    ("a_field_of_nobody", 3), ("distilled_cfg_scale", 3.5),
]  # fmt: skip
OFF: dict[str, Any] = {
    "enable_hr": False, "hr_scale": 2, "hr_upscaler": "Latent", "denoising_strength": 0.7, "alwayson_scripts": {},
    "subseed": 5, "subseed_strength": 0.0, "override_settings": {"CLIP_stop_at_last_layers": 1}, "styles": [],
    "refiner_checkpoint": "", "refiner_switch_at": 0.8, "restore_faces": False, "tiling": None, "s_churn": 0,
    "s_noise": 1.0, "eta": None, "script_name": None, "script_args": [], "mask_blur": 4, "inpainting_fill": 0,
    "inpaint_full_res": True, "resize_mode": 0, "sampler_index": "Automatic", "send_images": True, "init_images": [],
    "seed_resize_from_h": -1, "do_not_save_samples": True, "override_settings_restore_afterwards": False, "mask": None,
}  # fmt: skip
"""What clients send by default: it asks for nothing."""


def read_warnings(served: Served, path: str, **values: Any) -> list[str]:
    answer = served.post(f"/sdapi/v1/{path}", {"prompt": PROMPT, **values})
    assert answer.status_code == 200, answer.text
    warnings: list[str] = json.loads(answer.json()["info"])["warnings"]
    return warnings


@pytest.mark.parametrize(("name", "value"), ASKS)
def test_what_is_asked_for_and_not_done_is_named(served: Served, name: str, value: Any) -> None:
    """A failure would mean a picture without a ControlNet or a second pass, and no word of it."""
    (warning,) = read_warnings(served, "txt2img", **{name: value})
    assert name in warning and "was ignored" in warning


def test_what_is_off_is_not_named(served: Served) -> None:
    """A failure would bury what matters under a warning for each field that clients always send."""
    assert read_warnings(served, "txt2img", **OFF) == []
    edit = OFF | {"init_images": [PICTURE], "enable_hr": None}
    assert read_warnings(served, "img2img", **edit) == []
    warnings = read_warnings(served, "img2img", **edit | {"mask": PICTURE})
    assert [text.partition("=")[0] for text in warnings] == ["inpaint_full_res", "inpainting_fill", "mask_blur"]


def test_options_that_change_nothing_are_named(served: Served) -> None:
    answer = served.post("/sdapi/v1/options", {"sd_model_checkpoint": "other", "CLIP_stop_at_last_layers": 1})
    assert answer.json() == {"warnings": ["sd_model_checkpoint='other' was ignored"]}


def test_pictures_to_start_from(served: Served) -> None:
    mask = base64.b64encode(paint_picture((64, 64), 255)).decode()
    values = {
        "prompt": PROMPT,
        "init_images": [f"data:image/png;base64,{PICTURE}"],
        "denoising_strength": 0.4,
        "mask": mask,
    }
    assert served.post("/sdapi/v1/img2img", values).status_code == 200
    batch = served.group.batches[-1]
    (job,) = batch.jobs
    assert set(job.inputs) == {"image", "mask"} and job.request.options.strength == 0.4
    assert Image.open(io.BytesIO(job.inputs["mask"])).size == (128, 128)
    assert "init_images is empty" in read_error(served.post("/sdapi/v1/img2img", {"prompt": PROMPT}))["message"]


def test_loras_in_a_prompt(served: Served) -> None:
    assert [lora["name"] for lora in served.client.get("/sdapi/v1/loras").json()] == ["style"]
    assert served.post("/sdapi/v1/txt2img", {"prompt": f"{PROMPT} <lora:style:0.5>"}).status_code == 200
    request = served.group.batches[-1].jobs[0].request
    assert request.loras == {"style": 0.5} and request.options.prompt == PROMPT
    answer = served.post("/sdapi/v1/txt2img", {"prompt": f"<lora:stile> {PROMPT}"})
    assert "lora='stile' is not known; did you mean style?" in read_error(answer)["message"]
    assert answer.status_code == 422


def test_loras_in_a_form(served: Served) -> None:
    """As OpenAI's client writes `{"style": 0.5}` beside a file."""
    form = {"prompt": PROMPT, "lora[style]": "0.5"}
    files = {"image": ("a.png", paint_picture((128, 128), 5), "image/png")}
    assert served.client.post("/v1/images/edits", data=form, files=files).status_code == 200
    assert served.group.batches[-1].jobs[0].request.loras == {"style": 0.5}


def test_loras_of_a_second_transformer(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the words of --lora, and only where the model has one. A failure: a LoRA that reaches no or another model."""

    def choose(lora: Any) -> Any:
        answer = served.post("/v1/images/generations", {"prompt": PROMPT, "lora": lora})
        if answer.status_code != 200:
            return answer.status_code, read_error(answer)["message"]
        return served.group.batches[-1].jobs[0].request.loras

    refused = (422, "lora='transformer_2=style' is not known; try one of style")
    assert choose({"transformer_2=style": 0.5}) == choose("transformer_2=style:0.5") == refused
    facts = dataclasses.replace(served.service.facts, has_second_transformer=True)
    monkeypatch.setattr(served.service, "_facts", facts)
    wanted = {"transformer_2=style": 0.5}
    assert choose({**wanted, "style": 0.8}) == {**wanted, "style": 0.8}
    assert choose("transformer_2=style:0.5") == choose({"name": "transformer_2=style", "scale": 0.5}) == wanted
    assert choose("transformer=style") == choose("style") == {"style": 1.0}
    assert choose("style:big") == (422, "lora='style:big': 'big' is no scale; try style:0.8")
    names = [lora["name"] for lora in served.client.get("/sdapi/v1/loras").json()]
    assert names == ["style", "transformer_2=style"]
    prompt = f"{PROMPT} <lora:transformer_2=style:0.5>"
    assert served.post("/sdapi/v1/txt2img", {"prompt": prompt}).status_code == 200
    assert served.group.batches[-1].jobs[0].request.loras == wanted


def test_progress_and_interrupt(served: Served) -> None:
    idle = served.client.get("/sdapi/v1/progress").json()
    assert idle["progress"] == 0 and idle["state"]["job_count"] == 0
    served.group.pace = 0.05
    answers = []
    values = {"prompt": PROMPT, "steps": 150}
    thread = threading.Thread(target=lambda: answers.append(served.post("/sdapi/v1/txt2img", values)))
    thread.start()
    deadline = time.monotonic() + 20
    while (now := served.client.get("/sdapi/v1/progress").json())["state"]["sampling_step"] < 4:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert 0 < now["progress"] < 1 and now["eta_relative"] > 0 and now["state"]["sampling_steps"] == 150
    served.post("/sdapi/v1/interrupt")
    thread.join(20)
    assert answers[0].status_code == 409 and read_error(answers[0])["code"] == "cancelled"


def test_lists_are_true_and_small(served: Served) -> None:
    for path in ("samplers", "schedulers", "upscalers"):
        assert len(served.client.get(f"/sdapi/v1/{path}").json()) == 1


def test_numbers_that_no_answer_can_hold_are_refused(served: Served) -> None:
    answer = served.client.post("/sdapi/v1/txt2img", content=b'{"prompt": "a circle", "eta": 1e999}')
    assert answer.status_code == 400
