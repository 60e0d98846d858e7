"""Kernels: the log-sum-exp is that of the scores, whichever kernel is asked; names are checked before anything runs."""

from __future__ import annotations

import gc
import os
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import AttentionBackendName
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor, FluxIPAdapterAttnProcessor
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import Tensor

from benchmarks.frames import (
    LIMITS,
    MICRO_STEP_LIMIT,
    PLANS,
    FrameCounts,
    count_frames,
    find_attention_frames,
    find_micro_step_frames,
)
from ditile.parallel.attention import kernel
from ditile.parallel.attention.kernel import (
    LSE_ARGUMENTS,
    NATIVE,
    DiffusersKernel,
    choose_fused_kernel,
    choose_kernel,
)
from ditile.parallel.attention.rotary import RotaryEmbedding
from tests.pool import Pool

CPU = torch.device("cpu")


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """By hand, in double."""
    repeat = q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1).transpose(1, 2)


@pytest.mark.parametrize("attention", [NATIVE, DiffusersKernel(None), DiffusersKernel(AttentionBackendName.NATIVE)])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("masked", [False, True])
def test_log_sum_exp(attention: Any, groups: int, masked: bool) -> None:
    """A failure means that ring merges its blocks with the wrong weights."""
    random = torch.Generator().manual_seed(0)
    q = torch.randn(2, 9, 4, 12, generator=random)
    k, v = torch.randn(2, 2, 13, groups, 12, generator=random)
    mask = (torch.rand(2, 1, 1, 13, generator=random) < 0.7) if masked else None
    out, lse = attention.attend_with_lse(q, k, v, mask=mask)
    wanted, wanted_lse = plain(q, k, v, mask)
    assert lse.shape == (2, 9, 4)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(attention(q, k, v, mask=mask).double(), wanted, rtol=1e-5, atol=1e-6)


def test_torchs_own_kernels_are_called_as_they_are_declared() -> None:
    """A failure means a call that fails, or returns something else, on the first GPU that it meets."""
    front = {
        "flash": "query key value",
        "efficient": "query key value attn_bias compute_log_sumexp",
        "cudnn": "query key value attn_bias compute_log_sumexp",
    }
    for name, arguments in front.items():
        schema = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention").default._schema
        assert [argument.name for argument in schema.arguments][: len(arguments.split())] == arguments.split()
        assert "scale" in [argument.name for argument in schema.arguments if argument.kwarg_only]
        assert [returned.name.replace("_", "") for returned in schema.returns][:2] == ["output", "logsumexp"]
    schema = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default._schema
    assert {"attn_mask", "scale"} <= {argument.name for argument in schema.arguments if argument.kwarg_only}


# The functions of the packages that diffusers calls, with their own arguments and results: `[B, N, S]`


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None, with_lse: bool, *rest: Any) -> Any:
    out, lse = NATIVE.attend_with_lse(q, k, v, scale=scale)
    return (out, lse.transpose(1, 2), *rest) if with_lse else out


def flash_2(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    return attend(q, k, v, softmax_scale, return_attn_probs, None)


def flash_3(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False, qv: Any = None,
    q_descale: Any = None, k_descale: Any = None, v_descale: Any = None, window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None,
    deterministic: bool = False, sm_margin: int = 0, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    return attend(q, k, v, softmax_scale, return_attn_probs)


def aiter(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int, int] = (-1, -1, 0), bias: Any = None, alibi_slopes: Any = None,
    deterministic: bool = True, return_lse: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    return attend(q, k, v, softmax_scale, return_lse)


def sage(
    q: Tensor, k: Tensor, v: Tensor, tensor_layout: str = "HND", is_causal: bool = False,
    sm_scale: float | None = None, return_lse: bool = False,
) -> Any:  # fmt: skip
    assert tensor_layout == "NHD"
    return attend(q, k, v, sm_scale, return_lse)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them are installed, and run on CPUs; diffusers' own functions lie around them as ever."""
    for name, fn in {"flash_attn_func": flash_2, "flash_attn_3_func": flash_3, "sageattn": sage}.items():
        monkeypatch.setattr(attention_dispatch, name, fn)
    operator = attention_dispatch._wrapped_flash_attn_3  # of CUDA only
    monkeypatch.setattr(attention_dispatch, "_wrapped_flash_attn_3", getattr(operator, "_init_fn", operator))
    hub = {
        AttentionBackendName.FLASH_HUB: flash_2,
        AttentionBackendName._FLASH_3_HUB: flash_3,
        AttentionBackendName.AITER_FA2_HUB: aiter,
        AttentionBackendName.SAGE_HUB: sage,
    }
    for backend, fn in hub.items():
        monkeypatch.setattr(attention_dispatch._HUB_KERNELS_REGISTRY[backend], "kernel_fn", fn)
    for check in ("_check_attention_backend_requirements", "_maybe_download_kernel_for_backend"):
        monkeypatch.setattr(kernel, check, lambda backend: None)


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("name", LSE_ARGUMENTS)
def test_kernels_of_others_are_asked_for_their_log_sum_exp(name: AttentionBackendName) -> None:
    """A failure means that ring fails in its first step with an offered kernel, or takes heads for tokens."""
    q = torch.randn(1, 5, 2, 4)
    out, lse = choose_kernel(name.value, CPU, torch.float32, lse=True).attend_with_lse(
        q, q[:, :, :1], q[:, :, :1], scale=0.3
    )
    assert lse.shape == (1, 5, 2)
    torch.testing.assert_close((out, lse), NATIVE.attend_with_lse(q, q[:, :, :1], q[:, :, :1], scale=0.3))


@pytest.mark.parametrize(
    ("capability", "dtype", "size", "wanted"),
    [
        ((7, 0), torch.float16, 64, "efficient"),
        ((7, 5), torch.float16, 64, "efficient"),
        ((8, 0), torch.float16, 64, "flash"),
        ((8, 9), torch.bfloat16, 256, "flash"),
        ((12, 0), torch.bfloat16, 264, "efficient"),
        ((9, 0), torch.float32, 64, "efficient"),
    ],
)
def test_flash_is_taken_where_it_runs(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype, size: int, wanted: str
) -> None:
    """A failure means that ring raises on a T4 or a V100, or is slow on later GPUs."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert choose_fused_kernel(torch.device("cuda:0"), dtype, size) == wanted


def make_table(tokens: int = 6, channels: int = 8) -> tuple[Any, Any]:
    random = torch.Generator().manual_seed(0)
    return torch.randn(tokens, channels, generator=random), torch.randn(tokens, channels, generator=random)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("sequence_dim", [1, 2])
@torch.no_grad()
def test_the_bits_are_those_of_diffusers(dtype: torch.dtype, sequence_dim: int) -> None:
    """Two calls with one table, and a part of a wider tensor, as projections that are one product give it."""
    table, rotary = make_table(), RotaryEmbedding()
    shape = (2, 6, 3, 24) if sequence_dim == 1 else (2, 3, 6, 24)
    whole = torch.randn(shape).to(dtype)
    before = whole.clone()
    for part in whole.split(8, dim=-1):
        wanted = apply_rotary_emb(part, table, sequence_dim=sequence_dim)  # type: ignore[arg-type]
        assert torch.equal(rotary.rotate_pairs(part, table, sequence_dim=sequence_dim), wanted)
    assert torch.equal(whole, before), "what is rotated may be read again"


@torch.no_grad()
def test_another_table_is_another_result() -> None:
    """A table that is written into, one with other cosines, and another kind of pairs. None outlives its own."""
    (cos, sin), rotary, x = make_table(), RotaryEmbedding(), torch.randn(1, 6, 3, 8)
    for table, kind in (((cos, sin), -1), ((cos + 1, sin), -1), ((cos, sin.add_(1)), -1), ((cos, sin), -2)):
        wanted = apply_rotary_emb(x, table, True, kind, 1)  # type: ignore[arg-type]
        assert torch.equal(rotary.rotate_pairs(x, table, True, kind, 1), wanted)
    kept = weakref.ref(vars(sin)["_ditile_rotary"].cos)
    del table, cos, sin
    gc.collect()
    assert kept() is None


def test_only_processors_that_call_it_are_copied() -> None:
    """A failure means that a class of diffusers was changed, or that weights of an adapter are copied."""
    rotary, stock = RotaryEmbedding(), FluxAttnProcessor()
    call = FluxAttnProcessor.__call__
    made = rotary.copy_processor(stock)
    assert rotary.is_applied_by(stock) and isinstance(made, FluxAttnProcessor)
    assert type(rotary.copy_processor(stock)) is type(made), "graphs are kept as long as the class is the same"
    assert type(stock) is FluxAttnProcessor and FluxAttnProcessor.__call__ is call
    assert not rotary.is_applied_by(made)
    assert not rotary.is_applied_by(WanAttnProcessor())
    assert not rotary.is_applied_by(FluxIPAdapterAttnProcessor(8, 8))


def count_without_checks(plan: dict[str, Any]) -> FrameCounts:
    """On a rank: what is counted where no ages are asserted."""
    with mock.patch.dict(os.environ, {"DITILE_CHECK": ""}):
        return count_frames(plan)


@pytest.mark.parametrize("name", list(PLANS))
def test_one_attention_and_one_micro_step_stay_within_their_frames(pool: Pool, name: str) -> None:
    """A failure means that something is derived anew in each layer or call, or a closure made, that could be kept."""
    counts = pool.run(count_without_checks, 2, dict(PLANS[name]))
    over = [number for number in map(find_attention_frames, counts) if number > LIMITS[name]]
    if name == "pipefusion" and find_micro_step_frames(counts[0]) > MICRO_STEP_LIMIT:
        over.append(find_micro_step_frames(counts[0]))
    assert not over
