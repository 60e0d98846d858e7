"""Tensor parallel equals the plain model on every rank, in both schemes, with LoRAs too."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ditile
from ditile.plan.errors import ModelError, StateError
from ditile.plan.plan import Plan
from ditile.runner.runner import parallelize
from tests import tiny
from tests.pool import Pool, on_ranks
from tests.runner.cases import MAKE, divided, measure_error, run, same
from tests.runner.loras import folder_of, load, write
from tests.zoo import ZOO

SCHEMES: tuple[Literal["row", "sequence"], ...] = ("row", "sequence")
CALL = {"height": 40, "width": 40, "max_sequence_length": 5}
"""100 tokens of image, and 5 of text where it is T5's alone."""


def with_heads(family: str, heads: int, **changes: Any) -> Any:
    """The pipeline of a family, whose transformer has another number of heads of 8 channels."""
    pipe = tiny.FAMILIES[family]()
    plain = pipe.transformer
    changes |= {"num_attention_heads": heads}
    if family == "sd3":
        changes |= {"caption_projection_dim": 8 * heads}
    if family == "pixart":
        changes |= {"cross_attention_dim": 8 * heads}
    torch.manual_seed(0)
    pipe.register_modules(transformer=tiny.randomise(type(plain).from_config({**plain.config, **changes})))
    return pipe


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
    with divided(pipe, tensor=2, split_scheme=scheme) as runner:
        shares = {key: x.shape for key, x in pipe.transformer.named_parameters() if "_ip" in key and "to_" in key}
        assert shares and all(2 * shape[0] == len(whole[key]) for key, shape in shares.items())
        drawn = [torch.as_tensor(runner(**entry.call())[0])]
        pipe.set_ip_adapter_scale(scales)
        drawn.append(torch.as_tensor(runner(**entry.call())[0]))
    assert processor.scale != before
    plain.append(torch.as_tensor(pipe(**entry.call())[0]))
    assert all(torch.equal(x, whole[key]) for key, x in pipe.transformer.state_dict().items())
    assert max(map(measure_error, drawn, plain)) < TOLERANCE < measure_error(*plain)


def draw_divided(family: str, heads: int, changes: dict[str, Any]) -> list[tuple[float, Tensor]]:
    # In fp32 the distance would be what several steps make of rounding.
    pipe, pairs = with_heads(family, heads, **changes).to(torch.float64), []
    plain = run(pipe, family, **CALL)
    for scheme in SCHEMES:
        with divided(pipe, tensor=dist.get_world_size(), split_scheme=scheme) as runner:
            out = run(runner, family, **CALL)
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
    results = pool.run(draw_divided, ranks, family, heads, changes)
    for scheme in range(len(SCHEMES)):
        assert max(result[scheme][0] for result in results) < 1e-10
        assert all(torch.equal(result[scheme][1], results[0][scheme][1]) for result in results), "ranks differ"


@on_ranks(2)
def test_wrong_use_is_refused_and_bf16_stays_bf16() -> None:
    """A failure: a model is cut twice, chunks of tokens are taken for shares, or a sum changes the dtype."""
    pipe, call = tiny.pixart(), {**CALL, "num_inference_steps": 1}
    block = pipe.transformer.transformer_blocks[0]
    plain = run(pipe, "pixart", **call)
    with divided(pipe, tensor=2, split_scheme="sequence") as runner:
        with pytest.raises(StateError, match="has only a share of its weights already"):
            parallelize(pipe, Plan(tensor=2))
        block.set_chunk_feed_forward(1, dim=1)
        with pytest.raises(
            StateError, match=r"blocks\.0\.ff was given 1 tokens of image, and this rank's share of 100 is 50"
        ):
            run(runner, "pixart", **call)
        block.set_chunk_feed_forward(None)
    with divided(pipe.to(torch.bfloat16), tensor=2, split_scheme="sequence") as runner:
        out = run(runner, "pixart", **call)
    assert out.dtype == torch.bfloat16 and measure_error(out.float(), plain) < 0.1


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["flux", "sd3", "pixart"])
@on_ranks(2)
def test_shares_that_are_cast_for_each_use(family: str) -> None:
    """A failure: what a refusal of a model that is cast before advises does not work."""

    def casting(pipe: Any, drawing: Any) -> Any:
        pipe.transformer.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
        return run(drawing, family)

    pipe, pairs = tiny.FAMILIES[family](), []
    plain = casting(pipe, pipe)
    for scheme in SCHEMES:
        pipe = tiny.FAMILIES[family]()
        runner = parallelize(pipe, Plan(tensor=2, split_scheme=scheme))
        pairs.append(measure_error(casting(pipe, runner), plain))
    assert max(pairs) < TOLERANCE


@pytest.mark.nightly
@on_ranks(2)
def test_what_needs_whole_weights_is_refused(tmp_path: Path) -> None:
    """A failure: a LoRA is silently lost with the share that it was fused into, or loaded into a part of the model."""
    folder = folder_of("flux", tmp_path)
    pipe, results = MAKE["flux"](), []
    load("one")(pipe, folder)
    with divided(pipe, tensor=2) as runner:
        pipe.fuse_lora()
        for wrong in (
            runner._parts.sharded.restore_whole_weights,
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
