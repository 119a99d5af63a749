"""The same losses in TRL: its loss methods, called on a stand-in trainer, against ours. Loss and gradient.

TRL's `loss_type` is verl's `loss_agg_mode` (plus, for some, another policy loss); the table MAP says how.
"""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from batches import Batch, assert_same, batches
from hypothesis import given, settings
from torch import Tensor

from minirl.core_algos.agg_loss import agg_loss
from minirl.core_algos.kl import kl_penalty
from minirl.core_algos.masked import spread_over_tokens
from minirl.core_algos.policy_loss import get_policy_loss_fn

pytestmark = pytest.mark.oracle

LOW, HIGH, DELTA, BETA = 0.2, 0.28, 3.0, 0.05
TAU = dict(tau_pos=1.0, tau_neg=1.05)
CISPO_CAP = 1.4  # TRL bounds the ratio from above only, at this value; verl within [1 - low, 1 + high]
MAP = {
    # TRL: (loss_type, importance level) -> verl: (policy loss, loss_agg_mode)
    "grpo": ("grpo", "token", "vanilla", "seq-mean-token-mean"),
    "bnpo": ("bnpo", "token", "vanilla", "token-mean"),
    "dapo": ("dapo", "token", "vanilla", "token-mean"),
    "dr_grpo": ("dr_grpo", "token", "vanilla", "seq-mean-token-sum-norm"),
    "luspo": ("luspo", "token", "vanilla", "seq-mean-token-sum"),
    "gspo": ("grpo", "sequence", "gspo", "seq-mean-token-mean"),
    "cispo": ("cispo", "token", "cispo", "token-mean"),
    "sapo": ("sapo", "token", "sapo", "seq-mean-token-mean"),
}
TOKENS_OF_THE_WHOLE_BATCH = 123
MAX_COMPLETION_LENGTH = 17


@pytest.fixture(scope="module")
def trl_trainers():
    from trl import GRPOTrainer, RLOOTrainer

    return SimpleNamespace(GRPO=GRPOTrainer, RLOO=RLOOTrainer)


def stand_in(loss_type: str, level: str, beta: float, log_prob: Tensor) -> SimpleNamespace:
    """What `_compute_loss` reads of a trainer, on one process without gradient accumulation."""

    def model_output(*args, **kwargs):
        return log_prob, torch.zeros_like(log_prob), None

    return SimpleNamespace(
        _get_per_token_logps_and_entropies=model_output,
        loss_type=loss_type,
        importance_sampling_level=level,
        beta=beta,
        epsilon_low=LOW,
        epsilon_high=CISPO_CAP if loss_type == "cispo" else HIGH,
        args=SimpleNamespace(
            use_bias_correction_kl=False,
            delta=DELTA if level == "token" else None,  # GSPO has no second clip
            sapo_temperature_pos=TAU["tau_pos"],
            sapo_temperature_neg=TAU["tau_neg"],
            steps_per_generation=1,
        ),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        max_completion_length=MAX_COMPLETION_LENGTH,
        current_gradient_accumulation_steps=1,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )


def inputs_of(b: Batch) -> dict[str, Tensor]:
    prompt = torch.ones(len(b.index), 1, dtype=torch.long)
    return dict(
        prompt_ids=prompt,
        prompt_mask=prompt,
        completion_ids=torch.zeros_like(b.response_mask),
        completion_mask=b.response_mask,
        advantages=b.advantages[:, 0],
        old_per_token_logps=b.old_log_probs,
        ref_per_token_logps=b.ref_log_prob,
        old_logps=(b.old_log_probs * b.response_mask).sum(1),
        num_items_in_batch=torch.tensor(float(TOKENS_OF_THE_WHOLE_BATCH)),
    )


def config_for(policy_loss: str) -> SimpleNamespace:
    low, high = (1.0, CISPO_CAP - 1.0) if policy_loss == "cispo" else (LOW, HIGH)
    return SimpleNamespace(
        clip_ratio=None, clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=DELTA, **TAU
    )


@pytest.mark.parametrize("beta", [0.0, BETA], ids=["no KL", "KL in the loss"])
@pytest.mark.parametrize("name", MAP)
def test_loss_and_gradient_equal_trls(trl_trainers, name, beta):
    loss_type, level, policy_loss, mode = MAP[name]

    @settings(max_examples=10, deadline=None, derandomize=True)
    @given(batches(ratios=("none", "small", "large")))  # TRL does not bound the log-ratio
    def check(b):
        log_prob = b.log_prob.clone().requires_grad_()
        theirs = trl_trainers.GRPO._compute_loss(
            stand_in(loss_type, level, beta, log_prob), None, inputs_of(b)
        )
        (their_gradient,) = torch.autograd.grad(theirs, log_prob)

        info = dict(global_batch_size=len(b.index))  # TRL counts empty rows, as verl's trainer does
        if loss_type in ("dapo", "cispo"):
            info["batch_num_tokens"] = TOKENS_OF_THE_WHOLE_BATCH
        if loss_type == "dr_grpo":
            info["loss_scale_factor"] = MAX_COMPLETION_LENGTH
        log_prob = b.log_prob.clone().requires_grad_()
        advantages = spread_over_tokens(b.advantages[:, 0], b.response_mask)
        mine, _ = get_policy_loss_fn(policy_loss)(
            b.old_log_probs,
            log_prob,
            advantages,
            b.response_mask,
            loss_agg_mode=mode,
            config=config_for(policy_loss),
            **info,
        )
        kl = agg_loss(kl_penalty(log_prob, b.ref_log_prob, "k3"), b.response_mask, mode, **info)
        mine = mine + beta * kl
        (my_gradient,) = torch.autograd.grad(mine, log_prob)
        assert_same(mine, theirs)
        assert_same(my_gradient, their_gradient)

    check()


@settings(max_examples=10, deadline=None, derandomize=True)
@given(batches())
def check_rloo(trainer, b):
    # TRL's ratio is one per response, so only at ratio 1 are the two the same algorithm
    log_prob = b.old_log_probs.clone().requires_grad_()
    theirs = trainer._compute_loss(stand_in("rloo", "token", 0.0, log_prob), None, inputs_of(b))
    (their_gradient,) = torch.autograd.grad(theirs, log_prob)
    log_prob = b.old_log_probs.clone().requires_grad_()
    mine, _ = get_policy_loss_fn("vanilla")(
        b.old_log_probs,
        log_prob,
        spread_over_tokens(b.advantages[:, 0], b.response_mask),
        b.response_mask,
        loss_agg_mode="seq-mean-token-sum",
        config=config_for("vanilla"),
        global_batch_size=len(b.index),
    )
    (my_gradient,) = torch.autograd.grad(mine, log_prob)
    assert_same(my_gradient, their_gradient)


def test_the_gradient_of_rloo_at_ratio_one_equals_trls(trl_trainers):
    check_rloo(trl_trainers.RLOO)
