"""Parallel VAE: each rank codes its own rows of the picture, and the result equals the undivided one.

diffusers' own `Encoder.forward` and `Decoder.forward` run on every rank, on a strip. What looks beyond a pixel meets
the other strips: convolutions exchange halo rows with their neighbours, group norms share their statistics, attention
gathers keys and values. Weights are whole on every rank; activations are a share. The idea is DistVAE's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import torch
from diffusers import AutoencoderKL
from diffusers.models.attention_processor import Attention
from diffusers.models.autoencoders.vae import Decoder, Encoder
from diffusers.models.downsampling import Downsample2D
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.unets import unet_2d_blocks as blocks
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn

from ditile.distributed.mesh import Axis
from ditile.distributed.transport import Traffic
from ditile.errors import ModelError, PlanError
from ditile.hooks.overrides import override_attribute
from ditile.parallel.vae.halo import RowWindow, Strip
from ditile.parallel.vae.layers import (
    STOCK,
    RowAttention,
    StripConvolution,
    is_plain_residual,
    normalize_strip,
    run_residual_block,
)
from ditile.plan.checks import check_whole_number

CONTAINER_TYPES = {
    Encoder,
    Decoder,
    blocks.UNetMidBlock2D,
    blocks.DownEncoderBlock2D,
    blocks.AttnDownEncoderBlock2D,
    blocks.UpDecoderBlock2D,
    blocks.AttnUpDecoderBlock2D,
    ResnetBlock2D,
    nn.ModuleList,
}
"""What only calls its children, and adds."""
PIXELWISE_TYPES = {nn.Linear, nn.Dropout, nn.SiLU, nn.ReLU, nn.GELU, nn.Mish}
"""What never looks beyond a pixel."""
DIVISIBLE_TYPES = {nn.Conv2d, nn.GroupNorm, Attention, Upsample2D, Downsample2D}
"""What has a version by rows."""


class ParallelVAE:
    """An `AutoencoderKL` whose `encode` and `decode` are divided by rows over the ranks of an axis.

    Args:
        vae: as it is on every rank; slicing and tiling work as ever, and each slice or tile is divided.
        axis: the ranks; each must make the same calls with the same pictures. One rank is fine.
        traffic: counts what is sent, as "vae".
        block_size: rows that a convolution makes at a time, to lower the peak further: what its kernel takes, and the
            normalized rows that it is given; None for all.
        gather: who gets the decoded picture: "all", or "first": the others get zeros around their own rows, so that
            what follows in a pipeline runs as ever. Latents always go to all.

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
        gather: Literal["all", "first"] = "all",
    ) -> None:
        hint = "block_size=64, or None for all"
        check_whole_number(block_size, "block_size", error=PlanError, optional=True, hint=hint)
        if gather not in ("all", "first"):
            raise PlanError(f"gather={gather!r} is not known; try all or first")
        self.vae, self.axis, self.traffic = vae, axis, traffic
        self.block_size, self.gather = block_size, gather
        check_vae_divisible(vae)

    @contextmanager
    def install_forwards(self) -> Iterator[None]:
        """Within it `vae.encode` and `vae.decode` are divided. They make no gradients.

        Raises:
            ModelError: if the autoencoder was changed since into one that cannot be divided.
        """
        check_vae_divisible(self.vae)
        strip = Strip(self.axis, self.traffic, self.block_size)
        picture = strip.gather_picture if self.gather == "all" else strip.gather_picture_on_first
        with ExitStack() as stack:
            if self.axis.num_ranks > 1 or self.block_size is not None:
                for name, coder in _iterate_coders(self.vae):
                    _install_row_forwards(stack, coder, strip, picture if name == "decoder" else strip.gather_picture)
            yield


def check_vae_divisible(vae: Any) -> None:
    """Refuses an autoencoder that cannot be divided exactly.

    Raises:
        ModelError: if it cannot; the message names the module, and what would work.
    """
    if not isinstance(vae, AutoencoderKL):
        raise ModelError(f"{type(vae).__name__} cannot be divided by rows, only AutoencoderKL; use vae=whole")
    for part, coder in _iterate_coders(vae):
        for name, module in coder.named_modules(prefix=part):
            reason = _find_module_refusal(module)
            if reason:
                raise ModelError(f"{type(vae).__name__}.{name} cannot be divided by rows: {reason}, or use vae=whole")


def _iterate_coders(vae: Any) -> Iterator[tuple[str, nn.Module]]:
    """The encoder and the decoder, as far as they are there: some users drop the encoder."""
    for name in ("encoder", "decoder"):
        coder = getattr(vae, name, None)
        if coder is not None:
            yield name, coder


def _find_module_refusal(module: nn.Module) -> str | None:
    """Why a module cannot be divided, and what would help; None if it can."""
    kind = type(module)
    if kind not in CONTAINER_TYPES | PIXELWISE_TYPES | DIVISIBLE_TYPES:
        return f"a {kind.__name__} is not known; unload the adapter or undo the change that brought it"
    if "forward" in vars(module):
        return "its forward is replaced; remove the hook that offloads or casts it"
    if isinstance(module, nn.Conv2d):
        if module.padding_mode != "zeros" or isinstance(module.padding, str) or module.dilation != (1, 1):
            return "its convolution is dilated, or not padded with zeros; use one that is not"
    elif isinstance(module, Attention):
        if type(module.processor) not in STOCK:
            return f"{type(module.processor).__name__} is not stock; call vae.set_attn_processor(AttnProcessor2_0())"
        if any(getattr(module, name) is not None for name in ("spatial_norm", "norm_q", "norm_k")):
            return "it has a norm that is not a group norm; use an autoencoder of SD, SD3, FLUX or PixArt"
    elif isinstance(module, Upsample2D | Downsample2D):
        plain = module.norm is None and isinstance(getattr(module, "conv", None), nn.Conv2d) and module.use_conv
        if not plain or not getattr(module, "interpolate", True):
            return "it does not resample by a convolution alone; use an autoencoder of SD, SD3, FLUX or PixArt"
    return None


def _install_row_forwards(stack: ExitStack, coder: nn.Module, strip: Strip, gather: Callable[[Tensor], Tensor]) -> None:
    """Overrides the forwards of a coder's modules, on the instances, until the stack is closed."""
    whole = coder.forward

    def code_own_rows(sample: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if torch.is_grad_enabled() and sample.requires_grad:
            raise ModelError("a divided autoencoder makes no gradients, and its input requires them; detach() it")
        with torch.no_grad():
            return gather(whole(strip.select_own_rows(sample), *args, **kwargs))

    override_attribute(stack, coder, "forward", code_own_rows)
    for module in coder.modules():
        if isinstance(module, nn.GroupNorm):
            override_attribute(stack, module, "forward", partial(normalize_strip, module, strip=strip))
        elif isinstance(module, Attention):
            override_attribute(stack, module, "processor", RowAttention(strip))
        elif isinstance(module, nn.SiLU):
            # It is only called on what a norm has just made, which nobody else reads.
            override_attribute(stack, module, "inplace", True)
        elif isinstance(module, nn.Conv2d | Upsample2D | Downsample2D):
            override_attribute(stack, module, "forward", _build_strip_convolution(module, strip))
        elif isinstance(module, ResnetBlock2D) and strip.block_size is not None and is_plain_residual(module):
            override_attribute(
                stack, module, "forward", lambda x, temb=None, block=module: run_residual_block(block, x, strip)
            )


def _build_strip_convolution(module: nn.Conv2d | Upsample2D | Downsample2D, strip: Strip) -> StripConvolution:
    conv: Any = module if isinstance(module, nn.Conv2d) else module.conv
    above, left = conv.padding
    below, right, scale = above, left, 1
    if isinstance(module, Upsample2D):
        scale = 2
    elif isinstance(module, Downsample2D) and module.padding == 0:
        below, right = above + 1, left + 1  # as its forward pads: below and on the right only
    window = RowWindow(conv.kernel_size[0], conv.stride[0], above, below, scale)
    return StripConvolution(conv, strip, window, (left, right))
