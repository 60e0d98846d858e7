"""Derives an `Anatomy` from recorded calls of a transformer, with no word about its family.

Calls that differ in the size of the picture, in the text and in the number of pictures say what each dimension of each
argument counts: its length follows that of the image tokens, of the text, of both, or of the batch. One more call, with
latents of NaN and blocks that pass on what they are given, says where the image is in a sequence that has both.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ditile.model.block_lists import find_model_entry
from ditile.model.hooks.overrides import find_latents_parameter
from ditile.model.hooks.pieces import find_nan_tokens, poison_latents
from ditile.model.hooks.token_arguments import Runs, cut_argument, is_cut, take_runs
from ditile.model.record import (
    AttentionWatch,
    BlockRecord,
    Call,
    CapturedCall,
    ChainBlock,
    has_real_pairs,
    list_chain,
    record_blocks,
    spread_arguments,
)
from ditile.plan.anatomy import (
    FURTHER,
    LOCAL,
    REAL_PAIRS,
    TOKENS,
    Anatomy,
    Kinds,
    ListAnatomy,
    describe_mode,
    drop_further_keys,
)
from ditile.plan.errors import ModelError
from ditile.plan.layout import DUMMY_TEXT, Joint


def derive_anatomy(transformer: nn.Module, calls: Sequence[Call]) -> Anatomy:
    """The anatomy of a transformer.

    Args:
        transformer: with all its blocks; a small twin of the class will do.
        calls: that differ in size, in text and, where the pipeline can, in the number of pictures; lengths of image,
            text and batch must differ from each other.

    Raises:
        ModelError: if something in it cannot be divided; the message names the block and the argument.
    """
    chain, first = list_chain(transformer), find_latents_parameter(transformer)
    if apart := find_model_entry(transformer).apart:
        raise ModelError(f"{type(transformer).__name__}: the last blocks of {next(iter(apart))} are not in the chain")
    records = [record_blocks(transformer, chain, call) for call in calls]
    poisoned = [record_blocks(transformer, chain, poison_latents(call, first), bypass=True) for call in calls]
    return _Derivation(transformer, chain, calls, records, poisoned).derive()


class _Derivation:
    """The lengths that each call has, and what follows from them."""

    def __init__(
        self,
        transformer: nn.Module,
        chain: Sequence[ChainBlock],
        calls: Sequence[Call],
        records: Sequence[Sequence[BlockRecord]],
        poisoned: Sequence[Sequence[BlockRecord]],
    ) -> None:
        self._transformer, self._chain, self._calls = transformer, chain, calls
        self._records, self._poisoned = records, poisoned
        self._name = type(transformer).__name__

    def derive(self) -> Anatomy:
        self._refuse_convolutions()
        self._lengths = self._measure_lengths()
        lists: dict[str, ListAnatomy] = {}
        joint: Joint = "none"
        for index, block in enumerate(self._chain):
            found, order = self._derive_block(index, block)
            joint = self._agree(f"{block.name}: the order of keys", joint, order, "none")
            lists[block.list_name] = (
                found if block.list_name not in lists else merge_lists(block.name, lists[block.list_name], found)
            )
        inputs = {
            name: kinds
            for name in dict.fromkeys(name for call in self._calls for name in call)
            if any(kinds := self._match_argument(f"{self._name}.{name}", [call.get(name) for call in self._calls]))
        }
        if joint == "none" and any(each.text is not None for each in lists.values()):
            joint = "text_first"  # no attention sees both in one sequence: either order will do
        return Anatomy(lists, joint, inputs, self._list_modes(), self._list_outside())

    def _list_outside(self) -> tuple[str, ...]:
        """The modules within blocks that the forward computes with outside of them.

        Raises:
            ModelError: if one is not in the first block of its list: a model with more blocks would have it elsewhere.
        """
        paths = [
            (block, path)
            for block, *records in zip(self._chain, *self._records, strict=True)
            for path in dict.fromkeys(path for record in records for path in record.outside)
        ]
        for block, path in paths:
            if block.name != f"{block.list_name}.0":
                raise ModelError(f"{self._name} computes with {block.name}.{path} outside of its block")
        return tuple(f"{block.name}.{path}" for block, path in paths)

    def _list_modes(self) -> dict[str, bool]:
        """The modes of calls, where those of the first step have another one."""
        before = {describe_mode(call.before) for call in self._calls if isinstance(call, CapturedCall) and call.before}
        return dict.fromkeys(before, True) | ({describe_mode(call): False for call in self._calls} if before else {})

    def _refuse_convolutions(self) -> None:
        for block in self._chain:
            for path, module in block.block.named_modules():
                if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and max(module.kernel_size) > 1:
                    raise ModelError(f"{self._name}: {block.name}.{path} is a convolution over tokens")

    # Lengths

    def _measure_lengths(self) -> dict[str, tuple[int, ...]]:
        """The lengths of each kind over the calls."""
        flow = self._chain[0].flow
        images = [record[0].arguments[flow.image] for record in self._records]
        self._tokens_dim = self._find_tokens_dim(images)
        has_text = [block.flow.text is not None and "text" in block.flow.returns for block in self._chain]
        self._one_sequence = not any(has_text)
        lengths: dict[str, tuple[int, ...]] = {}
        if self._one_sequence:
            lengths["N"] = tuple(x.shape[self._tokens_dim] for x in images)
        else:
            first = has_text.index(True)
            names = (self._chain[first].flow.image, self._chain[first].flow.text or "")
            pairs = [tuple(record[first].arguments[name] for name in names) for record in self._records]
            lengths["N"], lengths["T"] = (
                tuple(x.shape[self._tokens_dim] for x in xs) for xs in zip(*pairs, strict=True)
            )
            lengths["J"] = tuple(map(sum, zip(lengths["N"], lengths["T"], strict=True)))
        rows = [x.shape[1 - self._tokens_dim] if x.ndim > 2 else 1 for x in images]
        if len(set(rows)) > 1:
            lengths["B"] = tuple(rows)
        for some, other in ((a, b) for a in lengths for b in lengths if a < b):
            if lengths[some] == lengths[other]:
                raise ModelError(f"{self._name}: recorded calls do not tell {some} from {other}: both {lengths[some]}")
        return lengths

    def _find_tokens_dim(self, images: Sequence[Tensor]) -> int:
        """The dimension that changes with the size of the picture: the second call has another size alone.

        Where the size is the model's, the dimension that is as long as the queries of attention.
        """
        first, second = images[0].shape, images[1].shape
        dims = [dim for dim in range(len(first)) if first[dim] != second[dim]]
        queries = {call.queries for calls in self._records[0][0].attention.values() for call in calls}
        text = self._records[0][0].arguments.get(self._chain[0].flow.text or "")
        # Queries are those of the image, or of the text too.
        lengths = {first[1], first[1] + text.shape[1]} if isinstance(text, Tensor) and text.ndim == 3 else {first[1]}
        if dims in ([], [0]) and len(first) == 3 and lengths & queries:
            dims = [1]
        if len(first) != len(second) or len(dims) != 1:
            raise ModelError(
                f"{self._name}: image tokens {tuple(first)} and {tuple(second)} do not say what is a token, and no "
                f"attention of {self._chain[0].name} has as many queries"
            )
        return dims[0]

    def _match_argument(self, where: str, values: Sequence[Any]) -> Kinds:
        """The kinds of the leaves of an argument, from its values in the calls; None where a call had none."""
        rows = self._lengths.get("B")
        if rows and all(isinstance(value, list) for value in values if value is not None):
            counts = {(len(value), rows[c]) for c, value in enumerate(values) if value is not None}
            if len(counts) > 1 and all(count == row for count, row in counts):
                return ("*",)
        leaves = [None if value is None else pytree.tree_leaves(value) for value in values]
        sizes = {len(each) for each in leaves if each is not None}
        if len(sizes) > 1:
            return ("",)
        return tuple(
            self._match_leaf(where, [None if each is None else each[k] for each in leaves])
            for k in range(next(iter(sizes), 0))
        )

    def _match_leaf(self, where: str, values: Sequence[Any]) -> str:
        given = [c for c, value in enumerate(values) if value is not None]
        if given and all(type(values[c]) is int for c in given):
            kind = self._match_length(where, given, [values[c] for c in given])
            return f"#{kind}" if kind in TOKENS else ""
        tensors = [c for c in given if isinstance(values[c], Tensor)]
        if not tensors or len(tensors) != len(given):
            return ""
        if len({values[c].ndim for c in tensors}) > 1:
            raise ModelError(f"{where} has other dimensions from call to call")
        dims = range(values[tensors[0]].ndim)
        return "".join(self._match_length(where, tensors, [values[c].shape[dim] for c in tensors]) for dim in dims)

    def _match_length(self, where: str, calls: Sequence[int], sizes: Sequence[int]) -> str:
        """The letter of a dimension that had these lengths in these calls."""
        if set(sizes) == {1}:
            return "1"
        lengths = {kind: [each[c] for c in calls] for kind, each in self._lengths.items()}
        fits = [
            kind
            for kind, each in lengths.items()
            # A table that serves all tokens where it has length 1.
            if all(size in (length, 1) for size, length in zip(sizes, each, strict=True))
        ]
        if len(set(sizes)) == 1 and (not fits or fits == ["B"]):
            return "."
        # A number of tokens that no call changes is taken for one wherever it occurs; the proof says whether it is.
        if len(fits) > 1:
            raise ModelError(f"{where}: recorded calls do not say what its lengths {tuple(sizes)} count")
        return fits[0] if fits else "C"

    # Blocks

    def _derive_block(self, index: int, block: ChainBlock) -> tuple[ListAnatomy, Joint]:
        flow, records = block.flow, [record[index] for record in self._records]
        text = flow.text if "text" in flow.returns and records[0].arguments.get(flow.text or "") is not None else None
        joint = self._find_text_in_sequence(index, block, text)
        streams = (flow.image, text)
        arguments = {
            name: self._match_argument(f"{block.name}.{name}", [record.arguments.get(name) for record in records])
            for name in dict.fromkeys(name for record in records for name in record.arguments)
            if name not in streams
        }
        attention: dict[str, Kinds] = {}
        order: Joint = "none"
        for path in records[0].attention:
            attention[path], found = self._derive_attention(index, block, path)
            order = self._agree(f"{block.name}.{path}: the order of keys", order, found, "none")
        if not attention:
            raise ModelError(
                f"{self._name}: {block.name} computes attention in a way of its own, and not by torch's "
                "scaled_dot_product_attention or MultiheadAttention, or diffusers' dispatch"
            )
        returns = flow.returns if text is not None or "text" not in flow.returns else ("image",)
        outputs = records[0].outputs
        if outputs is not None and len(outputs) != len(flow.returns):
            raise ModelError(f"{self._name}: {block.name} returns {len(outputs)} values, and {flow.returns} are known")
        anatomy = ListAnatomy(
            image=flow.image,
            text=text,
            returns=flow.returns if outputs is not None else returns,
            is_tuple=outputs is not None,
            tokens=self._tokens_dim,
            has_no_batch=records[0].arguments[flow.image].ndim == 2,
            joint=joint,
            arguments={name: kinds for name, kinds in arguments.items() if any(kinds)},
            attention=attention,
        )
        anatomy = self._mark_keys(index, block, anatomy)
        self._refuse_mixing(index, block, anatomy)
        return anatomy, order

    def _find_text_in_sequence(self, index: int, block: ChainBlock, text: str | None) -> Joint:
        """Where the text is within the parameter of the image."""
        if self._one_sequence or text is not None:
            return "none"
        orders: set[Joint] = set()
        for call, (record, poisoned) in enumerate(zip(self._records, self._poisoned, strict=True)):
            tokens = record[index].arguments[block.flow.image].shape[self._tokens_dim]
            image = find_nan_tokens(poisoned[index].arguments[block.flow.image], self._tokens_dim)
            if tokens == self._lengths["N"][call] and image == range(tokens):
                orders.add("none")
            elif tokens == self._lengths["J"][call] and image is not None and len(image) == self._lengths["N"][call]:
                orders.add("image_first" if image.start == 0 else "text_first")
            else:
                raise ModelError(
                    f"{self._name}: {block.name} is given {tokens} tokens, the image in {image}, and there are "
                    f"{self._lengths['N'][call]} of the image and {self._lengths['T'][call]} of the text"
                )
        if len(orders) > 1:
            raise ModelError(f"{self._name}: {block.name} has the text in several places: {sorted(orders)}")
        return orders.pop()

    def _derive_attention(self, index: int, block: ChainBlock, path: str) -> tuple[Kinds, Joint]:
        kinds: list[str] = []
        order: Joint = "none"
        where = f"{self._name}: {block.name}.{path}".rstrip(".")
        for turn, first in enumerate(self._records[0][index].attention[path]):
            calls = [record[index].attention[path][turn] for record in self._records]
            if first.causal:
                raise ModelError(f"{where} is causal")
            every = range(len(calls))
            queries = self._match_length(f"{where}, queries", every, [call.queries for call in calls])
            if queries in "NJ" and (further := self._find_further_keys(index, path, turn)):
                kinds.append(further)
                continue
            keys = self._match_length(f"{where}, keys", every, [call.keys for call in calls])
            is_shared = keys in "NJ" or (keys == "T" and self._has_text_keys(index, path, turn))
            if queries in TOKENS and is_shared:
                has_pairs = [
                    call.real_pairs
                    for call in calls
                    if call.mask is not None and len(call.mask) > 2 and call.mask[-2] > 1
                ]
                kind = queries if queries == keys else queries + keys
                kinds.append(kind + (REAL_PAIRS if has_pairs and all(has_pairs) else ""))
                if keys == "J":
                    image = self._poisoned[0][index].attention[path][turn].poisoned
                    if image is not None and 0 < len(image) < first.keys:
                        found: Joint = "image_first" if image.start == 0 else "text_first"
                        order = self._agree(f"{where}: the order of keys", order, found, "none")
            elif keys in "TC.1" and not self._has_image_keys(index, path, turn):
                kinds.append(LOCAL)
            else:
                pairs = sorted({(call.queries, call.keys) for call in calls})
                shape = tuple(self._records[0][index].arguments[block.flow.image].shape)
                raise ModelError(
                    f"{where} has queries and keys of lengths {pairs}, and its block has tokens {shape}: attention "
                    "within windows, or tokens in rows and columns, cannot be divided"
                )
        return tuple(kinds), order

    def _find_further_keys(self, index: int, path: str, turn: int) -> str:
        """The kind of an attention call whose keys are those of its own tokens and others; empty if it is none."""
        calls = [record[index].attention[path][turn] for record in self._records]
        kinds = set[str]()
        if all(call.keys <= call.queries for call in calls):
            return ""
        for number, call in enumerate(calls):
            finite = self._without_streams[number][index].attention[path][turn].finite
            if finite is None or len(finite) != call.keys - call.queries:
                return ""
            whole = "J" if "J" in self._lengths and self._lengths["J"][number] == call.queries else "N"
            places = {call.queries: whole + FURTHER, 0: FURTHER + whole}
            if whole == "J":
                image = self._poisoned[number][index].attention[path][turn].poisoned
                is_last = image is not None and image.stop == call.keys
                places[self._lengths["T" if is_last else "N"][number]] = "T+N" if is_last else "N+T"
            if finite:
                kinds.add(places.get(finite.start, ""))
        return kinds.pop() if len(kinds) == 1 else ""

    @functools.cached_property
    def _without_streams(self) -> list[list[BlockRecord]]:
        """The blocks of each call, which run on NaN in place of their streams."""
        return [
            record_blocks(self._transformer, self._chain, call, bypass=True, poisons=("image", "text"))
            for call in self._calls
        ]

    def _has_image_keys(self, index: int, path: str, turn: int) -> bool:
        """Whether tokens of the image are among the keys of an attention call."""
        poisoned = self._poisoned[0][index].attention[path][turn].poisoned
        return poisoned is None or len(poisoned) > 0

    def _has_text_keys(self, index: int, path: str, turn: int) -> bool:
        """Whether the keys of an attention call are made of text tokens that go through the blocks."""
        call = self._text_poisoned[index].attention[path][turn]
        return call.poisoned is None or len(call.poisoned) == call.keys

    @functools.cached_property
    def _text_poisoned(self) -> list[BlockRecord]:
        """The first call, in which the text tokens in front of each block are NaN."""
        return record_blocks(self._transformer, self._chain, self._calls[0], bypass=True, poisons=("text",))

    def _mark_keys(self, index: int, block: ChainBlock, anatomy: ListAnatomy) -> ListAnatomy:
        """Finds the arguments that stand for keys, by calling the block on a part of its tokens with them whole."""
        arguments = {
            name: tuple(_leave_pairs_whole(word) for word in kinds) for name, kinds in anatomy.arguments.items()
        }
        record = self._records[0][index]
        has_mask = any(call.mask is not None for calls in record.attention.values() for call in calls)
        for name in [name for name, kinds in arguments.items() if is_cut(kinds) and has_mask]:
            whole = tuple(_leave_whole(word) for word in arguments[name])
            if self._run_on_part(index, block, anatomy, arguments) is None and (
                self._run_on_part(index, block, anatomy, {**arguments, name: whole}) is not None
            ):
                arguments[name] = whole
        return replace(anatomy, arguments=arguments)

    def _refuse_mixing(self, index: int, block: ChainBlock, anatomy: ListAnatomy) -> None:
        """Raises `ModelError` if a token depends on others beside attention, as where experts choose their tokens."""
        n, t = self._lengths["N"][0], self._lengths["T"][0] if "T" in self._lengths else 0
        part = self._run_on_part(index, block, anatomy, anatomy.arguments)
        if part is None:
            return
        whole = self._run_on_part(index, block, anatomy, anatomy.arguments, range(n), range(t))
        runs = list_runs(*self._choose_part(), n, t, self._order_hint(anatomy))
        want = (
            None if whole is None else take_runs(whole, runs["N" if anatomy.joint == "none" else "J"], anatomy.tokens)
        )
        if want is not None and not torch.allclose(part, want, rtol=1e-3, atol=1e-3 * float(want.abs().max())):
            raise ModelError(
                f"{self._name}: {block.name} computes a token from others, and not by torch's or diffusers' attention "
                "alone, as attention does that is written out, and experts that choose among all tokens"
            )

    def _choose_part(self) -> tuple[range, range]:
        """Some tokens of the image, and some of the text."""
        n, t = self._lengths["N"][0], self._lengths["T"][0] if "T" in self._lengths else 0
        return range(n // 3, n // 3 * 2), range(min(DUMMY_TEXT, t))

    def _run_on_part(
        self,
        index: int,
        block: ChainBlock,
        anatomy: ListAnatomy,
        arguments: Mapping[str, Kinds],
        image: range | None = None,
        text: range | None = None,
    ) -> Tensor | None:
        """What a block makes of a part of its tokens with arguments that are cut so, and attention that gives zeros.

        Returns:
            The image; None if the block does not run so.
        """
        if image is None or text is None:
            image, text = self._choose_part()
        n, t = self._lengths["N"][0], self._lengths["T"][0] if "T" in self._lengths else 0
        runs = list_runs(image, text, n, t, self._order_hint(anatomy))
        call = dict(self._records[0][index].arguments)
        for name, kinds in arguments.items():
            if call.get(name) is not None:
                call[name] = cut_argument(call[name], kinds, runs)
        dim = anatomy.tokens
        for stream, letter in ((anatomy.image, "N" if anatomy.joint == "none" else "J"), (anatomy.text, "T")):
            if stream is not None:
                call[stream] = take_runs(call[stream], runs[letter], dim)
        fits, sequence = list[bool](), self._lengths["J" if "J" in self._lengths else "N"][0]

        def note(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
            further = max(0, key.shape[-2] - query.shape[-2])
            fits.append(mask is None or _is_usable_mask(mask, key.shape[-2], sequence + further))
            return torch.zeros_like(query)

        try:
            with torch.no_grad(), attention_backend(AttentionBackendName.NATIVE), AttentionWatch(note):
                args, kwargs = spread_arguments(block.block, call)
                out = type(block.block).forward(block.block, *args, **kwargs)
        except (RuntimeError, ValueError, IndexError):
            return None
        return _select_stream(out, anatomy) if all(fits) else None

    def _order_hint(self, anatomy: ListAnatomy) -> Joint:
        return anatomy.joint if anatomy.joint != "none" else "text_first"

    def _agree(self, where: str, one: Any, other: Any, neutral: Any) -> Any:
        if neutral not in (one, other) and one != other:
            raise ModelError(f"{self._name}: {where} is {other}, and elsewhere {one}")
        return other if one == neutral else one


def merge_anatomies(one: Anatomy, other: Anatomy) -> Anatomy:
    """The anatomy of a class from those of two pipelines that call it with other arguments.

    Raises:
        ModelError: if they say different things of the same argument or module.
    """
    if one.lists.keys() != other.lists.keys():
        raise ModelError(f"blocks are in {list(one.lists)} and in {list(other.lists)}")
    if "none" not in (one.joint, other.joint) and one.joint != other.joint:
        raise ModelError(f"keys are {one.joint} and {other.joint}")
    return Anatomy(
        {name: merge_lists(name, each, other.lists[name]) for name, each in one.lists.items()},
        other.joint if one.joint == "none" else one.joint,
        {
            name: _merge_kinds(name, one.inputs.get(name), other.inputs.get(name))
            for name in {**one.inputs, **other.inputs}
        },
        {**one.modes, **other.modes},
        tuple(dict.fromkeys((*one.outside, *other.outside))),
        {**one.tensor, **other.tensor},
    )


def merge_lists(where: str, one: ListAnatomy, other: ListAnatomy) -> ListAnatomy:
    """The anatomy of two blocks of a list, which may differ only in what one of them does not have."""
    for what in ("image", "tokens", "has_no_batch", "is_tuple", "joint"):
        if getattr(one, what) != getattr(other, what):
            raise ModelError(f"{where} has {what}={getattr(one, what)!r} and {getattr(other, what)!r}")
    attention = {**one.attention, **other.attention}
    for path in one.attention.keys() & other.attention.keys():
        attention[path] = _merge_attention(f"{where}.{path}", one.attention[path], other.attention[path])
    arguments = {
        name: _merge_kinds(f"{where}.{name}", one.arguments.get(name), other.arguments.get(name))
        for name in {**one.arguments, **other.arguments}
    }
    richer = one if len(one.returns) >= len(other.returns) else other
    return replace(
        one,
        text=one.text or other.text,
        returns=richer.returns,
        arguments=arguments,
        attention=attention,
    )


def _merge_attention(where: str, one: Kinds, other: Kinds) -> Kinds:
    """The kinds of a module's attention calls, which have further keys in one pipeline and may have none in another."""
    if {*one, *other} == {LOCAL}:  # nothing is done in such calls, however many a config makes
        return min(one, other, key=len)
    if any(kind.endswith(REAL_PAIRS) for kind in one) != any(kind.endswith(REAL_PAIRS) for kind in other):
        # A mask of pairs that says more than which keys are real: it is whole in every pipeline then.
        one, other = (tuple(kind.removesuffix(REAL_PAIRS) for kind in kinds) for kinds in (one, other))
    pairs = list(zip(one, other, strict=False))
    if len(one) != len(other) or any(
        a not in (b, drop_further_keys(b)) and b != drop_further_keys(a) for a, b in pairs
    ):
        raise ModelError(f"{where} attends to {one} and to {other}")
    return tuple(b if a == drop_further_keys(b) else a for a, b in pairs)


def _merge_kinds(where: str, one: Kinds | None, other: Kinds | None) -> Kinds:
    if not one or not other or one == other:
        return one or other or ()
    if len(one) != len(other):
        raise ModelError(f"{where} has {len(one)} values and {len(other)}")
    return tuple(_merge_words(where, *pair) for pair in zip(one, other, strict=True))


def _merge_words(where: str, one: str, other: str) -> str:
    if not one or not other:
        return one or other
    if "|" in one + other or len(one) != len(other):
        words = {len(word): word for word in one.split("|")}
        for word in other.split("|"):
            words[len(word)] = _merge_words(where, words[len(word)], word) if len(word) in words else word
        return "|".join(words[length] for length in sorted(words))
    return "".join(_merge_letters(f"{where} ({one}, {other})", *pair) for pair in zip(one, other, strict=True))


def _merge_letters(where: str, one: str, other: str) -> str:
    """A length that did not change in the calls of one pipeline may do so in those of another."""
    for weak in ("1", ".", "C"):
        if weak in (one, other):
            return other if one == weak else one
    if "K" in (one, other):  # whole for a mask of pairs, from which attention picks
        return "K"
    if one != other:
        raise ModelError(f"{where} has kinds that contradict each other")
    return one


def list_runs(image: range, text: range, image_tokens: int, text_tokens: int, joint: Joint) -> Runs:
    """Where the tokens of a part are among those of each kind."""
    text_at, image_at = (image_tokens, 0) if joint == "image_first" else (0, text_tokens)
    words = [range(text_at + text.start, text_at + text.stop)] if text else []
    pixels = [range(image_at + image.start, image_at + image.stop)]
    return {"N": [image], "T": [text], "J": pixels + words if joint == "image_first" else words + pixels}


def _is_usable_mask(mask: Tensor, keys: int, sequence: int) -> bool:
    """Whether a mask that attention on a part of the tokens was given can be used for all keys.

    Args:
        mask: `[B, keys]` or `[..., queries, keys]`.
        keys: of the part, and further ones.
        sequence: keys of all tokens, and further ones.
    """
    rows = mask.shape[-2] if mask.ndim > 2 else 1
    if rows == 1 or has_real_pairs(mask):
        return mask.shape[-1] in (keys, sequence)
    return rows == mask.shape[-1] == sequence


def _select_stream(out: Any, anatomy: ListAnatomy) -> Tensor:
    """The image of what a block returned."""
    image: Tensor = out[anatomy.returns.index("image")] if anatomy.is_tuple else out
    return image


def _leave_pairs_whole(word: str) -> str:
    """Pairs of queries and keys are whole: attention picks those of its own queries."""
    return _leave_whole(word) if sum(letter in TOKENS for letter in word) > 1 else word


def _leave_whole(word: str) -> str:
    """A word whose token dimensions are left as they are."""
    return word if word.startswith("#") else "".join("K" if letter in TOKENS else letter for letter in word)
