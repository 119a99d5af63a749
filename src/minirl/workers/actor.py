"""The actor: the policy that is trained.

compute_log_prob: sequences -> old_log_probs, entropys [B, R]. update_actor: advantages, ... -> metrics.
Simplified: reference and rollout are objects of their own; verl keeps the three in one class.
verl: verl.workers.engine_workers:ActorRolloutRefWorker
"""

from __future__ import annotations

from functools import partial

import torch
from omegaconf import DictConfig

from minirl.core_algos.distillation import uses_topk
from minirl.extern import import_external_libs
from minirl.protocol import DataProto
from minirl.single_controller.decorator import Dispatch, collect_rank_zero, dispatch_one_to_all, register
from minirl.workers.losses import distillation_ppo_loss, ppo_loss
from minirl.workers.model import forward_log_probs, load_causal_lm
from minirl.workers.process_group import ProcessGroup
from minirl.workers.training_worker import TrainingWorker


class ActorWorker(TrainingWorker):
    """Args: config is `actor_rollout_ref`, distillation the key of that name; device as torch names it."""

    def __init__(
        self,
        config: DictConfig,
        *,
        distillation: DictConfig | None = None,
        device: str = "cpu",
        group: ProcessGroup | None = None,
    ) -> None:
        import_external_libs(config.model.external_lib)  # a process of its own under Ray
        actor, rollout = config.actor, config.rollout
        self.config = actor
        loss_fn, self.keep_logits = partial(ppo_loss, actor), False
        if distillation is not None and distillation.enabled:
            loss_fn = partial(distillation_ppo_loss, actor, distillation.distillation_loss)
            self.keep_logits = uses_topk(distillation.distillation_loss.loss_mode)
        super().__init__(
            load_causal_lm(config.model.path, dtype=actor.fsdp_config.model_dtype, device=device),
            self._forward,
            name="actor",
            loss_fn=loss_fn,
            optim=actor.optim,
            micro_batch_size=actor.ppo_micro_batch_size_per_gpu,
            infer_micro_batch_size=rollout.log_prob_micro_batch_size_per_gpu,
            max_token_len=actor.ppo_max_token_len_per_gpu if actor.use_dynamic_bsz else None,
            dtype=actor.fsdp_config.dtype,
            strategy=actor.strategy,
            group=group,
        )

    def _forward(self, module, data: DataProto, **flags):
        meta = data.meta_info
        flags = flags or {"calculate_entropy": meta["calculate_entropy"], "keep_logits": self.keep_logits}
        return forward_log_probs(module, data, temperature=meta["temperature"], **flags)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """old_log_probs and entropys [B, R] float32 (sum_pi_squared, where `calculate_sum_pi_squared` is
        set).

        verl: verl.workers.engine_workers:ActorRolloutRefWorker.compute_log_prob
        """
        out = self.infer_batch(
            data, calculate_entropy=True, calculate_sum_pi_squared=self.config.calculate_sum_pi_squared
        )
        names = {"log_probs": "old_log_probs", "entropy": "entropys"}
        return DataProto.from_dict({names.get(key, key): value for key, value in out.items()})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_actor(self, data: DataProto) -> DataProto:
        """All optimizer steps on one batch; meta_info["metrics"] holds lists, one entry per step.

        verl: verl.workers.engine_workers:ActorRolloutRefWorker.update_actor
        """
        return DataProto(meta_info={"metrics": self.train_mini_batch(data)})

    @register(dispatch_mode={"dispatch_fn": dispatch_one_to_all, "collect_fn": collect_rank_zero})
    def named_weights(self) -> list[tuple[str, torch.Tensor]]:
        """What the rollout needs to follow the actor. All ranks gather, rank 0 hands over.

        verl: verl.workers.engine_workers:ActorRolloutRefWorker.update_weights
        """
        whole = self.parallel.weights()
        return [(name, whole[name].detach()) for name, _ in self.module.named_parameters() if name in whole]
