"""ComfyUI's own samplers draw the same latents with diffusers' transformer behind the node as with ComfyUI's own model.

Both have the same random weights. A failure means that a workflow draws something else once its model runs elsewhere.
Needs ComfyUI: DITILE_COMFYUI names its folder, and behind a colon those of packages that it needs.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.loaders import single_file_utils

from tests.serve.comfy import load_nodes
from tests.serve.comfyui_pairs import (
    FIGURES,
    PAIRS,
    LocalConnection,
    Pair,
    build_transformer,
    describe_output,
    make_call,
)

FOLDERS = os.environ.get("DITILE_COMFYUI", "")
pytestmark = pytest.mark.skipif(not FOLDERS, reason="DITILE_COMFYUI names no folder of ComfyUI")
PACKAGE = "custom_nodes_ditile_itself"
STEPS = 3
# Both sides compute in float32, in another order here and there; over three steps with guidance it adds up to this.
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def comfy() -> Iterator[SimpleNamespace]:
    """ComfyUI's modules, and the node's, as ComfyUI imports them."""
    before = set(sys.modules)
    folder, *others = FOLDERS.split(os.pathsep)
    sys.path.insert(0, folder)
    sys.path.extend(others)
    try:
        importlib.import_module("comfy.cli_args").args.cpu = True
        names = ("sample", "model_detection", "model_management", "model_patcher", "nested_tensor")
        modules = {name: importlib.import_module(f"comfy.{name}") for name in names}
        load_nodes(PACKAGE)
        yield SimpleNamespace(**modules, node=importlib.import_module(f"{PACKAGE}.forward_model"))
    finally:
        sys.path[:] = [path for path in sys.path if path not in (folder, *others)]
        for name in set(sys.modules) - before:
            if name.partition(".")[0] in ("comfy", PACKAGE):
                del sys.modules[name]


def build_own_model(comfy: SimpleNamespace, pair: Pair, transformer: Any) -> Any:
    """Return ComfyUI's own MODEL with the weights of diffusers' transformer."""
    config = comfy.model_detection.model_config_from_unet_config(dict(pair.comfy))
    # Z-Image is told from Lumina 2 by its width, which the tiny one has not.
    if "z_image_modulation" in pair.comfy:
        config = comfy.model_detection.model_config_from_unet_config({**pair.comfy, "dim": 3840})
        config.unet_config["dim"] = pair.comfy["dim"]
    config.set_inference_dtype(torch.float32, None)
    model = config.get_model({}, "", device="cpu")
    state = convert_weights(comfy, transformer.state_dict(), model.diffusion_model.state_dict(), pair.convert)
    model.diffusion_model.load_state_dict(state, strict=False)
    return comfy.model_patcher.ModelPatcher(model, torch.device("cpu"), torch.device("cpu"))


def convert_weights(comfy: SimpleNamespace, weights: Any, own: dict[str, torch.Tensor], convert: str) -> Any:
    """Return diffusers' weights under the names of ComfyUI's model.

    diffusers' conversions go the other way: they are done with numbers in the place of weights, and each number says
    where the weight of its place belongs.
    """
    shapes = {name: value.shape for name, value in own.items() if not name.startswith("__")}
    if not convert:
        # It changes some of what it takes.
        state = comfy.model_detection.convert_diffusers_mmdit(copy.deepcopy(dict(weights))) or weights
        assert {name: value.shape for name, value in state.items()} == shapes
        return state
    sizes = [shape.numel() for shape in shapes.values()]
    pieces = zip(shapes.items(), torch.arange(sum(sizes)).split(sizes), strict=True)
    numbers = {name: piece.view(shape) for (name, shape), piece in pieces}
    converted = getattr(single_file_utils, convert)(dict(numbers))
    assert set(converted) == set(weights)
    flat = torch.full((sum(sizes),), torch.nan)
    for name, places in converted.items():
        flat[places.flatten()] = weights[name].flatten()
    assert not flat.isnan().any()
    return {name: flat[places] for name, places in numbers.items()}


def draw(comfy: SimpleNamespace, model: Any, pair: Pair, steps: int = STEPS) -> torch.Tensor:
    """Return what ComfyUI's KSampler makes of noise."""
    generator = torch.Generator().manual_seed(2)
    shapes = [pair.latent, pair.sound] if pair.sound else [pair.latent]
    noise, latents = ([torch.randn(shape, generator=generator) for shape in shapes] for _ in range(2))
    masks = [torch.ones(1, 1, *shape[2:]) for shape in shapes]
    masks[0][:, :, 0] = 0
    prompts = []
    for strength in (1.0, 0.5):
        text = torch.randn(1, *pair.text, generator=generator) * strength
        conditions = {"pooled_output": torch.randn(1, 12, generator=generator), **pair.conditions}
        prompts.append([[text, conditions]])

    def pack(parts: list[torch.Tensor]) -> Any:
        return comfy.nested_tensor.NestedTensor(parts) if pair.sound else parts[0]

    settings = {"noise_mask": pack(masks) if pair.has_mask else None, "disable_pbar": True, "seed": 3}
    result = comfy.sample.sample(model, pack(noise), steps, 3.0, "euler", "simple", *prompts, pack(latents), **settings)
    return torch.cat([part.flatten() for part in result.unbind()])


@pytest.mark.parametrize("name", PAIRS)
@torch.inference_mode()
def test_the_adapter_draws_what_comfyuis_own_model_draws(comfy: SimpleNamespace, name: str) -> None:
    """The same weights in ComfyUI's class and, behind the adapter, in diffusers': a whole run, and a single call.

    The figures of the single call are those that `test_comfyui_forward` compares with where ComfyUI is not installed.
    """
    pair = PAIRS[name]
    transformer = build_transformer(pair)
    own = build_own_model(comfy, pair, transformer)
    expected = draw(comfy, own, pair)
    connection = LocalConnection(transformer)
    remote = comfy.node.load_model(lambda: connection)
    drawn = draw(comfy, remote, pair)
    assert {} in connection.log and not list(remote.model.diffusion_model.parameters())
    assert (drawn - expected).abs().max() <= TOLERANCE * expected.abs().max()
    if pair.conditions:
        # Conditions that do nothing in so small a model would prove nothing.
        without = draw(comfy, own, replace(pair, conditions={}))
        assert (without - expected).abs().max() > 100 * TOLERANCE * expected.abs().max()
    x, timestep, text = make_call(pair)
    called = own.model.diffusion_model(x, timestep, context=text, transformer_options={}, **pair.extra)
    figures = json.loads(FIGURES.read_text("utf-8"))
    if os.environ.get("DITILE_RECORD"):
        FIGURES.write_text(json.dumps({**figures, name: describe_output(called)}, indent=1) + "\n", "utf-8")
    else:
        assert describe_output(called) == pytest.approx(figures[name], rel=1e-4, abs=1e-5)


@torch.inference_mode()
def test_nodes_that_go_round_a_step_have_their_effect(comfy: SimpleNamespace) -> None:
    """Another shift of the schedule, a cache that leaves out steps, and a prompt for a part of the picture."""
    pair = PAIRS["z-image"]
    transformer = build_transformer(pair)
    own = build_own_model(comfy, pair, transformer)
    remote = comfy.node.load_model(lambda: LocalConnection(transformer))
    shift = importlib.import_module("comfy_extras.nodes_model_advanced").ModelSamplingAuraFlow()
    cache = importlib.import_module("comfy_extras.nodes_easycache").EasyCacheNode
    area = replace(pair, conditions={"area": (4, 6, 0, 4), "strength": 1.0})
    rows = {
        "shift": lambda model: draw(comfy, shift.patch_aura(model, 7.0)[0], pair),
        "cache": lambda model: draw(comfy, cache.execute(model, 3.0, 0.0, 1.0, False).result[0], pair, steps=8),
        "area": lambda model: draw(comfy, model, area),
    }
    plain = {steps: draw(comfy, own, pair, steps) for steps in (STEPS, 8)}
    for name, run in rows.items():
        expected = run(own)
        assert (run(remote) - expected).abs().max() <= TOLERANCE * expected.abs().max(), name
        without = plain[8 if name == "cache" else STEPS]
        assert (expected - without).abs().max() > 100 * TOLERANCE * expected.abs().max(), name
