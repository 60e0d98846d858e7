"""One kernel for a linear layer and the GELU behind it, on CPUs: apart, GELU takes half as long as the product does.

oneDNN's kernel rounds otherwise than torch's two do, by units of the last place. So it runs only where the picture is
not the plain pipeline's to the bit in any case: in steps whose keys are stale, and where ranks share out tokens, whose
products have other shapes. Every other step keeps torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from diffusers.models.activations import GELU
from torch import Tensor, nn

from ditile.hooks.fused import is_plain_linear
from ditile.hooks.overrides import override_attribute


def can_fuse_gelu(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there is such a kernel; `torch.backends.mkldnn.flags(enabled=False)` says that it is not wanted."""
    onednn = torch.backends.mkldnn  # enabled where torch was built without it, too
    return device.type == "cpu" and dtype == torch.float32 and onednn.is_available() and bool(onednn.enabled)


def compute_linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """GELU of a linear layer's output, in one kernel: `[..., k]` and `[n, k]` to `[..., n]`, where one `can_fuse`."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "gelu", [], approximate)
    return out


def fuse_linear_gelu(stack: ExitStack, block: nn.Module, device: torch.device, may_round: Callable[[], bool]) -> None:
    """Makes one kernel of each linear layer of a block and the GELU behind it, where it may, until it is closed.

    Args:
        stack: undoes it.
        block: its modules are looked through.
        device: where it runs; nothing is done on other ones than CPUs.
        may: whether it may round otherwise now.
    """
    for owner, name, linear, activation, place in _find_gelu_pairs(block):
        if is_plain_linear(linear, device) and can_fuse_gelu(device, linear.weight.dtype):
            fused = FusedGELU(owner, name, linear, getattr(activation, place), activation.approximate, may_round)
            override_attribute(stack, linear, "forward", fused.run_linear)
            override_attribute(stack, activation, place, fused.run_activation)


class FusedGELU:
    """A linear layer that applies the GELU which is called next, and that GELU, which then does nothing.

    Args:
        owner, name: whose attribute the layer is; another one may come in its place in mid-run, as with a LoRA.
        linear: the layer.
        activation: what it is followed by.
        approximate: "none" or "tanh", as in `torch.nn.GELU`.
        may: whether it may round otherwise now.
    """

    def __init__(
        self, owner: nn.Module, name: str, linear: nn.Linear, activation: Callable[[Tensor], Tensor], approximate: str,
        may_round: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._owner, self._name, self._linear, self._approximate = owner, name, linear, approximate
        self._product, self._activation, self._may_round = linear.forward, activation, may_round
        self._activated: Tensor | None = None

    def run_linear(self, x: Tensor) -> Tensor:
        """`[..., k]` to `[..., n]`, with GELU applied where that may round otherwise."""
        if not self._may_fuse(x):
            return self._product(x)
        self._activated = compute_linear_gelu(x, self._linear.weight, self._linear.bias, self._approximate)
        return self._activated

    def run_activation(self, x: Tensor) -> Tensor:
        """GELU of `[..., n]`, unless the product has it."""
        if self._activated is None or x is not self._activated:
            return self._activation(x)
        self._activated = None
        return x

    def _may_fuse(self, x: Tensor) -> bool:
        free = not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
        is_one = x.dtype == torch.float32 and x.numel() > 0 and getattr(self._owner, self._name) is self._linear
        return self._may_round() and is_one and free


def _find_gelu_pairs(block: nn.Module) -> Iterator[tuple[nn.Module, str, Any, Any, str]]:
    """Each linear layer with the GELU behind it: (whose, name, layer, activation, the method that applies it)."""
    for module in block.modules():
        if type(module) is GELU:
            yield module, "proj", module.proj, module, "gelu"
        activation = getattr(module, "act_mlp", None)  # of single blocks: FLUX's, HunyuanVideo's
        if type(activation) is nn.GELU:
            yield module, "proj_mlp", getattr(module, "proj_mlp", None), activation, "forward"
