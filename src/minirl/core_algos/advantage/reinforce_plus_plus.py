"""REINFORCE++: no critic; the discounted return of each token, whitened over all tokens of the batch.

token_level_rewards, response_mask [B, R] (baseline form: index [B]) -> advantages, returns [B, R].
verl: verl.trainer.ppo.core_algos:compute_reinforce_plus_plus_outcome_advantage,
compute_reinforce_plus_plus_baseline_outcome_advantage
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from minirl.core_algos.advantage.registry import register_adv_est
from minirl.core_algos.groups import Groups
from minirl.core_algos.masked import masked_whiten, spread_over_tokens


@register_adv_est("reinforce_plus_plus")
@torch.no_grad()
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, *, gamma: float
) -> tuple[Tensor, Tensor]:
    """G_t = r_t + γ G_{t+1}, returns = m·G, advantages = m·whiten(G; m).

    "t+1" is the next token with mask 1, as in verl 0.9.1: in 0.8.0 the return is cut at every gap of the
    mask, so in a multi-turn response the tokens before a tool's output never hear of the final reward.
    With γ < 1 the early tokens get less credit; no group is needed (rollout.n may be 1).
    Paper: https://arxiv.org/abs/2501.03262. Cost: 17 passes over [B, R] and R steps on [B].
    verl: verl.trainer.ppo.core_algos:compute_reinforce_plus_plus_outcome_advantage
    """
    rewards_t = token_level_rewards.T.contiguous()  # [R, B]
    generated = response_mask.bool()
    generated_t = generated.T.contiguous()
    returns_t = torch.zeros_like(rewards_t)
    carry = torch.zeros_like(rewards_t[0])
    for t in reversed(range(rewards_t.shape[0])):
        carry = torch.where(generated_t[t], rewards_t[t] + gamma * carry, carry)
        returns_t[t] = carry
    returns = torch.where(generated, returns_t.T.contiguous(), 0.0)
    advantages = torch.where(generated, masked_whiten(returns, generated), 0.0)
    return advantages, returns


@register_adv_est("reinforce_plus_plus_baseline")
@torch.no_grad()
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Sequence | Tensor
) -> tuple[Tensor, Tensor]:
    """A = m·whiten(S_i - μ_g; m): GRPO's baseline, but one spread for the whole batch instead of σ_g.

    So a group with hardly any spread is not blown up to the size of the others. μ_g = 0 for a row alone.
    Paper: https://arxiv.org/abs/2501.03262. Cost: 5 passes over [B, R]: a row is one number until
    the end, and whitening weighs it by its length.
    verl: verl.trainer.ppo.core_algos:compute_reinforce_plus_plus_baseline_outcome_advantage
    """
    scores = token_level_rewards.sum(dim=-1)
    centered = (scores - Groups(index, device=scores.device).baseline(scores)).to(scores.dtype)
    whitened = masked_whiten(centered, response_mask.sum(dim=-1))
    advantages = spread_over_tokens(whitened, response_mask)
    return advantages, advantages
