"""Kernels: the log-sum-exp is that of the scores, whichever kernel is asked; names are checked before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName
from torch import Tensor

from ditile.attend import dispatch
from ditile.attend.kernel import ATEN, FOREIGN, NATIVE, Dispatched, chosen
from ditile.errors import ModelError

CPU = torch.device("cpu")


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """By hand, in double."""
    repeat = q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1).transpose(1, 2)


@pytest.mark.parametrize("kernel", [NATIVE, Dispatched(None), Dispatched(AttentionBackendName.NATIVE)])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("masked", [False, True])
def test_log_sum_exp(kernel: Any, groups: int, masked: bool) -> None:
    """A failure means that ring merges its blocks with the wrong weights."""
    random = torch.Generator().manual_seed(0)
    q = torch.randn(2, 9, 4, 12, generator=random)
    k, v = torch.randn(2, 2, 13, groups, 12, generator=random)
    mask = (torch.rand(2, 1, 1, 13, generator=random) < 0.7) if masked else None
    out, lse = kernel.with_lse(q, k, v, mask=mask)
    wanted, wanted_lse = plain(q, k, v, mask)
    assert lse.shape == (2, 9, 4)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(kernel(q, k, v, mask=mask).double(), wanted, rtol=1e-5, atol=1e-6)


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


def test_kernels_of_others_are_asked_for_their_log_sum_exp(monkeypatch: pytest.MonkeyPatch) -> None:
    """They give `[B, N, S]` for q in `[B, S, N, H]`. A failure means that heads are taken for tokens."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as registry

    q = torch.randn(1, 5, 2, 4)

    def flash(query: Tensor, key: Tensor, value: Tensor, scale: Any, return_lse: bool) -> tuple[Tensor, Tensor]:
        out, lse = NATIVE.with_lse(query, key, value, scale=scale)
        return out, lse.transpose(1, 2)

    for name in FOREIGN:
        monkeypatch.setitem(registry._backends, name, flash)
        out, lse = Dispatched(name).with_lse(q, q[:, :, :1], q[:, :, :1])
        assert lse.shape == (1, 5, 2)
        torch.testing.assert_close((out, lse), NATIVE.with_lse(q, q[:, :, :1], q[:, :, :1]))


def test_a_kernel_without_log_sum_exp_is_refused() -> None:
    """A failure means that ring divides by what it does not know."""
    with pytest.raises(ModelError, match=r"_native_math gives no log-sum-exp.*try native"):
        chosen("_native_math", CPU, torch.float32, lse=True)
    assert AttentionBackendName._NATIVE_MATH not in (*ATEN, *FOREIGN)


@pytest.mark.parametrize(
    ("name", "words"),
    [("nativ", ("'nativ'", "native", "sage")), ("flash", ("flash", "cpu", "native")), ("sage", ("sage", "cpu"))],
)
def test_names_are_checked_early(name: str, words: tuple[str, ...]) -> None:
    """A failure means a traceback out of the first step, on every rank."""
    with pytest.raises(ModelError) as caught:
        chosen(name, CPU, torch.float32, lse=False)
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)


@pytest.mark.parametrize("also", [{"is_causal": True}, {"dropout_p": 0.1}])
def test_order_and_dropout_are_refused(also: dict[str, Any]) -> None:
    """A failure means that causal attention is computed as if it were not."""
    x = torch.zeros(1, 2, 1, 4)
    with pytest.raises(ModelError):
        dispatch.attend(NATIVE, x, x, x, **also)
