"""Derives an `Anatomy` from recorded calls of a transformer, without any knowledge of its family.

Calls that differ in the size of the image, in the text and in the number of images show what each dimension of each
argument counts: its length follows that of the image tokens, of the text, of both, or of the batch. One more call, with
latents of NaN and blocks that pass on their inputs, shows where the image is in a sequence that has both.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ditile.model.block_lists import find_model_entry
from ditile.model.hooks.attention_hooks import AttentionWatch
from ditile.model.hooks.overrides import find_latents_parameter
from ditile.model.hooks.pieces import find_nan_tokens, poison_latents
from ditile.model.hooks.token_arguments import Runs, cut_argument, is_cut, take_runs
from ditile.plan.anatomy import (
    FURTHER,
    LOCAL,
    REAL_PAIRS,
    TOKENS,
    Anatomy,
    Kinds,
    ListAnatomy,
    describe_mode,
)
from ditile.plan.errors import ModelError
from ditile.plan.layout import DUMMY_TEXT, Joint
from ditile_lab.study.capture import Call, CapturedCall
from ditile_lab.study.merge import merge_lists
from ditile_lab.study.record import (
    AttentionCall,
    BlockRecord,
    ChainBlock,
    has_real_pairs,
    list_chain,
    record_blocks,
    spread_arguments,
)


def derive_anatomy(transformer: nn.Module, calls: Sequence[Call]) -> Anatomy:
    """Derive the anatomy of a transformer.

    Args:
        transformer: the transformer with all its blocks; a small twin of the class is enough.
        calls: calls that differ in size, in text and, if the pipeline can, in the number of images; lengths of image,
            text and batch must differ from each other.

    Raises:
        ModelError: if something in it cannot be divided; the message names the block and the argument.
    """
    apart = find_model_entry(transformer).apart
    if apart:
        raise ModelError(f"{type(transformer).__name__}: the last blocks of {next(iter(apart))} are not in the chain")
    chain = list_chain(transformer)
    latents = find_latents_parameter(transformer)
    records = [record_blocks(transformer, chain, call) for call in calls]
    poisoned = [record_blocks(transformer, chain, poison_latents(call, latents), bypass=True) for call in calls]
    return _Derivation(transformer, chain, calls, records, poisoned).derive()


class _AttentionPlace(NamedTuple):
    """A call of attention: the block's place in the chain, the path of the module in it, and the turn of the call."""

    block: int
    path: str
    turn: int

    def find_call(self, records: Sequence[BlockRecord]) -> AttentionCall:
        """Find the call among the records of all blocks in one call of the transformer."""
        return records[self.block].attention[self.path][self.turn]


class _Derivation:
    """The lengths in each call, and the anatomy that follows from them.

    Args:
        transformer, chain, calls: the model, its blocks, and the arguments of its calls.
        records: of each call, the inputs of each block.
        poisoned: such records of the calls with latents of NaN.
    """

    def __init__(
        self,
        transformer: nn.Module,
        chain: Sequence[ChainBlock],
        calls: Sequence[Call],
        records: Sequence[Sequence[BlockRecord]],
        poisoned: Sequence[Sequence[BlockRecord]],
    ) -> None:
        self._transformer = transformer
        self._chain = chain
        self._calls = calls
        self._records = records
        self._poisoned = poisoned
        self._name = type(transformer).__name__

    def derive(self) -> Anatomy:
        self._refuse_convolutions()
        # The inputs of blocks are matched with these lengths, so the lengths come first.
        self._lengths = self._measure_lengths()
        lists: dict[str, ListAnatomy] = {}
        joint: Joint = "none"
        for index, block in enumerate(self._chain):
            anatomy, block_joint = self._derive_block(index, block)
            joint = self._agree_on_order(block.name, joint, block_joint)
            if block.list_name in lists:
                anatomy = merge_lists(block.name, lists[block.list_name], anatomy)
            lists[block.list_name] = anatomy
        inputs = {}
        for name in dict.fromkeys(itertools.chain(*self._calls)):
            kinds = self._match_argument(f"{self._name}.{name}", [call.get(name) for call in self._calls])
            if any(kinds):
                inputs[name] = kinds
        # If no attention sees image and text in one sequence, either order is right.
        if joint == "none" and any(anatomy.text is not None for anatomy in lists.values()):
            joint = "text_first"
        return Anatomy(lists, joint, inputs, self._list_modes(), self._list_outside())

    def _list_outside(self) -> tuple[str, ...]:
        """List the modules within blocks with which the forward computes outside the blocks.

        Raises:
            ModelError: if one is not in the first block of its list: a model with more blocks would have it elsewhere.
        """
        paths = []
        for index, block in enumerate(self._chain):
            called_outside: dict[str, None] = {}
            for record in self._records:
                called_outside |= record[index].outside
            for path in called_outside:
                if block.name != f"{block.list_name}.0":
                    raise ModelError(f"{self._name} computes with {block.name}.{path} outside of its block")
                paths.append(f"{block.name}.{path}")
        return tuple(paths)

    def _list_modes(self) -> dict[str, bool]:
        """List the modes of calls, if the calls of the first step have another mode."""
        modes: dict[str, bool] = {}
        for call in self._calls:
            if isinstance(call, CapturedCall) and call.before:
                modes[describe_mode(call.before)] = True
        if not modes:
            return {}
        return modes | {describe_mode(call): False for call in self._calls}

    def _refuse_convolutions(self) -> None:
        for block in self._chain:
            for path, module in block.block.named_modules():
                if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and max(module.kernel_size) > 1:
                    raise ModelError(f"{self._name}: {block.name}.{path} is a convolution over tokens")

    # Lengths

    def _measure_lengths(self) -> dict[str, tuple[int, ...]]:
        """Measure the lengths in the calls: letter of a kind -> lengths."""
        images = [record[0].arguments[self._chain[0].flow.image] for record in self._records]
        self._tokens_dim = self._find_tokens_dim(images)
        lengths = self._measure_streams(images)
        self._one_sequence = "T" not in lengths
        rows = (1,) * len(images)
        if images[0].ndim > 2:
            rows = tuple(x.shape[1 - self._tokens_dim] for x in images)
        if len(set(rows)) > 1:
            lengths["B"] = rows
        for kind in lengths:
            for other in lengths:
                if kind < other and lengths[kind] == lengths[other]:
                    raise ModelError(
                        f"{self._name}: recorded calls do not tell {kind} from {other}: both {lengths[kind]}"
                    )
        return lengths

    def _measure_streams(self, images: Sequence[Tensor]) -> dict[str, tuple[int, ...]]:
        """Measure the lengths of image, text and both; if no block returns a text, everything is the image."""
        dim = self._tokens_dim
        for index, block in enumerate(self._chain):
            if block.flow.text is None or "text" not in block.flow.returns:
                continue
            arguments = [record[index].arguments for record in self._records]
            image_lengths = tuple(call[block.flow.image].shape[dim] for call in arguments)
            text_lengths = tuple(call[block.flow.text].shape[dim] for call in arguments)
            both = tuple(map(sum, zip(image_lengths, text_lengths, strict=True)))
            return {"N": image_lengths, "T": text_lengths, "J": both}
        return {"N": tuple(x.shape[dim] for x in images)}

    def _find_tokens_dim(self, images: Sequence[Tensor]) -> int:
        """Find the dimension that changes with the size of the image: the second call differs only in that.

        If the size is the model's own, it is the dimension as long as the queries of attention.
        """
        first = images[0].shape
        second = images[1].shape
        dims = [dim for dim in range(len(first)) if first[dim] != second[dim]]
        record = self._records[0][0]
        queries = {call.queries for call in itertools.chain(*record.attention.values())}
        # The queries belong to the image only, or also to the text.
        lengths = {first[1]}
        text = record.arguments.get(self._chain[0].flow.text or "")
        if isinstance(text, Tensor) and text.ndim == 3:
            lengths.add(first[1] + text.shape[1])
        if dims in ([], [0]) and len(first) == 3 and lengths & queries:
            dims = [1]
        if len(first) != len(second) or len(dims) != 1:
            raise ModelError(
                f"{self._name}: image tokens {tuple(first)} and {tuple(second)} do not say what is a token, and no "
                f"attention of {self._chain[0].name} has as many queries"
            )
        return dims[0]

    def _match_argument(self, where: str, values: Sequence[Any]) -> Kinds:
        """Match the leaves of an argument with kinds, by its values in the calls; None if a call had none."""
        if self._has_item_for_each_row(values):
            return ("*",)
        leaves_of_call = {call: pytree.tree_leaves(value) for call, value in enumerate(values) if value is not None}
        counts = set(map(len, leaves_of_call.values()))
        if len(counts) > 1:
            return ("",)
        kinds = []
        for leaf in range(next(iter(counts), 0)):
            values_of_call = {call: leaves[leaf] for call, leaves in leaves_of_call.items()}
            kinds.append(self._match_leaf(where, values_of_call))
        return tuple(kinds)

    def _has_item_for_each_row(self, values: Sequence[Any]) -> bool:
        """Return whether an argument is a list with the batch's length in each call."""
        rows = self._lengths.get("B")
        if rows is None:
            return False
        counts = set()
        for call, value in enumerate(values):
            if value is None:
                continue
            if not isinstance(value, list) or len(value) != rows[call]:
                return False
            counts.add(len(value))
        # A single length may be a coincidence.
        return len(counts) > 1

    def _match_leaf(self, where: str, values: Mapping[int, Any]) -> str:
        """Match a leaf with a kind, by its value in each call with the argument."""
        calls = [call for call, value in values.items() if value is not None]
        leaves = [values[call] for call in calls]
        # A flag is also an instance of int, but does not count anything.
        if leaves and all(type(leaf) is int for leaf in leaves):
            kind = self._match_length(where, calls, leaves)
            if kind in TOKENS:
                return f"#{kind}"
            return ""
        if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
            return ""
        shapes = [leaf.shape for leaf in leaves]
        if len(set(map(len, shapes))) > 1:
            raise ModelError(f"{where} has other dimensions from call to call")
        # A word has a letter for each dimension.
        return "".join(self._match_length(where, calls, sizes) for sizes in zip(*shapes, strict=True))

    def _match_length(self, where: str, calls: Sequence[int], sizes: Sequence[int]) -> str:
        """Match the lengths of a dimension in these calls with a letter."""
        if set(sizes) == {1}:
            return "1"
        matching = []
        for kind, lengths in self._lengths.items():
            expected = [lengths[call] for call in calls]
            # A table that serves all tokens has length 1.
            if all(size in (length, 1) for size, length in zip(sizes, expected, strict=True)):
                matching.append(kind)
        if len(set(sizes)) == 1 and matching in ([], ["B"]):
            return "."
        # A length that equals an unchanging number of tokens is assumed to count tokens; the proof shows whether it
        # does.
        if len(matching) > 1:
            raise ModelError(f"{where}: recorded calls do not say what its lengths {tuple(sizes)} count")
        return matching[0] if matching else "C"

    # Blocks

    def _derive_block(self, index: int, block: ChainBlock) -> tuple[ListAnatomy, Joint]:
        flow = block.flow
        records = [record[index] for record in self._records]
        text = flow.text
        if "text" not in flow.returns or records[0].arguments.get(text or "") is None:
            text = None
        joint = self._find_text_in_sequence(index, block, text)
        arguments = {}
        for name in dict.fromkeys(itertools.chain(*(record.arguments for record in records))):
            if name in (flow.image, text):
                continue
            values = [record.arguments.get(name) for record in records]
            kinds = self._match_argument(f"{block.name}.{name}", values)
            if any(kinds):
                arguments[name] = kinds
        attention: dict[str, Kinds] = {}
        order: Joint = "none"
        for path in records[0].attention:
            attention[path], module_order = self._derive_attention(index, block, path)
            order = self._agree_on_order(f"{block.name}.{path}", order, module_order)
        if not attention:
            raise ModelError(
                f"{self._name}: {block.name} computes attention in a way of its own, and not by torch's "
                "scaled_dot_product_attention or MultiheadAttention, or diffusers' dispatch"
            )
        outputs = records[0].outputs
        returns = flow.returns
        if outputs is not None and len(outputs) != len(returns):
            raise ModelError(f"{self._name}: {block.name} returns {len(outputs)} values, and {returns} are known")
        # A block that could return a text, but receives none, returns only the image.
        if outputs is None and text is None and "text" in returns:
            returns = ("image",)
        anatomy = ListAnatomy(
            image=flow.image,
            text=text,
            returns=returns,
            is_tuple=outputs is not None,
            tokens=self._tokens_dim,
            has_no_batch=records[0].arguments[flow.image].ndim == 2,
            joint=joint,
            arguments=arguments,
            attention=attention,
        )
        anatomy = self._mark_keys(index, block, anatomy)
        self._refuse_mixing(index, block, anatomy)
        return anatomy, order

    def _find_text_in_sequence(self, index: int, block: ChainBlock, text: str | None) -> Joint:
        """Find the place of the text within the parameter of the image."""
        if self._one_sequence or text is not None:
            return "none"
        orders: set[Joint] = set()
        for call, (record, poisoned) in enumerate(zip(self._records, self._poisoned, strict=True)):
            num_image = self._lengths["N"][call]
            tokens = record[index].arguments[block.flow.image].shape[self._tokens_dim]
            image = find_nan_tokens(poisoned[index].arguments[block.flow.image], self._tokens_dim)
            if tokens == num_image and image == range(tokens):
                orders.add("none")
            elif image is not None and (tokens, len(image)) == (self._lengths["J"][call], num_image):
                orders.add(_read_order(image))
            else:
                raise ModelError(
                    f"{self._name}: {block.name} is given {tokens} tokens, the image in {image}, and there are "
                    f"{num_image} of the image and {self._lengths['T'][call]} of the text"
                )
        if len(orders) > 1:
            raise ModelError(f"{self._name}: {block.name} has the text in several places: {sorted(orders)}")
        return orders.pop()

    def _derive_attention(self, index: int, block: ChainBlock, path: str) -> tuple[Kinds, Joint]:
        """Derive the kind of each attention call of a module, and the place of the text among joint keys."""
        kinds: list[str] = []
        order: Joint = "none"
        where = f"{self._name}: {block.name}.{path}".rstrip(".")
        every = range(len(self._records))
        for turn, first in enumerate(self._records[0][index].attention[path]):
            place = _AttentionPlace(index, path, turn)
            calls = list(map(place.find_call, self._records))
            if first.causal:
                raise ModelError(f"{where} is causal")
            queries = self._match_length(f"{where}, queries", every, [call.queries for call in calls])
            if queries in "NJ":
                further = self._find_further_keys(place)
                if further:
                    kinds.append(further)
                    continue
            keys = self._match_length(f"{where}, keys", every, [call.keys for call in calls])
            is_shared = keys in "NJ" or (keys == "T" and self._has_text_keys(place))
            if queries in TOKENS and is_shared:
                kind = queries
                if keys != queries:
                    kind += keys
                if _have_real_pairs(calls):
                    kind += REAL_PAIRS
                kinds.append(kind)
                if keys == "J":
                    order = self._agree_on_order(where, order, self._find_key_order(place))
            elif keys in "TC.1" and not self._has_image_keys(place):
                kinds.append(LOCAL)
            else:
                pairs = sorted({(call.queries, call.keys) for call in calls})
                shape = tuple(self._records[0][index].arguments[block.flow.image].shape)
                raise ModelError(
                    f"{where} has queries and keys of lengths {pairs}, and its block has tokens {shape}: attention "
                    "within windows, or tokens in rows and columns, cannot be divided"
                )
        return tuple(kinds), order

    def _find_key_order(self, place: _AttentionPlace) -> Joint:
        """Find the place of the text among the keys of an attention call; "none" if these do not show the image."""
        call = place.find_call(self._poisoned[0])
        if call.poisoned is None or not 0 < len(call.poisoned) < call.keys:
            return "none"
        return _read_order(call.poisoned)

    def _find_further_keys(self, place: _AttentionPlace) -> str:
        """Find the kind of an attention call with its own tokens' keys and others; empty if it is not such a call."""
        calls = list(map(place.find_call, self._records))
        if all(call.keys <= call.queries for call in calls):
            return ""
        kinds = set[str]()
        for number, call in enumerate(calls):
            # Keys that are finite although all streams are NaN are made from something else.
            finite = place.find_call(self._without_streams[number]).finite
            if finite is None or len(finite) != call.keys - call.queries:
                return ""
            is_joint = "J" in self._lengths and self._lengths["J"][number] == call.queries
            whole = "J" if is_joint else "N"
            kind_at = {call.queries: whole + FURTHER, 0: FURTHER + whole}
            if is_joint:
                image = place.find_call(self._poisoned[number]).poisoned
                if image is not None and image.stop == call.keys:
                    kind_at[self._lengths["T"][number]] = "T+N"
                else:
                    kind_at[self._lengths["N"][number]] = "N+T"
            if finite:
                kinds.add(kind_at.get(finite.start, ""))
        return kinds.pop() if len(kinds) == 1 else ""

    @functools.cached_property
    def _without_streams(self) -> list[list[BlockRecord]]:
        """Record the blocks of each call, with NaN in place of their streams."""
        records = []
        for call in self._calls:
            records.append(record_blocks(self._transformer, self._chain, call, bypass=True, poisons=("image", "text")))
        return records

    def _has_image_keys(self, place: _AttentionPlace) -> bool:
        """Return whether an attention call has image tokens among its keys."""
        poisoned = place.find_call(self._poisoned[0]).poisoned
        return poisoned is None or len(poisoned) > 0

    def _has_text_keys(self, place: _AttentionPlace) -> bool:
        """Return whether an attention call has keys made of text tokens that go through the blocks."""
        call = place.find_call(self._text_poisoned)
        return call.poisoned is None or len(call.poisoned) == call.keys

    @functools.cached_property
    def _text_poisoned(self) -> list[BlockRecord]:
        """Record the first call with NaN for the text tokens before each block."""
        return record_blocks(self._transformer, self._chain, self._calls[0], bypass=True, poisons=("text",))

    def _mark_keys(self, index: int, block: ChainBlock, anatomy: ListAnatomy) -> ListAnatomy:
        """Find the arguments that stand for keys, by calling the block on a part of its tokens with them whole."""
        arguments = {}
        for name, kinds in anatomy.arguments.items():
            arguments[name] = tuple(map(_leave_pairs_whole, kinds))
        record = self._records[0][index]
        # Without a mask, no argument is as long as the keys.
        if all(call.mask is None for call in itertools.chain(*record.attention.values())):
            return replace(anatomy, arguments=arguments)
        for name, kinds in arguments.items():
            if not is_cut(kinds):
                continue
            # An argument stays whole only if that makes the block run.
            if self._run_on_part(index, block, anatomy, arguments) is not None:
                break
            with_whole = {**arguments, name: tuple(map(_leave_whole, kinds))}
            if self._run_on_part(index, block, anatomy, with_whole) is not None:
                arguments = with_whole
        return replace(anatomy, arguments=arguments)

    def _refuse_mixing(self, index: int, block: ChainBlock, anatomy: ListAnatomy) -> None:
        """Raise `ModelError` if a token depends on others outside attention, like with experts that choose their
        tokens."""
        part = self._run_on_part(index, block, anatomy, anatomy.arguments)
        if part is None:
            return
        every_token = range(self._num_image), range(self._num_text)
        whole = self._run_on_part(index, block, anatomy, anatomy.arguments, *every_token)
        if whole is None:
            return
        runs = self._list_runs(anatomy, *self._choose_part())
        expected = take_runs(whole, runs[_name_sequence(anatomy)], anatomy.tokens)
        if not torch.allclose(part, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max())):
            raise ModelError(
                f"{self._name}: {block.name} computes a token from others, and not by torch's or diffusers' attention "
                "alone, as attention does that is written out, and experts that choose among all tokens"
            )

    @property
    def _num_image(self) -> int:
        return self._lengths["N"][0]

    @property
    def _num_text(self) -> int:
        return self._lengths["T"][0] if "T" in self._lengths else 0

    def _choose_part(self) -> tuple[range, range]:
        """Choose some tokens of the image, and some of the text."""
        third = self._num_image // 3
        return range(third, 2 * third), range(min(DUMMY_TEXT, self._num_text))

    def _list_runs(self, anatomy: ListAnatomy, image: range, text: range) -> Runs:
        """Return the places of a part's tokens among all tokens of each kind."""
        # If the sequence has no text, either order is right.
        if anatomy.joint == "image_first":
            both = [image, range(self._num_image + text.start, self._num_image + text.stop)]
        else:
            both = [text, range(self._num_text + image.start, self._num_text + image.stop)]
        return {"N": [image], "T": [text], "J": [run for run in both if run]}

    def _run_on_part(
        self,
        index: int,
        block: ChainBlock,
        anatomy: ListAnatomy,
        arguments: Mapping[str, Kinds],
        image: range | None = None,
        text: range | None = None,
    ) -> Tensor | None:
        """Run a block on a part of its tokens, with arguments cut by these kinds and attention that gives zeros.

        Returns:
            The image; None if the block raises.
        """
        if image is None or text is None:
            image, text = self._choose_part()
        runs = self._list_runs(anatomy, image, text)
        call = dict(self._records[0][index].arguments)
        for name, kinds in arguments.items():
            if call.get(name) is not None:
                call[name] = cut_argument(call[name], kinds, runs)
        call[anatomy.image] = take_runs(call[anatomy.image], runs[_name_sequence(anatomy)], anatomy.tokens)
        if anatomy.text is not None:
            call[anatomy.text] = take_runs(call[anatomy.text], runs["T"], anatomy.tokens)
        usable = list[bool]()
        sequence = self._num_image + self._num_text

        def note(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
            further = max(0, key.shape[-2] - query.shape[-2])
            usable.append(mask is None or _is_usable_mask(mask, key.shape[-2], sequence + further))
            return torch.zeros_like(query)

        try:
            with torch.no_grad(), attention_backend(AttentionBackendName.NATIVE), AttentionWatch(note):
                args, kwargs = spread_arguments(block.block, call)
                out = type(block.block).forward(block.block, *args, **kwargs)
        except (RuntimeError, ValueError, IndexError):
            return None
        if not all(usable):
            return None
        if anatomy.is_tuple:
            out = out[anatomy.returns.index("image")]
        image_out: Tensor = out
        return image_out

    def _agree_on_order(self, where: str, known: Joint, order: Joint) -> Joint:
        """Return the common order of keys in two places; "none" agrees with any."""
        if "none" not in (known, order) and known != order:
            raise ModelError(f"{self._name}: {where}: the order of keys is {order}, and elsewhere {known}")
        return order if known == "none" else known


def _read_order(image: range) -> Joint:
    """Return the place of the text in a sequence with the image at these places."""
    return "image_first" if image.start == 0 else "text_first"


def _name_sequence(anatomy: ListAnatomy) -> str:
    """Return the kind of the tokens in the parameter of the image."""
    return "N" if anatomy.joint == "none" else "J"


def _have_real_pairs(calls: Sequence[AttentionCall]) -> bool:
    """Return whether calls have masks over pairs that only pair real queries with real keys."""
    pairs = []
    for call in calls:
        # A mask with one row is the same for all queries.
        if call.mask is not None and len(call.mask) > 2 and call.mask[-2] > 1:
            pairs.append(call.real_pairs)
    return bool(pairs) and all(pairs)


def _is_usable_mask(mask: Tensor, keys: int, sequence: int) -> bool:
    """Return whether a mask given to attention on a part of the tokens can be used for all keys.

    Args:
        mask: `[B, keys]` or `[..., queries, keys]`.
        keys: the number of keys in the part, with further keys.
        sequence: the number of keys of all tokens, with further keys.
    """
    rows = mask.shape[-2] if mask.ndim > 2 else 1
    if rows == 1 or has_real_pairs(mask):
        return mask.shape[-1] in (keys, sequence)
    return rows == mask.shape[-1] == sequence


def _leave_pairs_whole(word: str) -> str:
    """Return a word with whole pairs of queries and keys, in which attention selects its own queries."""
    if sum(letter in TOKENS for letter in word) < 2:
        return word
    return _leave_whole(word)


def _leave_whole(word: str) -> str:
    """Return a word with token dimensions that stay whole."""
    if word.startswith("#"):
        return word
    return word.translate(str.maketrans(TOKENS, "K" * len(TOKENS)))
