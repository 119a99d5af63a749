"""Every name in the configuration that selects a formula, looked up before the first step.

config (the whole of it) -> nothing, or ValueError with the key and the nearest known name.
Simplified against verl: verl looks most names up where they are used, after the first rollout.
verl: none
"""

from typing import Any

from minirl.core_algos.advantage import get_adv_estimator_fn
from minirl.core_algos.distillation import check_form
from minirl.core_algos.kl import KL_PENALTIES
from minirl.core_algos.pf_ppo import REWEIGHT_METHODS
from minirl.core_algos.policy_loss import get_policy_loss_fn
from minirl.core_algos.registry import unknown_name
from minirl.core_algos.rollout_correction import parse_is_threshold, parse_rejections


def check_names(config: Any) -> None:
    """Raise ValueError for a name without a formula; a name that no switch turns on is not looked at.

    It reads the registries, so a reader's own estimator or loss counts once it is registered.
    """
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    get_adv_estimator_fn(algorithm.adv_estimator)
    get_policy_loss_fn(actor.policy_loss.loss_mode)
    if algorithm.use_kl_in_reward:
        _find_kl(algorithm.kl_penalty, "algorithm.kl_penalty")
    if actor.use_kl_loss:
        _find_kl(actor.kl_loss_type, "actor_rollout_ref.actor.kl_loss_type")
    if algorithm.use_pf_ppo:
        method = algorithm.pf_ppo.reweight_method
        _find("method", method, REWEIGHT_METHODS, "algorithm.pf_ppo.reweight_method")
    if config.distillation.enabled:
        check_form(config.distillation.distillation_loss)
    _check_thresholds(algorithm.rollout_correction)


def _find(what: str, name: str, known: tuple[str, ...], key: str) -> None:
    if name not in known:
        raise ValueError(unknown_name(what, name, known, key))


def _find_kl(name: str, key: str) -> None:
    _find("KL estimator", name.removesuffix("+"), KL_PENALTIES, key)  # k3+: the straight-through form of k3


def _check_thresholds(correction: Any) -> None:
    try:
        if correction.rollout_is is not None:
            parse_is_threshold(correction.rollout_is_threshold)
        if correction.rollout_rs is not None:
            parse_rejections(correction.rollout_rs, correction.rollout_rs_threshold)
    except ValueError as error:  # it starts with the option's own name
        raise ValueError(f"algorithm.rollout_correction.{error}") from None
