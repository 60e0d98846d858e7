"""Numbers that leave a GPU: by way of page-locked rows that are allocated before messages are under way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ditile.distributed.mesh import Mesh
from ditile.distributed.transport import HostRows
from ditile.plan.plan import Plan


class OnGPU(Tensor):
    """A tensor of the CPU that says it is on a GPU."""

    device = torch.device("cuda", 0)  # type: ignore[assignment]


class Event:
    """An event of a stream that has done all it was given."""

    def record(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...


def on_gpu(*numbers: float) -> Tensor:
    made: Tensor = torch.tensor(numbers).as_subclass(OnGPU)
    return made


@pytest.fixture
def allocations(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of what is allocated page-locked; torch without CUDA does not allocate it."""
    shapes: list[tuple[int, ...]] = []
    empty = torch.empty

    def count_pinned(*shape: int, pin_memory: bool = False, **options: Any) -> Tensor:
        if pin_memory:
            shapes.append(shape)
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", count_pinned)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    return shapes


def test_no_row_is_allocated_in_mid_picture(allocations: list[tuple[int, ...]]) -> None:
    """A failure means that a decision may wait for all that a GPU does, a posted receive included."""
    mesh = Mesh(0, 1)
    mesh.connect_groups(Plan(), torch.device("cuda", 0))
    assert len(allocations) == 1
    for step in range(50):
        copy = mesh.host_rows.start_copy(on_gpu(1.0 * step))
        measured = mesh.host_rows.start_copy(on_gpu(1.0 * step, 2.0))  # of a cache, while the other is not read
        assert not copy.is_read and measured.wait_for_numbers().tolist() == [step, 2.0]
        if step % 2:  # the others are given up
            assert copy.wait_for_numbers().tolist() == [step]
    assert len(allocations) == 1


def test_copies_that_are_not_read_keep_their_numbers(allocations: list[tuple[int, ...]]) -> None:
    """More at once than there are rows, and one that is longer than a row."""
    rows = HostRows()
    copies = [rows.start_copy(on_gpu(k, *[0.0] * (k % 2) * HostRows.BYTES)) for k in range(2 * HostRows.COUNT)]
    assert [copy.wait_for_numbers()[0] for copy in copies] == list(range(2 * HostRows.COUNT))
    assert len(allocations) == 2 * HostRows.COUNT


def test_numbers_of_the_cpu_are_read_as_they_are() -> None:
    numbers = torch.tensor([1.0])
    copy = HostRows().start_copy(numbers)
    assert copy.is_read and copy.wait_for_numbers() is numbers
