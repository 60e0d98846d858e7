"""What a coder computes of a strip: convolutions, group norms, attention, and residual blocks by blocks of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ditile.parallel.vae.halo import Halo, RowWindow, Strip, intersect_ranges
from ditile.plan.errors import ModelError

VisibleRows = list[tuple[range, Tensor]]
"""Rows of the input, from top to bottom, and where in the picture they are."""
PrepareRows = Callable[[Tensor], Tensor]
"""What is done to rows of the input before they are convolved, such as norm and activation: to each pixel alone."""


@dataclass(frozen=True, slots=True)
class StripConvolution:
    """A convolution of a strip: its own rows while the halo travels, then the rows at the edges.

    With a block size it makes that many rows at a time, so that what the kernel copies or unfolds is never larger.
    Nearest up-sampling is done to the rows that a block needs: halo rows travel before they are doubled.

    Attributes:
        convolve: (rows, n) -> the convolution of these rows with n rows of zeros above and below.
        strip: this rank's rows.
        window: along the rows; the kernel and its stride are the convolution's own.
        mode: what is beyond the picture, as `torch.nn.functional.pad` names it.
    """

    convolve: Callable[[Tensor, int], Tensor]
    strip: Strip
    window: RowWindow
    mode: str = "constant"

    def __call__(self, x: Tensor, prepare: PrepareRows | None = None) -> Tensor:
        """This rank's rows of the output `[..., rows, W]`, from those of the input.

        Args:
            x: the input.
            prepare: makes new rows of the input's, a block at a time; rows travel before it.
        """
        self.strip.find_rows(x.shape[-2])
        part = self.strip.begin_operation(self.window)
        wait_for_rows = self.strip.start_halo_exchange(x, part)
        own: VisibleRows = [(part.own, x)]
        size = self.strip.block_size or max(len(part.out), 1)
        out: Tensor | None = None
        if size >= len(part.out) and part.inner:
            # all rows at once, as if there were nothing beyond the strip; those at the edges are made again below
            out = self._convolve_rows(own, part.out, prepare)
        else:
            out = self._fill_output_rows(out, own, part.inner, part, size, prepare)
        seen = wait_for_rows()
        for edge in (range(part.out.start, part.inner.start), range(part.inner.stop, part.out.stop)):
            out = self._fill_output_rows(out, seen, edge, part, size, prepare)
        return self._make_no_rows(x) if out is None else out

    def _fill_output_rows(
        self, out: Tensor | None, seen: VisibleRows, rows: range, part: Halo, size: int, prepare: PrepareRows | None
    ) -> Tensor | None:
        for first in range(rows.start, rows.stop, size):
            block = range(first, min(first + size, rows.stop))
            made = self._convolve_rows(seen, block, prepare)
            if out is None:
                if len(block) == len(part.out):
                    return made
                out = made.new_empty(*made.shape[:-2], len(part.out), made.shape[-1])
            out.narrow(-2, block.start - part.out.start, len(block)).copy_(made)
        return out

    def _make_no_rows(self, x: Tensor) -> Tensor:
        """An output of no rows."""
        needed = x.new_zeros(*x.shape[:-2], self.window.kernel, x.shape[-1] * self.window.scale)
        return self.convolve(needed, 0).narrow(-2, 0, 0)

    def _convolve_rows(self, seen: VisibleRows, out: range, prepare: PrepareRows | None) -> Tensor:
        """Some rows of the output, from the rows that are seen, and what is beyond the picture where there are none."""
        reach = self.window.compute_input_reach(out)
        source = self.window.find_input_rows(out, seen[-1][0].stop)
        parts = []
        for rows, tensor in seen:
            common = intersect_ranges(rows, source)
            if common:
                parts.append(tensor.narrow(-2, common.start - rows.start, len(common)))
        first = max(source.start, seen[0][0].start)
        x = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)
        if prepare is not None:
            x = prepare(x)
        if self.window.scale > 1:
            x = functional.interpolate(x, scale_factor=float(self.window.scale), mode="nearest")
            first = first * self.window.scale
        last = first + x.shape[-2]
        start = max(reach.start - first, 0)
        stop = x.shape[-2] - max(last - reach.stop, 0)
        x = x.narrow(-2, start, stop - start)
        above = max(first - reach.start, 0)
        below = max(reach.stop - last, 0)
        if above == below and (self.mode == "constant" or not above):
            return self.convolve(x, above)
        # The other modes pad as many dimensions as they are told, which are those behind the channels.
        others = (0, 0) * (x.ndim - 4) if self.mode != "constant" else ()
        return self.convolve(functional.pad(x, (0, 0, above, below, *others), mode=self.mode), 0)


class GroupNormParameters(NamedTuple):
    """What `torch.nn.functional.group_norm` is called with, as `nn.GroupNorm` has it."""

    num_groups: int
    weight: Tensor | None
    bias: Tensor | None
    eps: float


AT_ONCE = 1 << 22
"""Numbers that are centred at a time, so that no second copy of the picture is made."""


def normalize_strip(norm: nn.GroupNorm | GroupNormParameters, x: Tensor, strip: Strip) -> Tensor:
    """This rank's rows of the output, for rows `[B, C, ..., rows, W]` or tokens `[B, C, rows * W]`."""
    normalize = build_normalizer(norm, x, strip)
    return normalize(x) if x.numel() else x


def build_normalizer(norm: nn.GroupNorm | GroupNormParameters, x: Tensor, strip: Strip) -> Callable[[Tensor], Tensor]:
    """What normalizes rows of the picture, those of `x` or of other strips, however many at a time.

    Mean and variance of the picture follow from those of the strips: the variances average, and so do the squares by
    which the strips' means miss the common one. Without the latter the variance would be wrong if the top of a picture
    is brighter than its bottom. Each strip's variance is about its own mean, so nothing cancels (Chan, Golub and
    LeVeque, 1983).
    """
    batch, channels = x.shape[:2]
    if x.ndim > 3:
        strip.find_rows(x.shape[-2])
    means, variances, shares = strip.gather_equal_shapes(
        _compute_moments(x, norm.num_groups, strip.picture_share)
    ).unbind(1)
    mean = (shares * means).sum(0)
    variance = (shares * (variances + (means - mean).square())).sum(0)

    def expand_to_channels(of_group: Tensor) -> Tensor:
        return of_group.repeat_interleave(channels // norm.num_groups, dim=1).flatten()

    weight, bias = (None if p is None else p.to(mean.dtype).repeat(batch) for p in (norm.weight, norm.bias))
    mean = expand_to_channels(mean)
    variance = expand_to_channels(variance)

    def normalize_rows(rows: Tensor) -> Tensor:
        # A batch norm with given statistics scales and shifts each channel, in one pass and without a copy. The
        # channels of all pictures are laid side by side for it.
        flat = rows.contiguous().view(1, batch * channels, -1)
        return functional.batch_norm(flat, mean, variance, weight, bias, False, 0.0, norm.eps).view(rows.shape)

    return normalize_rows


def _compute_moments(x: Tensor, groups: int, share: float) -> Tensor:
    """Mean and variance of each group of a strip, and its share of the picture, `[3, B, groups]`, in fp32 or better.

    The share travels with them: a list of all shares would have to be copied to the device, which waits for it.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    if not x.numel():
        return x.new_zeros(3, x.shape[0], groups, dtype=wide)
    flat = x.contiguous().view(x.shape[0], groups, -1)
    means = []
    variances = []
    for part in flat.split(max(AT_ONCE // (flat.shape[0] * flat.shape[2]), 1), dim=1):
        mean = part.mean(2, dtype=wide)
        means.append(mean)
        variances.append((part - mean[..., None]).square_().mean(2))
    all_means = torch.cat(means, 1)
    return torch.stack([all_means, torch.cat(variances, 1), torch.full_like(all_means, share)])


def run_residual_block(block: Any, x: Tensor, strip: Strip) -> Tensor:
    """This rank's rows of what a `ResnetBlock2D` makes without a time embedding; its convolutions are divided.

    diffusers' own forward holds a normalized copy of the whole strip beside what it is made from. Here a block of rows
    is normalized when it is convolved, the second branch is added in place, and rows travel before the norm.
    """

    def normalize_and_convolve(norm: nn.GroupNorm, conv: nn.Conv2d, x: Tensor) -> Tensor:
        normalize = build_normalizer(norm, x, strip)
        return build_strip_convolution(conv, strip)(x, prepare=lambda rows: block.nonlinearity(normalize(rows)))

    out = normalize_and_convolve(block.norm2, block.conv2, normalize_and_convolve(block.norm1, block.conv1, x))
    out += x if block.conv_shortcut is None else build_strip_convolution(block.conv_shortcut, strip)(x)
    return out.div_(block.output_scale_factor) if block.output_scale_factor != 1 else out


def is_plain_residual(block: Any) -> bool:
    """Whether `run_residual_block` computes the same as a `ResnetBlock2D` does."""
    parts = (block.upsample, block.downsample, block.time_emb_proj)
    return block.time_embedding_norm != "scale_shift" and all(part is None for part in parts) and not block.dropout.p


def build_strip_convolution(conv: nn.Conv2d, strip: Strip, scale: int = 1) -> StripConvolution:
    """The convolution of a strip that is repeated `scale` times first, padded with zeros."""
    rows, columns = (int(n) for n in conv.padding)

    def convolve(x: Tensor, zeros: int) -> Tensor:
        return functional.conv2d(
            x,
            conv.weight,
            conv.bias,
            conv.stride,
            (zeros, columns),
            conv.dilation,
            conv.groups,
        )

    return StripConvolution(convolve, strip, RowWindow(conv.kernel_size[0], conv.stride[0], rows, rows, scale))


class RowPadding(NamedTuple):
    """Rows beyond the picture that a tensor was asked to have; `shape` is what it has got."""

    shape: torch.Size
    above: int
    below: int
    mode: str


class RowFunctions(TorchFunctionMode):
    """Within it the functions that look beyond a row compute of a strip what they would compute of the picture.

    A coder's own forward runs on a strip. Convolutions exchange halo rows, also where rows were padded by themselves
    before; group norms share their statistics; attention gathers keys and values. All else must be of a row alone, or
    of a whole number of them, as views are that fold rows into channels: `prove_rows` shows whether it is.
    """

    def __init__(self, strip: Strip) -> None:
        super().__init__()
        self._strip = strip
        self._padding: RowPadding | None = None
        self._frames = 1
        self._width = 1
        self._is_paused = False
        self._handlers: dict[Any, Callable[..., Any]] = {
            functional.conv2d: self._convolve,
            functional.conv3d: self._convolve,
            functional.pad: self._pad,
            functional.group_norm: self._normalize,
            functional.scaled_dot_product_attention: self._attend,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = None if self._is_paused else self._handlers.get(func)
        if handler is None:
            return func(*args, **(kwargs or {}))
        if handler == self._convolve:
            return handler(func, *args, **(kwargs or {}))
        return handler(*args, **(kwargs or {}))

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Within it functions compute what they are given: what calls them divides it itself."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def _note_shape(self, x: Tensor) -> Tensor:
        self._width = x.shape[-1]
        if x.ndim == 5:
            self._frames = x.shape[2]
        return x

    def _pad(self, x: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
        """Pads all but the rows; these are remembered for the convolution that follows."""
        above, below = pad[2:4] if x.ndim > 3 and len(pad) >= 4 else (0, 0)
        before = self._take_padding(x) if self._padding is not None else None
        if not above and not below and before is None:
            return functional.pad(x, tuple(pad), mode, value)
        is_known = mode != "circular" and above >= 0 and below >= 0 and not value
        if not is_known or (before is not None and (above or below)):
            raise ModelError(
                f"a coder pads rows by {(above, below)}, {mode}, value {value}, so that it cannot be divided by rows; "
                "use vae=whole"
            )
        others = (*pad[:2], 0, 0, *pad[4:])
        padded = functional.pad(x, others, mode, value) if any(others) else x
        self._padding = (before or RowPadding(x.shape, above, below, mode))._replace(shape=padded.shape)
        return padded

    def _take_padding(self, x: Tensor) -> RowPadding | None:
        """The rows that a tensor was padded by, which may be folded otherwise since; raises if another one was."""
        found = self._padding
        self._padding = None
        if found is not None and found.shape[-2:] != x.shape[-2:]:
            self._refuse_padding()
        return found

    def _refuse_padding(self) -> NoReturn:
        raise ModelError(
            "a coder pads rows for something else than a convolution, so that it cannot be divided by rows; use "
            "vae=whole"
        )

    def _convolve(
        self, func: Callable[..., Tensor], input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1,
        padding: Any = 0, dilation: Any = 1, groups: int = 1,
    ) -> Tensor:  # fmt: skip
        dims = weight.ndim - 2
        if isinstance(padding, str):
            raise ModelError(f"a coder's convolution has padding={padding!r}; give it numbers, or use vae=whole")
        strides, paddings, dilations = (
            (each,) * dims if isinstance(each, int) else tuple(each) for each in (stride, padding, dilation)
        )
        before = self._take_padding(input)
        kernel = (weight.shape[-2] - 1) * dilations[-2] + 1
        is_pointwise = kernel == 1 and strides[-2] == 1 and not paddings[-2] and before is None
        if is_pointwise and input.shape[-2]:
            return self._note_shape(func(input, weight, bias, stride, padding, dilation, groups))
        above, below, mode = before[1:] if before is not None else (0, 0, "constant")
        if paddings[-2] and above + below and mode != "constant":
            raise ModelError("a coder pads rows twice before a convolution; use vae=whole")
        window = RowWindow(kernel, strides[-2], above + paddings[-2], below + paddings[-2])

        def convolve(x: Tensor, zeros: int) -> Tensor:
            return func(x, weight, bias, strides, (*paddings[:-2], zeros, paddings[-1]), dilations, groups)

        return self._note_shape(StripConvolution(convolve, self._strip, window, mode)(input))

    def _normalize(
        self, input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:  # fmt: skip
        if self._padding is not None:
            self._refuse_padding()
        if input.ndim > 3:
            self._note_shape(input)
        return normalize_strip(GroupNormParameters(num_groups, weight, bias, eps), input, self._strip)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """Queries of the strip, keys and values of all rows; attention along time is left alone."""
        rows = self._strip.rows.rows_per_rank
        own = self._strip.own_height
        length = key.shape[-2]
        per_row = self._width if not own or length == own * self._width else self._width * self._frames
        is_of_rows = length == own * per_row
        if length == self._frames > 1 and not (is_of_rows and length):
            return functional.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if not is_of_rows or length == self._frames > 1 or is_causal or query.shape[-2] != length:
            raise ModelError(
                f"a coder attends to {length} tokens in {own} rows of {self._width} and {self._frames} frames"
                f"{', causally' if is_causal else ''}, so that it cannot be divided by rows; use vae=whole"
            )
        pairs = torch.cat([key, value], dim=-1).movedim(-2, 0)
        gathered = self._strip.start_strip_gather(pairs, units=per_row).wait_for_tensors()
        if not own:
            return query
        keys, values = torch.cat(gathered).movedim(0, -2).split([key.shape[-1], value.shape[-1]], dim=-1)
        if attn_mask is not None:
            attn_mask = _extend_frame_mask(attn_mask, own * self._width, [count * self._width for count in rows])
        return functional.scaled_dot_product_attention(
            query, keys, values, attn_mask, dropout_p, scale=scale, enable_gqa=enable_gqa
        )


def _extend_frame_mask(mask: Tensor, own: int, lengths: Sequence[int]) -> Tensor:
    """The columns of a mask of frames for the tokens of all strips; `own` and `lengths` are tokens of a frame.

    Raises:
        ModelError: if the mask tells tokens of a frame apart.
    """
    frames = mask[..., ::own, ::own]
    if not torch.equal(frames.repeat_interleave(own, -2).repeat_interleave(own, -1), mask):
        raise ModelError("a coder's mask tells tokens of a frame apart, so it cannot be divided by rows; use vae=whole")
    queries = frames.repeat_interleave(own, -2)
    return torch.cat([queries.repeat_interleave(length, -1) for length in lengths], dim=-1)
