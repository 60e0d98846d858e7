"""One table per family of transformers; the only place that knows their classes.

`register` adds a family from user code. What a pipeline gets depends on what is known of it: the ladder of
docs/design.md.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import diffusers
from diffusers import FluxTransformer2DModel, PixArtTransformer2DModel, SD3Transformer2DModel
from torch import nn

from ditile.errors import ModelError, PlanError
from ditile.hooks.compile import unwrap_compiled
from ditile.models.block_table import TRANSFORMER_TABLE, find_diffusers_class
from ditile.models.flux import FLUX
from ditile.models.pixart import PIXART
from ditile.models.sd3 import SD3
from ditile.plan.layout import Grid
from ditile.plan.plan import Plan
from ditile.plan.spec import BlockIO, Conditioning, ModelSpec

__all__ = [
    "BlockIO",
    "Family",
    "ModelSpec",
    "list_families",
    "find_loop_model",
    "register",
    "require_model_spec",
    "list_model_specs",
    "select_plan_spec",
]

_SPECS: dict[type, ModelSpec] = {
    FluxTransformer2DModel: FLUX,
    PixArtTransformer2DModel: PIXART,
    SD3Transformer2DModel: SD3,
}

UNKNOWN_MODEL = ModelSpec(
    name="a model without a ModelSpec",
    blocks={},
    joint="none",
    latent_dim=1,  # nothing is cut
    grid=lambda transformer, inputs: Grid(1, 1, 1),
    latent_per_token=lambda config: 1,
    conditioning=lambda call: Conditioning(),
    batch=("img_ids", "txt_ids"),
)
"""The lowest rung: a call, of which nothing is known but that its tensors have rows."""


_CLASS_SUFFIX = re.compile(r"(?<=\w)(Transformer([123]D)?(Model)?|[23]DModel|Model)$")


@dataclass(frozen=True, slots=True)
class Family:
    """A row of `ditile models`."""

    name: str
    transformer: str
    pipelines: tuple[str, ...]
    rung: str
    note: str


def register(transformer: type[nn.Module], spec: ModelSpec) -> None:
    """Adds (or replaces) the table of a transformer class.

    Raises:
        ModelError: if `transformer` is no module class, or the spec lists no blocks.
    """
    if not (isinstance(transformer, type) and issubclass(transformer, nn.Module)):
        raise ModelError(f"register needs a class of torch.nn.Module, and got {transformer!r}")
    if not spec.blocks:
        raise ModelError(f"the spec of {transformer.__name__} lists no blocks; name its ModuleLists")
    _SPECS[transformer] = spec


def find_model_spec(transformer: object) -> ModelSpec | None:
    """The table of a transformer, by its class or the nearest of its bases; None if there is none."""
    return next((_SPECS[cls] for cls in type(transformer).__mro__ if cls in _SPECS), None)


def require_model_spec(transformer: nn.Module) -> ModelSpec:
    """The table of a transformer, by its class or the nearest of its bases.

    Raises:
        ModelError: if there is none.
    """
    spec = find_model_spec(transformer)
    if spec is not None:
        return spec
    name = type(transformer).__name__
    inside = [type(module).__name__ for module in transformer.modules() if type(module) in _SPECS]
    if inside:
        raise ModelError(
            f"{name} wraps a {inside[0]}, which alone can be cut into stages; set pipe.transformer to what is inside "
            "(peft: get_base_model(), which keeps its LoRAs)"
        )
    known = ", ".join(sorted(cls.__name__ for cls in _SPECS))
    raise ModelError(
        f"{name} has no ModelSpec, so it cannot be cut; data and cfg work without one, and ulysses and ring with "
        f"parallelize(..., cp_plan={{...}}); known are {known}; ditile.register(cls, ModelSpec(...)) adds one"
    )


def list_model_specs() -> dict[type[nn.Module], ModelSpec]:
    """The table of each transformer class."""
    return dict(_SPECS)


def list_families() -> list[Family]:
    """Every family with the rung of the ladder that it is on, and why."""
    known = [
        Family(spec.name, cls.__name__, spec.pipelines, "PipeFusion", "has a ModelSpec") for cls, spec in _SPECS.items()
    ]
    classes = {name: getattr(diffusers, name) for name in sorted(dir(diffusers)) if "Transformer" in name}
    plans = [name for name, cls in classes.items() if getattr(cls, "_cp_plan", None) and cls not in _SPECS]
    lists = [
        name
        for name in sorted(TRANSFORMER_TABLE)
        if not TRANSFORMER_TABLE[name].refusal and find_diffusers_class(name) not in (None, *_SPECS)
    ]
    tables = [
        Family(_CLASS_SUFFIX.sub("", name), name, (), *_describe_rung(name, planned=name in plans))
        for name in [*plans, *(name for name in lists if name not in plans)]
    ]
    others = ("StableDiffusionPipeline", "StableDiffusionXLPipeline", "...")
    return [*known, *tables, Family("any other", "any, U-Nets too", others, "data, cfg", "nothing need be known")]


def _describe_rung(name: str, *, planned: bool) -> tuple[str, str]:
    """The rung of a transformer without a `ModelSpec`, and why it is on it."""
    row = TRANSFORMER_TABLE.get(name)
    caches = row is not None and not row.refusal
    rungs = (("ulysses, ring",) if planned else ()) + (("caches",) if caches else ())
    why = (("diffusers has a _cp_plan of it",) if planned else ()) + (("its blocks are listed",) if caches else ())
    note = (row.note,) if row is not None and row.note else ()
    return ", ".join(rungs), "; ".join((*why, *note))


def find_loop_model(pipe: diffusers.DiffusionPipeline) -> nn.Module:
    """The model that a pipeline calls in its loop: its transformer, or its U-Net; the module itself, if compiled.

    Raises:
        ModelError: if it has neither, or two of them in turns.
    """
    for name in ("transformer", "unet"):
        model = getattr(pipe, name, None)
        if isinstance(model, nn.Module):
            if getattr(pipe, f"{name}_2", None) is not None:
                raise ModelError(f"{type(pipe).__name__} calls two models in turns, {name} and {name}_2; one is known")
            return unwrap_compiled(model)
    raise ModelError(f"{type(pipe).__name__} has no transformer and no unet, so there is no call to divide")


def select_plan_spec(pipe: diffusers.DiffusionPipeline, plan: Plan) -> ModelSpec:
    """The table of the model of a pipeline, or `UNKNOWN` where the plan needs none.

    Raises:
        ModelError: if the pipeline has no model with a table, or runs what a patch pipeline cannot honour.
        PlanError: if guidance branches are to be shared out that the model itself compares.
    """
    model = find_loop_model(pipe)
    if plan.cfg > 1 and "pag_scale" in _list_call_parameters(pipe):
        raise PlanError(
            f"cfg={plan.cfg}: {type(pipe).__name__} tells branches of guidance apart inside attention; use data instead"
        )
    if plan.divides_the_batch_alone:
        return find_model_spec(model) or UNKNOWN_MODEL
    if "pag_scale" in _list_call_parameters(pipe) and (plan.world > plan.data * plan.tensor or plan.num_patches > 1):
        raise ModelError(
            f"{type(pipe).__name__} puts an attention of its own into the transformer while it runs, which would see "
            "this rank's tokens alone; use data or tensor"
        )
    if getattr(pipe, "controlnet", None) is not None:
        raise ModelError(
            f"{type(pipe).__name__} runs a ControlNet in its loop, which needs the whole fresh latents on every stage; "
            "use data or cfg alone"
        )
    if "mask_image" in _list_call_parameters(pipe):
        raise ModelError(
            f"{type(pipe).__name__} paints parts of the latents over between steps, behind the scheduler; "
            "use data or cfg alone"
        )
    return require_model_spec(model)


def find_cp_plans(pipe: diffusers.DiffusionPipeline, cp_plan: Mapping[str, Any] | None) -> dict[str, Mapping[str, Any]]:
    """What is split over tokens in each transformer of a pipeline; empty where it has a `ModelSpec`, or no table.

    Args:
        pipe: the pipeline.
        cp_plan: the table to use; None is that of the transformer's own class.
    """
    cp_plans = {}
    for name in ("transformer", "transformer_2"):
        transformer = getattr(pipe, name, None)
        if not isinstance(transformer, nn.Module):
            continue
        transformer = unwrap_compiled(transformer)
        known = find_model_spec(transformer) is not None
        table = getattr(type(transformer), "_cp_plan", None) if cp_plan is None and not known else cp_plan
        if table is not None:
            cp_plans[name] = table
    return cp_plans


def _list_call_parameters(pipe: diffusers.DiffusionPipeline) -> set[str]:
    return set(inspect.signature(type(pipe).__call__).parameters)
