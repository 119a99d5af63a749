"""Every key that a short run prints has an entry in data/metrics.yml: minirl and verl's own fit()."""

import pytest
from runs import small

from minirl.explain import Log
from minirl.trainer import PPOTrainer

EVERYTHING = (
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=true",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.entropy_coeff=0.001",
    "actor_rollout_ref.actor.calculate_sum_pi_squared=true",
    "actor_rollout_ref.rollout.calculate_log_probs=true",
    "trainer.test_freq=1",
    "data.val_max_samples=8",
)
GRPO = ("algorithm.adv_estimator=grpo",)


@pytest.mark.parametrize("overrides", [EVERYTHING, GRPO], ids=["PPO with every switch", "GRPO"])
def test_every_metric_that_minirl_prints_is_in_the_table(overrides):
    log = Log(PPOTrainer(small(*overrides, steps=1)).fit())
    assert len(log.names()) > 50
    assert log.unknown() == []


@pytest.mark.oracle
@pytest.mark.slow
@pytest.mark.parametrize("overrides", [EVERYTHING, GRPO], ids=["PPO with every switch", "GRPO"])
def test_every_metric_that_verl_prints_is_in_the_table(overrides):
    from minirl.verl_bridge import VerlTrainer

    log = Log(VerlTrainer(small(*overrides, steps=1)).fit())
    assert len(log.names()) > 50
    assert log.unknown() == []
