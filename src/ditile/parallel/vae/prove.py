"""Shows that an autoencoder is divided exactly: small latents are decoded, and encoded again, by ranks in threads."""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ditile.parallel.vae.halo import PendingRows, Strip
from ditile.plan.errors import ModelError

RANKS, ROWS, COLUMNS, FRAMES = 2, 5, 4, 2
"""Of the latents that are decoded: rows that do not divide."""
TOLERANCE = 1e-4
"""Of the largest value, in float32; an autoencoder that looks beyond its rows differs by 1e-2 or more."""
TIMEOUT = 60.0

Install = Callable[[ExitStack, Any, Strip], None]


class _Received(NamedTuple):
    """Rows that are waited for."""

    receive: Callable[[], list[Tensor]]

    def wait_for_tensors(self) -> list[Tensor]:
        return self.receive()


class _ThreadLinks:
    """Links between threads, each of which is a rank."""

    def __init__(self, index: int, num_ranks: int, queues: dict[tuple[int, int], queue.Queue[Any]]) -> None:
        self.index = index
        self.num_ranks = num_ranks
        self._queues = queues

    def start_exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Sequence[int]]], like: Tensor
    ) -> PendingRows:
        for peer, x in sends:
            self._queues[self.index, peer].put(x.clone())
        return _Received(lambda: [self._receive(peer, shape) for peer, shape in receives])

    def start_gather(self, x: Tensor, shapes: Sequence[tuple[int, ...]]) -> PendingRows:
        others = [peer for peer in range(self.num_ranks) if peer != self.index]
        pending = self.start_exchange([(peer, x) for peer in others], [(peer, shapes[peer]) for peer in others], x)

        def receive() -> list[Tensor]:
            received = pending.wait_for_tensors()
            return [*received[: self.index], x, *received[self.index :]]

        return _Received(receive)

    def _receive(self, peer: int, shape: Sequence[int]) -> Tensor:
        x = self._queues[peer, self.index].get(timeout=TIMEOUT)
        if isinstance(x, BaseException):
            raise x
        if tuple(x.shape) != tuple(shape):
            raise ModelError(f"rows of shape {tuple(x.shape)} arrive where {tuple(shape)} are expected")
        return x  # type: ignore[no-any-return]

    def fail(self, error: BaseException) -> None:
        """Lets ranks that wait for this one end."""
        for peer in range(self.num_ranks):
            if peer != self.index:
                self._queues[self.index, peer].put(error)


def prove_rows(vae: Any, install: Install) -> None:
    """Compares an autoencoder with its division by rows.

    Args:
        vae: with its weights.
        install: (stack, autoencoder, strip) -> divides it until the stack is closed.

    Raises:
        ModelError: if it cannot be called on small latents, or differs.
    """
    kind = type(vae).__name__
    twin = copy.deepcopy(vae).float().cpu()
    latents = _make_latents(twin)
    try:
        with torch.no_grad():
            picture = _decode(twin, latents)
            want = {"decode": picture} | ({"encode": _encode(twin, picture)} if _has_encoder(twin) else {})
    except Exception as error:
        raise ModelError(
            f"{kind} cannot be called on latents of shape {tuple(latents.shape)} to see whether it can be divided by "
            f"rows: {type(error).__name__}: {' '.join(str(error).split())[:200]}; use vae=whole"
        ) from error
    calls: dict[str, Callable[[Any], Tensor]] = {
        "decode": lambda mine: _decode(mine, latents),
        "encode": lambda mine: _encode(mine, picture),
    }
    for name, one in want.items():
        got = simulate_ranks(twin, install, RANKS, calls[name])
        difference = max(float((x - one).abs().max() / one.abs().max()) for x in got)
        if not difference <= TOLERANCE:
            raise ModelError(
                f"{kind}.{name} by rows differs from the whole by {difference:.1e} of the largest value, so that it "
                "looks beyond them; use vae=whole"
            )


def simulate_ranks(vae: Any, install: Install, num_ranks: int, call: Callable[[Any], Tensor]) -> list[Tensor]:
    """What each of several ranks makes in a call of its copy of an autoencoder, which shares the weights.

    Raises:
        ModelError: what a rank runs into.
    """
    queues: dict[tuple[int, int], queue.Queue[Any]] = {
        (one, other): queue.Queue() for one in range(num_ranks) for other in range(num_ranks)
    }
    results: list[Tensor | BaseException] = []
    made: dict[int, Tensor] = {}

    def run(rank: int) -> None:
        links = _ThreadLinks(rank, num_ranks, queues)
        try:
            mine = copy.deepcopy(vae, memo={id(p): p for p in vae.parameters()})
            with torch.no_grad(), ExitStack() as stack:
                install(stack, mine, Strip(links))
                made[rank] = call(mine)
        except Exception as error:
            results.append(error)
            links.fail(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in results:
        if isinstance(error, ModelError):
            raise error
        raise ModelError(
            f"{type(vae).__name__} cannot be divided by rows: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}; use vae=whole"
        )
    return [made[rank] for rank in range(num_ranks)]


def _make_latents(vae: Any) -> Tensor:
    channels = getattr(vae.config, "latent_channels", None) or getattr(vae.config, "z_dim", None)
    if not isinstance(channels, int):
        raise ModelError(
            f"{type(vae).__name__} does not say how many channels its latents have, so it is not known whether it can "
            "be divided by rows; use vae=whole"
        )
    is_video = any(isinstance(module, nn.Conv3d) for module in vae.modules())
    shape = (1, channels, *((FRAMES,) if is_video else ()), ROWS, COLUMNS)
    generator = torch.Generator().manual_seed(0)
    # Brighter below than above, so that statistics of a part are not those of the whole.
    return torch.randn(shape, generator=generator) + torch.linspace(0, 2, ROWS)[:, None]


def _decode(vae: Any, latents: Tensor) -> Tensor:
    picture: Tensor = vae.decode(latents, return_dict=False)[0]
    return picture


def _has_encoder(vae: Any) -> bool:
    return getattr(vae, "encoder", None) is not None


def _encode(vae: Any, picture: Tensor) -> Tensor:
    result = vae.encode(picture)
    latents: Tensor = result.latent_dist.mode() if hasattr(result, "latent_dist") else result[0]
    return latents
