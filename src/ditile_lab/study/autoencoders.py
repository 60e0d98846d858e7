"""The proof that an autoencoder is divided exactly: ranks in threads decode small latents and encode them again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ditile.parallel.vae.halo import Strip
from ditile.plan.errors import ModelError, describe_class_and_text
from ditile_lab.study.thread_ranks import ThreadRank, run_thread_ranks

WEIGHTS = (1.0, 1.0)
ROWS = 5
"""Rows of the decoded latents; the number of ranks does not divide them."""
COLUMNS = 4
FRAMES = 2
TOLERANCE = 1e-4
"""The allowed share of the largest value, in float32; an autoencoder that looks beyond its rows differs by 1e-2 or
more."""

Install = Callable[[ExitStack, Any, Strip], None]


def prove_rows(vae: Any, install: Install) -> None:
    """Compare an autoencoder with its division by rows.

    Args:
        vae: the autoencoder with its weights.
        install: called with (stack, autoencoder, strip), divides it until the stack is closed.

    Raises:
        ModelError: if it cannot be called on small latents, or the results differ.
    """
    class_name = type(vae).__name__
    twin = copy.deepcopy(vae).float().cpu()
    latents = _make_latents(twin)
    encoded: Tensor | None = None
    try:
        with torch.no_grad():
            decoded = _decode(twin, latents)
            if getattr(twin, "encoder", None) is not None:
                encoded = _encode(twin, decoded)
    except Exception as error:
        raise ModelError(
            f"{class_name} cannot be called on latents of shape {tuple(latents.shape)} to see whether it can be "
            f"divided by rows: {describe_class_and_text(error)}; use vae=whole"
        ) from error
    _compare(twin, install, "decode", lambda divided: _decode(divided, latents), decoded)
    if encoded is not None:
        _compare(twin, install, "encode", lambda divided: _encode(divided, decoded), encoded)


def _compare(vae: Any, install: Install, name: str, call: Callable[[Any], Tensor], expected: Tensor) -> None:
    """Raise `ModelError` if a rank with a part of the rows gets another result than the whole."""
    for result in simulate_ranks(vae, install, WEIGHTS, call):
        difference = float((result - expected).abs().max() / expected.abs().max())
        # The condition is written so that NaN is refused too.
        if not difference <= TOLERANCE:
            raise ModelError(
                f"{type(vae).__name__}.{name} by rows differs from the whole by {difference:.1e} of the largest "
                "value, so that it looks beyond them; use vae=whole"
            )


def simulate_ranks(
    vae: Any,
    install: Install,
    weights: tuple[float, ...],
    call: Callable[[Any], Tensor],
) -> list[Tensor]:
    """Return the result of a call on each of several ranks, whose copies of an autoencoder share the weights.

    Args:
        vae, install, call: see `prove_rows`.
        weights: the share of each rank, in any unit.

    Raises:
        ModelError: if a rank fails.
    """

    def run(rank: ThreadRank) -> Tensor:
        divided = copy.deepcopy(vae, memo={id(p): p for p in vae.parameters()})
        with torch.no_grad(), ExitStack() as stack:
            install(stack, divided, Strip(rank, weights))
            return call(divided)

    try:
        return run_thread_ranks(len(weights), run)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"{type(vae).__name__} cannot be divided by rows: {describe_class_and_text(error)}; use vae=whole"
        ) from error


def _make_latents(vae: Any) -> Tensor:
    channels = getattr(vae.config, "latent_channels", None) or getattr(vae.config, "z_dim", None)
    if not isinstance(channels, int):
        raise ModelError(
            f"{type(vae).__name__} does not say how many channels its latents have, so it is not known whether it can "
            "be divided by rows; use vae=whole"
        )
    shape = [1, channels, ROWS, COLUMNS]
    if any(isinstance(module, nn.Conv3d) for module in vae.modules()):
        shape.insert(2, FRAMES)
    generator = torch.Generator().manual_seed(0)
    # They are brighter below than above, so that statistics of a part are not the statistics of the whole.
    return torch.randn(shape, generator=generator) + torch.linspace(0, 2, ROWS)[:, None]


def _decode(vae: Any, latents: Tensor) -> Tensor:
    decoded: Tensor = vae.decode(latents, return_dict=False)[0]
    return decoded


def _encode(vae: Any, image: Tensor) -> Tensor:
    result = vae.encode(image)
    if hasattr(result, "latent_dist"):
        mode: Tensor = result.latent_dist.mode()
        return mode
    latents: Tensor = result[0]
    return latents
