"""Models cut by tensor parallelism, without a plan: the plain pipeline runs on every rank of the group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ditile.distributed.mesh import Axis
from ditile.distributed.transport import Traffic
from ditile.model.anatomies import find_anatomy
from ditile.parallel.tensor.collectives import TensorCollectives
from ditile.parallel.tensor.sharding import ShardedTransformer, find_tensor_table, shard_weights
from ditile.plan.layout import pick_even_chunk
from tests import tiny

SCHEMES = ("row", "sequence")
HEADS = 6


def axis() -> Axis:
    """All ranks of the case."""
    ranks = tuple(range(dist.get_world_size()))
    return Axis("tensor", ranks, dist.get_rank(), dist.group.WORLD)


@contextmanager
def sharded(transformer: Any, scheme: str, traffic: Traffic | None = None) -> Iterator[ShardedTransformer]:
    """The model with a share of its weights; with "sequence" its chain of blocks has a share of the tokens."""
    anatomy, traffic = find_anatomy(transformer), traffic or Traffic()
    assert anatomy is not None
    streams = anatomy.token_streams if scheme == "sequence" else None
    table = find_tensor_table(transformer, anatomy.tensor)
    cut = shard_weights(transformer, table, axis(), traffic, sequence=streams, keep=True)
    with _tokens_shared(transformer, cut) if streams else _nothing():
        yield cut
    cut.restore_whole_weights()


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _tokens_shared(transformer: nn.Module, cut: ShardedTransformer) -> Iterator[None]:
    """Cuts the tokens before the first block and gathers those of the image behind the last."""
    anatomy, line = find_anatomy(transformer), axis()
    assert anatomy is not None
    chain = [(block, io) for name, io in anatomy.lists.items() for block in transformer.get_submodule(name).children()]
    (first, io), (last, returns) = chain[0], (chain[-1][0], chain[-1][1].returns)
    exchange = TensorCollectives(line, Traffic())

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        call = dict(zip(("hidden_states",), args, strict=False)) | kwargs
        streams = {"image": "hidden_states", "text": "encoder_hidden_states"}
        for stream in io.returns:
            value = call[streams[stream]]
            setattr(cut.streams, stream, value.shape[1])
            call[streams[stream]] = value[:, _own(value.shape[1], line)]
        return (), call

    def behind(_: nn.Module, __: Any, result: Any) -> Any:
        parts = result if isinstance(result, tuple) else (result,)
        parts = tuple(
            exchange.gather_streams(part, [cut.streams.image]) if name == "image" else part
            for name, part in zip(returns, parts, strict=True)
        )
        return parts if isinstance(result, tuple) else parts[0]

    hooks = first.register_forward_pre_hook(before, with_kwargs=True), last.register_forward_hook(behind)
    yield
    for hook in hooks:
        hook.remove()


def _own(length: int, line: Axis) -> slice:
    mine = pick_even_chunk(range(length), line.num_ranks, line.index)
    return slice(mine.start, mine.stop)


def with_heads(family: str, heads: int = HEADS, **changes: Any) -> Any:
    """The transformer of a family with another number of heads of 8 channels."""
    plain = tiny.FAMILIES[family]().transformer
    changes |= {"num_attention_heads": heads}
    if family == "sd3":
        changes |= {"caption_projection_dim": 8 * heads}
    if family == "pixart":
        changes |= {"cross_attention_dim": 8 * heads}
    torch.manual_seed(0)
    return tiny.randomise(type(plain).from_config({**plain.config, **changes}))


def inputs(family: str, batch: int = 2) -> dict[str, Any]:
    """Arguments of a transformer's forward: 63 tokens of image, 5 of text, a mask where there can be one."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    timestep = torch.full((batch,), 0.6)
    if family == "flux":
        rows, columns = torch.meshgrid(torch.arange(9.0), torch.arange(7.0), indexing="ij")
        ids = torch.stack([torch.zeros(63), rows.flatten(), columns.flatten()], dim=1)
        return {
            "hidden_states": random(batch, 63, 16), "encoder_hidden_states": random(batch, 5, tiny.WIDTH),
            "pooled_projections": random(batch, tiny.WIDTH), "timestep": timestep, "img_ids": ids,
            "txt_ids": torch.zeros(5, 3), "return_dict": False,
        }  # fmt: skip
    call = {"hidden_states": random(batch, 4, 18, 14), "return_dict": False}
    if family == "pixart":
        mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])[:batch]
        kept = {"encoder_attention_mask": mask, "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}
        return call | kept | {"encoder_hidden_states": random(batch, 5, tiny.WIDTH), "timestep": timestep * 1000}
    text = {"encoder_hidden_states": random(batch, 5, 2 * tiny.WIDTH)}
    return call | text | {"pooled_projections": random(batch, 2 * tiny.WIDTH), "timestep": timestep * 1000}


@torch.no_grad()
def forward(transformer: Any, call: dict[str, Any]) -> Tensor:
    """The prediction."""
    out: Tensor = transformer(**call)[0]
    return out
