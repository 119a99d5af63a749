"""GPG: group mean as baseline, no division by σ; rescaled by how many rows of the batch scored at all.

token_level_rewards, response_mask [B, R], index [B] (uid) -> advantages, returns [B, R] (one tensor).
verl: verl.trainer.ppo.core_algos:compute_gpg_outcome_advantage
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from minirl.core_algos.advantage.registry import register_adv_est
from minirl.core_algos.groups import Groups
from minirl.core_algos.masked import spread_over_tokens


@register_adv_est("gpg")
@torch.no_grad()
def compute_gpg_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Sequence | Tensor, *, f_norm: float = 1.0
) -> tuple[Tensor, Tensor]:
    """A_i = α (S_i - μ_g) / f_norm with α = B / max(#{i: S_i ≠ 0}, 1); μ_g = 0 for a row alone.

    α keeps the step from shrinking when few rows teach anything. The paper leaves out rows whose group scored
    all alike; verl leaves out rows that scored 0, so with rewards of ±1 α is always 1.
    Paper: https://arxiv.org/abs/2504.02546. Cost: 4 passes over [B, R].
    verl: verl.trainer.ppo.core_algos:compute_gpg_outcome_advantage
    """
    scores = token_level_rewards.sum(dim=-1)
    alpha = scores.shape[0] / torch.count_nonzero(scores).clamp(min=1)
    row_advantages = alpha * (scores - Groups(index, device=scores.device).baseline(scores)) / f_norm
    advantages = spread_over_tokens(row_advantages.to(scores.dtype), response_mask)
    return advantages, advantages
