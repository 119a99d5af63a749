"""GRPO: a response is as good as its score compared with its siblings', the answers to the same prompt.

token_level_rewards, response_mask [B, R], index [B] (uid) -> advantages, returns [B, R] (one tensor).
Simplified against verl: `grpo` and `grpo_vectorized` are one function; verl has a loop and a vectorised twin.
verl: verl.trainer.ppo.core_algos:compute_grpo_outcome_advantage, compute_grpo_vectorized_outcome_advantage
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from minirl.core_algos.advantage.registry import register_adv_est
from minirl.core_algos.groups import Groups
from minirl.core_algos.masked import spread_over_tokens


@register_adv_est("grpo", "grpo_vectorized")
@torch.no_grad()
def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence | Tensor,
    *,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
) -> tuple[Tensor, Tensor]:
    """A_it = m_it (S_i - μ_g) / (σ_g + ε); undivided (Dr.GRPO) if not `norm_adv_by_std_in_grpo`.

    The group's mean says what this prompt was worth, so no critic is needed. S_i sums the whole row, masked
    tokens included. σ_g is the unbiased std: two scores 1, 0 give ±0.7071. A group of equal scores gives
    exact zeros (verl rounds: 0.056 for eight scores of 0.7). A row alone keeps its raw score, as in verl.
    Papers: https://arxiv.org/abs/2402.03300, https://arxiv.org/abs/2503.20783. Cost: 4 passes over [B, R].
    verl: verl.trainer.ppo.core_algos:compute_grpo_outcome_advantage
    """
    scores = token_level_rewards.sum(dim=-1)
    row_advantages = group_relative(scores, index, epsilon, norm_adv_by_std_in_grpo)
    advantages = spread_over_tokens(row_advantages.to(scores.dtype), response_mask)
    return advantages, advantages


def group_relative(scores: Tensor, index: Sequence | Tensor, epsilon: float, divide_by_std: bool) -> Tensor:
    """[B] -> [B], float64: (S_i - μ_g) / (σ_g + ε) of each row within its group."""
    groups = Groups(index, device=scores.device)
    centered = scores - groups.baseline(scores)
    return centered / (groups.std(scores) + epsilon) if divide_by_std else centered
