"""Tables of families without a `ModelSpec`: what the planner needs of their inputs, tokens and frames.

Their forward is counted like that of a family with a `ModelSpec`, but not block by block, so that only plans of data,
cfg, ulysses and ring are priced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from diffusers import (
    Flux2Transformer2DModel,
    LTXVideoTransformer3DModel,
    QwenImageTransformer2DModel,
    WanTransformer3DModel,
)
from torch import nn

from ditile.errors import ModelError, PlanError
from ditile.models.registry import list_model_specs
from ditile.parallel.vae.vae import PROVEN
from ditile.plan.layout import Grid
from ditile.plan.plan import Plan
from ditile.plan.shape import Shape
from ditile.plan.spec import Conditioning, ModelSpec

NUM_TEXT_TOKENS = 512
"""The default of pipelines with the text in the sequence."""


class VaeScale(NamedTuple):
    """The pixels of a side that a VAE makes of a latent pixel, and the frames that it makes of a latent frame."""

    side: int
    frames: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyTable:
    """What the planner knows of a family.

    Attributes:
        spec: how its forward is called and counted.
        scale: (VAE without weights) -> its scale.
        channels: the name of the latent channels in the VAE's config.
        text_tokens: tokens of text that cross attention sees, unless the call says how many; 0 if they are in the
            sequence.
        is_video: whether a call has frames.
        decodes_frames: whether the latents of the VAE have a dim of frames, also for a single picture.
    """

    spec: ModelSpec
    scale: Callable[[Any], VaeScale]
    channels: str = "z_dim"
    text_tokens: int = 0
    is_video: bool = False
    decodes_frames: bool = True

    def add_frames(self, shape: Shape, frames: int, of_latent: int) -> Shape:
        """The shape of a call with all its frames.

        Raises:
            ModelError: if the number of frames is not that of whole latent frames.
        """
        if self.is_video and (frames - 1) % of_latent:
            near = frames // of_latent * of_latent + 1
            raise ModelError(f"frames={frames} are not a multiple of {of_latent} and one more; try frames={near}")
        times = (frames - 1) // of_latent + 1 if self.is_video else 1
        return replace(
            shape,
            grid=shape.grid._replace(rows=shape.grid.rows * times),
            frames=times,
            latent_elements=shape.latent_elements * times,
        )


def check_family_plan(plan: Plan, coder: str, *, in_turns: bool) -> None:
    """Raises `PlanError` unless such a family can run under a plan.

    Args:
        coder: the class of its VAE.
        in_turns: whether the pipeline has two transformers.
    """
    if in_turns and not splits_only_tokens(plan):
        raise PlanError(
            f"cfg={plan.cfg} data={plan.data}: the pipeline calls two models in turns, and one is known; "
            "use ulysses or ring"
        )
    if plan.vae == "rows" and coder not in PROVEN:
        raise PlanError(
            f"vae=rows: whether {coder} can be divided by rows is only seen when it is loaded; use vae=whole"
        )


def splits_only_tokens(plan: Plan) -> bool:
    """Whether a plan shares out tokens and nothing else."""
    return plan.token_ranks == plan.world


def find_family_table(transformer: nn.Module, index: Mapping[str, Any]) -> FamilyTable | None:
    """The table of a pipeline's transformer; None where it has a `ModelSpec`.

    Args:
        transformer: without weights.
        index: the pipeline's `model_index.json`.

    Raises:
        ModelError: if the planner cannot call its forward.
    """
    kinds = type(transformer).__mro__
    if any(cls in list_model_specs() for cls in kinds):
        return None
    name, pipeline = type(transformer).__name__, index["_class_name"]
    pipelines = (each for table in TABLES.values() for each in table.spec.pipelines)
    known = f"planned for without a ModelSpec are {', '.join(pipelines)}"
    family_table = TABLES.get(type(transformer))
    if family_table is None:
        raise ModelError(
            f"{name} has no ModelSpec, and nothing says what its forward is called with, so that it cannot be counted; "
            f"{known}; ditile.register({name}, ModelSpec(..., example=...)) adds one"
        )
    if pipeline not in family_table.spec.pipelines:
        raise ModelError(
            f"{pipeline} gives {name} more than text, which its config does not say the size of, so that it cannot be "
            f"counted; {known}"
        )
    if index.get("expand_timesteps"):
        raise ModelError(f"expand_timesteps=True gives {name} a time for each token, which is not counted; {known}")
    return family_table


def _make_packed_inputs(config: Mapping[str, Any], grid: Grid, text: int, width: str) -> dict[str, Any]:
    """Inputs of a model whose latents are a sequence; `width` is the name of the text's channels in the config."""
    return {
        "hidden_states": torch.empty(1, grid.rows * grid.tokens_per_row, config["in_channels"]),
        "encoder_hidden_states": torch.empty(1, text, config[width]),
        "timestep": torch.empty(1),
    }


def _make_wan_inputs(config: Mapping[str, Any], grid: Grid, text: int) -> dict[str, Any]:
    side, inputs = config["patch_size"][1], _make_packed_inputs(config, grid, text, "text_dim")
    latents = torch.empty(1, config["in_channels"], 1, grid.rows * side, grid.tokens_per_row * side)
    return inputs | {"hidden_states": latents}


def _make_ltx_inputs(config: Mapping[str, Any], grid: Grid, text: int) -> dict[str, Any]:
    return {
        **_make_packed_inputs(config, grid, text, "caption_channels"),
        "encoder_attention_mask": torch.empty(1, text),
        "num_frames": 1,
        "height": grid.rows,
        "width": grid.tokens_per_row,
    }


def _make_qwen_inputs(config: Mapping[str, Any], grid: Grid, text: int) -> dict[str, Any]:
    inputs = _make_packed_inputs(config, grid, text, "joint_attention_dim")
    return inputs | {"img_shapes": [[(1, grid.rows, grid.tokens_per_row)]]}


def _make_flux2_inputs(config: Mapping[str, Any], grid: Grid, text: int) -> dict[str, Any]:
    return {
        **_make_packed_inputs(config, grid, text, "joint_attention_dim"),
        "guidance": torch.empty(1) if config.get("guidance_embeds", True) else None,
        "img_ids": torch.empty(grid.rows * grid.tokens_per_row, 4),
        "txt_ids": torch.empty(text, 4),
    }


def _get_qwen_conditioning(call: Mapping[str, Any]) -> Conditioning:
    """Guidance is a second call: by its scale, or with a negative prompt."""
    own = call.get("true_cfg_scale", 1.0) if call.get("negative_prompt") is not None else 1.0
    return Conditioning(
        text=call.get("max_sequence_length", NUM_TEXT_TOKENS), calls=1 + ((call.get("guidance_scale") or own) > 1)
    )


WAN = FamilyTable(
    spec=ModelSpec(
        name="Wan",
        pipelines=("WanPipeline",),
        joint="none",
        latent_per_token=lambda config: int(config["patch_size"][1]),
        example=_make_wan_inputs,
        conditioning=lambda call: Conditioning(calls=1 + (call["guidance_scale"] > 1)),
        image_tokens="patch_embedding",
    ),
    scale=lambda vae: VaeScale(vae.config.scale_factor_spatial, vae.config.scale_factor_temporal),
    text_tokens=512,
    is_video=True,
)
LTX = FamilyTable(
    spec=ModelSpec(
        name="LTX-Video",
        pipelines=("LTXPipeline",),
        joint="none",
        is_packed=True,
        latent_per_token=lambda config: 1,
        example=_make_ltx_inputs,
        conditioning=lambda call: Conditioning(rows=1 + (call["guidance_scale"] > 1)),
        image_tokens="proj_in",
    ),
    scale=lambda vae: VaeScale(vae.spatial_compression_ratio, vae.temporal_compression_ratio),
    channels="latent_channels",
    text_tokens=128,
    is_video=True,
)
QWEN = FamilyTable(
    spec=ModelSpec(
        name="Qwen-Image",
        pipelines=("QwenImagePipeline",),
        joint="text_first",
        is_packed=True,
        latent_per_token=lambda config: 2,
        example=_make_qwen_inputs,
        conditioning=_get_qwen_conditioning,
        image_tokens="img_in",
    ),
    scale=lambda vae: VaeScale(2 ** len(vae.config.temperal_downsample)),
)
FLUX2 = FamilyTable(
    spec=ModelSpec(
        name="FLUX.2",
        pipelines=("Flux2Pipeline",),
        joint="text_first",
        is_packed=True,
        latent_per_token=lambda config: 2,
        example=_make_flux2_inputs,
        conditioning=lambda call: Conditioning(text=call.get("max_sequence_length", NUM_TEXT_TOKENS)),
        image_tokens="x_embedder",
    ),
    scale=lambda vae: VaeScale(2 ** (len(vae.config.block_out_channels) - 1)),
    channels="latent_channels",
    decodes_frames=False,
)
TABLES: dict[Any, FamilyTable] = {
    WanTransformer3DModel: WAN,
    LTXVideoTransformer3DModel: LTX,
    QwenImageTransformer2DModel: QWEN,
    Flux2Transformer2DModel: FLUX2,
}
