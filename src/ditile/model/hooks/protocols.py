"""The protocols by which strategies of different axes meet. `runner.compose` puts the strategies together.

A class with method bodies is also the null case, which a strategy overrides.

In attention: a kernel, an exchange of tokens for heads, and the source of keys. Between blocks: which of its tokens a
rank has, and how ranks agree on the blocks that are left out. Around the model: which rows of the batch a rank
computes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from ditile.distributed.wire import SiteBases
from ditile.model.hooks.generation import LayerTokens
from ditile.model.hooks.key_padding import AttentionOptions, KeyPaddingMask
from ditile.plan.errors import StateError

DeferredTensor = Callable[[], Tensor]
"""Computes q, k or v `[B, S, N, H]`: projection, norm and rope."""


FindBases = Callable[[Hashable, Hashable], SiteBases | None]
"""(name of a message in a layer, its sizes on all ranks) -> what its site received last; None if it travels in full."""


class HeadExchange:
    """An exchange of a split over tokens for a split over heads, and back. Here every rank has all heads of its tokens.

    Attributes:
        overlaps: whether q, k and v travel one by one, each while the next is computed.
        takes_dummies: whether the queries of tokens may include queries of dummies.
    """

    overlaps = False
    takes_dummies = True

    def exchange_tokens_for_heads(
        self, q: Tensor, k: Tensor, v: Tensor, tokens: LayerTokens, keys: LayerTokens
    ) -> tuple[Tensor, ...]:
        """Exchange q, k and v `[B, own tokens, N, H]` for `[B, tokens of the ulysses ranks, own heads, H]`.

        Args:
            q, k, v: as the layer computes them.
        """
        return q, k, v

    def exchange_overlapped(self, makers: Sequence[DeferredTensor], tokens: LayerTokens) -> tuple[Tensor, ...]:
        """Exchange q, k and v that are yet to be made, in this order; here all are made before any is sent."""
        q, k, v = (make() for make in makers)
        return self.exchange_tokens_for_heads(q, k, v, tokens, tokens)

    def exchange_heads_for_tokens(self, out: Tensor, tokens: LayerTokens, heads: int) -> Tensor:
        """Exchange `[B, tokens of the ulysses ranks, own heads, H]` back for `[B, own tokens, heads, H]`."""
        return out

    def select_own_heads(self, x: Tensor, heads: int) -> Tensor:
        """Return this rank's heads of keys or values `[B, S, N, H]` that every rank has; the queries have `heads`."""
        return x


class KeySource(Protocol):
    """The source of the keys and values that queries attend to."""

    def attend_to_keys(self, q: Tensor, k: Tensor, v: Tensor, tokens: LayerTokens, extra: AttentionOptions) -> Tensor:
        """Return the attention output for fresh queries `[B, S, N, H]`."""


class KeyMaskSource(Protocol):
    """Gathers a layer's mask of keys from all ranks that split the tokens."""

    def gather_key_mask(self, mask: Tensor, batch: int, tokens: LayerTokens, heads: int | None) -> KeyPaddingMask:
        """Return the mask of all keys for `batch` rows, from a mask of this rank's keys or of all keys.

        Only this rank's heads are kept; all heads if `heads` is None.
        """


KeyGather = Callable[[Tensor, Tensor, LayerTokens], tuple[Tensor, Tensor]]
"""Gathers fresh keys and values along an axis: `[B, own tokens, N, H]` to the tokens of all its ranks, in order."""


class AttentionKernel(Protocol):
    """Attention over `[B, S, N, H]` tensors; the keys may be longer than the queries.

    `mask` is boolean or additive, and broadcasts to `[B, N, queries, keys]`.
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, scale: float | None = None
    ) -> Tensor: ...

    def attend_with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, scale: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend like `__call__`, and also return the log-sum-exp of the scores `[B, S, N]` in fp32 (in fp64 for
        fp64)."""


class TokenStreams:
    """The part of its tokens that a rank has between the Linears of a block: here all; in `SharedStreams` a part."""

    def set_stream_lengths(self, image: int, text: int) -> None:
        """Set the number of tokens with which a call is about to enter the blocks."""

    def locate_own_share(self, length: int) -> slice:
        """Return the place of this rank's share in a stream."""
        return slice(0, length)

    def gather_stream(self, x: Tensor, length: int) -> Tensor:
        """Gather the whole stream `[B, length, C]` from every rank's share."""
        return x


class BatchShare(Protocol):
    """This rank's share of the images and calls."""

    def begin_generation(self) -> None:
        """Begin a generation."""

    def select_branches(self, step: int, calls: int) -> Sequence[int]:
        """Return the calls of a step that this rank computes."""

    def check_prediction(self, prediction: Tensor, sample: Tensor) -> None:
        """Check the prediction and the latents before the scheduler's step."""

    def check_streams(self, number: int) -> None:
        """Check the number of schedulers that an iteration stepped."""

    def view_own_images(self, batch: Tensor) -> Tensor:
        """Return a view of this rank's rows of `[images, ...]`."""

    def gather_latents(self, latents: Tensor) -> Tensor:
        """Gather all latents, each replica's from its own ranks; collective over the last stages of all replicas."""

    def end_generation(self) -> None:
        """End the generation, after the last step."""


class CallPosition(NamedTuple):
    """The pipeline's position when it calls a model whose blocks may be skipped.

    Attributes:
        branch: the number of model calls since the scheduler's last step.
        patches: the patches that are computed, in order; only 0 if the image is one patch.
        sizes: the number of image tokens in each patch; only known after the first block was reached.
        has_text: whether the text is real and not a dummy; only known after the first block was reached.
        images: the number of images in the batch, if known; a row is one branch of guidance of one image.
        must_compute: whether nothing may be skipped, because the next step reads the outputs of this one.
        row_spans: the place of each patch among the rows of the image, as (start, stop, all); known when `sizes` is.
    """

    step: int
    branch: int = 0
    patches: Sequence[int] = (0,)
    sizes: Callable[[], Sequence[int]] = lambda: ()
    has_text: Callable[[], bool] = lambda: True
    images: int | None = None
    must_compute: bool = False
    row_spans: Callable[[], Sequence[tuple[int, int, int]]] = lambda: ((0, 1, 1),)


class StepForecasts(Protocol):
    """Forecasts that replace the model's predictions in some steps of a runner's loop."""

    def begin_generation(self, steps: int) -> Collection[int] | None:
        """Begin a generation; return the steps that compute, or None if each is decided in its first call.

        Raises:
            ModelError: if nothing can be forecast in such a generation.
        """

    def end_generation(self) -> None:
        """End the generation, after the loop."""


class LabelledModel(Protocol):
    """A model whose pipeline names its calls.

    Attributes:
        label: the name of the current call, such as "cond" or "uncond" in diffusers' `cache_context`; None without one.
    """

    label: str | None


class PipelineClock(Protocol):
    """Tells the hooks around a model's blocks the position of the pipeline."""

    def begin_model_call(self, model: LabelledModel) -> CallPosition | None:
        """Begin a call of a model; return None if all of it must be computed and nothing remembered."""

    def end_model_call(self, model: LabelledModel) -> None:
        """End a call of a model."""


class SkipAgreement:
    """The agreement of an image's ranks on the blocks to skip. Here one rank decides by itself.

    Attributes:
        owned: the blocks that this rank runs; None is all.
    """

    owned: Collection[nn.Module] | None = None

    def sum_over_ranks(self, sums: Tensor) -> Tensor:
        """Sum over the ranks that split the tokens and branches of this rank's blocks; the result is on the CPU."""
        return sums.cpu()

    def take_first_numbers(self, numbers: Sequence[float]) -> list[float]:
        """Return the first rank's numbers; those measured by the other ranks differ only by rounding."""
        return list(numbers)

    def send_skip_decision(self, skips: Sequence[bool]) -> None:
        """Send the decision to the next stage."""

    def receive_skip_decision(self, count: int) -> Sequence[bool]:
        """Return the previous stage's decision for `count` units. Raises `StateError` if there is none."""
        raise StateError("a cache waits for a decision that no rank makes")

    def send_probe_input(self, tokens: Tensor, to: nn.Module) -> None:
        """Send the input of a probe to the stage that has its last block, `to`."""

    def receive_probe_input(self, like: Tensor, of: nn.Module) -> Tensor:
        """Receive the input of a probe from the stage that has its first block, `of`. Raises `StateError` if this rank
        has the input itself."""
        raise StateError("a cache waits for tokens that no rank sends")

    def mark_blocks_skipped(self, blocks: Sequence[nn.Module], moment: CallPosition) -> None:
        """Note that these blocks ran for no row. Their stored keys count as written in this step."""
