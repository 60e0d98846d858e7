"""What a plan may ask of the models in a pipeline's loop."""

from __future__ import annotations

import json
import re
from typing import Any

import diffusers
from torch import nn

from ditile.model.anatomies import find_anatomy
from ditile.model.known import ASSETS
from ditile.model.pipeline_calls import find_denoisers, list_call_parameters
from ditile.plan.errors import ModelError, PlanError
from ditile.plan.plan import Plan

_CLASS_SUFFIX = re.compile(r"(?<=\w)(Transformer([123]D)?(Model)?|[23]DModel|Model)$")


def find_holes(transformer: type, pipeline: str) -> dict[str, str]:
    """Return what no call of a pipeline with a transformer supports: column of `assets/support.json` -> the reason.

    If the pipeline is not in the table, other pipelines with this transformer count instead. A transformer that is not
    in the table supports `data` and `cfg`.
    """
    table: dict[str, Any] = json.loads((ASSETS / "support.json").read_text("utf-8"))
    columns = set(table["columns"])
    rows = [row for row in table["families"] if row["transformer"] == transformer.__name__]
    rows = [row for row in rows if row["pipeline"] == pipeline] or rows
    if not rows:
        return dict.fromkeys(columns - {"data", "cfg"}, "is not in the table of families")
    holes = {}
    for name, reason in rows[0]["holes"].items():
        if all(name in row["holes"] for row in rows):
            holes[name] = reason
    return holes


def name_family(transformer: type) -> str:
    """Return the usual name of a class of transformers."""
    return _CLASS_SUFFIX.sub("", transformer.__name__)


def find_loop_model(pipe: diffusers.DiffusionPipeline) -> nn.Module:
    """Return the first model that a pipeline calls in its loop; raise the errors of `find_denoisers`."""
    return next(iter(find_denoisers(pipe).values()))


def check_plan_fits_loop(pipe: Any, plan: Plan) -> None:
    """Check that a pipeline's loop can be divided by a plan.

    Raises:
        ModelError: if the pipeline does something that a patch pipeline cannot support.
        PlanError: if the plan splits guidance branches that the model itself compares.
    """
    model = find_loop_model(pipe)
    name = type(pipe).__name__
    is_guided_in_attention = "pag_scale" in list_call_parameters(pipe)
    if plan.cfg > 1 and is_guided_in_attention:
        raise PlanError(f"cfg={plan.cfg}: {name} tells branches of guidance apart inside attention; use data instead")
    # A plan that divides only the batch calls the whole model, whatever that does with its tokens.
    if plan.divides_the_batch_alone:
        return
    # Perturbed attention replaces processors during the run, also those that ditile has put there.
    divides_images = plan.world > plan.data * plan.tensor or plan.num_patches > 1
    if is_guided_in_attention and divides_images:
        raise ModelError(
            f"{name} puts an attention of its own into the transformer while it runs, which would see this rank's "
            "tokens alone; use data or tensor"
        )
    # Only stages and patches leave a rank without the whole fresh latents.
    if plan.pipefusion * plan.num_patches == 1:
        return
    denoisers = find_denoisers(pipe).values()
    if any(type(part) is type(model) and part not in denoisers for part in pipe.components.values()):
        raise ModelError(
            f"{name} calls a second {type(model).__name__} in its loop, which needs the whole fresh latents on every "
            "stage; use a plan with pipefusion=1 and patches=1"
        )


def list_unknown_models(pipe: Any) -> list[nn.Module]:
    """Return the models of a pipeline whose anatomies are neither in the table nor derived yet."""
    unknown = []
    for transformer in find_denoisers(pipe).values():
        if find_anatomy(transformer) is None:
            unknown.append(transformer)
    return unknown
