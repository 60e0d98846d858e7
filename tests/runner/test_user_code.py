"""What a user put on a model: a plan that divides its calls refuses it before the first step, unless it is trusted.

A failure means another picture, without a word, because a hook or a processor saw a part of the tokens or of the batch.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers.hooks.hooks import HookRegistry, ModelHook
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from ditile.plan.errors import ModelError
from ditile.plan.plan import Plan
from ditile.runner.runner import parallelize
from ditile.runner.user_code import explain_code_refusal, list_user_code
from tests import tiny
from tests.pool import Pool, on_ranks
from tests.runner.cases import call_of, measure_error, run

Change = Callable[[Any], None]


def off(tokens: Tensor) -> Tensor:
    """Tokens without their mean."""
    return tokens - tokens.mean(dim=1, keepdim=True)


def hook_of_blocks(pipe: Any) -> None:
    for block in pipe.transformer.transformer_blocks:
        block.register_forward_hook(lambda module, args, out: (out[0], off(out[1])))


def own_forward(pipe: Any) -> None:
    block = pipe.transformer.single_transformer_blocks[1]
    stock = block.forward
    block.forward = types.MethodType(lambda self, **call: tuple(map(off, stock(**call))), block)


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


def processor(pipe: Any) -> None:
    class Mine(FluxAttnProcessor):
        """Attends as diffusers does, to keys that it takes something off."""

    pipe.transformer.transformer_blocks[0].attn.set_processor(Mine())


def batch_norm(pipe: Any) -> None:
    pipe.transformer.proj_out = nn.Sequential(nn.BatchNorm1d(8, track_running_stats=False), pipe.transformer.proj_out)


def hook_on_what_is_compiled(pipe: Any) -> None:
    pipe.transformer = torch.compile(pipe.transformer)
    pipe.transformer.register_forward_hook(lambda module, args, out: (off(out[0]),))


CHANGES: dict[Change, str] = {
    hook_of_blocks: "transformer_blocks.0 has the hook <lambda>",
    own_forward: "single_transformer_blocks.1 has the forward <lambda>",
    hook_of_diffusers: "transformer_blocks.0.ff has the hook TakeOff",
    another_class: "transformer_blocks.0.norm2 has the class TokenNorm",
    processor: "transformer_blocks.0.attn has the attention processor Mine",
    batch_norm: "proj_out.0 has a BatchNorm1d of the statistics of its input",
    hook_on_what_is_compiled: "FluxTransformer2DModel has the hook <lambda>",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_a_user_put_on_a_model_is_found(change: Change) -> None:
    pipe = tiny.flux()
    change(pipe)
    found = explain_code_refusal([pipe.transformer], Plan(ulysses=2), 4)
    assert found is not None and CHANGES[change] in found and "trust_code=True" in found


def test_hooks_and_functions_of_all_modules_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tiny.flux()
    handle = register_module_forward_hook(lambda module, args, out: out)
    assert "has the hook <lambda>" in str(explain_code_refusal([pipe.transformer], Plan(data=2), 4))
    handle.remove()
    monkeypatch.setattr(nn.LayerNorm, "forward", lambda self, x: x)
    assert "has another LayerNorm.forward" in str(explain_code_refusal([pipe.transformer], Plan(data=2), 4))


@pytest.mark.parametrize("make", [tiny.flux, tiny.pixart, tiny.sd3, tiny.stable_diffusion])
def test_nothing_of_diffusers_is_found(make: Callable[[], Any]) -> None:
    """A failure means that a plain pipeline is refused."""
    for part in make().components.values():
        assert not isinstance(part, nn.Module) or not list_user_code(part)


REFUSED: list[dict[str, Any]] = [
    {"ulysses": 2}, {"ring": 2}, {"distrifusion": 2, "warmup": 99}, {"tensor": 2}, {"pipefusion": 2, "warmup": 99},
    {"data": 2},
]  # fmt: skip
"""Also where no step has stale keys: some ranks do not see all tokens, rows, heads or blocks."""


@on_ranks(2)
def test_every_axis_refuses_before_the_first_step() -> None:
    pipe = tiny.flux()
    handles = []
    steps: list[int] = []
    call = call_of("flux") | {"callback_on_step_end": lambda pipe, step, time, values: steps.append(step) or values}
    for plan in REFUSED:
        runner = parallelize(pipe, Plan(**plan), keep_weights=True)
        # After parallelize, and on one rank alone.
        if dist.get_rank() == 0:
            handles.append(pipe.transformer.norm_out.register_forward_hook(lambda module, args, out: off(out)))
        with pytest.raises(ModelError, match="norm_out has the hook <lambda>, which is not diffusers' own code, and"):
            runner(**call)
        for handle in handles:
            handle.remove()
        runner.restore()
    assert not steps


def scale(pipe: Any) -> None:
    for block in pipe.transformer.transformer_blocks:
        block.register_forward_hook(lambda module, args, out: (out[0] * 1.1, out[1] * 0.9))


def trusted() -> list[float]:
    """How far images are, of plans under which a hook is trusted, and of one that divides nothing, from one process."""
    plain = tiny.flux()
    scale(plain)
    expected = torch.as_tensor(run(plain, "flux"))
    distances = []
    for plan in ({"ulysses": 2}, {"tensor": 2}, {"distrifusion": 2, "warmup": 99}):
        pipe = tiny.flux()
        scale(pipe)
        actual = torch.as_tensor(run(parallelize(pipe, Plan(**plan), trust_code=True), "flux"))
        distances.append(measure_error(actual, expected))
    return distances


def test_code_that_is_trusted_is_called_with_parts(pool: Pool) -> None:
    """1e-5 relative: the parts of a sum come in another order."""
    for distances in pool.run(trusted, 2):
        assert max(distances) < 1e-5


def test_one_rank_refuses_only_stale_steps() -> None:
    pipe = tiny.flux()
    scale(pipe)
    expected = torch.as_tensor(run(pipe, "flux"))
    runner = parallelize(pipe, Plan(patches=2, warmup=99))
    assert torch.equal(torch.as_tensor(run(runner, "flux")), expected)
    with pytest.raises(ModelError, match="'patches=2' computes parts of a call apart"):
        run(parallelize(pipe, Plan(patches=2, warmup=1)), "flux")
