"""Tensor parallel equals the plain model on every rank, in both schemes, with LoRAs too.

Models are cut without a plan: the plain pipeline runs on every rank of the group.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ditile
from ditile.distributed.mesh import Axis
from ditile.distributed.transport import Traffic
from ditile.model.anatomies import find_anatomy
from ditile.parallel.tensor.collectives import TensorCollectives
from ditile.parallel.tensor.sharding import ShardedTransformer, find_tensor_table, shard_weights
from ditile.plan.errors import ModelError, StateError
from ditile.plan.layout import pick_even_chunk
from ditile.plan.plan import Plan
from ditile.runner.runner import parallelize
from tests import tiny
from tests.pool import Pool, on_ranks
from tests.runner.cases import MAKE, measure_error, run, same
from tests.runner.loras import folder_of, load, write
from tests.zoo import ZOO

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


TOLERANCE = 1e-5  # sums over ranks are in another order than sums within a matrix product


@pytest.mark.nightly
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["flux-ip-adapter", "stable-diffusion-3-ip-adapter"])
@on_ranks(2)
def test_ip_adapters(name: str, scheme: str) -> None:
    """A failure: what an adapter adds is of this rank's heads alone, or a scale that is set later does not count."""
    pipe, entry = ZOO[name].make(), ZOO[name]
    scales = [0.3] * 2 if name.startswith("flux") else 0.3
    processor = next(iter(pipe.transformer.attn_processors.values()))
    before = processor.scale
    plain = [torch.as_tensor(pipe(**entry.call())[0])]
    whole = {key: x.clone() for key, x in pipe.transformer.state_dict().items()}
    with sharded(pipe.transformer, scheme):
        shares = {key: x.shape for key, x in pipe.transformer.state_dict().items() if "_ip" in key and "to_" in key}
        assert shares and all(2 * shape[0] == len(whole[key]) for key, shape in shares.items())
        drawn = [torch.as_tensor(pipe(**entry.call())[0])]
        pipe.set_ip_adapter_scale(scales)
        drawn.append(torch.as_tensor(pipe(**entry.call())[0]))
    assert processor.scale != before
    plain.append(torch.as_tensor(pipe(**entry.call())[0]))
    assert all(torch.equal(x, whole[key]) for key, x in pipe.transformer.state_dict().items())
    assert max(map(measure_error, drawn, plain)) < TOLERANCE < measure_error(*plain)


def divided_forward(family: str, heads: int, changes: dict[str, Any]) -> list[tuple[float, Tensor]]:
    transformer, call, pairs = with_heads(family, heads, **changes), inputs(family), []
    plain = forward(transformer, call)
    for scheme in SCHEMES:
        with sharded(transformer, scheme):
            out = forward(transformer, call)
        pairs.append((measure_error(out, plain), out))
    return pairs


@pytest.mark.parametrize(
    ("family", "heads", "ranks", "changes"),
    [
        ("flux", 6, 3, {}),
        ("pixart", 6, 3, {}),
        ("sd3", 6, 3, {}),
        ("pixart", 4, 4, {"activation_fn": "geglu"}),  # value and gate are one Linear
        ("sd3", 4, 2, {"dual_attention_layers": [], "qk_norm": None}),
        ("flux", 8, 8, {"guidance_embeds": False}),  # five tokens of text: three ranks have none
    ],
)
def test_a_transformer_predicts_the_same(
    pool: Pool, family: str, heads: int, ranks: int, changes: dict[str, Any]
) -> None:
    """A failure: heads or hidden features of another rank are read, or uneven shares of tokens are mixed up."""
    results = pool.run(divided_forward, ranks, family, heads, changes)
    for scheme in range(len(SCHEMES)):
        assert max(result[scheme][0] for result in results) < TOLERANCE
        assert all(torch.equal(result[scheme][1], results[0][scheme][1]) for result in results), "ranks differ"


def _chunked(transformer: Any, call: dict[str, Any]) -> Any:
    def run() -> None:
        transformer.transformer_blocks[0].set_chunk_feed_forward(1, dim=1)
        forward(transformer, call)

    return run


def _half(call: dict[str, Any]) -> dict[str, Any]:
    return {k: v.bfloat16() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in call.items()}


@on_ranks(2)
def test_wrong_use_is_refused_and_bf16_stays_bf16() -> None:
    """A failure: a model is cut twice, chunks of tokens are taken for shares, or a sum changes the dtype."""
    transformer, call, pairs = with_heads("pixart", 4), inputs("pixart"), []
    with sharded(transformer, "sequence"):
        for wrong in (lambda: sharded(transformer, "row").__enter__(), _chunked(transformer, call)):
            with pytest.raises(StateError) as caught:
                wrong()
            pairs.append(str(caught.value))
    transformer.transformer_blocks[0].set_chunk_feed_forward(None)
    plain = forward(transformer, call)
    with sharded(transformer.to(torch.bfloat16), "sequence"):
        out = forward(transformer, _half(call))
    (twice, chunks), dtype, difference = pairs, out.dtype, measure_error(out.float(), plain)
    assert "has only a share of its weights already" in twice
    assert "transformer_blocks.0.ff was given 1 tokens of image, and this rank's share of 63 is 3" in chunks
    assert dtype == torch.bfloat16 and difference < 0.1


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["flux", "sd3", "pixart"])
@on_ranks(2)
def test_shares_that_are_cast_for_each_use(family: str) -> None:
    """A failure: what a refusal of a model that is cast before advises does not work."""

    def casting(pipe: Any) -> Any:
        pipe.transformer.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
        return pipe(**tiny.arguments(family)).images

    plain, pairs = casting(tiny.FAMILIES[family]()), []
    for scheme in SCHEMES:
        pipe = tiny.FAMILIES[family]()
        with sharded(pipe.transformer, scheme):
            pairs.append(measure_error(casting(pipe), plain))
    assert max(pairs) < TOLERANCE


@pytest.mark.nightly
@on_ranks(2)
def test_what_needs_whole_weights_is_refused(tmp_path: Path) -> None:
    """A failure: a LoRA is silently lost with the share that it was fused into, or loaded into a part of the model."""
    folder = folder_of("flux", tmp_path)
    pipe, results = MAKE["flux"](), []
    load("one")(pipe, folder)
    with sharded(pipe.transformer, "row") as cut:
        cut.guard_pipeline_loaders(pipe)
        pipe.fuse_lora()
        for wrong in (
            cut.restore_whole_weights,
            lambda: load("two")(pipe, folder),
            lambda: pipe.transformer.load_lora_adapter({}),
        ):
            with pytest.raises(StateError) as caught:
                wrong()
            results.append(str(caught.value))
        pipe.unfuse_lora()
    load("two")(pipe, folder)
    fused, loaded, adapter = results
    assert "are fused into this rank's share of transformer_blocks.0.attn.to_q, and [] were when it" in fused
    assert "FluxPipeline.load_lora_weights needs whole weights" in loaded and "before the model is divided" in loaded
    assert "FluxTransformer2DModel.load_lora_adapter needs whole weights" in adapter


PLAN = Plan(tensor=2, tensor_weights=(1, 3))


def into_a_share(model: Path, loras: Path) -> tuple[list[str], Tensor]:
    """What is said to LoRAs before `parallelize`, and the picture of a pipeline that was loaded whole.

    That of one that was loaded for the plan, into which the LoRA is loaded after it, is the same.
    """
    pipe, said = tiny.quiet(ditile.load(str(model), plan=PLAN)), []
    for adapter in ("one", "narrow"):
        with pytest.raises(ModelError) as caught:
            ditile.load_lora(pipe, loras, weight_name=f"{adapter}.safetensors", adapter_name=adapter)
        said.append(str(caught.value))
    assert not hasattr(pipe.transformer, "peft_config"), "it was touched"
    runner = parallelize(pipe, PLAN)
    whole: Any = tiny.quiet(ditile.load(str(model)))
    ditile.load_lora(whole, loras, weight_name="one.safetensors", adapter_name="one")
    picture = run(parallelize(whole, PLAN), "flux")
    ditile.load_lora(pipe, loras, weight_name="one.safetensors", adapter_name="one")
    same(run(runner, "flux"), picture, "loaded after parallelize")
    return said, picture


@pytest.mark.nightly
def test_a_pipeline_that_was_loaded_for_the_plan_takes_loras_after_the_cut(pool: Pool, tmp_path: Path) -> None:
    """A failure: a traceback from inside another library or, of the narrow one, a weight that zeros were added to."""
    plain = MAKE["flux"]()
    plain.save_pretrained(tmp_path / "model")
    write("flux", tmp_path, "one", 1)
    write("flux", tmp_path, "narrow", 3, within="single_transformer_blocks.0.proj_out")
    load("one")(plain, tmp_path)
    wanted = run(plain, "flux")
    for said, picture in pool.run(into_a_share, 2, tmp_path / "model", tmp_path):
        for line in said:
            assert "of this FluxTransformer2DModel only a share of tensor=2 was loaded" in line
            assert "call parallelize, and load the LoRA into its runner's pipeline" in line
        assert measure_error(picture, wanted) < TOLERANCE
