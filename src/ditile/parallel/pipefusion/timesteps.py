"""Timesteps that a pipeline iterates, or takes a part of, and that yield micro-steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Drive = Callable[[tuple[Tensor, ...]], Iterator[Tensor]]
"""Yields the timestep of each micro-step, from those of the steps."""


class StepTimesteps(Tensor):
    """A scheduler's timesteps that iterate in micro-steps; a slice `[k:]` or `[:n]` counts in steps and does so too.

    Everything else (length, other indexing, arithmetic) is that of the plain tensor. So is a slice of a single one that
    says where it ends: pipelines give `timesteps[:1]` to schedulers that add noise, which iterate it.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    drive: Drive

    @classmethod
    def wrap_timesteps(cls, plain: Tensor, drive: Drive) -> StepTimesteps:
        """Wraps plain timesteps, which `drive` iterates."""
        timesteps = plain.as_subclass(cls)
        timesteps.drive = drive
        return timesteps

    def to_plain_tensor(self) -> Tensor:
        """The timesteps as an ordinary tensor."""
        return self.as_subclass(Tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.to_plain_tensor().clone()

    def __getitem__(self, index: Any) -> Tensor:
        part = self.to_plain_tensor()[index]
        is_run = isinstance(index, slice) and index.step in (None, 1) and (index.stop is None or len(part) > 1)
        return StepTimesteps.wrap_timesteps(part, self.drive) if is_run else part

    def __iter__(self) -> Iterator[Tensor]:
        return self.drive(self.to_plain_tensor().unbind(0))
