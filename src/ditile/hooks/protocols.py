"""What strategies of different axes have in common where they meet. `compose` puts them together.

At the Attend seam a kernel, an exchange of tokens for heads, and whose keys are attended to; between blocks, what
a rank has of its tokens there, and how it agrees with others on leaving some blocks out; at the Denoise seam, whose
rows of the batch it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from ditile.hooks.generation import Tokens
from ditile.hooks.key_padding import Extra, KeyMask

Make = Callable[[], Tensor]
"""Computes q, k or v `[B, S, N, H]`: projection, norm and rope."""


class Exchange(Protocol):
    """Trades a split over tokens for one over heads, and back.

    Attributes:
        overlaps: whether q, k and v travel one by one, each while the next is made.
    """

    overlaps: bool

    def to_heads(self, makes: Sequence[Make], tokens: Tokens) -> Sequence[Tensor]:
        """Makes q, k and v `[B, own tokens, N, H]` into `[B, tokens of the ulysses ranks, own heads, H]`."""
        ...

    def to_tokens(self, out: Tensor, tokens: Tokens, heads: int) -> Tensor:
        """The way back, of an output with `heads` heads in all."""
        ...


class Keys(Protocol):
    """Which keys and values the queries attend to."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, extra: Extra) -> Tensor:
        """The output of fresh queries `[B, S, N, H]`."""
        ...


class Masks(Protocol):
    """Makes a layer's mask that of the keys of all ranks that share out the tokens."""

    def gather(self, mask: Tensor, batch: int, tokens: Tokens, heads: int | None) -> KeyMask:
        """From what a layer was given for `batch` rows: of this rank's keys, or of all of them in sequence.

        Of the heads only this rank's are kept; all, if their number is None.
        """
        ...


class Gather(Protocol):
    """Collects the fresh keys and values of the ranks along ring."""

    def __call__(self, k: Tensor, v: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]: ...


class Kernel(Protocol):
    """Attention over `[B, S, N, H]` tensors; the keys may be longer than the queries.

    `mask` is boolean or additive, and broadcasts to `[B, N, queries, keys]`.
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, scale: float | None = None
    ) -> Tensor: ...

    def with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, scale: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """The same, and the log-sum-exp of the scores `[B, S, N]` in fp32 (in fp64 for fp64)."""
        ...


class Streams(Protocol):
    """What a rank has of its tokens between the Linears of a block: all, or (split_scheme=sequence) a share."""

    def begin(self, image: int, text: int) -> None:
        """A call is about to enter the blocks with these tokens."""
        ...

    def own(self, length: int) -> slice:
        """Where a rank's share of a stream is."""
        ...

    def gather(self, x: Tensor, length: int) -> Tensor:
        """The whole of a stream `[B, length, C]` from every rank's share."""
        ...


class WholeStreams:
    """All of them."""

    def begin(self, image: int, text: int) -> None:
        """Nothing."""

    def own(self, length: int) -> slice:
        """Everything."""
        return slice(0, length)

    def gather(self, x: Tensor, length: int) -> Tensor:
        """Nothing."""
        return x


class Batch(Protocol):
    """Which images and calls are this rank's, as the loop needs to know it."""

    @property
    def idle(self) -> bool:
        """Whether this rank has no images: it calls no model, and stays in step."""
        ...

    def begin(self) -> None:
        """A generation begins."""

    def branches(self, step: int, calls: int) -> Sequence[int]:
        """Which of the calls of a step this rank computes."""
        ...

    def check(self, prediction: Tensor, sample: Tensor) -> None:
        """The scheduler is about to be stepped with these."""

    def own(self, batch: Tensor) -> Tensor:
        """A view of the rows of `[images, ...]` that are this rank's."""
        ...

    def gathered(self, latents: Tensor) -> Tensor:
        """All latents, where each replica's own are right; collective over the last stages of all replicas."""
        ...

    def end(self) -> None:
        """The last step is over."""


class Moment(NamedTuple):
    """Where the pipeline is when it calls a model whose blocks may be left out.

    Attributes:
        step: of the loop.
        branch: calls of the model since the scheduler was last stepped.
        patches: at hand, in order; 0 alone where the image is one.
        sizes: their image tokens, once the first block was reached; asked for where there are several.
        has_text: whether the text at hand is real, once the first block was reached.
        images: in the batch, if that is known; a row is one of its images' branches of guidance.
        must: whether nothing may be left out, since what follows needs what is computed now.
    """

    step: int
    branch: int = 0
    patches: Sequence[int] = (0,)
    sizes: Callable[[], Sequence[int]] = lambda: ()
    has_text: Callable[[], bool] = lambda: True
    images: int | None = None
    must: bool = False


class Labelled(Protocol):
    """A model whose pipeline names its calls.

    Attributes:
        label: of the call that is made, as "cond" and "uncond" of diffusers' `cache_context`; None if it has no name.
    """

    label: str | None


class Clock(Protocol):
    """Says where the pipeline is, to what lies around its model's blocks."""

    def begin_call(self, model: Labelled) -> Moment | None:
        """A model is called; None if all of it must be computed, and nothing remembered."""
        ...

    def end_call(self, model: Labelled) -> None:
        """It returns."""
        ...


class Agreement(Protocol):
    """How the ranks of an image agree on what is left out.

    Attributes:
        owned: the blocks that this rank runs; None is all.
    """

    owned: Collection[nn.Module] | None

    def add(self, sums: Tensor) -> Tensor:
        """The sums over the ranks that share out the tokens and branches of these blocks, on the CPU."""
        ...

    def tell(self, skips: Sequence[bool]) -> None:
        """Says to the stages behind what was decided."""
        ...

    def hear(self, count: int) -> Sequence[bool]:
        """What a stage in front has decided, for so many units."""
        ...

    def give_start(self, tokens: Tensor, to: nn.Module) -> None:
        """The tokens in front of a probe, to the stage that has this last block of it."""
        ...

    def take_start(self, like: Tensor, of: nn.Module) -> Tensor:
        """The same there; `of` is the first block of the probe."""
        ...

    def left_out(self, blocks: Sequence[nn.Module], moment: Moment) -> None:
        """These blocks were not run, for any row: what others remember of them stands for this step."""
        ...
