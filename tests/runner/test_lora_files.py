"""LoRAs as trainers write them, with the names of diffusers, kohya and ComfyUI; and damaged ones."""

from __future__ import annotations

import logging
import math
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import ditile
from ditile.parallel.tensor.cuts import unwrap_lora_base
from ditile.plan.errors import ModelError
from ditile.plan.plan import Plan
from ditile.runner.lora import list_loaded_loras, select_loras
from ditile.runner.requests.cache_options import CacheOptions
from ditile.runner.requests.prepare import load_loras
from ditile.runner.runner import parallelize
from tests import tiny
from tests.pool import Pool
from tests.runner.cases import different, measure_error, same
from tests.zoo import ZOO
from tests.zoo.rows import ENOUGH, list_tensors

RANK, ALPHA = 4, 2
SCALE = 0.75
TOLERANCE = 1e-5
PROJECTION = "transformer_blocks.0.attn.to_out.0"
STAGES = {"pipefusion": 2, "patches": 2, "warmup": ENOUGH}
WAN_LAYERS = {"self_attn": "attn1", "cross_attn": "attn2"}
WAN_LINEARS = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0"}


def map_wan_names() -> dict[str, list[str]]:
    """All layers of four blocks: the converter of kohya's names wants each of them."""
    names = {}
    for block in range(4):
        for attention, ours in WAN_LAYERS.items():
            for linear, module in WAN_LINEARS.items():
                names[f"blocks.{block}.{attention}.{linear}"] = [f"blocks.{block}.{ours}.{module}"]
        names[f"blocks.{block}.ffn.0"] = [f"blocks.{block}.ffn.net.0.proj"]
        names[f"blocks.{block}.ffn.2"] = [f"blocks.{block}.ffn.net.2"]
    return names


QWEN_IMAGE = """
    transformer_blocks.0.attn.to_q transformer_blocks.1.attn.add_k_proj transformer_blocks.2.img_mlp.net.0.proj
    transformer_blocks.3.attn.to_out.0
"""
Z_IMAGE = "layers.0.attention.to_q layers.1.attention.to_out.0 layers.2.feed_forward.w1 layers.3.feed_forward.w2"
LAYERS: dict[str, dict[str, list[str]]] = {
    "flux": {
        "double_blocks.0.img_attn.proj": ["transformer_blocks.0.attn.to_out.0"],
        "double_blocks.0.txt_mlp.0": ["transformer_blocks.0.ff_context.net.0.proj"],
        "double_blocks.1.img_attn.qkv": [f"transformer_blocks.1.attn.to_{part}" for part in "qkv"],
        "single_blocks.1.linear2": ["single_transformer_blocks.1.proj_out"],
    },
    "qwen-image": {name: [name] for name in QWEN_IMAGE.split()},
    "z-image": {name: [name] for name in Z_IMAGE.split()},
    "wan-2.1": map_wan_names(),
}
"""The names of layers in the authors' own code -> those of diffusers, several where one is fused."""


def make_factors(model: nn.Module, name: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Random factors of a family's layers, by the authors' names; of a fused layer B has the outputs of all."""
    random = torch.Generator().manual_seed(1)
    factors = {}
    for path, modules in LAYERS[name].items():
        linears: list[Any] = [unwrap_lora_base(model.get_submodule(module)) for module in modules]
        down = 0.3 * torch.randn(RANK, linears[0].in_features, generator=random)
        up = 0.3 * torch.randn(sum(linear.out_features for linear in linears), RANK, generator=random)
        factors[path] = (down, up)
    return factors


def name_as_diffusers(name: str, factors: dict[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """With alphas where diffusers takes them, and otherwise with what they do in the factors."""
    scale = 1.0 if name == "flux" else ALPHA / RANK
    state = {}
    for path, (down, up) in factors.items():
        modules = LAYERS[name][path]
        for module, part in zip(modules, up.chunk(len(modules)), strict=True):
            state[f"transformer.{module}.lora_A.weight"] = down.clone()
            state[f"transformer.{module}.lora_B.weight"] = part * scale
            if name == "flux":
                state[f"transformer.{module}.alpha"] = torch.tensor(float(ALPHA))
    return state


def name_as_authors(
    name: str, factors: dict[str, tuple[Tensor, Tensor]], prefix: str, separator: str, ends: tuple[str, str]
) -> dict[str, Tensor]:
    state = {}
    for path, (down, up) in factors.items():
        own = prefix + path.replace(".", separator)
        state |= {f"{own}.{ends[0]}.weight": down, f"{own}.{ends[1]}.weight": up}
        state[f"{own}.alpha"] = torch.tensor(float(ALPHA))
    return state


STYLES: dict[str, Callable[..., dict[str, Tensor]]] = {
    "diffusers": name_as_diffusers,
    "kohya": partial(name_as_authors, prefix="lora_unet_", separator="_", ends=("lora_down", "lora_up")),
    "comfy": partial(name_as_authors, prefix="diffusion_model.", separator=".", ends=("lora_A", "lora_B")),
}


def write_styles(folder: Path, model: nn.Module, name: str) -> None:
    factors = make_factors(model, name)
    for style, rename in STYLES.items():
        save_file(rename(name, factors), folder / f"{style}.safetensors")


def draw(pipe: Any, name: str) -> Tensor:
    return list_tensors(pipe(**ZOO[name].call()))[0]


def draw_in_every_style(name: str, folder: Path, plan: dict[str, Any]) -> list[Tensor]:
    """The image with the LoRA of each style, one after the other, and the plain one."""
    pipe = ZOO[name].make()
    runner = parallelize(pipe, Plan(**plan))
    images = []
    for style in STYLES:
        ditile.load_lora(pipe, folder / f"{style}.safetensors", adapter_name=style)
        select_loras(pipe, {style: SCALE})
        images.append(draw(runner, name))
    pipe.unload_lora_weights()
    return [*images, draw(runner, name)]


@pytest.mark.nightly
@pytest.mark.parametrize("name", LAYERS)
def test_names_of_every_trainer_make_one_image(pool: Pool, tmp_path: Path, name: str) -> None:
    """A failure: names that a stage takes for those of another layer, or factors that are not cut as their layer is."""
    pipe = ZOO[name].make()
    write_styles(tmp_path, pipe.transformer, name)
    plain = draw(pipe, name)
    pipe.load_lora_weights(tmp_path, weight_name="diffusers.safetensors", adapter_name="own")
    pipe.set_adapters("own", SCALE)
    wanted = draw(pipe, name)
    different(wanted, plain, name)
    for images in pool.run(draw_in_every_style, 2, name, tmp_path, STAGES):
        for style, image in zip([*STYLES, "unloaded"], images, strict=True):
            same(image, plain if style == "unloaded" else wanted, style)
    for images in pool.run(draw_in_every_style, 2, name, tmp_path, {"tensor": 2}):
        for style, image in zip([*STYLES, "unloaded"], images, strict=True):
            assert measure_error(image, plain if style == "unloaded" else wanted) < TOLERANCE, style


@contextmanager
def logged(name: str) -> Iterator[list[str]]:
    """What a logger says."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    yield lines
    logging.getLogger(name).removeHandler(handler)


def load_with_others(folder: Path) -> list[str]:
    """On a rank of two stages: what the log says of keys that nothing takes."""
    pipe = tiny.flux()
    runner = parallelize(pipe, Plan(**STAGES))
    with logged("ditile.runner.weights.lora_keys") as lines:
        ditile.load_lora(pipe, folder / "others.safetensors", adapter_name="own")
    assert draw(runner, "flux").isfinite().all()
    return lines


def test_keys_that_nothing_takes_are_named(pool: Pool, tmp_path: Path) -> None:
    """On every rank alike. A failure: a part of a LoRA is left out, and nobody learns of it."""
    pipe = tiny.flux()
    state = name_as_diffusers("flux", make_factors(pipe.transformer, "flux"))
    state["transformer.transformer_blocks.7.attn.to_q.lora_A.weight"] = torch.ones(4, tiny.WIDTH)
    state["transformer.transformer_blocks.7.attn.to_q.lora_B.weight"] = torch.ones(tiny.WIDTH, 4)
    state["transformer.transformer_blocks.0.attn.to_q.lora_A.weight"] = torch.ones(4, tiny.WIDTH)
    state["text_encoder_3.layers.0.lora_A.weight"] = torch.ones(4, 4)
    save_file(state, tmp_path / "others.safetensors")
    path = str(tmp_path / "others.safetensors")
    for lines in pool.run(load_with_others, 2, tmp_path):
        assert len(lines) == 1 and "\n" not in lines[0]
        assert f"lora={path!r} is applied in part: nothing of this FluxPipeline takes its 4 keys (" in lines[0]
        assert "text_encoder_3.layers.0.lora_A.weight" in lines[0] and lines[0].endswith(", ..)")


def draw_with_two_loras(folder: Path, plan: dict[str, Any], options: dict[str, Any]) -> tuple[Tensor, list[str]]:
    """The image of Wan 2.2 with a LoRA in each transformer, as the command loads them, and what the log says."""
    pipe = ZOO["wan-2.2"].make()
    runner = parallelize(pipe, Plan(**plan))
    texts = (f"{folder}/high.safetensors:{SCALE}", f"transformer_2={folder}/low.safetensors:{SCALE}")
    with logged("ditile.runner") as lines:
        load_loras(pipe, CacheOptions(lora=texts, **options))
    return draw(runner, "wan-2.2"), lines


def load_two_loras(folder: Path) -> tuple[Any, Tensor]:
    """Wan 2.2 with a file for each transformer, written there and loaded by diffusers; and the image without them."""
    pipe = ZOO["wan-2.2"].make()
    plain = draw(pipe, "wan-2.2")
    for part, into_second in (("high", False), ("low", True)):
        factors = make_factors(getattr(pipe, "transformer_2" if into_second else "transformer"), "wan-2.1")
        if into_second:
            factors = {path: (down, -up) for path, (down, up) in factors.items()}
        save_file(name_as_diffusers("wan-2.1", factors), folder / f"{part}.safetensors")
        pipe.load_lora_weights(
            folder, weight_name=f"{part}.safetensors", adapter_name=part, load_into_transformer_2=into_second
        )
    return pipe, plain


def test_a_lora_for_each_of_two_transformers(pool: Pool, tmp_path: Path) -> None:
    """A failure: a file is loaded into the other transformer, or a scale reaches one of them alone."""
    pipe, plain = load_two_loras(tmp_path)
    pipe.set_adapters(["high", "low"], [SCALE, SCALE])
    wanted = draw(pipe, "wan-2.2")
    different(wanted, plain)
    for image, lines in pool.run(draw_with_two_loras, 2, tmp_path, STAGES, {}):
        same(image, wanted)
        assert not lines
    for plan, options in (({"tensor": 2}, {}), (STAGES, {"fuse_lora": True})):
        for image, _ in pool.run(draw_with_two_loras, 2, tmp_path, plan, options):
            assert measure_error(image, wanted) < TOLERANCE, (plan, options)


def add_text_factors(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A LoRA's values, and factors of the attention of FLUX's first text encoder."""
    random = torch.Generator().manual_seed(2)
    added = dict(state)
    for path, module in tiny.flux().text_encoder.named_modules():
        if path.endswith("v_proj"):
            name = f"text_encoder.{path}"
            added[f"{name}.lora_A.weight"] = 3 * torch.randn(4, module.in_features, generator=random)
            added[f"{name}.lora_B.weight"] = 3 * torch.randn(module.out_features, 4, generator=random)
    return added


def write_hostile(folder: Path) -> dict[str, str]:
    """Files that are not LoRAs of FLUX -> what is said of each."""
    good = name_as_diffusers("flux", make_factors(tiny.flux().transformer, "flux"))
    save_file(good, folder / "good.safetensors")
    whole = (folder / "good.safetensors").read_bytes()
    (folder / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    (folder / "pickle.bin").write_bytes(pickle.dumps(good))
    down = {name: factor for name, factor in good.items() if "lora_A" in name}
    norm = "text_encoder.final_layer_norm"
    late = {f"{norm}.lora_A.weight": torch.ones(4, tiny.WIDTH), f"{norm}.lora_B.weight": torch.ones(tiny.WIDTH, 4)}
    files = {
        "wide": good | {name: torch.cat([factor, factor], dim=-1) for name, factor in down.items()},
        "nan": good | {f"transformer.{PROJECTION}.alpha": torch.tensor(math.nan)},
        "late": add_text_factors(good) | late,
        "loha": {"transformer.transformer_blocks.0.attn.to_q.hada_w1_a": torch.ones(4, 4)},
        "wan": name_as_diffusers("wan-2.1", make_factors(ZOO["wan-2.1"].make().transformer, "wan-2.1")),
    }
    for file, state in files.items():
        save_file(state, folder / f"{file}.safetensors")
    return {
        "cut.safetensors": "cannot be loaded: ",
        "pickle.bin": "is no .safetensors file (pickle.bin), and other files may run code when they are read",
        "wide.safetensors": ".lora_A.weight of shape [4, 320] does not fit a layer of 160 inputs and 32 outputs",
        "nan.safetensors": ".alpha is [nan], and an alpha is one finite number",
        "late.safetensors": "cannot be loaded: Target module LayerNorm",
        "wan.safetensors": "changes nothing of this FluxPipeline: no layer takes its ",
        "loha.safetensors": "has no LoRA or LoKr factors for the transformer: transformer.transformer_blocks.0",
    }


def be_refused(folder: Path, files: list[str], plan: dict[str, Any]) -> list[str]:
    """What is said of each file; the image is as before after all of them."""
    pipe = tiny.flux()
    runner = parallelize(pipe, Plan(**plan))
    plain = draw(runner, "flux")
    lines = []
    for file in files:
        with pytest.raises(ModelError) as refused:
            ditile.load_lora(pipe, folder / file, adapter_name="own")
        lines.append(str(refused.value))
        assert not list_loaded_loras(pipe)
    same(draw(runner, "flux"), plain)
    ditile.load_lora(pipe, folder / "good.safetensors", adapter_name="own")
    ditile.load_lora(pipe, folder / "good.safetensors", adapter_name="more")
    select_loras(pipe, {"own": 0.4, "more": 0.3})
    wanted = draw(runner, "flux")
    different(wanted, plain)
    with pytest.raises(ModelError, match="Target module"):
        ditile.load_lora(pipe, folder / "late.safetensors", adapter_name="late")
    assert list_loaded_loras(pipe) == {"own", "more"}
    same(draw(runner, "flux"), wanted)
    return lines


@pytest.mark.parametrize("plan", [{}, {"tensor": 2}])
def test_hostile_files_are_refused_in_one_line(pool: Pool, tmp_path: Path, plan: dict[str, Any]) -> None:
    """A failure: a traceback of another library, or a pipeline that is changed by half."""
    says = write_hostile(tmp_path)
    for lines in pool.run(be_refused, Plan(**plan).world, tmp_path, list(says), plan):
        for (file, text), line in zip(says.items(), lines, strict=True):
            assert line.startswith(f"lora={str(tmp_path / file)!r} ") and text in line, line
            assert "\n" not in line and len(line) < 700
