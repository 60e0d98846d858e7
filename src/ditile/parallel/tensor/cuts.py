"""The share of each parameter that a rank of the tensor axis holds. Pure: a model on the meta device is enough.

A table has the format of diffusers' `_tp_plan`: module pattern (`*` stands for one name) -> "colwise", "rowwise",
`PackedColwiseParallel` or `PackedRowwiseParallel`; and, beyond it, "rms_norm": an RMS norm across all heads.

One that was derived names Linears where a class leaves sizes to its config, so that it holds for every config:

    ["colwise", 1, 1]               its outputs are blocks in these proportions
    ["colwise", "inner", "hidden"]  its outputs are blocks of as many features as these attributes of its owner say
    ["rowwise", "a.to_q", "a.up/1"] its inputs are as many as a.to_q makes, and then as many as the second block of a.up
    ["rms_norm", "a.to_q"]          across heads, where it has as many channels as a.to_q makes features, or a.qkv/0
    ["gathered"]                    its outputs, if the ranks divide them, are few: each rank gets those of all
    "a:rotary.0": ["heads", 1, "a.to_q"]    dimension 1 of the first tensor of an argument of a counts the heads of
                                            a.to_q, or their features
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from diffusers.hooks.tensor_parallel import PackedColwiseParallel, PackedRowwiseParallel
from diffusers.models.activations import GEGLU, SwiGLU
from diffusers.models.normalization import RMSNorm
from torch import Tensor, nn

from ditile.model.hooks.attention_processors import UNFUSE, has_fused_projections, is_unfused_leftover
from ditile.model.hooks.block_policy import ADAPTER_PROCESSORS
from ditile.model.hooks.overrides import match_modules
from ditile.parallel.tensor.adapters import list_adapter_linears
from ditile.plan.errors import ModelError, PlanError


class TensorCut(NamedTuple):
    """The part of a tensor that a rank owns: slices along one dim, which are joined in their order.

    A projection that was fused from several has a slice of each.
    """

    dim: int
    pieces: tuple[slice, ...]


class HeadDim(NamedTuple):
    """The dimension of a table that counts heads, or the features of all heads, and how many these are in the whole."""

    dim: int
    counts: frozenset[int]


SelectShard = Callable[[str, tuple[int, ...]], TensorCut | None]
"""(name, whole shape) -> the part to read; None is the whole tensor."""


_DIMS: dict[str, dict[str, int]] = {
    "colwise": {"weight": 0, "bias": 0, "lora_B": 0},
    "rowwise": {"weight": 1, "lora_A": 1},
    "rms_norm": {"weight": 0, "bias": 0},
    "gathered": {"weight": 0, "bias": 0, "lora_B": 0},
}
"""The dimension of each parameter that is cut; the others are whole on every rank."""

_PACKED = {
    PackedColwiseParallel: ("colwise", "_tp_packed_col_blocks"),
    PackedRowwiseParallel: ("rowwise", "_tp_packed_row_blocks"),
}
HEAD_COUNTS = ("heads", "num_heads", "n_heads", "num_attention_heads", "kv_heads", "num_kv_heads")
"""What attention modules call their numbers of heads."""


@dataclass(frozen=True, slots=True)
class CutStyle:
    """How a module is cut.

    Attributes:
        kind: "colwise" (outputs), "rowwise" (inputs), "rms_norm" (channels) or "gathered" (outputs, which every rank
            gets from all: a modulation's, which are few numbers of many weights).
        blocks: sizes, in proportion, of what is fused side by side in that dimension; each block is cut by itself.
    """

    kind: str
    blocks: tuple[int, ...] = (1,)

    def compute_block_sizes(self, total: int) -> list[int]:
        """The blocks of a dimension of `total`."""
        return [block * (total // sum(self.blocks)) for block in self.blocks]


@dataclass(frozen=True, slots=True)
class TensorCuts:
    """A table matched with a model, for one rank.

    Attributes:
        styles: module path -> how it is cut.
        index: this rank's place on the tensor axis.
        size: ranks on it.
        arguments: path of a block -> (argument, place among its tensors) -> the dimension of heads.
    """

    styles: Mapping[str, CutStyle]
    index: int
    size: int
    arguments: Mapping[str, Mapping[tuple[str, int], HeadDim]] = field(default_factory=dict)

    @classmethod
    def match_tensor_table(
        cls, transformer: nn.Module, table: Mapping[str, Any], index: int, size: int, *, loaded: bool = False
    ) -> TensorCuts:
        """Matches a table with a model, whose blocks may be placeholders and whose weights may be on the meta device.

        With `loaded` the model has this rank's share alone, which was checked when it was read.

        Raises:
            ModelError: if the table names what cannot be cut, or nothing that is there.
            PlanError: if `size` does not divide heads or features.
        """
        table, arguments = _split_table(table, transformer)
        matched = {
            path: (given, module)
            for pattern, given in table.items()
            for path, module in match_modules(transformer, pattern)
        }
        styles = {
            path: _parse_cut_style(given, table, transformer, path, module)
            for path, (given, module) in matched.items()
            if not _is_norm_within_heads(given, table, transformer, path) and not _is_kept_whole(given, module, size)
        }
        for path in list_adapter_linears(transformer):
            _check_linear_shardable(path, transformer.get_submodule(path))
            styles[path] = CutStyle("colwise")
        if not styles:
            raise ModelError(
                f"the tensor table of {type(transformer).__name__} names no module that is there: {', '.join(table)}"
            )
        if not loaded:
            _check_tensor_degree(transformer, styles, size)
            _check_linears_named(transformer, styles, matched)
            _check_blocks_alike(transformer, table)
        return cls(styles, index, size, arguments)

    def select_shard(self, name: str, shape: Sequence[int]) -> TensorCut | None:
        """This rank's part of a parameter of the whole model; None is all of it.

        Args:
            name: as in the model's `state_dict`, LoRAs included.
            shape: of the whole parameter.
        """
        path, is_lora, rest = name.partition(".lora_")
        leaf = "lora_" + rest.split(".")[0]
        if not is_lora:
            path, _, leaf = name.rpartition(".")
        style = self.styles.get(path.removesuffix(".base_layer"))
        dim = None if style is None else _DIMS[style.kind].get(leaf)
        if style is None or dim is None or self.size == 1:
            return None
        pieces, start = [], 0
        for block in style.compute_block_sizes(shape[dim]):
            share = block // self.size
            pieces.append(slice(start + self.index * share, start + (self.index + 1) * share))
            start += block
        return TensorCut(dim, tuple(pieces))


def take_shard(whole: Tensor, cut: TensorCut) -> Tensor:
    """The part of a parameter that a cut is."""
    return torch.cat([whole.narrow(cut.dim, p.start, p.stop - p.start) for p in cut.pieces], cut.dim)


def _split_table(
    table: Mapping[str, Any], transformer: nn.Module
) -> tuple[dict[str, Any], dict[str, dict[tuple[str, int], HeadDim]]]:
    """The rows of modules, and those of arguments of blocks."""
    arguments: dict[str, dict[tuple[str, int], HeadDim]] = {}
    for row, given in ((row, given) for row, given in table.items() if ":" in row):
        pattern, _, place = row.partition(":")
        name, _, leaf = place.rpartition(".")
        for path, _ in match_modules(transformer, pattern):
            owner = transformer.get_submodule(_fill_pattern(given[2], path).rpartition(".")[0])
            counts = {_find_named_linear(given[2], transformer, path).out_features, *read_head_counts(owner)}
            arguments.setdefault(path, {})[name, int(leaf)] = HeadDim(given[1], frozenset(counts))
    return {row: given for row, given in table.items() if ":" not in row}, arguments


def read_head_counts(module: nn.Module) -> list[int]:
    """The numbers of heads that a module has as attributes."""
    return [count for name in HEAD_COUNTS if isinstance(count := vars(module).get(name), int)]


def find_sharded_attentions(transformer: nn.Module, styles: Mapping[str, CutStyle]) -> dict[str, Any]:
    """The attention modules that own what is cut, by path: the nearest modules above with a number of `heads`."""
    attention_modules = {}
    for path in styles:
        while path:
            path = path.rpartition(".")[0]
            module = transformer.get_submodule(path)
            if read_head_counts(module):
                attention_modules[path] = module
                break
    return attention_modules


def unwrap_lora_base(module: nn.Module) -> nn.Module:
    """The Linear below a LoRA, or the module itself."""
    base = getattr(module, "base_layer", module)
    assert isinstance(base, nn.Module)
    return base


def _parse_cut_style(
    given: Any, table: Mapping[str, Any], transformer: nn.Module, path: str, module: nn.Module
) -> CutStyle:
    blocks: Sequence[int] | None
    if isinstance(given, list | tuple):
        kind, *sizes = given
        if kind == "rms_norm":
            blocks = (1,)
        elif kind == "rowwise":
            blocks = _measure_parts(sizes, table, transformer, path) if sizes else (1,)
        else:
            blocks = _measure_columns(kind, sizes, transformer, path)
    elif type(given) in _PACKED:
        kind, attribute = _PACKED[type(given)]
        blocks = given.blocks or getattr(unwrap_lora_base(module), attribute, None)
    else:
        kind, blocks = given, _find_value_and_gate(given, transformer, path)
    if kind not in _DIMS or not blocks:
        raise ModelError(
            f"{path} cannot be cut as {given!r}; known are {', '.join(_DIMS)}, and diffusers' PackedColwiseParallel "
            "and PackedRowwiseParallel with blocks"
        )
    (_check_norm_shardable if kind == "rms_norm" else _check_linear_shardable)(path, module)
    if any("forward" in vars(each) for each in (module, unwrap_lora_base(module))):
        raise ModelError(
            f"the forward of {path} is replaced by a hook, such as one of enable_layerwise_casting, and tensor "
            "parallelism replaces it too; remove the hook, or set it after parallelize, around the share of each rank"
        )
    return CutStyle(kind, tuple(blocks))


def _is_norm_within_heads(given: Any, table: Mapping[str, Any], transformer: nn.Module, path: str) -> bool:
    """Whether a norm that is across heads where the table was derived is one of each head by this config."""
    if not isinstance(given, list | tuple) or given[0] != "rms_norm":
        return False
    width = _find_norm_width(transformer.get_submodule(path))
    return width is not None and width != _measure_part(given[1], table, transformer, path)


def _is_kept_whole(given: Any, module: nn.Module, size: int) -> bool:
    """Whether ranks cannot share the outputs of a modulation alike: every rank has all of it, as without a row."""
    is_gathered = isinstance(given, list | tuple) and given[0] == "gathered"
    return is_gathered and bool(unwrap_lora_base(module).out_features % size)  # type: ignore[operator]


def _find_norm_width(norm: Any) -> int | None:
    shape = getattr(norm, "normalized_shape", getattr(norm, "dim", None))
    return int(shape[-1]) if isinstance(shape, tuple | list) else shape


def _find_named_linear(pattern: str, transformer: nn.Module, path: str) -> Any:
    """The Linear that a row names."""
    return unwrap_lora_base(transformer.get_submodule(_fill_pattern(pattern, path)))


def _fill_pattern(pattern: str, path: str) -> str:
    """The path of a pattern in which `*` is what the path of the row's own module has there."""
    own = path.split(".")
    return ".".join(own[at] if name == "*" else name for at, name in enumerate(pattern.split(".")))


def _measure_parts(
    parts: Sequence[str | int], table: Mapping[str, Any], transformer: nn.Module, path: str
) -> list[int]:
    """How many inputs of a Linear are of what lies side by side in them.

    Raises:
        ModelError: if these are not all of its inputs: by this config, the model packs them otherwise.
    """
    sizes = [part if isinstance(part, int) else _measure_part(part, table, transformer, path) for part in parts]
    _check_sum(path, "inputs", unwrap_lora_base(transformer.get_submodule(path)).in_features, sizes, transformer)
    return sizes


def _measure_part(part: str, table: Mapping[str, Any], transformer: nn.Module, path: str) -> int:
    """How many features a Linear makes, or those of them that lie side by side with others: `a.to_q`, `a.up/1`."""
    pattern, _, index = part.partition("/")
    made: int = _find_named_linear(pattern, transformer, path).out_features
    kind, *blocks = table[pattern]
    sizes = [*_measure_columns(kind, blocks, transformer, _fill_pattern(pattern, path))]
    return made * sizes[int(index or 0)] // sum(sizes)


def _measure_columns(kind: str, blocks: Sequence[int | str], transformer: nn.Module, path: str) -> Sequence[int]:
    """The outputs of a Linear that lie side by side: how many, or in which proportions.

    Raises:
        ModelError: if those that attributes count are not all of its outputs.
    """
    if not blocks:
        return _find_value_and_gate(kind, transformer, path)
    owner = transformer.get_submodule(path.rpartition(".")[0])
    sizes = [int(vars(owner).get(block, 0)) if isinstance(block, str) else block for block in blocks]
    if isinstance(blocks[0], str):
        _check_sum(path, "outputs", unwrap_lora_base(transformer.get_submodule(path)).out_features, sizes, transformer)
    return sizes


def _check_sum(path: str, what: str, features: Any, sizes: Sequence[int], transformer: nn.Module) -> None:
    """Raises `ModelError` if parts are not all features of a Linear: by this config, the model packs them otherwise."""
    if sum(sizes) != features:
        raise ModelError(
            f"{path} has {features} {what}, and {' + '.join(map(str, sizes))} were expected, so this "
            f"{type(transformer).__name__} packs features otherwise than when its cuts were derived; give "
            "ModelSpec(tensor=...) a table, or use ulysses or ring"
        )


def _find_value_and_gate(kind: str, transformer: nn.Module, path: str) -> Sequence[int]:
    parent = transformer.get_submodule(path.rpartition(".")[0])
    return (1, 1) if kind == "colwise" and isinstance(parent, GEGLU | SwiGLU) else (1,)


def _check_norm_shardable(path: str, module: nn.Module) -> None:
    if not isinstance(module, nn.RMSNorm | RMSNorm):
        raise ModelError(f"{path} is a {type(module).__name__}, and rms_norm is for torch's or diffusers' RMSNorm")


def _check_linear_shardable(path: str, module: nn.Module) -> None:
    base = unwrap_lora_base(module)
    if type(base) is not nn.Linear or type(base.weight) is not nn.Parameter:
        kind = type(base).__name__ if type(base) is not nn.Linear else type(base.weight).__name__
        raise ModelError(f"{path} is a {kind}, and tensor parallelism cuts plain Linears; load it unquantized")
    if base is module:
        return
    lora = isinstance(getattr(module, "lora_A", None), nn.ModuleDict)
    if not lora or getattr(module, "lora_variant", None) or getattr(module, "lora_magnitude_vector", None):
        raise ModelError(
            f"{path} has a {type(module).__module__} adapter, and tensor parallelism cuts plain LoRAs; fuse it into "
            "the weights and unload it first"
        )


def _check_tensor_degree(transformer: nn.Module, styles: Mapping[str, CutStyle], size: int) -> None:
    """Every head and every feature of a block must have its rank."""
    sizes_to_divide: list[tuple[int, str]] = []
    attentions = find_sharded_attentions(transformer, styles)
    for path, attention in attentions.items():
        sizes_to_divide += [(heads, f"heads of {path}") for heads in _list_head_counts(attention)]
    for path, style in styles.items():
        parameter = next(unwrap_lora_base(transformer.get_submodule(path)).parameters(), None)
        if parameter is None:  # a norm without weights follows its heads
            continue
        total = parameter.shape[_DIMS[style.kind]["weight"]]
        if total % sum(style.blocks):
            raise ModelError(f"the {total} features of {path} have no blocks in proportion {list(style.blocks)}")
        sizes_to_divide += [(block, f"features of {path}") for block in style.compute_block_sizes(total)]
    wrong = next(((number, what) for number, what in sizes_to_divide if number % size), None)
    if wrong:
        most = math.gcd(*(number for number, _ in sizes_to_divide))
        legal = ", ".join(str(n) for n in range(1, most + 1) if most % n == 0)
        raise PlanError(f"tensor={size} does not divide the {wrong[0]} {wrong[1]}; try {legal}")
    # After the numbers: keys of one head have a norm as wide as all of their heads, and cannot be cut anyway.
    for path, attention in attentions.items():
        _check_attention_shardable(path, attention, styles)


def _list_head_counts(attention: Any) -> list[int]:
    """Heads of queries, and of keys where they are fewer."""
    heads, *others = read_head_counts(attention)
    inner, keys = getattr(attention, "inner_dim", None), getattr(attention, "inner_kv_dim", None)
    return [heads, keys // (inner // heads)] if inner and keys else [heads, *others]


def _check_attention_shardable(path: str, attention: Any, styles: Mapping[str, CutStyle]) -> None:
    if has_fused_projections(attention):
        raise ModelError(f"{path} has fused projections, and the tensor table names them apart; {UNFUSE}")
    processor = getattr(attention, "processor", None)
    has_weights = isinstance(processor, nn.Module) and next(processor.parameters(), None) is not None
    if has_weights and not isinstance(processor, ADAPTER_PROCESSORS):
        raise ModelError(
            f"{path} has weights in its processor {type(processor).__name__}, which tensor parallelism does not cut; "
            "unload the IP-adapter that brought it"
        )
    columns = [at for at, style in styles.items() if style.kind == "colwise" and at.startswith(f"{path}.")]
    widths = {unwrap_lora_base(attention.get_submodule(at.removeprefix(f"{path}."))).out_features for at in columns}
    for name, norm in attention.named_children():
        of_heads = "norm" in name and {"q", "k"} & set(name.split("_"))
        across = of_heads and read_head_counts(attention)[0] > 1 and _find_norm_width(norm) in widths
        if across and f"{path}.{name}" not in styles:
            raise ModelError(f"{path}.{name} normalises across heads; the tensor table must name it as rms_norm")


def _check_linears_named(transformer: nn.Module, styles: Mapping[str, CutStyle], named: Collection[str]) -> None:
    """What lies beside the projections of heads must be in the table: whole, it would meet this rank's heads."""
    owners = {_find_owner(transformer, path) for path in styles}
    attentions = find_sharded_attentions(transformer, styles)
    for path in owners & attentions.keys():
        attention = attentions[path]
        for name, module in attention.named_children():
            linears = module.named_children() if isinstance(module, nn.ModuleList) else [("", module)]
            for place, linear in linears:
                at = f"{path}.{name}.{place}".rstrip(".")
                is_linear = isinstance(unwrap_lora_base(linear), nn.Linear)
                if is_linear and at not in named and not is_unfused_leftover(attention, name):
                    raise ModelError(
                        f"{at} is not in the tensor table, and the heads beside it are cut, so this config has what "
                        "the one did not have that the table was derived from; use ulysses or ring, or give "
                        "ModelSpec(tensor=...)"
                    )


def _check_blocks_alike(transformer: nn.Module, table: Mapping[str, Any]) -> None:
    """Raises `ModelError` if attention of some blocks lacks what the same of others has, by a table that was derived.

    What such a module makes without a Linear of its own would be this rank's heads alone. A last block may lack those
    behind attention, whose results nobody reads.
    """
    columns = [row for row, given in table.items() if isinstance(given, list | tuple) and given[0] == "colwise"]
    for pattern in columns:
        owner, _, name = pattern.rpartition(".")
        owners = dict(match_modules(transformer, owner)) if owner else {}
        having = [path for path, module in owners.items() if getattr(module, name, None) is not None]
        lacking = [path for path in owners if path not in having]
        if having and lacking:
            raise ModelError(
                f"{lacking[0]} has no {name}, and {having[0]} has, so this config has blocks of another kind than "
                "those that its cuts were derived from; use ulysses or ring, or give ModelSpec(tensor=...)"
            )


def _find_owner(transformer: nn.Module, path: str) -> str:
    """The module that has another as an attribute, or in a list."""
    owner = path.rpartition(".")[0]
    return owner.rpartition(".")[0] if isinstance(transformer.get_submodule(owner), nn.ModuleList) else owner
