"""ComfyUI's own samplers draw the same latents with diffusers' transformer behind the node as with ComfyUI's own model.

Both have the same random weights. A failure means that a workflow draws something else once its model runs elsewhere.
Needs ComfyUI: DITILE_COMFYUI names its folder, and behind a colon those of packages that it needs.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from diffusers.loaders import single_file_utils

from tests.serve.comfy import load_nodes

FOLDERS = os.environ.get("DITILE_COMFYUI", "")
pytestmark = pytest.mark.skipif(not FOLDERS, reason="DITILE_COMFYUI names no folder of ComfyUI")
PACKAGE = "custom_nodes_ditile_itself"
STEPS = 3
# Both sides compute in float32, in another order here and there; over three steps with guidance it adds up to this.
TOLERANCE = 2e-5


@dataclass(frozen=True)
class Pair:
    """One architecture, tiny.

    Attributes:
        model: diffusers' class.
        config: of it.
        comfy: of ComfyUI's own class.
        latent: shape of the noise.
        text: tokens and width of a prompt.
        conditions: what a graph adds to the prompts.
        convert: ComfyUI's weights -> diffusers'; its name in `single_file_utils`, "" where they have the same names.
        has_mask: whether a part of the latents is kept.
    """

    model: str
    config: Mapping[str, Any]
    comfy: Mapping[str, Any]
    latent: tuple[int, ...]
    text: tuple[int, int]
    conditions: Mapping[str, Any] = field(default_factory=dict)
    convert: str = ""
    has_mask: bool = False


@pytest.fixture(scope="module")
def comfy() -> Iterator[SimpleNamespace]:
    """ComfyUI's modules, and the node's, as ComfyUI imports them."""
    before = set(sys.modules)
    folder, *others = FOLDERS.split(os.pathsep)
    sys.path.insert(0, folder)
    sys.path.extend(others)
    try:
        importlib.import_module("comfy.cli_args").args.cpu = True
        names = ("sample", "model_detection", "model_management", "model_patcher", "utils", "patcher_extension")
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

    def start(self) -> None:
        pass

    def hello(self) -> dict[str, Any]:
        config = {name: value for name, value in self.transformer.config.items() if not name.startswith("_")}
        name = type(self.transformer).__name__
        return {"model": name, "config": config, "dtype": "float32", "plan": "", "ranks": 1, "loras": ["fox", "owl"]}

    def forward(self, arguments: Mapping[str, Any]) -> Any:
        self.calls.append(arguments)
        return self.transformer(**arguments, return_dict=False)[0]

    def set_loras(self, loras: Any) -> None:
        self.loras = list(loras)


def build_own_model(comfy: SimpleNamespace, pair: Pair) -> Any:
    """Return ComfyUI's own MODEL with random weights."""
    config = comfy.model_detection.model_config_from_unet_config(dict(pair.comfy))
    # Z-Image is told from Lumina 2 by its width, which the tiny one has not.
    if "z_image_modulation" in pair.comfy:
        config = comfy.model_detection.model_config_from_unet_config({**pair.comfy, "dim": 3840})
        config.unet_config["dim"] = pair.comfy["dim"]
    config.set_inference_dtype(torch.float32, None)
    model = config.get_model({}, "", device="cpu")
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.diffusion_model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            parameter.data.copy_(values / parameter[0].numel() ** 0.5)
        else:
            # Norms of queries and keys far from 0: attention that is flat would hide wrong positions.
            parameter.data.copy_(values * 0.2 + (0.0 if name.endswith("bias") else 1.5))
    return comfy.model_patcher.ModelPatcher(model, torch.device("cpu"), torch.device("cpu"))


def build_transformer(pair: Pair, own: Any) -> Any:
    """Return diffusers' transformer with the weights of ComfyUI's."""
    # ComfyUI marks the edits since 2511 by an empty weight.
    state = own.model.diffusion_model.state_dict()
    weights = {name: value.clone() for name, value in state.items() if not name.startswith("__")}
    if pair.convert:
        weights = CONVERSIONS[pair.convert](weights, own.model.model_config.unet_config)
    transformer = getattr(diffusers, pair.model)(**pair.config).eval()
    transformer.load_state_dict(weights)
    return transformer


def draw(comfy: SimpleNamespace, model: Any, pair: Pair) -> torch.Tensor:
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
    result: torch.Tensor = comfy.sample.sample(
        model, noise, STEPS, 3.0, "euler", "simple", *prompts, latent, noise_mask=mask, disable_pbar=True, seed=3
    )
    return result


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


CONVERSIONS = {
    "flux": lambda weights, config: convert_by_map(weights, sys.modules["comfy.utils"].flux_to_diffusers(config)),
    "z_image": lambda weights, config: convert_by_map(weights, sys.modules["comfy.utils"].z_image_to_diffusers(config)),
    "flux2": lambda weights, _: single_file_utils.convert_flux2_transformer_checkpoint_to_diffusers(weights),
    "wan": lambda weights, _: single_file_utils.convert_wan_transformer_to_diffusers(weights),
}

FLUX_COMFY = {
    "image_model": "flux",
    "guidance_embed": True,
    "in_channels": 16,
    "out_channels": 16,
    "patch_size": 2,
    "vec_in_dim": 12,
    "context_in_dim": 24,
    "hidden_size": 32,
    "mlp_ratio": 4.0,
    "num_heads": 2,
    "depth": 2,
    "depth_single_blocks": 2,
    "axes_dim": [4, 6, 6],
    "theta": 10000,
    "qkv_bias": True,
    "txt_ids_dims": [],
}
FLUX = {
    "in_channels": 64,
    "out_channels": 64,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 24,
    "pooled_projection_dim": 12,
    "guidance_embeds": True,
    "axes_dims_rope": (4, 6, 6),
}
FLUX2_COMFY = {
    "image_model": "flux2",
    "guidance_embed": True,
    "in_channels": 128,
    "out_channels": 128,
    "patch_size": 1,
    "vec_in_dim": None,
    "context_in_dim": 24,
    "hidden_size": 32,
    "mlp_ratio": 3.0,
    "num_heads": 2,
    "depth": 2,
    "depth_single_blocks": 2,
    "axes_dim": [4, 4, 4, 4],
    "theta": 2000,
    "qkv_bias": False,
    "ops_bias": False,
    "global_modulation": True,
    "mlp_silu_act": True,
    "default_ref_method": "index",
    "ref_index_scale": 10.0,
    "txt_ids_dims": [3],
}
FLUX2 = {
    "in_channels": 128,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 24,
    "axes_dims_rope": (4, 4, 4, 4),
}
QWEN_COMFY = {
    "image_model": "qwen_image",
    "in_channels": 64,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 24,
    "axes_dims_rope": (4, 6, 6),
}
QWEN = {
    "in_channels": 64,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 24,
    "axes_dims_rope": (4, 6, 6),
}
# ComfyUI's class is Z-Image's from a width of 1024 on.
Z_IMAGE_COMFY = {
    "image_model": "lumina2",
    "patch_size": 2,
    "in_channels": 16,
    "dim": 1024,
    "cap_feat_dim": 24,
    "n_layers": 1,
    "n_refiner_layers": 1,
    "qk_norm": True,
    "n_heads": 8,
    "n_kv_heads": 8,
    "axes_dims": [32, 48, 48],
    "axes_lens": [256, 64, 64],
    "rope_theta": 256.0,
    "ffn_dim_multiplier": 8.0 / 3.0,
    "multiple_of": 2,
    "z_image_modulation": True,
    "time_scale": 1000.0,
    "pad_tokens_multiple": 32,
}
Z_IMAGE = {
    "in_channels": 16,
    "dim": 1024,
    "n_layers": 1,
    "n_refiner_layers": 1,
    "n_heads": 8,
    "n_kv_heads": 8,
    "cap_feat_dim": 24,
    "axes_dims": [32, 48, 48],
    "axes_lens": [256, 64, 64],
}
WAN_COMFY = {
    "image_model": "wan2.1",
    "model_type": "t2v",
    "dim": 32,
    "ffn_dim": 48,
    "num_heads": 2,
    "num_layers": 2,
    "patch_size": (1, 2, 2),
    "freq_dim": 16,
    "text_dim": 24,
    "in_dim": 16,
    "out_dim": 16,
}
WAN = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 24,
    "freq_dim": 16,
    "ffn_dim": 48,
    "num_layers": 2,
}


def make_latents(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


REFERENCES = {"reference_latents": [make_latents(1, 16, 4, 8), make_latents(1, 16, 6, 6)]}
QWEN_REFERENCES = {"reference_latents": [make_latents(1, 16, 1, 4, 8), make_latents(1, 16, 1, 8, 8)]}
FLUX2_REFERENCES = {"reference_latents": [make_latents(1, 128, 2, 4), make_latents(1, 128, 3, 3)]}
PAIRS = {
    "flux": Pair("FluxTransformer2DModel", FLUX, FLUX_COMFY, (1, 16, 8, 12), (7, 24), {"guidance": 2.5}, "flux"),
    "flux, odd size": Pair("FluxTransformer2DModel", FLUX, FLUX_COMFY, (2, 16, 7, 9), (7, 24), convert="flux"),
    "flux, references": Pair("FluxTransformer2DModel", FLUX, FLUX_COMFY, (1, 16, 8, 8), (7, 24), REFERENCES, "flux"),
    "flux, references by index": Pair(
        "FluxTransformer2DModel",
        FLUX,
        FLUX_COMFY,
        (1, 16, 8, 8),
        (7, 24),
        {**REFERENCES, "reference_latents_method": "index"},
        "flux",
    ),
    "flux schnell": Pair(
        "FluxTransformer2DModel",
        {**FLUX, "guidance_embeds": False},
        {**FLUX_COMFY, "guidance_embed": False},
        (1, 16, 8, 8),
        (7, 24),
        convert="flux",
    ),
    "flux fill": Pair(
        "FluxTransformer2DModel",
        {**FLUX, "in_channels": 384},
        {**FLUX_COMFY, "in_channels": 96},
        (1, 16, 8, 8),
        (7, 24),
        {"concat_latent_image": make_latents(1, 16, 8, 8), "concat_mask": make_latents(1, 1, 64, 64).gt(0).float()},
        "flux",
    ),
    "flux2": Pair("Flux2Transformer2DModel", FLUX2, FLUX2_COMFY, (2, 128, 4, 3), (7, 24), convert="flux2"),
    "flux2, references": Pair(
        "Flux2Transformer2DModel", FLUX2, FLUX2_COMFY, (1, 128, 4, 4), (7, 24), FLUX2_REFERENCES, "flux2"
    ),
    "qwen": Pair("QwenImageTransformer2DModel", QWEN, QWEN_COMFY, (2, 16, 1, 8, 12), (7, 24)),
    "qwen edit": Pair(
        "QwenImageTransformer2DModel", QWEN, QWEN_COMFY, (1, 16, 1, 8, 8), (7, 24), QWEN_REFERENCES
    ),
    "qwen edit 2511": Pair(
        "QwenImageTransformer2DModel",
        {**QWEN, "zero_cond_t": True},
        {**QWEN_COMFY, "default_ref_method": "index_timestep_zero"},
        (1, 16, 1, 8, 8),
        (7, 24),
        QWEN_REFERENCES,
    ),
    "z-image": Pair("ZImageTransformer2DModel", Z_IMAGE, Z_IMAGE_COMFY, (2, 16, 8, 12), (7, 24), convert="z_image"),
    "z-image, odd size": Pair(
        "ZImageTransformer2DModel", Z_IMAGE, Z_IMAGE_COMFY, (1, 16, 9, 7), (40, 24), convert="z_image"
    ),
    "wan": Pair("WanTransformer3DModel", WAN, WAN_COMFY, (1, 16, 3, 6, 8), (512, 24), convert="wan"),
    "wan 2.1 from an image": Pair(
        "WanTransformer3DModel",
        {**WAN, "in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 32},
        {**WAN_COMFY, "in_dim": 36, "model_type": "i2v"},
        (1, 16, 3, 6, 8),
        (512, 24),
        {
            "concat_latent_image": make_latents(1, 16, 3, 6, 8),
            "concat_mask": torch.cat([torch.zeros(1, 1, 1, 6, 8), torch.ones(1, 1, 2, 6, 8)], dim=2),
            "clip_vision_output": SimpleNamespace(penultimate_hidden_states=make_latents(1, 257, 1280)),
        },
        "wan",
    ),
    "wan 2.2 from an image": Pair(
        "WanTransformer3DModel",
        {**WAN, "in_channels": 36},
        {**WAN_COMFY, "in_dim": 36},
        (1, 16, 3, 6, 8),
        (512, 24),
        {
            "concat_latent_image": make_latents(1, 16, 3, 6, 8),
            "concat_mask": torch.cat([torch.zeros(1, 1, 1, 6, 8), torch.ones(1, 1, 2, 6, 8)], dim=2),
        },
        "wan",
    ),
    "wan 2.2 5B, a known frame": Pair(
        "WanTransformer3DModel",
        {**WAN, "in_channels": 48, "out_channels": 48},
        {**WAN_COMFY, "in_dim": 48, "out_dim": 48},
        (1, 48, 3, 6, 8),
        (512, 24),
        convert="wan",
        has_mask=True,
    ),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
@torch.inference_mode()
def test_the_adapter_draws_what_comfyuis_own_model_draws(comfy: SimpleNamespace, pair: Pair) -> None:
    """The same weights in ComfyUI's class and, behind the adapter, in diffusers'."""
    own = build_own_model(comfy, pair)
    expected = draw(comfy, own, pair)
    connection = LocalConnection(build_transformer(pair, own))
    remote = comfy.node.load_model(lambda: connection)
    drawn = draw(comfy, remote, pair)
    assert connection.calls
    assert not list(remote.model.diffusion_model.parameters())
    unguided = draw(comfy, own, Pair(**{**vars(pair), "conditions": {}})) if pair.conditions else None
    assert (drawn - expected).abs().max() <= TOLERANCE * expected.abs().max()
    # Conditions that do nothing in so small a model would prove nothing.
    if unguided is not None:
        assert (unguided - expected).abs().max() > 100 * TOLERANCE * expected.abs().max()
