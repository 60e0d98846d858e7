"""ComfyUI's nodes keep its conventions, without ComfyUI, and draw on a running server.

A failure means that ComfyUI does not load them, or that a workflow does not run.
"""

from __future__ import annotations

import base64
import inspect
import io
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ditile.runner.requests.videos import encode_video
from ditile.runner.sounds import Sound
from tests.serve.comfy import FOLDER, ComfyStub, InterruptProcessingException, load_nodes
from tests.serve.running import RunningServer

PROMPT = "a large red circle on the left on a gray background"
PACKAGE = load_nodes()
NODES: dict[str, Any] = PACKAGE.NODE_CLASS_MAPPINGS
WIDGETS = {"INT", "FLOAT", "STRING", "BOOLEAN"}
CORE = {
    "LoadImage": ([], ["IMAGE", "MASK"]),
    "SaveImage": (["IMAGE"], []),
    "CreateVideo": (["IMAGE", "FLOAT"], ["VIDEO"]),
    "SaveVideo": (["VIDEO"], []),
    "ModelSamplingAuraFlow": (["MODEL"], ["MODEL"]),
    "CLIPLoader": ([], ["CLIP"]),
    "CLIPTextEncode": (["CLIP"], ["CONDITIONING"]),
    "ConditioningZeroOut": (["CONDITIONING"], ["CONDITIONING"]),
    "EmptySD3LatentImage": ([], ["LATENT"]),
    "VAELoader": ([], ["VAE"]),
    "KSampler": (["MODEL", "CONDITIONING", "CONDITIONING", "LATENT"], ["LATENT"]),
    "VAEDecode": (["LATENT", "VAE"], ["IMAGE"]),
}
"""ComfyUI's own nodes in the examples: types of the wires that come in and go out."""


def read_module(name: str) -> Any:
    return sys.modules[f"{PACKAGE.__name__}.{name}"]


def list_inputs(node: Any) -> Iterator[tuple[str, tuple[Any, ...], bool]]:
    """(name, definition, whether it must be there). A choice is a list of its values, which are strings here."""
    for group, values in node.INPUT_TYPES().items():
        for name, (kind, *options) in values.items():
            if isinstance(kind, list):
                assert options[0]["default"] in kind
                kind = "STRING"
            yield name, (kind, *options), group == "required"


@pytest.mark.parametrize("node", NODES.values(), ids=NODES)
def test_a_node_is_as_comfyui_wants_it(node: Any) -> None:
    """Types, names, and a function that takes every input by its name and returns as many as there are outputs."""
    assert set(node.INPUT_TYPES()) <= {"required", "optional", "hidden"}
    assert len(node.RETURN_TYPES) == len(node.RETURN_NAMES) and node.CATEGORY == "ditile" and node.DESCRIPTION
    parameters = inspect.signature(getattr(node(), node.FUNCTION)).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name, definition, required in list_inputs(node):
        kind = definition[0]
        assert kind in WIDGETS or (kind.isupper() and kind.replace("_", "").isalpha())
        assert name in parameters or (takes_all and not required)
        assert required or name not in parameters or parameters[name].default is not parameters[name].empty
        if kind in WIDGETS:
            values = definition[1]
            assert isinstance(values["default"], {"INT": int, "FLOAT": float, "STRING": str}[kind])
            assert kind == "STRING" or values["min"] <= values["default"] <= values["max"]


def test_the_nodes_import_neither_torch_nor_ditile() -> None:
    code = (
        "import sys, importlib.util as u; p = sys.argv[1]; s = u.spec_from_file_location('x', p + '/__init__.py');"
        "m = u.module_from_spec(s); sys.modules['x'] = m; s.loader.exec_module(m);"
        "print(sorted({'torch', 'ditile', 'requests', 'httpx', 'diffusers', 'comfy'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(FOLDER)], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_no_input_is_a_key() -> None:
    """Workflows are shared, and are written into every picture."""
    names = {name for node in NODES.values() for name, _, _ in list_inputs(node)}
    assert not {name for name in names if "key" in name or "token" in name or "path" in name}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("example_workflows/*.json")), ids=lambda path: path.stem)
def test_an_example_fits_the_nodes(path: Path) -> None:
    """The links of both ends agree, and each widget has its value: a browser sets them by their order."""
    flow = json.loads(path.read_text("utf-8"))
    nodes = {node["id"]: node for node in flow["nodes"]}
    for link, source, output, target, slot, kind in flow["links"]:
        assert nodes[target]["inputs"][slot]["link"] == link and nodes[target]["inputs"][slot]["type"] == kind
        assert link in nodes[source]["outputs"][output]["links"]
        assert find_outputs(nodes[source]["type"])[output] == kind
    for node in nodes.values():
        if node["type"] in CORE:
            continue
        inputs = list(list_inputs(NODES[node["type"]]))
        assert [i["name"] for i in node["inputs"]] == [name for name, kind, _ in inputs if kind[0] not in WIDGETS]
        expected: list[str] = []
        for _, kind, _ in inputs:
            if kind[0] in WIDGETS:
                expected += [kind[0]] + ["STRING"] * kind[1].get("control_after_generate", False)
        types = {int: "INT", float: "FLOAT", str: "STRING"}
        assert [types[type(value)] for value in node["widgets_values"]] == expected


def find_outputs(kind: str) -> list[str]:
    return CORE[kind][1] if kind in CORE else list(NODES[kind].RETURN_TYPES)


def test_pictures_keep_their_bytes_as_tensors() -> None:
    """[B, H, W, C] of floats from 0 to 1, there and back."""
    pixels = np.random.default_rng(0).integers(0, 256, (2, 5, 7, 3), dtype=np.uint8)
    image_files = read_module("image_files")
    encoded = image_files.encode_images(torch.tensor(pixels) / 255)
    files = [base64.b64decode(text.partition(",")[2]) for text in encoded]
    tensor = image_files.decode_images(files)
    assert tensor.shape == (2, 5, 7, 3) and tensor.dtype == torch.float32 and tensor.max() <= 1
    assert torch.equal(tensor, torch.tensor(pixels, dtype=torch.float32) / 255)


def test_a_sound_is_as_long_as_its_video() -> None:
    """As ComfyUI's AUDIO, from the file that a server writes."""
    samples = np.sin(np.arange(32_000, dtype=np.float32) / 20)[None].repeat(2, 0)
    video = np.zeros((12, 16, 16, 3), np.uint8)
    content = encode_video(video, "mp4", 8.0, {}, Sound(samples, 16_000))
    sound = read_module("image_files").decode_sound(content, "mp4", 12 / 8.0)
    assert sound["sample_rate"] == 16_000 and sound["waveform"].shape == (1, 2, 24_000)
    # AAC keeps a tone closely, without a delay.
    assert np.abs(sound["waveform"][0].numpy() - samples[:, :24_000])[:, 2048:-2048].mean() < 0.05
    assert read_module("image_files").decode_sound(encode_video(video, "mp4", 8.0, {}), "mp4", 1.5) is None
    assert read_module("image_files").decode_sound(b"", "gif", 1.5) is None


def test_a_mask_is_transparent_where_the_picture_is_drawn_anew() -> None:
    """At the picture's size: masks of ComfyUI may have another."""
    mask = torch.zeros(1, 4, 4)
    mask[:, :, 2:] = 1
    encoded = read_module("image_files").encode_mask(mask, torch.zeros(1, 8, 16, 3))
    with Image.open(io.BytesIO(base64.b64decode(encoded.partition(",")[2]))) as image:
        assert image.size == (16, 8) and image.mode == "RGBA"
        alpha = np.asarray(image.getchannel("A"))
    assert (alpha[:, :4] == 255).all() and (alpha[:, -4:] == 0).all()


def test_a_key_is_sent_to_its_own_address_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A workflow of a stranger may hold the stranger's address."""
    client, file = read_module("client"), tmp_path / "keys.json"
    monkeypatch.setenv("DITILE_KEYS", str(file))
    monkeypatch.setenv("DITILE_API_KEY", "own-secret")
    monkeypatch.delenv("DITILE_SERVER", raising=False)
    assert client.find_key("http://127.0.0.1:8000/") == "own-secret"
    assert client.find_key("http://stranger:8000") is None
    file.write_text('{"https://host/v1": "of-host"}')
    assert client.find_key("https://host") == "of-host" and client.find_key("http://host") is None
    monkeypatch.setenv("DITILE_SERVER", "http://gpu:9000")
    assert client.find_key("http://gpu:9000/v1") == "own-secret" and client.find_key("http://127.0.0.1:8000") is None
    file.write_text("no json")
    with pytest.raises(client.ServerError, match="keys.json cannot be read"):
        client.find_key("https://host")


def connect(server: RunningServer) -> Any:
    """Return what the wire of a server holds."""
    return NODES["DitileServer"]().connect_server(server.url)[0]


def test_generate_shows_previews(flux_server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    comfy, pictures = ComfyStub(monkeypatch), connect(flux_server)
    images, info = NODES["DitileGenerate"]().generate_images(pictures, PROMPT, 7, 2, steps=4, guidance=-1.0)
    assert images.shape == (2, 128, 128, 3) and images.dtype == torch.float32 and 0 <= images.min() < images.max() <= 1
    facts = json.loads(info)
    assert (facts["seed"], facts["size"], facts["warnings"]) == (7, "128x128", [])
    assert comfy.shown[-1] == (4, 4, None)
    previews = [preview for _, _, preview in comfy.shown if preview is not None]
    assert previews and all(kind == "JPEG" and image.mode == "RGB" for kind, image, _ in previews)
    again, _ = NODES["DitileGenerate"]().generate_images(pictures, PROMPT, 8, 1, steps=4)
    assert torch.allclose(again[0], images[1], atol=2 / 255), "the seeds of a batch count up"


def test_edit_with_a_mask_keeps_the_rest(flux_server: RunningServer) -> None:
    image = torch.full((1, 128, 128, 3), 0.25)
    mask = torch.zeros(1, 128, 128)
    mask[:, :, 64:] = 1
    edit = NODES["DitileEdit"]().edit_images
    edited, info = edit(connect(flux_server), image, PROMPT, 7, mask, strength=1.0, steps=4)
    assert edited.shape == (1, 128, 128, 3) and json.loads(info)["size"] == "128x128"
    changed = (edited - image).abs().mean(dim=(0, 1, 3))
    assert changed[:56].mean() < changed[72:].mean() / 2


def test_cancel_ends_the_work(flux_server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt of ComfyUI comes through as it is, and the ranks are free at once."""
    comfy, pictures = ComfyStub(monkeypatch), connect(flux_server)
    timer = threading.Timer(1.0, comfy.interrupted.set)
    timer.start()
    with pytest.raises(InterruptProcessingException):
        NODES["DitileGenerate"]().generate_images(pictures, PROMPT, 7, steps=200)
    with flux_server.client() as client:
        deadline = time.monotonic() + 60
        while client.get("/health").json()["running"]:
            assert time.monotonic() < deadline, "the ranks still draw what nobody waits for"
            time.sleep(0.05)
    comfy.interrupted.clear()
    images, _ = NODES["DitileGenerate"]().generate_images(pictures, PROMPT, 7, steps=4)
    assert images.shape == (1, 128, 128, 3)


def test_a_video_is_a_batch_of_frames(wan_server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    comfy = ComfyStub(monkeypatch)
    draw = NODES["DitileImageToVideo"]().generate_video
    frames, fps, info, sound = draw(connect(wan_server), PROMPT, 7, num_frames=9, fps=8.0, steps=4)
    assert sound is None
    assert frames.shape == (9, 64, 64, 3) and fps == 8.0 and frames.dtype == torch.float32
    facts = json.loads(info)
    assert (facts["seed"], facts["num_frames"], facts["warnings"]) == (7, 9, [])
    assert comfy.shown[-1] == (100, 100, None)
