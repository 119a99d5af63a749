"""TRL's own GRPO loss on a batch of minirl, to put the two side by side. The only file that imports trl.

in: log-probs, advantages and mask of a batch -> out: TRL's loss, differentiable in the log-probs.
simplified: the method `GRPOTrainer._compute_loss` is called on a stand-in trainer: one process, no KL term,
no gradient accumulation, no vLLM.
verl: verl.workers.utils.losses:ppo_loss
"""

from collections import defaultdict
from types import SimpleNamespace

import torch
from torch import Tensor
from trl import GRPOTrainer

# TRL's loss_type -> verl's loss_agg_mode (tests/oracle/test_trl_parity.py: loss and gradient agree)
LOSS_AGG_MODE = {
    "grpo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dapo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "luspo": "seq-mean-token-sum",
}


def grpo_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    loss_type: str,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float,
) -> Tensor:
    """A scalar. All tensors [B, R]; TRL takes one advantage a row, so each row's must be constant.

    Raises ValueError for a `loss_type` outside LOSS_AGG_MODE or advantages that vary along a row.
    verl: verl.trainer.ppo.core_algos:compute_policy_loss_vanilla
    """
    if loss_type not in LOSS_AGG_MODE:
        raise ValueError(f"loss_type={loss_type}: must be one of {', '.join(LOSS_AGG_MODE)}")
    per_row = advantages[:, 0]
    if not torch.equal(advantages * response_mask, per_row[:, None] * response_mask):
        raise ValueError("TRL's GRPO has one advantage a trajectory: these vary from token to token (gae?)")
    trainer = _stand_in(log_prob, loss_type, clip_ratio_low, clip_ratio_high, clip_ratio_c)
    prompt = torch.ones(len(per_row), 1, dtype=torch.long)
    batch = {
        "prompt_ids": prompt,
        "prompt_mask": prompt,
        "completion_ids": torch.zeros_like(response_mask),
        "completion_mask": response_mask,
        "advantages": per_row,
        "old_per_token_logps": old_log_prob,
        "num_items_in_batch": response_mask.sum(),
    }
    return GRPOTrainer._compute_loss(trainer, None, batch)


def _stand_in(log_prob: Tensor, loss_type: str, low: float, high: float, delta: float) -> SimpleNamespace:
    """What `_compute_loss` reads of a trainer."""
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (
            log_prob,
            torch.zeros_like(log_prob),
            None,
        ),
        loss_type=loss_type,
        importance_sampling_level="token",
        beta=0.0,
        epsilon_low=low,
        epsilon_high=high,
        args=SimpleNamespace(use_bias_correction_kl=False, delta=delta, steps_per_generation=1),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        max_completion_length=log_prob.shape[1],
        current_gradient_accumulation_steps=1,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
