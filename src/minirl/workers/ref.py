"""The reference: the policy as it was before training, frozen.

compute_ref_log_prob: sequences -> ref_log_prob [B, R]. Built only where a KL term asks for it.
verl: verl.workers.engine_workers:ActorRolloutRefWorker.compute_ref_log_prob
"""

from __future__ import annotations

from omegaconf import DictConfig

from minirl.protocol import DataProto
from minirl.single_controller.decorator import Dispatch, register
from minirl.workers.model import forward_log_probs, load_causal_lm
from minirl.workers.process_group import ProcessGroup
from minirl.workers.training_worker import TrainingWorker


class RefWorker(TrainingWorker):
    """Args: config is `actor_rollout_ref`."""

    def __init__(self, config: DictConfig, *, device: str = "cpu", group: ProcessGroup | None = None) -> None:
        ref = config.ref
        module = load_causal_lm(config.model.path, dtype=ref.fsdp_config.model_dtype, device=device)
        super().__init__(
            module.requires_grad_(False),
            lambda module, data: forward_log_probs(module, data, temperature=data.meta_info["temperature"]),
            name="ref",
            infer_micro_batch_size=ref.log_prob_micro_batch_size_per_gpu,
            max_token_len=ref.log_prob_max_token_len_per_gpu if ref.log_prob_use_dynamic_bsz else None,
            dtype=ref.fsdp_config.dtype,
            strategy=ref.strategy,
            group=group,
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """ref_log_prob [B, R] float32: verl's spelling, singular, unlike old_log_probs."""
        return DataProto.from_dict({"ref_log_prob": self.infer_batch(data)["log_probs"]})
