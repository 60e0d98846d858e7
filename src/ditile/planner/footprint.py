"""What a model's forward holds at once, counted on the meta device: numbers that grow with the tokens of a call.

The moment that holds most depends on the call: a block's feed-forward with many image tokens, the text's with few. So
all moments are kept that no other exceeds in every kind, and a call's peak is the largest of them at its own lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from diffusers import AutoencoderKL
from torch import Tensor

from ditile.hooks.placeholders import weightless
from ditile.planner.live import Storages

WHOLE = 5
"""Tensors of a token's width that tensor parallelism does not divide: the residual stream, norms, and around a sum."""

FRAMES = (3, 4)
"""Latent frames that a VAE is counted with; what it holds with more of them is on the line through both."""


class Held(NamedTuple):
    """Numbers that are alive at one time, of one row.

    Attributes:
        once: whatever the lengths.
        image, text, both: for each token of the image, the text, and the sequence of both.
    """

    once: float = 0
    image: float = 0
    text: float = 0
    both: float = 0

    def at(self, image: int, text: int) -> float:
        """Numbers with so many tokens."""
        return self.once + self.image * image + self.text * text + self.both * (image + text)

    def __add__(self, other: tuple[float, ...]) -> Held:  # type: ignore[override]
        return Held(*(a + b for a, b in zip(self, other, strict=True)))

    def __sub__(self, other: Held) -> Held:
        return Held(*(a - b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a forward holds.

    Attributes:
        moments: none of which exceeds another in every kind.
        fused: the same where GELU is one kernel with the product in front of it.
        attending: the same of those at which attention is computed.
        kept: of each block, what is remembered of it for a whole generation.
    """

    moments: tuple[Held, ...]
    fused: tuple[Held, ...]
    attending: tuple[Held, ...]
    kept: tuple[Held, ...]

    def divided(self, channels: int, ranks: int) -> Footprint:
        """What a rank of tensor parallelism holds, where a token has so many channels between blocks."""

        def share(held: Held) -> Held:
            return Held(
                *(x if x < WHOLE * channels else WHOLE * channels + (x - WHOLE * channels) / ranks for x in held)
            )

        kept = tuple(Held(*(x / ranks for x in held)) for held in self.kept)
        moments, fused, attending = (tuple(map(share, held)) for held in (self.moments, self.fused, self.attending))
        return Footprint(moments, fused, attending, kept)


class Watch(Storages):
    """Notes the moments of what is run within it.

    Args:
        held: what a tensor is, by its shape.
    """

    def __init__(self, held: Callable[[Tensor], Held]) -> None:
        super().__init__(self._count)
        self._held, self._now, self._is_gelu = held, Held(), False
        self._fused, self._gelu, self._attending = set[Held](), set[Held](), set[Held]()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        self._is_gelu = func is torch.ops.aten.gelu.default
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _count(self, tensor: Tensor) -> Callable[[], None]:
        held = self._held(tensor)
        self._now += held
        (self._gelu if self._is_gelu else self._fused).add(self._now)

        def ended() -> None:
            self._now -= held

        return ended

    def attend(self) -> None:
        """Attention is computed."""
        self._attending.add(self._now)

    def footprint(self, kept: Sequence[Held]) -> Footprint:
        """What was seen."""
        every = (self._fused | self._gelu, self._fused, self._attending)
        moments, fused, attending = (tuple(undominated(held)) for held in every)
        return Footprint(moments, fused, attending, tuple(kept))


def of_decoder(config: Mapping[str, Any], kind: Any = AutoencoderKL) -> float:
    """The most numbers that are alive at one time for each latent pixel that a VAE decodes."""
    return _decoding(kind, config, "latent_channels")


def of_frames(kind: Any, config: Mapping[str, Any], channels: str) -> Callable[[int], float]:
    """The same of a VAE of frames, by how many latent ones there are: a line from few on.

    Args:
        kind: its class.
        config: its config.
        channels: what that calls the channels of latents.
    """
    found: dict[int, float] = {}

    def of(frames: int) -> float:
        if frames > FRAMES[1]:
            few, more = map(of, FRAMES)
            return more + (more - few) / (FRAMES[1] - FRAMES[0]) * (frames - FRAMES[1])
        if frames not in found:
            found[frames] = _decoding(kind, config, channels, (frames,))
        return found[frames]

    return of


def _decoding(kind: Any, config: Mapping[str, Any], channels: str, frames: tuple[int, ...] = ()) -> float:
    side = 16
    watch = Watch(lambda tensor: Held(image=tensor.untyped_storage().nbytes() / tensor.element_size() / side**2))
    with weightless(), torch.no_grad():
        vae: Any = kind.from_config(config)
        latents = torch.empty(1, vae.config[channels], *frames, side, side)
        with watch:
            vae.decode(latents)
    return max(held.image for held in watch.footprint(()).moments)


def undominated(moments: Iterable[Held]) -> Sequence[Held]:
    """Those that no other exceeds in every kind."""
    found: list[Held] = []
    for one in sorted(moments, reverse=True):
        if not any(all(a <= b for a, b in zip(one, other, strict=True)) for other in found):
            found.append(one)
    return found
