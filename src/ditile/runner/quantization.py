"""Quantization of a pipeline: which of its models are meant. What is done to them is in `ditile.runner.quantize`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, TypeVar

from torch import nn

from ditile.errors import ModelError
from ditile.models.adapter import find_transformers
from ditile.runner.quantize import EXCLUDED, quantize_models

T = TypeVar("T")


def quantize(
    target: T, quant_type: str = "float8_weight_only", exclude_layers: Sequence[str] = EXCLUDED, per_row: bool = True,
    *, group_size: int = 128,
) -> T:  # fmt: skip
    """Quantizes the Linears of a model in place, on the device where they are; before `parallelize` or after it.

    Those of the model's `_keep_in_fp32_modules`, which diffusers loads in float32, stay as they are.

    Args:
        target: a transformer or any other module; or a pipeline or a runner, whose transformers (those of guidance and
            priors too) and U-Net are meant.
        quant_type: float8_weight_only, int8_weight_only, int4_weight_only; with activations that are quantized too:
            float8, int8, int4, int4_w4a4; bitsandbytes_4bit (NF4); or one of `ALIASES`.
        exclude_layers: a layer whose name has one of these in it is left alone.
        per_row: a scale for each row of weights and each token; False gives a layer and a call one each, so that a
            token depends on which others it is computed with. Of no effect on the 4-bit types.
        group_size: numbers of a row that share a scale, in the 4-bit types of torchao.

    Returns:
        The target. What was done is logged, and `ditile.runner.quantize.records(model)` has it.

    Raises:
        ModelError: if the type is unknown, its package is absent, it cannot run on this device or in this dtype, or
            there is no layer for it. Nothing was changed then.
    """
    quantize_models(_find_target_models(target), quant_type, exclude_layers, per_row, group_size=group_size)
    return target


def _find_target_models(target: Any) -> list[nn.Module]:
    if isinstance(target, nn.Module):
        return [target]
    pipe = getattr(target, "pipe", target)
    models: list[nn.Module] = []
    if hasattr(pipe, "__dict__"):  # it has parts
        with contextlib.suppress(ModelError):  # it may have a U-Net alone
            models = find_transformers(pipe)
    unet = getattr(pipe, "unet", None)
    models += [unet] if isinstance(unet, nn.Module) else []
    if not models:
        raise ModelError(f"{type(target).__name__} has no transformer and no unet; give quantize the module itself")
    return list(dict.fromkeys(models))
