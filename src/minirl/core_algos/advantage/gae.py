"""GAE: each token's advantage from the critic's values, by one backward pass over the response.

token_level_rewards, values, response_mask [B, R] -> advantages, returns [B, R].
Simplified against verl: nothing.
verl: verl.trainer.ppo.core_algos:compute_gae_advantage_return
"""

import torch
from torch import Tensor

from minirl.core_algos.advantage.registry import register_adv_est
from minirl.core_algos.masked import masked_whiten


@register_adv_est("gae")
@torch.no_grad()
def compute_gae_advantage_return(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """δ_t = r_t + γ V_{t+1} - V_t,  a_t = δ_t + γλ a_{t+1};  advantages = whiten(a), returns = a + V.

    δ_t: this token's reward, and how much better the critic thinks of the answer after it. λ says how far
    ahead to look: 0 believes the critic at once (little noise, but its errors), 1 waits for the end (no bias,
    much noise).
    "t+1" is the next token with mask 1: tool output in between is stepped over, and a reward placed on a
    masked token is lost (outcome estimators would count it). Returns are taken before whitening, so the
    critic still learns rewards and not z-scores. Whitening is over all tokens of the batch; under a zero of
    the mask stand leftovers, as in verl, which can be huge and must never be read.
    Paper: https://arxiv.org/abs/1506.02438. Cost: 18 passes over [B, R] and R steps on [B].
    verl: verl.trainer.ppo.core_algos:compute_gae_advantage_return
    """
    rewards_t, values_t = token_level_rewards.T.contiguous(), values.T.contiguous()  # [R, B]
    generated = response_mask.bool()
    generated_t = generated.T.contiguous()
    advantages_t = torch.empty_like(values_t)
    next_value = torch.zeros_like(values_t[0])
    carry = torch.zeros_like(values_t[0])
    for t in reversed(range(values_t.shape[0])):
        delta = rewards_t[t] + gamma * next_value - values_t[t]
        carry = torch.where(generated_t[t], delta + gamma * lam * carry, carry)
        next_value = torch.where(generated_t[t], values_t[t], next_value)
        advantages_t[t] = carry
    raw = advantages_t.T.contiguous()
    return masked_whiten(raw, generated), raw + values
