"""As a reader would write it for `actor_rollout_ref.model.external_lib`: one estimator, one loss."""

from minirl.core_algos.advantage import register_adv_est
from minirl.core_algos.agg_loss import agg_loss
from minirl.core_algos.masked import spread_over_tokens
from minirl.core_algos.policy_loss import register_policy_loss


@register_adv_est("raw_score")
def raw_score(token_level_rewards, response_mask):
    advantages = spread_over_tokens(token_level_rewards.sum(dim=-1), response_mask)
    return advantages, advantages


@register_policy_loss("log_likelihood")
def log_likelihood(
    old_log_prob,
    log_prob,
    advantages,
    response_mask,
    loss_agg_mode="token-mean",
    config=None,
    rollout_is_weights=None,
    **global_batch_info,
):
    return agg_loss(-advantages * log_prob, response_mask, loss_agg_mode, **global_batch_info), {}
