"""Quantization: the Linears of a model keep weights of 8 or 4 bits; torchao's or bitsandbytes' kernels multiply them.

    ditile.quantize(pipe, "int8_weight_only")

Weight-only types store few bits and multiply in the dtype of the model. The other types also quantize the activations
of each token in every call; they are fast only if they are compiled, on devices with integer or float8 matrix units.
One layer of each shape is tried before any layer is changed. A layer that cannot run here stays as it is and is
reported; if none can, `ModelError` is raised.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from ditile.cache.cache_dit import QuantizeConfig, parse_quantize_config
from ditile.model.adapter import find_transformers
from ditile.model.hooks.compile import unwrap_compiled
from ditile.model.hooks.placeholders import count_parameter_bytes, is_plain_parameter
from ditile.parallel.tensor.sharding import find_share
from ditile.plan.errors import ModelError, join_error_lines
from ditile.plan.extras import require_quantizer
from ditile.plan.option_classes import checked

LOG = logging.getLogger("ditile")
EXCLUDED = ("embedder", "embed")
"""By default, layers with one of these in their names are not quantized."""

ALIASES = {
    "fp8_w8a16_wo": "float8_weight_only",
    "fp8_w8a8_dq": "float8",
    "int8_w8a16_wo": "int8_weight_only",
    "int8_w8a8_dq": "int8",
    "int4_w4a16_wo": "int4_weight_only",
    "int4_w4a8_dq": "int4",
}
"""Other names of the types, with the bits of weights (w) and activations (a); wo is weight only, dq dynamic."""

SCALED_TYPES = {
    "float8_per_row": ("float8", "row"),
    "float8_per_tensor": ("float8", "tensor"),
    "float8_per_block": ("float8", "block"),
    "int8_per_row": ("int8", "row"),
    "int8_per_tensor": ("int8", "tensor"),
}
"""Names that fix both the type and the granularity of scales, and override `per_row`."""

WHY_FLOAT32 = "they are of the model's _keep_in_fp32_modules"
"""The reason for layers that are not quantized because diffusers always loads them in float32."""

T = TypeVar("T")
_RECORDS = "_quantized_by_ditile"
_QUANTIZER_ERRORS = (RuntimeError, ValueError, TypeError, ImportError, AssertionError, AttributeError)
"""The exceptions of torchao and bitsandbytes for an unsuitable kernel, device or shape."""
_TORCHAO_CONFIGS = {
    "float8_weight_only": "Float8WeightOnlyConfig",
    "int8_weight_only": "Int8WeightOnlyConfig",
    "float8": "Float8DynamicActivationFloat8WeightConfig",
    "int8": "Int8DynamicActivationInt8WeightConfig",
}
"""The types with a choice of granularity for their scales, and their configs."""
QuantizeLinear = Callable[[nn.Linear], nn.Module]
"""Quantizes a Linear: in place, or as another module."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizationRecord:
    """The changes that one call of `quantize` made to a model, for one type.

    Attributes:
        quant_type: the type, under ditile's name.
        layers: the names of layers that were quantized.
        left: the names of unsuitable layers, or layers kept in float32 by the model -> the reason.
        bytes_before, bytes_after: the bytes of all parameters of the model.
    """

    quant_type: str
    layers: tuple[str, ...]
    left: Mapping[str, str]
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        """Format the record in one line."""
        before = self.bytes_before / 2**20
        after = self.bytes_after / 2**20
        counts = f"{len(self.layers)} layers quantized, {len(self.left)} left as they are"
        return f"{self.quant_type}: {counts}; {before:.1f} MiB of parameters are {after:.1f} MiB"


def list_quantization_records(model: nn.Module) -> list[QuantizationRecord]:
    """Return the records of a model, one for each type in each call of `quantize`."""
    return list(vars(unwrap_compiled(model)).get(_RECORDS, ()))


@dataclass(frozen=True, kw_only=True, slots=True)
class _QuantizationWork:
    """The layers of a model that will be quantized to one type.

    Attributes:
        quant_type: the type, under ditile's name.
        quantizers: the path of each layer -> its quantizer; each was tried on a layer of that shape.
        left: the paths of unchanged layers -> the reason.
    """

    model: nn.Module
    quant_type: str
    quantizers: Mapping[str, QuantizeLinear]
    left: dict[str, str]

    def quantize_layers(self) -> None:
        """Quantize the layers, one at a time."""
        before = count_parameter_bytes(self.model)
        for path, quantizer in self.quantizers.items():
            layer = self.model.get_submodule(path)
            assert isinstance(layer, nn.Linear)
            with torch.no_grad():
                quantized = quantizer(layer)
            if quantized is not layer:
                parent, _, name = path.rpartition(".")
                setattr(self.model.get_submodule(parent), name, quantized)
        record = QuantizationRecord(
            quant_type=self.quant_type,
            layers=tuple(self.quantizers),
            left=self.left,
            bytes_before=before,
            bytes_after=count_parameter_bytes(self.model),
        )
        vars(self.model).setdefault(_RECORDS, []).append(record)
        LOG.info("%s: %s", type(self.model).__name__, record)
        for reason in dict.fromkeys(self.left.values()):
            paths = [path for path, why in self.left.items() if why == reason]
            level = logging.INFO if reason == WHY_FLOAT32 else logging.WARNING
            LOG.log(level, "not quantized, as %s: %s", reason, ", ".join(paths))


def _plan_model(model: nn.Module, config: QuantizeConfig) -> list[_QuantizationWork]:
    """Plan the work on a model, for each type. Raises `ModelError` if there is none, before anything is changed."""
    layers, kept = _select_layers(model, config)
    layers_by_type: dict[str, dict[str, nn.Linear]] = {}
    for path, layer in layers.items():
        word = next((word for word in config.precision_plan if word in path), "")
        quant_type = config.precision_plan.get(word, config.quant_type)
        layers_by_type.setdefault(quant_type, {})[path] = layer
    for word in config.precision_plan:
        if not any(word in path for path in layers):
            raise ModelError(f"precision_plan: no layer of {type(model).__name__} has {word!r} in its name")
    work = [_plan_layers(model, quant_type, part, config) for quant_type, part in layers_by_type.items()]
    work[0].left.update(dict.fromkeys(kept, WHY_FLOAT32))
    return work


def _plan_layers(
    model: nn.Module, quant_type: str, layers: Mapping[str, nn.Linear], config: QuantizeConfig
) -> _QuantizationWork:
    """Plan the layers of one type. A dummy layer of each shape is tried first."""
    name = ALIASES.get(quant_type, quant_type)
    # A scale is for a row of weights or a token (row), a layer or a call (tensor), or 128 x 128 weights (block).
    scheme = "row" if config.per_row else "tensor"
    if quant_type in SCALED_TYPES:
        name, scheme = SCALED_TYPES[quant_type]
    schemes = [scheme]
    if config.per_tensor_fallback and name in ("float8", "int8") and scheme != "tensor":
        schemes.append("tensor")
    quantizers: dict[str, QuantizeLinear] = {}
    left: dict[str, str] = {}
    # For each shape, the quantizer, or the reason for having none.
    outcomes: dict[tuple[Any, ...], tuple[QuantizeLinear | None, str]] = {}
    for path, layer in layers.items():
        device = layer.weight.device
        shape = (layer.in_features, layer.out_features, device, layer.weight.dtype)
        if shape not in outcomes:
            require_quantizer(name)
            if name == "bitsandbytes_4bit" and find_share(model) is not None:
                raise ModelError(f"quant_type={name} cannot take a share of the weights; try int8_weight_only")
            if device.type == "meta":
                raise ModelError(f"{type(model).__name__} has no weights yet; load them before they are quantized")
            candidates: list[QuantizeLinear] = [_quantize_to_nf4]
            if name != "bitsandbytes_4bit":
                candidates = _list_torchao_quantizers(name, device, schemes, config.group_size)
            outcomes[shape] = _choose_quantizer(candidates, *shape)
        quantizer, reason = outcomes[shape]
        if quantizer is None:
            left[path] = reason
        else:
            quantizers[path] = quantizer
    if not quantizers:
        kinds = sorted({f"{device} in {str(dtype).removeprefix('torch.')}" for _, _, device, dtype in outcomes})
        reasons = "; ".join(dict.fromkeys(left.values()))
        raise ModelError(f"quant_type={name} cannot run on {', '.join(kinds)} ({reasons}); try int8_weight_only")
    return _QuantizationWork(model=model, quant_type=name, quantizers=quantizers, left=left)


def _select_layers(model: nn.Module, config: QuantizeConfig) -> tuple[dict[str, nn.Linear], list[str]]:
    """Return the Linears to quantize, by path, and the paths of layers kept in float32. LoRAs are in neither."""
    regions = [""]
    blocks = tuple(config.repeated_blocks or getattr(model, "_repeated_blocks", None) or ())
    if config.regional_quantize and blocks:
        regions = [f"{path}." for path, module in model.named_modules() if type(module).__name__ in blocks]
    # diffusers matches these names with parts of a path.
    float32_names = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    layers: dict[str, nn.Linear] = {}
    kept: list[str] = []
    quantized: list[str] = []
    for path, layer in model.named_modules():
        if not isinstance(layer, nn.Linear) or not path.startswith(tuple(regions)) or ".lora_" in path:
            continue
        if not is_plain_parameter(layer.weight):
            quantized.append(path)
        elif any(word in path for word in config.exclude_layers):
            continue
        elif float32_names & set(path.split(".")):
            kept.append(path)
        else:
            layers[path] = layer
    if not layers:
        raise ModelError(
            f"{type(model).__name__} has no layer to quantize: {len(quantized)} of its Linears are quantized already, "
            f"{len(kept)} are of its _keep_in_fp32_modules, and exclude_layers={list(config.exclude_layers)}"
        )
    own = {path for record in list_quantization_records(model) for path in record.layers}
    stored = [path for path in quantized if path not in own]
    if stored:
        kind = type(model.get_submodule(stored[0]).weight).__name__
        raise ModelError(
            f"{type(model).__name__} was loaded with {len(stored)} Linears quantized ({kind}), and these "
            f"would stay so beside {len(layers)} of {config.quant_type}; leave quantize out, or load plain weights"
        )
    return layers, kept


def _choose_quantizer(
    candidates: Sequence[QuantizeLinear], width: int, out: int, device: torch.device, dtype: torch.dtype
) -> tuple[QuantizeLinear | None, str]:
    """Return the first candidate able to quantize and call a Linear of a shape; or None, and why none can."""
    reasons: dict[str, None] = {}
    for quantizer in candidates:
        try:
            with torch.no_grad():
                # From the meta device, so that no random number is used.
                layer = nn.Linear(width, out, device="meta", dtype=dtype).to_empty(device=device)
                for parameter in layer.parameters():
                    parameter.fill_(1.0)
                quantized: Any = quantizer(layer)
                # One row, and enough rows to choose the kernels for matrices.
                for rows in (1, 32):
                    quantized(torch.ones(rows, width, device=device, dtype=dtype))
        except _QUANTIZER_ERRORS as error:
            reasons[join_error_lines(error, 200)] = None
            continue
        # torchao leaves a layer unchanged if no kernel takes its shape.
        if not is_plain_parameter(quantized.weight):
            return quantizer, ""
        reasons[f"no kernel takes {out} x {width}"] = None
    return None, "; ".join(reasons)


def _quantize_to_nf4(layer: nn.Linear) -> nn.Module:
    """Quantize a Linear to the NF4 type of bitsandbytes. `to` quantizes its weight, even if it is on that device
    already."""
    require_quantizer("bitsandbytes_4bit")
    import bitsandbytes  # type: ignore[import-not-found]

    weight = layer.weight
    quantized = bitsandbytes.nn.Linear4bit(
        layer.in_features,
        layer.out_features,
        layer.bias is not None,
        compute_dtype=weight.dtype,
        quant_type="nf4",
        device="meta",
    )
    quantized.weight = bitsandbytes.nn.Params4bit(weight.detach(), requires_grad=False, quant_type="nf4")
    quantized.bias = layer.bias
    moved: nn.Module = quantized.to(weight.device)
    return moved


def _list_torchao_quantizers(
    name: str, device: torch.device, schemes: Sequence[str], group: int
) -> list[QuantizeLinear]:
    """Return ways to quantize a layer by torchao, the best first. None changes torch.compile's global settings."""
    require_quantizer(name)
    from torchao import quantization as torchao  # type: ignore[import-untyped]
    from torchao.utils import should_reduce_range  # type: ignore[import-untyped]

    def quantize_layer(make_config: Callable[[], Any], layer: nn.Linear) -> nn.Module:
        torchao.quantize_(layer, make_config(), filter_fn=lambda module, path: module is layer)
        return layer

    factories: list[Callable[[], Any]] = []
    if name in _TORCHAO_CONFIGS:
        granularities = {
            "row": torchao.PerRow(),
            "tensor": torchao.PerTensor(),
            # The blocks of activations, then of weights: torchao's kernel takes no other sizes.
            "block": (torchao.PerBlock([1, 128]), torchao.PerBlock([128, 128])),
        }
        config = functools.partial(getattr(torchao, _TORCHAO_CONFIGS[name]), set_inductor_config=False)
        if name == "int8":
            # Without VNNI the kernels of CPUs add two products in 16 bits, which large integers exceed.
            config = functools.partial(config, reduce_range=should_reduce_range(device))
        for scheme in schemes:
            factories.append(functools.partial(config, granularity=granularities[scheme]))
    elif device.type != "cpu" and name == "int4":
        # On GPUs torchao packs no int4 weights for int8 activations, so the activations are float8.
        factories.append(torchao.Float8DynamicActivationInt4WeightConfig)
    elif device.type != "cpu":
        # First torch's kernel, which takes only bfloat16, then mslk's.
        config = functools.partial(torchao.Int4WeightOnlyConfig, group_size=group, set_inductor_config=False)
        for form in ("tile_packed_to_4d", "plain"):
            factories.append(functools.partial(config, int4_packing_format=form))
    else:
        # Only torchao's prototypes have kernels for CPUs. Torch's own kernel needs a multiple of 16 outputs.
        from torchao.prototype.quantization import int4  # type: ignore[import-untyped]

        # The activations of `int4_weight_only` stay as they are, and `int4` makes them int8.
        config = int4.PrototypeInt4WeightOnlyConfig
        if name == "int4":
            config = int4.Int8DynamicActivationInt4WeightConfig
        factories.append(functools.partial(config, group_size=group, set_inductor_config=False))
    return [functools.partial(quantize_layer, factory) for factory in factories]


@checked()
def quantize(
    target: T,
    quant_type: str = "float8_weight_only",
    exclude_layers: Sequence[str] | set[str] | frozenset[str] = EXCLUDED,
    per_row: bool = True,
    *,
    group_size: int = 128,
    quantize_config: QuantizeConfig | Mapping[str, Any] | None = None,
    **fields: Any,
) -> T:
    """Quantize the Linears of a model in place, on their device; before `parallelize` or after it.

    Linears of the model's `_keep_in_fp32_modules`, which diffusers loads in float32, are not quantized.

    Args:
        target: a transformer or any other module; or a pipeline or a runner, with all its transformers (of guidance and
            priors too) and the U-Net.
        quant_type: float8_weight_only, int8_weight_only, int4_weight_only; with activations that are quantized too:
            float8, int8, int4; bitsandbytes_4bit (NF4); or one of `ALIASES` or `SCALED_TYPES`.
        exclude_layers: layers with one of these in their names are not quantized.
        per_row: a scale for each row of weights and each token. False gives each layer and each call one scale, so that
            the result of a token depends on the other tokens of the call. It has no effect on the 4-bit types.
        group_size: numbers of a row that share a scale, in the 4-bit types of torchao.
        quantize_config: all of this as a config, instead of the other arguments.
        fields: other fields of a `QuantizeConfig`, such as `precision_plan`.

    Returns:
        The target. What was done is logged, and `list_quantization_records(model)` returns it.

    Raises:
        ModelError: if the type is unknown, its package is absent, it cannot run on this device or in this dtype, or
            there is no layer for it. Nothing was changed then.
    """
    if quantize_config is None:
        fields |= {"quant_type": quant_type, "exclude_layers": exclude_layers, "per_row": per_row}
        config = QuantizeConfig(**fields, group_size=group_size)
    else:
        config = parse_quantize_config(quantize_config)
    # All models are tried before any is changed.
    work: list[_QuantizationWork] = []
    for model, config_of_model in _find_target_models(target, config):
        work += _plan_model(unwrap_compiled(model), config_of_model)
    for work_of_type in work:
        work_of_type.quantize_layers()
    return target


def _find_target_models(target: Any, config: QuantizeConfig) -> list[tuple[nn.Module, QuantizeConfig]]:
    """Return the models to quantize, each with its config: named components, or the transformers and the U-Net."""
    pipe = target
    # A module may have an attribute `pipe` of its own.
    if not isinstance(target, nn.Module):
        pipe = getattr(target, "pipe", target)
    configs = config.by_component()
    for name in configs:
        if isinstance(pipe, nn.Module) or not isinstance(getattr(pipe, name, None), nn.Module):
            raise ModelError(
                f"components_to_quantize: {type(pipe).__name__} has no component {name!r} that is a module"
            )
    if configs:
        return [(getattr(pipe, name), part) for name, part in configs.items()]
    if isinstance(pipe, nn.Module):
        return [(pipe, config)]
    models: list[nn.Module] = []
    # A pipeline may have a U-Net and no transformer, which `find_transformers` refuses.
    if hasattr(pipe, "__dict__"):
        with contextlib.suppress(ModelError):
            models += find_transformers(pipe)
    unet = getattr(pipe, "unet", None)
    if isinstance(unet, nn.Module):
        models.append(unet)
    if not models:
        raise ModelError(f"{type(pipe).__name__} has no transformer and no unet; give quantize the module itself")
    return [(model, config) for model in dict.fromkeys(models)]
