"""Options of the algorithms that cannot work, alone or together, are refused before anything is loaded.

in: the composed configuration -> out: nothing, or ValueError with the key and the remedy.
Names of formulas are not looked at here: `minirl.core_algos.names` knows them, readers' own included.
verl: none. It notices most of these in the first step, and some never
"""

from omegaconf import DictConfig, OmegaConf, open_dict

_ACTOR, _CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
_LOSS, _DISTILL = f"{_ACTOR}.policy_loss", "distillation.distillation_loss"
_NOT_NEGATIVE = (
    f"{_ACTOR}.clip_ratio",
    f"{_ACTOR}.clip_ratio_low",
    f"{_ACTOR}.clip_ratio_high",
    f"{_DISTILL}.clip_ratio",
    f"{_DISTILL}.clip_ratio_low",
    f"{_DISTILL}.clip_ratio_high",
    "critic.cliprange_value",
    "algorithm.pf_ppo.weight_pow",  # 0 to a negative power is infinite
)
_ABOVE_ZERO = (
    f"{_ACTOR}.tau_pos",
    f"{_ACTOR}.tau_neg",
    f"{_ACTOR}.loss_scale_factor",
    f"{_LOSS}.clip_cov_ratio",
    f"{_LOSS}.kl_cov_ratio",
    f"{_LOSS}.dro_beta",
    f"{_DISTILL}.topk",
    f"{_DISTILL}.loss_max_clamp",
    "algorithm.kl_ctrl.horizon",
    "algorithm.kl_ctrl.target_kl",
)
_SUM_PI_SQUARED = ("optimal_token_baseline", "tir_optimal_token_baseline")


def check_algorithms(config: DictConfig, *, has_critic: bool) -> None:
    """Raise ValueError for the first option that is out of range or does not go with another."""
    _check_ranges(config)
    _check_estimator(config, has_critic)
    _check_policy_loss(config)
    _check_correction(config)
    _check_filter(config)
    if config.distillation.enabled:
        _check_distillation(config)


def apply_bypass_mode(config: DictConfig) -> None:
    """Choose bypass mode's loss for the actor, and lay the correction's options where that loss reads them.

    The trainer calls it before it builds workers. verl does so in step 1, when its workers have long taken
    their copy, and the switch never reaches them (verl issue 4912).
    verl: verl.trainer.ppo.rollout_corr_helper:apply_bypass_mode
    """
    with open_dict(config.actor_rollout_ref.actor.policy_loss) as policy_loss:
        policy_loss.loss_mode = "bypass_mode"
        policy_loss.rollout_correction = config.algorithm.rollout_correction


def _check_ranges(config: DictConfig) -> None:
    for keys, fits, range_ in (
        (_NOT_NEGATIVE, lambda value: value >= 0, "must not be negative"),
        (_ABOVE_ZERO, lambda value: value > 0, "must be above 0"),
        (("algorithm.gamma", "algorithm.lam"), lambda value: 0 <= value <= 1, "must lie between 0 and 1"),
        ((f"{_ACTOR}.clip_ratio_c",), lambda value: value > 1, "must be above 1"),
    ):
        for key in keys:
            value = OmegaConf.select(config, key)
            if value is not None and not fits(value):
                raise ValueError(f"{key}={value}: {range_}")


def _check_estimator(config: DictConfig, has_critic: bool) -> None:
    algorithm, estimator = config.algorithm, f"algorithm.adv_estimator={config.algorithm.adv_estimator}"
    if algorithm.adv_estimator == "gae" and not has_critic:
        raise ValueError(f"{estimator} needs a critic: leave critic.enable at null, or set it to true")
    if algorithm.adv_estimator == "grpo_passk" and config.actor_rollout_ref.rollout.n < 2:
        raise ValueError(f"{estimator} compares responses: set actor_rollout_ref.rollout.n to at least 2")
    if algorithm.adv_estimator in _SUM_PI_SQUARED:
        if not config.actor_rollout_ref.actor.calculate_sum_pi_squared:
            raise ValueError(f"{estimator} needs {_ACTOR}.calculate_sum_pi_squared=true")
        if algorithm.rollout_correction.bypass_mode:
            raise ValueError(
                f"{estimator} needs the actor's pass over the batch before the update, which "
                f"{_CORRECTION}.bypass_mode=true leaves out: set that to false"
            )
    if algorithm.adv_estimator == "gdpo":
        keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
        if not keys:
            raise ValueError(f"{estimator} needs algorithm.gdpo_reward_keys, e.g. [format,acc]")
        if weights is not None and len(weights) != len(keys):
            raise ValueError(
                f"algorithm.gdpo_reward_weights has {len(weights)} entries, algorithm.gdpo_reward_keys "
                f"{len(keys)}: give one weight per key, or null for equal weights"
            )
    if algorithm.use_pf_ppo and algorithm.adv_estimator != "gae":
        raise ValueError(  # verl accepts it and resamples nothing
            f"algorithm.use_pf_ppo=true resamples in PPO only, not with {estimator}: set one of the two"
        )


def _check_policy_loss(config: DictConfig) -> None:
    options, bypass = config.actor_rollout_ref.actor.policy_loss, config.algorithm.rollout_correction
    if options.loss_mode == "dro" and options.dro_beta is None:
        raise ValueError(f"{_LOSS}.loss_mode=dro needs {_LOSS}.dro_beta, e.g. 0.1")
    if options.loss_mode == "bypass_mode" and not bypass.bypass_mode:
        raise ValueError(
            f"{_LOSS}.loss_mode=bypass_mode is not set by hand: set {_CORRECTION}.bypass_mode=true"
        )
    if bypass.bypass_mode and options.loss_mode not in ("vanilla", "bypass_mode"):
        raise ValueError(
            f"{_CORRECTION}.bypass_mode=true brings its own loss ({_CORRECTION}.loss_type={bypass.loss_type})"
            f": set {_LOSS}.loss_mode={options.loss_mode} back to vanilla, or bypass_mode to false"
        )


def _check_correction(config: DictConfig) -> None:
    correction = config.algorithm.rollout_correction
    corrects = correction.rollout_is or correction.rollout_rs or correction.bypass_mode
    if corrects and not config.actor_rollout_ref.rollout.calculate_log_probs:
        raise ValueError(
            f"{_CORRECTION} compares with the rollout's log-probs: "
            "set actor_rollout_ref.rollout.calculate_log_probs=true"
        )
    for name in ("rollout_is", "rollout_rs"):
        if correction[name] and correction[f"{name}_threshold"] is None:
            raise ValueError(f"{_CORRECTION}.{name}={correction[name]} needs {_CORRECTION}.{name}_threshold")
    if correction.rollout_is_batch_normalize and not correction.rollout_is:
        raise ValueError(
            f"{_CORRECTION}.rollout_is_batch_normalize=true has no weights to normalise: "
            f"set {_CORRECTION}.rollout_is to token or sequence"
        )
    if correction.loss_type != "ppo_clip" and not correction.bypass_mode:
        raise ValueError(
            f"{_CORRECTION}.loss_type={correction.loss_type} is read in bypass mode only: "
            f"set {_CORRECTION}.bypass_mode=true"
        )


def _check_filter(config: DictConfig) -> None:
    options = config.algorithm.filter_groups
    if options.enable and not options.metric:
        raise ValueError("algorithm.filter_groups.enable=true needs algorithm.filter_groups.metric, e.g. acc")
    if options.enable and options.metric == "seq_final_reward" and config.algorithm.use_kl_in_reward:
        raise ValueError(
            "algorithm.filter_groups.metric=seq_final_reward: groups are filtered before the reference is "
            "asked, so no KL is in the reward yet; filter on seq_reward or acc"
        )


def _check_distillation(config: DictConfig) -> None:
    if not config.distillation.teacher_models.teacher_model.model_path:
        raise ValueError(
            "distillation.enabled=true needs distillation.teacher_models.teacher_model.model_path"
        )
    if config.actor_rollout_ref.rollout.temperature != 1:
        raise ValueError(  # verl's teacher takes the rollout's temperature and refuses all but 1
            f"actor_rollout_ref.rollout.temperature={config.actor_rollout_ref.rollout.temperature}: the "
            "teacher answers at temperature 1, so distillation compares at 1: set it to 1.0"
        )
