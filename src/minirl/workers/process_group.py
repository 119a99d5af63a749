"""What a worker needs to know of its data-parallel peers: its rank, their number, and a sum over them.

Placements give their own: nobody (`SoloGroup`), threads (single_controller.local), processes
(torch.distributed).
verl: the `dp_group` of verl.workers.engine.base:BaseEngine
"""

from __future__ import annotations

from typing import Protocol

import torch


class ProcessGroup(Protocol):
    """`rank` in 0..size-1; `all_reduce` gives the sum over ranks and leaves its argument alone."""

    rank: int
    size: int

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor: ...


class SoloGroup:
    """One rank: a sum over one is the thing itself."""

    rank, size = 0, 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def average_gradients(parameters: list[torch.nn.Parameter], group: ProcessGroup) -> None:
    """Replace each gradient by its mean over the ranks, as DDP does; hence the `dp_size` factor in
    `agg_loss`.
    """
    if group.size == 1:
        return
    for p in parameters:
        if p.grad is not None:
            p.grad.copy_(group.all_reduce(p.grad) / group.size)
