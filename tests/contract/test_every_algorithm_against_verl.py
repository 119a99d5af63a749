"""Every algorithm, by its configuration keys, through minirl's fit and verl's own: equal metrics and weights.

The random model of `tiny_run` on both sides, with a sampler whose log-probs are off, so that there is
something to correct.
"""

import math

import pytest
import tiny_run
import torch
from runs import ONLY_VERL, QUIET, steady, verl_trainer, weights
from tiny_run import coin

from minirl.config import compose
from minirl.core_algos.advantage import ADV_ESTIMATOR_REGISTRY
from minirl.core_algos.agg_loss import LOSS_AGG_MODES
from minirl.core_algos.kl import KL_PENALTIES
from minirl.core_algos.policy_loss import POLICY_LOSS_REGISTRY
from minirl.core_algos.rollout_correction import PRESETS
from minirl.trainer import PPOTrainer

pytestmark = [pytest.mark.oracle, pytest.mark.slow]

A, G, C = "actor_rollout_ref.actor", "algorithm", "algorithm.rollout_correction"
GRPO = f"{G}.adv_estimator=grpo"
MODE = f"{A}.loss_agg_mode="
# counted before truncation here and in 0.9.1, after it in 0.8.0
COUNTED_LATER = {"rollout_corr/rollout_is_seq_fraction_high", "rollout_corr/rollout_is_seq_fraction_low"}
NEEDS = {
    "gdpo": [f"{G}.gdpo_reward_keys=[acc,short]", f"{G}.gdpo_reward_weights=[1.0,0.5]"],
    "optimal_token_baseline": [f"{A}.calculate_sum_pi_squared=True"],
    "tir_optimal_token_baseline": [f"{A}.calculate_sum_pi_squared=True"],
}
ICEPOP = [*PRESETS["decoupled_token_icepop"].overrides(), f"{C}.rollout_is_threshold=0.8_1.2"]
NORMALISED = [*PRESETS["decoupled_seq_is"].overrides(), f"{C}.rollout_is_batch_normalize=True"]
SEVERAL_RS = [
    *PRESETS["disabled"].overrides(),
    f"{C}.rollout_rs='token_k3,seq_max_k2'",
    f"{C}.rollout_rs_threshold='0.02,0.05'",
]
CORRECTIONS = {
    "weights": PRESETS["decoupled_token_is"].overrides(),
    "IcePop": ICEPOP,
    "rejection": SEVERAL_RS,
}
# dro is verl 0.9.1's; bypass_mode has a test of its own below
LOSSES = sorted(set(POLICY_LOSS_REGISTRY) - {"dro", "bypass_mode"})
PINNED_MODES = [mode for mode in LOSS_AGG_MODES if mode != "token-sum"]


def modes_of(loss: str) -> list[str]:
    return ["seq-mean-token-mean"] if loss == "gspo" else PINNED_MODES  # 0.8.0's gspo knows one


def loss_cases() -> dict[str, list[str]]:
    cases = {}
    for loss in LOSSES:
        for mode in modes_of(loss):
            cases[f"loss {loss}, {mode}"] = [f"{A}.policy_loss.loss_mode={loss}", MODE + mode]
        for name, overrides in CORRECTIONS.items():
            cases[f"loss {loss}, {name}"] = [
                f"{A}.policy_loss.loss_mode={loss}",
                MODE + modes_of(loss)[0],
                *overrides,
            ]
    return cases


CASES = {
    **{name: [f"{G}.adv_estimator={name}", *NEEDS.get(name, [])] for name in sorted(ADV_ESTIMATOR_REGISTRY)},
    **{
        f"{name}, weights": [f"{G}.adv_estimator={name}", *NEEDS.get(name, []), *NORMALISED]
        for name in sorted(ADV_ESTIMATOR_REGISTRY)
    },
    **{name: [GRPO, *overrides] for name, overrides in loss_cases().items()},
    **{
        # rloo: dividing by a spread of 1e-5, as grpo does here, would show the last digits of float32
        f"KL by {name}": [
            f"{G}.adv_estimator=rloo",
            f"{A}.use_kl_loss=True",
            f"{A}.kl_loss_coef=1.0",
            f"{A}.kl_loss_type={name}",
            f"{G}.use_kl_in_reward=True",
            f"{G}.kl_penalty={name}",
            f"{G}.kl_ctrl.type=adaptive",
        ]
        for name in [*KL_PENALTIES, *(f"{name}+" for name in KL_PENALTIES)]
    },
    **{
        # one mini-batch, so that none is rejected as a whole: see the last test
        f"preset {name}": [
            GRPO,
            *preset.overrides(),
            f"{A}.ppo_mini_batch_size=4",
            f"{A}.ppo_micro_batch_size_per_gpu=8",
        ]
        for name, preset in PRESETS.items()
        if not preset.bypass_mode
    },
    "Dr.GRPO": [GRPO, f"{G}.norm_adv_by_std_in_grpo=False", MODE + "seq-mean-token-sum-norm"],
    "a constant to divide by": [GRPO, MODE + "seq-mean-token-sum-norm", f"{A}.loss_scale_factor=5"],
    "entropy": [GRPO, f"{A}.entropy_coeff=0.1"],
    "a critic nobody asks": [GRPO, "critic.enable=True"],
    "overlong penalty": [
        GRPO,
        "reward.reward_manager.name=dapo",
        "reward.reward_kwargs.max_resp_len=6",
        "reward.reward_kwargs.overlong_buffer_cfg={enable: true, len: 4, penalty_factor: 1.0, log: true}",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> list[str]:
    """A mini-batch is one micro-batch: 0.8.0's value loss and geo_mean depend on how it is cut."""
    folder = tmp_path_factory.mktemp("tiny")
    whole = [f"{A}.ppo_micro_batch_size_per_gpu=4", "critic.ppo_micro_batch_size_per_gpu=4"]
    pace = [f"{A}.ppo_epochs=2", f"{A}.optim.lr=1e-2", "trainer.total_training_steps=2"]
    return [*tiny_run.make(folder), *QUIET, *whole, *pace]


@pytest.fixture(autouse=True)
def sampler_is_off(monkeypatch):
    """Log-probs off by up to 0.3 in about half the rows, by what is in them: the same on both sides."""
    from minirl.rollout.builtin import BuiltinRollout

    generate = BuiltinRollout.generate_sequences

    def off(self, prompts):
        output = generate(self, prompts)
        if "rollout_log_probs" in output.batch:
            responses, right = output.batch["responses"], output.batch["rollout_log_probs"]
            some_rows = (responses.sum(-1, keepdim=True) % 2) * output.batch["response_mask"]
            output.batch["rollout_log_probs"] = right + 0.3 * (0.37 * responses).sin() * some_rows
        return output

    monkeypatch.setattr(BuiltinRollout, "generate_sequences", off)


def run(make, overrides: list[str]):
    torch.manual_seed(0)  # clip_cov draws from torch's generator in verl
    trainer = make(compose(overrides), compute_score=coin)
    return trainer, trainer.fit()


def assert_equal_history(ours: list[dict], theirs: list[dict]) -> None:
    assert len(ours) == len(theirs) == 2
    for mine, verls in zip(ours, theirs, strict=True):
        assert mine.keys() ^ verls.keys() <= ONLY_VERL
    for mine, verls in zip(steady(ours), steady(theirs), strict=True):
        for key in mine.keys() - COUNTED_LATER:
            assert float(mine[key]) == pytest.approx(float(verls[key]), rel=1e-3, abs=1e-4), key


@pytest.mark.parametrize("name", CASES)
def test_fit_equals_verls(tiny, name):
    ours, our_history = run(PPOTrainer, [*tiny, *CASES[name]])
    theirs, their_history = run(verl_trainer, [*tiny, *CASES[name]])
    assert_equal_history(our_history, their_history)
    for mine, verls in zip(weights(ours), theirs.actor.parameters, strict=True):
        torch.testing.assert_close(mine, verls.detach(), rtol=1e-3, atol=1e-4)


def test_bypass_modes_loss_reaches_our_workers_and_never_the_pins(tiny):
    """verl issue 4912: its workers took their copy of the configuration before the switch is thrown."""
    losses = {}
    for name in ("bypass_ppo_clip", "bypass_pg_is"):
        for side, make in (("minirl", PPOTrainer), ("verl", verl_trainer)):
            _, history = run(make, [*tiny, GRPO, *PRESETS[name].overrides()])
            losses[side, name] = [step["actor/pg_loss"] for step in history]
    assert losses["verl", "bypass_ppo_clip"] == losses["verl", "bypass_pg_is"]
    assert losses["minirl", "bypass_ppo_clip"] == pytest.approx(losses["verl", "bypass_ppo_clip"], abs=1e-4)
    assert losses["minirl", "bypass_pg_is"] != pytest.approx(losses["verl", "bypass_pg_is"], abs=1e-2)


def test_a_mini_batch_that_is_rejected_as_a_whole_is_no_step_here_and_a_loss_of_nan_in_the_pin(tiny):
    overrides = [*tiny, GRPO, *PRESETS["decoupled_geo_rs"].overrides()]
    (_, ours), (_, theirs) = run(PPOTrainer, overrides), run(verl_trainer, overrides)
    assert ours[0]["actor/pg_loss"] == pytest.approx(theirs[0]["actor/pg_loss"], abs=1e-4)
    assert math.isnan(theirs[1]["actor/pg_loss"]) and math.isfinite(ours[1]["actor/pg_loss"])
