"""KL to the reference policy, which keeps training from drifting off: estimators, penalty, coefficient.

old_log_probs, ref_log_prob, token_level_scores, response_mask [B, R] -> token_level_rewards [B, R].
Simplified against verl: tensors in, tensors out; verl's function writes into a DataProto.
verl: verl.trainer.ppo.core_algos:kl_penalty, get_kl_controller, verl.trainer.ppo.ray_trainer:apply_kl_penalty
"""

from typing import Any

import torch
from torch import Tensor

from minirl.core_algos.masked import masked_mean
from minirl.core_algos.registry import unknown_name

KL_PENALTIES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """[B, R]: an estimate of KL(π‖π_ref) at every token, from the sampled token's two log-probs only.

    With x = logprob - ref_logprob:
    kl, k1          x                 unbiased value, noisy; as a loss its gradient averages to zero
    abs             |x|
    mse, k2         x²/2              biased value, but as a loss the right gradient on average
    low_var_kl, k3  e^{-x} + x - 1    unbiased, never negative; as a loss the gradient of KL(π_ref‖π).
                                      x is held within ±20, the result within ±10
    A trailing "+" (k1+, k3+, ...) keeps the value and takes the gradient of k2: the straight-through trick.
    Estimators: J. Schulman, http://joschu.net/blog/kl-approx.html
    Raises ValueError for any other name; `full` (over the vocabulary) needs logits, which no caller has.
    verl: verl.trainer.ppo.core_algos:kl_penalty
    """
    value = _estimate(logprob, ref_logprob, kl_penalty.removesuffix("+"))
    if not kl_penalty.endswith("+"):
        return value
    k2 = 0.5 * (logprob - ref_logprob).square()
    return k2 - k2.detach() + value.detach()


def _estimate(logprob: Tensor, ref_logprob: Tensor, name: str) -> Tensor:
    match name:
        case "kl" | "k1":
            return logprob - ref_logprob
        case "abs":
            return (logprob - ref_logprob).abs()
        case "mse" | "k2":
            return 0.5 * (logprob - ref_logprob).square()
        case "low_var_kl" | "k3":
            log_ratio = (ref_logprob - logprob).clamp(min=-20.0, max=20.0)
            return (log_ratio.exp() - log_ratio - 1).clamp(min=-10.0, max=10.0)
    raise ValueError(unknown_name("KL estimator", name, KL_PENALTIES, "kl_penalty (or kl_loss_type)"))


class FixedKLController:
    """β never changes. verl: verl.trainer.ppo.core_algos:FixedKLController"""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Nothing to do."""


class AdaptiveKLController:
    """β ← β·(1 + clip(KL/target - 1, ±0.2)·n_steps/horizon): too far from the reference, and β grows.

    Paper: https://arxiv.org/abs/1909.08593. verl: verl.trainer.ppo.core_algos:AdaptiveKLController
    """

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: int) -> None:
        if horizon <= 0:
            raise ValueError(f"algorithm.kl_ctrl.horizon must be positive, got {horizon}")
        self.value = init_kl_coef
        self.target = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """`n_steps`: rows of the batch that `current_kl` was measured on."""
        error = min(max(current_kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon


KLController = FixedKLController | AdaptiveKLController


def get_kl_controller(kl_ctrl: Any) -> KLController:
    """Controller for `algorithm.kl_ctrl` (type, kl_coef, horizon, target_kl). Raises ValueError for others.

    verl: verl.trainer.ppo.core_algos:get_kl_controller
    """
    if kl_ctrl.type == "fixed":
        return FixedKLController(kl_ctrl.kl_coef)
    if kl_ctrl.type == "adaptive":
        return AdaptiveKLController(kl_ctrl.kl_coef, kl_ctrl.target_kl, kl_ctrl.horizon)
    raise ValueError(
        unknown_name("controller", kl_ctrl.type, ("fixed", "adaptive"), "algorithm.kl_ctrl.type")
    )


def apply_kl_penalty(
    token_level_scores: Tensor,
    old_log_probs: Tensor,
    ref_log_prob: Tensor,
    response_mask: Tensor,
    *,
    kl_ctrl: KLController,
    kl_penalty_name: str = "kl",
) -> tuple[Tensor, dict[str, float]]:
    """token_level_rewards = token_level_scores - β·m·KL_t [B, R], and two metrics; then β is updated.

    `actor/reward_kl_penalty` is the mean over rows of the row's mean KL, `..._coeff` the β used here.
    verl: verl.trainer.ppo.ray_trainer:apply_kl_penalty
    """
    kld = kl_penalty(old_log_probs, ref_log_prob, kl_penalty_name)
    kld = torch.where(response_mask.bool(), kld, 0.0)
    beta = kl_ctrl.value
    current_kl = masked_mean(kld, response_mask, axis=-1).mean().item()
    kl_ctrl.update(current_kl=current_kl, n_steps=response_mask.shape[0])
    metrics = {"actor/reward_kl_penalty": current_kl, "actor/reward_kl_penalty_coeff": beta}
    return token_level_scores - beta * kld, metrics
