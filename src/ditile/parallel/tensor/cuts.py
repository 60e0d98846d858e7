"""The share of each parameter that a rank of the tensor axis holds. No weight is read: a model on meta is enough.

A table has the format of diffusers' `_tp_plan`: module pattern (`*` stands for one name) -> "colwise", "rowwise",
`PackedColwiseParallel` or `PackedRowwiseParallel`; and, beyond it, "rms_norm": an RMS norm across all heads.

A derived table names Linears instead of sizes, so that it fits every config of a class:

    ["colwise", 1, 1]               its outputs are blocks in these proportions
    ["colwise", "inner", "hidden"]  its outputs are blocks, with the sizes in these attributes of its owner
    ["rowwise", "a.to_q", "a.up/1"] its inputs match the outputs of a.to_q, then the second block of a.up
    ["rms_norm", "a.to_q"]          a norm across heads, if its channels match the outputs of a.to_q (or of a.qkv/0)
    ["gathered"]                    its outputs, if ranks can share them evenly; they are few, and each rank gets all
    "a:rotary.0": ["heads", 1, "a.to_q"]    dimension 1 of the first tensor of an argument of a counts the heads of
                                            a.to_q, or their features
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from diffusers.hooks.tensor_parallel import PackedColwiseParallel, PackedRowwiseParallel
from diffusers.models.activations import GEGLU, SwiGLU
from diffusers.models.attention_processor import Attention
from diffusers.models.normalization import RMSNorm
from torch import nn

from ditile.model.hooks.attention_processors import UNFUSE, has_fused_projections
from ditile.model.hooks.block_policy import ADAPTER_PROCESSORS
from ditile.model.hooks.overrides import match_modules
from ditile.model.hooks.placeholders import build_meta_model
from ditile.parallel.block_formats import (
    RowBlocks,
    find_row_blocks,
    is_block_linear,
    measure_weight,
)
from ditile.parallel.tensor.ip_adapters import list_adapter_linears
from ditile.plan.errors import ModelError, PlanError
from ditile.plan.layout import count_weighted_shares


class TensorCut(NamedTuple):
    """The part of a tensor that a rank owns: slices along one dim, joined in order.

    It has one slice of each projection that was fused into the tensor.
    """

    dim: int
    pieces: tuple[slice, ...]


class HeadDim(NamedTuple):
    """A dimension of heads, or of the features of all heads, and the sizes that it may have in the whole model."""

    dim: int
    counts: frozenset[int]


SelectShard = Callable[[str, tuple[int, ...]], TensorCut | None]
"""(name, whole shape) -> the part to read; None reads the whole tensor."""


_DIMS: dict[str, dict[str, int]] = {
    "colwise": {"weight": 0, "bias": 0, "lora_B": 0},
    "rowwise": {"weight": 1, "lora_A": 1},
    "rms_norm": {"weight": 0, "bias": 0},
    "gathered": {"weight": 0, "bias": 0, "lora_B": 0},
}
"""The dimension in which a parameter is cut; parameters not listed are whole on every rank."""

_PACKED = {
    PackedColwiseParallel: ("colwise", "_tp_packed_col_blocks"),
    PackedRowwiseParallel: ("rowwise", "_tp_packed_row_blocks"),
}
HEAD_COUNTS = ("heads", "num_heads", "n_heads", "num_attention_heads", "kv_heads", "num_kv_heads")
"""The names that attention modules use for their numbers of heads."""


@dataclass(frozen=True, slots=True)
class CutStyle:
    """How a module is cut.

    Attributes:
        kind: "colwise" (outputs), "rowwise" (inputs), "rms_norm" (channels) or "gathered" (outputs that every rank gets
            from all ranks: those of a modulation, which are few for its many weights).
        blocks: relative sizes of the blocks fused side by side in that dimension; each is cut separately.
    """

    kind: str
    blocks: tuple[int, ...] = (1,)

    def compute_block_sizes(self, total: int) -> list[int]:
        """Compute the sizes of the blocks in a dimension of `total`."""
        return [block * (total // sum(self.blocks)) for block in self.blocks]


@dataclass(frozen=True, slots=True)
class TensorCuts:
    """A table matched with a model, for one rank.

    Attributes:
        styles: module path -> how it is cut.
        index: this rank's place on the tensor axis.
        shares: the share of each rank on the axis, in units that divide every head count and every block of features.
        arguments: path of a block -> (argument, place among its tensors) -> the dimension of heads.
    """

    styles: Mapping[str, CutStyle]
    index: int
    shares: tuple[int, ...]
    arguments: Mapping[str, Mapping[tuple[str, int], HeadDim]] = field(default_factory=dict)

    @classmethod
    def match_tensor_table(
        cls,
        transformer: nn.Module,
        table: Mapping[str, Any],
        index: int,
        size: int,
        *,
        weights: tuple[float, ...] | None = None,
        loaded: tuple[int, ...] = (),
        stored_blocks: Mapping[str, RowBlocks] | None = None,
    ) -> TensorCuts:
        """Match a table with a model.

        Its blocks may be placeholders and its weights may be on the meta device.

        Args:
            transformer, table, index, size: the model, its table, this rank and the number of ranks.
            weights: the share of each rank, in any unit; equal by default.
            loaded: the `shares` of a model of which only this rank's share was read; empty for a whole model.
            stored_blocks: the block formats of weights that a file stores in blocks, by name.

        Raises:
            ModelError: if the table names a module that cannot be cut, or no module of the model.
            PlanError: if `size` does not divide heads or features, or they have too few equal parts for unequal shares.
        """
        module_rows = {pattern: row for pattern, row in table.items() if ":" not in pattern}
        # If two patterns match one module, the later row wins.
        rows: dict[str, Any] = {}
        for pattern, row in module_rows.items():
            for path, _ in match_modules(transformer, pattern):
                rows[path] = row
        styles: dict[str, CutStyle] = {}
        # The structure is built once, and only for a model that needs it.
        build_structure = functools.cache(functools.partial(build_meta_model, transformer))
        for path, row in rows.items():
            style = _read_row(row, module_rows, transformer, path, size, build_structure)
            if style is not None:
                styles[path] = style
        for path in list_adapter_linears(transformer):
            _check_linear_shardable(path, transformer.get_submodule(path))
            styles[path] = CutStyle("colwise")
        if not styles:
            names = ", ".join(module_rows)
            raise ModelError(f"the tensor table of {type(transformer).__name__} names no module that is there: {names}")
        shares = loaded
        if not loaded:
            shares = _divide_units(transformer, styles, size, weights, stored_blocks or {})
            _check_linears_named(transformer, styles, rows)
            _check_blocks_alike(transformer, module_rows)
        return cls(styles, index, shares, _match_argument_rows(table, transformer))

    def locate_share(self, length: int) -> slice:
        """Return this rank's run among `length` heads or features."""
        unit = length // sum(self.shares)
        start = unit * sum(self.shares[: self.index])
        return slice(start, start + unit * self.shares[self.index])

    def measure_own(self, length: int) -> int:
        """Return how many of `length` heads or features this rank has."""
        return length * self.shares[self.index] // sum(self.shares)

    def measure_whole(self, own: int) -> int:
        """Return how many heads or features all ranks have if this rank has `own`."""
        return own * sum(self.shares) // self.shares[self.index]

    def select_shard(self, name: str, shape: Sequence[int]) -> TensorCut | None:
        """Return this rank's part of a parameter of the whole model; None is all of it.

        Args:
            name: the name in the model's `state_dict`, LoRAs included.
            shape: the shape of the whole parameter.
        """
        path, is_lora, adapter = name.partition(".lora_")
        if is_lora:
            leaf = "lora_" + adapter.partition(".")[0]
        else:
            path, _, leaf = name.rpartition(".")
        # peft moves the Linear that a LoRA wraps into this attribute.
        style = self.styles.get(path.removesuffix(".base_layer"))
        if style is None or leaf not in _DIMS[style.kind] or len(self.shares) == 1:
            return None
        dim = _DIMS[style.kind][leaf]
        pieces = []
        start = 0
        for block in style.compute_block_sizes(shape[dim]):
            share = self.locate_share(block)
            pieces.append(slice(start + share.start, start + share.stop))
            start += block
        return TensorCut(dim, tuple(pieces))


def _match_argument_rows(table: Mapping[str, Any], transformer: nn.Module) -> dict[str, dict[tuple[str, int], HeadDim]]:
    """Return the head dimensions of blocks' arguments, from the table's rows about arguments."""
    arguments: dict[str, dict[tuple[str, int], HeadDim]] = {}
    for row_name, row in table.items():
        pattern, is_argument, place = row_name.partition(":")
        if not is_argument:
            continue
        _, dim, linear_pattern = row
        argument, _, leaf = place.rpartition(".")
        for path, _ in match_modules(transformer, pattern):
            linear_path = _fill_pattern(linear_pattern, path)
            owner = transformer.get_submodule(linear_path.rpartition(".")[0])
            counts = {_find_linear(transformer, linear_path).out_features, *read_head_counts(owner)}
            arguments.setdefault(path, {})[argument, int(leaf)] = HeadDim(dim, frozenset(counts))
    return arguments


def read_head_counts(module: nn.Module) -> list[int]:
    """Return the numbers of heads in a module's attributes."""
    values = [vars(module).get(name) for name in HEAD_COUNTS]
    return [value for value in values if isinstance(value, int)]


def find_sharded_attentions(transformer: nn.Module, styles: Mapping[str, CutStyle]) -> dict[str, Any]:
    """Find the attention modules that own cut modules, by path.

    Each is the nearest owner of a cut module that has a number of heads.
    """
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
    """Return the Linear below a LoRA, or the module itself."""
    base = getattr(module, "base_layer", module)
    assert isinstance(base, nn.Module)
    return base


def _read_row(
    row: Any,
    table: Mapping[str, Any],
    transformer: nn.Module,
    path: str,
    size: int,
    build_structure: Callable[[], nn.Module],
) -> CutStyle | None:
    """Return the cut of a module by a row of a table; None if the module stays whole under this config."""
    module = transformer.get_submodule(path)
    blocks: Sequence[int] | None = (1,)
    if isinstance(row, list | tuple):
        kind, *sizes = row
        if kind == "gathered" and unwrap_lora_base(module).out_features % size:  # type: ignore[operator]
            # The ranks cannot split the outputs of this modulation evenly, so every rank has all of it.
            return None
        if kind == "rms_norm":
            # The table was derived from a norm across heads; under this config the norm may be one within each head.
            width = _find_norm_width(module)
            if width is not None and width != _measure_part(sizes[0], table, transformer, path):
                return None
        elif kind != "rowwise":
            blocks = _measure_columns(kind, sizes, transformer, path)
        elif sizes:
            blocks = [_measure_part(part, table, transformer, path) for part in sizes]
            _check_sum(path, "inputs", _find_linear(transformer, path).in_features, blocks, transformer)
    elif type(row) in _PACKED:
        kind, attribute = _PACKED[type(row)]
        blocks = row.blocks or getattr(unwrap_lora_base(module), attribute, None)
        if not blocks and is_block_linear(unwrap_lora_base(module)):
            # The Linear with the attribute may have been replaced by diffusers; a new model still has it.
            blocks = getattr(build_structure().get_submodule(path), attribute, None)
    else:
        kind = row
        blocks = _find_value_and_gate(kind, transformer, path)
    if kind not in _DIMS or not blocks:
        raise ModelError(
            f"{path} cannot be cut as {row!r}; known are {', '.join(_DIMS)}, and diffusers' PackedColwiseParallel "
            "and PackedRowwiseParallel with blocks"
        )
    if kind == "rms_norm":
        if not isinstance(module, nn.RMSNorm | RMSNorm):
            raise ModelError(f"{path} is a {type(module).__name__}, and rms_norm is for torch's or diffusers' RMSNorm")
    else:
        _check_linear_shardable(path, module)
    if "forward" in vars(module) or "forward" in vars(unwrap_lora_base(module)):
        raise ModelError(
            f"the forward of {path} is replaced by a hook, such as one of enable_layerwise_casting, and tensor "
            "parallelism replaces it too; remove the hook, or set it after parallelize, around the share of each rank"
        )
    return CutStyle(kind, tuple(blocks))


def _find_norm_width(norm: Any) -> int | None:
    # torch's RMSNorm has `normalized_shape`, and diffusers' has `dim`, each as a number or a shape.
    shape = getattr(norm, "normalized_shape", getattr(norm, "dim", None))
    if isinstance(shape, tuple | list):
        return int(shape[-1])
    return shape


def _find_linear(transformer: nn.Module, path: str) -> Any:
    return unwrap_lora_base(transformer.get_submodule(path))


def _fill_pattern(pattern: str, path: str) -> str:
    """Fill in the `*` of a pattern from the path of the row's own module."""
    own_names = path.split(".")
    names = pattern.split(".")
    for place, name in enumerate(names):
        if name == "*":
            names[place] = own_names[place]
    return ".".join(names)


def _measure_part(part: str | int, table: Mapping[str, Any], transformer: nn.Module, path: str) -> int:
    """Return the number of features of a Linear (`a.to_q`), or of one of its blocks (`a.up/1`)."""
    if isinstance(part, int):
        return part
    pattern, _, index = part.partition("/")
    linear_path = _fill_pattern(pattern, path)
    features: int = _find_linear(transformer, linear_path).out_features
    kind, *blocks = table[pattern]
    sizes = _measure_columns(kind, blocks, transformer, linear_path)
    return features * sizes[int(index or 0)] // sum(sizes)


def _measure_columns(kind: str, blocks: Sequence[int | str], transformer: nn.Module, path: str) -> Sequence[int]:
    """Return the sizes, or the proportions, of the blocks in a Linear's outputs.

    Raises:
        ModelError: if sizes from attributes do not add up to all outputs of the Linear.
    """
    if not blocks:
        return _find_value_and_gate(kind, transformer, path)
    attributes = vars(transformer.get_submodule(path.rpartition(".")[0]))
    sizes = []
    for block in blocks:
        if isinstance(block, int):
            sizes.append(block)
        else:
            sizes.append(int(attributes.get(block, 0)))
    if isinstance(blocks[0], str):
        _check_sum(path, "outputs", _find_linear(transformer, path).out_features, sizes, transformer)
    return sizes


def _check_sum(path: str, what: str, features: Any, sizes: Sequence[int], transformer: nn.Module) -> None:
    """Raise `ModelError` if parts do not add up to all features of a Linear."""
    if sum(sizes) != features:
        raise ModelError(
            f"{path} has {features} {what}, and {sizes} were expected, so this {type(transformer).__name__} packs "
            "features otherwise than when its cuts were derived; use ulysses or ring"
        )


def _find_value_and_gate(kind: str, transformer: nn.Module, path: str) -> Sequence[int]:
    # diffusers' gated activations make the value and its gate with one Linear.
    parent = transformer.get_submodule(path.rpartition(".")[0])
    if kind == "colwise" and isinstance(parent, GEGLU | SwiGLU):
        return (1, 1)
    return (1,)


def _check_linear_shardable(path: str, module: nn.Module) -> None:
    base = unwrap_lora_base(module)
    # A quantized Linear has another class, or weights of another class.
    unknown = base if type(base) is not nn.Linear else base.weight
    is_cut_in_blocks = is_block_linear(base) or find_row_blocks(unknown) is not None
    if type(unknown) is not nn.Parameter and not is_cut_in_blocks:
        raise ModelError(
            f"{path} is a {type(unknown).__name__}, and tensor parallelism cuts plain Linears; load it unquantized"
        )
    if base is module:
        return
    is_lora = isinstance(getattr(module, "lora_A", None), nn.ModuleDict)
    if not is_lora or getattr(module, "lora_variant", None) or getattr(module, "lora_magnitude_vector", None):
        raise ModelError(
            f"{path} has a {type(module).__module__} adapter, and tensor parallelism cuts plain LoRAs; fuse it into "
            "the weights and unload it first"
        )


def _divide_units(
    transformer: nn.Module,
    styles: Mapping[str, CutStyle],
    size: int,
    weights: tuple[float, ...] | None,
    stored_blocks: Mapping[str, RowBlocks],
) -> tuple[int, ...]:
    """Compute the shares of the ranks.

    Every head and every feature of a block must belong to a rank.
    """
    counts: list[tuple[int, str]] = []
    attentions = find_sharded_attentions(transformer, styles)
    for path, attention in attentions.items():
        heads = read_head_counts(attention)
        query_width = getattr(attention, "inner_dim", None)
        key_width = getattr(attention, "inner_kv_dim", None)
        # The query heads, and the key heads, which may be fewer.
        if query_width and key_width:
            heads = [heads[0], key_width // (query_width // heads[0])]
        counts += [(count, f"heads of {path}") for count in heads]
    for path, style in styles.items():
        parameter = next(_find_linear(transformer, path).parameters(), None)
        if parameter is None:  # a norm without weights follows its heads
            continue
        total = measure_weight(parameter)[_DIMS[style.kind]["weight"]]
        if total % sum(style.blocks):
            raise ModelError(f"the {total} features of {path} have no blocks in proportion {list(style.blocks)}")
        counts += [(block, f"features of {path}") for block in style.compute_block_sizes(total)]
        row_blocks = find_row_blocks(parameter) or stored_blocks.get(f"{path}.weight")
        if row_blocks is not None:
            counts += _count_stored_blocks(path, style, parameter, row_blocks)
    # Heads and features are divided into the same number of equal parts, so that shares of both belong together.
    parts = math.gcd(*(number for number, _ in counts))
    shares = (1,) * size
    if weights is not None and len(set(weights)) > 1:
        shares = count_weighted_shares(parts, weights)
        if not all(shares):
            kind = type(transformer).__name__
            raise PlanError(f"tensor={size}: heads and features of {kind} have {parts} equal parts alike; try {parts}")
    for count, what in counts:
        if count % sum(shares):
            hint = "no other number divides all that is cut; use pipefusion, ulysses or ring"
            if parts > 1:
                hint = f"try {', '.join(str(n) for n in range(1, parts + 1) if parts % n == 0)}"
            raise PlanError(f"tensor={size} does not divide the {count} {what}; {hint}")
    # This follows the checks of numbers: with a single key head the norm is as wide as all of its heads, and cannot be
    # cut anyway.
    for path, attention in attentions.items():
        _check_attention_shardable(path, attention, styles)
    return shares


def _count_stored_blocks(
    path: str, style: CutStyle, weight: nn.Parameter, row_blocks: RowBlocks
) -> list[tuple[int, str]]:
    """Return the number of blocks in each part of a row, and a text for messages.

    The list is empty unless the rows are cut.
    """
    dim = _DIMS[style.kind]["weight"]
    if dim < weight.ndim - 1:
        return []
    counts = []
    for part in style.compute_block_sizes(measure_weight(weight)[dim]):
        blocks, rest = divmod(part, row_blocks.numbers)
        # A part that ends within a block cannot be cut, so it counts as a single block.
        if rest:
            blocks = 1
        counts.append((blocks, f"blocks of {row_blocks.numbers} {row_blocks.name} weights in the rows of {path}"))
    return counts


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
    if read_head_counts(attention)[0] <= 1:
        return
    widths = set()
    for linear_path, style in styles.items():
        if style.kind == "colwise" and linear_path.startswith(f"{path}."):
            widths.add(_find_linear(attention, linear_path.removeprefix(f"{path}.")).out_features)
    for name, norm in attention.named_children():
        is_of_heads = "norm" in name and not {"q", "k"}.isdisjoint(name.split("_"))
        if is_of_heads and _find_norm_width(norm) in widths and f"{path}.{name}" not in styles:
            raise ModelError(f"{path}.{name} normalises across heads; the tensor table must name it as rms_norm")


def _check_linears_named(transformer: nn.Module, styles: Mapping[str, CutStyle], named: Collection[str]) -> None:
    """Raise `ModelError` unless the table has every Linear next to projections of heads.

    A whole Linear there would get only this rank's heads.
    """
    owners = {_find_owner(transformer, path) for path in styles}
    for path, attention in find_sharded_attentions(transformer, styles).items():
        if path not in owners:
            continue
        for name, module in attention.named_children():
            # Older layers keep these after they were unfused.
            if isinstance(attention, Attention) and name in ("to_qkv", "to_kv", "to_added_qkv"):
                continue
            linears = {f"{path}.{name}": module}
            if isinstance(module, nn.ModuleList):
                linears = {f"{path}.{name}.{place}": linear for place, linear in module.named_children()}
            for linear_path, linear in linears.items():
                if isinstance(unwrap_lora_base(linear), nn.Linear) and linear_path not in named:
                    raise ModelError(
                        f"{linear_path} is not in the tensor table, and the heads next to it are cut, so this config "
                        "has a Linear that the config of the table did not have; use ulysses or ring"
                    )


def _check_blocks_alike(transformer: nn.Module, table: Mapping[str, Any]) -> None:
    """Raise `ModelError` if attention lacks a Linear in some blocks, and has it in others. The table is a derived one.

    Without this Linear a module would return only this rank's heads. A last block may lack the Linears after
    attention, whose results are never read.
    """
    for pattern, row in table.items():
        if not isinstance(row, list | tuple) or row[0] != "colwise":
            continue
        owner, _, name = pattern.rpartition(".")
        if not owner:
            continue
        having = None
        lacking = None
        for path, module in match_modules(transformer, owner):
            if getattr(module, name, None) is not None:
                having = having or path
            else:
                lacking = lacking or path
        if having is not None and lacking is not None:
            raise ModelError(
                f"{lacking} has no {name}, and {having} has, so this config has blocks of another kind than "
                "the one that its cuts were derived from; use ulysses or ring"
            )


def _find_owner(transformer: nn.Module, path: str) -> str:
    """Return the path of a module's owner, which has it as an attribute or in a list."""
    owner = path.rpartition(".")[0]
    if isinstance(transformer.get_submodule(owner), nn.ModuleList):
        return owner.rpartition(".")[0]
    return owner
