"""What strategies decide at the blocks of a model, and what they are given: tokens, blocks, and the form of a call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from diffusers.models.attention_processor import SD3IPAdapterJointAttnProcessor2_0
from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor
from torch import Tensor, nn

from ditile.plan.anatomy import FURTHER, LOCAL, REAL_PAIRS, Anatomy, ListAnatomy, drop_further_keys, sees_text
from ditile.plan.layout import Grid
from ditile.plan.plan import Plan

ADAPTER_PROCESSORS = (FluxIPAdapterAttnProcessor, SD3IPAdapterJointAttnProcessor2_0)
"""Processors that do what their class's own does, and also attend to the images of IP-adapters."""


class LayerAttention(Protocol):
    """The attention of a layer, such as `AttentionCore`.

    Attributes:
        overlaps: whether it is faster if q, k and v are computed one after the other.
    """

    overlaps: bool

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, scale: float | None = None
    ) -> Tensor: ...


class TokenState(NamedTuple):
    """The tokens on their way through the blocks: image `[B, n, C]`; text `[B, t, C]`, where there is some.

    The text may as well be the sound of a video: a second stream, of which the model makes a result.
    """

    image: Tensor
    text: Tensor | None


@dataclass(frozen=True, slots=True)
class BlockHook:
    """A block in the chain.

    Attributes:
        index: its place in the chain.
        list_name: the list that it is in.
        name: its path in the transformer.
        block: the module.
        anatomy: of the list.
    """

    index: int
    list_name: str
    name: str
    block: nn.Module
    anatomy: ListAnatomy

    def list_attentions(self) -> list[tuple[str, Any]]:
        """The modules of the block that attend to tokens of other ranks, by path within it."""
        # A placeholder of another stage has no modules.
        modules = dict(self.block.named_modules())
        paths = [path for path in self.anatomy.attention if path in modules and self.is_shared(path)]
        return [(path, modules[path]) for path in paths]

    def list_calls(self, path: str) -> list[tuple[str, str]]:
        """The attention calls of a module, in order: the name of each in the model, and its kind.

        The calls for IP-adapters, which are made only where a call has images for them, come last.
        """
        processor = getattr(self.block.get_submodule(path), "processor", None)
        layer = f"{self.name}.{path}".rstrip(".")
        kinds = (*self.anatomy.attention[path], *list_adapter_calls(processor))
        if len(kinds) == 1:
            return [(layer, kinds[0])]
        return [(f"{layer}.{turn}", kind) for turn, kind in enumerate(kinds)]

    def list_adapter_kinds(self) -> tuple[str, ...]:
        """The kinds of the attention calls for IP-adapters in the block."""
        kinds: list[str] = []
        for _, module in self.list_attentions():
            kinds += list_adapter_calls(getattr(module, "processor", None))
        return tuple(kinds)

    def is_shared(self, path: str) -> bool:
        """Whether a module attends to tokens that ranks split."""
        return any(kind != LOCAL for kind in self.anatomy.attention[path])

    def sees_other_keys(self, path: str) -> bool:
        """Whether the queries of a module and the keys of a module are tokens of two streams."""
        kinds = [drop_further_keys(kind.removesuffix(REAL_PAIRS)) for kind in self.anatomy.attention[path]]
        return any(len(kind) > 1 for kind in kinds)

    def sees_text(self, path: str) -> bool:
        """Whether a module attends to image and text in one sequence."""
        return any(sees_text(kind) for kind in self.anatomy.attention[path])


def list_adapter_calls(processor: Any) -> tuple[str, ...]:
    """The kinds of the attention calls that an attention processor makes for its IP-adapters, in order.

    Each adapter attends once more: FLUX.1's to the tokens of its own image, which every rank has; Stable Diffusion 3's
    to the tokens of the generated image, and to those of its own image after them.
    """
    if isinstance(processor, SD3IPAdapterJointAttnProcessor2_0):
        # All adapters are one call.
        return ("N" + FURTHER,)
    if isinstance(processor, FluxIPAdapterAttnProcessor):
        # Each adapter is a call.
        keys_of_adapters: Any = processor.to_k_ip
        return (LOCAL,) * len(keys_of_adapters)
    return ()


class BlockPolicy(Protocol):
    """What happens at the blocks of a model.

    Attributes:
        plan: how it is divided.
    """

    plan: Plan

    @property
    def row_parts(self) -> int:
        """In how many parts rows of tokens are cut, by patches or by ranks."""

    def begin_transformer_call(self, batch_size: int) -> Sequence[range]:
        """The transformer is called; returns the runs of its batch that are computed one after the other."""

    def begin_micro_batch(self, micro_batch: int) -> None:
        """One of several micro-batches is next."""

    def begin_survey(self) -> None:
        """A call of a form that was not seen before is surveyed, before it is made."""

    def begin_branch(self, form: CallForm) -> None:
        """A call of this form is about to be made: cuts its tokens into patches, if that was not done yet."""

    def enter_blocks(self, state: TokenState) -> TokenState:
        """The forward has reached the first block with all tokens; returns those that are computed here."""

    def cut_tokens(self, state: TokenState) -> TokenState:
        """Of all tokens those that are computed here, where the forward has made new ones between two blocks."""

    def select_active_blocks(self, blocks: range) -> Collection[int]:
        """Those blocks of a model that `run_block` does something at, in the call that has begun.

        The first one and the last one that is computed here are among them.
        """

    def run_block(self, index: int, block: Callable[[TokenState], TokenState], state: TokenState) -> TokenState:
        """The forward has reached a block."""

    def leave_blocks(self, state: TokenState) -> TokenState | None:
        """All tokens after the last block, fresh where they were computed now; None if unread.

        The text is None where the model makes nothing of it.
        """

    def end_transformer_call(self) -> None:
        """The transformer returns."""


class SurveyedBlocks(Protocol):
    """What blocks are given in a survey.

    Attributes:
        has_begun: whether the first block was called.
    """

    has_begun: bool

    def is_fed(self) -> bool:
        """Whether a block was given something that the forward makes of the latents, in addition to the tokens."""


class CallForm(NamedTuple):
    """What a call of the transformer looks like outside of its blocks.

    Attributes:
        grid: the rows of image tokens, which patches do not cut.
        text: text tokens that go through blocks.
        start: where the image begins in a sequence that counts as the image as a whole.
        glued: the blocks before which the forward makes new tokens.
        fed: name of each block after the first -> whether anything that it is given is made of the latents, as a
            tensor of one boolean.
        returns_text: whether the model makes a result of the text tokens too, as where they are of a sound.
        rows: of the batch.
        visits: how often the forward calls a block.
        latents: where in such a sequence what is made of the latents is, if that is known; None is all of the image.
        padding: tokens of such a sequence that are not made of the latents, such as padding; known where reference
            images are looked for.
    """

    grid: Grid
    text: int
    start: int
    glued: frozenset[int]
    fed: Mapping[str, Tensor] = MappingProxyType({})
    returns_text: bool = False
    rows: int = 1
    visits: int = 0
    latents: range | None = None
    padding: frozenset[int] = frozenset()

    def list_fed_blocks(self) -> list[str]:
        """The blocks that are given what is made of the latents. Waits for the device once."""
        # A stack of no tensors is an error.
        if not self.fed:
            return []
        flags = torch.stack([*self.fed.values()]).tolist()
        return [name for name, flag in zip(self.fed, flags, strict=True) if flag]


def advise_whole_tokens(transformer: Any, anatomy: Anatomy, plan: Plan) -> str:
    """The plans of a model that divide no tokens, other than a plan that was tried.

    Without cuts that were derived or are its class's there is no tensor.
    """
    has_cuts = bool(anatomy.tensor or getattr(transformer, "_tp_plan", None))
    if has_cuts and plan.tensor == 1:
        return "use a plan of data, cfg or tensor"
    return "use a plan of data or cfg"
