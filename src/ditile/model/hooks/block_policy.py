"""`BlockPolicy`, the interface of a plan's strategy to the hooks on a model's blocks, and the types that it uses."""

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
"""Attention processors that do the same as their layer's standard one and also attend to images of IP-adapters."""


class LayerAttention(Protocol):
    """The attention of a layer, such as `AttentionCore`.

    Attributes:
        overlaps: whether q, k and v should be computed one after the other, so that each travels while the next is
            computed.
    """

    overlaps: bool

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, scale: float | None = None
    ) -> Tensor: ...


class TokenState(NamedTuple):
    """The tokens that one block passes to the next: image `[B, n, C]` and text `[B, t, C]`; None if there is no text.

    In some models the second stream is not text but, for example, the sound of a video.
    """

    image: Tensor
    text: Tensor | None


@dataclass(frozen=True, slots=True)
class BlockHook:
    """A block in the chain.

    Attributes:
        name: its path in the transformer.
        anatomy: the meaning of the dimensions of tensors in the block's list.
    """

    index: int
    list_name: str
    name: str
    block: nn.Module
    anatomy: ListAnatomy

    def list_attentions(self) -> list[tuple[str, Any]]:
        """Return the block's modules that attend to tokens of other ranks, with their paths within the block."""
        # A placeholder, which stands for a block of another stage, has no modules.
        modules = dict(self.block.named_modules())
        attentions = []
        for path in self.anatomy.attention:
            if path in modules and self.is_shared(path):
                attentions.append((path, modules[path]))
        return attentions

    def list_calls(self, path: str) -> list[tuple[str, str]]:
        """Return the attention calls of a module in order: a name, unique in the model, and the kind.

        Calls for IP-adapters come last, since the module skips them if the pipeline has no images for the adapters.
        """
        processor = getattr(self.block.get_submodule(path), "processor", None)
        layer = f"{self.name}.{path}".rstrip(".")
        kinds = (*self.anatomy.attention[path], *list_adapter_calls(processor))
        if len(kinds) == 1:
            return [(layer, kinds[0])]
        return [(f"{layer}.{turn}", kind) for turn, kind in enumerate(kinds)]

    def list_adapter_kinds(self) -> tuple[str, ...]:
        """Return the kinds of the block's attention calls for IP-adapters."""
        kinds: list[str] = []
        for _, module in self.list_attentions():
            kinds += list_adapter_calls(getattr(module, "processor", None))
        return tuple(kinds)

    def is_shared(self, path: str) -> bool:
        """Return whether a module attends to tokens that ranks split."""
        return any(kind != LOCAL for kind in self.anatomy.attention[path])

    def sees_other_keys(self, path: str) -> bool:
        """Return whether a module's queries and keys come from different streams."""
        kinds = [drop_further_keys(kind.removesuffix(REAL_PAIRS)) for kind in self.anatomy.attention[path]]
        return any(len(kind) > 1 for kind in kinds)

    def sees_text(self, path: str) -> bool:
        """Return whether a module attends to image and text in one sequence."""
        return any(sees_text(kind) for kind in self.anatomy.attention[path])


def list_adapter_calls(processor: Any) -> tuple[str, ...]:
    """Return the kinds of a processor's attention calls for its IP-adapters, in order.

    FLUX.1's processor makes one call per adapter; the keys are the tokens of the adapter's image, which every rank has.
    Stable Diffusion 3's makes one call for all adapters; the keys are the tokens of the generated image, followed by
    the tokens of the adapters' images.
    """
    if isinstance(processor, SD3IPAdapterJointAttnProcessor2_0):
        return ("N" + FURTHER,)
    if isinstance(processor, FluxIPAdapterAttnProcessor):
        keys_of_adapters: Any = processor.to_k_ip
        return (LOCAL,) * len(keys_of_adapters)
    return ()


class BlockPolicy(Protocol):
    """The behaviour of a plan's strategy while a transformer runs. The hooks on the model call these methods.

    Attributes:
        plan: how the model's work is divided.
    """

    plan: Plan

    @property
    def row_parts(self) -> int:
        """Return the number of parts into which the rows of image tokens are divided, by patches or ranks."""

    def begin_transformer_call(self, batch_size: int) -> Sequence[range]:
        """Begin a call of the transformer; return its micro-batches, ranges of the batch's rows, in order."""

    def restart_transformer_call(self) -> None:
        """Reset before the transformer's forward, also before a second try if the first raised before any message."""

    def begin_micro_batch(self, micro_batch: int) -> None:
        """Begin a micro-batch, if there are several."""

    def begin_survey(self) -> None:
        """Begin the survey of a transformer call with a form not seen yet."""

    def begin_branch(self, form: CallForm) -> None:
        """Begin a transformer call of this form; divide its tokens into patches if that is not done yet."""

    def enter_blocks(self, state: TokenState) -> TokenState:
        """Return this rank's tokens at the first block, given all tokens."""

    def cut_tokens(self, state: TokenState) -> TokenState:
        """Cut this rank's share out of all tokens, after the forward has built new tokens between two blocks."""

    def select_active_blocks(self, blocks: range) -> Collection[int]:
        """Return the blocks at which `run_block` has something to do in the current call.

        They include the first block and the last block that this rank computes.
        """

    def run_block(self, index: int, block: Callable[[TokenState], TokenState], state: TokenState) -> TokenState:
        """Return the tokens after block `index`, from `block(state)` or without running it."""

    def leave_blocks(self, state: TokenState) -> TokenState | None:
        """Return all tokens after the last block, fresh if this call computed them; None if nothing reads them.

        Their text is None if the model makes no prediction from it.
        """

    def end_transformer_call(self) -> None:
        """End a call of the transformer, when it returns."""


class CallForm(NamedTuple):
    """The layout of the tokens in a call of the transformer, and the forward's operations between the blocks.

    Attributes:
        grid: the rows of image tokens; a patch consists of whole rows.
        text: the number of text tokens that pass through the blocks.
        start: where the image begins, if the model has a single sequence, all of which counts as image.
        glued: the indices of the blocks before which the forward builds new tokens.
        fed: name of each block after the first -> whether something computed from the latents reaches it around the
            first block, as a boolean tensor of one element.
        returns_text: whether the model makes a prediction from the text tokens too, as it does if they are a sound.
        rows, visits: the number of the batch's rows in the first block, and of calls of blocks in the forward.
        latents: the part of a single sequence that is computed from the latents; None if unknown, which means all of
            the image.
        padding: the tokens of a single sequence that are not computed from the latents, such as padding; filled in only
            where the hooks look for reference images.
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
        """Return the blocks for which `fed` is true. Waits for the device once."""
        # `torch.stack` refuses an empty list.
        if not self.fed:
            return []
        flags = torch.stack([*self.fed.values()]).tolist()
        return [name for name, flag in zip(self.fed, flags, strict=True) if flag]


def advise_whole_tokens(transformer: Any, anatomy: Anatomy, plan: Plan) -> str:
    """Return advice for a plan that failed: to use other axes, without a division of tokens.

    `tensor` is among them if the plan does not use it, and the anatomy or the class says how to shard the model.
    """
    has_cuts = bool(anatomy.tensor or getattr(transformer, "_tp_plan", None))
    if has_cuts and plan.tensor == 1:
        return "use a plan of data, cfg or tensor"
    return "use a plan of data or cfg"
