"""GPG: the plain policy gradient. No ratio, no clip, no old policy.

log_prob, advantages, response_mask [B, R] -> scalar loss, no metrics. `old_log_prob` is not read.
verl: verl.trainer.ppo.core_algos:compute_policy_loss_gpg
"""

from typing import Any, Unpack

from torch import Tensor

from minirl.core_algos.agg_loss import GlobalBatchInfo
from minirl.core_algos.policy_loss.registry import PolicyLoss, register_policy_loss, weigh_and_aggregate


@register_policy_loss("gpg")
def compute_policy_loss_gpg(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    loss_agg_mode: str = "token-mean",
    config: Any,
    rollout_is_weights: Tensor | None = None,
    **global_batch_info: Unpack[GlobalBatchInfo],
) -> PolicyLoss:
    """ℓ = -A·log_prob. Right for the first mini-batch after a rollout; later ones are off-policy.

    Paper: https://arxiv.org/abs/2504.02546. Cost: 7 passes over [B, R].
    verl: verl.trainer.ppo.core_algos:compute_policy_loss_gpg
    """
    token_losses = -advantages * log_prob
    loss = weigh_and_aggregate(
        token_losses, response_mask, rollout_is_weights, loss_agg_mode, **global_batch_info
    )
    return loss, {}
