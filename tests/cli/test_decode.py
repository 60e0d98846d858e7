"""Latents that are kept, and their decode by `ditile decode`.

A failure would mean that a decode that ran out of memory loses minutes of denoising, or that what is decoded later is
not what the call would have returned.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image

import ditile
from ditile import ModelError, Plan, parallelize
from ditile.cli import decode, main
from ditile.cli.latents import LatentsKeeper, read_facts, read_values
from ditile.model.pipeline_calls import is_modular
from ditile.runner.callbacks import StepWatch
from ditile.runner.requests import results
from tests.cli.test_cli import refused
from tests.cli.test_sounds import call, ltx_2
from tests.zoo import ZOO

pytestmark = pytest.mark.usefixtures("elsewhere")

FLUX = ("generate", "a large red circle", "--model", "shapes-flux", "--steps", "2", "--seed", "7", "--threads", "1")
WAN = (*FLUX[:3], "shapes-wan", *FLUX[4:], "--frames", "5", "--height", "32", "--width", "32")


@pytest.mark.parametrize(
    ("words", "decode"),
    [
        ((*FLUX, "--num-images", "2", "--pipefusion", "2"), ()),
        ((*FLUX, "--num-images", "2", "--pipefusion", "2"), ("--slicing", "--ranks", "2")),
        ((*WAN, "--fps", "12"), ()),
        ((*WAN, "--fps", "12", "--ulysses", "2"), ("--vae-block-size", "8")),
    ],
)
def test_what_is_decoded_later_is_what_the_call_returns(words: tuple[str, ...], decode: tuple[str, ...]) -> None:
    """To the last bit of the files, with all texts; strips of rows sum in another order, to a level of a pixel."""
    # The same frames are other bytes of MP4 now and then: x264 reads memory that it did not write.
    suffix = ".webp" if words[3] == "shapes-wan" else ".png"
    assert main.main([*words, "--out", "a" + suffix, "--save-latents", "kept.safetensors"]) == 0
    expected = {path.name[1:]: path for path in Path().glob("a*")}
    assert main.main(["decode", "kept.safetensors", "--out", "b" + suffix, "--threads", "1", *decode]) == 0
    found = {path.name[1:]: path for path in Path().glob("b*")}
    assert found.keys() == expected.keys() and len(found) == 2
    for name, path in found.items():
        if not decode:
            assert path.read_bytes() == expected[name].read_bytes(), name
        elif path.suffix == ".png":
            pixels = [np.asarray(Image.open(file)).astype(int) for file in (path, expected[name])]
            assert np.abs(pixels[0] - pixels[1]).max() <= 1


def test_a_failed_decode_keeps_its_latents(capsys: pytest.CaptureFixture[str]) -> None:
    """Without being asked; the line has the command that decodes them."""
    assert main.main([*WAN, "--out", "a.webp"]) == 0
    capsys.readouterr()
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 40 GiB")
    with mock.patch.object(diffusers.AutoencoderKLWan, "decode", side_effect=error):
        assert main.main([*WAN, "--out", "b.webp"]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ditile: ")]
    assert "out of memory: " in line
    check_kept(line)


def check_kept(line: str, *words: str) -> None:
    """Check that the command of a line makes b.webp as a.webp is."""
    assert [path.name for path in Path().glob("b*")] == ["b.latents.safetensors"]
    command = shlex.split(line.rpartition("its latents are kept; decode them by: ")[2])
    assert main.main([*command[1:], *words, "--threads", "1"]) == 0
    assert Path("a.webp").read_bytes() == Path("b.webp").read_bytes() and Path("b.png").exists()


def keep(pipe: Any, arguments: dict[str, Any], kind: str) -> tuple[Any, str | None]:
    """The result of a call whose latents are kept in kept.safetensors, and why they could not be kept."""
    described = {"model": "model", "components": {}, "dtype": "float32", "kind": kind, "fps": 8.0}
    described |= {"pictures": [("a", 1)], "call": {}, "texts": {"model": "model"}}
    keeper = LatentsKeeper(pipe, described, Path("a.mp4"), Path("kept.safetensors"))
    result = None
    try:
        with keeper.keep_on_failure():
            result = parallelize(pipe, Plan())(**arguments, watch=StepWatch(on_decode=keeper.take_latents))
    except ModelError as error:
        return result, str(error)
    return result, None


def test_a_video_is_decoded_with_its_sound() -> None:
    """Of the model only the VAEs and the vocoder are loaded, and each in its own order draws what it drew."""
    pipe = ltx_2()
    result, refusal = keep(pipe, call(), "video")
    text: Any = ditile.load("shapes-wan")
    pipe.register_modules(text_encoder=text.text_encoder, tokenizer=text.tokenizer)
    pipe.save_pretrained("model")
    assert refusal is None
    ((video, sound),) = results.list_outputs(pipe, result)
    texts = results.add_picture_texts({"model": "model"}, pipe, {}, "a", 1, video)
    for path in Path("model").rglob("*.safetensors"):
        if path.parent.name in ("transformer", "connectors", "text_encoder"):
            # Whole by its header, and of no weight that such a model has.
            safetensors.torch.save_file({"a": torch.zeros(1)}, path)
    with mock.patch.object(decode, "write_drawn", wraps=results.write_drawn) as write:
        assert main.main(["decode", "kept.safetensors", "--out", "b.mp4"]) == 0
    assert Path("b.mp4").exists() and Path("b.png").exists()
    ((drawn, path, fps, found, heard),) = [call.args for call in write.call_args_list]
    assert (path, fps, found) == ("b.mp4", 8.0, texts)
    assert np.array_equal(drawn, video) and np.array_equal(heard.samples, sound.samples) and heard.rate == sound.rate


def spoil(**changes: Any) -> None:
    """Write spoiled.safetensors: other metadata."""
    facts = read_facts(Path("kept.safetensors")).model_dump() | changes
    metadata = {"ditile_latents": json.dumps(facts)}
    safetensors.torch.save_file(safetensors.torch.load_file("kept.safetensors"), "spoiled.safetensors", metadata)


def test_what_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """One line, and nothing written."""
    assert main.main([*FLUX, "--out", "a.png", "--save-latents", "kept.safetensors"]) == 0
    safetensors.torch.save_file({"a": torch.zeros(2)}, "other.safetensors")
    content = Path("kept.safetensors").read_bytes()
    Path("short.safetensors").write_bytes(content[:-8])
    capsys.readouterr()
    for words, says in [
        (("short.safetensors",), "is not a whole safetensors file"),
        (("other.safetensors",), "other.safetensors has no latents of ditile"),
        (("kept.safetensors", "--model", "shapes-wan"), "and there is WanTransformer3DModel"),
        (("kept.safetensors", "--out", "kept.safetensors"), "name it kept.png"),
    ]:
        assert says in refused(capsys, "decode", *words), words
    for changes, says in [
        ({"pipeline": "os"}, "whose decode is another one"),
        ({"values": {"latents": {"tensor": "b"}}}, "is not whole"),
        ({"values": {}}, "cannot be decoded"),
        ({"values": {"a=open('run', 'w')": 1}}, "whose decode is another one"),
        ({"pictures": 3}, "that are not of this version: ('pictures',)"),
        ({"pictures": [("a", 1), ("b", 2)]}, "has prompts of 2 images, and latents of 1"),
        ({"parts": {"vae": "0"}}, "the vae of shapes-flux has another config"),
    ]:
        spoil(**changes)
        assert says in refused(capsys, "decode", "spoiled.safetensors", "--out", "b.png", "--threads", "1"), changes
    # Not even the tail itself evaluates a name.
    tail = read_facts(Path("kept.safetensors")).find_tail()
    with pytest.raises(AttributeError):
        tail.run(None, {"a=open('run', 'w')": 1})
    assert not Path("run").exists()
    assert "is for one call" in refused(capsys, *FLUX, "--perf", "--save-latents", "b.safetensors")


UNKEPT = (
    *("wan-animate", "hunyuan-video-framepack", "any-flow-far", "helios", "kandinsky-6-super-resolution"),
    *("flux-2-klein-kv", "sana-wm", "qwen-image-inpaint", "qwen-image-edit-inpaint", "flux-inpaint"),
    *("flux-2-klein-inpaint", "stable-diffusion-3-inpaint"),
)
"""Pipelines that decode within their loop, or by an image or another object."""
DECODES_NOTHING = (
    *("ltx-2", "ltx-2-image-to-video", "ltx-2-condition", "longcat-image", "glm-image", "mochi", "allegro"),
    *("proteina", "skyreels-v2-diffusion-forcing", "skyreels-v2-diffusion-forcing-blocks"),
)
"""Tiny pipelines that return latents alone, as they lack a vocoder or a VAE that fits."""


@pytest.mark.nightly
# diffusers' own classes warn, which pytest takes for errors here.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in ZOO if name not in DECODES_NOTHING])
def test_any_class_is_decoded_by_its_own_code(name: str) -> None:
    """Through a file. A failure means a class whose end reads what is not kept."""
    pipe = ZOO[name].make()
    arguments = ZOO[name].call()
    arguments.pop("output_type", None)
    if "num_inference_steps" in arguments:
        arguments["num_inference_steps"] = 2
    result, refusal = keep(pipe, arguments, "image")
    if is_modular(pipe) or name in UNKEPT:
        assert "are not kept" in (refusal or "") and not Path("kept.safetensors").exists()
        return
    assert refusal is None
    facts = read_facts(Path("kept.safetensors"))
    values = read_values(Path("kept.safetensors"), facts, torch.device("cpu"))
    with torch.no_grad():
        again = facts.find_tail().run(pipe, values)
    found, expected = flatten(again), flatten(result)
    assert len(found) == len(expected) > 0
    assert all(np.array_equal(one, other, equal_nan=True) for one, other in zip(found, expected, strict=True))
    assert "transformer" not in facts.parts or name == "joyimage-edit-plus"


def flatten(result: Any) -> list[Any]:
    """The arrays of a result: of its fields, videos and images."""
    if isinstance(result, list | tuple):
        return [array for part in result for array in flatten(part)]
    if hasattr(result, "to_tuple"):
        return flatten(result.to_tuple())
    if isinstance(result, torch.Tensor):
        return [result.float().numpy()]
    return [] if result is None else [np.asarray(result).astype(np.float64)]
