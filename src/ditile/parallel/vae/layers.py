"""The operations of a coder on a strip: convolutions, group norms, attention, and residual blocks by blocks of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ditile.parallel.vae.halo import Halo, RowWindow, Strip, intersect_ranges, replace_height
from ditile.plan.errors import ModelError

VisibleRows = list[tuple[range, Tensor]]
"""Rows of the input, from top to bottom, with their places in the image."""
PrepareRows = Callable[[Tensor], Tensor]
"""The work on input rows before the convolution, such as norm and activation, which looks at single pixels only."""


@dataclass(frozen=True, slots=True)
class StripConvolution:
    """A convolution of a strip: its own rows while the halo is under way, then the rows at the edges.

    With a block size it makes that many rows at a time, so that the kernel copies and unfolds no more than these need.
    Nearest up-sampling is applied to the rows that a block needs: halo rows are sent before they are doubled.

    Attributes:
        convolve: (rows, n) -> the convolution of these rows with n rows of zeros above and below.
        strip: this rank's rows.
        window: the window along the rows; the kernel and its stride are the convolution's own.
        mode: how rows beyond the image are filled, as in `torch.nn.functional.pad`.
    """

    convolve: Callable[[Tensor, int], Tensor]
    strip: Strip
    window: RowWindow
    mode: str = "constant"

    def __call__(self, x: Tensor, prepare: PrepareRows | None = None) -> Tensor:
        """Return this rank's rows of the output `[..., rows, W]`, from its rows of the input.

        Args:
            x: the input.
            prepare: makes new rows from input rows, a block at a time; halo rows are sent before it is called.
        """
        self.strip.find_rows(x.shape[-2])
        part = self.strip.begin_operation(self.window)
        wait_for_rows = self.strip.start_halo_exchange(x, part)
        own: VisibleRows = [(part.own, x)]
        size = self.strip.block_size or max(len(part.out), 1)
        out: Tensor | None = None
        if size >= len(part.out) and part.inner:
            # All rows are made at once, as if there were nothing beyond the strip; rows at the edges are made again
            # below.
            out = self._convolve_rows(own, part.out, prepare)
        else:
            out = self._fill_output_rows(out, own, part.inner, part, size, prepare)
        visible = wait_for_rows()
        top = range(part.out.start, part.inner.start)
        bottom = range(part.inner.stop, part.out.stop)
        for edge in (top, bottom):
            out = self._fill_output_rows(out, visible, edge, part, size, prepare)
        if out is not None:
            return out
        # The output has no rows; its other dimensions follow from a convolution of as few rows as possible.
        width = x.shape[-1] * self.window.scale
        rows = x.new_zeros(*x.shape[:-2], self.window.kernel, width)
        return self.convolve(rows, 0).narrow(-2, 0, 0)

    def _fill_output_rows(
        self,
        out: Tensor | None,
        visible: VisibleRows,
        rows: range,
        part: Halo,
        size: int,
        prepare: PrepareRows | None,
    ) -> Tensor | None:
        for first in range(rows.start, rows.stop, size):
            block = range(first, min(first + size, rows.stop))
            output_rows = self._convolve_rows(visible, block, prepare)
            if out is None:
                if len(block) == len(part.out):
                    # One block is the whole output, so nothing has to be copied.
                    return output_rows
                out = output_rows.new_empty(replace_height(output_rows, len(part.out)))
            out.narrow(-2, block.start - part.out.start, len(block)).copy_(output_rows)
        return out

    def _convolve_rows(self, visible: VisibleRows, out: range, prepare: PrepareRows | None) -> Tensor:
        """Return some rows of the output, made from the visible rows and from padding beyond them."""
        reach = self.window.compute_input_reach(out)
        source = self.window.find_input_rows(out, visible[-1][0].stop)
        parts = []
        for rows, tensor in visible:
            common = intersect_ranges(rows, source)
            if common:
                parts.append(tensor.narrow(-2, common.start - rows.start, len(common)))
        first = max(source.start, visible[0][0].start)
        x = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)
        if prepare is not None:
            x = prepare(x)
        if self.window.scale > 1:
            x = functional.interpolate(x, scale_factor=float(self.window.scale), mode="nearest")
            first = first * self.window.scale
        # Only half of a doubled row may be needed.
        end = first + x.shape[-2]
        start = max(reach.start - first, 0)
        stop = x.shape[-2] - max(end - reach.stop, 0)
        x = x.narrow(-2, start, stop - start)
        above = max(first - reach.start, 0)
        below = max(reach.stop - end, 0)
        if above == below and (self.mode == "constant" or not above):
            return self.convolve(x, above)  # the convolution itself can pad both sides alike
        padding = [0, 0, above, below]
        if self.mode != "constant":
            # torch wants these modes to pad all dimensions after the channels.
            padding += [0, 0] * (x.ndim - 4)
        return self.convolve(functional.pad(x, padding, mode=self.mode), 0)


class GroupNormParameters(NamedTuple):
    """The arguments of `torch.nn.functional.group_norm`, named as in `nn.GroupNorm`."""

    num_groups: int
    weight: Tensor | None
    bias: Tensor | None
    eps: float


NUMBERS_AT_ONCE = 1 << 22
"""How many numbers are centred at a time, so that no second copy of the image is made."""


def normalize_strip(norm: nn.GroupNorm | GroupNormParameters, x: Tensor, strip: Strip) -> Tensor:
    """Return this rank's rows of the output, for rows `[B, C, ..., rows, W]` or tokens `[B, C, rows * W]`."""
    normalize = build_normalizer(norm, x, strip)
    return normalize(x) if x.numel() else x


def build_normalizer(norm: nn.GroupNorm | GroupNormParameters, x: Tensor, strip: Strip) -> Callable[[Tensor], Tensor]:
    """Build a function that normalizes rows of the image, of `x` or of other strips, any number at a time.

    Averages are weighted by height. The image's mean is the average of the strips' means. Its variance is the average
    of the strips' variances plus that of the squared distances of their means from its own. Without the latter it would
    be wrong if the top of an image is brighter than its bottom. Each strip's variance is about its own mean, so nothing
    cancels (Chan, Golub and LeVeque, 1983).
    """
    batch, channels = x.shape[:2]
    if x.ndim > 3:
        strip.find_rows(x.shape[-2])
    wide = torch.promote_types(x.dtype, torch.float32)
    # Mean, variance and share of the image: the share is sent along, because a list of all shares would have to be
    # copied to the device, and the host would wait for the copy.
    moments = x.new_zeros(3, batch, norm.num_groups, dtype=wide)
    if x.numel():
        moments[2] = strip.own_height / strip.rows.image_height
        flat = x.contiguous().view(batch, norm.num_groups, -1)
        groups_at_once = max(NUMBERS_AT_ONCE // (flat.shape[0] * flat.shape[2]), 1)
        for part, moments_of_part in zip(
            flat.split(groups_at_once, dim=1), moments.split(groups_at_once, dim=2), strict=True
        ):
            mean_of_part = part.mean(2, dtype=wide)
            moments_of_part[0] = mean_of_part
            moments_of_part[1] = (part - mean_of_part[..., None]).square_().mean(2)
    means, variances, shares = strip.gather_equal_shapes(moments).unbind(1)
    group_mean = (shares * means).sum(0)
    group_variance = (shares * (variances + (means - group_mean).square())).sum(0)
    group_size = channels // norm.num_groups
    mean = group_mean.repeat_interleave(group_size, dim=1).flatten()
    variance = group_variance.repeat_interleave(group_size, dim=1).flatten()
    weight = None if norm.weight is None else norm.weight.to(mean.dtype).repeat(batch)
    bias = None if norm.bias is None else norm.bias.to(mean.dtype).repeat(batch)

    def normalize_rows(rows: Tensor) -> Tensor:
        # A batch norm with given statistics scales and shifts each channel, in one pass and without a copy. For that
        # the channels of all images lie side by side.
        flat = rows.contiguous().view(1, batch * channels, -1)
        return functional.batch_norm(flat, mean, variance, weight, bias, False, 0.0, norm.eps).view(rows.shape)

    return normalize_rows


def run_residual_block(block: Any, x: Tensor, strip: Strip) -> Tensor:
    """Run a `ResnetBlock2D` without a time embedding on this rank's rows; its convolutions are divided.

    diffusers' own forward keeps a normalized copy of the whole strip in addition to its input. Here a block of rows is
    normalized when it is convolved, the shortcut is added in place, and rows are sent before the norm.
    """

    def normalize_and_convolve(norm: nn.GroupNorm, conv: nn.Conv2d, x: Tensor) -> Tensor:
        normalize = build_normalizer(norm, x, strip)
        return build_strip_convolution(conv, strip)(x, prepare=lambda rows: block.nonlinearity(normalize(rows)))

    hidden = normalize_and_convolve(block.norm1, block.conv1, x)
    out = normalize_and_convolve(block.norm2, block.conv2, hidden)
    if block.conv_shortcut is not None:
        x = build_strip_convolution(block.conv_shortcut, strip)(x)
    out += x
    if block.output_scale_factor != 1:
        out.div_(block.output_scale_factor)
    return out


def is_plain_residual(block: Any) -> bool:
    """Return whether `run_residual_block` computes the same as a `ResnetBlock2D`."""
    if block.time_embedding_norm == "scale_shift" or block.dropout.p:
        return False
    return block.upsample is None and block.downsample is None and block.time_emb_proj is None


def build_strip_convolution(conv: nn.Conv2d, strip: Strip, scale: int = 1) -> StripConvolution:
    """Build the convolution of a strip, padded with zeros; rows and columns are first repeated `scale` times."""
    rows = int(conv.padding[0])
    columns = int(conv.padding[1])

    def convolve(x: Tensor, zeros: int) -> Tensor:
        padding = (zeros, columns)
        return functional.conv2d(x, conv.weight, conv.bias, conv.stride, padding, conv.dilation, conv.groups)

    return StripConvolution(convolve, strip, RowWindow(conv.kernel_size[0], conv.stride[0], rows, rows, scale))


class RowPadding(NamedTuple):
    """Rows beyond the image with which a tensor should be padded; `shape` is the tensor's actual shape."""

    shape: torch.Size
    above: int
    below: int
    mode: str


class RowFunctions(TorchFunctionMode):
    """A mode in which the functions that look beyond a row compute the same for a strip as for the image.

    A coder's own forward runs on a strip. Convolutions exchange halo rows, also where a separate call has padded the
    rows; group norms share their statistics; attention gathers keys and values. Everything else must work on single
    rows, or on a whole number of rows, like views that fold rows into channels: `prove_rows` shows whether it does.
    """

    def __init__(self, strip: Strip) -> None:
        super().__init__()
        self._strip = strip
        self._padding: RowPadding | None = None
        # The size of the last tensor of a convolution or norm: attention sees only a number of tokens.
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
        kwargs = kwargs or {}
        handler = None if self._is_paused else self._handlers.get(func)
        if handler is None:
            return func(*args, **kwargs)
        if handler == self._convolve:
            return handler(func, *args, **kwargs)
        return handler(*args, **kwargs)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Let functions work as usual within the context.

        The code inside divides its input itself.
        """
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
        """Pad all dimensions except the rows, whose padding is kept for the next convolution."""
        above = 0
        below = 0
        if x.ndim > 3 and len(pad) >= 4:
            above, below = pad[2:4]
        pending = self._take_padding(x)
        if not above and not below and pending is None:
            return functional.pad(x, tuple(pad), mode, value)
        # A strip can be padded with zeros, and by modes that look only at rows near one edge, but not cut.
        is_known = mode != "circular" and min(above, below) >= 0 and not value
        pads_twice = pending is not None and (above or below)
        if not is_known or pads_twice:
            raise ModelError(
                f"a coder pads rows by {(above, below)}, {mode}, value {value}, so that it cannot be divided by rows; "
                "use vae=whole"
            )
        if pending is None:
            pending = RowPadding(x.shape, above, below, mode)
        other_dims = (*pad[:2], 0, 0, *pad[4:])
        if any(other_dims):
            x = functional.pad(x, other_dims, mode, value)
        self._padding = pending._replace(shape=x.shape)
        return x

    def _take_padding(self, x: Tensor) -> RowPadding | None:
        """Return a tensor's pending row padding; refuse one that belongs to another tensor."""
        padding = self._padding
        self._padding = None
        # Views may have folded the other dimensions since the padding.
        if padding is not None and padding.shape[-2:] != x.shape[-2:]:
            self._refuse_padding()
        return padding

    def _refuse_padding(self) -> NoReturn:
        raise ModelError(
            "a coder pads rows for something other than a convolution, so that it cannot be divided by rows; use "
            "vae=whole"
        )

    def _convolve(
        self, func: Callable[..., Tensor], input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1,
        padding: Any = 0, dilation: Any = 1, groups: int = 1,
    ) -> Tensor:  # fmt: skip
        dims = weight.ndim - 2
        if isinstance(padding, str):
            raise ModelError(f"a coder's convolution has padding={padding!r}; give it numbers, or use vae=whole")
        strides = _repeat_number(stride, dims)
        paddings = _repeat_number(padding, dims)
        dilations = _repeat_number(dilation, dims)
        pending = self._take_padding(input)
        kernel = (weight.shape[-2] - 1) * dilations[-2] + 1
        # A pointwise convolution looks at no other row, so no rows are sent.
        is_pointwise = (kernel, strides[-2], paddings[-2]) == (1, 1, 0) and pending is None
        if is_pointwise and input.shape[-2]:
            return self._note_shape(func(input, weight, bias, stride, padding, dilation, groups))
        if pending is None:
            pending = RowPadding(input.shape, 0, 0, "constant")
        if paddings[-2] and pending.above + pending.below and pending.mode != "constant":
            raise ModelError("a coder pads rows twice before a convolution; use vae=whole")
        above = pending.above + paddings[-2]
        below = pending.below + paddings[-2]
        window = RowWindow(kernel, strides[-2], above, below)

        def convolve(x: Tensor, zeros: int) -> Tensor:
            own_paddings = (*paddings[:-2], zeros, paddings[-1])
            return func(x, weight, bias, strides, own_paddings, dilations, groups)

        return self._note_shape(StripConvolution(convolve, self._strip, window, pending.mode)(input))

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
        """Attend from the strip's queries to keys and values of all rows; leave attention along time as it is."""
        own = self._strip.own_height
        length = key.shape[-2]
        tokens_per_row = self._width
        if own and length != own * self._width:
            # The tokens are those of all frames at once.
            tokens_per_row = self._width * self._frames
        is_of_rows = length == own * tokens_per_row
        is_of_frames = length == self._frames > 1
        if is_of_frames and not (is_of_rows and length):
            return functional.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        has_a_key_for_each_query = query.shape[-2] == length
        # If there are as many tokens as frames, they may be either.
        is_known = is_of_rows and not is_of_frames and has_a_key_for_each_query
        if is_causal or not is_known:
            causally = ", causally" if is_causal else ""
            raise ModelError(
                f"a coder attends to {length} tokens in {own} rows of {self._width} and {self._frames} frames"
                f"{causally}, so that it cannot be divided by rows; use vae=whole"
            )
        # One message is enough for keys and values.
        pairs = torch.cat([key, value], dim=-1).movedim(-2, 0)
        # Every rank must take part in the gather, even one without rows of its own.
        gathered = self._strip.start_strip_gather(pairs, units=tokens_per_row).wait_for_tensors()
        if not own:
            return query
        all_pairs = torch.cat(gathered).movedim(0, -2)
        widths = [key.shape[-1], value.shape[-1]]
        keys, values = all_pairs.split(widths, dim=-1)
        if attn_mask is not None:
            lengths = [count * self._width for count in self._strip.rows.rows_per_rank]
            # A mask of frames: one token of each frame stands for all of its tokens.
            per_frame = own * self._width
            frames = attn_mask[..., ::per_frame, ::per_frame]
            queries = frames.repeat_interleave(per_frame, -2)
            if not torch.equal(queries.repeat_interleave(per_frame, -1), attn_mask):
                raise ModelError(
                    "a coder's mask tells tokens of a frame apart, so it cannot be divided by rows; use vae=whole"
                )
            attn_mask = torch.cat([queries.repeat_interleave(count, -1) for count in lengths], dim=-1)
        return functional.scaled_dot_product_attention(
            query, keys, values, attn_mask, dropout_p, scale=scale, enable_gqa=enable_gqa
        )


def _repeat_number(value: Any, dims: int) -> tuple[int, ...]:
    """Return a convolution's option for each dimension; a single number stands for all."""
    if isinstance(value, int):
        return (value,) * dims
    return tuple(value)
