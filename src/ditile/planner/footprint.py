"""Counts the tensors that are alive at once in a model's forward on the meta device.

A `Footprint` counts numbers (elements of tensors), which grow with the tokens of a call. The moment that needs most
memory depends on the call: a block's feed-forward with many image tokens, the text's with few. So a footprint keeps
all moments that no other exceeds in every kind. The peak of a call is the largest of them at its own lengths.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from ditile.model.hooks.placeholders import init_on_meta_device
from ditile.plan.errors import ModelError
from ditile.plan.option_classes import JsonObject
from ditile.planner.profile import DecodeWork

WHOLE = 5
"""The number of token-wide tensors that tensor parallelism leaves whole: residual stream, norms, and around a sum."""

FRAMES = (3, 4)
"""Two numbers of latent frames with which a VAE is counted; counts of more frames are on the line through both. A VAE
that codes chunks of frames is counted with whole chunks."""
MOST_PROBED = 7
"""The number of latent frames decoded to see whether each one after the fifth adds as many frames as those before."""
MOST_CHUNK = 32
"""More frames than any chunk of a VAE has; an eighth of them is less than any chunk."""

CHANNELS = ("z_dim", "latent_channels")
"""Names of the latent channels in configs."""
SCALE_SIDE = 8
"""Latent pixels along the side of the sample decoded to measure a VAE's scale."""
COUNTED_SIDE = 16
"""Latent pixels along the side of the sample decoded to count a VAE's work and memory."""


class LiveNumbers(NamedTuple):
    """Numbers that are alive at one time, for one row of the batch.

    Attributes:
        once: those that do not depend on the lengths.
        image, text, both: those for each token of the image, of the text, and of the sequence of both.
    """

    once: float = 0
    image: float = 0
    text: float = 0
    both: float = 0

    def count_numbers(self, image: int, text: int) -> float:
        """Count the numbers for some tokens."""
        return self.once + self.image * image + self.text * text + self.both * (image + text)

    def __add__(self, other: tuple[float, ...]) -> LiveNumbers:  # type: ignore[override]
        return LiveNumbers(*map(operator.add, self, other))

    def __sub__(self, other: LiveNumbers) -> LiveNumbers:
        return LiveNumbers(*map(operator.sub, self, other))

    def divide_by_ranks(self, whole: int, ranks: float) -> LiveNumbers:
        """Return the numbers on one of `ranks` ranks. In each kind, up to `whole` numbers are not divided."""
        counts = []
        for count in self:
            undivided = min(count, whole)
            counts.append(undivided + (count - undivided) / ranks)
        return LiveNumbers(*counts)


@dataclass(frozen=True, slots=True)
class Footprint:
    """The numbers that are alive in a forward.

    Attributes:
        moments: the live numbers of each moment, except moments that another one exceeds in every kind.
        attending: the same for the moments in which attention is computed.
        kept: for each block, the numbers that are kept for a whole generation.
    """

    moments: tuple[LiveNumbers, ...]
    attending: tuple[LiveNumbers, ...]
    kept: tuple[LiveNumbers, ...]

    def divide_by_ranks(self, channels: int, ranks: float) -> Footprint:
        """Return the footprint of one rank of tensor parallelism. `channels` is the width of a token between blocks."""
        whole = WHOLE * channels

        def divide_moments(moments: tuple[LiveNumbers, ...], whole: int) -> tuple[LiveNumbers, ...]:
            return tuple(moment.divide_by_ranks(whole, ranks) for moment in moments)

        return Footprint(
            moments=divide_moments(self.moments, whole),
            attending=divide_moments(self.attending, whole),
            kept=divide_moments(self.kept, 0),
        )


class StorageTracker(TorchDispatchMode):
    """Follows the storages that operators make within its context, until they are freed.

    Args:
        on_create: called for each storage with its first tensor; its result is called when the storage is freed.
    """

    def __init__(self, on_create: Callable[[Tensor], Callable[[], None]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_create = on_create
        self._known = dict[int, weakref.ref[Any]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Inputs of an operator that are not followed yet were made outside of the tracker, and count nothing.
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self._follow_storage(leaf, lambda _: lambda: None)
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._follow_storage(leaf, self._on_create)
        return out

    def _follow_storage(self, tensor: Tensor, on_create: Callable[[Tensor], Callable[[], None]]) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        on_free = on_create(tensor)

        def forget_storage(_: Any) -> None:
            del self._known[key]
            on_free()

        self._known[key] = weakref.ref(storage, forget_storage)


class FootprintTracker(StorageTracker):
    """Notes the numbers alive after each storage made within it.

    Args:
        count_tensor: counts the numbers of a tensor, by the streams that its shape shows.
    """

    def __init__(self, count_tensor: Callable[[Tensor], LiveNumbers]) -> None:
        super().__init__(self._count_storage)
        self._count_tensor = count_tensor
        self._live_numbers = LiveNumbers()
        # Moments after a storage was made, and during attention.
        self._moments = set[LiveNumbers]()
        self._attending = set[LiveNumbers]()

    def _count_storage(self, tensor: Tensor) -> Callable[[], None]:
        numbers = self._count_tensor(tensor)
        self._live_numbers += numbers
        self._moments.add(self._live_numbers)

        def subtract_storage() -> None:
            self._live_numbers -= numbers

        return subtract_storage

    def attend_to_keys(self) -> None:
        """Note that attention is computed now."""
        self._attending.add(self._live_numbers)

    def make_footprint(self, kept: Sequence[LiveNumbers]) -> Footprint:
        """Make the footprint of all work within the tracker. `kept` is that of `Footprint`."""
        return Footprint(
            moments=find_pareto_front(self._moments),
            attending=find_pareto_front(self._attending),
            kept=tuple(kept),
        )


def count_on_line(count: Callable[[int], float], frames: int, counted: tuple[int, int] = FRAMES) -> float:
    """Count something for a number of latent frames. Beyond both of `counted`, extend the line through their counts."""
    fewer, more = counted
    if frames <= more:
        return count(frames)
    count_of_more = count(more)
    slope = (count_of_more - count(fewer)) / (more - fewer)
    return count_of_more + slope * (frames - more)


def count_decoder_numbers(kind: Any, config: JsonObject, channels: str = "latent_channels", frames: int = 0) -> float:
    """Count the numbers alive at the peak of a VAE's decode, for each latent pixel.

    Args:
        channels: the config's name for the channels of latents.
        frames: the latent frames; 0 is an image.
    """

    def count_by_pixel(tensor: Tensor) -> LiveNumbers:
        numbers = tensor.untyped_storage().nbytes() / tensor.element_size()
        return LiveNumbers(image=numbers / COUNTED_SIDE**2)

    tracker = FootprintTracker(count_by_pixel)
    with init_on_meta_device(), torch.no_grad():
        vae = kind.from_config(config)
        latents = _make_latents(vae, channels, frames)
        with tracker:
            vae.decode(latents)
    return max(moment.image for moment in tracker.make_footprint(()).moments)


def _make_latents(vae: Any, channels: str, frames: int) -> Tensor:
    """Make one sample of latents, of some frames or of an image."""
    dims = (frames,) if frames else ()
    return torch.empty(1, vae.config[channels], *dims, COUNTED_SIDE, COUNTED_SIDE)


def count_decode_work(kind: Any, config: JsonObject, channels: str, frames: int = 0) -> DecodeWork:
    """Count the work to decode a number of latent frames; 0 is an image."""
    with init_on_meta_device(), torch.no_grad(), FlopCounterMode(display=False) as counter:
        vae = kind.from_config(config)
        vae.decode(_make_latents(vae, channels, frames))
    exchanges = 0
    for layer in vae.decoder.modules():
        # Ranks exchange rows for each convolution wider than one pixel, and sums for each group norm.
        is_wide = isinstance(layer, (nn.Conv2d, nn.Conv3d)) and max(layer.kernel_size) > 1
        exchanges += is_wide or isinstance(layer, nn.GroupNorm)
    return DecodeWork(counter.get_total_flops() / COUNTED_SIDE**2, exchanges)


class VaeScale(NamedTuple):
    """The pixels and frames that a VAE makes from latent pixels and latent frames.

    Attributes:
        side: pixels along the side of a latent pixel.
        frames: frames made from each chunk of latent frames after the first chunk; 0 if latents have no frames.
        first: frames made from the first chunk.
        channels: the name of the latent channels in its config.
        chunk: latent frames of each chunk after the first one.
        first_chunk: latent frames of the first chunk.
    """

    side: int
    frames: int = 0
    first: int = 1
    channels: str = "latent_channels"
    chunk: int = 1
    first_chunk: int = 1

    def count_latent_frames(self, frames: int) -> int:
        """Return the latent frames for a number of frames. Raises `ModelError` if they are not whole chunks."""
        if not self.frames:
            return 1
        chunks, rest = divmod(frames - self.first, self.frames)
        if rest:
            # Pipelines that round a number of frames round it up, and allow or refuse the result.
            near = max(self.first, frames - rest + self.frames)
            first = "one" if self.first == 1 else str(self.first)
            raise ModelError(f"frames={frames} are not a multiple of {self.frames} and {first} more; try frames={near}")
        return self.first_chunk + chunks * self.chunk

    @property
    def counted_frames(self) -> tuple[int, int]:
        """Return the two numbers of latent frames whose counts give the line for longer videos."""
        if self.chunk == 1:
            return FRAMES
        return self.first_chunk + self.chunk, self.first_chunk + 2 * self.chunk


def measure_vae_scale(kind: Any, config: JsonObject) -> VaeScale:
    """Measure the scale of a VAE, by its class and config."""
    with init_on_meta_device(), torch.no_grad():
        vae: Any = kind.from_config(config)
        channels = next(name for name in CHANNELS if name in vae.config)

        def decode(*frames: int) -> torch.Size:
            latents = torch.empty(1, vae.config[channels], *frames, SCALE_SIDE, SCALE_SIDE)
            shape: torch.Size = vae.decode(latents, return_dict=False)[0].shape
            return shape

        # Convolutions over frames have weights of five dimensions.
        if not any(p.ndim == 5 for p in vae.parameters()):
            # Some image VAEs were made from a video VAE, and their latents have a single frame.
            if "temperal_downsample" in vae.config:
                return VaeScale(decode(1)[-1] // SCALE_SIDE, 1, channels=channels)
            return VaeScale(decode()[-1] // SCALE_SIDE, channels=channels)
        # Some decode three latent frames first, and then two at a time, so 3, 5 and 7 are compared.
        three = decode(3)
        five = decode(5)
        frames = (five[2] - three[2]) // 2
        if decode(MOST_PROBED)[2] != five[2] + 2 * frames:
            return _measure_chunks(vae, channels, decode)
    return VaeScale(three[-1] // SCALE_SIDE, frames, three[2] - 2 * frames, channels)


def _measure_chunks(vae: Any, channels: str, decode: Callable[[int], torch.Size]) -> VaeScale:
    """Measure the scale of a VAE that codes chunks of frames, and fills up the last one.

    Args:
        decode: returns the shape of the video that a number of latent frames makes.

    Raises:
        ModelError: if its latents do not grow with the frames.
    """

    def encode(video: torch.Size, more_frames: int) -> int:
        latents: Tensor = vae.encode(torch.empty(*video[:2], video[2] + more_frames, *video[3:]))[0].mean
        return latents.shape[2]

    # A video of whole chunks is encoded to as many latent frames as it was decoded from.
    latents = encode(decode(MOST_PROBED), 0)
    video = decode(latents)
    growth = (
        encode(video, more_frames) - latents for more_frames in range(MOST_CHUNK // 8, MOST_CHUNK, MOST_CHUNK // 8)
    )
    chunk = next(filter(None, growth), 0)
    if chunk < 1:
        raise ModelError(f"{type(vae).__name__} codes frames in a way that is not known, so its calls are not planned")
    frames = decode(latents + chunk)[2] - video[2]
    later_chunks = (latents - 1) // chunk
    return VaeScale(
        side=video[-1] // SCALE_SIDE,
        frames=frames,
        first=video[2] - later_chunks * frames,
        channels=channels,
        chunk=chunk,
        first_chunk=latents - later_chunks * chunk,
    )


def find_pareto_front(moments: Iterable[LiveNumbers]) -> tuple[LiveNumbers, ...]:
    """Return the moments not exceeded by another one in every kind."""
    front: list[LiveNumbers] = []
    for moment in sorted(moments, reverse=True):
        if not any(all(map(operator.le, moment, larger)) for larger in front):
            front.append(moment)
    return tuple(front)
