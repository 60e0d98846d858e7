"""Random generators: those that a call uses, their saved and restored states, and one state on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ditile.distributed.transport import Traffic, broadcast_tensor


def list_generators(generator: Any, device: torch.device) -> list[torch.Generator]:
    """List the generators that a call may use.

    They are the given generator or list of generators, and torch's own, which some schedulers use.
    """
    if isinstance(generator, torch.Generator):
        generator = [generator]
    generators = list(generator or [])
    if device.type == "cuda":
        index = device.index
        if index is None:
            index = torch.cuda.current_device()
        generators.append(torch.cuda.default_generators[index])
    return [*generators, torch.default_generator]


def read_generator_states(generators: Sequence[torch.Generator]) -> list[torch.Tensor]:
    """Return the states of generators without waiting for a GPU."""
    return [generator.get_state() for generator in generators]


def restore_generators(generators: Sequence[torch.Generator], saved: Iterable[torch.Tensor]) -> None:
    """Put generators back into saved states."""
    for generator, state in zip(generators, saved, strict=True):
        generator.set_state(state)


def has_state_change(generators: Sequence[torch.Generator], saved: Sequence[torch.Tensor]) -> bool:
    """Return whether a random number was generated since `saved`."""
    return not all(map(torch.equal, read_generator_states(generators), saved))


def synchronise_generators(
    generators: Sequence[torch.Generator],
    source: int,
    group: dist.ProcessGroup | None,
    traffic: Traffic,
) -> None:
    """Put the generators of every rank into their states on group rank `source`."""
    if group is None:
        return
    saved = read_generator_states(generators)
    joined_states = broadcast_tensor(torch.cat(saved), source, group, traffic, "control")
    parts = torch.split(joined_states, [state.numel() for state in saved])
    # `set_state` reads a view from the start of its storage, so each part needs a storage of its own.
    restore_generators(generators, [part.clone() for part in parts])
