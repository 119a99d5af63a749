"""One call of a policy loss by name, ours and verl's (any version), on a `Batch`; with what options.

Not a test: used by the tests of losses against either version.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from batches import Batch, assert_same, assert_same_metrics
from hypothesis import strategies as st
from oracle.verl_functions import actor_config, core_algos
from torch import Tensor

from minirl.core_algos.agg_loss import GlobalBatchInfo

GLOBAL = dict(dp_size=2, batch_num_tokens=37, global_batch_size=9, loss_scale_factor=11)
MASK_DTYPES = st.sampled_from([torch.bool, torch.int64, torch.float32])
NO_GLOBAL = dict(dp_size=1, batch_num_tokens=None, global_batch_size=None, loss_scale_factor=None)

COV = dict(clip_cov_ratio=0.0002, clip_cov_lb=1.0, clip_cov_ub=5.0, kl_cov_ratio=0.0002, ppo_kl_coef=0.1)
SETTINGS: dict[str, dict[str, Any]] = {
    "verl's defaults": dict(policy_loss=COV | dict(dro_beta=0.01)),
    "other values": dict(
        clip_ratio=0.5,
        clip_ratio_low=0.15,
        clip_ratio_high=0.28,
        clip_ratio_c=1.5,
        tau_pos=0.5,
        tau_neg=3.0,
        policy_loss=dict(
            clip_cov_ratio=0.2,
            clip_cov_lb=0.05,
            clip_cov_ub=2.0,
            kl_cov_ratio=0.4,
            ppo_kl_coef=2.0,
            dro_beta=0.3,
        ),
    ),
    "one clip_ratio": dict(
        clip_ratio=0.0003,
        clip_ratio_low=None,
        clip_ratio_high=None,
        clip_ratio_c=10.0,
        policy_loss=COV | dict(clip_cov_lb=-1.0, kl_cov_ratio=1.0, dro_beta=3.0),
    ),
}
Outcome = tuple[Tensor, Tensor, dict[str, float]]  # loss, its gradient by log_prob, metrics


def config_with(info: GlobalBatchInfo, setting: dict[str, Any], algos: ModuleType = core_algos) -> Any:
    """The config of an actor of this verl; ours reads the same object."""
    config = actor_config(algos=algos, **setting)
    config.global_batch_info.update(info)
    return config


def value_gradient_metrics(
    fn: Callable, b: Batch, config: Any, weights: bool, mask: Tensor, **kwargs: Any
) -> Outcome:
    log_prob = b.log_prob.clone().requires_grad_()
    loss, metrics = fn(
        old_log_prob=b.old_log_probs,
        log_prob=log_prob,
        advantages=b.advantages,
        response_mask=mask,
        config=config,
        rollout_is_weights=b.rollout_is_weights if weights else None,
        **kwargs,
    )
    (gradient,) = torch.autograd.grad(loss, log_prob)
    return loss.detach(), gradient, metrics


def assert_same_losses(mine: Outcome, theirs: Outcome, dtype: torch.dtype = torch.float32) -> None:
    assert_same(mine[0], theirs[0], dtype)
    assert_same(mine[1], theirs[1], dtype)
    assert_same_metrics(mine[2], theirs[2], dtype)


def aggregation_and_gradient(
    fn: Callable, loss_mat: Tensor, mask: Tensor, mode: str, info: GlobalBatchInfo
) -> tuple[Tensor, Tensor]:
    leaf = loss_mat.clone().requires_grad_()
    loss = fn(leaf, mask, mode, **info)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


def value_loss_gradient_clipfrac(fn: Callable, b: Batch, mask: Tensor, **kwargs: Any) -> tuple[Tensor, ...]:
    vpreds = (b.values + b.advantages).requires_grad_()
    loss, clipfrac = fn(vpreds, b.returns, b.values, mask, **kwargs)
    return loss.detach(), torch.autograd.grad(loss, vpreds)[0], clipfrac
