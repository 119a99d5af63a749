"""What the batch sizes of a configuration come to: prompts, trajectories, optimizer steps, micro-batches.

in: verl's configuration or minirl's -> out: {quantity: number}.
simplified: data-parallel ranks = all ranks / ulysses_sequence_parallel_size, as for FSDP; no Megatron layout.
verl: verl.trainer.ppo.ray_trainer:RayPPOTrainer._update_actor
"""

from omegaconf import DictConfig, OmegaConf


def batch_arithmetic(config: DictConfig) -> dict[str, float | int | None]:
    """Per training step; rows are trajectories. `micro_batches` is None where a token budget cuts them.

    verl: verl.workers.engine_workers:TrainingWorker.train_mini_batch
    """
    actor, n = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n
    prompts = config.data.train_batch_size
    sequence_parallel = OmegaConf.select(actor, "ulysses_sequence_parallel_size", default=1)
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node // sequence_parallel
    rows_per_rank = actor.ppo_mini_batch_size * n / ranks
    micro = None if actor.use_dynamic_bsz else actor.ppo_micro_batch_size_per_gpu
    steps = prompts / actor.ppo_mini_batch_size * actor.ppo_epochs
    return {
        "prompts": prompts,
        "trajectories": prompts * n,
        "dp": ranks,
        "mini_batch_rows": actor.ppo_mini_batch_size * n,
        "rows_per_rank": _count(rows_per_rank),
        "optimizer_steps": _count(steps),
        "micro_batches": None if micro is None else _count(steps * rows_per_rank / micro),
    }


def _count(number: float) -> float | int:
    """A whole number as int; one that does not divide keeps its fraction, which is the news."""
    return int(number) if number == int(number) else number
