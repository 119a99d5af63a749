"""The Ray placement: one process per rank, called through the same dispatch as the local ranks.

A call goes to all ranks at once; its results come back as futures. Processes meet in torch.distributed
(gloo on a CPU, nccl on GPUs). A rank's own error is raised here as it is, with a note that says where it
happened; a rank that died is a ChildProcessError, one that is silent for `timeout` seconds a TimeoutError.
After these, and when a rank failed while others wait for it, the whole group is ended: it cannot go on
without a rank.
Simplified: no resource pools, no named actors; a future has `result`, where verl gives a bare ObjectRef.
verl: verl.single_controller.ray.base:RayWorkerGroup
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import functools
import inspect
import os
import time
import traceback

import ray
import torch
import torch.distributed as dist
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from minirl.protocol import DataProto
from minirl.single_controller.worker_group import WorkerGroup
from minirl.workers.process_group import PeerLostError, SoloGroup, TorchDistributedGroup, peer_errors

TRACEBACK_LINES = 8
GRACE = 2.0  # seconds that the other ranks get to end a call in which one of them failed
START_ATTEMPTS = 5
ECHO_GRACE = 20.0  # the same, while all that is known is that somebody's peer is gone
RESUME = "and the run can go on from its last checkpoint (trainer.resume_mode=auto)"


class WorkerProcess:
    """What runs in each actor: one rank of the process group, and its worker."""

    def __init__(self, rank: int, size: int, num_threads: int, folder: str) -> None:
        torch.set_num_threads(num_threads)
        if os.path.isdir(folder):  # relative paths mean the same as in the driver, where the disk is shared
            os.chdir(folder)
        self.rank, self.size = rank, size

    def open_store(self) -> tuple[str, int]:
        """The meeting point, held by rank 0: its address. The port is chosen by the system, so it is free."""
        self.store = dist.TCPStore("0.0.0.0", 0, self.size, is_master=True, wait_for_workers=False)
        return ray.util.get_node_ip_address(), self.store.port

    def build(self, label, worker_cls, args, kwargs, address, backend, timeout):
        group = SoloGroup()
        if self.size > 1:
            store = self.store if self.rank == 0 else dist.TCPStore(*address, self.size, is_master=False)
            limit = datetime.timedelta(seconds=timeout)
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=limit)
            group = TorchDistributedGroup(self.rank, self.size)
        with self._noted(label), peer_errors(self.rank):
            self.worker = worker_cls(*args, group=group, **kwargs)

    def call(self, label, method_name, args, kwargs):
        with self._noted(label), peer_errors(self.rank):
            result = getattr(self.worker, method_name)(*args, **kwargs)
            if inspect.isawaitable(result):
                result = asyncio.run(_awaited(result))
            return _portable(result)

    def _noted(self, label: str) -> _Noted:
        return _Noted(f"in {label} on rank {self.rank} of {self.size} (process {os.getpid()}):")


async def _awaited(awaitable):
    return await awaitable


class _Noted:
    """Adds the place and the last lines of the traceback to an error on its way to the driver."""

    def __init__(self, place: str) -> None:
        self.place = place

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, tb) -> bool:
        if error is not None:
            lines = "".join(traceback.format_exception(kind, error, tb)).splitlines()
            error.add_note("\n".join([self.place, *(f"  {line}" for line in lines[-TRACEBACK_LINES:])]))
        return False


def _portable(value):
    """On the CPU, and without the rest of the batch: a chunk is a view, and pickling a view sends it all."""
    if isinstance(value, DataProto) and value.batch is not None:
        return dataclasses.replace(value, batch=value.batch.apply(_portable))
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(_portable(item) for item in value)
    return value


@dataclasses.dataclass
class RayCall:
    """One call on several ranks, under way.

    Args:
        label: what the user called, `ActorWorker.update_actor`.
        refs, ranks: the ranks' results, and whose they are.
        actors: the whole group, ended when it cannot go on.
        timeout: seconds from the moment somebody waits.
    """

    label: str
    refs: list
    ranks: list[int]
    actors: list
    timeout: float

    def __reduce__(self):  # results that have arrived stay where they are
        return RayCall, (self.label, self.refs, self.ranks, self.actors, self.timeout)

    @functools.cached_property
    def results(self) -> list:
        """In rank order.

        Raises:
            ChildProcessError: a rank's process died.
            TimeoutError: a rank gave no answer.
            Exception: a rank's own error, of the type it had there, with a note.
        """
        answers: dict[int, object] = {}
        errors: dict[int, BaseException] = {}
        pending = dict(zip(self.refs, self.ranks, strict=True))
        give_up = time.monotonic() + self.timeout
        while pending:
            left = max(give_up - time.monotonic(), 0)
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=left)
            if not ready:
                break
            rank = pending.pop(ready[0])
            try:
                answers[rank] = ray.get(ready[0])
            except RayTaskError as error:
                errors[rank] = error.cause
            except RayError as error:
                errors[rank] = self._died(rank, error)
            if errors:
                echo = all(isinstance(error, PeerLostError) for error in errors.values())
                give_up = min(give_up, time.monotonic() + (ECHO_GRACE if echo else GRACE))
        own = [errors[rank] for rank in sorted(errors) if not isinstance(errors[rank], PeerLostError)]
        if pending or any(isinstance(error, ChildProcessError) for error in own):
            end(self.actors)
        if errors:
            raise (own or list(errors.values()))[0]
        if pending:
            raise TimeoutError(
                f"{self.label}: no answer from rank {sorted(pending.values())} of {len(self.actors)} within "
                f"{self.timeout:g} s; the workers have been ended, {RESUME}. If it is only slow, raise "
                "minirl.worker_timeout"
            )
        return [answers[rank] for rank in self.ranks]

    def _died(self, rank: int, error: RayError) -> ChildProcessError:
        reason = " ".join(str(error).split()).partition(" Some common causes")[0]
        return ChildProcessError(
            f"{self.label}: the process of rank {rank} of {len(self.actors)} died; the others have been "
            f"ended, {RESUME}. Ray says: {reason[:600]}"
        )


@dataclasses.dataclass
class RayFuture:
    """One rank's part of a call; it can be waited for here or in another worker."""

    call: RayCall
    index: int

    def result(self):
        return self.call.results[self.index]


def end(actors: list) -> None:
    """End these processes, whatever they are doing."""
    for actor in actors:
        ray.kill(actor)


class RayWorkerGroup(WorkerGroup):
    """`world_size` workers of one class, each in a process of its own.

    Args:
        worker_cls: built as `worker_cls(*args, group=..., **kwargs)`, once per rank; for several roles in one
            process see `minirl.single_controller.colocate`.
        nnodes: spread over so many machines, evenly; more than one needs a running Ray cluster.
        use_gpu: one GPU per rank, and nccl between them.
        num_threads: torch threads of each process.
        timeout: seconds a call may take.

    Raises:
        ValueError: the machines have too few GPUs or CPUs for this.
    """

    def __init__(
        self,
        worker_cls: type,
        *args,
        world_size: int = 1,
        nnodes: int = 1,
        use_gpu: bool = False,
        num_threads: int = 1,
        timeout: float = 600.0,
        **kwargs,
    ) -> None:
        super().__init__()
        if world_size < 1 or world_size % nnodes:
            raise ValueError(f"world_size={world_size} must be at least 1 and a multiple of nnodes={nnodes}")
        start_ray()
        self.world_size, self.timeout, self._name = world_size, timeout, worker_cls.__name__
        self.method_names = self._bind_worker_method(worker_cls)
        self._bundles = _reserve(nnodes, world_size // nnodes, use_gpu, timeout)
        process_cls = ray.remote(WorkerProcess)
        here = os.getcwd()
        self.actors = [
            process_cls.options(**self._options(rank, use_gpu)).remote(rank, world_size, num_threads, here)
            for rank in range(world_size)
        ]
        address = self._call("open_store", [0], [self.actors[0].open_store.remote()]).results[0]
        backend = "cpu:gloo,cuda:nccl" if use_gpu else "gloo"
        label = f"{self._name}.__init__"
        refs = [
            a.build.remote(label, worker_cls, args, kwargs, address, backend, timeout) for a in self.actors
        ]
        self._call("__init__", list(range(world_size)), refs).results  # noqa: B018

    def _options(self, rank: int, use_gpu: bool) -> dict:
        options: dict = {"num_gpus": int(use_gpu), "num_cpus": 0}  # a laptop may have fewer cores than ranks
        if self._bundles:
            bundles = self._bundles[rank * len(self._bundles) // self.world_size]
            index = rank % (self.world_size // len(self._bundles))
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(bundles, index)
            options["num_cpus"] = 1
        return options

    def _call(self, method_name: str, ranks: list[int], refs: list) -> RayCall:
        return RayCall(f"{self._name}.{method_name}", refs, ranks, self.actors, self.timeout)

    def _send(self, rank: int, method_name: str, args: tuple, kwargs: dict):
        return self.actors[rank].call.remote(
            f"{self._name}.{method_name}",
            method_name,
            tuple(_portable(arg) for arg in args),
            {k: _portable(v) for k, v in kwargs.items()},
        )

    def execute_all(self, method_name, args, kwargs, blocking):
        refs = [
            self._send(
                rank, method_name, [arg[rank] for arg in args], {k: v[rank] for k, v in kwargs.items()}
            )
            for rank in range(self.world_size)
        ]
        call = self._call(method_name, list(range(self.world_size)), refs)
        return call.results if blocking else [RayFuture(call, rank) for rank in range(self.world_size)]

    def execute_rank_zero(self, method_name, args, kwargs, blocking):
        call = self._call(method_name, [0], [self._send(0, method_name, args, kwargs)])
        return call.results[0] if blocking else RayFuture(call, 0)

    def shutdown(self) -> None:
        """End the processes. They also end with this group, and with the driver."""
        end(self.actors)
        for bundles in self._bundles:
            remove_placement_group(bundles)


def start_ray(**options) -> None:
    """Join the cluster of RAY_ADDRESS, or start one on this machine that ends with this process.

    Args:
        options: for `ray.init`.
    """
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_agent_register_timeout_ms", "120000")  # 15 s are too few on a busy machine
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            ray.init(include_dashboard=False, logging_level="ERROR", **options)
            return
        except (ValueError, ConnectionError):  # a wrong address
            raise
        except Exception as error:  # it gives its processes 30 s to start, too few on a busy machine
            ray.shutdown()
            if attempt == START_ATTEMPTS:
                raise OSError(
                    f"minirl.placement=ray: Ray did not start in {attempt} attempts ({error}): is the "
                    "machine too busy? Try again, or run `ray start --head` and set RAY_ADDRESS=auto"
                ) from error


def _reserve(nnodes: int, per_node: int, use_gpu: bool, timeout: float) -> list:
    """One bundle of resources per rank, a machine's ranks together. A single machine reserves nothing."""
    have = ray.cluster_resources()
    if use_gpu and have.get("GPU", 0) < nnodes * per_node:
        raise ValueError(
            f"trainer.nnodes x trainer.n_gpus_per_node = {nnodes} x {per_node}, but Ray sees "
            f"{have.get('GPU', 0):g} GPUs: lower them, or set trainer.device=cpu"
        )
    if nnodes == 1:
        return []
    bundle = {"CPU": 1} | ({"GPU": 1} if use_gpu else {})
    groups = [placement_group([bundle] * per_node, strategy="STRICT_PACK") for _ in range(nnodes)]
    give_up = time.monotonic() + timeout
    if not all(group.wait(max(give_up - time.monotonic(), 1)) for group in groups):
        for group in groups:
            remove_placement_group(group)
        raise ValueError(
            f"trainer.nnodes={nnodes}: no room for {per_node} x {bundle} on each within {timeout:g} s; "
            f"Ray has {have.get('CPU', 0):g} CPUs and {have.get('GPU', 0):g} GPUs in all. Start it on more "
            "machines, or lower trainer.nnodes"
        )
    return groups
