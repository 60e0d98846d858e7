"""ModelSpec: what ditile must know about a family of transformers, as a table. The family's own forward runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ditile.plan.anatomy import Anatomy
from ditile.plan.layout import Grid, Joint
from ditile.plan.option_classes import CallArguments

if TYPE_CHECKING:
    from torch import nn


Constant = Callable[[Hashable, Callable[[], Any]], Any]
"""(key, make) -> the first result of `make` in this generation, for the key."""


@dataclass(frozen=True, slots=True)
class Flow:
    """The way the blocks of a list pass tokens on, for a cache that leaves some out.

    Attributes:
        returns: the streams in the order that a block returns them: "image", "text".
        image: the parameter of the block's forward that takes the image tokens.
        text: the one that takes the text tokens; None if there is none. It is a stream if the block returns it too.
    """

    returns: tuple[str, ...] = ("image",)
    image: str = "hidden_states"
    text: str | None = "encoder_hidden_states"


class BlockList(NamedTuple):
    """A `ModuleList` whose blocks are called one after the other in a transformer's forward.

    Attributes:
        flow: how they pass tokens on.
    """

    name: str
    blocks: Sequence[nn.Module]
    flow: Flow


class Conditioning(NamedTuple):
    """The text, batch and calls that a pipeline's call needs for one image.

    Attributes:
        text: tokens of text in the sequence of joint attention.
        rows: rows of the batch for each image.
        calls: transformer calls per step.
    """

    text: int = 0
    rows: int = 1
    calls: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A family of transformers.

    Attributes:
        name: what people call it.
        pipelines: diffusers pipelines that were tried with it.
        grid: (transformer, arguments of forward) -> the rows of image tokens, which patches do not cut; None where
            they may be cut anywhere.
        joint: where the text lies in the sequence of joint attention, for planning.
        is_packed: whether latents are tokens already, `[B, tokens, C]`.
        latent_per_token: transformer's config -> side of a token in latent pixels of the VAE.
        conditioning: call arguments -> text, batch and calls, for tables and dry runs.
        example: (config, grid, text tokens) -> arguments of the forward with one row, for the planner, which counts
            the work of the forward; only their shapes matter.
        image_tokens: embeds the latents; its value is read on the first stage only.
        out: makes the prediction of each token.
        constant: modules whose output does not change during a generation; `*` stands for one name.
        per_step: modules whose output does not change during a step.
        processor: makes an attention processor that calls an `AttentionCore`, for families that do not go through
            diffusers' `dispatch_attention_fn`.
        overlapped: the same for async_ulysses: it computes q, k and v one after the other. For families that need no
            processor otherwise.
        cross: attributes of blocks that hold attention to the text -> what makes a processor with the result of the
            `stock` one in less time; other processors stay.
        stock: processors whose attention is known; others are refused. Empty allows all that have a dispatch backend.
        tensor: module pattern -> how tensor parallelism cuts it, in the format of diffusers' `_tp_plan`.
        tensor_tokens: module pattern -> argument, or "return" -> stream ("image", "text", "text+image"): where
            split_scheme=sequence gathers and scatters tokens.
        batch: arguments of the transformer that have no rows, whatever their length.
        text_modules: patterns of sub-modules of blocks that see only the text.
        anatomy: what its dimensions count, where that cannot be derived.
        refuse: (pipeline, call arguments) -> why they cannot be honored exactly, or None.
    """

    name: str
    latent_per_token: Callable[[Mapping[str, Any]], int] = lambda config: 1
    conditioning: Callable[[Mapping[str, Any]], Conditioning] = lambda call: Conditioning()
    grid: Callable[[nn.Module, Mapping[str, Any]], Grid] | None = None
    is_packed: bool = False
    joint: Joint = "none"
    example: Callable[[Mapping[str, Any], Grid, int], CallArguments] | None = None
    pipelines: tuple[str, ...] = ()
    image_tokens: str = "pos_embed"
    out: str = "proj_out"
    constant: tuple[str, ...] = ()
    per_step: tuple[str, ...] = ()
    processor: Callable[[Any], Any] | None = None
    overlapped: Callable[[Any], Any] | None = None
    cross: Mapping[str, Callable[[Constant], Any]] = field(default_factory=dict)
    stock: tuple[type, ...] = ()
    tensor: Mapping[str, Any] = field(default_factory=dict)
    tensor_tokens: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    text_modules: tuple[str, ...] = ()
    batch: tuple[str, ...] = ()
    anatomy: Anatomy | None = None
    refuse: Callable[[Any, Mapping[str, Any]], str | None] = lambda pipe, call: None
