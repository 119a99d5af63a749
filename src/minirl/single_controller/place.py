"""Where the workers run: in this process, or in Ray actors. The only place that looks at `minirl.placement`.

Simplified: one resource pool for all roles, as verl's default has it.
verl: verl.trainer.ppo.ray_trainer:RayPPOTrainer.init_workers
"""

from __future__ import annotations

import functools

from omegaconf import DictConfig

from minirl.single_controller.colocate import create_colocated_worker_cls
from minirl.single_controller.local import LocalWorkerGroup
from minirl.single_controller.worker_group import WorkerGroup


def place_workers(config: DictConfig, roles: dict[str, functools.partial]) -> dict[str, WorkerGroup]:
    """One worker group per role, with trainer.nnodes x trainer.n_gpus_per_node ranks.

    Args:
        roles: role -> partial(worker class, its configuration).
    """
    trainer = config.trainer
    ranks = trainer.nnodes * trainer.n_gpus_per_node
    roles = {role: functools.partial(build, device=trainer.device) for role, build in roles.items()}
    if config.minirl.placement == "local":
        return {
            role: LocalWorkerGroup(build.func, *build.args, world_size=ranks, **build.keywords)
            for role, build in roles.items()
        }

    from minirl.single_controller.ray import RayWorkerGroup  # Ray is loaded only where it is asked for

    together = RayWorkerGroup(
        create_colocated_worker_cls(roles),
        world_size=ranks,
        nnodes=trainer.nnodes,
        use_gpu=trainer.device != "cpu",
        num_threads=config.minirl.num_threads,
        timeout=config.minirl.worker_timeout,
    )
    return together.spawn(roles)
