"""ReMax: the baseline of a prompt is the score of its greedy answer, generated once more for this purpose.

token_level_rewards, response_mask [B, R], reward_baselines [B] -> advantages, returns [B, R].
verl: verl.trainer.ppo.core_algos:compute_remax_outcome_advantage
"""

import torch
from torch import Tensor

from minirl.core_algos.advantage.registry import register_adv_est
from minirl.core_algos.masked import reward_to_go, spread_over_tokens


@register_adv_est("remax")
@torch.no_grad()
def compute_remax_outcome_advantage(
    token_level_rewards: Tensor, reward_baselines: Tensor, response_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """G_t = Σ_{s≥t} m_s r_s; A_t = G_t - m_t·b_i, b_i the score of the greedy answer to the row's prompt.

    Needs no group and no critic, but n + 1 generations per prompt. As in verl, a masked token before the
    reward keeps G_t in `advantages`; the loss never reads it.
    Paper: https://arxiv.org/abs/2310.10505. Cost: 9 passes over [B, R].
    verl: verl.trainer.ppo.core_algos:compute_remax_outcome_advantage
    """
    returns = reward_to_go(token_level_rewards, response_mask)
    return spread_over_tokens(-reward_baselines, response_mask).add_(returns), returns
