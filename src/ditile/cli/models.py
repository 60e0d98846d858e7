"""The matrix of families and methods, which `ditile models` and docs/matrix.md show.

Each cell follows from a field of a `ModelSpec`, so a registered family gets its row without a change here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import diffusers
from rich.table import Table
from torch import nn

from ditile.models.registry import list_families, list_model_specs
from ditile.plan.spec import ModelSpec

YES, NO = "yes", "-"
GUIDED_CALL = {"guidance_scale": 5.0, "true_cfg_scale": 5.0, "negative_prompt": ""}
"""Arguments of a call with guidance, under the names of all families."""


@dataclass(frozen=True, slots=True)
class MethodColumn:
    """A column: a method, its flag, and a function that says which support of it a family has."""

    name: str
    flag: str
    describe_support: Callable[[type[nn.Module], ModelSpec], str]


def _describe_guidance(_: type[nn.Module], spec: ModelSpec) -> str:
    conditioning = spec.conditioning(GUIDED_CALL)
    guidance_kinds = [
        word for word, count in (("batched", conditioning.rows), ("two calls", conditioning.calls)) if count > 1
    ]
    return ", ".join(guidance_kinds) or NO


def _describe_blocks(_: type[nn.Module], spec: ModelSpec) -> str:
    return YES if spec.blocks else NO


def _describe_attention(_: type[nn.Module], spec: ModelSpec) -> str:
    return YES if any(io.attn for io in spec.blocks.values()) else NO


def _describe_text_attention(_: type[nn.Module], spec: ModelSpec) -> str:
    return "joint, fresh on every rank" if spec.joint != "none" else "cross attention"


def _describe_tensor_parallel(transformer: type[nn.Module], spec: ModelSpec) -> str:
    if not (spec.tensor or getattr(transformer, "_tp_plan", None)):
        return NO
    return "row, sequence" if spec.tensor_tokens else "row"


def _describe_parallel_vae(_: type[nn.Module], spec: ModelSpec) -> str:
    decoders = {_find_vae_class(name) for name in spec.pipelines}
    return YES if decoders == {"AutoencoderKL"} else NO


def _find_vae_class(pipeline: str) -> str:
    """The class of a pipeline's VAE."""
    vae = inspect.signature(getattr(diffusers, pipeline).__init__).parameters["vae"].annotation
    return vae if isinstance(vae, str) else vae.__name__


METHOD_COLUMNS = (
    MethodColumn("data", "--data", _describe_blocks),
    MethodColumn("cfg", "--cfg", _describe_guidance),
    MethodColumn("PipeFusion", "--pipefusion", _describe_blocks),
    MethodColumn("Ulysses, uaa", "--ulysses", _describe_attention),
    MethodColumn("ring", "--ring", _describe_attention),
    MethodColumn("DistriFusion", "--distrifusion", _describe_attention),
    MethodColumn("tensor", "--tensor", _describe_tensor_parallel),
    MethodColumn("parallel VAE", "--vae rows", _describe_parallel_vae),
    MethodColumn("cache", "--cache", _describe_blocks),
    MethodColumn("text", "", _describe_text_attention),
)


def build_matrix_rows() -> Mapping[str, list[str]]:
    """Family -> a cell for every method."""
    return {
        spec.name: [method.describe_support(cls, spec) for method in METHOD_COLUMNS]
        for cls, spec in list_model_specs().items()
    }


def build_matrix_tables() -> list[Table]:
    """The tables of `ditile models`: the families with their pipelines, then the matrix."""
    known = Table()
    for title in ("family", "transformer", "pipelines", "support level", "why"):
        known.add_column(title, overflow="fold")
    for family in list_families():
        known.add_row(family.name, family.transformer, "\n".join(family.pipelines), family.rung, family.note)
    matrix = Table("family", *(method.name for method in METHOD_COLUMNS))
    for name, cells in build_matrix_rows().items():
        matrix.add_row(name, *cells)
    return [known, matrix]


def format_matrix_markdown() -> str:
    """The text of docs/matrix.md."""
    table = [["family", *(method.name for method in METHOD_COLUMNS)], ["---"] * (len(METHOD_COLUMNS) + 1)]
    table += [["", *(f"`{method.flag}`" if method.flag else "" for method in METHOD_COLUMNS)]]
    table += [[name, *cells] for name, cells in build_matrix_rows().items()]
    known: list[list[str]] = [["family", "transformer", "pipelines", "support level", "why"], ["---"] * 5]
    known += [[f.name, f.transformer, ", ".join(f.pipelines), f.rung, f.note] for f in list_families()]
    return "\n".join([_HEAD, *_format_markdown_rows(known), _MIDDLE, *_format_markdown_rows(table), _END])


def _format_markdown_rows(table: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in table]


_HEAD = """# Families and methods

Made by `ditile models --markdown` from the families' tables (`models/`); a test fails when this page is not up to date.
"""
_MIDDLE = """
What a family has:
"""
_END = """
Any product of the degrees of a row works: data x cfg x (PipeFusion x ring | DistriFusion) x Ulysses x tensor. Only
DistriFusion excludes others: it takes the place of ring and PipeFusion. If a plan does not fit a model or a size, an
error says so before anything runs, with the degrees that fit. `ditile verify` checks a plan on your machine. A cache
goes with every plan of a family whose support level is PipeFusion or names caches, and of a transformer of your own
whose blocks are read from its source or named by a `BlockAdapter` ([caching.md](caching.md)).

Refused by every plan except those of data and cfg alone, because they need the whole fresh prediction, or their own
attention: `guidance_rescale`, schedulers with `thresholding=True` or a `noise_sampler_seed`, ControlNets in the loop,
in-painting, IP-adapters and SD3's skip-layer guidance. Perturbed-attention guidance works with data and tensor only."""
