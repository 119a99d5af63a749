"""A name without a formula is refused before the first step, with the whole key and the nearest name."""

import pytest
from refusals import changed

from minirl.config import compose
from minirl.core_algos.advantage import ADV_ESTIMATOR_REGISTRY
from minirl.core_algos.advantage.registry import register_adv_est
from minirl.core_algos.names import check_names
from minirl.core_algos.policy_loss import POLICY_LOSS_REGISTRY, register_policy_loss
from minirl.core_algos.rollout_correction import PRESETS

A, G, D = "actor_rollout_ref.actor", "algorithm", "distillation"
C = "algorithm.rollout_correction"


def check(*overrides: str) -> None:
    check_names(changed(*overrides))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"{G}.adv_estimator=grop"], "algorithm.adv_estimator: .*did you mean 'grpo'"),
        ([f"{A}.policy_loss.loss_mode=clip-cov"], f"{A}.policy_loss.loss_mode: .*did you mean 'clip_cov'"),
        ([f"{G}.use_kl_in_reward=true", f"{G}.kl_penalty=full"], "algorithm.kl_penalty: .*'full'"),
        ([f"{A}.use_kl_loss=true", f"{A}.kl_loss_type=k33"], f"{A}.kl_loss_type: .*did you mean 'k3'"),
        ([f"{G}.use_pf_ppo=true", f"{G}.pf_ppo.reweight_method=powr"], "reweight_method: .*mean 'pow'"),
        ([f"{G}.use_pf_ppo=true", f"{G}.pf_ppo.reweight_method=pow+"], "reweight_method: .*'pow\\+'"),
        ([f"{C}.rollout_is=token", f"{C}.rollout_is_threshold='2_1'"], f"{C}.rollout_is_threshold: bounds"),
        ([f"{C}.rollout_rs=seq_mean_k4", f"{C}.rollout_rs_threshold=1"], f"{C}.rollout_rs: .*'seq_mean_k3'"),
        ([f"{C}.rollout_rs=token_k2", f"{C}.rollout_rs_threshold=0.5_2.0"],
         f"{C}.rollout_rs_threshold for token_k2"),
        ([f"{D}.enabled=true", f"{D}.distillation_loss.loss_mode=k33"], "loss_mode: .*did you mean 'k3'"),
        ([f"{D}.enabled=true", f"{D}.distillation_loss.loss_mode=kl"], "loss_mode=kl has a gradient without"),
        ([f"{D}.enabled=true", f"{D}.distillation_loss.policy_loss_mode=gspo"],
         "policy_loss_mode must be vanilla"),
    ],
)  # fmt: skip
def test_a_name_without_a_formula_is_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        check(*overrides)


def test_a_name_that_nothing_turns_on_is_not_looked_at():
    check(f"{G}.kl_penalty=full", f"{A}.kl_loss_type=full", f"{D}.distillation_loss.loss_mode=k33")


def test_every_name_that_has_a_formula_passes():
    for name in ADV_ESTIMATOR_REGISTRY:
        check(f"{G}.adv_estimator={name}")
    for name in POLICY_LOSS_REGISTRY:
        check(f"{A}.policy_loss.loss_mode={name}")
    for name in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"):
        for suffix in ("", "+"):
            check(f"{A}.use_kl_loss=true", f"{A}.kl_loss_type={name}{suffix}")


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_configured_by_its_overrides(name):
    config = compose(["algorithm.adv_estimator=grpo", *PRESETS[name].overrides()])
    check_names(config)
    for key, value in vars(PRESETS[name]).items():
        assert config.algorithm.rollout_correction[key] == value, key


def test_a_readers_own_names_count_once_they_are_registered():
    with pytest.raises(ValueError, match="unknown advantage estimator 'readers_own'"):
        check(f"{G}.adv_estimator=readers_own")
    with pytest.MonkeyPatch.context() as patch:  # puts the registries back as they were
        for registry in (ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY):
            patch.setattr(registry, "_functions", dict(registry))
        register_adv_est("readers_own")(lambda token_level_rewards, response_mask: None)
        register_policy_loss("readers_own")(lambda log_prob, **global_batch_info: None)
        check(f"{G}.adv_estimator=readers_own", f"{A}.policy_loss.loss_mode=readers_own")
    assert "readers_own" not in {*ADV_ESTIMATOR_REGISTRY, *POLICY_LOSS_REGISTRY}


def test_a_policy_loss_that_cannot_be_told_the_mini_batchs_sizes_is_refused():
    def verls_seven(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None
    ):
        return log_prob.sum(), {}

    with pytest.raises(ValueError, match="verls_seven: add \\*\\*global_batch_info"):
        register_policy_loss("verls_seven")(verls_seven)
    assert "verls_seven" not in POLICY_LOSS_REGISTRY
