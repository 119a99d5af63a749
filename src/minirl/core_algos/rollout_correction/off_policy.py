"""How far the trainer's policy is from the sampler's: the metrics that say whether a correction is needed.

old_log_prob, rollout_log_prob, response_mask [B, R] -> numbers by name.
verl: verl.trainer.ppo.rollout_corr_helper:compute_offpolicy_metrics
"""

import torch
from torch import Tensor

from minirl.core_algos.masked import masked_mean, masked_sum
from minirl.core_algos.ratio import LOG_RATIO_BOUND


@torch.no_grad()
def compute_offpolicy_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor | None, response_mask: Tensor
) -> dict[str, float]:
    """Perplexities, KL(π_rollout‖π_train) by k1 and k3, χ² = E[r²] - 1 per token and per row. No prefix.

    verl: verl.trainer.ppo.rollout_corr_helper:compute_offpolicy_metrics
    """
    mask = response_mask.bool()
    train_rows = masked_mean(old_log_prob, mask, axis=-1)  # [B]
    metrics = {
        "training_ppl": (-train_rows).exp().mean().item(),
        "training_log_ppl": (-train_rows).mean().item(),
    }
    if rollout_log_prob is None:
        return metrics
    log_ratio = old_log_prob - rollout_log_prob
    rollout_rows = masked_mean(rollout_log_prob, mask, axis=-1)
    gap = rollout_rows - train_rows
    token_ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    row_log_ratio = masked_sum(log_ratio, mask, axis=-1).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return metrics | {
        "kl": masked_mean(-log_ratio, mask).item(),
        "k3_kl": masked_mean(log_ratio.exp() - log_ratio - 1, mask).item(),
        "rollout_ppl": (-rollout_rows).exp().mean().item(),
        "rollout_log_ppl": (-rollout_rows).mean().item(),
        "log_ppl_diff": gap.mean().item(),
        "log_ppl_abs_diff": gap.abs().mean().item(),
        "log_ppl_diff_max": gap.max().item(),
        "log_ppl_diff_min": gap.min().item(),
        "ppl_ratio": gap.exp().mean().item(),
        "chi2_token": masked_mean(token_ratio.square(), mask).item() - 1.0,
        "chi2_seq": (2.0 * row_log_ratio).exp().mean().item() - 1.0,
    }
