"""OPO: the group's baseline is weighted by response length, which minimises the gradient's variance.

token_level_rewards, response_mask [B, R], index [B] (uid) -> advantages, returns [B, R] (one tensor).
verl: verl.trainer.ppo.core_algos:compute_opo_outcome_advantage
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from minirl.core_algos.advantage.registry import register_adv_est
from minirl.core_algos.groups import Groups
from minirl.core_algos.masked import spread_over_tokens


@register_adv_est("opo")
@torch.no_grad()
def compute_opo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Sequence | Tensor
) -> tuple[Tensor, Tensor]:
    """A_i = S_i - Σ_j L_j S_j / Σ_j L_j over the group, L_j = Σ_t m_jt. A row alone keeps its raw score.

    A long response has a large gradient, so its score should count more in the baseline. A group in which
    every response is empty has the baseline 0 (verl divides 0 by 0 and returns NaN).
    Paper: https://arxiv.org/abs/2505.23585. Cost: 5 passes over [B, R].
    verl: verl.trainer.ppo.core_algos:compute_opo_outcome_advantage
    """
    scores = token_level_rewards.sum(dim=-1)
    lengths = response_mask.sum(dim=-1).double()
    groups = Groups(index, device=scores.device)
    baseline = groups.sum(lengths * scores) / groups.sum(lengths).clamp(min=1)
    row_advantages = scores - torch.where(groups.rows_in_group > 1, baseline, 0.0)
    advantages = spread_over_tokens(row_advantages.to(scores.dtype), response_mask)
    return advantages, advantages
