"""Plans as tables: diffusers' `_cp_plan` says what of a model is split over tokens, and where it is put together again.

It serves models that we have no `ModelSpec` of. Every named tensor is shared out by `pick_even_chunk`: the first ranks
have one token more, nothing is padded, and no size is ever sent: all ranks have seen the same whole lengths. Which
tokens an attention layer sees follows from their number. Two sequences that could be taken for one another are
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ditile.distributed.mesh import Axis
from ditile.distributed.transport import Traffic, start_gather
from ditile.errors import PlanError
from ditile.hooks.generation import LayerTokens
from ditile.hooks.overrides import list_parameter_names, override_attribute
from ditile.plan.layout import pick_even_chunk

KIND = "tokens"

Table = Mapping[str, Any]
"""Module path -> {argument or output: ContextParallelInput or several} | ContextParallelOutput or several."""


class ContextParallelEntry(NamedTuple):
    """An entry of a table: a tensor is split, or put together, along a dimension."""

    dim: int
    dims: int | None
    of_output: bool


class ModuleEntries(NamedTuple):
    """What a table says about one module.

    Attributes:
        path: as the table writes it.
        module: of the model.
        inputs: argument -> how it is split; several for a list of tensors, None for one that is left alone.
        outputs: index of the output -> how it is split.
        gathers: how each output is put together; None for one that is left alone.
    """

    path: str
    module: nn.Module
    inputs: dict[str, tuple[ContextParallelEntry | None, ...]]
    outputs: dict[int, ContextParallelEntry]
    gathers: tuple[ContextParallelEntry | None, ...]


def resolve_table(transformer: nn.Module, table: Table) -> list[ModuleEntries]:
    """A table, looked up in a model.

    Raises:
        PlanError: if it names a module or argument that the model lacks, or an entry is none.
    """
    if not table:
        raise PlanError("cp_plan is empty; name the modules whose inputs are split, and one whose output is gathered")
    module_entries = [entries for path, entry in table.items() for entries in _resolve_entry(transformer, path, entry)]
    if not any(entries.gathers for entries in module_entries):
        raise PlanError("cp_plan gathers no output, so the prediction would stay in pieces; add one, such as proj_out")
    return module_entries


class ContextParallelSplits:
    """What is split in the transformer call at hand.

    Args:
        axis: the ranks that share out the tokens.
        traffic: counts bytes.
        uneven: whether lengths that the ranks do not divide are allowed.

    Attributes:
        masks: the masks that the transformer was given.
        calls: how often it was called.
        attending: whether an attention layer that was replaced is running.
    """

    def __init__(self, axis: Axis, traffic: Traffic, *, uneven: bool) -> None:
        assert axis.group is not None
        self.axis, self._group, self._traffic, self._uneven = axis, axis.group, traffic, uneven
        self._lengths: dict[int, str] = {}
        self._whole: dict[int, str] = {}
        self._known: dict[object, dict[int, LayerTokens]] = {}
        self.masks: tuple[Tensor, ...] = ()
        self.calls, self.attending = 0, False

    def begin_call(self, arguments: Mapping[str, Any]) -> None:
        """Notes the arguments of a transformer call, which are whole yet."""
        self._lengths.clear()
        self.calls += 1
        tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        self.masks = tuple(value for name, value in tensors.items() if "mask" in name)
        self._whole = {value.shape[1]: name for name, value in reversed(tensors.items()) if value.ndim == 3}

    def split_tensor(self, x: Tensor, cut: ContextParallelEntry, name: str) -> Tensor:
        """This rank's share of a tensor, all of it if `cut` is for other dimensions. Raises `PlanError` if short."""
        if cut.dims is not None and x.ndim != cut.dims:
            return x
        length, ranks = x.shape[cut.dim], self.axis.num_ranks
        if length not in self._lengths:
            self._record_length(length, name)
        own = pick_even_chunk(range(length), ranks, self.axis.index)
        return x.narrow(cut.dim, own.start, len(own))

    def gather_tensor(self, x: Tensor, cut: ContextParallelEntry, name: str) -> Tensor:
        """The whole of a tensor whose shares the ranks have. Raises `PlanError` if it is no single split sequence."""
        if cut.dims is not None and x.ndim != cut.dims:
            return x
        tokens = self.find_tokens(x.shape[cut.dim])
        if tokens is None or len(tokens.runs[0]) > 1:
            raise PlanError(
                f"cp_plan gathers {name}, which has {x.shape[cut.dim]} tokens here; split so far were sequences of "
                f"{self._describe_lengths()}, and only one of them can be gathered"
            )
        return torch.cat(self.gather_shares(x, tokens, cut.dim), dim=cut.dim)

    def gather_shares(self, x: Tensor, tokens: LayerTokens, dim: int) -> list[Tensor]:
        """The share of every rank, in their order."""
        before, after = x.shape[: dim % x.ndim], x.shape[dim % x.ndim + 1 :]
        shapes = [(*before, length, *after) for length in tokens.rank_lengths]
        return start_gather(x, shapes, self._group, self._traffic, KIND).wait_for_tensors()

    def find_tokens(self, length: int) -> LayerTokens | None:
        """The tokens of which this rank has `length`; None if they are not split.

        Raises:
            PlanError: if sequences of this call cannot be told apart.
        """
        return self._map_sequences().get(length)

    def refuse_partial_split(self, length: int) -> None:
        """Raises `PlanError` if so many tokens, which are not split, are a share and a whole sequence behind it."""
        for share_of, tokens in self._map_sequences().items():
            name = self._whole.get(length - share_of)
            if name is not None and length - share_of not in self._lengths and length not in self._whole:
                raise PlanError(
                    f"attention has {length} tokens here, as many as {share_of} of {tokens.length} that are split and "
                    f"{name} together, which every rank has whole; split it too, as it takes part in joint attention"
                )

    def _record_length(self, length: int, name: str) -> None:
        ranks = self.axis.num_ranks
        if length < ranks:
            raise PlanError(
                f"{name} has {length} token(s) for {ranks} ranks; use at most {length} ranks, or a longer one"
            )
        if length % ranks and not self._uneven:
            fits = ", ".join(str(n) for n in range(1, length + 1) if length % n == 0 and n < 2 * ranks)
            raise PlanError(
                f"{name} has {length} tokens, which {ranks} ranks do not divide, and uaa is off; "
                f"try {fits} ranks, or leave uaa out"
            )
        self._lengths[length] = name

    def _map_sequences(self) -> dict[int, LayerTokens]:
        """Every sequence of this call so far, and every joint one, by what this rank has of it."""
        key = (tuple(self._lengths), tuple(self._whole))
        if key not in self._known:
            self._known[key] = self._distinguish_sequences(tuple(self._lengths))
        return self._known[key]

    def _distinguish_sequences(self, lengths: tuple[int, ...]) -> dict[int, LayerTokens]:
        sums = [some for count in range(1, len(lengths) + 1) for some in combinations(lengths, count)]
        if len(lengths) == 1:
            sums.append((*lengths, *lengths))
        sequences = [self._join_sequences(some) for some in sums]
        for one, other in combinations(sequences, 2):
            if one.runs != other.runs and any(
                a == b for a, b in zip(one.rank_lengths, other.rank_lengths, strict=True)
            ):
                alike = one.length == other.length  # as of text and image one by one, and of a mask of both at once
                advice = (
                    "split the parts of a joint one, each by itself"
                    if alike
                    else "use another size, prompt length or number of ranks"
                )
                raise PlanError(
                    f"sequences of {one.length} and {other.length} tokens cannot be told apart by the shares of "
                    f"{self.axis.num_ranks} ranks; {advice}"
                )
        for one in sequences:
            for whole, name in self._whole.items():
                if whole in one.rank_lengths and whole not in lengths and len(set(one.rank_lengths)) > 1:
                    raise PlanError(
                        f"{name} has {whole} tokens on every rank, as many as some ranks have of {one.length} that are "
                        "split; use another size, prompt length or number of ranks"
                    )
        return {one.rank_lengths[self.axis.index]: one for one in sequences}

    def _join_sequences(self, lengths: tuple[int, ...]) -> LayerTokens:
        ranks, at = self.axis.num_ranks, 0
        runs: list[list[range]] = [[] for _ in range(ranks)]
        for length in lengths:
            for rank in range(ranks):
                runs[rank].append(pick_even_chunk(range(at, at + length), ranks, rank))
            at += length
        return LayerTokens(tuple(map(tuple, runs)), self.axis.index, at, range(at), 0, False)

    def _describe_lengths(self) -> str:
        return ", ".join(f"{length} ({name})" for length, name in self._lengths.items()) or "none"


def install_split_hooks(
    stack: ExitStack, transformer: nn.Module, module_entries: Iterable[ModuleEntries], splits: ContextParallelSplits
) -> None:
    """Splits and gathers as a table says until the stack is closed."""
    for entries in module_entries:
        names = list_parameter_names(entries.module)
        hook = partial(_split_and_gather, entries, splits, names, entries.module.forward)
        override_attribute(stack, entries.module, "forward", hook)
    # Last, so that it runs before the splits of the transformer's own arguments.
    forward, names = transformer.forward, list_parameter_names(transformer)

    def begin_call_and_forward(*args: Any, **kwargs: Any) -> Any:
        splits.begin_call(dict(zip(names, args, strict=False)) | kwargs)
        return forward(*args, **kwargs)

    override_attribute(stack, transformer, "forward", begin_call_and_forward)


def _split_and_gather(
    entries: ModuleEntries,
    splits: ContextParallelSplits,
    names: list[str],
    forward: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    values, path = list(args), entries.path or "the transformer"
    for name, cuts in entries.inputs.items():
        at = names.index(name)
        if at < len(values):
            values[at] = _split_argument(splits, values[at], cuts, f"{name} of {path}")
        elif kwargs.get(name) is not None:
            kwargs[name] = _split_argument(splits, kwargs[name], cuts, f"{name} of {path}")
    out = forward(*values, **kwargs)
    if not entries.outputs and not entries.gathers:
        return out
    outs = [out] if isinstance(out, Tensor) else list(out)
    for index, cut in entries.outputs.items():
        outs[index] = splits.split_tensor(outs[index], cut, f"output {index} of {path}")
    for index, gather in enumerate(entries.gathers):
        if gather is not None:
            outs[index] = splits.gather_tensor(outs[index], gather, f"output {index} of {path}")
    return outs[0] if isinstance(out, Tensor) else tuple(outs)


def _split_argument(
    splits: ContextParallelSplits, value: Any, cuts: tuple[ContextParallelEntry | None, ...], name: str
) -> Any:
    if value is None:
        return None
    if isinstance(value, Tensor):
        return value if cuts[0] is None else splits.split_tensor(value, cuts[0], name)
    if isinstance(value, list | tuple) and len(cuts) in (1, len(value)):
        several = cuts * len(value) if len(cuts) == 1 else cuts
        return type(value)(
            splits.split_tensor(x, cut, name) if isinstance(x, Tensor) and cut is not None else x
            for x, cut in zip(value, several, strict=True)
        )
    raise PlanError(f"cp_plan splits {name}, which is {type(value).__name__} and fits no {len(cuts)} entries")


def _resolve_entry(transformer: nn.Module, path: str, entry: Any) -> Iterator[ModuleEntries]:
    inputs: dict[str, tuple[ContextParallelEntry | None, ...]] = {}
    outputs: dict[int, ContextParallelEntry] = {}
    gathers: tuple[ContextParallelEntry | None, ...] = ()
    if isinstance(entry, Mapping):
        for name, value in entry.items():
            cuts = tuple(_parse_entry(one, path) for one in (value if isinstance(value, list | tuple) else (value,)))
            if isinstance(name, int):
                if len(cuts) != 1 or cuts[0] is None or not cuts[0].of_output:
                    raise PlanError(f"cp_plan: output {name} of {path!r} needs one entry with split_output=True")
                outputs[name] = cuts[0]
            else:
                inputs[name] = cuts
    else:
        gathers = tuple(_parse_entry(one, path) for one in (entry if isinstance(entry, list | tuple) else (entry,)))
    modules = list(_find_modules(transformer, path, path.split(".") if path else []))
    for module in modules:
        missing = [name for name in inputs if name not in list_parameter_names(module)]
        if missing:
            known = ", ".join(list_parameter_names(module))
            raise PlanError(f"cp_plan: {path or 'the transformer'} has no argument {missing[0]!r}; it has {known}")
        yield ModuleEntries(path, module, inputs, outputs, gathers)


def _parse_entry(entry: Any, path: str) -> ContextParallelEntry | None:
    if entry is None:
        return None
    dim = getattr(entry, "split_dim", getattr(entry, "gather_dim", None))
    if dim is None:
        raise PlanError(
            f"cp_plan: {entry!r} at {path!r} is no entry; use diffusers' ContextParallelInput or ContextParallelOutput"
        )
    return ContextParallelEntry(dim, entry.expected_dims, getattr(entry, "split_output", False))


def _find_modules(module: nn.Module, path: str, parts: list[str]) -> Iterator[nn.Module]:
    """Those that a path names. Tables that number their blocks may number more than a model has."""
    if not parts:
        yield module
        return
    children = dict(module.named_children())
    if parts[0] == "*":
        for child in children.values():
            yield from _find_modules(child, path, parts[1:])
    elif parts[0] in children:
        yield from _find_modules(children[parts[0]], path, parts[1:])
    elif not (parts[0].isdigit() and isinstance(module, nn.ModuleList)):
        raise PlanError(f"cp_plan names {path!r}, and {type(module).__name__} has no {parts[0]!r}; check the path")
