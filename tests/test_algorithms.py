"""Every algorithm that verl's configuration can name, run through the trainer by that name."""

import logging
import statistics

import numpy as np
import pytest
import tiny_run
import torch
from runs import QUIET, small
from tiny_run import coin

from minirl.config import compose
from minirl.core_algos.advantage import ADV_ESTIMATOR_REGISTRY
from minirl.core_algos.advantage.registry import register_adv_est
from minirl.core_algos.policy_loss import POLICY_LOSS_REGISTRY
from minirl.core_algos.rollout_correction import PRESETS
from minirl.protocol import DataProto
from minirl.reward.gsm8k import compute_score
from minirl.trainer import PPOTrainer, filter_values

GRPO = "algorithm.adv_estimator=grpo"
FILTER = "algorithm.filter_groups.enable=True"
LOG_PROBS = "actor_rollout_ref.rollout.calculate_log_probs=True"
SUM_PI = "actor_rollout_ref.actor.calculate_sum_pi_squared=True"
NEEDS = {
    "optimal_token_baseline": [SUM_PI],
    "tir_optimal_token_baseline": [SUM_PI],
    "gdpo": ["algorithm.gdpo_reward_keys=[acc,short]"],
}
LOSS_NEEDS = {
    "dro": ["actor_rollout_ref.actor.policy_loss.dro_beta=0.1"],
    "gspo": ["actor_rollout_ref.actor.clip_ratio_low=3e-4", "actor_rollout_ref.actor.clip_ratio_high=4e-4"],
}
TEACHER = ["distillation.enabled=True", "distillation.teacher_models.teacher_model.model_path=data/tiny_lm"]
DAPO = {
    "clip-higher": ["actor_rollout_ref.actor.clip_ratio_high=0.28"],
    "token-mean": ["actor_rollout_ref.actor.loss_agg_mode=token-mean"],
    "dynamic sampling": ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc"],
    "overlong shaping": [
        "reward.reward_manager.name=dapo",
        "+reward.reward_kwargs.max_resp_len=24",
        "+reward.reward_kwargs.overlong_buffer_cfg.enable=True",
        "+reward.reward_kwargs.overlong_buffer_cfg.len=8",
        "+reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0",
        "+reward.reward_kwargs.overlong_buffer_cfg.log=False",
    ],
}
OTHERS = {
    "token TIS": [LOG_PROBS, "algorithm.rollout_correction.rollout_is=token"],
    "sequence TIS and rejection": [
        LOG_PROBS,
        "algorithm.rollout_correction.rollout_is=sequence",
        "algorithm.rollout_correction.rollout_rs=seq_mean_k3",
        "algorithm.rollout_correction.rollout_rs_threshold=0.01",
    ],
    "bypass, ppo_clip": [LOG_PROBS, "algorithm.rollout_correction.bypass_mode=True"],
    "bypass, reinforce": [
        LOG_PROBS,
        "algorithm.rollout_correction.bypass_mode=True",
        "algorithm.rollout_correction.loss_type=reinforce",
        "algorithm.rollout_correction.rollout_is=token",
    ],
    "Dr.GRPO": [
        "algorithm.norm_adv_by_std_in_grpo=False",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm",
    ],
    "OPD with task rewards": TEACHER,
    "OPD policy gradient with task rewards": [
        *TEACHER,
        "distillation.distillation_loss.loss_mode=k1",
        "distillation.distillation_loss.use_policy_gradient=True",
    ],
    **{f"DAPO {name}": overrides for name, overrides in DAPO.items()},
    "DAPO": [option for overrides in DAPO.values() for option in overrides],
}


def score(data_source, solution_str, ground_truth, extra_info):
    """The GSM8K rule, and a second part for GDPO."""
    right = float(compute_score(solution_str, ground_truth))
    return {"score": right, "acc": right, "short": float(len(solution_str) < 40)}


def train(*overrides: str) -> list[float]:
    """The mean accuracy of each of 20 steps with 8 prompts and 8 responses each."""
    config = compose(
        [
            *QUIET,
            "data.train_batch_size=8",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
            "critic.ppo_micro_batch_size_per_gpu=16",
            "trainer.total_training_steps=20",
            *overrides,
        ]
    )
    accuracies = []
    trainer = PPOTrainer(config, compute_score=score)
    reward = trainer._compute_reward

    def watched(batch):
        batch = reward(batch)
        accuracies.append(float(np.mean(batch.non_tensor_batch["acc"])))
        return batch

    trainer._compute_reward = watched
    assert len(trainer.fit()) == 20
    return accuracies


def assert_rises(accuracies: list[float]) -> None:
    before, after = statistics.mean(accuracies[:2]), statistics.mean(accuracies[-4:])
    assert after > before + 0.2, accuracies


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ADV_ESTIMATOR_REGISTRY))
def test_estimator_learns_the_task_in_20_steps(name):
    assert_rises(train(f"algorithm.adv_estimator={name}", *NEEDS.get(name, [])))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(POLICY_LOSS_REGISTRY) - {"bypass_mode"}))
def test_policy_loss_learns_the_task_in_20_steps(name):
    assert_rises(
        train(
            "algorithm.adv_estimator=grpo",
            f"actor_rollout_ref.actor.policy_loss.loss_mode={name}",
            *LOSS_NEEDS.get(name, []),
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_recipe_learns_the_task_in_20_steps(name):
    assert_rises(train("algorithm.adv_estimator=grpo", *OTHERS[name]))


def test_filter_keeps_full_groups_with_a_signal_and_draws_more_prompts():
    trainer = PPOTrainer(
        small(
            GRPO,
            FILTER,
            "algorithm.filter_groups.metric=acc",
        )
    )
    seen = []
    advantage = trainer._compute_advantage

    def watched(batch, metrics):
        seen.append(batch)
        return advantage(batch, metrics)

    trainer._compute_advantage = watched
    history = trainer.fit()
    assert len(history) == 2
    assert trainer.batches_drawn == sum(step["train/num_gen_batches"] for step in history) > 2
    for batch in seen:
        uids, counts = np.unique(batch.non_tensor_batch["uid"], return_counts=True)
        assert len(uids) == 4 and set(counts) == {4}
        for uid in uids:
            assert len(set(batch.non_tensor_batch["acc"][batch.non_tensor_batch["uid"] == uid])) > 1


def test_filter_gives_up_with_the_numbers():
    trainer = PPOTrainer(
        small(
            GRPO,
            FILTER,
            "algorithm.filter_groups.metric=acc",
            "algorithm.filter_groups.max_num_gen_batches=2",
        ),
        compute_score=lambda **_: 1.0,
    )
    with pytest.raises(ValueError, match=r"2 batches gave 0 groups .* acc, 4 are needed: raise"):
        trainer.fit()


def test_filter_names_the_columns_it_can_use():
    trainer = PPOTrainer(
        small(
            GRPO,
            FILTER,
            "algorithm.filter_groups.metric=accc",
        )
    )
    with pytest.raises(ValueError, match=r"metric=accc: choose one of acc, score, reward, seq_reward, seq_f"):
        trainer.fit()


def test_a_column_of_compute_score_comes_before_the_rows_reward():
    columns = {"score": np.array([1.0, 0.0]), "note": np.array(["a", "b"], dtype=object)}
    rewards = np.array([[0.0, 0.5], [0.0, -0.5]])  # an overlong penalty has lowered both
    batch = DataProto.from_single_dict({"rm_scores": torch.from_numpy(rewards), **columns})
    batch.meta_info["reward_extra_keys"] = ["score", "note"]
    assert filter_values(batch, "score").tolist() == [1.0, 0.0]
    for metric in ("reward", "seq_reward", "seq_final_reward"):
        assert filter_values(batch, metric).tolist() == [0.5, -0.5]
    with pytest.raises(ValueError, match="metric=note: compute_score returned 'a'"):
        filter_values(batch, "note")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> list[str]:
    """Overrides of a run with a random model: a quarter of a second a step."""
    return [*tiny_run.make(tmp_path_factory.mktemp("tiny")), *QUIET, "trainer.total_training_steps=1"]


def disagreeing(trainer: PPOTrainer, rows: slice) -> PPOTrainer:
    """The trainer, with a sampler that claims other log-probs than the actor's for some rows."""
    generate = trainer._generate_sequences

    def claim(*args):
        batch = generate(*args)
        batch.batch["rollout_log_probs"][rows] -= 0.5
        return batch

    trainer._generate_sequences = claim
    return trainer


def test_data_that_ends_before_a_single_step_is_an_error_and_before_the_last_step_a_warning(tiny, caplog):
    filtered = [*tiny, GRPO, FILTER, "algorithm.filter_groups.metric=acc"]
    with pytest.raises(ValueError, match=r"total_epochs=1 is over after 0 of 1 steps \(10 batches drawn\)"):
        PPOTrainer(compose(filtered), compute_score=lambda **_: 1.0).fit()
    with caplog.at_level(logging.WARNING, "minirl.trainer"):
        history = PPOTrainer(
            compose([*tiny, GRPO, "trainer.total_training_steps=11"]), compute_score=coin
        ).fit()
    assert len(history) == 10
    assert "trainer.total_epochs=1 is over after 10 of 11 steps (10 batches drawn)" in caplog.text


def test_gdpo_logs_each_of_its_rewards(tiny):
    overrides = ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[acc,short]"]
    (step,) = PPOTrainer(compose([*tiny, *overrides]), compute_score=coin).fit()
    assert 0 < step["gdpo/short/mean"] < 2 and step["gdpo/short/max"] == 2
    assert step["gdpo/acc/mean"] == pytest.approx(step["critic/score/mean"])


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_trains_on_a_sampler_that_disagrees_about_half_the_rows(tiny, name):
    preset = PRESETS[name]
    trainer = PPOTrainer(compose([*tiny, GRPO, *preset.overrides()]), compute_score=coin)
    (step,) = disagreeing(trainer, slice(0, 4)).fit()
    where = "actor/rollout_corr" if preset.bypass_mode else "rollout_corr"  # within the loss, or before
    assert step[f"{where}/kl"] == pytest.approx(-0.25, abs=0.1)
    assert (f"{where}/rollout_is_mean" in step) == (preset.rollout_is is not None)
    assert step.get(f"{where}/rollout_rs_masked_fraction", 0) == pytest.approx(
        0.5 if preset.rollout_rs else 0, abs=0.25
    )


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_plus_plus"])
def test_a_correction_that_rejects_every_token_is_an_error_with_the_threshold(tiny, estimator):
    overrides = [*PRESETS["decoupled_k3_rs"].overrides(), f"algorithm.adv_estimator={estimator}"]
    trainer = PPOTrainer(compose([*tiny, *overrides]), compute_score=coin)
    with pytest.raises(
        ValueError, match=r"rollout_rs=seq_mean_k3 with rollout_rs_threshold=0.01 .* step 1: widen it .*-0.5"
    ):
        disagreeing(trainer, slice(None)).fit()


def test_a_readers_own_estimator_gets_the_configuration_as_in_verl(tiny, monkeypatch):
    monkeypatch.setattr(ADV_ESTIMATOR_REGISTRY, "_functions", dict(ADV_ESTIMATOR_REGISTRY))
    seen = []

    @register_adv_est("readers_own_in_verls_manner")
    def own(token_level_rewards, response_mask, index=None, config=None, **kwargs):
        seen.append((config.gamma, len(index)))
        return token_level_rewards * response_mask, token_level_rewards

    overrides = ["algorithm.adv_estimator=readers_own_in_verls_manner", "algorithm.gamma=0.5"]
    PPOTrainer(compose([*tiny, *overrides]), compute_score=coin).fit()
    assert seen == [(0.5, 8)]


def test_a_second_trainer_may_take_the_configuration_of_the_first_in_bypass_mode(tiny):
    config = compose([*tiny, GRPO, *PRESETS["bypass_ppo_clip"].overrides()])
    first, second = (PPOTrainer(config, compute_score=coin).fit()[0] for _ in range(2))
    assert first["actor/pg_loss"] == second["actor/pg_loss"]


@pytest.mark.parametrize("mode, topk", [("k3", 1), ("forward_kl_topk", 4)])
def test_a_teacher_that_is_the_student_has_nothing_to_teach(mode, topk):
    trainer = PPOTrainer(
        small(
            "algorithm.adv_estimator=grpo",
            *TEACHER,
            f"distillation.distillation_loss.loss_mode={mode}",
            f"distillation.distillation_loss.topk={topk}",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            steps=1,
        )
    )
    step = trainer.fit()[0]
    assert step["actor/distillation/loss"] == pytest.approx(0.0, abs=1e-5)
    assert step["actor/distillation/abs_loss"] == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize(
    "options",
    [["loss_mode=k3"], ["loss_mode=forward_kl_topk", "topk=8"], ["loss_mode=k1", "use_policy_gradient=True"]],
)
def test_a_student_approaches_another_teacher_without_task_rewards(tiny, tmp_path, options):
    tiny_run.save_model(tmp_path, seed=5, initializer_range=0.5)
    trainer = PPOTrainer(
        compose(
            [
                *tiny,
                GRPO,
                "trainer.total_epochs=2",
                "trainer.total_training_steps=20",
                "actor_rollout_ref.actor.optim.lr=1e-2",
                "distillation.enabled=True",
                f"distillation.teacher_models.teacher_model.model_path={tmp_path}",
                *(
                    f"distillation.distillation_loss.{option}"
                    for option in ["use_task_rewards=False", *options]
                ),
            ]
        ),
        compute_score=lambda **_: 0.0,
    )
    distances = [step["actor/distillation/abs_loss"] for step in trainer.fit()]
    assert statistics.mean(distances[-5:]) < 0.8 * statistics.mean(distances[:2]), distances


def test_a_teacher_without_a_path_is_refused():
    with pytest.raises(ValueError, match=r"distillation.enabled=true needs .*model_path"):
        PPOTrainer(small("algorithm.adv_estimator=grpo", "distillation.enabled=True"))


def test_remax_keeps_one_greedy_score_per_prompt():
    trainer = PPOTrainer(small("algorithm.adv_estimator=remax", steps=1))
    batch = trainer._load(next(iter(trainer.train_dataloader)))
    gen_batch = trainer._get_gen_batch(batch)
    batch = trainer._generate_sequences(gen_batch, batch, {}, {})
    for uid in set(batch.non_tensor_batch["uid"]):
        rows = batch.non_tensor_batch["uid"] == uid
        assert len(set(batch.batch["reward_baselines"][rows].tolist())) == 1
