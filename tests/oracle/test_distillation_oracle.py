"""On-policy distillation against the pinned verl: token losses, both forms of the loss, metrics."""

from types import SimpleNamespace

import pytest
import torch
from batches import DTYPES, assert_same, assert_same_metrics, batches, check_on_batches
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.loss_calls import GLOBAL, NO_GLOBAL, config_with
from oracle.verl_functions import actor_config, core_algos, names_compared

import minirl.core_algos.distillation as ours
from minirl.core_algos.kl import KL_PENALTIES

pytestmark = pytest.mark.oracle

CLAMPS = st.sampled_from([None, 0.5, 2.0])
MODES = st.sampled_from(sorted(names_compared(core_algos, "agg_loss")))
INFOS = st.sampled_from([GLOBAL, NO_GLOBAL])
MASK_DTYPES = st.sampled_from([torch.bool, torch.int64])
CLIPS = st.sampled_from(
    [
        {},
        dict(clip_ratio_low=0.4, clip_ratio_high=0.05),
        dict(clip_ratio=0.6, clip_ratio_low=None, clip_ratio_high=None),
    ]
)


@pytest.fixture
def losses(monkeypatch):
    import verl.trainer.distillation.losses as module

    # the pin un-pads model outputs here; ours are padded already, so un-padding is the identity
    monkeypatch.setattr(module, "no_padding_2_padding", lambda tensor, data: tensor)
    return module


@pytest.fixture(scope="module")
def topk_losses():
    import verl.trainer.distillation.fsdp.losses as module

    return module


def test_every_distillation_loss_of_the_pin_is_registered_and_no_other(losses):
    assert set(ours.DISTILLATION_LOSS_REGISTRY) == set(losses.DISTILLATION_LOSS_REGISTRY)
    for name, theirs in losses.DISTILLATION_SETTINGS_REGISTRY.items():
        assert ours.uses_topk(name) == theirs.use_topk


def pins_topk(topk_losses, logits, teacher, clamp):
    """The pin's top-k loss of logits [.., V], as its engine calls it: on one packed row of tokens."""
    packed = [part.reshape(-1, part.shape[-1]) for part in (logits, teacher.values, teacher.indices)]
    nested = [torch.nested.nested_tensor([part], layout=torch.jagged) for part in packed[1:]]
    config = SimpleNamespace(distillation_loss=SimpleNamespace(log_prob_min_clamp=clamp))
    outputs = topk_losses.compute_forward_kl_topk(packed[0][None], *nested, config, "thd")
    return {name: output.view(logits.shape[:-1]) for name, output in outputs.items()}


@pytest.mark.parametrize("clamp", [None, -2.0, -0.5])
def test_topk_forward_kl_and_its_gradient_equal_the_pins(topk_losses, clamp):
    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(
        st.integers(1, 6),
        st.integers(4, 30),
        st.integers(1, 4),
        st.integers(0, 999),
        st.sampled_from([30.0, 3.0]),
        st.sampled_from([3.0, 0.1]),
    )
    def check(tokens, vocab, k, seed, scale, teacher_scale):
        rng = torch.Generator().manual_seed(seed)
        data = scale * torch.randn(tokens, vocab, generator=rng)
        teacher = (teacher_scale * torch.randn(tokens, vocab, generator=rng)).log_softmax(-1).topk(k)

        logits = data.clone().requires_grad_()
        theirs = pins_topk(topk_losses, logits, teacher, clamp)
        expected = theirs["distillation_losses"].clamp_min(0.0)  # the pin clamps in the next function
        (their_gradient,) = torch.autograd.grad(expected.sum(), logits)

        logits = data.clone().requires_grad_()
        mine = ours.forward_kl_topk(logits, teacher.values, teacher.indices, log_prob_min_clamp=clamp)
        (my_gradient,) = torch.autograd.grad(mine.distillation_losses.sum(), logits)
        assert_same(mine.distillation_losses, expected)
        assert_same(my_gradient, their_gradient, terms=1.0)  # differences of probabilities
        for name in ("student_mass", "teacher_mass", "overlap_count", "overlap_token_advantage"):
            assert_same(getattr(mine, name), theirs[name])

    check()


@pytest.mark.parametrize("clamp", [None, -2.0])
def test_topk_of_bfloat16_logits_is_the_pins_once_the_log_softmax_is_taken_in_bfloat16_as_in_the_pin(
    topk_losses, clamp, monkeypatch
):
    """That is its one rounding: with the teacher's float32 log-probs all that follows is float32 again."""

    def in_bfloat16(logits, ids):
        return logits.log_softmax(-1).gather(-1, ids)

    monkeypatch.setattr(ours, "logprobs_of_ids", in_bfloat16)

    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(st.integers(1, 6), st.integers(4, 30), st.integers(1, 4), st.integers(0, 999))
    def check(tokens, vocab, k, seed):
        rng = torch.Generator().manual_seed(seed)
        data = (4 * torch.randn(tokens, vocab, generator=rng)).bfloat16()
        teacher = (3 * torch.randn(tokens, vocab, generator=rng)).log_softmax(-1).topk(k)

        def run(fn):
            logits = data.clone().requires_grad_()
            outputs = fn(logits)
            losses = outputs["distillation_losses"].clamp_min(0.0)
            (gradient,) = torch.autograd.grad(losses.sum(), logits)
            return outputs | dict(distillation_losses=losses.detach()), gradient

        def mine(logits):
            return ours.forward_kl_topk(logits, *teacher, log_prob_min_clamp=clamp)._asdict()

        theirs, their_gradient = run(lambda logits: pins_topk(topk_losses, logits, teacher, clamp))
        outputs, gradient = run(mine)
        for name in ("distillation_losses", "teacher_mass", "overlap_token_advantage"):
            assert outputs[name].dtype == theirs[name].dtype == torch.float32
            assert_same(outputs[name], theirs[name])
        assert torch.equal(outputs["overlap_count"], theirs["overlap_count"])
        assert_same(outputs["student_mass"], theirs["student_mass"], torch.bfloat16)
        assert_same(gradient, their_gradient, torch.bfloat16)

    check()


def test_topk_of_bfloat16_logits_is_float32_here_and_rounded_in_the_pin(topk_losses):
    rng = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(20, 50, generator=rng)).bfloat16()
    teacher = (3 * torch.randn(20, 50, generator=rng)).log_softmax(-1).topk(3)

    def run(data, fn):
        data = data.clone().requires_grad_()
        loss = fn(data).clamp(min=0.0)
        return loss.detach(), torch.autograd.grad(loss.sum(), data)[0]

    def exactly(data):
        log_student = data.log_softmax(-1).gather(-1, teacher.indices)
        return (teacher.values.exp() * (teacher.values - log_student)).sum(-1)

    exact = run(logits.double(), exactly)
    mine = run(logits, lambda data: ours.forward_kl_topk(data, *teacher).distillation_losses)
    theirs = run(logits, lambda data: pins_topk(topk_losses, data, teacher, None)["distillation_losses"])
    assert mine[0].dtype == torch.float32
    assert (mine[0] - exact[0]).abs().max() < 1e-5
    assert (theirs[0] - exact[0]).abs().max() > 1e-3
    assert_same(mine[1], exact[1], torch.bfloat16)


def loss_config(losses_module, **options):
    from verl.workers.config import DistillationLossConfig

    return DistillationLossConfig(**options)


SUPERVISED = [(mode, False) for mode in KL_PENALTIES if mode not in ours.TEACHER_FREE_GRADIENT]


def value_gradient_metrics(loss, wrt, metrics):
    (gradient,) = torch.autograd.grad(loss, wrt)
    plain = {key: float(v.aggregate() if hasattr(v, "aggregate") else v) for key, v in metrics.items()}
    return loss.detach(), gradient, plain


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("loss_mode", "policy_gradient"), SUPERVISED + [(mode, True) for mode in KL_PENALTIES]
)
def test_sampled_token_losses_in_both_forms_equal_the_pins(losses, loss_mode, policy_gradient, dtype):
    def check(b, clamp, mode, weights, clip, info, mask_dtype):
        b = b.to(dtype)
        config = loss_config(
            losses,
            loss_mode=loss_mode,
            use_policy_gradient=policy_gradient,
            loss_max_clamp=clamp,
            **clip,
        )
        actor = config_with(info, dict(loss_agg_mode=mode))
        mask, rollout_is_weights = b.response_mask.to(mask_dtype), b.rollout_is_weights if weights else None

        log_prob = b.log_prob.clone().requires_grad_()
        data = dict(
            response_mask=mask,
            old_log_probs=b.old_log_probs,
            teacher_logprobs=b.ref_log_prob.unsqueeze(-1),
            rollout_is_weights=rollout_is_weights,
        )
        loss, metrics = losses.distillation_loss(
            actor, SimpleNamespace(distillation_loss=config), dict(log_probs=log_prob), data
        )
        theirs = value_gradient_metrics(loss, log_prob, metrics)

        log_prob = b.log_prob.clone().requires_grad_()
        token_losses = ours.DISTILLATION_LOSS_REGISTRY[loss_mode](
            log_prob, b.ref_log_prob, loss_mode=loss_mode
        )
        loss, metrics = ours.distillation_loss(
            token_losses,
            mask,
            config=config,
            loss_agg_mode=mode,
            log_prob=log_prob,
            old_log_prob=b.old_log_probs,
            rollout_is_weights=rollout_is_weights,
            **info,
        )
        mine = value_gradient_metrics(loss, log_prob, metrics)
        assert_same(mine[0], theirs[0], dtype)
        assert_same(mine[1], theirs[1], dtype)
        assert_same_metrics(mine[2], theirs[2], dtype)

    check_on_batches(check, batches(), CLAMPS, MODES, st.booleans(), CLIPS, INFOS, MASK_DTYPES)


@pytest.mark.parametrize("policy_gradient", [False, True], ids=["supervised", "policy gradient"])
def test_topk_loss_in_both_forms_equals_the_pins(losses, topk_losses, policy_gradient):
    def check(b, clamp, mode, seed, topk, min_clamp, clip, info, mask_dtype):
        config = loss_config(
            losses,
            loss_mode="forward_kl_topk",
            topk=topk,
            use_policy_gradient=policy_gradient,
            loss_max_clamp=clamp,
            log_prob_min_clamp=min_clamp,
            **clip,
        )
        actor = config_with(info, dict(loss_agg_mode=mode))
        mask, shape = b.response_mask.to(mask_dtype), (*b.response_mask.shape, 12)
        rng = torch.Generator().manual_seed(seed)
        logits, teacher_logits = 5 * torch.randn(2, *shape, generator=rng)
        teacher = teacher_logits.log_softmax(-1).topk(topk)

        def inputs():
            student, log_prob = logits.clone().requires_grad_(), b.log_prob.clone().requires_grad_()
            return student, log_prob, log_prob if policy_gradient else student

        student, log_prob, wrt = inputs()
        outputs = pins_topk(topk_losses, student, teacher, config.log_prob_min_clamp)
        loss, metrics = losses.distillation_loss(
            actor,
            SimpleNamespace(distillation_loss=config),
            dict(log_probs=log_prob, **outputs),
            dict(response_mask=mask, old_log_probs=b.old_log_probs),
        )
        theirs = value_gradient_metrics(loss, wrt, metrics)

        student, log_prob, wrt = inputs()
        measured = ours.forward_kl_topk(
            student, teacher.values, teacher.indices, log_prob_min_clamp=config.log_prob_min_clamp
        )
        loss, metrics = ours.distillation_loss(
            measured.distillation_losses,
            mask,
            config=config,
            loss_agg_mode=mode,
            log_prob=log_prob,
            old_log_prob=b.old_log_probs,
            **info,
        )
        del metrics["distillation/abs_loss"]  # the pin has it for the sampled-token losses only
        mine = value_gradient_metrics(loss, wrt, metrics | ours.topk_metrics(measured, mask, k=topk))
        assert_same(mine[0], theirs[0])
        # differences of probabilities, over the smallest denominator that was drawn
        assert_same(mine[1], theirs[1], terms=0.0 if policy_gradient else 1.0)
        assert_same_metrics(mine[2], theirs[2])

    drawn = (st.integers(0, 999), st.sampled_from([3, 1, 8]), st.sampled_from([-5.0, None, -1.0]))
    check_on_batches(check, batches(), CLAMPS, MODES, *drawn, CLIPS, INFOS, MASK_DTYPES)


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
    task, distill = torch.tensor(2.0), torch.tensor(0.3)
    monkeypatch.setattr(losses, "ppo_loss", lambda *args: (task.clone(), {}))
    monkeypatch.setattr(losses, "distillation_loss", lambda *args: (distill, {}))
    for use_task_rewards in (True, False):
        config = SimpleNamespace(use_task_rewards=use_task_rewards, distillation_loss_coef=0.25)
        theirs, _ = losses.distillation_ppo_loss(None, SimpleNamespace(distillation_loss=config), {}, {})
        assert ours.combine_with_task_loss(task, distill, config=config) == theirs


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
