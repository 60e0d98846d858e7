"""What a user put on a model: a plan draws with it what one process draws, or refuses it in the first call.

A failure means another picture, without a word, because a hook or a processor saw a part of the tokens or of the batch.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers.hooks.hooks import HookRegistry, ModelHook
from torch import Tensor, nn
from torch.nn import functional

from ditile.cache.config import DBCacheConfig
from ditile.plan.errors import ModelError, StateError
from ditile.plan.plan import Plan
from ditile.runner.caching import enable_cache
from ditile.runner.runner import parallelize
from ditile.runner.user_code import list_user_code
from tests import tiny
from tests.pool import Pool
from tests.runner.cases import call_of, run
from tests.zoo.own import FrameTransformer, of_own

Change = Callable[[Any], None]
WHOLE = {"pipefusion": 2, "warmup": 99}


def off(tokens: Tensor) -> Tensor:
    """Tokens without their mean."""
    return tokens - tokens.mean(dim=1, keepdim=True)


def hook_of_blocks(pipe: Any) -> None:
    for block in pipe.transformer.transformer_blocks:
        block.register_forward_hook(lambda module, args, out: (out[0], off(out[1])))


def hook_of_norm(pipe: Any) -> None:
    norm = pipe.transformer.transformer_blocks[1].norm1
    norm.register_forward_hook(lambda module, args, out: (off(out[0]), *out[1:]))


def hook_before_block(pipe: Any) -> None:
    def take_first_off(module: nn.Module, args: Any, kwargs: Any) -> Any:
        tokens = kwargs["hidden_states"]
        return args, kwargs | {"hidden_states": tokens - tokens[:, :1]}

    pipe.transformer.single_transformer_blocks[0].register_forward_pre_hook(take_first_off, with_kwargs=True)


def own_forward(pipe: Any) -> None:
    block = pipe.transformer.single_transformer_blocks[1]
    stock = block.forward
    block.forward = types.MethodType(lambda self, **call: tuple(map(off, stock(**call))), block)


def pass_on_between_modules(pipe: Any) -> None:
    """One hook keeps what another one uses."""
    first, second = pipe.transformer.single_transformer_blocks[1:]
    kept: dict[str, Tensor] = {}

    def keep(module: nn.Module, args: Any, out: Tensor) -> None:
        kept["mean"] = out.mean(dim=1, keepdim=True)

    first.proj_mlp.register_forward_hook(keep)
    second.proj_mlp.register_forward_hook(lambda module, args, out: out - kept["mean"])


class TakeOff(ModelHook):
    """A hook of diffusers' kind."""

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return off(output)


def hook_of_diffusers(pipe: Any) -> None:
    feed_forward = pipe.transformer.transformer_blocks[0].ff
    HookRegistry.check_if_exists_or_initialize(feed_forward).register_hook(TakeOff(), "mine")


class TokenNorm(nn.Module):
    """A norm over tokens in place of one over channels."""

    def forward(self, x: Tensor) -> Tensor:
        return off(x)


def another_class(pipe: Any) -> None:
    pipe.transformer.transformer_blocks[0].norm2 = TokenNorm()


OVER_TOKENS: list[Change] = [
    hook_of_blocks, hook_of_norm, hook_before_block, own_forward, pass_on_between_modules, hook_of_diffusers,
    another_class,
]  # fmt: skip


def distance(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).abs().max() / wanted.abs().max())


def call_of_unet() -> dict[str, Any]:
    """Two images, each with its generator and two branches of guidance."""
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    call = {"prompt": ["a red circle", "a blue square"], "generator": generators, "num_inference_steps": 3}
    return call | {"height": 32, "width": 32, "guidance_scale": 3.0, "output_type": "latent"}


MAKE: dict[str, tuple[Callable[[], Any], Callable[[], dict[str, Any]]]] = {
    "flux": (tiny.flux, lambda: call_of("flux")),
    "pixart": (tiny.pixart, lambda: call_of("pixart sigma")),
    "sd3": (tiny.sd3, lambda: call_of("sd3")),
    "unet": (tiny.stable_diffusion, call_of_unet),
}


def drawn(name: str, change: Change, plans: list[dict[str, Any]]) -> list[Any]:
    """On a rank: how far each plan is from the plain pipeline, or how it refuses."""
    make, call = MAKE[name]
    plain = make()
    change(plain)
    wanted = plain(**call()).images
    results: list[Any] = []
    for plan in plans:
        pipe = make()
        change(pipe)
        runner = parallelize(pipe, Plan(**plan))
        try:
            results.append(distance(runner(**call()).images, wanted))
        except ModelError as error:
            results.append(str(error))
    return results


def test_nothing_of_diffusers_is_tried() -> None:
    """A failure means calls of the model that nobody needs, in the first picture."""
    for make, _ in MAKE.values():
        for part in make().components.values():
            assert not isinstance(part, nn.Module) or not list_user_code(part)


@pytest.mark.parametrize("change", OVER_TOKENS, ids=lambda change: change.__name__)
def test_what_needs_all_tokens_is_refused_where_they_are_divided(pool: Pool, change: Change) -> None:
    """1e-5 relative: sums of tensor parallelism come in another order."""
    plans = [{"ulysses": 2}, {"tensor": 2}, WHOLE]
    for divided, *whole in pool.run(drawn, 2, "flux", change, plans):
        assert (
            "tokens change each other outside of attention, and ulysses=2 computes them apart; use a plan of" in divided
        )
        assert all(isinstance(far, float) and far < 1e-5 for far in whole), whole


def noisy() -> None:
    pipe = tiny.flux()
    pipe.transformer.transformer_blocks[0].ff.register_forward_hook(lambda m, args, out: out + torch.randn_like(out))
    with pytest.raises(ModelError, match="blocks.0.ff has the hook .* it uses random numbers, .*; take it off"):
        run(parallelize(pipe, Plan(ulysses=2)), "flux")


def test_noise_that_a_hook_adds_is_refused(pool: Pool) -> None:
    pool.run(noisy, 2)


def scale(pipe: Any) -> None:
    for block in pipe.transformer.transformer_blocks:
        block.register_forward_hook(lambda module, args, out: (out[0] * 1.1, out[1] * 0.9))
        block.attn.register_forward_hook(lambda module, args, out: (out[0] * 0.8, *out[1:]))
        block.norm1.linear.register_forward_pre_hook(lambda module, args: (args[0] + 0.1,))


@pytest.mark.parametrize("name", ["flux", "pixart", "sd3"])
def test_what_is_of_each_token_stays(pool: Pool, name: str) -> None:
    """1e-5 relative: the parts of a sum come in another order."""
    change = scale if name == "flux" else scale_layers
    plans = [{"ulysses": 2}, {"ring": 2}, {"distrifusion": 2, "warmup": 99}, WHOLE]
    for results in pool.run(drawn, 2, name, change, plans):
        assert all(isinstance(far, float) and far < 1e-5 for far in results), results


def scale_layers(pipe: Any) -> None:
    for module in pipe.transformer.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda module, args, out: out * 0.95)


class SharedStyle:
    """Attention in which each image sees the keys of the batch's first one too."""

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, **_: Any
    ) -> Tensor:
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        key, value = attn.to_k(source), attn.to_v(source)
        key, value = (torch.cat([x, x[:1].expand_as(x)], dim=1) for x in (key, value))
        heads = (x.unflatten(2, (attn.heads, -1)).transpose(1, 2) for x in (attn.to_q(hidden_states), key, value))
        out = functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        return attn.to_out[1](attn.to_out[0](out))


class OneStyle(SharedStyle):
    """The same, with the keys of the image itself."""

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, **_: Any
    ) -> Tensor:
        parts = [hidden_states] if encoder_hidden_states is None else [hidden_states, encoder_hidden_states]
        rows = zip(*(part.split(1) for part in parts), strict=True)
        return torch.cat([super(OneStyle, self).__call__(attn, *row) for row in rows])


def set_style(style: type, pipe: Any) -> None:
    for name, module in pipe.unet.named_modules():
        if name.endswith("attn1"):
            module.set_processor(style())


def norm_over_the_batch(pipe: Any) -> None:
    def normalise(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return (out - out.mean(dim=0, keepdim=True)) / (out.std(dim=0, keepdim=True) + 1)

    pipe.unet.conv_in.register_forward_hook(normalise)


def batch_norm(pipe: Any) -> None:
    pipe.unet.conv_norm_out = nn.BatchNorm2d(8, track_running_stats=False)


def same_style(pipe: Any) -> None:
    set_style(SharedStyle, pipe)


def one_style(pipe: Any) -> None:
    set_style(OneStyle, pipe)


BATCH = [{"data": 2}, {"cfg": 2}]


@pytest.mark.parametrize("change", [same_style, norm_over_the_batch, batch_norm], ids=lambda change: change.__name__)
def test_what_mixes_the_batch_is_refused_where_it_is_divided(pool: Pool, change: Change) -> None:
    for images, branches in pool.run(drawn, 2, "unet", change, BATCH):
        assert "images of a batch change each other, and data=2 computes them apart; use data=1" in images
        assert "branches of guidance change each other, and cfg=2 computes them apart; use cfg=1" in branches


def test_a_replica_without_images_tries_when_the_others_do(pool: Pool) -> None:
    """It does not rehearse. A failure is a hang, or another picture; 1e-5 relative as above."""
    plans = [{"data": 2, "patches": 2, "warmup": 99}]
    for results in pool.run(drawn, 2, "flux", scale, plans):
        assert all(isinstance(far, float) and far < 1e-5 for far in results), results


def refused_on_one_rank() -> str:
    """A hook over the batch on rank 0 alone, whose model's weights two ranks share in each of two replicas."""
    pipe = tiny.flux()
    if dist.get_rank() == 0:
        last = pipe.transformer.proj_out
        last.register_forward_hook(lambda module, args, out: out - out.mean(dim=0, keepdim=True))
    runner = parallelize(pipe, Plan(tensor=2, data=2))
    with pytest.raises(ModelError) as refusal:
        runner(**call_of("flux") | {"num_images_per_prompt": 2, "latents": None})
    return str(refusal.value)


def test_ranks_of_one_model_leave_a_trial_together(pool: Pool) -> None:
    """A failure is a hang: one rank has found what it looked for, and the others wait for it in the next call."""
    for refusal in pool.run(refused_on_one_rank, 4):
        assert "images of a batch change each other, and data=2 computes them apart" in refusal


def test_what_is_of_each_row_stays(pool: Pool) -> None:
    """1e-5 relative: matrices of other shapes round otherwise."""
    for results in pool.run(drawn, 2, "unet", one_style, BATCH):
        assert all(isinstance(far, float) and far < 1e-5 for far in results), results


def decoded() -> float:
    """How far pictures of two replicas are from those of one process, with a decoder that mixes them."""
    pictures = []
    for plan in (None, Plan(data=2)):
        pipe = tiny.stable_diffusion()
        pipe.vae.decoder.register_forward_hook(lambda module, args, out: out - out.mean(dim=0, keepdim=True))
        runner = pipe if plan is None else parallelize(pipe, plan)
        pictures.append(runner(**call_of_unet() | {"output_type": "pt"}).images)
    return distance(pictures[1], pictures[0])


def test_what_is_on_a_vae_sees_all_images(pool: Pool) -> None:
    """1e-5 relative: the latents round otherwise."""
    assert max(pool.run(decoded, 2)) < 1e-5


TOTAL = {"calls": 0}


class Counter:
    """Counts in an attribute."""

    def __init__(self) -> None:
        self.calls = 0

    def count(self, *_: Any) -> None:
        self.calls += 1


def counted() -> list[list[int]]:
    """What hooks have counted in a plain call, and in one that is divided: in four ways."""
    found = []
    for plan in (None, Plan(data=2)):
        pipe, counter, calls = tiny.stable_diffusion(), Counter(), [0]

        def count(*_: Any, calls: list[int] = calls) -> None:
            calls[0] += 1
            TOTAL["calls"] += 1

        def forward(self: Any, *args: Any, stock: Any = pipe.unet.forward, **kwargs: Any) -> Any:
            self.made = getattr(self, "made", 0) + 1
            return stock(*args, **kwargs)

        pipe.unet.register_forward_hook(count)
        pipe.unet.conv_in.register_forward_hook(counter.count)
        pipe.unet.forward = types.MethodType(forward, pipe.unet)
        TOTAL["calls"] = 0
        runner = pipe if plan is None else parallelize(pipe, plan)
        runner(**call_of_unet())
        found.append([calls[0], TOTAL["calls"], counter.calls, pipe.unet.made])
    return found


def test_what_counts_calls_counts_those_of_the_pipeline(pool: Pool) -> None:
    """A failure means that a step cache of the user's computes other steps than without a plan."""
    for plain, divided in pool.run(counted, 2):
        assert divided == plain and min(plain) > 0


def set_afterwards() -> None:
    pipe = tiny.flux()
    runner = parallelize(pipe, Plan(ulysses=2))
    before = run(runner, "flux")
    handle = pipe.transformer.transformer_blocks[0].register_forward_hook(lambda m, args, out: (out[0], off(out[1])))
    for _ in range(2):
        with pytest.raises(ModelError, match=r"transformer_blocks\.0 has the hook <lambda>, with which tokens change"):
            run(runner, "flux")
    handle.remove()
    assert torch.equal(torch.as_tensor(run(runner, "flux")), torch.as_tensor(before))


def test_a_hook_that_comes_later_is_tried_too(pool: Pool) -> None:
    pool.run(set_afterwards, 2)


def skip_blocks() -> None:
    for plan in ({"tensor": 2}, WHOLE):
        pipe, kept = tiny.flux(), []
        stock = pipe.transformer.forward

        def forward(self: Any, *args: Any, stock: Any = stock, kept: list[Any] = kept, **kwargs: Any) -> Any:
            kept.append(kept[-1] if len(kept) % 2 else stock(*args, **kwargs))
            return kept[-1]

        pipe.transformer.forward = types.MethodType(forward, pipe.transformer)
        says = "ran 0 blocks .* it must run the same blocks in every call, so use a plan of data or cfg, in"
        with pytest.raises(StateError, match=says):
            run(parallelize(pipe, Plan(**plan)), "flux")


def test_a_forward_that_leaves_blocks_out_is_refused_with_what_works(pool: Pool) -> None:
    pool.run(skip_blocks, 2)


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """What a transformer of the user's returns."""

    sample: Tensor

    def __getitem__(self, index: int) -> Tensor:
        return self.sample


class ObjectTransformer(FrameTransformer):
    """Returns an object."""

    def forward(
        self, hidden_states: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, shift: Tensor | None = None
    ) -> Any:
        return Prediction(super().forward(hidden_states, timestep, encoder_hidden_states, shift)[0])


def own_classes(plan: dict[str, Any], is_cached: bool) -> float:
    entry = of_own("own-objects", ObjectTransformer, num_frames=9)
    pipe, plain = entry.make(), entry.make()
    if is_cached:
        for each in (pipe, plain):
            enable_cache(each, DBCacheConfig(residual_diff_threshold=0.0))
    wanted = plain(**entry.call())[0]
    return distance(parallelize(pipe, Plan(**plan))(**entry.call())[0], wanted)


@pytest.mark.parametrize(("plan", "is_cached"), [({"cfg": 2}, False), ({"ulysses": 2}, False), ({"ulysses": 2}, True)])
def test_transformers_of_ones_own(pool: Pool, plan: dict[str, Any], is_cached: bool) -> None:
    """Guidance of two calls whose results are objects, and a cache that was there before the plan."""
    assert max(pool.run(own_classes, 2, plan, is_cached)) < 1e-5
