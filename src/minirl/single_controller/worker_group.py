"""A group of workers that the driver calls as if it were one object.

Each method that a worker labelled with `@register` is bound here under the same name:
dispatch -> execute on the ranks -> collect. Methods without a label are not reachable.
verl: verl.single_controller.base.worker_group:WorkerGroup
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from minirl.protocol import DataProto, DataProtoFuture
from minirl.single_controller.decorator import MAGIC_ATTR, PADDING_SIZE_KEY, Execute, dispatch_fns


def labelled_methods(worker_cls: type) -> dict[str, dict]:
    """The methods of a class that carry a `@register` label, and the labels."""
    labels = {name: getattr(getattr(worker_cls, name, None), MAGIC_ATTR, None) for name in dir(worker_cls)}
    return {name: label for name, label in labels.items() if label is not None}


class WorkerGroup:
    """Base of the placements; a subclass gives `world_size`, `execute_all` and `execute_rank_zero`.

    `execute_*` take per-rank lists of arguments and give a list of results (or of futures, when not
    blocking).
    """

    world_size: int

    def __init__(self) -> None:
        self._dispatch_info: dict[str, list[int]] = {}
        self._collect_info: dict[str, list[bool]] = {}

    def execute_all(self, method_name: str, args: tuple, kwargs: dict, blocking: bool) -> list:
        raise NotImplementedError

    def execute_rank_zero(self, method_name: str, args: tuple, kwargs: dict, blocking: bool) -> object:
        raise NotImplementedError

    def dispatch_info(self, mesh_name: str) -> list[int]:
        """The data-parallel rank of every worker in a mesh, asked once and kept."""
        if mesh_name not in self._dispatch_info:
            ranks = self.execute_all("_query_dispatch_info", ([mesh_name] * self.world_size,), {}, True)
            self._dispatch_info[mesh_name] = ranks
        return self._dispatch_info[mesh_name]

    def collect_info(self, mesh_name: str) -> list[bool]:
        """Whether a worker's output counts, for every worker in a mesh."""
        if mesh_name not in self._collect_info:
            keep = self.execute_all("_query_collect_info", ([mesh_name] * self.world_size,), {}, True)
            self._collect_info[mesh_name] = keep
        return self._collect_info[mesh_name]

    def _bind_worker_method(self, worker_cls: type) -> list[str]:
        """Bind every labelled method of `worker_cls`; returns their names.

        Raises:
            KeyError: a method is labelled with a mode that has no functions.
        """
        self._labels = labelled_methods(worker_cls)
        for name, label in self._labels.items():
            setattr(self, name, self._bound(name, **label))
        return list(self._labels)

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, RoleGroup]:
        """One group per role of a colocated class, on these same workers; its methods have no prefix.

        verl: verl.single_controller.ray.base:RayWorkerGroup.spawn
        """
        return {role: RoleGroup(self, role) for role in prefix_set}

    def shutdown(self) -> None:
        """End the workers' processes, where there are any."""

    def _bound(self, name, *, dispatch_mode, execute_mode, blocking):
        fns = dispatch_fns(dispatch_mode)
        execute = self.execute_all if execute_mode is Execute.ALL else self.execute_rank_zero

        def call(*args, **kwargs):
            args, kwargs = fns.dispatch_fn(self, *args, **kwargs)
            padding = kwargs.pop(PADDING_SIZE_KEY, 0)
            output = fns.collect_fn(self, execute(name, args, kwargs, blocking))
            if padding and isinstance(output, DataProtoFuture):
                output.collect_fn = functools.partial(_concat_without, padding)
            elif padding:  # drop the rows that were added to make the batch divisible
                output = output[: len(output) - padding]
            return output

        call.__name__ = name
        return call


def _concat_without(padding: int, parts: list[DataProto]) -> DataProto:
    whole = DataProto.concat(parts)
    return whole[: len(whole) - padding]


class RoleGroup(WorkerGroup):
    """One role of a group whose workers each hold several (`create_colocated_worker_cls`)."""

    def __init__(self, whole: WorkerGroup, role: str) -> None:
        super().__init__()
        self.world_size, self._whole, self._prefix = whole.world_size, whole, f"{role}_"
        self._labels = {
            name.removeprefix(self._prefix): label
            for name, label in whole._labels.items()
            if name.startswith(self._prefix)
        }
        if not self._labels:
            raise ValueError(f"no role {role!r} in this group: it has {sorted(whole._labels)}")
        for name, label in self._labels.items():
            setattr(self, name, self._bound(name, **label))
        self.method_names = list(self._labels)

    def execute_all(self, method_name, args, kwargs, blocking):
        return self._whole.execute_all(self._prefix + method_name, args, kwargs, blocking)

    def execute_rank_zero(self, method_name, args, kwargs, blocking):
        return self._whole.execute_rank_zero(self._prefix + method_name, args, kwargs, blocking)

    def shutdown(self) -> None:
        self._whole.shutdown()
