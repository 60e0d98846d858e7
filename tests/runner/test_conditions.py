"""What calls start from besides words, and the class that draws from it. A failure means a picture of another task."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import io
import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import huggingface_hub
import numpy as np
import pytest
from diffusers.modular_pipelines.minimax_h3.before_encoder import MiniMaxH3Ref2VASetupStep
from diffusers.modular_pipelines.minimax_h3.modular_blocks_minimax_h3 import MiniMaxH3Blocks
from PIL import Image, ImageDraw

from ditile.cli import main
from ditile.plan.errors import ModelError
from ditile.runner.requests.conditions import COMPOSING, bind_conditions, read_call_conditions
from ditile.runner.requests.facts import collect_call_facts
from ditile.runner.requests.options import GenerateOptions
from ditile.runner.requests.pictures import read_picture, read_picture_texts
from ditile.runner.requests.pipeline_choice import JOINING, choose_pipeline_class
from ditile.runner.requests.pipelines import find_output_kind
from ditile.runner.requests.videos import read_video
from ditile.serve.api.uploads import decode_upload
from tests import tiny

SMALL = ("--steps", "2", "--seed", "7", "--threads", "1")
CHOICES = [
    ("Flux", ("image",), False, "FluxImg2Img"),
    ("Flux", ("image", "mask"), False, "FluxInpaint"),
    ("Flux", ("control_image",), True, "FluxControlNet"),
    ("FluxKontext", ("image", "mask"), False, "FluxKontextInpaint"),
    ("FluxInpaint", ("image",), False, "FluxImg2Img"),
    ("QwenImage", ("image", "mask"), True, "QwenImageControlNetInpaint"),
    ("ZImage", ("image", "mask", "control_image"), True, "ZImageControlNetInpaint"),
    ("Wan", ("video",), False, "WanVideoToVideo"),
    ("LTX2", ("image",), False, "LTX2ImageToVideo"),
    ("LTX2", ("image", "last_image"), False, "LTX2Condition"),
    ("SkyReelsV2DiffusionForcing", ("image", "last_image"), False, "SkyReelsV2DiffusionForcingImageToVideo"),
]
REFUSALS = [
    ("Wan", ("image",), False, "WanPipeline takes no --image, nor does a class that works with its weights$"),
    ("QwenImageEditPlus", ("image", "mask"), False, "takes no --image and --mask"),
    ("Flux", ("control_image",), False, "takes no --control-image, .*; add --controlnet FOLDER"),
    ("PixArtSigma", ("control_image",), True, "takes no --control-image"),
    ("LTX", ("image", "last_image"), False, "takes no --image and --last-image"),
]


def find_class(name: str) -> Any:
    return getattr(diffusers, f"{name}Pipeline")


@pytest.mark.parametrize(("own", "given", "controlnet", "outcome"), [*CHOICES, *REFUSALS], ids=str)
def test_the_class_of_the_family_that_takes_what_is_given(
    own: str, given: tuple[str, ...], controlnet: bool, outcome: str
) -> None:
    """Or, where no class on the same weights does, what is said."""
    choose = functools.partial(choose_pipeline_class, find_class(own), given, {}, has_controlnet=controlnet)
    if (own, given, controlnet, outcome) in CHOICES:
        assert choose() is find_class(outcome)
        return
    with pytest.raises(ModelError, match=outcome):
        choose()


def parse_call(pipeline: type) -> ast.Module:
    return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(pipeline.__call__))))


def makes_a_list_of_images(pipeline: type) -> bool:
    """Whether a call puts its `image` into a list, unless it is one."""
    for node in ast.walk(parse_call(pipeline)):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "image":
            values = [node.value.body, node.value.orelse] if isinstance(node.value, ast.IfExp) else [node.value]
            if "[image]" in map(ast.unparse, values):
                return True
    return False


class LiveBranches(ast.NodeTransformer):
    """Keeps what a call runs in any case: of `if self.config.NAME` the branch that a config says, of others none."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def visit_If(self, node: ast.If) -> Any:  # noqa: N802 - the name that ast asks for
        self.generic_visit(node)
        name = ast.unparse(node.test).removeprefix("self.config.")
        if name not in self.config:
            return None
        return node.body if self.config[name] else node.orelse


def joins_channels(pipeline: type, config: Mapping[str, Any]) -> bool:
    """Whether every call concatenates latents and something else, for the transformer."""
    own = {name: each.default for name, each in inspect.signature(pipeline.__init__).parameters.items()}
    tree = LiveBranches(own | dict(config)).visit(parse_call(pipeline))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    inputs = {ast.unparse(word.value) for call in calls for word in call.keywords if word.arg == "hidden_states"}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or ast.unparse(node.targets[0]) not in inputs:
            continue
        for joined in ast.walk(node.value):
            if isinstance(joined, ast.Call) and ast.unparse(joined.func) == "torch.cat" and joined.args:
                parts = joined.args[0].elts if isinstance(joined.args[0], ast.List) else []
                if len({ast.unparse(part) for part in parts}) > 1:
                    return True
    return False


def test_the_tables_of_classes_are_what_their_source_says() -> None:
    """A failure, such as with a new diffusers: several images are taken for a batch, or weights of another width are
    called. Mend `COMPOSING` and `JOINING` by what the test prints."""
    composing, joining = set(), set()
    for name in dir(diffusers):
        cls = getattr(diffusers, name)
        if not name.endswith("Pipeline") or not hasattr(cls, "_get_signature_types"):
            continue
        parameters = inspect.signature(cls.__call__).parameters
        # An image that has to be there is the first frame of a video, or what noise is added to.
        is_optional = "image" in parameters and parameters["image"].default is None
        is_reference = is_optional and parameters.keys().isdisjoint(("strength", "video", "image_reference"))
        if is_reference and makes_a_list_of_images(cls):
            composing.add(name)
        with contextlib.suppress(ModelError):
            if find_output_kind(cls) == "video" and joins_channels(cls, {}):
                joining.add(name)
    assert (composing, joining) == (COMPOSING, JOINING)
    switched = {name for name in JOINING if not joins_channels(getattr(diffusers, name), {"expand_timesteps": True})}
    assert switched == {"WanImageToVideoPipeline"}


def test_one_reference_is_not_composed_twice() -> None:
    """Of several seeds a class that adds noise to a picture wants one for each, and one that composes does not."""
    picture, mask, other = (Image.new("RGB", (8, 8)) for _ in range(3))
    plus, start = read_call_conditions(diffusers.QwenImageEditPlusPipeline), {"image": [picture]}
    assert bind_conditions(plus, start, copies=2) == {"image": picture}
    assert bind_conditions(plus, {"image": [picture, other]}) == {"image": [picture, other]}
    inpaint = read_call_conditions(diffusers.FluxInpaintPipeline)
    two = bind_conditions(inpaint, start | {"mask": mask}, copies=2)
    assert two == {"image": [picture] * 2, "mask_image": [mask] * 2}
    pair = read_call_conditions(diffusers.FluxKontextInpaintPipeline)
    assert bind_conditions(pair, {"image": [picture, other]}) == {"image": picture, "image_reference": other}
    shown = read_call_conditions(diffusers.QwenImageControlNetInpaintPipeline)
    assert bind_conditions(shown, start | {"mask": mask}) == {"control_image": picture, "control_mask": mask}


def test_several_pictures_are_references_and_one_is_a_frame() -> None:
    """MiniMax-H3's `--image`. A failure means that a second picture is refused or lost, or unknown to its blocks."""
    taken = read_call_conditions(MiniMaxH3Blocks().init_pipeline())
    first, second = Image.new("RGB", (96, 64), "red"), Image.new("RGB", (64, 64), "blue")
    assert bind_conditions(taken, {"image": [first], "last_image": second}) == {"image": first, "last_image": second}
    call = bind_conditions(taken, {"image": [first, second]})
    state = MiniMaxH3Ref2VASetupStep().init_pipeline()(**call, height=64, width=64, num_frames=124)
    kinds = [(each.kind, each.has_audio) for each in state.values["normalized_references"]]
    assert kinds == [("image", False)] * 2
    with pytest.raises(ModelError, match="2 images are references, and last_image goes with one"):
        bind_conditions(taken, {"image": [first, second], "last_image": second})


def test_keyframes_are_first_and_last() -> None:
    """A failure means that a call that takes keyframes in a list is given none, or has both at the start."""
    taken = read_call_conditions(diffusers.LTX2ConditionPipeline)
    first, last = (Image.new("RGB", (8, 8)) for _ in range(2))
    (conditions,) = bind_conditions(taken, {"image": [first], "last_image": last}).values()
    assert [(each.frames is frame, each.index) for each, frame in zip(conditions, (first, last), strict=True)] == [
        (True, 0), (True, -1),
    ]  # fmt: skip
    (film,) = bind_conditions(taken, {"video": [first, last]})["conditions"]
    assert film.frames == [first, last] and film.index == 0


def test_a_strength_of_noise_and_one_of_conditions() -> None:
    """A failure means that a video which shall be left far behind is kept as it is."""
    wanted = GenerateOptions(prompt="a", video="in.webp", strength=0.6)
    call = collect_call_facts(diffusers.LTXConditionPipeline).merge_arguments(wanted, {})
    assert call["denoise_strength"] == 0.6 and "strength" not in call


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures, a mask of the right half, and a video of five frames, in a folder of the test's own."""
    monkeypatch.chdir(tmp_path)
    start = Image.new("RGB", (128, 128), "gray")
    ImageDraw.Draw(start).ellipse((20, 44, 60, 84), fill="red")
    start.save("start.png")
    mask = Image.new("L", (128, 128))
    ImageDraw.Draw(mask).rectangle((64, 0, 127, 127), fill=255)
    mask.save("mask.png")
    mask.resize((64, 64)).save("small.png")
    clear = Image.new("RGBA", (128, 128))
    clear.putalpha(Image.eval(mask, lambda value: 255 - value))
    clear.save("clear.png")
    frames = [Image.new("RGB", (64, 64), (50 * k, 0, 0)) for k in range(5)]
    frames[0].save("in.webp", save_all=True, append_images=frames[1:], lossless=True)


def generate(*words: str, model: str = "shapes-flux") -> int:
    return main.main(["generate", "a large blue square on the right", "--model", model, *SMALL, *words])


@pytest.mark.usefixtures("files")
def test_a_mask_keeps_what_it_does_not_cover(capsys: pytest.CaptureFixture[str]) -> None:
    """The pixels, and what the file says; a transparent mask is the same as a white one."""
    for mask in ("mask", "clear"):
        words = ("--image", "start.png", "--mask", f"{mask}.png", "--strength", "1", "--out", f"by-{mask}.png")
        assert generate(*words) == 0
    assert "pipeline: FluxInpaintPipeline" in capsys.readouterr().err.splitlines()
    drawn, start = (np.asarray(read_picture(name, "image"), int) for name in ("by-mask.png", "start.png"))
    change = np.abs(drawn - start).mean(axis=(0, 2))
    assert 3 * change[:56].mean() < change[72:].mean(), (change[:56].mean(), change[72:].mean())
    by_mask, by_clear = (
        json.loads(read_picture_texts(Path(f"by-{mask}.png"))["conditions"]) for mask in ("mask", "clear")
    )
    assert by_mask == by_clear and by_mask["mask"].startswith("128x128 ") and by_mask["image"] != [by_mask["mask"]]
    assert np.array_equal(np.asarray(read_picture("by-clear.png", "image")), drawn)


@pytest.mark.parametrize("name", ["deep.png", "deep.tiff", "deep.pgm"])
def test_an_image_of_16_bits_keeps_its_grays(name: str, tmp_path: Path) -> None:
    """Pillow alone would make all but the darkest of them white: in images, in masks, and in uploads too."""
    grays = np.array([[0, 1, 127], [128, 254, 255]], np.uint16)
    path = tmp_path / name
    if name.endswith(".pgm"):
        path.write_bytes(b"P5 3 2 65535 " + (grays * 257).astype(">u2").tobytes())
    else:
        Image.fromarray(grays * 257).save(path)
    assert np.array_equal(np.asarray(read_picture(path, "image"))[..., 0], grays)
    assert np.array_equal(np.asarray(read_picture(path, "mask", is_mask=True)), grays)
    if name.endswith(".png"):
        upload = decode_upload(path.read_bytes(), "image", 6)
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(upload.png)))[..., 1], grays)


def test_an_image_of_floats_is_refused(tmp_path: Path) -> None:
    """Numbers from 0 to 1 would all be black."""
    Image.new("F", (2, 2), 0.5).save(tmp_path / "deep.tiff")
    with pytest.raises(ModelError, match="floating-point; save it with 8 or 16 bits"):
        read_picture(tmp_path / "deep.tiff", "image")


@pytest.mark.usefixtures("files")
def test_a_controlnet_from_a_folder(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes the picture, and is refused where it is of another family or no ControlNet."""
    pipe = tiny.flux()
    pipe.save_pretrained("model")
    diffusers.FluxControlNetModel.from_transformer(
        pipe.transformer, num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=4
    ).save_pretrained("net")
    words = ("--control-image", "start.png", "--height", "32", "--width", "32")
    assert generate(*words, "--controlnet", "net", "--out", "a.png", model="model") == 0
    assert "pipeline: FluxControlNetPipeline" in capsys.readouterr().err
    texts = json.loads(read_picture_texts(Path("a.png"))["conditions"])
    assert texts["control_image"].startswith("128x128 ") and texts["controlnet"] == "net"
    Path("net", "diffusion_pytorch_model.safetensors").rename("net/diffusion_pytorch_model.bin")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    wrong = {"net": "a pickle", "model/vae": "no ControlNet", "model": "config.json", "no": "not a file"}
    wrong["nobody/none"] = "controlnet 'nobody/none' is not in the hub's cache"
    for name, says in wrong.items():
        assert generate(*words, "--controlnet", name, "--out", "b.png", model="model") == 2
        assert says in capsys.readouterr().err.splitlines()[-1]
    assert not Path("b.png").exists()


@pytest.mark.usefixtures("files")
def test_a_video_from_a_video(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--video", "in.webp", "--out", "out.webp", "--strength", "0.5")
    assert generate(*words, model="shapes-wan") == 0
    assert "pipeline: WanVideoToVideoPipeline" in capsys.readouterr().err
    assert len(read_video("out.webp", "video")) == 5
    assert generate(*words, "--frames", "4", model="shapes-wan") == 2
    assert "frames=4: the VAE of WanVideoToVideoPipeline makes 1 + a multiple of 4" in capsys.readouterr().err
    assert generate(*words, "--frames", "9", model="shapes-wan") == 2
    assert "has 5 frames, and frames=9" in capsys.readouterr().err


WRONG = [
    (("--image", "mask.txt"), "cannot be read as an image"),
    (("--image", "start.png", "--mask", "small.png"), "is 64x64, and its image 128x128"),
    (("--mask", "mask.png"), "mask='mask.png' goes with an image; add --image FILE"),
    (("--image", "start.png", "--image", "mask.png"), "starts from 1 at most, and not from 2 images"),
]


@pytest.mark.parametrize(("words", "says"), WRONG, ids=str)
@pytest.mark.usefixtures("files")
def test_wrong_conditions_are_one_line(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str) -> None:
    Path("mask.txt").write_text("no picture")
    before = {path: path.read_bytes() for path in Path().iterdir()}
    for dry in ((), ("--dry-run",)):
        assert generate(*words, *dry) == 2
        out, err = capsys.readouterr()
        assert says in err and out == "" and err.count("\n") == 1, err
    assert {path: path.read_bytes() for path in Path().iterdir()} == before
