"""Parallel VAE: each rank codes its own rows of the image or video, and the result equals the undivided one.

diffusers' own encoder and decoder run on every rank, on a strip. Operations that look beyond a pixel use the other
strips: convolutions exchange halo rows with their neighbours, group norms share their statistics, attention gathers
keys and values. A cache of frames has the strip's rows. Every rank has whole weights, and its share of the activations.
The idea is from DistVAE.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from diffusers.models.attention_processor import Attention, AttnProcessor, AttnProcessor2_0, FusedAttnProcessor2_0
from diffusers.models.autoencoders.vae import Decoder, Encoder
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn

from ditile.distributed.mesh import Axis
from ditile.distributed.transport import Traffic
from ditile.model.hooks.overrides import override_attribute
from ditile.model.hooks.placeholders import build_meta_model
from ditile.parallel.vae.halo import GroupLinks, Strip
from ditile.parallel.vae.layers import (
    RowFunctions,
    build_strip_convolution,
    is_plain_residual,
    run_residual_block,
)
from ditile.parallel.vae.tiles import install_tile_forwards
from ditile.plan.errors import ModelError, PlanError
from ditile.plan.extras import import_lab
from ditile.plan.option_classes import Count, check_value

PROVEN = frozenset({
    "AutoencoderKL", "AutoencoderKLCogVideoX", "AutoencoderKLCosmos", "AutoencoderKLFlux2", "AutoencoderKLHunyuanImage",
    "AutoencoderKLHunyuanVideo", "AutoencoderKLHunyuanVideo15", "AutoencoderKLLTX2Video", "AutoencoderKLLTXVideo",
    "AutoencoderKLMochi", "AutoencoderKLQwenImage", "AutoencoderKLQwenImage21", "AutoencoderKLWan",
})  # fmt: skip
"""Classes whose division is under test; the lab tries others when they are first divided."""
LEAST_UNIT = 32
"""How many image rows make a row at an autoencoder's lowest resolution, unless its config says more."""
STOCK = (AttnProcessor, AttnProcessor2_0, FusedAttnProcessor2_0)
"""The processors with the same result as `AttnProcessor2_0`."""


class ParallelVAE:
    """An autoencoder whose `encode` and `decode` are divided by rows over the ranks of an axis.

    Args:
        vae: the same autoencoder on every rank; slicing and tiling work as before, and each slice or tile is divided.
        axis: the ranks, which must all make the same calls with the same images. It may have one rank.
        traffic: counts the sent bytes under "vae".
        block_size: how many rows a convolution makes at a time; None for all. Fewer rows lower the peak memory of its
            kernel and of its normalized input rows.
        weights: each rank's share of the rows or tiles, in any unit; equal by default.

    Raises:
        ModelError: if the autoencoder is not one that can be divided exactly.
        PlanError: if an option is out of its range.
    """

    def __init__(
        self,
        vae: Any,
        axis: Axis,
        traffic: Traffic,
        *,
        block_size: int | None = None,
        weights: tuple[float, ...] | None = None,
    ) -> None:
        check_value(Count | None, block_size, "block_size", error=PlanError, example="64, or None for all")
        self.vae = vae
        self.axis = axis
        self.traffic = traffic
        self.block_size = block_size
        self.weights = weights or (1.0,) * axis.num_ranks
        check_vae_divisible(vae)

    @contextmanager
    def install_forwards(self) -> Iterator[None]:
        """Divide `vae.encode` and `vae.decode` within the context. They make no gradients.

        Raises:
            ModelError: if the autoencoder has been changed and cannot be divided any more.
        """
        check_vae_divisible(self.vae)
        with ExitStack() as stack:
            # Only an autoencoder that tiles is left here: the check above refused all others.
            if explain_rows_refusal(self.vae) is not None:
                install_tile_forwards(stack, self.vae, GroupLinks(self.axis, self.traffic), self.weights)
            elif self.axis.num_ranks > 1 or self.block_size is not None:
                strip = Strip(GroupLinks(self.axis, self.traffic), self.weights, self.block_size)
                install_row_forwards(stack, self.vae, strip)
            yield


def install_row_forwards(stack: ExitStack, vae: Any, strip: Strip) -> None:
    """Override the forwards of an autoencoder's coders, on the instances, until the stack is closed."""
    functions = RowFunctions(strip)
    for name, coder in _iterate_coders(vae):
        unit = 1
        if name == "encoder":
            unit = LEAST_UNIT
            # The latents of every strip are whole rows, if possible.
            for key in ("spatial_compression_ratio", "scale_factor_spatial"):
                ratio = vars(vae).get(key) or vae.config.get(key)
                if isinstance(ratio, int):
                    unit = max(unit, ratio)
        _install_coder_forward(stack, coder, functions, strip, unit)
        # Blocks are normalized and convolved together, so that no whole normalized strip is made.
        if strip.block_size is not None and isinstance(coder, Encoder | Decoder):
            for module in coder.modules():
                if isinstance(module, ResnetBlock2D) and is_plain_residual(module):
                    _divide_module(stack, module, functions, partial(run_residual_block, module, strip=strip))
        for module in coder.modules():
            if isinstance(module, Attention) and type(module.processor) in STOCK:
                # RowFunctions divides only scaled_dot_product_attention, which AttnProcessor does not call.
                override_attribute(stack, module, "processor", AttnProcessor2_0())
            elif isinstance(module, nn.SiLU) and isinstance(coder, Encoder | Decoder):
                # This activation is only called on a norm's output, which no other module reads.
                override_attribute(stack, module, "inplace", True)
            elif isinstance(module, Upsample2D) and isinstance(coder, Encoder | Decoder) and _doubles_rows(module):
                # Halo rows are sent before they are doubled.
                conv: Any = module.conv
                _divide_module(stack, module, functions, build_strip_convolution(conv, strip, scale=2))


def _install_coder_forward(
    stack: ExitStack,
    coder: nn.Module,
    functions: RowFunctions,
    strip: Strip,
    unit: int,
) -> None:
    stock_forward = coder.forward
    may_be_empty = isinstance(coder, Encoder | Decoder)

    def code_own_rows(sample: Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and sample.requires_grad:
            raise ModelError("a divided autoencoder makes no gradients, and its input requires them; detach() it")
        with torch.no_grad():
            if not may_be_empty and sample.shape[-2] < strip.num_ranks:
                # Every rank codes the whole sample: a strip without rows is not known to work.
                return stock_forward(sample, *args, **kwargs)
            own = strip.select_own_rows(sample, unit)
            with functions:
                result = stock_forward(own, *args, **kwargs)
            if isinstance(result, tuple):
                # Results beside the image, such as a cache of frames, stay on this rank.
                return (strip.gather_image(result[0]), *result[1:])
            return strip.gather_image(result)

    override_attribute(stack, coder, "forward", code_own_rows)


def _divide_module(
    stack: ExitStack,
    module: nn.Module,
    functions: RowFunctions,
    forward: Callable[[Tensor], Tensor],
) -> None:
    """Override a module with a forward that divides its strip itself."""

    def forward_strip(x: Tensor, *_: Any, **__: Any) -> Tensor:
        with functions.pause():
            return forward(x)

    override_attribute(stack, module, "forward", forward_strip)


def _doubles_rows(module: Upsample2D) -> bool:
    conv: Any = getattr(module, "conv", None)
    is_plain = isinstance(conv, nn.Conv2d) and conv.padding_mode == "zeros" and conv.dilation == (1, 1)
    return bool(is_plain and module.use_conv and module.norm is None and module.interpolate)


def check_vae_divisible(vae: Any) -> None:
    """Refuse an autoencoder that neither can be divided by rows exactly, nor calls its coders on tiles.

    Raises:
        ModelError: with a message that names the obstructing module, and what would work.
    """
    reason = explain_rows_refusal(vae)
    if reason is None or getattr(vae, "use_tiling", False):
        return
    if hasattr(vae, "use_tiling"):
        reason = (
            reason.removesuffix("use vae=whole")
            + "call its enable_tiling(), so that tiles are distributed, or use vae=whole"
        )
    raise ModelError(reason)


def explain_rows_refusal(vae: Any) -> str | None:
    """Return why an autoencoder cannot be divided by rows exactly; None if it can.

    An autoencoder that was changed is tried again.
    """
    if vae is None:
        return "the pipeline has no vae that could be divided by rows; use vae=whole"
    structure = _describe_structure(vae)
    # A proof decodes and encodes, so it is made once for each structure.
    if vae in _checked and _checked[vae][0] == structure:
        return _checked[vae][1]
    kind = type(vae).__name__
    reason = None
    coders = list(_iterate_coders(vae))
    if not coders:
        reason = f"{kind} has no encoder and no decoder that could be divided by rows; use vae=whole"
    for part, coder in coders:
        for name, module in coder.named_modules(prefix=part):
            obstacle = ""
            if "forward" in vars(module):
                obstacle = "its forward is replaced; remove the hook that offloads or casts it"
            elif isinstance(module, Attention) and type(module.processor) not in STOCK:
                processor = type(module.processor).__name__
                obstacle = f"{processor} is not stock; call vae.set_attn_processor(AttnProcessor2_0())"
            if obstacle and reason is None:
                reason = f"{kind}.{name} cannot be divided by rows: {obstacle}, or use vae=whole"
    if reason is None and (kind not in PROVEN or structure != _describe_structure(build_meta_model(vae))):
        try:
            import_lab("study.autoencoders").prove_rows(vae, install_row_forwards)
        except ModelError as error:
            reason = str(error)
    _checked[vae] = structure, reason
    return reason


Structure = list[tuple[Any, ...]]
_checked: weakref.WeakKeyDictionary[Any, tuple[Structure, str | None]] = weakref.WeakKeyDictionary()
"""The structure of each checked autoencoder, and why it is not divisible by rows."""


def _describe_structure(vae: nn.Module) -> Structure:
    """Return the modules of the coders, with their replaceable parts."""
    structure: Structure = []
    for part, coder in _iterate_coders(vae):
        for name, module in coder.named_modules(prefix=part):
            processor = type(getattr(module, "processor", None))
            structure.append((name, type(module), getattr(module, "padding_mode", ""), processor))
    for name, module in vae.named_modules():
        if "forward" in vars(module):
            structure.append((name, "forward"))
    return structure


def _iterate_coders(vae: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the encoder and the decoder if they are there: some users drop the encoder."""
    for name in ("encoder", "decoder"):
        coder = getattr(vae, name, None)
        if coder is not None:
            yield name, coder
