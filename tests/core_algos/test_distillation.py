import math
from types import SimpleNamespace

import pytest
import torch

from minirl.core_algos.distillation import (
    DISTILLATION_LOSS_REGISTRY,
    combine_with_task_loss,
    distillation_loss,
    forward_kl_topk,
    reverse_kl_estimate,
    topk_metrics,
    uses_topk,
)

STUDENT = torch.tensor([[0.5, 0.3, 0.1, 0.1]])
TEACHER_IDS = torch.tensor([[1, 0]])
TEACHER = torch.tensor([[0.6, 0.3]])


def config(**options):
    defaults = dict(
        loss_mode="k3",
        use_policy_gradient=False,
        policy_loss_mode="vanilla",
        loss_max_clamp=None,
        clip_ratio=0.2,
        clip_ratio_low=0.2,
        clip_ratio_high=0.2,
        use_task_rewards=True,
        distillation_loss_coef=0.5,
    )
    return SimpleNamespace(**(defaults | options))


def test_topk_forward_kl_by_hand():
    logits = STUDENT.log().requires_grad_()
    topk = forward_kl_topk(logits, TEACHER.log(), TEACHER_IDS)
    expected = 0.6 * math.log(0.6 / 0.3) + 0.3 * math.log(0.3 / 0.5)
    assert topk.distillation_losses.item() == pytest.approx(expected, rel=1e-5)
    assert topk.student_mass.item() == pytest.approx(0.8)
    assert topk.teacher_mass.item() == pytest.approx(0.9)
    assert topk.overlap_count.item() == 2
    assert topk.overlap_token_advantage.item() == pytest.approx(-expected / 2, rel=1e-5)
    (gradient,) = torch.autograd.grad(topk.distillation_losses.sum(), logits)
    # d/dz_v of -Σ p_T log p_S = p_S(v)·Σ p_T - p_T(v)
    assert gradient[0].tolist() == pytest.approx([0.45 - 0.3, 0.27 - 0.6, 0.09, 0.09], abs=1e-6)


def test_a_cut_off_kl_below_zero_counts_as_zero():
    logits = STUDENT.log().requires_grad_()
    topk = forward_kl_topk(logits, torch.tensor([[0.2, 0.1]]).log(), TEACHER_IDS)
    assert topk.distillation_losses.item() == 0.0
    assert (torch.autograd.grad(topk.distillation_losses.sum(), logits)[0] == 0).all()


def test_log_probs_are_held_from_below():
    topk = forward_kl_topk(STUDENT.log(), TEACHER.log(), TEACHER_IDS, log_prob_min_clamp=math.log(0.4))
    expected = 0.6 * math.log(0.6 / 0.4) + 0.4 * math.log(0.4 / 0.5)
    assert topk.distillation_losses.item() == pytest.approx(expected, rel=1e-4)
    assert topk.student_mass.item() == pytest.approx(0.8)  # measured before


def test_overlap_counts_the_students_own_best_tokens():
    topk = forward_kl_topk(STUDENT.log(), TEACHER.log(), torch.tensor([[2, 0]]))
    assert topk.overlap_count.item() == 1
    metrics = topk_metrics(topk, torch.ones(1, dtype=torch.long), k=2)
    assert metrics["distillation/overlap_ratio"] == 0.5
    assert (
        metrics["distillation/student_mass"] == metrics["distillation/student_mass_max"] == pytest.approx(0.6)
    )


def test_the_sampled_token_estimate_points_from_teacher_to_student():
    losses = reverse_kl_estimate(torch.tensor([[-1.0]]), torch.tensor([[-3.0]]), loss_mode="k1")
    assert losses.item() == 2.0  # the student is surer than the teacher


MASK = torch.tensor([[1, 1, 0]])


def test_the_supervised_form_is_the_aggregated_distance():
    distance = torch.tensor([[1.0, -5.0, 99.0]], requires_grad=True)
    loss, metrics = distillation_loss(
        distance, MASK, config=config(loss_max_clamp=3.0), loss_agg_mode="token-mean", batch_num_tokens=4
    )
    assert loss.item() == pytest.approx((1.0 - 3.0) / 4)
    assert torch.autograd.grad(loss, distance)[0].tolist() == [[0.25, 0.0, 0.0]]
    assert metrics == pytest.approx(
        {"distillation/loss_min": -5.0, "distillation/loss_max": 1.0, "distillation/abs_loss": 3.0}
    )


def test_the_policy_gradient_form_lowers_what_the_teacher_dislikes():
    log_prob = torch.tensor([[-1.0, -1.0, -1.0]], requires_grad=True)
    distance = torch.tensor([[2.0, -1.0, 7.0]])
    loss, metrics = distillation_loss(
        distance,
        MASK,
        config=config(loss_mode="k1", use_policy_gradient=True),
        loss_agg_mode="token-mean",
        log_prob=log_prob,
        old_log_prob=log_prob.detach(),
    )
    (gradient,) = torch.autograd.grad(loss, log_prob)
    assert gradient.tolist() == [[1.0, -0.5, 0.0]]
    assert "distillation/pg_clipfrac" in metrics and "actor/pg_clipfrac" not in metrics


@pytest.mark.parametrize("mode", ["k1", "kl"])
def test_a_distance_without_the_teacher_in_its_gradient_is_refused(mode):
    student = torch.tensor([[-1.0]], requires_grad=True)
    gradients = [
        torch.autograd.grad(reverse_kl_estimate(student, torch.tensor([[t]]), loss_mode=mode).sum(), student)[
            0
        ].item()
        for t in (-1.0, -9.0)
    ]
    assert gradients == [1.0, 1.0]
    with pytest.raises(ValueError, match="use_policy_gradient=True"):
        distillation_loss(
            torch.ones(1, 1), torch.ones(1, 1), config=config(loss_mode=mode), loss_agg_mode="token-mean"
        )


def test_only_the_vanilla_policy_loss_is_supported():
    with pytest.raises(ValueError, match="policy_loss_mode must be vanilla"):
        distillation_loss(
            torch.ones(1, 1),
            torch.ones(1, 1),
            config=config(policy_loss_mode="gspo"),
            loss_agg_mode="token-mean",
        )


def test_a_batch_without_a_token_is_no_error():
    loss, metrics = distillation_loss(
        torch.ones(1, 3), torch.zeros(1, 3), config=config(), loss_agg_mode="token-mean"
    )
    assert loss.item() == 0.0 and metrics == {}
    topk = forward_kl_topk(torch.zeros(1, 3, 4), torch.zeros(1, 3, 2), torch.zeros(1, 3, 2, dtype=torch.long))
    assert topk_metrics(topk, torch.zeros(1, 3), 2) == {}


def test_both_forms_are_divided_by_the_tokens_of_the_mini_batch():
    log_prob = torch.full((2, 2), -1.0)
    distance, mask = torch.tensor([[4.0, 0.0], [0.0, 8.0]]), torch.ones(2, 2)
    for options in ({}, dict(loss_mode="k1", use_policy_gradient=True)):
        halves = [
            distillation_loss(
                distance[row], mask[row], config=config(**options), loss_agg_mode="token-mean",
                log_prob=log_prob[row], old_log_prob=log_prob[row], batch_num_tokens=4,
            )[0]
            for row in (slice(0, 1), slice(1, 2))
        ]  # fmt: skip
        assert sum(halves).item() == pytest.approx(12 / 4), options


def test_the_task_loss_is_added_only_on_demand():
    task, distill = torch.tensor(2.0), torch.tensor(0.5)
    assert combine_with_task_loss(task, distill, config=config()) == 2.25
    assert combine_with_task_loss(task, distill, config=config(use_task_rewards=False)) == 0.5


def test_only_the_topk_loss_asks_the_teacher_for_k_tokens():
    assert [name for name in DISTILLATION_LOSS_REGISTRY if uses_topk(name)] == ["forward_kl_topk"]
    with pytest.raises(ValueError, match="did you mean 'k3'"):
        uses_topk("k33")


def test_the_metrics_of_the_top_k_by_hand():
    student = torch.tensor([[0.5, 0.3, 0.1, 0.1], [0.6, 0.2, 0.15, 0.05]]).log()
    topk = forward_kl_topk(
        student, torch.tensor([[0.6, 0.3], [0.5, 0.2]]).log(), torch.tensor([[2, 0], [0, 1]])
    )
    # position 0 shares token 0 only: -0.3·log(0.3/0.5); position 1 shares both
    shared = [-0.3 * math.log(0.3 / 0.5), -(0.5 * math.log(0.5 / 0.6) + 0.2 * math.log(1)) / 2]
    assert topk.overlap_count.tolist() == [1, 2]
    assert topk.overlap_token_advantage.tolist() == pytest.approx(shared, abs=1e-6)
    metrics = topk_metrics(topk, torch.ones(2, dtype=torch.long), k=2)
    assert metrics["distillation/overlap_ratio"] == pytest.approx(3 / 4)
    for side, low, high in (("student_mass", 0.6, 0.8), ("teacher_mass", 0.7, 0.9)):
        found = [metrics[f"distillation/{side}{end}"] for end in ("", "_min", "_max")]
        assert found == pytest.approx([(low + high) / 2, low, high])


def test_the_policy_gradient_form_has_its_own_clip_range_weights_and_aggregation():
    def loss_of(ratio, distance, mode="token-sum", **options):
        old = torch.tensor([[-2.0]])
        return distillation_loss(
            torch.tensor([[distance]]),
            torch.ones(1, 1),
            config=config(use_policy_gradient=True, clip_ratio_low=0.1, clip_ratio_high=0.4),
            loss_agg_mode=mode,
            log_prob=old + math.log(ratio),
            old_log_prob=old,
            **options,
        )[0].item()

    assert loss_of(2.0, -1.0) == pytest.approx(-1.4)  # A = 1, clipped above
    assert loss_of(0.5, 1.0) == pytest.approx(0.9)  # A = -1, clipped below
    assert loss_of(10.0, 1.0) == pytest.approx(3.0)  # the dual clip
    assert loss_of(1.0, 1.0, rollout_is_weights=torch.full((1, 1), 0.5)) == pytest.approx(0.5)
    assert loss_of(1.0, 1.0, mode="seq-mean-token-sum", global_batch_size=4) == pytest.approx(0.25)


def test_the_estimator_of_the_sampled_token_is_the_one_that_is_named():
    losses = reverse_kl_estimate(torch.tensor([[-1.0]]), torch.tensor([[-3.0]]), loss_mode="k2")
    assert losses.item() == 2.0  # ½·2², as it happens the value of k1 too
    k3 = reverse_kl_estimate(torch.tensor([[-1.0]]), torch.tensor([[-3.0]]), loss_mode="k3")
    assert k3.item() == pytest.approx(math.exp(-2) + 1)
