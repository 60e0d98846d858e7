"""ComfyUI's own samplers draw the same latents with diffusers' transformer behind the node as with ComfyUI's own model.

Both have the same random weights. A failure means that a workflow draws something else once its model runs elsewhere.
Needs ComfyUI: DITILE_COMFYUI names its folder, and behind a colon those of packages that it needs.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.serve.comfy import load_nodes
from tests.serve.comfyui_pairs import (
    FIGURES,
    PAIRS,
    Pair,
    build_transformer,
    call_transformer,
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
        names = ("sample", "model_detection", "model_management", "model_patcher", "nested_tensor", "utils")
        modules = {name: importlib.import_module(f"comfy.{name}") for name in names}
        load_nodes(PACKAGE)
        yield SimpleNamespace(**modules, node=importlib.import_module(f"{PACKAGE}.forward_model"))
    finally:
        sys.path[:] = [path for path in sys.path if path not in (folder, *others)]
        for name in set(sys.modules) - before:
            if name.partition(".")[0] in ("comfy", PACKAGE):
                del sys.modules[name]


class LocalConnection:
    """Calls a transformer of diffusers in this process, as the worker would."""

    def __init__(self, transformer: Any) -> None:
        self.transformer = transformer
        self.calls: list[Mapping[str, Any]] = []
        self.loras: list[tuple[str, float]] = []

    def connect(self) -> None:
        pass

    def close(self) -> None:
        pass

    def hello(self) -> dict[str, Any]:
        config = {name: value for name, value in self.transformer.config.items() if not name.startswith("_")}
        name = type(self.transformer).__name__
        return {"model": name, "config": config, "dtype": "float32", "plan": "", "ranks": 1, "loras": ["fox", "owl"]}

    def forward(self, arguments: Mapping[str, Any], loras: Mapping[str, float]) -> Any:
        self.calls.append(arguments)
        self.loras = list(loras.items())
        return call_transformer(self.transformer, arguments)


def build_own_model(comfy: SimpleNamespace, pair: Pair, transformer: Any) -> Any:
    """Return ComfyUI's own MODEL with the weights of diffusers' transformer."""
    config = comfy.model_detection.model_config_from_unet_config(dict(pair.comfy))
    # Z-Image is told from Lumina 2 by its width, which the tiny one has not.
    if "z_image_modulation" in pair.comfy:
        config = comfy.model_detection.model_config_from_unet_config({**pair.comfy, "dim": 3840})
        config.unet_config["dim"] = pair.comfy["dim"]
    config.set_inference_dtype(torch.float32, None)
    model = config.get_model({}, "", device="cpu")
    copy_weights(transformer.state_dict(), model.diffusion_model, pair, config.unet_config)
    return comfy.model_patcher.ModelPatcher(model, torch.device("cpu"), torch.device("cpu"))


def copy_weights(weights: Mapping[str, torch.Tensor], own: Any, pair: Pair, config: Any) -> None:
    """Copy diffusers' weights into ComfyUI's model.

    The conversion goes the other way: it is done with numbers in the place of weights, and each number says where the
    weight of its place belongs.
    """
    parameters = {name: value for name, value in own.state_dict().items() if not name.startswith("__")}
    start = 0
    numbers = {}
    for name, value in parameters.items():
        numbers[name] = torch.arange(start, start + value.numel()).reshape(value.shape)
        start += value.numel()
    converted = CONVERSIONS[pair.convert](dict(numbers), config) if pair.convert else numbers
    assert set(converted) == set(weights)
    flat = torch.full((start,), torch.nan)
    for name, places in converted.items():
        flat[places.flatten()] = weights[name].flatten()
    assert not flat.isnan().any()
    state = {name: flat[places] for name, places in numbers.items()}
    own.load_state_dict(state, strict=False)


def draw(comfy: SimpleNamespace, model: Any, pair: Pair, steps: int = STEPS) -> torch.Tensor:
    """Return what ComfyUI's KSampler makes of noise."""
    generator = torch.Generator().manual_seed(2)
    noise = torch.randn(pair.latent, generator=generator)
    latent = torch.randn(pair.latent, generator=generator) if pair.has_mask else torch.zeros(pair.latent)
    prompts = []
    for strength in (1.0, 0.5):
        text = torch.randn(1, *pair.text, generator=generator) * strength
        conditions = {"pooled_output": torch.randn(1, 12, generator=generator), **pair.conditions}
        prompts.append([[text, conditions]])
    mask = None
    if pair.has_mask:
        mask = torch.ones(1, 1, *pair.latent[2:])
        mask[:, :, 0] = 0
    if pair.sound:
        sound = torch.randn(pair.sound, generator=generator)
        noise = comfy.nested_tensor.NestedTensor((noise, sound))
        latent = comfy.nested_tensor.NestedTensor((latent, torch.zeros(pair.sound)))
        if mask is not None:
            mask = comfy.nested_tensor.NestedTensor((mask, torch.ones(1, 1, *pair.sound[2:])))
    result = comfy.sample.sample(
        model, noise, steps, 3.0, "euler", "simple", *prompts, latent, noise_mask=mask, disable_pbar=True, seed=3
    )
    return torch.cat([part.flatten() for part in result.unbind()]) if pair.sound else result


def convert_by_map(weights: Mapping[str, torch.Tensor], names: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return diffusers' weights by one of ComfyUI's maps: name -> (name, (dim, start, length), function)."""
    converted = {}
    for name, target in names.items():
        source, cut, function = target if isinstance(target, tuple) and len(target) == 3 else (target, None, None)
        if isinstance(target, tuple) and len(target) == 2:
            source, cut = target
        if source not in weights:
            continue
        value = weights[source] if cut is None else weights[source].narrow(*cut)
        # The function swaps two halves, so that it is its own inverse.
        converted[name] = value if function is None else function(value)
    return converted


FILES: Any = importlib.import_module("diffusers.loaders.single_file_utils")
CONVERSIONS = {
    "flux": lambda weights, config: convert_by_map(weights, sys.modules["comfy.utils"].flux_to_diffusers(config)),
    "z_image": lambda weights, config: convert_by_map(weights, sys.modules["comfy.utils"].z_image_to_diffusers(config)),
    "flux2": lambda weights, _: FILES.convert_flux2_transformer_checkpoint_to_diffusers(weights),
    "ltx2": lambda weights, _: FILES.convert_ltx2_transformer_to_diffusers(weights),
    "wan": lambda weights, _: FILES.convert_wan_transformer_to_diffusers(weights),
}


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
    assert connection.calls and not list(remote.model.diffusion_model.parameters())
    assert (drawn - expected).abs().max() <= TOLERANCE * expected.abs().max()
    if pair.conditions:
        # Conditions that do nothing in so small a model would prove nothing.
        without = draw(comfy, own, replace(pair, conditions={}))
        assert (without - expected).abs().max() > 100 * TOLERANCE * expected.abs().max()
    x, timestep, text = make_call(pair)
    called = own.model.diffusion_model(x, timestep, context=text, transformer_options={}, **pair.extra)
    figures = json.loads(FIGURES.read_text("utf-8")) if FIGURES.exists() else {}
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
