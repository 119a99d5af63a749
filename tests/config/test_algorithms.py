"""Options of the algorithms that cannot work are refused when the configuration is composed."""

import logging

import pytest
from refusals import assert_refused_in_one_line, changed

from minirl.config import compose, sort_overrides, validate

A, R, G = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm"
C, D = "algorithm.rollout_correction", "distillation.distillation_loss"
LOG_PROBS = f"{R}.calculate_log_probs=true"
TEACHER = ["distillation.enabled=true", "distillation.teacher_models.teacher_model.model_path=data/tiny_lm"]


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["critic.enable=false"], ["adv_estimator=gae needs a critic", "critic.enable"]),
        ([f"{G}.adv_estimator=grpo_passk", f"{R}.n=1", f"{A}.ppo_micro_batch_size_per_gpu=4"],
         ["grpo_passk", f"{R}.n to at least 2"]),
        ([f"{G}.adv_estimator=optimal_token_baseline"], [f"{A}.calculate_sum_pi_squared=true"]),
        ([f"{G}.adv_estimator=tir_optimal_token_baseline"], [f"{A}.calculate_sum_pi_squared=true"]),
        ([f"{G}.adv_estimator=optimal_token_baseline", f"{A}.calculate_sum_pi_squared=true", LOG_PROBS,
          f"{C}.bypass_mode=true"], [f"{C}.bypass_mode=true leaves out"]),
        ([f"{G}.adv_estimator=gdpo", f"{G}.gdpo_reward_keys=[acc,short]", f"{G}.gdpo_reward_weights=[1.0]"],
         ["gdpo_reward_weights has 1", "gdpo_reward_keys 2"]),
        ([f"{G}.adv_estimator=grpo", f"{G}.use_pf_ppo=true"], ["use_pf_ppo=true", "adv_estimator=grpo"]),
        ([f"{G}.pf_ppo.weight_pow=-1"], ["weight_pow=-1.0", "negative"]),
        ([f"{G}.gamma=1.5"], ["algorithm.gamma=1.5", "between 0 and 1"]),
        ([f"{G}.lam=-0.1"], ["algorithm.lam=-0.1", "between 0 and 1"]),
        ([f"{G}.kl_ctrl.target_kl=0"], ["kl_ctrl.target_kl=0.0", "above 0"]),
        ([f"{G}.kl_ctrl.horizon=0"], ["kl_ctrl.horizon=0", "above 0"]),
        ([f"{A}.clip_ratio_low=-0.2"], [f"{A}.clip_ratio_low=-0.2", "negative"]),
        ([f"{A}.clip_ratio_c=1"], [f"{A}.clip_ratio_c=1.0", "above 1"]),
        (["critic.cliprange_value=-1"], ["critic.cliprange_value=-1.0", "negative"]),
        ([f"{A}.tau_pos=0"], [f"{A}.tau_pos=0.0", "above 0"]),
        ([f"{A}.loss_scale_factor=0"], [f"{A}.loss_scale_factor=0", "above 0"]),
        ([f"{A}.policy_loss.kl_cov_ratio=0"], ["kl_cov_ratio=0.0", "above 0"]),
        ([f"{A}.policy_loss.loss_mode=dro"], ["loss_mode=dro needs", "dro_beta"]),
        ([f"{A}.policy_loss.loss_mode=bypass_mode"], [f"set {C}.bypass_mode=true"]),
        ([f"{A}.policy_loss.loss_mode=gspo", LOG_PROBS, f"{C}.bypass_mode=true"],
         ["loss_mode=gspo back to vanilla", f"{C}.loss_type=ppo_clip"]),
        ([f"{C}.rollout_is=token", f"{C}.rollout_is_threshold=null", LOG_PROBS],
         ["rollout_is=token needs", f"{C}.rollout_is_threshold"]),
        ([f"{C}.rollout_is_batch_normalize=true"], [f"set {C}.rollout_is to token or sequence"]),
        ([f"{C}.loss_type=reinforce"], ["loss_type=reinforce", f"set {C}.bypass_mode=true"]),
        ([f"{G}.filter_groups.enable=true", f"{G}.filter_groups.metric=seq_final_reward",
          f"{G}.use_kl_in_reward=true"], ["seq_final_reward", "no KL", "seq_reward"]),
        ([*TEACHER, f"{R}.temperature=0.5"], [f"{R}.temperature=0.5", "teacher", "1.0"]),
        ([*TEACHER, f"{D}.topk=0"], [f"{D}.topk=0", "above 0"]),
        ([*TEACHER, f"{D}.loss_max_clamp=-1"], [f"{D}.loss_max_clamp=-1.0", "above 0"]),
    ],
)  # fmt: skip
def test_an_option_that_cannot_work_is_refused_with_its_key_and_the_remedy(overrides, parts):
    assert_refused_in_one_line(overrides, parts)


def test_every_aggregation_of_core_algos_may_be_configured():
    from minirl.core_algos.agg_loss import LOSS_AGG_MODES

    for mode in LOSS_AGG_MODES:
        validate(changed(f"{A}.loss_agg_mode={mode}"))


@pytest.mark.parametrize(
    ("text", "value"), [("0.5_5", "0.5_5"), ("0.5_5.0", "0.5_5.0"), ("2", "2"), ("3.5", "3.5")]
)
@pytest.mark.parametrize("option", ["rollout_is_threshold", "rollout_rs_threshold"])
def test_two_bounds_stay_two_bounds_where_hydra_alone_reads_one_number(option, text, value):
    assert str(compose([f"{C}.{option}={text}"]).algorithm.rollout_correction[option]) == value


def test_a_second_teacher_is_answered_with_the_one_there_is():
    with pytest.raises(ValueError, match="teacher_model2.model_path: minirl has one teacher"):
        sort_overrides(["+distillation.teacher_models.teacher_model2.model_path=x"])


@pytest.mark.parametrize(
    ("overrides", "warned"),
    [
        ([f"{A}.clip_ratio=0.1"], True),
        ([f"{A}.clip_ratio=0.1", f"{A}.clip_ratio_high=null"], False),
        ([f"{A}.clip_ratio=0.2"], False),
        ([f"{A}.clip_ratio_high=0.28"], False),
    ],
)
def test_clip_ratio_alone_is_not_read_and_that_is_said(overrides, warned, caplog):
    with caplog.at_level(logging.WARNING, "minirl.config"):
        compose(overrides)
    assert ("clip_ratio=0.1 is not read" in caplog.text) == warned


@pytest.mark.parametrize(("form", "warned"), [("true", True), ("false", False)])
def test_topk_with_the_policy_gradient_is_warned_of_as_in_verl(form, warned, caplog):
    with caplog.at_level(logging.WARNING, "minirl.config"):
        compose([*TEACHER, f"{D}.loss_mode=forward_kl_topk", f"{D}.use_policy_gradient={form}"])
    assert ("moves the sampled token only" in caplog.text) == warned


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("algorithm.gdpo_reward_keys=acc", r"gdpo_reward_keys=acc: a list is needed, written \[a,b\]"),
        (f"{A}.policy_loss=gspo", "policy_loss=gspo: this is a section of keys: set one of them"),
        (f"{C}=null", "rollout_correction=null: it cannot be null"),
        (f"{C}.rollout_rs=token_k1,token_k2", "one value is needed, .*a text with commas \"'a,b'\""),
    ],
)
def test_a_value_of_the_wrong_kind_is_answered_with_the_right_one(override, remedy):
    with pytest.raises(ValueError, match=remedy):
        compose([override])


def test_several_rejections_are_one_quoted_text():
    config = compose(
        [f"{C}.rollout_rs='token_k1,token_k2'", f"{C}.rollout_rs_threshold='0.5_2,0.1'"], check=False
    )
    assert config.algorithm.rollout_correction.rollout_rs_threshold == "0.5_2,0.1"
