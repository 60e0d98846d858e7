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
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from ditile.cache.cache_dit import QuantizeConfig, parse_quantize_config
from ditile.model.adapter import find_transformers
from ditile.model.hooks.compile import unwrap_compiled
from ditile.model.hooks.placeholders import count_parameter_bytes, is_plain_parameter
from ditile.parallel.tensor.sharding import find_share
from ditile.plan.errors import ModelError
from ditile.plan.extras import require_extra, require_quantizer

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
    "int4_w4a4_dq": "int4_w4a4",
}
"""Other names of the types, with the bits of weights (w) and activations (a); wo is weight only, dq dynamic."""

SCALED_TYPES = {
    "float8_per_row": ("float8", "row"),
    "float8_per_tensor": ("float8", "tensor"),
    "float8_per_block": ("float8", "block"),
    "int8_per_row": ("int8", "row"),
    "int8_per_tensor": ("int8", "tensor"),
}
"""Names that say the type and what has a scale of its own, instead of `per_row`."""

WHY_FLOAT32 = "they are of the model's _keep_in_fp32_modules"
"""The reason for layers that are not quantized because diffusers loads them in float32, whatever the dtype."""

T = TypeVar("T")
_RECORDS = "_quantized_by_ditile"
_CANNOT = (RuntimeError, ValueError, TypeError, ImportError, AssertionError, AttributeError)
"""What torchao and bitsandbytes raise where a kernel, a device or a shape is not what they need."""
_WEIGHT_ONLY = ("float8_weight_only", "int8_weight_only", "int4_weight_only")
QUANT_TYPES = (*_WEIGHT_ONLY, "float8", "int8", "int4", "int4_w4a4", "bitsandbytes_4bit")
QuantizeLinear = Callable[[nn.Linear], nn.Module]
"""Quantizes a Linear: in place, or as another module."""
ConfigFactory = Callable[[], Any]
"""Makes a config of torchao, or raises what `_CANNOT` has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizationScales:
    """How many numbers share a scale.

    Attributes:
        scheme: what has a scale of its own: "row" each row of weights and each token, "tensor" each layer and each
            call, "block" 128 x 128 weights and 128 numbers of a token.
        group: numbers of a row of weights that share a scale, in the 4-bit types.
    """

    scheme: str
    group: int


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizationRecord:
    """What one call of `quantize` did to a model.

    Attributes:
        quant_type: the type, under its name in `QUANT_TYPES`.
        layers: the names of layers that were quantized.
        left: the names of those that the type cannot take, or that the model keeps in float32 -> the reason.
        bytes_before, bytes_after: of all parameters of the model.
    """

    quant_type: str
    layers: tuple[str, ...]
    left: Mapping[str, str]
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        """One line."""
        before, after = self.bytes_before / 2**20, self.bytes_after / 2**20
        counts = f"{len(self.layers)} layers quantized, {len(self.left)} left as they are"
        return f"{self.quant_type}: {counts}; {before:.1f} MiB of parameters are {after:.1f} MiB"


def list_quantization_records(model: nn.Module) -> list[QuantizationRecord]:
    """The records of a model, one for each call of `quantize` that changed it."""
    return list(vars(unwrap_compiled(model)).get(_RECORDS, ()))


@dataclass(frozen=True, kw_only=True, slots=True)
class _QuantizationWork:
    """The layers of a model that will be quantized, and how; each shape was tried."""

    model: nn.Module
    name: str
    make: QuantizeLinear
    layers: tuple[str, ...]
    left: Mapping[str, str]

    @classmethod
    def plan_model(cls, model: nn.Module, config: QuantizeConfig) -> list[_QuantizationWork]:
        """Tries one layer of each shape. Raises `ModelError`, before anything is changed, if none can be quantized."""
        layers, kept = _select_layers(model, config)
        layers_by_type: dict[str, dict[str, nn.Linear]] = {}
        for path, layer in layers.items():
            word = next((word for word in config.precision_plan if word in path), None)
            quant_type = config.quant_type if word is None else config.precision_plan[word]
            layers_by_type.setdefault(quant_type, {})[path] = layer
        for word in config.precision_plan:
            if not any(word in path for path in layers):
                raise ModelError(f"precision_plan: no layer of {type(model).__name__} has {word!r} in its name")
        work = []
        for quant_type, part in layers_by_type.items():
            name, scheme = SCALED_TYPES.get(
                quant_type, (ALIASES.get(quant_type, quant_type), "row" if config.per_row else "tensor")
            )
            scales = QuantizationScales(scheme=scheme, group=config.group_size)
            work += cls._plan_with_fallback(model, name, part, scales, falls_back=config.per_tensor_fallback)
        return [replace(work[0], left={**work[0].left, **dict.fromkeys(kept, WHY_FLOAT32)}), *work[1:]]

    @classmethod
    def _plan_with_fallback(
        cls,
        model: nn.Module,
        name: str,
        layers: Mapping[str, nn.Linear],
        scales: QuantizationScales,
        *,
        falls_back: bool,
    ) -> list[_QuantizationWork]:
        """The work on some layers, and of those that cannot have their scales, with one for each tensor."""
        falls_back = falls_back and name in ("float8", "int8") and scales.scheme != "tensor"
        by_tensor = replace(scales, scheme="tensor")
        try:
            work = cls._plan_layers(model, name, layers, scales)
        except ModelError:
            if not falls_back:
                raise
            return [cls._plan_layers(model, name, layers, by_tensor)]
        if not (falls_back and work.left):
            return [work]
        with contextlib.suppress(ModelError):
            more = cls._plan_layers(model, name, {path: layers[path] for path in work.left}, by_tensor)
            return [replace(work, left={}), more]
        return [work]

    @classmethod
    def _plan_layers(
        cls, model: nn.Module, name: str, layers: Mapping[str, nn.Linear], scales: QuantizationScales
    ) -> _QuantizationWork:
        if name not in QUANT_TYPES:
            known = ", ".join((*QUANT_TYPES, *SCALED_TYPES))
            if name.startswith(("svdq", "nvfp4")):
                raise ModelError(f"quant_type={name!r} has no kernel here; try int4_weight_only or float8")
            raise ModelError(f"quant_type={name!r} is not known; try {known}")
        kinds = {(layer.weight.device, layer.weight.dtype) for layer in layers.values()}
        options: list[QuantizeLinear] = []
        for device, dtype in sorted(kinds, key=str):
            _check_quant_type(model, name, device, dtype, scales)
            options += _list_quantizers(name, device, scales)
        trials = [_try_each_shape(make, layers) for make in options]
        make, left = max(zip(options, trials, strict=True), key=lambda tried: len(layers) - len(tried[1]))
        if len(left) == len(layers):
            reasons = "; ".join(dict.fromkeys(why for trial in trials for why in trial.values()))
            where = ", ".join(f"{device} in {str(dtype).removeprefix('torch.')}" for device, dtype in kinds)
            raise ModelError(
                f"quant_type={name} cannot run on {where} ({reasons}); {_suggest_quant_type(name, device)}"
            )
        return cls(
            model=model, name=name, make=make, layers=tuple(path for path in layers if path not in left), left=left
        )

    def quantize_layers(self) -> None:
        """Quantizes the layers, one at a time."""
        before = count_parameter_bytes(self.model)
        for path in self.layers:
            layer = self.model.get_submodule(path)
            assert isinstance(layer, nn.Linear)
            with torch.no_grad():
                made = self.make(layer)
            if made is not layer:
                parent, _, leaf = path.rpartition(".")
                setattr(self.model.get_submodule(parent), leaf, made)
        record = QuantizationRecord(
            quant_type=self.name,
            layers=self.layers,
            left=self.left,
            bytes_before=before,
            bytes_after=count_parameter_bytes(self.model),
        )
        vars(self.model).setdefault(_RECORDS, []).append(record)
        LOG.info("%s: %s", type(self.model).__name__, record)
        for why in dict.fromkeys(self.left.values()):
            paths = [path for path, reason in self.left.items() if reason == why]
            level = logging.INFO if why == WHY_FLOAT32 else logging.WARNING
            LOG.log(level, "not quantized, as %s: %s", why, ", ".join(paths))


def _select_layers(model: nn.Module, config: QuantizeConfig) -> tuple[dict[str, nn.Linear], list[str]]:
    """The Linears to be quantized, by path, and the paths of those that stay in float32. LoRAs are in neither."""
    exclude, regions = config.exclude_layers, [""]
    blocks = tuple(config.repeated_blocks or getattr(model, "_repeated_blocks", None) or ())
    if config.regional_quantize and blocks:
        regions = [f"{path}." for path, module in model.named_modules() if type(module).__name__ in blocks]
    linears = {
        path: layer
        for path, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and path.startswith(tuple(regions))
    }
    own = {path: layer for path, layer in linears.items() if ".lora_" not in path}
    plain = {path: layer for path, layer in own.items() if is_plain_parameter(layer.weight)}
    wanted = {path: layer for path, layer in plain.items() if not any(word in path for word in exclude)}
    # diffusers matches these names with parts of a path.
    names = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    kept = [path for path in wanted if names & set(path.split("."))]
    quantizable = {path: layer for path, layer in wanted.items() if path not in kept}
    if not quantizable:
        raise ModelError(
            f"{type(model).__name__} has no layer to quantize: of {len(own)} Linears {len(own) - len(plain)} are "
            f"quantized already, exclude_layers={list(exclude)} takes {len(plain) - len(wanted)}, and {len(kept)} are "
            "of its _keep_in_fp32_modules"
        )
    return quantizable, kept


def _check_quant_type(
    model: nn.Module, name: str, device: torch.device, dtype: torch.dtype, scales: QuantizationScales
) -> None:
    """Raises `ModelError` for a type that is known not to run, without a trial."""
    if name == "int4_w4a4":
        raise ModelError(
            "quant_type=int4_w4a4 has no kernel: torchao multiplies no 4-bit weights with 4-bit activations any more; "
            "try int4_weight_only or int8"
        )
    require_quantizer(name)
    if name == "bitsandbytes_4bit" and find_share(model) is not None:
        raise ModelError("quant_type=bitsandbytes_4bit cannot take a share of the weights; try int8_weight_only")
    if device.type == "meta":
        raise ModelError(f"{type(model).__name__} has no weights yet; load them before they are quantized")
    if name == "float8" and scales.scheme == "row" and dtype != torch.bfloat16:
        raise ModelError(
            f"quant_type=float8 with per_row=True needs bfloat16, and the weights are "
            f"{str(dtype).removeprefix('torch.')}; load the model in bfloat16, or use per_row=False"
        )


def _try_each_shape(make: QuantizeLinear, layers: Mapping[str, nn.Linear]) -> dict[str, str]:
    """The layers that cannot be quantized -> why. One layer of each shape is tried."""
    reasons: dict[Any, str | None] = {}
    refused = {}
    for path, layer in layers.items():
        kind = (layer.in_features, layer.out_features, layer.weight.device, layer.weight.dtype)
        if kind not in reasons:
            reasons[kind] = _find_layer_refusal(make, *kind)
        if (why := reasons[kind]) is not None:
            refused[path] = why
    return refused


def _find_layer_refusal(
    make: QuantizeLinear, width: int, out: int, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Why a Linear of a shape cannot be quantized and called, or None."""
    try:
        with torch.no_grad():
            # From the meta device: no random number is drawn.
            layer = nn.Linear(width, out, device="meta", dtype=dtype).to_empty(device=device)
            for parameter in layer.parameters():
                parameter.fill_(1.0)
            made = make(layer)
            if is_plain_parameter(made.weight):  # type: ignore[arg-type]
                return f"no kernel takes {out} x {width}"
            for rows in (1, 32):
                made(torch.ones(rows, width, device=device, dtype=dtype))
    except _CANNOT as error:
        return " ".join(str(error).split())[:200] or type(error).__name__
    return None


def _list_quantizers(name: str, device: torch.device, scales: QuantizationScales) -> list[QuantizeLinear]:
    """Ways to quantize a layer, the best first."""
    if name == "bitsandbytes_4bit":
        return [_quantize_to_nf4]
    return [functools.partial(_quantize_by_torchao, config) for config in _list_torchao_configs(name, device, scales)]


def _quantize_by_torchao(config: Any, layer: nn.Linear) -> nn.Module:
    require_extra("quantize", "torchao's quantization")
    from torchao.quantization import quantize_  # type: ignore[import-untyped]

    quantize_(layer, config(), filter_fn=lambda module, path: module is layer)
    return layer


def _quantize_to_nf4(layer: nn.Linear) -> nn.Module:
    """A Linear of bitsandbytes in the type NF4. Its weight is quantized by `to`, even to the device where it is."""
    require_quantizer("bitsandbytes_4bit")
    import bitsandbytes  # type: ignore[import-not-found]

    width, out, weight = layer.in_features, layer.out_features, layer.weight
    made = bitsandbytes.nn.Linear4bit(
        width, out, layer.bias is not None, compute_dtype=weight.dtype, quant_type="nf4", device="meta"
    )
    made.weight = bitsandbytes.nn.Params4bit(weight.detach(), requires_grad=False, quant_type="nf4")
    made.bias = layer.bias
    moved: nn.Module = made.to(weight.device)
    return moved


def _list_torchao_configs(name: str, device: torch.device, scales: QuantizationScales) -> list[ConfigFactory]:
    """The configs of torchao for a type, the best first. None of them changes torch.compile's global settings."""
    require_quantizer(name)
    from torchao import quantization as torchao  # type: ignore[import-untyped]

    on_cpu = device.type == "cpu"
    if name == "int4_weight_only" and on_cpu:
        # torch's own kernel on CPUs takes outputs that 16 divides.
        from torchao.prototype.quantization import int4  # type: ignore[import-untyped]

        kind = int4.PrototypeInt4WeightOnlyConfig
        return [functools.partial(kind, group_size=scales.group, set_inductor_config=False)]
    if name == "int4_weight_only":
        # On GPUs torch's own kernel, which wants bfloat16, or mslk's.
        shared = {"group_size": scales.group, "set_inductor_config": False}
        formats = ("tile_packed_to_4d", "plain")
        return [functools.partial(torchao.Int4WeightOnlyConfig, int4_packing_format=each, **shared) for each in formats]
    if name == "int4" and on_cpu:
        from torchao.prototype.quantization import int4

        kind = int4.Int8DynamicActivationInt4WeightConfig
        return [functools.partial(kind, group_size=scales.group, set_inductor_config=False)]
    if name == "int4":
        # On GPUs torchao packs no int4 weights for int8 activations, so these are float8.
        return [torchao.Float8DynamicActivationInt4WeightConfig]
    kinds = {
        "float8_weight_only": "Float8WeightOnlyConfig",
        "int8_weight_only": "Int8WeightOnlyConfig",
        "float8": "Float8DynamicActivationFloat8WeightConfig",
        "int8": "Int8DynamicActivationInt8WeightConfig",
    }
    granularity = {
        "row": torchao.PerRow(),
        "tensor": torchao.PerTensor(),
        "block": (torchao.PerBlock([1, 128]), torchao.PerBlock([128, 128])),
    }[scales.scheme]
    return [functools.partial(getattr(torchao, kinds[name]), granularity=granularity, set_inductor_config=False)]


def _suggest_quant_type(name: str, device: torch.device) -> str:
    here = "" if device.type != "cpu" else ", or move the model to a GPU first, if it is meant to run there"
    return f"try {'int4_weight_only or int8' if '4' in name else 'int8'}_weight_only{here}"


def quantize(
    target: T,
    quant_type: str = "float8_weight_only",
    exclude_layers: Sequence[str] = EXCLUDED,
    per_row: bool = True,
    *,
    group_size: int = 128,
    quantize_config: QuantizeConfig | Mapping[str, Any] | None = None,
    **fields: Any,
) -> T:
    """Quantizes the Linears of a model in place, on the device where they are; before `parallelize` or after it.

    Linears of the model's `_keep_in_fp32_modules`, which diffusers loads in float32, are not quantized.

    Args:
        target: a transformer or any other module; or a pipeline or a runner, of which all transformers (those of
            guidance and priors too) and the U-Net are quantized.
        quant_type: float8_weight_only, int8_weight_only, int4_weight_only; with activations that are quantized too:
            float8, int8, int4, int4_w4a4; bitsandbytes_4bit (NF4); or one of `ALIASES` or `SCALED_TYPES`.
        exclude_layers: a layer whose name has one of these in it is not quantized.
        per_row: a scale for each row of weights and each token. False gives each layer and each call one scale, so that
            the result of a token depends on the other tokens of the call. It has no effect on the 4-bit types.
        group_size: numbers of a row that share a scale, in the 4-bit types of torchao.
        quantize_config: all of this as a config, in place of the other arguments.
        fields: other fields of a `QuantizeConfig`, such as `precision_plan`.

    Returns:
        The target. What was done is logged, and `ditile.runner.quantize.list_quantization_records(model)` returns it.

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
    work = [
        each
        for model, part in _find_target_models(target, config)
        for each in _QuantizationWork.plan_model(unwrap_compiled(model), part)
    ]
    for one in work:
        one.quantize_layers()
    return target


def _find_target_models(target: Any, config: QuantizeConfig) -> list[tuple[nn.Module, QuantizeConfig]]:
    """The models to quantize, each with its config."""
    pipe = target if isinstance(target, nn.Module) else getattr(target, "pipe", target)
    named = config.by_component()
    for name in named:
        if isinstance(pipe, nn.Module) or not isinstance(getattr(pipe, name, None), nn.Module):
            raise ModelError(
                f"components_to_quantize: {type(pipe).__name__} has no component {name!r} that is a module"
            )
    if named:
        return [(getattr(pipe, name), part) for name, part in named.items()]
    return [(model, config) for model in _find_denoisers(pipe)]


def _find_denoisers(pipe: Any) -> list[nn.Module]:
    """The transformers and the U-Net of a pipeline, or the module that is given."""
    if isinstance(pipe, nn.Module):
        return [pipe]
    models: list[nn.Module] = []
    # A pipeline may have a U-Net and no transformer, which `find_transformers` refuses.
    if hasattr(pipe, "__dict__"):
        with contextlib.suppress(ModelError):
            models = find_transformers(pipe)
    unet = getattr(pipe, "unet", None)
    models += [unet] if isinstance(unet, nn.Module) else []
    if not models:
        raise ModelError(f"{type(pipe).__name__} has no transformer and no unet; give quantize the module itself")
    return list(dict.fromkeys(models))
