"""A run of tokens that is embedded alone is what it is in the whole."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.embeddings import PatchEmbed
from torch import Tensor, nn

from ditile.models import tokens


def _patch_embed(**also: object) -> PatchEmbed:
    torch.manual_seed(0)
    return PatchEmbed(height=16, width=16, patch_size=2, in_channels=4, embed_dim=24, **also).double()


class Wrapped(nn.Module):
    """A layer around another, as a LoRA has it: nothing of the inner one is to be seen but its output."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)


def _with_a_lora() -> PatchEmbed:
    module = _patch_embed()
    module.proj = Wrapped(module.proj)
    return module


CASES = {
    "linear": (tokens.linear_embed, nn.Linear(4, 24).double(), (2, 48, 4)),
    "its own size": (tokens.patch_embed, _patch_embed(), (2, 4, 16, 16)),
    "another size": (tokens.patch_embed, _patch_embed(), (2, 4, 16, 12)),
    "cropped positions": (tokens.patch_embed, _patch_embed(pos_embed_max_size=12), (1, 4, 16, 12)),
    "layer norm": (tokens.patch_embed, _patch_embed(layer_norm=True), (1, 4, 16, 12)),
    "a LoRA": (tokens.patch_embed, _with_a_lora(), (2, 4, 16, 12)),
    "no positions": (tokens.patch_embed, _patch_embed(pos_embed_type=None), (1, 4, 16, 12)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_of_tokens_is_what_it_is_in_the_whole(case: str) -> None:
    kind, module, shape = CASES[case]
    some = kind(module, module.forward)
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        latents = torch.randn(*shape, generator=generator, dtype=torch.float64)
        whole = module(latents)
        for run in (range(12), range(12, 24), range(5, 31), range(46, 48)):
            torch.testing.assert_close(some(latents, run), whole[:, run.start : run.stop], rtol=0, atol=1e-12)


def test_positions_are_asked_for_once() -> None:
    module, calls = _patch_embed(), []

    def forward(latents: Tensor) -> Tensor:
        calls.append(latents.shape)
        return PatchEmbed.forward(module, latents)

    some = tokens.patch_embed(module, forward)
    for start in (0, 12, 24):
        some(torch.zeros(2, 4, 16, 12, dtype=torch.float64), range(start, start + 12))
    assert calls == [(1, 4, 16, 12)]
