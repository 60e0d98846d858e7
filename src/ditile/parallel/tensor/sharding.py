"""Tensor parallel: every rank has a share of the heads and of the hidden features of each block (arXiv 1909.08053).

The finished model is edited in place, on the instance, and has plain tensors. A column-parallel Linear keeps the
weights of its share of the outputs. A row-parallel one keeps the weights of its share of the inputs; its results are
summed over the ranks before the bias is added, once. The model's own forward runs; attention has all tokens and its
share of the heads.

There are two schemes. "row": an all-reduce after each row-parallel Linear. "sequence" (arXiv 2205.05198): tokens are
gathered before attention and feed-forward and reduce-scattered after them, and in between, in residuals and norms,
every rank has its share of the tokens. So "sequence" sends as many bytes, with 1/n of the activations in between.

Each of n ranks sends, for p image and t text tokens with h channels and f = 2(n-1)/n, batch and element size apart:

    block                              all-reduces    sent
    self attention + feed-forward      2              2 f h p
    PixArt (with cross attention)      3              3 f h p
    SD3 double (last block)            4 (2)          2 f h (p + t)   (2 f h p)
      with dual attention              1 more         f h p more
    FLUX double, single                4, 1           2 f h (p + t), f h (p + t)
      with IP-adapters                 1 more         f h p more for each double block

"sequence" has twice the calls. A LoRA with rank r that was loaded before adds f r per token of each row-parallel
Linear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial, wraps
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from ditile.distributed.mesh import Axis
from ditile.distributed.transport import Traffic
from ditile.model.hooks.attention_processors import find_attention_processors
from ditile.model.hooks.compile import exclude_from_compile
from ditile.model.hooks.overrides import list_parameter_names, override_attribute
from ditile.model.hooks.protocols import TokenStreams
from ditile.parallel.block_formats import make_parameter_like, measure_weight, take_pieces, unpack_weight
from ditile.parallel.tensor.collectives import TensorCollectives
from ditile.parallel.tensor.cuts import (
    HEAD_COUNTS,
    TensorCuts,
    find_sharded_attentions,
    read_head_counts,
    unwrap_lora_base,
)
from ditile.parallel.tensor.ip_adapters import OUT, FluxShardedAdapterProcessor, list_adapter_linears
from ditile.parallel.tensor.sequence import SharedStreams, install_token_gathers
from ditile.plan.errors import ModelError, StateError

TensorMap = Callable[[Tensor], Tensor]
"""A map from tensor to tensor, such as the sum over the ranks."""
_MARK = "_ditile_tensor"
_HEAD_ATTRIBUTES = (
    *HEAD_COUNTS, "sliceable_head_dim", "inner_dim", "inner_kv_dim", "kv_inner_dim", "mlp_hidden_dim",
)  # fmt: skip
"""Attributes of attention modules that count heads or their channels and are read by processors."""
_REFUSED_OF_PIPE = ("load_lora_weights", "load_ip_adapter")
_REFUSED_OF_MODEL = ("load_lora_adapter", "add_adapter", "_load_ip_adapter_weights", "fuse_qkv_projections")
"""Methods that need whole weights, and are refused while the model has a share of them."""
_LORA_FACTORS = {"gathered": "lora_B", "rowwise": "lora_A"}
"""The factor of a LoRA that needs the sum over all ranks, by the kind of cut of its Linear."""


class ShardedTransformer:
    """A transformer with this rank's share of the weights.

    Attributes:
        cuts: the cuts of its parameters; a loader asks `select_shard`.
        streams: which tokens this rank has between the Linears.
        edits: the changes that `restore_whole_weights` undoes.
    """

    def __init__(self, cuts: TensorCuts, *, keep: bool) -> None:
        self.cuts = cuts
        self.edits = ExitStack()
        self.streams: TokenStreams = TokenStreams()
        self.select_shard = cuts.select_shard
        self._keep = keep
        self._fused: list[tuple[str, Any, list[str]]] = []
        self._sums: dict[str, TensorMap] = {}

    def join_share(self, other: ShardedTransformer) -> None:
        """Let `restore_whole_weights` restore another model of the pipeline together with this one."""
        self._fused += other._fused
        self.edits.push(other.edits)

    def guard_pipeline_loaders(self, pipe: Any) -> None:
        """Make a pipeline refuse to load anything that needs whole weights, before it has touched anything."""
        _refuse_methods(self.edits, pipe, _REFUSED_OF_PIPE)

    def lift_lora_guards(self, stack: ExitStack, pipe: Any, transformer: nn.Module) -> None:
        """Let a pipeline load LoRAs until the stack is closed; their factors are cut like this share.

        Raises:
            ModelError: if ranks split the tokens between Linears, because LoRAs around these would not see all tokens.
        """
        if isinstance(self.streams, SharedStreams):
            raise ModelError(
                "split_scheme=sequence gathers tokens within Linears, where a LoRA that is loaded later does not see "
                "them; load it before parallelize, or use split_scheme=row"
            )
        for owner, name in ((pipe, "load_lora_weights"), (transformer, "load_lora_adapter")):
            guard = vars(owner).get(name)
            # A pipeline of another class on the same model, or one that was wrapped later, does not have our guard.
            if isinstance(guard, partial) and guard.func is _refuse_method:
                override_attribute(stack, owner, name, guard.keywords["stock"])

    def cut_lora_factor(self, name: str, factor: Tensor) -> Tensor:
        """Return this rank's part of a LoRA factor, by its name in the model.

        Raises:
            ModelError: if the factor does not belong to a plain LoRA.
        """
        path, _, leaf = name.rpartition(".lora_")
        is_plain_factor = leaf.partition(".")[0] in ("A", "B")
        if path.removesuffix(".base_layer") in self.cuts.styles and not is_plain_factor:
            raise ModelError(f"{name} is none of a plain LoRA, and tensor parallelism cuts only these; load it before")
        cut = self.cuts.select_shard(name, factor.shape)
        return factor if cut is None else take_pieces(factor, *cut)

    def sum_loras_over_ranks(self, transformer: nn.Module) -> None:
        """Make the LoRAs loaded since the cut sum over the ranks like the Linears below them."""
        for path, style in self.cuts.styles.items():
            for linear in _list_summing_loras(transformer.get_submodule(path), style.kind):
                if "forward" not in vars(linear):
                    # The forward is dropped with the LoRA, so nothing needs to undo it.
                    vars(linear)["forward"] = _make_sum(linear, style.kind, self.cuts, self._sums[path])

    def restore_whole_weights(self) -> None:
        """Put the whole weights back, bit for bit, and remove the guards from a pipeline.

        Raises:
            StateError: if they were not kept, or if a LoRA has since been fused into the share or out of it.
        """
        if not self._keep:
            raise StateError(
                "the whole weights were not kept, so tensor parallelism cannot be undone; reload the model"
            )
        for path, module, fused in self._fused:
            if module.merged_adapters != fused:
                raise StateError(
                    f"LoRAs {module.merged_adapters} are fused into this rank's share of {path}, and {fused} were when "
                    "it was cut, so the whole is not known; fuse or unfuse them as they were, or reload the model"
                )
        self.edits.close()
        self._fused.clear()


def find_share(transformer: nn.Module) -> ShardedTransformer | None:
    """Return this rank's share of a model's weights; None if the model is whole."""
    share: ShardedTransformer | None = vars(transformer).get(_MARK)
    return share


def find_tensor_table(transformer: nn.Module, row: Mapping[str, Any] = MappingProxyType({})) -> Mapping[str, Any]:
    """Return the tensor table of a model: that of its row, or diffusers' own.

    Raises:
        ModelError: if the model has no table.
    """
    table: Mapping[str, Any] | None = row or getattr(transformer, "_tp_plan", None)
    if not table:
        lack = f"its attention needs its number of heads as an attribute ({', '.join(HEAD_COUNTS)})"
        if any(read_head_counts(module) for module in transformer.modules()):
            lack = (
                "its attention has its number of heads, so what may be missing is the width of a head as an attribute "
                "(head_dim): the width of the input over the heads is not that of a rank with some of the heads"
            )
        raise ModelError(
            f"{type(transformer).__name__} has no tensor table, and none was derived that two ranks prove: {lack}; or "
            "give its class a _tp_plan, in the format of diffusers', or use ulysses or ring"
        )
    return table


def shard_weights(
    transformer: nn.Module,
    table: Mapping[str, Any],
    axis: Axis,
    traffic: Traffic,
    *,
    sequence: Mapping[str, Mapping[str, str]] | None = None,
    weights: tuple[float, ...] | None = None,
    loaded: tuple[int, ...] = (),
    keep: bool = False,
    sum_over_ranks: TensorMap | None = None,
) -> ShardedTransformer:
    """Leave this rank its share of a model's weights, and make the model sum over the ranks.

    Args:
        transformer: the model, on any device, meta included; its LoRAs are cut too.
        table: which Linears are cut and how (`Anatomy.tensor`).
        axis, traffic: the ranks that share the weights, and the counter of their bytes, under "tensor".
        sequence: where tokens are gathered and scattered (`Anatomy.token_streams`) for "sequence"; None for "row".
        weights: the share of each rank, in any unit; equal by default.
        loaded: the `shares` of `TensorCuts` by which only this rank's share was read; empty if all weights were read.
        keep: whether the whole weights are kept aside, for `restore_whole_weights`.
        sum_over_ranks: how ranks sum for "row"; by default with messages.

    Raises:
        ModelError: if the model has a module that cannot be cut.
        PlanError: if the degree does not divide its heads or features; the message names degrees that do.
        StateError: if it is cut already.
    """
    check_unsharded(transformer, sequence)
    # A model that cannot be cut is refused before anything is changed.
    cuts = TensorCuts.match_tensor_table(transformer, table, axis.index, axis.num_ranks, weights=weights, loaded=loaded)
    sharded = ShardedTransformer(cuts, keep=keep)
    if axis.num_ranks == 1:
        return sharded
    collectives = TensorCollectives(axis, traffic)
    if sum_over_ranks is None:
        sum_over_ranks = collectives.sum_over_ranks
    with ExitStack() as stack:
        scatters: Mapping[str, TensorMap] = {}
        if sequence is not None:
            sharded.streams = streams = SharedStreams(axis, collectives)
            scatters = install_token_gathers(stack, transformer, cuts, sequence, streams)
        _divide_head_counts(stack, transformer, cuts)
        # Adapters are read whole even if the other weights were read as a share: they are not in the model's files.
        adapters = list_adapter_linears(transformer)
        for path, style in cuts.styles.items():
            module: Any = transformer.get_submodule(path)
            over_ranks = exclude_from_compile(scatters.get(path, sum_over_ranks))
            sharded._sums[path] = over_ranks
            _install_sums(stack, module, style.kind, cuts, over_ranks)
            # Note the LoRAs that are fused into the whole weight.
            if unwrap_lora_base(module) is not module:
                sharded._fused.append((path, module, list(module.merged_adapters)))
            _cut_module(stack, path, module, cuts, is_whole=not loaded or path in adapters, keep=keep)
        # FLUX.1's IP-adapters gather the heads of all ranks. This is a list, because the loop replaces the processors.
        for path, attention, processor in list(find_attention_processors(transformer)):
            if isinstance(processor, FluxIPAdapterAttnProcessor):
                gather = partial(_gather_features, cuts, sharded._sums[f"{path}.{OUT}"])
                override_attribute(stack, attention, "processor", FluxShardedAdapterProcessor(processor, gather))
        for path in cuts.arguments:
            _cut_arguments(stack, path, transformer.get_submodule(path), cuts)
        _refuse_methods(stack, transformer, _REFUSED_OF_MODEL)
        override_attribute(stack, transformer, _MARK, sharded)
        sharded.edits = stack.pop_all()
    return sharded


def check_unsharded(transformer: nn.Module, sequence: Mapping[str, Mapping[str, str]] | None) -> None:
    """Raise `StateError` if a model is cut already, and `ModelError` if "sequence" has no table of its streams."""
    kind = type(transformer).__name__
    if find_share(transformer) is not None:
        raise StateError(f"this {kind} has only a share of its weights already; undo that, or reload it")
    if sequence is not None and not sequence:
        raise ModelError(f"{kind} has no table of its token streams for split_scheme=sequence; use row")


def _cut_module(
    stack: ExitStack, path: str, module: nn.Module, cuts: TensorCuts, *, is_whole: bool, keep: bool
) -> None:
    """Cut the parameters of a Linear, of the LoRAs around it, or of a norm, and set the sizes to those of the share."""
    for name, owner in list(module.named_modules()):
        for leaf, parameter in list(owner._parameters.items()):
            if parameter is None or not is_whole:
                continue
            cut = cuts.select_shard(f"{path}.{name}.{leaf}".replace("..", "."), measure_weight(parameter))
            if cut is None:
                continue
            share = take_pieces(parameter.detach(), *cut)
            owner._parameters[leaf] = make_parameter_like(parameter, share)
            if keep:
                stack.callback(owner._parameters.__setitem__, leaf, parameter)
    for owner in module.modules():
        # peft's layer repeats the sizes of its base, which is cut by now.
        linear: Any = unwrap_lora_base(module) if owner is module else owner
        if isinstance(linear, nn.Linear):
            out_features, in_features = measure_weight(linear.weight)
            override_attribute(stack, owner, "out_features", out_features)
            override_attribute(stack, owner, "in_features", in_features)


def _divide_head_counts(stack: ExitStack, transformer: nn.Module, cuts: TensorCuts) -> None:
    owners = dict(find_sharded_attentions(transformer, cuts.styles))
    for path, style in cuts.styles.items():
        if len(style.blocks) > 1:
            # The owner splits the output of its fused Linear by sizes in its attributes.
            owner = path.rpartition(".")[0]
            owners[owner] = transformer.get_submodule(owner)
    for module in owners.values():
        for name in _HEAD_ATTRIBUTES:
            value = vars(module).get(name)
            if isinstance(value, int):
                override_attribute(stack, module, name, cuts.measure_own(value))


def _cut_arguments(stack: ExitStack, path: str, block: nn.Module, cuts: TensorCuts) -> None:
    """Make a block's forward cut its arguments to this rank's share, along their dimension of heads or features."""
    names = list_parameter_names(block)
    forward = block.forward
    places = cuts.arguments[path]

    def cut_leaves(name: str, value: Any) -> Any:
        leaves, structure = pytree.tree_flatten(value)
        for index, leaf in enumerate(leaves):
            place = places.get((name, index))
            if place is None or not isinstance(leaf, Tensor):
                continue
            dim, counts = place
            if dim >= leaf.ndim or leaf.shape[dim] not in counts:
                raise StateError(
                    f"{path} was given a {name} of shape {list(leaf.shape)}, whose dimension {dim} counts neither "
                    "heads nor features; use a plan without tensor"
                )
            share = cuts.locate_share(leaf.shape[dim])
            leaves[index] = leaf.narrow(dim, share.start, share.stop - share.start)
        return pytree.tree_unflatten(leaves, structure)

    @wraps(forward)
    def forward_with_share(*args: Any, **kwargs: Any) -> Any:
        own_args = [cut_leaves(name, value) for name, value in zip(names, args, strict=False)]
        own_kwargs = {name: cut_leaves(name, value) for name, value in kwargs.items()}
        return forward(*own_args, *args[len(own_args) :], **own_kwargs)

    override_attribute(stack, block, "forward", forward_with_share)


def _install_sums(
    stack: ExitStack,
    module: nn.Module,
    kind: str,
    cuts: TensorCuts,
    over_ranks: TensorMap,
) -> None:
    """Make a norm or Linear sum over the ranks if its kind needs it."""
    if kind == "rms_norm":
        override_attribute(stack, module, "forward", partial(_norm_across_ranks, module, cuts, over_ranks))
    if kind in _LORA_FACTORS:
        # The LoRAs around a Linear sum their own outputs, so that they may be removed later.
        for linear in (unwrap_lora_base(module), *_list_summing_loras(module, kind)):
            override_attribute(stack, linear, "forward", _make_sum(linear, kind, cuts, over_ranks))


def _list_summing_loras(module: nn.Module, kind: str) -> Iterable[nn.Module]:
    """List the LoRA factors around a Linear that need the sum over all ranks, like the Linear."""
    return getattr(module, _LORA_FACTORS.get(kind, ""), nn.ModuleDict()).values()


def _make_sum(
    linear: nn.Module,
    kind: str,
    cuts: TensorCuts,
    over_ranks: TensorMap,
) -> TensorMap:
    if kind == "gathered":
        return partial(_multiply_and_gather, linear, cuts, over_ranks)
    return partial(_multiply_and_sum, linear, over_ranks)


def _multiply_and_sum(linear: Any, over_ranks: TensorMap, x: Tensor) -> Tensor:
    """Compute a row-parallel Linear."""
    out = over_ranks(functional.linear(x, unpack_weight(linear)))
    # The bias is added after the sum; otherwise it would be added once for each rank.
    return out if linear.bias is None else out.add_(linear.bias)


def _multiply_and_gather(linear: Any, cuts: TensorCuts, over_ranks: TensorMap, x: Tensor) -> Tensor:
    """Compute a Linear whose outputs are shared among the ranks, and give every rank all outputs.

    A sum with zeros gathers them exactly.
    """
    return _gather_features(cuts, over_ranks, functional.linear(x, unpack_weight(linear), linear.bias))


def _gather_features(cuts: TensorCuts, over_ranks: TensorMap, share: Tensor) -> Tensor:
    width = cuts.measure_whole(share.shape[-1])
    out = share.new_zeros(*share.shape[:-1], width)
    out[..., cuts.locate_share(width)] = share
    return over_ranks(out)


def _norm_across_ranks(norm: Any, cuts: TensorCuts, over_ranks: TensorMap, x: Tensor) -> Tensor:
    """Compute an RMS norm over channels on all ranks, by summing their squares over the ranks."""
    # The dtypes are those of diffusers' RMSNorm, so that results are the same.
    wide = x.float()
    sum_of_squares = over_ranks(wide.square().sum(-1, keepdim=True))
    mean_of_squares = sum_of_squares / cuts.measure_whole(x.shape[-1])
    eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
    out = wide * torch.rsqrt(mean_of_squares + eps)
    if norm.weight is None:
        return out.to(x.dtype)
    out = out * norm.weight
    bias = getattr(norm, "bias", None)
    if bias is not None:
        out = out + bias
    return out.to(norm.weight.dtype)  # type: ignore[no-any-return]


def _refuse_methods(stack: ExitStack, owner: Any, names: Sequence[str]) -> None:
    """Make an object refuse the methods that need whole weights."""
    for name in names:
        if hasattr(owner, name):
            refuse = partial(_refuse_method, f"{type(owner).__name__}.{name}", stock=getattr(owner, name))
            override_attribute(stack, owner, name, refuse)


def _refuse_method(name: str, *_: Any, **__: Any) -> NoReturn:
    instead = ", or use ditile.load_lora" if name.endswith("load_lora_weights") else ""
    raise StateError(
        f"{name} needs whole weights, and this rank has a share of them; do it before the model is divided with tensor "
        f"parallelism{instead}"
    )
