"""Policy losses by their verl name, as in `actor.policy_loss.loss_mode=vanilla`.

name -> function(old_log_prob, log_prob, advantages, response_mask, *, loss_agg_mode, config,
rollout_is_weights, **global_batch_info) -> (scalar loss, metrics).
verl: verl.trainer.ppo.core_algos:register_policy_loss, get_policy_loss_fn
"""

import inspect
from collections.abc import Callable
from enum import Enum
from typing import TypeVar, Unpack

from torch import Tensor

from minirl.core_algos.agg_loss import GlobalBatchInfo, agg_loss
from minirl.core_algos.registry import Registry

F = TypeVar("F", bound=Callable)
PolicyLoss = tuple[Tensor, dict[str, float]]

POLICY_LOSS_REGISTRY = Registry("policy loss", "actor_rollout_ref.actor.policy_loss.loss_mode")


def register_policy_loss(*names: str | Enum) -> Callable[[F], F]:
    """Decorator that files a policy loss under each of `names`, in the process that imports its module.

    With `actor_rollout_ref.model.external_lib=your_module` every process does.
    Raises ValueError when a name is taken, or when the function cannot be told the sizes of the mini-batch:
    verl leaves them in `config.global_batch_info`, here they are arguments.
    """

    def decorator(fn: F) -> F:
        parameters = inspect.signature(fn).parameters.values()
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        if not takes_all and not GlobalBatchInfo.__annotations__.keys() <= {p.name for p in parameters}:
            raise ValueError(
                f"policy loss {fn.__name__}: add **global_batch_info to its arguments and hand it on to "
                "agg_loss; without the sizes of the mini-batch the loss would depend on how that is split"
            )
        return POLICY_LOSS_REGISTRY.register(*names)(fn)

    return decorator


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
