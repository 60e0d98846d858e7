"""A small tensor on its way from a device to the host, for decisions that depend on a number."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """From a GPU by one asynchronous copy: whoever reads it waits for that alone, and not for what was launched since.

    Args:
        numbers: on any device.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers
        self._done: torch.cuda.Event | None = None
        if numbers.device.type == "cuda":
            self._numbers = torch.empty_like(numbers, device="cpu", pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record(torch.cuda.current_stream(numbers.device))

    @property
    def needs_no_wait(self) -> bool:
        """Whether nobody has to wait."""
        return self._done is None

    def wait_for_numbers(self) -> Tensor:
        """The numbers, on the CPU."""
        if self._done is not None:
            self._done.synchronize()
        return self._numbers
