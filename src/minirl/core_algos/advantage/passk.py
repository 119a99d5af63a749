"""Pass@k as the objective: only the best answer of a group is rewarded, by its lead over the second best.

token_level_rewards, response_mask [B, R], index [B] (uid) -> advantages, returns [B, R] (one tensor).
verl: verl.trainer.ppo.core_algos:compute_grpo_passk_outcome_advantage
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from minirl.core_algos.advantage.registry import register_adv_est
from minirl.core_algos.groups import Groups
from minirl.core_algos.masked import spread_over_tokens


@register_adv_est("grpo_passk")
@torch.no_grad()
def compute_grpo_passk_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence | Tensor,
    *,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
) -> tuple[Tensor, Tensor]:
    """Best row of each group: (S_1st - S_2nd) / (σ_g + ε), undivided if not norm_...; other rows 0.

    When the best score is shared, nobody gets anything. With 0/1 rewards a group teaches only if exactly one
    answer is right.
    Raises ValueError for a group of one: set rollout.n to at least 2.
    Paper: https://arxiv.org/abs/2503.19595. Cost: 4 passes over [B, R] and a sort of B numbers.
    verl: verl.trainer.ppo.core_algos:compute_grpo_passk_outcome_advantage
    """
    scores = token_level_rewards.sum(dim=-1)
    groups = Groups(index, device=scores.device)
    if (groups.sizes < 2).any():
        alone = groups.labels[int((groups.sizes < 2).nonzero()[0])]
        raise ValueError(
            f"grpo_passk compares responses, but prompt {alone} has only one: set rollout.n >= 2"
        )
    best, second = groups.top_two(scores)
    lead = (scores[best] - scores[second]).double()
    if norm_adv_by_std_in_grpo:
        lead = lead / (groups.std(scores)[best] + epsilon)
    advantages = torch.zeros_like(token_level_rewards)
    advantages[best] = spread_over_tokens(lead.to(scores.dtype), response_mask.index_select(0, best))
    return advantages, advantages
