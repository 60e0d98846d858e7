"""Offers the names that scripts for cache-dit use: degrees and quantization as configs, and advice for absent names.

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal

from ditile.cache.config import Fields, check_known
from ditile.distributed import env
from ditile.plan.errors import ModelError, PlanError, quote_value
from ditile.plan.option_classes import CallArguments, Count, check_value, checked
from ditile.plan.plan import Plan

AXES = {"ulysses_size": "ulysses", "ring_size": "ring", "tp_size": "tensor"}
"""The arguments of `ParallelismConfig` that are degrees of a plan."""

ParallelismBackend = Enum(
    "ParallelismBackend", ["AUTO", "CACHE_DIT", "NATIVE_DIFFUSER", "NATIVE_PYTORCH", "NATIVE_HYBRID"]
)
"""The allowed values of the backend of `ParallelismConfig`; ditile has one backend."""

_CHOICES: dict[str, tuple[Any, ...]] = {
    "backend": tuple(backend.name.lower() for backend in ParallelismBackend),
    "ulysses_anything": (None, True, False),
    "ulysses_async": (False, True),
    "ulysses_float8": (False,),
    "ring_rotate_method": ("p2p",),
    "ring_convert_to_fp32": (True, False),
    "use_ray": (False,),
}
"""The values of the arguments of `ParallelismConfig` that are choices, the default first."""
_OLDER_NAMES = {
    "experimental_ulysses_anything": "ulysses_anything",
    "experimental_async_qkv_proj": "ulysses_async",
    "experimental_ulysses_async": "ulysses_async",
    "experimental_ulysses_float8": "ulysses_float8",
}
"""Entries of parallel_kwargs that have another name than the argument."""
_IN_PARALLEL_KWARGS = (
    *("attention_backend", "cp_plan", "extra_parallel_modules", "ring_rotate_method", "ring_convert_to_fp32"),
    *_OLDER_NAMES,
)
_ARGUMENTS = (*AXES, *_CHOICES, "attention_backend", "cp_plan", "extra_parallel_modules", "parallel_kwargs")
_PLAN_CHANGES_BY_MODULE: dict[str, dict[str, Any]] = {"text_encoder": {"text": "split"}, "vae": {"vae": "rows"}}

_OFFLOAD = "pipe.transformer.enable_group_offload(..) of diffusers"
_PROFILE = "torch.profiler, or ditile generate --trace FILE"
INSTEAD = {
    "BlockAdapterRegister": "ditile.BlockAdapter(..) for a pipeline, or ditile.register(..) for a model",
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


@dataclass(frozen=True, slots=True)
class RankDivision:
    """The result of `ParallelismConfig`; `to_plan` makes a `Plan` of it once the number of ranks is known.

    Attributes:
        degrees: of the plan; one may be "auto".
        options: other fields of the plan.
        modules: "text_encoder" splits the layers of the text encoders over the ranks, "vae" the rows of the decode.
        attention_backend: the attention kernel, as diffusers names it; None leaves it to the pipeline.
        cp_plan: what is split over tokens, in the format of diffusers' `_cp_plan`; None leaves it to the model.
    """

    degrees: Mapping[str, Any] = field(hash=False)
    options: Mapping[str, Any] = field(hash=False)
    modules: tuple[str, ...] = ()
    attention_backend: str | None = None
    cp_plan: Mapping[str, Any] | None = field(default=None, hash=False)

    def to_plan(self, world: int | None = None) -> Plan:
        """Build the plan.

        Args:
            world: ranks that are running, for a degree that is auto; by default those that torchrun started, or one.

        Raises:
            PlanError: if the other degrees do not divide them, or values contradict each other.
        """
        degrees = dict(self.degrees)
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
        plan = Plan(**degrees, **self.options)
        if plan.world == 1:
            # A single rank has no other rank to split a module with.
            return plan
        for module in self.modules:
            plan = replace(plan, **_PLAN_CHANGES_BY_MODULE[module])
        return plan


@checked()
def plan_division(**arguments: Any) -> RankDivision:
    """Build a division over ranks from the spelling of cache-dit, whose name for this is `ParallelismConfig`.

    Args:
        ulysses_size: ranks that split the tokens, and the heads in attention. None is 1. One size may be "auto": as
            many ranks as are running, divided by the other sizes.
        ring_size: ranks that split the tokens, and pass keys and values round a ring.
        tp_size: ranks that split the weights of every block.
        backend: one of `ParallelismBackend`; ditile has one backend for all of them.
        attention_backend, cp_plan: as in `RankDivision`.
        ulysses_anything: True allows lengths and heads that ulysses does not divide, False refuses them; None allows
            them where they are needed.
        ulysses_async: exchange each projection while the next one is computed.
        ulysses_float8: False: exchanged tensors keep their type.
        ring_rotate_method: p2p.
        ring_convert_to_fp32: partial results are always merged in float32.
        extra_parallel_modules: the `modules` of `RankDivision`.
        parallel_kwargs: the last seven arguments, attention_backend and cp_plan in the older form, in which three are
            called experimental_ulysses_anything, experimental_ulysses_async (or experimental_async_qkv_proj) and
            experimental_ulysses_float8.
        use_ray: False.

    Raises:
        ModelError: if an argument or an entry of parallel_kwargs is not known, or a value is out of its range.
    """
    for name, value in arguments.items():
        if name.startswith("ray_") or (name == "use_ray" and value is not False):
            raise ModelError(
                f"{name}={quote_value(value)}: ranks are started by torchrun or ditile.launch; leave it out"
            )
        check_known(f"ParallelismConfig({name}=..)", name, _ARGUMENTS)
    values = arguments | _read_parallel_kwargs(arguments)
    for name, choices in _CHOICES.items():
        value = values.get(name, choices[0])
        if name == "backend" and isinstance(value, str | ParallelismBackend):
            # It may be a member of the enum, or its name in either case.
            value = str(value).rpartition(".")[2].lower()
        # 1 is not True.
        if type(value) not in map(type, choices) or value not in choices:
            known = ", ".join(map(repr, choices))
            raise ModelError(f"{name}={quote_value(value)} is not offered; try {known}, or leave it out")
    degrees = {}
    automatic = []
    for name, degree in AXES.items():
        size = values.get(name)
        if size is None:
            size = 1
        degrees[degree] = size
        if size == "auto":
            automatic.append(name)
        else:
            check_value(Count, size, name, example=f"2 or {name}='auto'")
    if len(automatic) > 1:
        raise ModelError(f"{' and '.join(automatic)} are auto; say one of them as a number")
    kernel = values.get("attention_backend")
    check_value(str | None, kernel, "attention_backend", example="'native'")
    modules = values.get("extra_parallel_modules", ())
    known_modules = list(_PLAN_CHANGES_BY_MODULE)
    check_value(Sequence[str], modules, "extra_parallel_modules", example=known_modules)
    for name in modules:
        if name not in known_modules:
            raise ModelError(
                f"extra_parallel_modules: {quote_value(name)} is not offered; give some of {known_modules}"
            )
    options = {"uaa": values.get("ulysses_anything"), "async_ulysses": values.get("ulysses_async", False)}
    return RankDivision(degrees, options, tuple(modules), kernel, values.get("cp_plan"))


ParallelismConfig = plan_division


def _read_parallel_kwargs(arguments: CallArguments) -> dict[str, Any]:
    """Return the arguments that parallel_kwargs stands for. An entry that is off leaves its argument as it is."""
    older = arguments.get("parallel_kwargs", {})
    check_value(Mapping[str, Any], older, "parallel_kwargs")
    values = {}
    entry: str
    for entry, value in older.items():
        check_known(f"parallel_kwargs[{entry!r}]", entry, _IN_PARALLEL_KWARGS)
        name = _OLDER_NAMES.get(entry, entry)
        values[name] = value or arguments.get(name) or value
    return values


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizeConfig(Fields):
    """The settings of `ditile.quantize` as one config.

    Attributes:
        quant_type, exclude_layers, per_row, group_size: as in `quantize`.
        components_to_quantize: names of the pipeline's components; or a dict of them, each with the fields that are
            different for it. None is all transformers and the U-Net.
        precision_plan: a part of a layer's name -> the type of layers that have it in their names.
        regional_quantize: only layers in the blocks that the model repeats.
        repeated_blocks: the classes of those blocks; by default those that the model names.
        per_tensor_fallback: a layer that cannot be quantized by row or block is quantized by tensor.
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

    quant_type: str = "float8_weight_only"
    exclude_layers: Sequence[str] | set[str] | frozenset[str] = ("embedder", "embed")
    per_row: bool = True
    group_size: int = 128
    components_to_quantize: Sequence[str] | Mapping[str, Mapping[str, Any]] | None = field(default=None, hash=False)
    precision_plan: Mapping[str, str] = field(default_factory=dict, hash=False)
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
