"""The local placement: k ranks in this process, called through the same dispatch as remote ones.

With one rank a call is a plain call. With k > 1 every rank has its own worker, with its own model, and is
a thread; they meet in `ThreadGroup.all_reduce`, which adds in rank order, so that a run can be repeated.
verl has no such placement: it always starts Ray actors (verl.single_controller.ray.base:RayWorkerGroup).
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from minirl.single_controller.worker_group import WorkerGroup
from minirl.workers.process_group import SoloGroup


class ThreadGroup:
    """One rank's end of an all-reduce between threads. `size` ranks share one `Exchange`."""

    class Exchange:
        def __init__(self, size: int) -> None:
            self.barrier = threading.Barrier(size)
            self.slots: list[torch.Tensor | None] = [None] * size

    def __init__(self, rank: int, size: int, exchange: ThreadGroup.Exchange) -> None:
        self.rank, self.size, self._exchange = rank, size, exchange

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, added in rank order."""
        self._exchange.slots[self.rank] = tensor
        self._exchange.barrier.wait()
        total = torch.stack([slot.to(tensor.device) for slot in self._exchange.slots]).sum(0)
        self._exchange.barrier.wait()  # nobody writes the next round before all have read this one
        return total


class LocalWorkerGroup(WorkerGroup):
    """`world_size` workers of one class in this process.

    Args:
        worker_cls: built as `worker_cls(*args, group=..., **kwargs)`, once per rank.
    """

    def __init__(self, worker_cls: type, *args, world_size: int = 1, **kwargs) -> None:
        super().__init__()
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        self.world_size = world_size
        if world_size == 1:
            groups = [SoloGroup()]
        else:
            exchange = ThreadGroup.Exchange(world_size)
            groups = [ThreadGroup(rank, world_size, exchange) for rank in range(world_size)]
        self._exchange = None if world_size == 1 else exchange
        self.workers = [worker_cls(*args, group=group, **kwargs) for group in groups]
        self.method_names = self._bind_worker_method(worker_cls)

    def execute_all(self, method_name, args, kwargs, blocking):
        def run(rank: int):
            rank_args = [arg[rank] for arg in args]
            rank_kwargs = {k: v[rank] for k, v in kwargs.items()}
            try:
                return getattr(self.workers[rank], method_name)(*rank_args, **rank_kwargs)
            except BaseException:
                if self._exchange is not None:
                    self._exchange.barrier.abort()  # wake the ranks that wait for this one
                raise

        if self.world_size == 1:
            results = [run(0)]
        else:
            results = self._in_threads(run)
        return results if blocking else [_done(r) for r in results]

    def _in_threads(self, run) -> list:
        with ThreadPoolExecutor(self.world_size) as pool:
            futures = [pool.submit(run, rank) for rank in range(self.world_size)]
        errors = [f.exception() for f in futures if f.exception() is not None]
        if errors:
            self._exchange.barrier.reset()
            # a broken barrier is the echo of another rank's error: report the cause
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return [f.result() for f in futures]

    def execute_rank_zero(self, method_name, args, kwargs, blocking):
        result = getattr(self.workers[0], method_name)(*args, **kwargs)
        return result if blocking else _done(result)


def _done(value) -> Future:
    future: Future = Future()
    future.set_result(value)
    return future
