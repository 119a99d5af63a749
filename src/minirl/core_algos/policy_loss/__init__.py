"""One file per policy loss; importing this package fills the registry.

verl: verl.trainer.ppo.core_algos:POLICY_LOSS_REGISTRY
"""

from minirl.core_algos.policy_loss.bypass import (
    compute_policy_loss_bypass_mode,
    compute_policy_loss_reinforce,
)
from minirl.core_algos.policy_loss.cispo import compute_policy_loss_cispo
from minirl.core_algos.policy_loss.clip_cov import compute_policy_loss_clip_cov
from minirl.core_algos.policy_loss.dppo import compute_policy_loss_dppo_kl, compute_policy_loss_dppo_tv
from minirl.core_algos.policy_loss.dro import compute_policy_loss_dro
from minirl.core_algos.policy_loss.geo_mean import compute_policy_loss_geo_mean
from minirl.core_algos.policy_loss.gpg import compute_policy_loss_gpg
from minirl.core_algos.policy_loss.gspo import compute_policy_loss_gspo
from minirl.core_algos.policy_loss.kl_cov import compute_policy_loss_kl_cov
from minirl.core_algos.policy_loss.registry import (
    POLICY_LOSS_REGISTRY,
    get_policy_loss_fn,
    register_policy_loss,
)
from minirl.core_algos.policy_loss.sapo import compute_policy_loss_sapo
from minirl.core_algos.policy_loss.vanilla import compute_policy_loss_vanilla

__all__ = [
    "POLICY_LOSS_REGISTRY",
    "compute_policy_loss_bypass_mode",
    "compute_policy_loss_cispo",
    "compute_policy_loss_clip_cov",
    "compute_policy_loss_dppo_kl",
    "compute_policy_loss_dppo_tv",
    "compute_policy_loss_dro",
    "compute_policy_loss_geo_mean",
    "compute_policy_loss_gpg",
    "compute_policy_loss_gspo",
    "compute_policy_loss_kl_cov",
    "compute_policy_loss_reinforce",
    "compute_policy_loss_sapo",
    "compute_policy_loss_vanilla",
    "get_policy_loss_fn",
    "register_policy_loss",
]
