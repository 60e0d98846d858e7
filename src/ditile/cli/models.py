"""The matrix of families and methods, read off the families' tables: what `ditile models` and docs/matrix.md show.

Each cell follows from a field of a `ModelSpec`, so a family that is registered gets its row without a line here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import diffusers
from rich.table import Table
from torch import nn

from ditile.models.registry import families, specs
from ditile.plan.spec import ModelSpec

YES, NO = "yes", "-"
GUIDED = {"guidance_scale": 5.0, "true_cfg_scale": 5.0, "negative_prompt": ""}
"""A call whose guidance is on, under the names that any family may have for it."""


@dataclass(frozen=True, slots=True)
class Method:
    """A column: a method, the flag that asks for it, and what a family has of it."""

    name: str
    flag: str
    of: Callable[[type[nn.Module], ModelSpec], str]


def _guidance(_: type[nn.Module], spec: ModelSpec) -> str:
    conditioning = spec.conditioning(GUIDED)
    found = [word for word, count in (("batched", conditioning.rows), ("two calls", conditioning.calls)) if count > 1]
    return ", ".join(found) or NO


def _blocks(_: type[nn.Module], spec: ModelSpec) -> str:
    return YES if spec.blocks else NO


def _attention(_: type[nn.Module], spec: ModelSpec) -> str:
    return YES if any(io.attn for io in spec.blocks.values()) else NO


def _text(_: type[nn.Module], spec: ModelSpec) -> str:
    return "joint, fresh on every rank" if spec.joint != "none" else "cross attention"


def _tensor(transformer: type[nn.Module], spec: ModelSpec) -> str:
    if not (spec.tensor or getattr(transformer, "_tp_plan", None)):
        return NO
    return "row, sequence" if spec.tensor_tokens else "row"


def _vae(_: type[nn.Module], spec: ModelSpec) -> str:
    decoders = {_decoder(name) for name in spec.pipelines}
    return YES if decoders == {"AutoencoderKL"} else NO


def _decoder(pipeline: str) -> str:
    """The class of a pipeline's VAE."""
    vae = inspect.signature(getattr(diffusers, pipeline).__init__).parameters["vae"].annotation
    return vae if isinstance(vae, str) else vae.__name__


METHODS = (
    Method("data", "--data", _blocks),
    Method("cfg", "--cfg", _guidance),
    Method("PipeFusion", "--pipefusion", _blocks),
    Method("Ulysses, uaa", "--ulysses", _attention),
    Method("ring", "--ring", _attention),
    Method("DistriFusion", "--distrifusion", _attention),
    Method("tensor", "--tensor", _tensor),
    Method("parallel VAE", "--vae rows", _vae),
    Method("cache", "--cache", _blocks),
    Method("text", "", _text),
)


def rows() -> Mapping[str, list[str]]:
    """Family -> a cell for every method."""
    return {spec.name: [method.of(cls, spec) for method in METHODS] for cls, spec in specs().items()}


def as_tables() -> list[Table]:
    """What `ditile models` prints: the families with their pipelines, then the matrix."""
    known = Table()
    for title in ("family", "transformer", "pipelines", "rung", "why"):
        known.add_column(title, overflow="fold")
    for family in families():
        known.add_row(family.name, family.transformer, "\n".join(family.pipelines), family.rung, family.note)
    matrix = Table("family", *(method.name for method in METHODS))
    for name, cells in rows().items():
        matrix.add_row(name, *cells)
    return [known, matrix]


def as_markdown() -> str:
    """docs/matrix.md."""
    table = [["family", *(method.name for method in METHODS)], ["---"] * (len(METHODS) + 1)]
    table += [["", *(f"`{method.flag}`" if method.flag else "" for method in METHODS)]]
    table += [[name, *cells] for name, cells in rows().items()]
    known: list[list[str]] = [["family", "transformer", "pipelines", "rung", "why"], ["---"] * 5]
    known += [[f.name, f.transformer, ", ".join(f.pipelines), f.rung, f.note] for f in families()]
    return "\n".join([_HEAD, *_lines(known), _MIDDLE, *_lines(table), _END])


def _lines(table: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in table]


_HEAD = """# Families and methods

Made by `ditile models --markdown` from the families' tables (`ditile/models/`); a test fails when this page is behind.
"""
_MIDDLE = """
What a family has:
"""
_END = """
Any product of the degrees of a row works: data x cfg x (PipeFusion x ring | DistriFusion) x Ulysses x tensor. What
excludes each other is little: DistriFusion takes the place of ring and PipeFusion, whose staleness it spends. What a
plan asks of a model and a size is said before anything runs, with the degrees that would do; `ditile verify` proves a
plan on your machine. A cache goes with every plan that a family has, on the rungs PipeFusion and caches, and on
a transformer of your own whose blocks are read off its source or named by a `BlockAdapter` ([caching.md](caching.md)).

Refused by every plan but those of data and cfg alone, because they need the whole fresh prediction, or attention of
their own: `guidance_rescale`, schedulers with `thresholding=True` or a `noise_sampler_seed`, ControlNets in the loop,
in-painting, IP-adapters and SD3's skip-layer guidance. Perturbed-attention guidance works with data and tensor only."""
