"""What scripts for cache-dit name: degrees and quantization as configs, and what to use in place of absent names.

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal

from ditile.cache.config import Fields, check_known
from ditile.distributed import env
from ditile.plan.checks import check_choice, check_whole_number
from ditile.plan.errors import ModelError, PlanError
from ditile.plan.plan import Plan

AXES = {"ulysses_size": "ulysses", "ring_size": "ring", "tp_size": "tensor"}
"""The fields that are degrees of a plan."""

Size = int | Literal["auto"] | None

_FIELDS_BY_KWARG = {
    "experimental_ulysses_anything": "ulysses_anything",
    "experimental_async_qkv_proj": "ulysses_async",
    "experimental_ulysses_async": "ulysses_async",
    "experimental_ulysses_float8": "ulysses_float8",
} | {
    name: name
    for name in ("attention_backend", "cp_plan", "extra_parallel_modules", "ring_rotate_method", "ring_convert_to_fp32")
}
"""Entry of parallel_kwargs -> the field that it stands for."""
_SWITCHES = ("ulysses_anything", "ulysses_async", "ulysses_float8", "ring_convert_to_fp32")
_PLAN_CHANGES_BY_MODULE: dict[str, dict[str, Any]] = {"text_encoder": {"text": "split"}, "vae": {"vae": "rows"}}

ParallelismBackend = Enum(
    "ParallelismBackend", ["AUTO", "CACHE_DIT", "NATIVE_DIFFUSER", "NATIVE_PYTORCH", "NATIVE_HYBRID"]
)
"""What `ParallelismConfig.backend` may name; ditile has one backend."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelismConfig(Fields):
    """Degrees, and what goes with them; `to_plan` makes a `Plan` of it. A size of None is a degree of 1.

    Attributes:
        ulysses_size: ranks that share the tokens, and the heads in attention. One size may be "auto": as many ranks as
            are running, divided by the other sizes.
        ring_size: ranks that share the tokens, and pass keys and values round a ring.
        tp_size: ranks that share the weights of every block.
        backend: accepted and not used, because ditile has one backend.
        attention_backend: the attention kernel, as diffusers names it; None leaves it to the pipeline.
        cp_plan: what is split over tokens, in the format of diffusers' `_cp_plan`; None leaves it to the model.
        ulysses_anything: True allows lengths and heads that ulysses does not divide, False refuses them; None allows
            them where they are needed.
        ulysses_async: exchange each projection while the next one is computed.
        ulysses_float8: True is refused, because exchanged tensors keep their type.
        ring_rotate_method: p2p.
        ring_convert_to_fp32: accepted, because partial results are always merged in float32.
        extra_parallel_modules: "text_encoder" shares out the layers of the text encoders, "vae" rows of the decode.
        parallel_kwargs: the last eight fields in the older form, in which three of them are called
            experimental_ulysses_anything, experimental_ulysses_async (or experimental_async_qkv_proj) and
            experimental_ulysses_float8. They become the fields.
        use_ray: False.

    Raises:
        ModelError: if a field or an entry of parallel_kwargs is not known, or a value is out of its range.
    """

    INSTEAD = {
        f"ray_{name}": "ranks are started by torchrun or ditile.launch; leave it out"
        for name in ("num_workers", "address", "runtime_env", "init_kwargs", "worker_options", "master_port")
        + ("auto_shutdown", "transfer_backend", "transfer_custom_obj", "use_flashpack", "use_compile", "transfer_fn")
    }

    ulysses_size: Size = None
    ring_size: Size = None
    tp_size: Size = None
    backend: Any = "auto"
    attention_backend: str | None = None
    cp_plan: Mapping[str, Any] | None = field(default=None, hash=False)
    ulysses_anything: bool | None = None
    ulysses_async: bool = False
    ulysses_float8: bool = False
    ring_rotate_method: str = "p2p"
    ring_convert_to_fp32: bool = True
    extra_parallel_modules: Sequence[str] = ()
    parallel_kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    use_ray: bool = False

    def __post_init__(self) -> None:
        self._set_older_fields()
        automatic = [name for name in AXES if getattr(self, name) == "auto"]
        for name in AXES:
            if name not in automatic:
                hint = f"{name}=2 or {name}='auto'"
                check_whole_number(getattr(self, name), name, optional=True, hint=hint)
        if len(automatic) > 1:
            raise ModelError(f"{' and '.join(automatic)} are auto; say one of them as a number")
        object.__setattr__(self, "backend", str(self.backend).rpartition(".")[2].lower())
        check_choice(self.backend, "backend", [each.name.lower() for each in ParallelismBackend])
        for name in _SWITCHES:
            check_choice(getattr(self, name), name, (True, False, *([None] if name == "ulysses_anything" else [])))
        if self.ulysses_float8:
            raise ModelError("ulysses_float8=True: what is exchanged stays as it is; leave it out")
        if self.ring_rotate_method != "p2p":
            raise ModelError(
                f"ring_rotate_method={self.ring_rotate_method!r} is not offered; try 'p2p', or leave it out"
            )
        if self.use_ray:
            raise ModelError(f"use_ray={self.use_ray!r}: ranks are started by torchrun or ditile.launch; leave it out")
        if self.attention_backend is not None and not isinstance(self.attention_backend, str):
            raise ModelError(f"attention_backend={self.attention_backend!r} is no name; try 'native'")
        self._check_modules()

    def _set_older_fields(self) -> None:
        """Turns parallel_kwargs into fields."""
        if not isinstance(self.parallel_kwargs, Mapping):
            names = ", ".join(_FIELDS_BY_KWARG)
            raise ModelError(f"parallel_kwargs={self.parallel_kwargs!r} are no names and values; give some of {names}")
        for name, value in self.parallel_kwargs.items():
            check_known(f"parallel_kwargs[{name!r}]", name, _FIELDS_BY_KWARG)
            object.__setattr__(self, _FIELDS_BY_KWARG[name], value or getattr(self, _FIELDS_BY_KWARG[name]) or value)
        object.__setattr__(self, "parallel_kwargs", {})

    def _check_modules(self) -> None:
        modules = self.extra_parallel_modules
        known = list(_PLAN_CHANGES_BY_MODULE)
        if isinstance(modules, str) or not isinstance(modules, Sequence):
            raise ModelError(f"extra_parallel_modules={modules!r} are no names; give some of {known}")
        for name in modules:
            if name not in known:
                raise ModelError(f"extra_parallel_modules: {name!r} is not offered; give some of {known}")
        object.__setattr__(self, "extra_parallel_modules", tuple(modules))

    def to_plan(self, world: int | None = None) -> Plan:
        """The plan.

        Args:
            world: ranks that are running, for a size that is auto; by default those that torchrun started, or one.

        Raises:
            PlanError: if the other sizes do not divide them, or values contradict each other.
        """
        sizes: dict[str, Any] = {AXES[name]: getattr(self, name) or 1 for name in AXES}
        if "auto" in sizes.values():
            place = env.read_torchrun_place()
            ranks = world if world is not None else (1 if place is None else place.world)
            sizes = _fill_auto_size(sizes, ranks)
        plan = Plan(**sizes, uaa=self.ulysses_anything, async_ulysses=self.ulysses_async)
        for name in self.extra_parallel_modules if plan.world > 1 else ():
            plan = replace(plan, **_PLAN_CHANGES_BY_MODULE[name])
        return plan


def _fill_auto_size(sizes: dict[str, Any], world: int) -> dict[str, Any]:
    """The sizes, with the one that is auto as a number."""
    fixed = Plan(**{name: size for name, size in sizes.items() if size != "auto"}).world
    auto = next(name for name, size in sizes.items() if size == "auto")
    if world % fixed:
        shown = " and ".join(f"{name}={size}" for name, size in sizes.items() if size not in (1, "auto"))
        raise PlanError(
            f"{auto}=auto with {shown}: {world} rank(s) cannot be shared out so; start a multiple of {fixed}"
        )
    return sizes | {auto: world // fixed}


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizeConfig(Fields):
    """What `ditile.quantize` does, as one config.

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
    exclude_layers: Sequence[str] = ("embedder", "embed")
    per_row: bool = True
    group_size: int = 128
    components_to_quantize: Sequence[str] | Mapping[str, Mapping[str, Any]] | None = field(default=None, hash=False)
    precision_plan: Mapping[str, str] = field(default_factory=dict, hash=False)
    regional_quantize: bool = False
    repeated_blocks: Sequence[str] = ()
    per_tensor_fallback: bool = False
    backend: str = "auto"
    verbose: bool = False

    def __post_init__(self) -> None:
        for name in ("exclude_layers", "repeated_blocks"):
            _check_words(getattr(self, name), name)
        for name in ("per_row", "regional_quantize", "per_tensor_fallback"):
            check_choice(getattr(self, name), name, (True, False))
        check_choice(str(self.backend).lower(), "backend", ("auto", "torchao", "ao"))
        if not isinstance(self.precision_plan or {}, Mapping):
            raise ModelError(f"precision_plan={self.precision_plan!r} is no dict; give such as {{'attn.to_q': 'int8'}}")
        object.__setattr__(self, "precision_plan", dict(self.precision_plan or {}))
        self.by_component()

    def by_component(self) -> dict[str, QuantizeConfig]:
        """The config of each component that is named. Raises `ModelError` if what is named is no list or dict."""
        named = self.components_to_quantize or {}
        if not isinstance(named, Mapping):
            _check_words(named, "components_to_quantize")
        changes = named if isinstance(named, Mapping) else dict.fromkeys(named, {})
        for name, values in changes.items():
            if not isinstance(values, Mapping):
                raise ModelError(f"components_to_quantize: {name}={values!r} is no dict; give {{'quant_type': 'int8'}}")
        return {name: self.reset(components_to_quantize=None, **values) for name, values in changes.items()}


def _check_words(value: Any, name: str) -> None:
    """Raises `ModelError` unless a field is a list of words."""
    if isinstance(value, str):
        raise ModelError(f"{name}={value!r} is one word; give a list of them")
    if not isinstance(value, Sequence | Set) or not all(isinstance(each, str) for each in value):
        raise ModelError(f"{name}={value!r} is no list of words; give such as ['embedder']")


def parse_quantize_config(value: Any) -> QuantizeConfig:
    """A config, also from a dict. Raises `ModelError` if it is neither, or a value is not allowed."""
    if not isinstance(value, QuantizeConfig | Mapping):
        raise ModelError(f"quantize_config={value!r} is no config; give a QuantizeConfig(..), or a dict")
    return value if isinstance(value, QuantizeConfig) else QuantizeConfig(**value)
