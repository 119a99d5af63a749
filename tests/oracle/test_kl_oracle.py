"""KL, its controllers, the penalty in the reward, masked statistics and log-probs against the pinned verl."""

from types import SimpleNamespace

import pytest
import torch
from batches import DTYPES, TOLERANCE, assert_same, assert_same_metrics, batches, check_on_batches
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.verl_functions import core_algos, names_compared

import minirl.core_algos.kl as kl
import minirl.core_algos.logprob as logprob
import minirl.core_algos.masked as masked
from minirl.core_algos.groups import Groups

pytestmark = pytest.mark.oracle

NAMES = [*kl.KL_PENALTIES, *(f"{name}+" for name in kl.KL_PENALTIES)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_estimator_equals_the_pins_in_value_and_gradient(name, dtype):
    def check(b):
        b = b.to(dtype)

        def run(fn):
            lp = b.log_prob.clone().requires_grad_()
            value = fn(lp, b.ref_log_prob, name)
            return value.detach(), torch.autograd.grad(value.sum(), lp)[0]

        for mine, theirs in zip(run(kl.kl_penalty), run(core_algos.kl_penalty), strict=True):
            assert_same(mine, theirs, dtype)

    check_on_batches(check, batches())


def test_the_names_are_all_that_the_pin_accepts():
    assert set(kl.KL_PENALTIES) == names_compared(core_algos, "kl_penalty_forward") - {"full"}
    one = torch.ones(1, 1)
    for name in NAMES:
        core_algos.kl_penalty(one, one, name)
    for name in ("full", "k4", "K1", ""):
        with pytest.raises(NotImplementedError):
            core_algos.kl_penalty(one, one, name)
        with pytest.raises(ValueError):
            kl.kl_penalty(one, one, name)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 2048)), max_size=6), st.floats(0.1, 10))
def test_controllers_follow_the_pins_step_by_step(steps, target):
    for kind in names_compared(core_algos, "get_kl_controller"):
        config = SimpleNamespace(type=kind, kl_coef=0.02, target_kl=target, horizon=10_000)
        mine, theirs = kl.get_kl_controller(config), core_algos.get_kl_controller(config)
        for current_kl, n_steps in steps:
            mine.update(current_kl, n_steps)
            theirs.update(current_kl, n_steps)
            assert mine.value == pytest.approx(theirs.value, rel=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_penalty_in_the_reward_equals_the_pins(name, dtype):
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import apply_kl_penalty

    def controller():
        return kl.AdaptiveKLController(init_kl_coef=0.3, target_kl=0.1, horizon=100)

    def check(b):
        b = b.to(dtype)
        data = DataProto.from_dict(
            tensors=dict(
                response_mask=b.response_mask,
                token_level_scores=b.token_level_rewards,
                old_log_probs=b.old_log_probs,
                ref_log_prob=b.ref_log_prob,
            )
        )
        theirs_ctrl, mine_ctrl = controller(), controller()
        data, theirs = apply_kl_penalty(data, theirs_ctrl, name)
        rewards, mine = kl.apply_kl_penalty(
            b.token_level_rewards,
            b.old_log_probs,
            b.ref_log_prob,
            b.response_mask,
            kl_ctrl=mine_ctrl,
            kl_penalty_name=name,
        )
        assert_same(rewards, data.batch["token_level_rewards"], dtype)
        assert_same_metrics(mine, theirs, dtype)
        assert mine_ctrl.value == pytest.approx(theirs_ctrl.value, rel=TOLERANCE[dtype])

    check_on_batches(check, batches())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masked_statistics_equal_the_pins(dtype):
    import verl.utils.torch_functional as theirs

    def check(b):
        values, mask = b.advantages.to(dtype), b.response_mask
        for m in (mask, mask.bool(), mask.float()):
            for axis in (None, -1):
                assert_same(masked.masked_sum(values, m, axis), theirs.masked_sum(values, m, axis), dtype)
                assert_same(masked.masked_mean(values, m, axis), theirs.masked_mean(values, m, axis), dtype)
            assert_same(masked.masked_var(values, m), theirs.masked_var(values, m), dtype)
            for shift in (True, False):
                call = (values, m, shift)
                assert_same(masked.masked_whiten(*call), theirs.masked_whiten(*call), dtype)

    check_on_batches(check, batches())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_group_mean_and_std_equal_the_pins(dtype):
    from verl.utils import as_torch_index, group_mean_std

    def check(b):
        scores = b.token_level_rewards.to(dtype).sum(-1)
        ids = as_torch_index(b.index, device="cpu")
        mean, std, count = group_mean_std(scores, ids, eps=0.0, device="cpu")
        groups = Groups(b.index)
        assert_same(groups.baseline(scores), mean[ids], dtype)
        assert_same(groups.std(scores), std[ids], dtype)
        assert torch.equal(groups.rows_in_group, count[ids].long())

    check_on_batches(check, batches())


@pytest.mark.parametrize("chunk", [1 << 20, 64], ids=["one chunk", "many chunks"])
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(2, 40),
    st.integers(0, 999),
    st.sampled_from([1.0, 30.0]),
)
def test_log_probs_entropy_and_sum_pi_squared_equal_the_pins(chunk, rows, width, vocab, seed, scale):
    import verl.utils.torch_functional as theirs

    rng = torch.Generator().manual_seed(seed)
    data = scale * torch.randn(rows, width, vocab, generator=rng)
    labels = torch.randint(0, vocab, (rows, width), generator=rng)
    weight = torch.randn(rows, width, generator=rng)

    def run(fn, *args):
        logits = data.clone().requires_grad_()
        out = fn(logits, *args)
        return out.detach(), torch.autograd.grad((out * weight).sum(), logits)[0]

    pairs = [
        (run(logprob.logprobs_from_logits, labels), run(theirs.logprobs_from_logits_v2, labels)),
        (run(logprob.entropy_from_logits), run(theirs.entropy_from_logits)),
    ]
    original, logprob.CHUNK_ELEMENTS = logprob.CHUNK_ELEMENTS, chunk
    try:
        for mine, pins in pairs:
            torch.testing.assert_close(mine[0], pins[0], rtol=1e-6, atol=1e-6 * scale)
            torch.testing.assert_close(mine[1], pins[1], rtol=1e-5, atol=1e-5 * scale)
        mine = logprob.sum_pi_squared_from_logits(data)
        assert_same(mine, data.double().softmax(-1).square().sum(-1))
        # the pin exponentiates a difference of two large numbers
        pins = theirs.calculate_sum_pi_squared_from_logits(data)
        torch.testing.assert_close(mine, pins, rtol=2e-6 * scale, atol=1e-6)
    finally:
        logprob.CHUNK_ELEMENTS = original


def test_log_probs_of_bfloat16_logits_are_float32_here_and_rounded_in_the_pin():
    import verl.utils.torch_functional as theirs

    logits = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    labels = torch.zeros(2, 3, dtype=torch.long)
    exact = logits.double().log_softmax(-1)[..., 0]
    mine = logprob.logprobs_from_logits(logits, labels)
    assert mine.dtype == torch.float32
    assert (mine - exact).abs().max() < 1e-5
    assert (theirs.logprobs_from_logits_v2(logits, labels) - exact).abs().max() > 1e-3
