"""The critic: predicts the return from every position of the response. Built where an estimator needs values.

compute_values: sequences -> values [B, R]. update_critic: values, returns -> metrics.
Named after the trainer's steps; verl calls infer_batch and train_mini_batch on the worker itself.
verl: verl.workers.engine_workers:TrainingWorker
"""

from __future__ import annotations

from omegaconf import DictConfig

from minirl.protocol import DataProto
from minirl.single_controller.decorator import Dispatch, register
from minirl.workers.losses import value_loss
from minirl.workers.model import forward_values, load_value_model
from minirl.workers.process_group import ProcessGroup
from minirl.workers.training_worker import TrainingWorker


class CriticWorker(TrainingWorker):
    """Args: config is `critic`."""

    def __init__(self, config: DictConfig, *, device: str = "cpu", group: ProcessGroup | None = None) -> None:
        super().__init__(
            load_value_model(config.model.path, dtype=config.fsdp.model_dtype, device=device),
            forward_values,
            name="critic",
            loss_fn=lambda output, data: value_loss(config, output, data),
            optim=config.optim,
            micro_batch_size=config.ppo_micro_batch_size_per_gpu,
            infer_micro_batch_size=config.forward_micro_batch_size_per_gpu,
            max_token_len=config.ppo_max_token_len_per_gpu if config.use_dynamic_bsz else None,
            dtype=config.fsdp.dtype,
            strategy=config.strategy,
            group=group,
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, data: DataProto) -> DataProto:
        """values [B, R] float32, read before each response token. verl: RayPPOTrainer._compute_values"""
        return DataProto.from_dict(self.infer_batch(data))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_critic(self, data: DataProto) -> DataProto:
        """All optimizer steps on one batch. verl: RayPPOTrainer._update_critic"""
        return DataProto(meta_info={"metrics": self.train_mini_batch(data)})
