"""Policy losses by their verl name, as in `actor.policy_loss.loss_mode=vanilla`.

name -> function(old_log_prob, log_prob, advantages, response_mask, *, loss_agg_mode, config,
rollout_is_weights, **global_batch_info) -> (scalar loss, metrics).
verl: verl.trainer.ppo.core_algos:register_policy_loss, get_policy_loss_fn
"""

from collections.abc import Callable
from typing import Unpack

from torch import Tensor

from minirl.core_algos.agg_loss import GlobalBatchInfo, agg_loss
from minirl.core_algos.registry import Registry

PolicyLoss = tuple[Tensor, dict[str, float]]

POLICY_LOSS_REGISTRY = Registry("policy loss", "actor.policy_loss.loss_mode")
register_policy_loss = POLICY_LOSS_REGISTRY.register


def get_policy_loss_fn(name: str) -> Callable[..., PolicyLoss]:
    """The loss called `name`. Raises ValueError with the nearest known name."""
    return POLICY_LOSS_REGISTRY.find(name)


def weigh_and_aggregate(
    token_losses: Tensor,
    response_mask: Tensor,
    rollout_is_weights: Tensor | None,
    loss_agg_mode: str,
    **global_batch_info: Unpack[GlobalBatchInfo],
) -> Tensor:
    """How every token-level loss [B, R] ends: times the rollout-correction weight [B, R] if any, then
    `agg_loss`.
    """
    if rollout_is_weights is not None:
        token_losses = token_losses * rollout_is_weights
    return agg_loss(token_losses, response_mask, loss_agg_mode, **global_batch_info)
