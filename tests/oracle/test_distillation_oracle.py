"""On-policy distillation against the pinned verl: token losses, both forms of the loss, metrics."""

from types import SimpleNamespace

import pytest
import torch
from batches import assert_same, batches
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.verl_functions import actor_config, core_algos

import minirl.core_algos.distillation as ours
from minirl.core_algos.kl import KL_PENALTIES

pytestmark = pytest.mark.oracle

GLOBAL = dict(dp_size=2, batch_num_tokens=31, global_batch_size=7)


@pytest.fixture(scope="module")
def losses():
    import verl.trainer.distillation.losses as module

    return module


@pytest.fixture(scope="module")
def topk_losses():
    import verl.trainer.distillation.fsdp.losses as module

    return module


def test_every_distillation_loss_of_the_pin_is_registered_and_no_other(losses):
    assert set(ours.DISTILLATION_LOSS_REGISTRY) == set(losses.DISTILLATION_LOSS_REGISTRY)
    for name, theirs in losses.DISTILLATION_SETTINGS_REGISTRY.items():
        assert ours.uses_topk(name) == theirs.use_topk


@pytest.mark.parametrize("clamp", [None, -2.0])
def test_topk_forward_kl_and_its_gradient_equal_the_pins(topk_losses, clamp):
    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(st.integers(1, 6), st.integers(4, 30), st.integers(1, 4), st.integers(0, 999))
    def check(tokens, vocab, k, seed):
        rng = torch.Generator().manual_seed(seed)
        data = 3 * torch.randn(1, tokens, vocab, generator=rng)
        teacher = (3 * torch.randn(tokens, vocab, generator=rng)).log_softmax(-1).topk(k)
        config = SimpleNamespace(distillation_loss=SimpleNamespace(log_prob_min_clamp=clamp))

        logits = data.clone().requires_grad_()
        theirs = topk_losses.compute_forward_kl_topk(
            logits,
            torch.nested.nested_tensor([teacher.values], layout=torch.jagged),
            torch.nested.nested_tensor([teacher.indices], layout=torch.jagged),
            config,
            "thd",
        )
        expected = theirs["distillation_losses"].clamp_min(0.0)  # the pin clamps in the next function
        (their_gradient,) = torch.autograd.grad(expected.sum(), logits)

        logits = data.clone().requires_grad_()
        mine = ours.forward_kl_topk(
            logits, teacher.values[None], teacher.indices[None], log_prob_min_clamp=clamp
        )
        (my_gradient,) = torch.autograd.grad(mine.distillation_losses.sum(), logits)
        assert_same(mine.distillation_losses, expected)
        torch.testing.assert_close(my_gradient, their_gradient, rtol=1e-5, atol=1e-6)
        for name in ("student_mass", "teacher_mass", "overlap_count", "overlap_token_advantage"):
            assert_same(getattr(mine, name), theirs[name])

    check()


def loss_config(losses_module, **options):
    from verl.workers.config import DistillationLossConfig

    return DistillationLossConfig(**options)


SUPERVISED = [(mode, False) for mode in KL_PENALTIES if mode not in ours.TEACHER_FREE_GRADIENT]


@pytest.mark.parametrize(
    ("loss_mode", "policy_gradient"), SUPERVISED + [(mode, True) for mode in KL_PENALTIES]
)
def test_sampled_token_losses_in_both_forms_equal_the_pins(losses, monkeypatch, loss_mode, policy_gradient):
    # the pin un-pads model outputs here; ours are padded already, so un-padding is the identity
    monkeypatch.setattr(losses, "no_padding_2_padding", lambda tensor, data: tensor)

    @settings(max_examples=12, deadline=None, derandomize=True)
    @given(batches(), st.sampled_from([None, 0.5]), st.sampled_from(["token-mean", "seq-mean-token-mean"]))
    def check(b, clamp, mode):
        config = loss_config(
            losses,
            loss_mode=loss_mode,
            use_policy_gradient=policy_gradient,
            loss_max_clamp=clamp,
            clip_ratio_high=0.3,
        )
        actor = actor_config(loss_agg_mode=mode)
        actor.global_batch_info.update(GLOBAL)
        mask = b.response_mask.bool()

        log_prob = b.log_prob.clone().requires_grad_()
        data = dict(
            response_mask=mask, old_log_probs=b.old_log_probs, teacher_logprobs=b.ref_log_prob.unsqueeze(-1)
        )
        theirs, their_metrics = losses.distillation_loss(
            actor, SimpleNamespace(distillation_loss=config), dict(log_probs=log_prob), data
        )
        (their_gradient,) = torch.autograd.grad(theirs, log_prob)

        log_prob = b.log_prob.clone().requires_grad_()
        token_losses = ours.DISTILLATION_LOSS_REGISTRY[loss_mode](
            log_prob, b.ref_log_prob, loss_mode=loss_mode
        )
        mine, metrics = ours.distillation_loss(
            token_losses,
            mask,
            config=config,
            loss_agg_mode=mode,
            log_prob=log_prob,
            old_log_prob=b.old_log_probs,
            **GLOBAL,
        )
        (my_gradient,) = torch.autograd.grad(mine, log_prob)
        assert_same(mine, theirs)
        assert_same(my_gradient, their_gradient)
        assert metrics.keys() == their_metrics.keys()
        for key, value in their_metrics.items():
            value = value.aggregate() if hasattr(value, "aggregate") else value
            assert metrics[key] == pytest.approx(float(value), rel=1e-5, abs=1e-5), key

    check()


def test_k1_and_its_alias_are_refused_as_supervised_losses_while_the_pin_lets_the_alias_through(losses):
    with pytest.raises(ValueError):
        loss_config(losses, loss_mode="k1", use_policy_gradient=False)
    alias = loss_config(losses, loss_mode="kl", use_policy_gradient=False)
    one = torch.ones(1, 1)
    for mode in ("k1", "kl"):
        alias.__dict__["loss_mode"] = mode
        with pytest.raises(ValueError, match="gradient without the teacher"):
            ours.distillation_loss(one, one.bool(), config=alias, loss_agg_mode="token-mean")


def test_the_two_losses_are_combined_as_in_the_pin(losses, monkeypatch):
    task, distill = torch.tensor(2.0), torch.tensor(0.5)
    monkeypatch.setattr(losses, "ppo_loss", lambda *args: (task.clone(), {}))
    monkeypatch.setattr(losses, "distillation_loss", lambda *args: (distill, {}))
    for use_task_rewards in (True, False):
        config = SimpleNamespace(use_task_rewards=use_task_rewards, distillation_loss_coef=0.25)
        theirs, _ = losses.distillation_ppo_loss(None, SimpleNamespace(distillation_loss=config), {}, {})
        assert ours.combine_with_task_loss(task, distill, config=config) == theirs


def test_topk_metrics_equal_the_pins(losses, monkeypatch):
    monkeypatch.setattr(losses, "no_padding_2_padding", lambda tensor, data: tensor)
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 20, generator=rng)
    teacher = torch.randn(2, 5, 20, generator=rng).log_softmax(-1).topk(3)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    mine = ours.forward_kl_topk(logits, teacher.values, teacher.indices)
    config = SimpleNamespace(distillation_loss=SimpleNamespace(topk=3))
    token_losses, theirs = losses.compute_forward_kl_topk(
        None, config, mine._asdict(), dict(response_mask=mask)
    )
    assert torch.equal(token_losses, mine.distillation_losses)
    metrics = ours.topk_metrics(mine, mask, k=3)
    assert metrics.keys() == theirs.keys()
    for key, value in theirs.items():
        value = value.aggregate() if hasattr(value, "aggregate") else value
        assert metrics[key] == pytest.approx(float(value), rel=1e-5), key


def test_the_policy_gradient_form_is_the_vanilla_loss_with_the_negative_distance_as_advantage():
    log_prob = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    distance, mask = torch.tensor([[0.3, -0.4]]), torch.ones(1, 2)
    config = SimpleNamespace(
        loss_mode="k1",
        use_policy_gradient=True,
        policy_loss_mode="vanilla",
        loss_max_clamp=None,
        clip_ratio=0.2,
        clip_ratio_low=None,
        clip_ratio_high=None,
    )
    mine, _ = ours.distillation_loss(
        distance,
        mask,
        config=config,
        loss_agg_mode="token-mean",
        log_prob=log_prob,
        old_log_prob=log_prob.detach(),
    )
    theirs, _ = core_algos.compute_policy_loss_vanilla(
        log_prob.detach(), log_prob, -distance, mask, config=actor_config()
    )
    assert_same(mine, theirs)
