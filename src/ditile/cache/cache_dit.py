"""Offers the names that scripts for cache-dit use: degrees and quantization as configs, and advice for absent names.

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from ditile.cache.config import Fields
from ditile.distributed import env
from ditile.plan.errors import ModelError, PlanError, quote_value
from ditile.plan.option_classes import Count, check_value, define_option, options
from ditile.plan.plan import Plan

ParallelismBackend = Enum(
    "ParallelismBackend", ["AUTO", "CACHE_DIT", "NATIVE_DIFFUSER", "NATIVE_PYTORCH", "NATIVE_HYBRID"]
)
"""The allowed values of the backend of `ParallelismConfig`; ditile has one backend."""

AXES = {"ulysses_size": "ulysses", "ring_size": "ring", "tp_size": "tensor"}
"""The arguments of `ParallelismConfig` that are degrees of a plan."""
_OLDER_NAMES = {
    "experimental_ulysses_anything": "ulysses_anything",
    "experimental_async_qkv_proj": "ulysses_async",
    "experimental_ulysses_async": "ulysses_async",
    "experimental_ulysses_float8": "ulysses_float8",
}
"""Older name of an argument, as an entry of parallel_kwargs -> its name here."""
_PLAN_CHANGES_BY_MODULE: dict[str, dict[str, Any]] = {"text_encoder": {"text": "split"}, "vae": {"vae": "rows"}}

_OFFLOAD = "pipe.transformer.enable_group_offload(..) of diffusers"
_PROFILE = "torch.profiler, or ditile generate --trace FILE"
INSTEAD = {
    "BlockAdapterRegister": "ditile.BlockAdapter(..)",
    "ENV": "the variables in docs/environment.md",
    "QuantizeBackend": "ditile.quantize(..) without it: torchao quantizes",
    "block_range": "a list of numbers, such as list(range(8, 40, 2))",
    "disable_print": "an if on the rank, or ditile.launch",
    "get_adapter": "ditile.BlockAdapter(pipe=pipe)",
    "init_logger": "logging.getLogger('ditile')",
    "load_options": "ditile.load_configs(..)",
    "maybe_empty_cache": "torch.cuda.empty_cache()",
    "parse_extra_modules": "extra_parallel_modules=['text_encoder', 'vae']",
    "set_attn_backend": "enable_cache(pipe, attention_backend=..), or diffusers' model.set_attention_backend(..)",
    "supported_matrix": "ditile.supported_pipelines(), or docs/matrix.md",
    "version_tuple": "ditile.__version__",
    **dict.fromkeys(
        ("CacheType", "NONE", "DBCache", "DBPrune", "cache_type"), "DBCacheConfig(..), or DBPruneConfig(..)"
    ),
    **dict.fromkeys(
        ("LayerwiseOffloadHandle", "LayerwiseOffloadHandleGroup", "get_layerwise_offload_handles", "layerwise_offload"),
        _OFFLOAD,
    ),
    **dict.fromkeys(("layerwise_cpu_offload", "remove_layerwise_offload"), _OFFLOAD),
    **dict.fromkeys(("ProfilerContext", "create_profiler_context", "profile_function"), _PROFILE),
    **dict.fromkeys(("get_profiler_output_dir", "set_profiler_output_dir"), _PROFILE),
}
"""Public name of cache-dit that ditile does not have -> what to use."""


Size = Count | Literal["auto"] | None
Backend = Annotated[
    Literal["auto", "cache_dit", "native_diffuser", "native_pytorch", "native_hybrid"],
    # The value may be a member of the enum, or its name in upper or lower case.
    BeforeValidator(lambda value: str(value).rpartition(".")[2].lower()),
]


@options()
class RankDivision:
    """A division over ranks in the words of cache-dit; `to_plan` makes a `Plan` once the number of ranks is known."""

    ulysses_size: Size = define_option(
        None,
        "ranks that split the tokens, and the heads in attention; one size may be auto: as many as are running, "
        "divided by the other sizes",
        example="2 or 'auto'",
    )
    ring_size: Size = define_option(
        None, "ranks that split the tokens, and pass keys and values round a ring", example="2 or 'auto'"
    )
    tp_size: Size = define_option(None, "ranks that split the weights of every block", example="2 or 'auto'")
    backend: Backend = define_option("auto", "one of `ParallelismBackend`: ditile has one backend for all of them")
    attention_backend: str | None = define_option(
        None, "the attention kernel, as diffusers names it; None leaves it to the pipeline", example="'native'"
    )
    cp_plan: Mapping[str, Any] | None = define_option(
        None, "accepted and not used: what of a model counts tokens is derived from its calls"
    )
    ulysses_anything: bool | None = define_option(
        None,
        "True allows lengths and heads that ulysses does not divide, False refuses them, None allows them where they "
        "are needed",
    )
    ulysses_async: bool = define_option(False, "exchange each projection while the next one is computed")
    ulysses_float8: Literal[False] = define_option(False, "exchanged tensors keep their type")
    ring_rotate_method: Literal["p2p"] = define_option("p2p", "how keys go round the ring")
    ring_convert_to_fp32: bool = define_option(True, "partial results are always merged in float32")
    extra_parallel_modules: Sequence[Literal["text_encoder", "vae"]] = define_option(
        (),
        "text_encoder splits the layers of the text encoders over the ranks, vae the rows of the decode",
        example="['text_encoder', 'vae']",
    )
    use_ray: Literal[False] = define_option(False, "ranks are started by torchrun or ditile.launch")

    def __post_init__(self) -> None:
        automatic = [name for name in AXES if getattr(self, name) == "auto"]
        if len(automatic) > 1:
            raise ModelError(f"{' and '.join(automatic)} are auto; say one of them as a number")

    def to_plan(self, world: int | None = None) -> Plan:
        """Build the plan.

        Args:
            world: ranks that are running, for a size that is auto; by default those that torchrun started, or one.

        Raises:
            PlanError: if the other sizes do not divide the running ranks, or values contradict each other.
        """
        degrees: dict[str, Any] = {}
        for name, axis in AXES.items():
            degrees[axis] = getattr(self, name) or 1
        for name in [name for name, degree in degrees.items() if degree == "auto"]:
            degrees[name] = 1
            fixed = Plan(**degrees).world
            if world is None:
                place = env.read_torchrun_place()
                world = 1 if place is None else place.world
            if world % fixed:
                shown = " and ".join(f"{axis}={degree}" for axis, degree in degrees.items() if degree != 1)
                raise PlanError(
                    f"{name}=auto with {shown}: {world} rank(s) cannot be divided so; start a multiple of {fixed}"
                )
            degrees[name] = world // fixed
        plan = Plan(**degrees, uaa=self.ulysses_anything, async_ulysses=self.ulysses_async)
        if plan.world == 1:
            # A single rank has no other rank to split a module with.
            return plan
        for module in self.extra_parallel_modules:
            plan = replace(plan, **_PLAN_CHANGES_BY_MODULE[module])
        return plan


def plan_division(**arguments: Any) -> RankDivision:
    """Build a division over ranks from the arguments of cache-dit's `ParallelismConfig`. These are the fields of
    `RankDivision`, and parallel_kwargs: a dict of further fields, some under older names.

    Raises:
        ModelError: if a name is not known, or a value is out of its range.
    """
    older = arguments.pop("parallel_kwargs", {})
    check_value(Mapping[str, Any], older, "parallel_kwargs")
    for entry, value in older.items():
        name = _OLDER_NAMES.get(entry, entry)
        # An entry that is off leaves its argument as it is.
        arguments[name] = value or arguments.get(name) or value
    return RankDivision(**arguments)


ParallelismConfig = plan_division


QuantType = Literal[
    "float8_weight_only",
    "int8_weight_only",
    "int4_weight_only",
    "float8",
    "int8",
    "int4",
    "bitsandbytes_4bit",
    "fp8_w8a8_dq",
    "fp8_w8a16_wo",
    "int8_w8a8_dq",
    "int8_w8a16_wo",
    "int4_w4a8_dq",
    "int4_w4a16_wo",
    "float8_per_row",
    "float8_per_tensor",
    "float8_per_block",
    "int8_per_row",
    "int8_per_tensor",
]
"""The types of quantization; only `quantize` knows whether one runs on this device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizeConfig(Fields):
    """The settings of `ditile.quantize` as one config.

    Attributes:
        quant_type, exclude_layers, per_row, group_size: as in `quantize`.
        components_to_quantize: names of the pipeline's components; or name -> the fields that differ for this
            component. None is all transformers and the U-Net.
        precision_plan: a part of a layer's name -> the type of layers that have it in their names.
        regional_quantize: whether only layers in the blocks that the model repeats are quantized.
        repeated_blocks: the classes of those blocks; by default the classes that the model names.
        per_tensor_fallback: whether a layer that cannot be quantized by row or block is quantized by tensor.
        backend: torchao, or auto.
        verbose: accepted and not used: what was done is logged.

    Raises:
        ModelError: if a field is not known or offered, or a value is out of its range.
    """

    INSTEAD = {
        "svdq_kwargs": "there is no kernel of SVDQuant; leave it out, and take quant_type=int4_weight_only",
        "calibrate_fn": "no type needs a calibration; leave it out",
        "serialize_to": "weights are quantized when they are loaded; leave it out",
        "filter_fn": "name layers in exclude_layers",
    }

    quant_type: QuantType = "float8_weight_only"
    exclude_layers: Sequence[str] | set[str] | frozenset[str] = ("embedder", "embed")
    per_row: bool = True
    group_size: int = 128
    components_to_quantize: Sequence[str] | Mapping[str, Mapping[str, Any]] | None = field(default=None, hash=False)
    precision_plan: Mapping[str, QuantType] = field(default_factory=dict, hash=False)
    regional_quantize: bool = False
    repeated_blocks: Sequence[str] | set[str] | frozenset[str] = ()
    per_tensor_fallback: bool = False
    backend: Any = "auto"
    verbose: bool = False

    def __post_init__(self) -> None:
        if self.precision_plan is None:
            object.__setattr__(self, "precision_plan", {})
        Fields.__post_init__(self)
        check_value(Literal["auto", "torchao", "ao"], str(self.backend).lower(), "backend")
        object.__setattr__(self, "precision_plan", dict(self.precision_plan))
        self.by_component()

    def by_component(self) -> dict[str, QuantizeConfig]:
        """Return the config of each named component. Raises `ModelError` if the names are not a list or a dict."""
        changes = self.components_to_quantize or {}
        if not isinstance(changes, Mapping):
            changes = dict.fromkeys(changes, {})
        configs = {}
        for name, values in changes.items():
            configs[name] = self.reset(components_to_quantize=None, **values)
        return configs


def parse_quantize_config(value: Any) -> QuantizeConfig:
    """Return a config, which may come from a dict. Raises `ModelError` if it is neither, or a value is not allowed."""
    if not isinstance(value, QuantizeConfig | Mapping):
        raise ModelError(f"quantize_config={quote_value(value)} is not a config; give a QuantizeConfig(..), or a dict")
    if isinstance(value, QuantizeConfig):
        return value
    return QuantizeConfig(**value)
