"""ParallelismConfig: the names that cache-dit has for the degrees of a `Plan`, so that a script for it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ditile.cache.config import Fields, check_known
from ditile.distributed import env
from ditile.errors import ModelError, PlanError
from ditile.plan.checks import check_choice, check_whole_number
from ditile.plan.plan import Plan

AXES = {"ulysses_size": "ulysses", "ring_size": "ring", "tp_size": "tensor"}
"""The fields that are degrees of a plan."""

Size = int | Literal["auto"] | None

_ASYNC_SWITCHES = ("experimental_async_qkv_proj", "experimental_ulysses_async")
_SWITCHES = ("experimental_ulysses_anything", *_ASYNC_SWITCHES, "experimental_ulysses_float8", "ring_convert_to_fp32")
_PARALLEL_KWARGS = ("attention_backend", "cp_plan", "extra_parallel_modules", "ring_rotate_method", *_SWITCHES)
_PLAN_CHANGES_BY_MODULE: dict[str, dict[str, Any]] = {"text_encoder": {"text": "split"}, "vae": {"vae": "rows"}}


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelismConfig(Fields):
    """Degrees, and what goes with them; `to_plan` makes a `Plan` of it. A size of None is a degree of 1.

    Attributes:
        ulysses_size: ranks that share the tokens, and the heads in attention. One size may be "auto": as many ranks as
            are running, divided by the other sizes.
        ring_size: ranks that share the tokens, and pass keys and values round a ring.
        tp_size: ranks that share the weights of every block.
        backend: accepted and not used, because ditile has one backend.
        parallel_kwargs: attention_backend: the attention kernel, as diffusers names it;
            cp_plan: what is split over tokens, in the format of diffusers' `_cp_plan`;
            experimental_ulysses_anything: True allows lengths and heads that ulysses does not divide, False refuses
            them; left out they are allowed where they are needed;
            experimental_async_qkv_proj, experimental_ulysses_async: exchange each projection while the next one is
            computed;
            experimental_ulysses_float8: True is refused, because exchanged tensors keep their type;
            ring_rotate_method: p2p;
            ring_convert_to_fp32: accepted, because partial results are always merged in float32;
            extra_parallel_modules: "text_encoder" shares out the layers of the text encoders, "vae" rows of the decode.

    Raises:
        ModelError: if a field or an entry of parallel_kwargs is not known, or a value is out of its range.
    """

    ulysses_size: Size = None
    ring_size: Size = None
    tp_size: Size = None
    backend: str = "auto"
    parallel_kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        automatic = [name for name in AXES if getattr(self, name) == "auto"]
        for name in AXES:
            if name not in automatic:
                hint = f"{name}=2 or {name}='auto'"
                check_whole_number(getattr(self, name), name, optional=True, hint=hint)
        if len(automatic) > 1:
            raise ModelError(f"{' and '.join(automatic)} are auto; say one of them as a number")
        object.__setattr__(self, "backend", str(self.backend).rpartition(".")[2].lower())
        check_choice(self.backend, "backend", ("auto", "native_diffuser", "native_pytorch", "native_hybrid"))
        _check_parallel_kwargs(self.parallel_kwargs)
        object.__setattr__(self, "parallel_kwargs", dict(self.parallel_kwargs))

    @property
    def attention_backend(self) -> str | None:
        """The attention kernel, as diffusers names it; None leaves it to the pipeline."""
        name: str | None = self.parallel_kwargs.get("attention_backend")
        return name

    @property
    def cp_plan(self) -> Mapping[str, Any] | None:
        """What is split over tokens, as `parallelize` takes it; None leaves it to the model."""
        plan: Mapping[str, Any] | None = self.parallel_kwargs.get("cp_plan")
        return plan

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
        known = self.parallel_kwargs
        is_async = any(known.get(name, False) for name in _ASYNC_SWITCHES)
        plan = Plan(**sizes, uaa=known.get("experimental_ulysses_anything"), async_ulysses=is_async)
        for name in known.get("extra_parallel_modules", ()) if plan.world > 1 else ():
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


def _check_parallel_kwargs(kwargs: Any) -> None:
    """Raises `ModelError` for an entry of parallel_kwargs that is not known or not offered."""
    if not isinstance(kwargs, Mapping):
        raise ModelError(
            f"parallel_kwargs={kwargs!r} are no names and values; give some of {', '.join(_PARALLEL_KWARGS)}"
        )
    for name, value in kwargs.items():
        check_known(f"parallel_kwargs[{name!r}]", name, _PARALLEL_KWARGS)
        if name in _SWITCHES and not isinstance(value, bool):
            raise ModelError(f"parallel_kwargs[{name!r}]={value!r} is not True or False; try True")
    if kwargs.get("experimental_ulysses_float8"):
        raise ModelError("experimental_ulysses_float8=True: what is exchanged stays as it is; leave it out")
    if (method := kwargs.get("ring_rotate_method", "p2p")) != "p2p":
        raise ModelError(f"ring_rotate_method={method!r} is not offered; try 'p2p', or leave it out")
    kernel = kwargs.get("attention_backend")
    if kernel is not None and not isinstance(kernel, str):
        raise ModelError(f"attention_backend={kernel!r} is no name; try 'native'")
    modules, known = kwargs.get("extra_parallel_modules", ()), list(_PLAN_CHANGES_BY_MODULE)
    if isinstance(modules, str) or not isinstance(modules, Sequence):
        raise ModelError(f"extra_parallel_modules={modules!r} are no names; give some of {known}")
    for name in modules:
        if name not in known:
            raise ModelError(f"extra_parallel_modules: {name!r} is not offered; give some of {known}")
