"""The teacher of on-policy distillation: a second model that scores what the student sampled.

compute_teacher_logprobs: sequences -> teacher_logprobs [B, P+R, K], teacher_ids [B, P+R, K].
Simplified: a local model; verl asks an inference server for prompt log-probs, inside the rollout call.
verl: verl.experimental.teacher_loop.teacher_manager:AsyncTeacherLLMServerManager
"""

from __future__ import annotations

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from minirl.core_algos.distillation import uses_topk
from minirl.protocol import DataProto
from minirl.single_controller.decorator import Dispatch, register
from minirl.workers.model import forward_log_probs, load_causal_lm, load_tokenizer, vocab_size
from minirl.workers.process_group import ProcessGroup
from minirl.workers.training_worker import TrainingWorker


class TeacherWorker(TrainingWorker):
    """Args: config is the whole configuration.

    Raises:
        ValueError: the teacher cannot read the student's tokens, or has fewer than `topk` of them.
    """

    def __init__(self, config: DictConfig, *, device: str = "cpu", group: ProcessGroup | None = None) -> None:
        key = "distillation.teacher_models.teacher_model.model_path"
        path = config.distillation.teacher_models.teacher_model.model_path
        options = config.distillation.distillation_loss
        self.topk = options.topk if uses_topk(options.loss_mode) else 0
        ref = config.actor_rollout_ref.ref
        module = load_causal_lm(path, dtype=ref.fsdp_config.model_dtype, device=device, key=key)
        model, size = config.actor_rollout_ref.model, module.config.vocab_size
        words = len(load_tokenizer(model.tokenizer_path or model.path))
        if size < words:
            raise ValueError(
                f"{key}={path} knows {size} tokens, the student's tokenizer {words}: choose a teacher that "
                "shares it"
            )
        # models of one tokenizer may be padded to different sizes; the student has no logits for the rest
        self.vocab_size = min(size, vocab_size(model.path))
        if self.topk > self.vocab_size:
            raise ValueError(
                f"distillation.distillation_loss.topk={self.topk} is more than the {self.vocab_size} tokens "
                "that teacher and student share"
            )
        super().__init__(
            module.requires_grad_(False),
            self._forward,
            name="teacher",
            infer_micro_batch_size=ref.log_prob_micro_batch_size_per_gpu,
            dtype=ref.fsdp_config.dtype,
            strategy=ref.strategy,
            group=group,
        )

    def _forward(self, module: nn.Module, data: DataProto) -> dict[str, Tensor]:
        """The teacher always speaks at temperature 1, as in verl."""
        out = forward_log_probs(module, data, temperature=1.0, keep_logits=self.topk > 0)
        if not self.topk:
            return {"logprobs": out["log_probs"][..., None], "ids": data.batch["responses"][..., None].int()}
        best = out["logits"].float().log_softmax(-1)[..., : self.vocab_size].topk(self.topk, dim=-1)
        room = (0, 0, 0, data.batch["responses"].shape[1] - best.values.shape[1])
        return {
            "logprobs": nn.functional.pad(best.values, room),
            "ids": nn.functional.pad(best.indices.int(), room),
        }

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_teacher_logprobs(self, data: DataProto) -> DataProto:
        """Rows over prompt and response, shifted by one: position t scores the token at t + 1.

        K = 1, the sampled token, or `topk`, the teacher's best. The prompt's part and the last position are
        0.

        verl: verl.experimental.agent_loop.agent_loop:AgentLoopWorker._compute_teacher_logprobs
        """
        out = self.infer_batch(data)
        around = (0, 0, data.batch["prompts"].shape[1] - 1, 1)
        return DataProto.from_dict(
            {f"teacher_{key}": torch.nn.functional.pad(value, around) for key, value in out.items()}
        )
