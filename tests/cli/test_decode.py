"""Latents that are kept, and their decode by `ditile decode`.

A failure would mean that a decode that ran out of memory loses minutes of denoising, or that what is decoded later is
not what the call would have returned.
"""

from __future__ import annotations

import json
import shlex
import shutil
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
from ditile import Plan, parallelize
from ditile.cli import decode, generate, latents, main
from ditile.cli.latents import (
    LatentsFacts,
    LatentsKeeper,
    describe_config,
    explain_unkept,
    find_cut_size,
    read_facts,
)
from ditile.model.known import ASSETS, find_known_model
from ditile.model.pipeline_calls import is_modular
from ditile.runner.callbacks import StepWatch
from ditile.runner.requests import results
from ditile.runner.requests.pipelines import find_output_kind
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
    with mock.patch.object(diffusers.AutoencoderKLWan, "decode", side_effect=error, autospec=True):
        assert main.main([*WAN, "--out", "b.webp"]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ditile: ")]
    assert "out of memory: " in line
    check_kept(line)


def test_a_file_in_place_of_the_transformer_is_not_needed() -> None:
    """A failure means latents that are lost with a file of which nothing decodes."""
    folder = find_known_model("shapes-flux").folder  # type: ignore[union-attr]
    shutil.copy(next(Path(folder, "transformer").glob("*.safetensors")), "own.safetensors")
    words = (*FLUX, "--transformer", "own.safetensors", "--save-latents", "kept.safetensors")
    assert main.main([*words, "--out", "a.png"]) == 0
    Path("own.safetensors").unlink()
    assert main.main(["decode", "kept.safetensors", "--out", "b.png", "--threads", "1"]) == 0
    assert Path("a.png").read_bytes() == Path("b.png").read_bytes()


def test_all_ranks_tell_of_the_latents_of_a_failed_decode(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a VAE of NaN, which one rank alone calls; the same model with a VAE that is whole decodes what was kept."""
    assert main.main([*WAN, "--out", "a.webp", "--pipefusion", "2"]) == 0
    shutil.copytree(find_known_model("shapes-wan").folder, "model")  # type: ignore[union-attr]
    (path,) = Path("model", "vae").glob("*.safetensors")
    weights = safetensors.torch.load_file(path)
    safetensors.torch.save_file({name: weight * torch.nan for name, weight in weights.items()}, path)
    capsys.readouterr()
    assert main.main([*WAN[:3], "model", *WAN[4:], "--out", "b.webp", "--pipefusion", "2"]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ditile: ")]
    assert "AutoencoderKLWan decoded the latents into NaN" in line
    check_kept(line, "--model", "shapes-wan")


def check_kept(line: str, *words: str) -> None:
    """Check that the command of a line makes b.webp as a.webp is."""
    assert [path.name for path in Path().glob("b*")] == ["b.latents.safetensors"]
    command = shlex.split(line.rpartition("its latents are kept; decode them by: ")[2])
    assert main.main([*command[1:], *words, "--threads", "1"]) == 0
    assert Path("a.webp").read_bytes() == Path("b.webp").read_bytes() and Path("b.png").exists()


def build_facts(pipe: Any, arguments: dict[str, Any], kind: str) -> LatentsFacts:
    """The facts of a call whose latents are kept."""
    parts = {name: part for name in ("vae", "audio_vae", "vocoder") if (part := pipe.components.get(name)) is not None}
    return LatentsFacts(
        model="model", components={}, dtype="float32", kind=kind, fps=8.0, frames=0, texts={"model": "model"},
        parts={name: describe_config(part) for name, part in parts.items()}, pictures=[("a", 1)],
        size=find_cut_size(pipe, arguments), settings=results.describe_settings(pipe, {}, {"model": "model"}),
    )  # fmt: skip


def keep(pipe: Any, arguments: dict[str, Any], facts: LatentsFacts) -> Any:
    """The result of a call whose latents are kept in kept.safetensors."""
    keeper = LatentsKeeper(facts, Path("a.mp4"), "kept.safetensors")
    with keeper.keep_on_failure():
        return parallelize(pipe, Plan())(**arguments, watch=StepWatch(on_decode=keeper.decode))


def save_ltx_2() -> Any:
    """The tiny LTX-2, whose folder is whole only in what decodes."""
    pipe = ltx_2()
    text: Any = ditile.load("shapes-wan")
    pipe.register_modules(text_encoder=text.text_encoder, tokenizer=text.tokenizer)
    pipe.save_pretrained("model")
    for path in Path("model").rglob("*.safetensors"):
        if path.parent.name in ("transformer", "connectors", "text_encoder"):
            path.unlink()
    return pipe


@pytest.mark.parametrize("fails", [False, True])
def test_a_video_is_decoded_with_its_sound(fails: bool) -> None:
    """Also after a decode of the video that fails, before the pipeline comes to that of the sound.

    Of the model only the VAEs and the vocoder are loaded.
    """
    pipe = save_ltx_2()
    facts = build_facts(pipe, call(), "video")
    result = parallelize(pipe, Plan())(**call())
    if fails:
        error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 40 GiB")
        decode_video = mock.patch.object(type(pipe.vae), "decode", side_effect=error, autospec=True)
        with decode_video, pytest.raises(torch.OutOfMemoryError, match="Tried"):
            keep(pipe, call(), facts)
    else:
        keep(pipe, call(), facts)
    ((video, sound),) = results.list_outputs(pipe, result)
    texts = results.add_picture_texts({"model": "model"}, facts.settings, "a", 1, video)
    with mock.patch.object(latents, "write_drawn", wraps=results.write_drawn) as write:
        assert main.main(["decode", "kept.safetensors", "--out", "b.mp4"]) == 0
    assert Path("b.mp4").exists() and Path("b.png").exists()
    ((drawn, path, fps, found, heard),) = [call.args for call in write.call_args_list]
    assert (path, fps, found) == ("b.mp4", 8.0, texts)
    assert np.array_equal(drawn, video) and np.array_equal(heard.samples, sound.samples) and heard.rate == sound.rate


def test_a_process_that_ended_early_has_a_video_without_sound(capsys: pytest.CaptureFixture[str]) -> None:
    """And a line says so."""
    pipe = save_ltx_2()
    keep(pipe, call(), build_facts(pipe, call(), "video"))
    rewrite({}, leave_out="audio_vae.z")
    assert main.main(["decode", "spoiled.safetensors", "--out", "b.mp4"]) == 0
    assert "the video is mute" in capsys.readouterr().err


def rewrite(changes: dict[str, Any], leave_out: str = "") -> None:
    """Write spoiled.safetensors: other metadata, or a tensor less."""
    facts, _ = read_facts(Path("kept.safetensors"))
    metadata = {"ditile_latents": json.dumps(facts.model_dump() | changes)}
    tensors = safetensors.torch.load_file("kept.safetensors")
    tensors.pop(leave_out, None)
    safetensors.torch.save_file(tensors, "spoiled.safetensors", metadata)


def test_what_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """One line, and nothing written."""
    assert main.main([*FLUX, "--out", "a.png", "--save-latents", "kept.safetensors"]) == 0
    safetensors.torch.save_file({"a": torch.zeros(2)}, "other.safetensors")
    content = Path("kept.safetensors").read_bytes()
    Path("short.safetensors").write_bytes(content[:-8])
    capsys.readouterr()
    for words, says in [
        (("kept.safetensors", "--transformer", "a"), "--transformer is not known; see ditile decode --help-all"),
        (("short.safetensors",), "is not a whole safetensors file"),
        (("other.safetensors",), "other.safetensors has no latents of ditile"),
        (("kept.safetensors", "--model", "shapes-wan"), "the vae of shapes-wan has another config than that of kept"),
        (("kept.safetensors", "--ranks", "1000"), "each rank needs a row of the latents, which have 32"),
        (("kept.safetensors", "--out", "kept.safetensors"), "name it kept.png"),
    ]:
        assert says in refused(capsys, "decode", *words), words
    for changes, says in [
        ({"kind": "video"}, "name it b.mp4"),
        ({"kind": "text"}, "that are not of this version: ('kind',)"),
        ({"texts": {}}, ""),
        ({"texts": {"\u4e00": "a"}}, "cannot decode spoiled.safetensors"),
        ({"parts": {}}, "cannot decode spoiled.safetensors"),
        ({"parts": {"os": ""}}, "that are not of this version: ('parts'"),
        ({"parts": {"vae": "0"}}, "the vae of shapes-flux has another config"),
        ({"size": [8, None]}, "cannot decode spoiled.safetensors"),
        ({"pictures": 3}, "that are not of this version: ('pictures',)"),
        ({"pictures": [("a", 1), ("b", 2)]}, "has more prompts than latents"),
    ]:
        rewrite(changes)
        words = ("decode", "spoiled.safetensors", "--out", "b.png", "--threads", "1")
        if says:
            assert says in refused(capsys, *words), changes
        else:
            assert main.main([*words]) == 0
            Path("b.png").unlink()
            capsys.readouterr()
    rewrite({}, leave_out="vae.z")
    assert "has no latents of ditile" in refused(capsys, "decode", "spoiled.safetensors")
    assert "is for one call" in refused(capsys, *FLUX, "--perf", "--save-latents", "b.safetensors")
    # After the model is loaded, and before the first step.
    with mock.patch.object(generate, "explain_unkept", return_value="latents are not kept"):
        line = refused(capsys, *FLUX, "--save-latents", "b.safetensors")
    assert line.endswith("save_latents='b.safetensors': latents are not kept\n")


@pytest.mark.parametrize(("name", "samples"), [("pixart-sigma", 32), ("sana", 32), ("sana-video", 30)])
def test_what_is_decoded_is_cut_to_the_size_of_the_call(name: str, samples: int) -> None:
    """By the class that the pipeline itself cuts with."""
    pipe = ZOO[name].make()
    # Of these sizes the classes have a table; its row is that of the tiny call.
    pipe.transformer.register_to_config(sample_size=samples)
    arguments = ZOO[name].call() | {"use_resolution_binning": True, "num_inference_steps": 1}
    del arguments["output_type"]
    row = (arguments["height"], arguments["width"])
    arguments |= {"height": row[0] - 3, "width": row[1] - 5}
    processor = getattr(pipe, "image_processor", None) or pipe.video_processor
    with mock.patch.object(type(processor), "classify_height_width_bin", return_value=row):
        expected, found = decode_twice(pipe, arguments)
    assert explain_unkept(pipe, arguments) is None and expected[0].shape[-3:-1] == (row[0] - 3, row[1] - 5)
    assert len(found) == len(expected) and all(map(np.array_equal, found, expected))
    del arguments["height"]
    assert "give --height and --width" in str(explain_unkept(pipe, arguments))


def decode_twice(pipe: Any, arguments: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """What a call returns, and what is decoded of its file; nothing if that cannot be decoded."""
    facts = build_facts(pipe, arguments, find_output_kind(type(pipe)))
    expected = convert(pipe, keep(pipe, arguments, facts))
    try:
        tensors = safetensors.torch.load_file("kept.safetensors")
        return expected, convert(pipe, decode.decode_inputs(pipe, facts, tensors))
    except (OSError, AttributeError, ValueError, RuntimeError):
        return expected, []


OTHERWISE = {
    "a mask may lay the image over the first one": (
        *("FluxInpaintPipeline", "Flux2KleinInpaintPipeline", "QwenImageInpaintPipeline"),
        *("QwenImageEditInpaintPipeline", "StableDiffusion3InpaintPipeline"),
    ),
    "longer videos are decoded window by window": (
        *("WanAnimatePipeline", "HunyuanVideoFramepackPipeline", "HeliosPipeline"),
    ),
    "batches are decoded image by image, or chunk by chunk": ("JoyImageEditPlusPipeline", "MotifVideoPipeline"),
    "what follows may leave out frames or videos, or check them": (
        *("ChronoEditPipeline", "HunyuanVideoImageToVideoPipeline", "HunyuanDiTPipeline"),
        *("Cosmos2_5_PredictBasePipeline", "Cosmos3OmniPipeline", "SanaWMPipeline"),
    ),
    "the VAE, or what it makes, becomes float32": ("AuraFlowPipeline", "BriaPipeline", "Ideogram4Pipeline"),
}
"""Why calls of classes may end otherwise, although the tiny ones do not."""
NOT_IN_TABLE = {name for names in OTHERWISE.values() for name in names}
UNDECODED = ("allegro", "proteina", "skyreels-v2-diffusion-forcing", "skyreels-v2-diffusion-forcing-blocks")
"""Tiny pipelines whose VAE needs tiles or makes no pictures, or that no runner calls."""


def make_decoding(name: str) -> Any:
    """A tiny pipeline with what it lacks for a decode."""
    pipe = ZOO[name].make()
    if name.startswith("ltx-2") and not is_modular(pipe):
        pipe.register_modules(vocoder=ltx_2().vocoder)
    elif name == "longcat-image":
        pipe.register_modules(vae=ZOO["longcat-image-edit"].make().vae)
    elif name == "glm-image":
        pipe.vae.register_to_config(latents_mean=[0.1] * 4, latents_std=[2.0] * 4)
    elif name == "mochi":
        # Its own have twelve channels.
        pipe.vae.register_to_config(latents_mean=None, latents_std=None)
    return pipe


@pytest.mark.nightly
# diffusers' own classes warn, which pytest takes for errors here.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in ZOO if name not in UNDECODED])
def test_any_class_of_the_table_is_decoded_alike(name: str) -> None:
    """Through a file. A failure means a class of the table whose call ends otherwise, or one that it lacks."""
    pipe = make_decoding(name)
    arguments = ZOO[name].call()
    arguments.pop("output_type", None)
    if "num_inference_steps" in arguments:
        arguments["num_inference_steps"] = 2
    refusal = explain_unkept(pipe, arguments)
    if is_modular(pipe):
        assert refusal is not None
        return
    if name in ("kandinsky-5-image", "kandinsky-5-edit"):
        # No file is written of what they return.
        assert refusal is not None
        return
    expected, found = decode_twice(pipe, arguments)
    is_equal = len(found) == len(expected) > 0 and all(map(np.array_equal, found, expected))
    if type(pipe).__name__ in NOT_IN_TABLE:
        assert refusal is not None
    else:
        assert is_equal == (refusal is None)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_the_table_has_no_class_that_is_not_compared() -> None:
    classes = [type(entry.make()).__name__ for name, entry in ZOO.items() if name not in UNDECODED]
    table = json.loads((ASSETS / "decodes.json").read_text())
    assert table == sorted(table) and set(table) <= set(classes) - NOT_IN_TABLE


def convert(pipe: Any, result: Any) -> list[Any]:
    """The arrays of a result that are written."""
    arrays = []
    for drawn, sound in results.list_outputs(pipe, result):
        arrays += [np.asarray(getattr(drawn, "samples", drawn))]
        if sound is not None:
            arrays.append(sound.samples)
    return arrays
