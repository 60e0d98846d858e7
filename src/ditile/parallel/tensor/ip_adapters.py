"""IP-adapters under tensor parallelism: keys and values of their images are cut by heads, like those of their layer.

Stable Diffusion 3's add their output to the layer's heads, before a Linear that sums over the ranks. FLUX.1's add it
after that Linear: the heads of all ranks are gathered first, by a sum with zeros, which is exact and uses the same path
as the layer's own output. So each layer with an adapter needs one more sum in each call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_flux import FluxAttention, FluxIPAdapterAttnProcessor
from torch import Tensor, nn

from ditile.model.hooks.attention_processors import find_attention_processors
from ditile.model.hooks.block_policy import ADAPTER_PROCESSORS

OUT = "to_out.0"
"""The Linear after the heads in diffusers' attention modules."""


def list_adapter_linears(transformer: nn.Module) -> list[str]:
    """List the paths of the Linears that make keys and values of IP-adapter images."""
    paths = []
    for path, _, processor in find_attention_processors(transformer):
        if not isinstance(processor, ADAPTER_PROCESSORS):
            continue
        for name, module in processor.named_modules():
            if name.startswith(("to_k_ip", "to_v_ip")) and not isinstance(module, nn.ModuleList):
                paths.append(f"{path}.processor.{name}")
    return paths


class FluxShardedAdapterProcessor(FluxIPAdapterAttnProcessor):
    """The replacement for `FluxIPAdapterAttnProcessor` on a rank that has a share of the heads.

    Args:
        whole: the stock processor, whose linear layers are cut to this rank's share.
        gather: `[B, S, own features]` -> the features of all heads, for the tokens that this rank has between layers.
    """

    _gather: Callable[[Tensor], Tensor]
    _whole: FluxIPAdapterAttnProcessor

    def __init__(self, whole: FluxIPAdapterAttnProcessor, gather: Callable[[Tensor], Tensor]) -> None:
        nn.Module.__init__(self)
        # The stock processor is not stored as a child: the parameters must be in the model once, at their own place.
        vars(self).update(vars(whole) | {"_whole": whole, "_gather": gather})

    @property
    def scale(self) -> list[float]:
        """Return the scale of each adapter, as the pipeline sets it."""
        scale: list[float] = vars(self._whole)["scale"]
        return scale

    @scale.setter
    def scale(self, scale: list[float]) -> None:
        vars(self._whole)["scale"] = scale

    def __call__(
        self,
        attn: FluxAttention,
        hidden_states: Tensor,
        encoder_hidden_states: Any = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
        ip_hidden_states: Any = None,
        ip_adapter_masks: Tensor | None = None,
    ) -> Any:
        """Return the attention output for the image `[B, S, C]` and the text `[B, T, C]`, and what the adapters add to
        the image."""
        # The processor's own call runs without adapters. A hook keeps its normalised queries, which the adapters need
        # too.
        queries: list[Tensor] = []
        handle = attn.norm_q.register_forward_hook(lambda module, given, made: queries.append(made))
        try:
            own = super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb, [])
        finally:
            handle.remove()
        if encoder_hidden_states is None:
            return own
        query = queries[0]
        shape = (len(hidden_states), -1, attn.heads, attn.head_dim)
        added: Any = 0
        for image, scale, to_k, to_v in zip(ip_hidden_states, self.scale, self.to_k_ip, self.to_v_ip, strict=False):
            key = to_k(image).view(shape)
            value = to_v(image).view(shape)
            out = dispatch_attention_fn(
                query, key, value, backend=self._attention_backend, parallel_config=self._parallel_config
            )
            added = added + scale * out.flatten(2).to(query.dtype)
        return *own[:2], self._gather(added)
