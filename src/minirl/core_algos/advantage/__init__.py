"""One file per family of advantage estimators; importing this package fills the registry.

verl: verl.trainer.ppo.core_algos:ADV_ESTIMATOR_REGISTRY
"""

from minirl.core_algos.advantage.gae import compute_gae_advantage_return
from minirl.core_algos.advantage.gdpo import compute_gdpo_outcome_advantage, gdpo_component_scores
from minirl.core_algos.advantage.gpg import compute_gpg_outcome_advantage
from minirl.core_algos.advantage.grpo import compute_grpo_outcome_advantage
from minirl.core_algos.advantage.opo import compute_opo_outcome_advantage
from minirl.core_algos.advantage.optimal_token_baseline import (
    compute_multi_turn_optimal_token_baseline_advantage,
    compute_optimal_token_baseline_advantage,
)
from minirl.core_algos.advantage.passk import compute_grpo_passk_outcome_advantage
from minirl.core_algos.advantage.registry import (
    ADV_ESTIMATOR_REGISTRY,
    estimate_advantage,
    get_adv_estimator_fn,
    register_adv_est,
)
from minirl.core_algos.advantage.reinforce_plus_plus import (
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
)
from minirl.core_algos.advantage.remax import compute_remax_outcome_advantage
from minirl.core_algos.advantage.rloo import (
    compute_rloo_outcome_advantage,
    compute_rloo_vectorized_outcome_advantage,
)

__all__ = [
    "ADV_ESTIMATOR_REGISTRY",
    "compute_gae_advantage_return",
    "compute_gdpo_outcome_advantage",
    "compute_gpg_outcome_advantage",
    "compute_grpo_outcome_advantage",
    "compute_grpo_passk_outcome_advantage",
    "compute_multi_turn_optimal_token_baseline_advantage",
    "compute_opo_outcome_advantage",
    "compute_optimal_token_baseline_advantage",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_rloo_outcome_advantage",
    "compute_rloo_vectorized_outcome_advantage",
    "estimate_advantage",
    "gdpo_component_scores",
    "get_adv_estimator_fn",
    "register_adv_est",
]
