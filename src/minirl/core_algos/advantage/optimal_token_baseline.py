"""Optimal token baseline: a baseline per token position, weighted by the noise each path has gathered so far.

token_level_rewards, response_mask, old_log_probs, sum_pi_squared [B, R], index [B] (uid) -> advantages,
returns [B, R].
Simplified against verl: `handle_zero_tail` is always on (nothing in verl turns it off).
verl: verl.trainer.ppo.core_algos:compute_optimal_token_baseline_advantage,
compute_multi_turn_optimal_token_baseline_advantage
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from minirl.core_algos.advantage.registry import register_adv_est
from minirl.core_algos.groups import Groups
from minirl.core_algos.masked import reward_to_go


@register_adv_est("optimal_token_baseline")
@torch.no_grad()
def compute_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence | Tensor,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    *,
    epsilon: float = 1e-8,
) -> tuple[Tensor, Tensor]:
    """A_t = m_t (G_t - b_t),  b_t = Σ_g G_t W_t m_t / (Σ_g W_t m_t + ε),  W_t = Σ_{s≤t} m_s w_s.

    Σ_g runs over the rows of the group. w = 1 - 2π(y) + Σ_v π_v² is the squared length of ∂log π(y)/∂logits
    at the sampled token y (times the squared rollout-correction weight if any). Its running sum W says how
    noisy the path is, and noisy paths should count more in the baseline. Where a row is alone in its group,
    or is the only one still running, b_t = 0.
    `returns` is G_t = Σ_{s≥t} m_s r_s. Needs actor.calculate_sum_pi_squared=True.
    Paper: https://arxiv.org/abs/2602.07078. Cost: 24 passes over [B, R].
    verl: verl.trainer.ppo.core_algos:compute_optimal_token_baseline_advantage
    """
    generated = response_mask.bool()
    returns = reward_to_go(token_level_rewards, generated)
    path_noise = _path_noise(old_log_probs, sum_pi_squared, rollout_is_weights, generated)
    groups = Groups(index, device=returns.device)
    return _center(returns, path_noise, generated, groups, epsilon), returns


@register_adv_est("tir_optimal_token_baseline")
@torch.no_grad()
def compute_multi_turn_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence | Tensor,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    *,
    epsilon: float = 1e-8,
) -> tuple[Tensor, Tensor]:
    """The same for responses with tool output in between: rows are compared at their k-th *generated* token.

    The masked positions are squeezed out of every row, the baseline is taken there, and the advantages are
    put back. Cost: 35 passes over [B, R].
    verl: verl.trainer.ppo.core_algos:compute_multi_turn_optimal_token_baseline_advantage
    """
    generated = response_mask.bool()
    returns = reward_to_go(token_level_rewards, generated)
    path_noise = _path_noise(old_log_probs, sum_pi_squared, rollout_is_weights, generated)
    lengths = torch.count_nonzero(generated, dim=-1)
    squeezed = torch.arange(returns.shape[1], device=returns.device) < lengths.unsqueeze(-1)
    # boolean indexing walks both masks row by row, so the k-th generated token of a row lands on its column k
    squeezed_returns, squeezed_noise = torch.zeros_like(returns), torch.zeros_like(path_noise)
    squeezed_returns[squeezed] = returns[generated]
    squeezed_noise[squeezed] = path_noise[generated]
    groups = Groups(index, device=returns.device)
    advantages = torch.zeros_like(returns)
    advantages[generated] = _center(squeezed_returns, squeezed_noise, squeezed, groups, epsilon)[squeezed]
    return advantages, returns


def _path_noise(
    old_log_probs: Tensor, sum_pi_squared: Tensor, rollout_is_weights: Tensor | None, generated: Tensor
) -> Tensor:
    """[B, R]: W_t, the running sum of the squared gradient length."""
    noise = 1 - 2 * old_log_probs.exp() + sum_pi_squared
    if rollout_is_weights is not None:
        noise = noise * rollout_is_weights.square()
    return torch.where(generated, noise, 0.0).cumsum(dim=-1)


def _center(returns: Tensor, path_noise: Tensor, mask: Tensor, groups: Groups, epsilon: float) -> Tensor:
    """[B, R]: mask·(G_t - b_t), with b_t = 0 where nobody else of the group is still running."""
    weights = torch.where(mask, path_noise, 0.0)
    baseline = groups.totals(returns * weights) / (groups.totals(weights) + epsilon)  # [number of groups, R]

    lengths = torch.count_nonzero(mask, dim=-1)
    longest, second = groups.top_two(lengths)
    others_end = lengths[longest][groups.ids]  # [B]: where the longest sibling ends;
    others_end[longest] = torch.where(groups.sizes > 1, lengths[second], 0)  # for the longest: the runner-up
    has_company = torch.arange(returns.shape[1], device=returns.device) < others_end.unsqueeze(-1)
    keep_baseline = has_company | (lengths <= others_end).unsqueeze(-1)
    centered = returns - torch.where(keep_baseline, baseline[groups.ids], 0.0)
    return torch.where(mask, centered, 0.0).to(returns.dtype)
