"""Counts the work of a transformer: its forward runs once without weights, and every kernel is noted.

The forward is the family's own, at a size with token counts that cannot be confused: an operation on 703 rows belongs
to the image, one on 59 to the text, one on 762 to both. This shows how each kernel grows with the tokens of a rank.
`Work` counts how often a block, or the rest of the model, runs each kernel. Of blocks built alike, only one runs.

The arguments of the forward are in the `CallFamily`, or are recorded when the pipeline calls it (`recorded.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from diffusers.models.normalization import RMSNorm
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ditile.distributed.recording.segments import list_tensors
from ditile.model.anatomies import build_block_hooks
from ditile.model.hooks.attention_hooks import AttentionWatch
from ditile.model.hooks.attention_processors import count_key_repeats
from ditile.model.hooks.block_calls import make_pass_on
from ditile.model.hooks.block_hooks import TransformerHooks
from ditile.model.hooks.block_policy import BlockHook
from ditile.model.hooks.overrides import bind_arguments, match_modules, override_attribute
from ditile.plan.errors import DitileError, ModelError, join_error_lines
from ditile.plan.layout import Grid
from ditile.plan.option_classes import CallArguments
from ditile.plan.shape import CallFamily
from ditile.planner.footprint import Footprint, FootprintTracker, LiveNumbers

Kind = Literal["matmul", "attention", "pointwise", "norm", "gelu", "interleave"]
Stream = Literal["image", "text", "both", "once"]
"""The stream of a kernel's tokens; `once` for work that is the same for any image."""

STREAMS: tuple[Stream, ...] = ("both", "image", "text")
"""The streams with tokens, the longest first."""
GRID = Grid(19, 37)
TEXT = 59
"""703 tokens of the image and 59 of the text: neither is a width of a model, or a multiple of the other."""
MATMULS = {"aten.mm.default": (0, 1), "aten.addmm.default": (1, 2)}
"""Operator -> the positions of its two factors among the arguments."""
# Operators that compute so much for each number that reading it is not what limits them.
HEAVY: dict[str, Kind] = {"aten.native_layer_norm.default": "norm", "aten.gelu.default": "gelu"}
# Operators that rotary embeddings use to put numbers side by side.
JOINING = {"aten.cat.default", "aten.stack.default"}
FREE = {
    "aten::detach",
    "aten::alias",
    "aten::_unsafe_view",
    "aten::empty.memory_format",
    "aten::empty_like",
    "aten::lift_fresh",
}
"""Operators that read and write no numbers."""


class StreamSizes(NamedTuple):
    """The tokens of a forward that is counted.

    Attributes:
        image, text: the number of tokens.
        others: further lengths -> the stream that they grow with, such as the image's before text is joined to it.
        many: whether a stream may also have several rows for each token.
    """

    image: int
    text: int
    others: Mapping[int, Stream] = MappingProxyType({})
    many: bool = False

    def match_stream(self, size: int) -> Stream:
        """Return the stream with this number of tokens; "once" if there is none."""
        if self.text and size == self.image + self.text:
            return "both"
        if self.text and size == self.text:
            return "text"
        if size == self.image:
            return "image"
        return self.others.get(size, "once")

    def match_rows(self, rows: int) -> tuple[Stream, int]:
        """Return the stream for some rows of a product, and the rows for each token."""
        stream = self.match_stream(rows)
        if stream != "once" or not self.many:
            return stream, 1
        for stream in STREAMS:
            tokens = self.count_tokens(stream)
            if tokens > 1 and rows % tokens == 0:
                return stream, rows // tokens
        return "once", rows

    def count_tokens(self, stream: Stream) -> int:
        """Count the tokens of a stream; 1 for work without tokens."""
        return select_stream_length(stream, self.image, self.text)

    def find_widest_stream(self, tensors: Sequence[Tensor]) -> Stream:
        """Return the stream with the most tokens among the dimensions of some tensors."""
        streams = set[Stream]()
        for tensor in tensors:
            streams.update(map(self.match_stream, tensor.shape))
        for stream in STREAMS:
            if stream in streams:
                return stream
        return "once"

    def count_live_numbers(self, tensor: Tensor) -> LiveNumbers:
        """Count the numbers of a tensor for each token, by the longest stream in its shape."""
        numbers = tensor.untyped_storage().nbytes() / tensor.element_size()
        stream = self.find_widest_stream([tensor])
        # A latent has the image's tokens in rows and columns, so none of its dimensions counts them.
        if stream == "once" and numbers >= self.image and numbers % self.image == 0:
            stream = "image"
        return LiveNumbers(**{stream: numbers / self.count_tokens(stream)})


class CountedCall(NamedTuple):
    """A call of a transformer to count the work of.

    Attributes:
        make_inputs: makes the arguments of its forward, with one row. They count as alive.
        mode: makes the mode in which it runs.
        splits_outside: whether work outside of the blocks is told apart by its position, because the modules that embed
            the latents and make the prediction are unknown.
    """

    make_inputs: Callable[[], CallArguments]
    sizes: StreamSizes
    mode: Callable[[], AbstractContextManager[Any]] = lambda: torch.device("meta")
    splits_outside: bool = False


class RooflineKernel(NamedTuple):
    """One operation, for one row of the batch and one token.

    Attributes:
        kind: "matmul" of a token with a matrix; "attention" of a token to another; the others read every number once,
            "norm" and "gelu" with more to compute for each, "interleave" one by one (rotary embeddings).
        size: of a matmul (k, n) of its matrix; of attention (channels of all heads, of one head); of the others
            (numbers that are read and written for a token, 0).
        keys: the stream whose keys attention reads.
    """

    kind: Kind
    stream: Stream
    size: tuple[float, int]
    keys: Stream = "once"


Work = Mapping[RooflineKernel, int]
"""Kernel -> how often it runs."""


class WorkMix(NamedTuple):
    """The work of some blocks, with how often it is done in a call (`blocks`), a step and a generation."""

    blocks: Sequence[tuple[Work, float]]
    steps: Sequence[tuple[Work, float]]
    once: Sequence[tuple[Work, float]]


@dataclass(frozen=True, slots=True)
class TransformerWork:
    """A transformer's work in one call with one row.

    Attributes:
        blocks, block_steps, block_once: work of each block: in every call, once in a step, once in a generation.
        first: work before the blocks, on the first stage: the embedding of the latents.
        last: work after the blocks, on the last stage: the head.
        every, step, once: work of every rank: in every call, once in a step, once in a generation.
        footprint: the numbers alive at once during the call.
        before: for each block, its work up to its first attention.
        key_heads: the number of key heads divided by that of query heads, in blocks.
        streams: for each block, the path of each Linear and RMSNorm -> the stream of its input.
    """

    blocks: tuple[Work, ...]
    block_steps: tuple[Work, ...]
    block_once: tuple[Work, ...]
    first: Work
    last: Work
    every: Work
    step: Work
    once: Work
    footprint: Footprint
    before: tuple[Work, ...] = ()
    key_heads: float = 1.0
    streams: tuple[Mapping[str, Stream], ...] = ()

    def mix_blocks(self, blocks: range, runs: Sequence[float]) -> WorkMix:
        """Mix the work of some blocks. `runs` has, for each block, the share of the calls in which it runs."""
        ones = [1.0] * len(blocks)
        return WorkMix(
            blocks=_merge_same_work([self.blocks[block] for block in blocks], runs),
            steps=_merge_same_work([self.block_steps[block] for block in blocks], ones),
            once=_merge_same_work([self.block_once[block] for block in blocks], ones),
        )


def _merge_same_work(works: Sequence[Work], times: Sequence[float]) -> list[tuple[Work, float]]:
    """Merge works that are one object, and sum their times."""
    # Blocks that are built alike share one object.
    totals: dict[int, float] = {}
    work_by_id = {id(work): work for work in works}
    for work, count in zip(works, times, strict=True):
        totals[id(work)] = totals.get(id(work), 0.0) + count
    return [(work_by_id[key], total) for key, total in totals.items()]


def count_transformer_work(transformer: nn.Module, family: CallFamily, call: CountedCall) -> TransformerWork:
    """Count the work of a transformer, without reading its weights.

    Args:
        transformer: the transformer, on the meta device.
        family: the family of the transformer.
        call: the arguments of its forward.

    Raises:
        ModelError: if the model is made for fewer tokens than are counted.
    """
    hooks = build_block_hooks(transformer)
    tracker = FootprintTracker(call.sizes.count_live_numbers)
    recorder = _KernelRecorder(call, tracker.attend_to_keys)
    with ExitStack() as stack:
        _watch_blocks(stack, recorder, hooks)
        # In a recorded call, work outside of the blocks is told apart by its position.
        if not call.splits_outside:
            _watch_ends(stack, recorder, hooks, family)
        with call.mode(), torch.no_grad(), recorder, recorder.attention, tracker:
            try:
                transformer(**call.make_inputs())
            except DitileError:
                raise
            except (IndexError, RuntimeError, ValueError) as error:
                raise ModelError(
                    f"{type(transformer).__name__} cannot be planned for: it does not take the "
                    f"{call.sizes.image} tokens of an image and {call.sizes.text} of a text with which it is counted "
                    f"({join_error_lines(error, 200)})"
                ) from error
    repeats = 1
    for hook in hooks.chain:
        for _, attention in hook.list_attentions():
            repeats = max(repeats, count_key_repeats(attention))
    # For each block in order, the first block built like it, which is the one that ran.
    first_alike = [first for _, first in sorted(recorder.alike.items())]

    def collect_work(place: str) -> tuple[Work, ...]:
        return tuple(recorder.work[place, block] for block in first_alike)

    return TransformerWork(
        blocks=collect_work("block"),
        block_steps=collect_work("block step"),
        block_once=collect_work("block once"),
        first=recorder.work["first", 0],
        last=recorder.work["last", 0],
        every=recorder.work["every", 0],
        step=recorder.work["step", 0],
        once=recorder.work["once", 0],
        footprint=tracker.make_footprint([recorder.kept.get(block, LiveNumbers()) for block in first_alike]),
        before=tuple(recorder.before.get(block, Counter()) for block in first_alike),
        key_heads=(recorder.key_heads or 1.0) / repeats,
        streams=tuple(recorder.streams[block] for block in first_alike),
    )


@lru_cache
def count_unpacking(name: str, dtype: torch.dtype) -> tuple[float, int]:
    """Count what it takes to unpack a GGUF type: the bytes moved for each number, and the kernels for each weight."""
    from diffusers.quantizers.gguf.utils import GGML_QUANT_SIZES, GGUFParameter, dequantize_gguf_tensor

    quant_type = next(quant_type for quant_type in GGML_QUANT_SIZES if quant_type.name == name)
    numbers, size = GGML_QUANT_SIZES[quant_type]
    # So many blocks that values made once per weight, such as a table of 16 numbers, do not matter.
    num_blocks = 2**16
    stored = torch.empty(1, num_blocks * size, dtype=torch.uint8, device="meta")
    recorder = _TrafficRecorder()  # type: ignore[no-untyped-call]
    with recorder:
        dequantize_gguf_tensor(GGUFParameter(stored, quant_type=quant_type)).to(dtype)
    return recorder.num_bytes / (num_blocks * numbers), recorder.kernels


class _TrafficRecorder(TorchDispatchMode):
    """Counts kernels, and the bytes that they read and write."""

    num_bytes = 0
    kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and func.name() not in FREE:
            self.kernels += 1
            for tensor in (*list_tensors(args), *list_tensors(out)):
                # A tensor that is repeated by its strides is read once.
                self.num_bytes += min(tensor.nbytes, tensor.untyped_storage().nbytes())
        return out


def _watch_blocks(stack: ExitStack, recorder: _KernelRecorder, hooks: TransformerHooks) -> None:
    """Record the kernels of blocks. A block built like an earlier one only passes its inputs on."""
    # Blocks built alike have the same kernels, so counting one of them is enough.
    first_of_kind: dict[tuple[Any, ...], int] = {}
    for hook in hooks.chain:
        shapes = [(name, tuple(parameter.shape)) for name, parameter in hook.block.named_parameters()]
        kind = (type(hook.block), *shapes)
        first = first_of_kind.setdefault(kind, hook.index)
        recorder.alike[hook.index] = first
        if first == hook.index:
            recorder.watch_modules(stack, hook)
        else:
            forward = partial(_pass_streams_on, hook.block, make_pass_on(hook.anatomy))
            override_attribute(stack, hook.block, "forward", forward)
        for place in ("block step", "block once"):
            recorder.work.setdefault((place, first), Counter())
        stack.enter_context(recorder.record_module(hook.block, ("block", first)))


def _pass_streams_on(block: nn.Module, pass_on: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return pass_on(bind_arguments(block, args, kwargs))


def _watch_ends(stack: ExitStack, recorder: _KernelRecorder, hooks: TransformerHooks, family: CallFamily) -> None:
    """Record the kernels of modules named in tables: the ends, and modules that seldom compute."""
    row = hooks.anatomy
    patterns = {"first": (family.image_tokens,), "last": ("proj_out",), "step": row.per_step, "once": row.constant}
    modules = []
    for place, names in patterns.items():
        for name in names:
            modules += [(place, path, module) for path, module in match_modules(hooks.transformer, name)]
    for place, path, module in modules:
        block = next((hook.index for hook in hooks.chain if path.startswith(f"{hook.name}.")), None)
        key = (place, 0)
        if block is not None:
            key = (f"block {place}", recorder.alike[block])
        stack.enter_context(recorder.record_module(module, key))


class _KernelRecorder(TorchDispatchMode):
    """Notes kernels under the innermost of the modules to record; calls `attend` where attention is computed."""

    def __init__(self, call: CountedCall, attend: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes = call.sizes
        self._splits_outside = call.splits_outside
        self._num_calls = 0
        self.work: dict[tuple[str, int], Counter[RooflineKernel]] = {}
        for name in ("first", "last", "every", "step", "once"):
            self.work[name, 0] = Counter()
        self.alike: dict[int, int] = {}
        self.kept: dict[int, LiveNumbers] = {}
        self.before: dict[int, Counter[RooflineKernel]] = {}
        self.attention = AttentionWatch(self._count_attention)
        self._attend = attend
        self.key_heads = 0.0
        self.streams: dict[int, dict[str, Stream]] = {}
        # The recorded modules that are running, the innermost last.
        self._places: list[tuple[str, int]] = [("every", 0)]

    @contextmanager
    def record_module(self, module: nn.Module, place: tuple[str, int]) -> Iterator[None]:
        """Note the kernels of a module at a place."""
        self.work.setdefault(place, Counter())
        # Torch ignores a hook's result if it is None, and both methods return None.
        before = module.register_forward_pre_hook(lambda *_: self._enter_module(place))
        after = module.register_forward_hook(lambda _, __, out: self._leave_module(out))
        yield
        before.remove()
        after.remove()

    def watch_modules(self, stack: ExitStack, hook: BlockHook) -> None:
        """Note the streams of the inputs to a block's Linears and norms, until the stack is closed."""
        streams = self.streams.setdefault(hook.index, {})

        def watch(path: str, module: nn.Module) -> None:
            def note_rows(_: nn.Module, args: Any, out: Tensor) -> None:
                streams[path], _rows = self._sizes.match_rows(out.numel() // out.shape[-1])

            stack.callback(module.register_forward_hook(note_rows).remove)

        for path, module in hook.block.named_modules():
            # These are the modules that tensor parallelism may cut.
            if isinstance(module, nn.Linear | nn.RMSNorm | RMSNorm):
                watch(path, module)

    def _enter_module(self, place: tuple[str, int]) -> None:
        self._places.append(place)
        self._num_calls += place[0] == "block"

    def _leave_module(self, out: Any) -> None:
        place, block = self._places.pop()
        if place == "block once":
            for tensor in list_tensors(out):
                numbers = self._sizes.count_live_numbers(tensor)
                self.kept[block] = self.kept.get(block, LiveNumbers()) + numbers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # Views and bookkeeping read and write no numbers.
        if not func.is_view and func.name() not in FREE:
            self._count_kernel(_classify_kernel(self._sizes, str(func), args, out))
        return out

    def _count_kernel(self, kernel: RooflineKernel) -> None:
        place = self._places[-1]
        is_outside = place[0] == "every" and self._num_calls in (0, len(self.alike))
        if self._splits_outside and is_outside:
            # Work without image tokens is computed once in a step.
            if kernel.stream not in ("image", "both"):
                place = ("step", 0)
            elif self._num_calls:
                place = ("last", 0)
            else:
                place = ("first", 0)
        self.work[place][kernel] += 1

    def _count_attention(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """Note attention as one kernel, before torch divides it into several. Its output's values are not needed."""
        head_dim = query.shape[3]
        kernel = RooflineKernel(
            "attention",
            stream=self._sizes.match_stream(query.shape[2]),
            size=(query.shape[1] * head_dim, head_dim),
            keys=self._sizes.match_stream(key.shape[2]),
        )
        place, block = self._places[-1]
        if place == "block":
            self.key_heads = max(self.key_heads, key.shape[1] / query.shape[1])
            # A warmup group gathers keys between this part of a block and the rest.
            self.before.setdefault(block, Counter(self.work[place, block]))
        self._count_kernel(kernel)
        # The output has the shape of the queries.
        out = torch.empty_like(query)
        self._attend()
        return out


def _classify_kernel(sizes: StreamSizes, name: str, args: Any, out: Any) -> RooflineKernel:
    if name in MATMULS:
        left_at, right_at = MATMULS[name]
        left = args[left_at]
        right = args[right_at]
        stream, rows = sizes.match_rows(left.shape[0])
        k, n = map(int, right.shape)
        return RooflineKernel("matmul", stream, (k * rows, n))
    if name == "aten.convolution.default":
        width = int(out.shape[1])
        stream, rows = sizes.match_rows(out.numel() // width)
        return RooflineKernel("matmul", stream, (args[1].numel() // width * rows, width))
    tensors = [*list_tensors(args), *list_tensors(out)]
    stream = sizes.find_widest_stream(tensors)
    numbers = sum(tensor.numel() for tensor in tensors) / sizes.count_tokens(stream)
    kind = HEAVY.get(name, "pointwise")
    if name in JOINING:
        # Tensors are joined number by number along a last dimension that is new, or of size 1.
        first = args[0][0]
        dim = args[1] if len(args) > 1 else 0
        is_new = name == "aten.stack.default" and dim in (-1, first.dim())
        is_last = dim in (-1, first.dim() - 1)
        if is_new or (is_last and first.shape[-1] == 1):
            kind = "interleave"
    return RooflineKernel(kind, stream, (numbers, 0))


def select_stream_length(stream: Stream, image: int, text: int) -> int:
    """Return the number of tokens in a stream; 1 for work without tokens."""
    if stream == "image":
        return image
    if stream == "text":
        return text
    return image + text if stream == "both" else 1
