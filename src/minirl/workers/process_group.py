"""What a worker needs to know of its data-parallel peers: its rank, their number, and a sum over them.

Placements give their own: nobody (`SoloGroup`), threads (single_controller.local), processes
(`TorchDistributedGroup`).
verl: the `dp_group` of verl.workers.engine.base:BaseEngine
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist


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


class PeerLostError(ConnectionError):
    """A rank waited for a peer that is gone: the echo of that peer's own error."""


class TorchDistributedGroup:
    """One rank's end of an all-reduce between processes: the default group of torch.distributed.

    Two ranks add up to the bit what two local ranks do; with more, the order of addition is the backend's.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.detach().clone()
        dist.all_reduce(total)
        return total


@contextmanager
def peer_errors(rank: int) -> Iterator[None]:
    """Tell torch.distributed's complaint about a lost peer, in whatever call, from an error of this rank."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):  # gloo's own are plain RuntimeErrors
            raise PeerLostError(f"rank {rank} lost a peer: {error}") from error
        raise


def most(count: int, group: ProcessGroup) -> int:
    """The largest `count` of all ranks, from a sum: each rank fills in its own place."""
    counts = torch.zeros(group.size, dtype=torch.int64)
    counts[group.rank] = count
    return int(group.all_reduce(counts).max())
