"""One file per policy loss; importing this package fills the registry.

verl: verl.trainer.ppo.core_algos:POLICY_LOSS_REGISTRY
"""

from minirl.core_algos.policy_loss.registry import (
    POLICY_LOSS_REGISTRY,
    get_policy_loss_fn,
    register_policy_loss,
)
from minirl.core_algos.policy_loss.vanilla import compute_policy_loss_vanilla

__all__ = [
    "POLICY_LOSS_REGISTRY",
    "compute_policy_loss_vanilla",
    "get_policy_loss_fn",
    "register_policy_loss",
]
