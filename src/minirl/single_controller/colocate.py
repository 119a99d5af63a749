"""Several roles in one worker: actor, critic and reference share a process (and its GPU).

The methods of a role get its name as a prefix (`actor_update_actor`); `WorkerGroup.spawn` takes it off again.
Simplified: a role is given as a partial of its class, where verl has RayClassWithInitArgs.
verl: verl.single_controller.ray.base:create_colocated_worker_cls
"""

from __future__ import annotations

import functools
import itertools

from minirl.single_controller.decorator import MAGIC_ATTR
from minirl.single_controller.worker_group import labelled_methods

_MESH_QUERIES = ("_query_dispatch_info", "_query_collect_info")


def create_colocated_worker_cls(class_dict: dict[str, functools.partial]) -> type:
    """A worker class that builds one worker per role and forwards `<role>_<method>` to it.

    Args:
        class_dict: role -> partial(worker class, its arguments); the group is added when it is built.

    Raises:
        ValueError: one role's prefix is the beginning of another's (`actor`, `actor_old`).
    """
    for one, other in itertools.permutations(class_dict, 2):
        if other.startswith(f"{one}_"):
            raise ValueError(f"roles {one!r} and {other!r}: a method name could belong to both; rename one")

    def __init__(self, *, group):
        self.worker_dict = {role: build(group=group) for role, build in class_dict.items()}

    namespace = {"__init__": __init__}
    for role, build in class_dict.items():
        for name, label in labelled_methods(build.func).items():
            method = _forward(role, name)
            setattr(method, MAGIC_ATTR, label)
            namespace[f"{role}_{name}"] = method
        for name in _MESH_QUERIES:
            if hasattr(build.func, name):
                namespace[f"{role}_{name}"] = _forward(role, name)
    return type("WorkerDict", (), namespace)  # verl's name


def _forward(role: str, name: str):
    def method(self, *args, **kwargs):
        return getattr(self.worker_dict[role], name)(*args, **kwargs)

    method.__name__ = f"{role}_{name}"
    return method
