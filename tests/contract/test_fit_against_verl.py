"""One run through both trainers: minirl's, and verl's own `RayPPOTrainer.fit()` on minirl's workers.

Same seeds give the same prompts and the same responses, so everything after them can be compared.
"""

import pytest
import torch
from runs import ONLY_VERL, small, verl_trainer, weights

from minirl.trace import trace
from minirl.trainer import PPOTrainer

pytestmark = pytest.mark.oracle

LOG_PROBS = "actor_rollout_ref.rollout.calculate_log_probs=True"
CASES = {
    "grpo": ["algorithm.adv_estimator=grpo"],
    "gae": ["algorithm.adv_estimator=gae", "critic.ppo_micro_batch_size_per_gpu=8"],
    "gae, KL in reward and in loss, entropy, epochs": [
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=True",
        "algorithm.kl_ctrl.type=adaptive",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.entropy_coeff=0.01",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.shuffle=True",
        "algorithm.gamma=0.99",
        "algorithm.lam=0.9",
    ],
    "grpo, micro-batches, rollout log-probs": [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
        LOG_PROBS,
    ],
    "grpo, truncated importance weights": [
        "algorithm.adv_estimator=grpo",
        LOG_PROBS,
        "algorithm.rollout_correction.rollout_is=token",
    ],
    "critic warm-up": ["algorithm.adv_estimator=gae", "trainer.critic_warmup=2"],
    "remax": ["algorithm.adv_estimator=remax"],
    "gdpo": ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[acc]"],
    "optimal token baseline, importance weights": [
        "algorithm.adv_estimator=optimal_token_baseline",
        "actor_rollout_ref.actor.calculate_sum_pi_squared=True",
        LOG_PROBS,
        "algorithm.rollout_correction.rollout_is=sequence",
    ],
    "reinforce_plus_plus": ["algorithm.adv_estimator=reinforce_plus_plus"],
    "seq-mean": [
        "algorithm.adv_estimator=rloo",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
        "actor_rollout_ref.rollout.temperature=0.7",
    ],
    "learning-rate schedule": [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=1",
    ],
}
# what only one of the two reports, and why


@pytest.fixture(scope="module", params=CASES, ids=lambda name: name.replace(" ", "_"))
def runs(request):
    """(minirl's trainer and trace, verl's trainer and trace) after two steps."""
    pair = []
    for make in (PPOTrainer, verl_trainer):
        trainer = make(small(*CASES[request.param], "trainer.test_freq=2", "trainer.val_before_train=True"))
        with trace(trainer) as t:
            trainer.fit()
        pair += [trainer, t]
    return pair


def test_same_metric_names_with_equal_values(runs):
    ours, _, theirs, _ = runs
    assert len(ours.history) == len(theirs.history) == 3  # validation before training, then two steps
    for mine, verls in zip(ours.history, theirs.history, strict=True):
        assert set(verls) - set(mine) <= ONLY_VERL
        assert set(mine) - set(verls) == set()
        for key in mine:
            if key.startswith(("timing", "perf/")) or "/perf/" in key:
                continue  # clocks and memory
            assert float(mine[key]) == pytest.approx(float(verls[key]), rel=1e-4, abs=1e-5), key


def test_same_keys_at_each_station(runs):
    _, ours, _, theirs = runs
    # verl scores inside the rollout call, minirl right after it: those keys arrive one station earlier there
    early = {"rm_scores", "acc", "reward_extra_keys"}
    # multi-modal and multi-turn bookkeeping; ReMax's greedy answers are asked for in the same call there
    only_theirs = {"images_seqlens", "multi_turn", "__do_sample__"}
    only_ours = {"rollout_seed"}  # ours alone travels in meta_info
    for mine, verls in zip(ours.steps, theirs.steps, strict=True):
        assert list(mine.stations) == list(verls.stations)
        for name, station in mine.stations.items():
            a, b = set(station.keys) - only_ours, set(verls.stations[name].keys) - only_theirs
            assert a == (b - early if name == "rollout" else b), name


@pytest.mark.parametrize("key", ["advantages", "returns", "token_level_rewards", "old_log_probs"])
def test_same_rows_of_the_batch(runs, key):
    _, ours, _, theirs = runs
    for mine, verls in zip(ours.steps, theirs.steps, strict=True):
        for sample in (0, 1):
            assert mine.row(sample, "responses") == verls.row(sample, "responses")
            got, want = torch.tensor(mine.row(sample, key)), torch.tensor(verls.row(sample, key))
            mask = torch.tensor(mine.row(sample, "response_mask")).bool()
            assert got.shape == want.shape
            torch.testing.assert_close(got[mask], want[mask], rtol=1e-5, atol=1e-5)


def test_same_weights_after_the_run(runs):
    ours, _, theirs, _ = runs
    for mine, verls in zip(weights(ours), theirs.actor.parameters, strict=True):
        torch.testing.assert_close(mine, verls.detach(), rtol=1e-5, atol=1e-5)
    if ours.use_critic:
        critic = theirs.trainer.critic_wg.worker
        for mine, verls in zip(weights(ours, "critic"), critic.parameters, strict=True):
            torch.testing.assert_close(mine, verls.detach(), rtol=1e-5, atol=1e-5)


def test_the_pins_value_loss_grows_with_the_number_of_micro_batches_and_ours_does_not():
    """verl PR 6957, issue 7110, fixed in 0.9.1: 0.8.0 divides by each micro-batch's own tokens."""
    grad_norms = {}
    for size in (8, 2):
        overrides = ["algorithm.adv_estimator=gae", f"critic.ppo_micro_batch_size_per_gpu={size}"]
        for name, make in (("minirl", PPOTrainer), ("verl", verl_trainer)):
            trainer = make(small(*overrides, "critic.optim.clip_grad=1e9", steps=1))
            grad_norms[name, size] = trainer.fit()[-1]["critic/grad_norm"]
    assert grad_norms["minirl", 2] == pytest.approx(grad_norms["minirl", 8], rel=1e-3)
    assert grad_norms["verl", 8] == pytest.approx(grad_norms["minirl", 8], rel=1e-3)
    assert grad_norms["verl", 2] > 2 * grad_norms["verl", 8]
