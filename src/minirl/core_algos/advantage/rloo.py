"""RLOO: the baseline of a response is the mean score of the *other* answers to its prompt ("leave one out").

token_level_rewards, response_mask [B, R], index [B] (uid) -> advantages, returns [B, R] (one tensor).
verl: verl.trainer.ppo.core_algos:compute_rloo_outcome_advantage, compute_rloo_vectorized_outcome_advantage
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from minirl.core_algos.advantage.registry import register_adv_est
from minirl.core_algos.groups import Groups
from minirl.core_algos.masked import spread_over_tokens


@register_adv_est("rloo")
@torch.no_grad()
def compute_rloo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Sequence | Tensor
) -> tuple[Tensor, Tensor]:
    """A_i = S_i - mean of the others = n/(n-1)·(S_i - μ_g). A row alone keeps its raw score, as in verl.

    Leaving S_i out of its own baseline keeps the gradient unbiased. Nothing is divided by a spread.
    Paper: https://arxiv.org/abs/2402.14740. Cost: 4 passes over [B, R].
    verl: verl.trainer.ppo.core_algos:compute_rloo_outcome_advantage
    """
    scores = token_level_rewards.sum(dim=-1)
    groups = Groups(index, device=scores.device)
    row_advantages = (scores - groups.baseline(scores)) * _others_share(groups)
    advantages = spread_over_tokens(row_advantages.to(scores.dtype), response_mask)
    return advantages, advantages


@register_adv_est("rloo_vectorized")
@torch.no_grad()
def compute_rloo_vectorized_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Sequence | Tensor
) -> tuple[Tensor, Tensor]:
    """The same, except that a row alone gets 0 instead of its raw score: this is verl's one difference.

    verl: verl.trainer.ppo.core_algos:compute_rloo_vectorized_outcome_advantage
    """
    scores = token_level_rewards.sum(dim=-1)
    groups = Groups(index, device=scores.device)
    row_advantages = (scores - groups.mean(scores)) * _others_share(groups)
    advantages = spread_over_tokens(row_advantages.to(scores.dtype), response_mask)
    return advantages, advantages


def _others_share(groups: Groups) -> Tensor:
    """[B]: n/(n-1), which makes the distance to the others' mean of that to the group's mean; 1 if n = 1."""
    return groups.rows_in_group / (groups.rows_in_group - 1).clamp(min=1)
