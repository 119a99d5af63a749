"""The options of rollout correction, and the combinations of them that have a name.

algorithm.rollout_correction.* -> RolloutCorrection; a preset's name -> RolloutCorrection.
Simplified against verl: a preset is a value, changed with dataclasses.replace; verl's are factories.
verl: verl.trainer.config.algorithm:RolloutCorrectionConfig
"""

from dataclasses import asdict, dataclass
from typing import Any

from minirl.core_algos.registry import unknown_name
from minirl.core_algos.rollout_correction.thresholds import Threshold


@dataclass(frozen=True)
class RolloutCorrection:
    """The options `algorithm.rollout_correction.*`; `PRESETS` holds the named combinations.

    Two switches that can be on together: weights (rollout_is) and rejection (rollout_rs).
    verl: verl.trainer.config.algorithm:RolloutCorrectionConfig
    """

    rollout_is: str | None = None  # token | sequence | None
    rollout_is_threshold: Threshold = 2.0  # "2.0": truncate; "0.5_5.0": zero outside (IcePop)
    rollout_is_batch_normalize: bool = False
    rollout_rs: str | None = None  # comma-separated ROLLOUT_RS_OPTIONS
    rollout_rs_threshold: Threshold | None = None
    bypass_mode: bool = False
    loss_type: str = "ppo_clip"  # in bypass mode: ppo_clip | reinforce

    def overrides(self) -> list[str]:
        """For `minirl.config.compose`, with the switch that makes the rollout return its log-probs."""
        return ["actor_rollout_ref.rollout.calculate_log_probs=true"] + [
            f"algorithm.rollout_correction.{key}={'null' if value is None else value}"
            for key, value in asdict(self).items()
        ]


def _presets() -> dict[str, RolloutCorrection]:
    token_tis = {"rollout_is": "token"}
    seq_tis = {"rollout_is": "sequence"}
    icepop = {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}
    geo_rs = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
    k3_rs = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
    seq_rs = {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"}
    clip = {"bypass_mode": True, "loss_type": "ppo_clip"}
    reinforce = {"bypass_mode": True, "loss_type": "reinforce"}
    return {
        name: RolloutCorrection(**options)
        for name, options in {
            "disabled": {},
            "decoupled_token_is": token_tis,
            "decoupled_seq_is": seq_tis,
            "decoupled_token_icepop": icepop,
            "decoupled_seq_is_rs": seq_tis | seq_rs,
            "decoupled_geo_rs": geo_rs,
            "decoupled_geo_rs_seq_tis": seq_tis | geo_rs,
            "decoupled_geo_rs_token_tis": token_tis | geo_rs,
            "decoupled_k3_rs": k3_rs,
            "decoupled_k3_rs_seq_tis": seq_tis | k3_rs,
            "decoupled_k3_rs_token_tis": token_tis | k3_rs,
            "bypass_ppo_clip": clip,
            "bypass_ppo_clip_geo_rs": clip | geo_rs,
            "bypass_ppo_clip_k3_rs": clip | k3_rs,
            "bypass_pg_is": reinforce | seq_tis,
            "bypass_pg_token_icepop": reinforce | icepop,
            "bypass_pg_geo_rs": reinforce | geo_rs,
            "bypass_pg_geo_rs_seq_tis": reinforce | seq_tis | geo_rs,
            "bypass_pg_geo_rs_token_tis": reinforce | token_tis | geo_rs,
        }.items()
    }


PRESETS = _presets()


def rollout_correction_preset(name: str) -> RolloutCorrection:
    """The preset called `name`. Raises ValueError with the nearest known name."""
    if name not in PRESETS:
        raise ValueError(unknown_name("preset", name, PRESETS, "algorithm.rollout_correction"))
    return PRESETS[name]


def correction_options(config: Any) -> dict[str, Any]:
    """The keyword arguments of `compute_rollout_correction_and_rejection_mask` from a config object."""
    return {
        "rollout_is": config.rollout_is,
        "rollout_is_threshold": config.rollout_is_threshold,
        "rollout_is_batch_normalize": config.rollout_is_batch_normalize,
        "rollout_rs": config.rollout_rs,
        "rollout_rs_threshold": config.rollout_rs_threshold,
    }
