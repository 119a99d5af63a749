"""One file per family of advantage estimators; importing this package fills the registry.

verl: verl.trainer.ppo.core_algos:ADV_ESTIMATOR_REGISTRY
"""

from minirl.core_algos.advantage.gae import compute_gae_advantage_return
from minirl.core_algos.advantage.grpo import compute_grpo_outcome_advantage
from minirl.core_algos.advantage.registry import (
    ADV_ESTIMATOR_REGISTRY,
    estimate_advantage,
    get_adv_estimator_fn,
    register_adv_est,
)

__all__ = [
    "ADV_ESTIMATOR_REGISTRY",
    "compute_gae_advantage_return",
    "compute_grpo_outcome_advantage",
    "estimate_advantage",
    "get_adv_estimator_fn",
    "register_adv_est",
]
