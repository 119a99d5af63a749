"""The hand-size numbers printed in book/week1/day3_ppo.md, recomputed with verl 0.8.0's own functions."""

import re
from pathlib import Path

import pytest
import torch

from minirl.pin import find_symbol, use_verl

use_verl()

from verl.trainer.ppo import core_algos  # noqa: E402
from verl.workers.config import ActorConfig  # noqa: E402

PAGE = Path(__file__).parents[2] / "book" / "week1" / "day3_ppo.md"
REWARDS = torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0]])
VALUES = torch.tensor([[0.5, 0.6, 0.4, 0.7, 0.9]])
MASK = torch.ones(1, 5)
OLD = torch.tensor([[-0.2, -0.3, -0.6, -0.1, -1.6]])
NEW = torch.tensor([[-0.1, -0.7, -0.3, -0.15, -0.3]])
REF = torch.tensor([[-0.7, -0.3, -0.8, -0.05, -1.6]])


def _rows(heading: str) -> list[list[str]]:
    """The cells of the table whose header holds `heading`, one list per row."""
    lines = PAGE.read_text(encoding="utf-8").split("\n")
    start = next(i for i, line in enumerate(lines) if line.startswith("|") and heading in line)
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().replace("−", "-") for cell in line.strip("|").split("|")])
    return rows


def _column(heading: str, column: int) -> list[float]:
    return [float(row[column]) for row in _rows(heading)]


def _actor_config(**clip: float) -> ActorConfig:
    return ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, **clip)


def test_gae_table_is_what_verl_computes():
    advantages, returns = core_algos.compute_gae_advantage_return(REWARDS, VALUES, MASK, 1.0, 0.5)
    table = "$a_t=\\delta_t+0.5"
    assert _column(table, 2) == REWARDS[0].tolist()
    assert _column(table, 3) == pytest.approx(VALUES[0].tolist())
    one_step, _ = core_algos.compute_gae_advantage_return(REWARDS, VALUES, MASK, 1.0, 0.0)
    deltas = core_algos.compute_gae_advantage_return(REWARDS, VALUES, MASK, 1.0, 0.0)[1] - VALUES
    assert one_step.shape == deltas.shape == (1, 5)
    assert _column(table, 4) == pytest.approx(deltas[0].tolist(), abs=1e-6)
    assert _column(table, 5) == pytest.approx((returns - VALUES)[0].tolist(), abs=1e-6)
    assert _column(table, 6) == pytest.approx(returns[0].tolist(), abs=1e-6)
    assert _column(table, 7) == pytest.approx(advantages[0].tolist(), abs=6e-4)


def test_lambda_one_makes_the_critic_a_baseline():
    _, returns = core_algos.compute_gae_advantage_return(REWARDS, VALUES, MASK, 1.0, 1.0)
    assert (returns - VALUES)[0].tolist() == pytest.approx([0.5, 0.4, 0.6, 0.3, 0.1])


def test_five_token_loss_table_is_what_verl_computes():
    advantages, _ = core_algos.compute_gae_advantage_return(REWARDS, VALUES, MASK, 1.0, 0.5)
    new = NEW.clone().requires_grad_()
    loss, metrics = core_algos.compute_policy_loss_vanilla(
        OLD, new, advantages, MASK, "token-mean", _actor_config()
    )
    loss.backward()

    table = "| loss | 梯度 |"
    assert _column(table, 2) == pytest.approx(OLD[0].tolist())
    assert _column(table, 3) == pytest.approx(NEW[0].tolist())
    ratio = (NEW - OLD).exp()
    assert _column(table, 4) == pytest.approx(ratio[0].tolist(), abs=6e-4)
    assert _column(table, 5) == pytest.approx((-advantages * ratio)[0].tolist(), abs=6e-4)
    assert _column(table, 6) == pytest.approx((-advantages * ratio.clamp(0.8, 1.2))[0].tolist(), abs=6e-4)
    per_token = []
    for t in range(5):  # one token at a time: the mean over one token is its loss
        only = torch.zeros(1, 5)
        only[0, t] = 1
        per_token.append(
            core_algos.compute_policy_loss_vanilla(OLD, NEW, advantages, only, "token-mean", _actor_config())[
                0
            ].item()
        )
    assert _column(table, 7) == pytest.approx(per_token, abs=6e-4)
    assert [row[8].startswith("有") for row in _rows(table)] == [g != 0 for g in new.grad[0].tolist()]
    assert metrics["actor/pg_clipfrac"] == pytest.approx(0.4)
    assert metrics["actor/pg_clipfrac_lower"] == pytest.approx(0.2)
    assert metrics["actor/ppo_kl"] == pytest.approx(-0.25)


def test_kl_in_the_reward_gives_every_token_a_reward():
    kl = core_algos.kl_penalty(OLD, REF, "kl")
    assert kl[0].tolist() == pytest.approx([0.5, 0.0, 0.2, -0.05, 0.0], abs=1e-6)
    assert (REWARDS - 0.1 * kl)[0].tolist() == pytest.approx([-0.05, 0.0, -0.02, 0.005, 1.0], abs=1e-6)


def test_adaptive_kl_changes_by_at_most_two_percent_at_1024_rows():
    far, near = (core_algos.AdaptiveKLController(1.0, 0.1, 10000) for _ in range(2))
    far.update(1.0, 1024)
    near.update(0.12, 1024)
    assert far.value == pytest.approx(near.value) == pytest.approx(1.02048)
    zero = core_algos.AdaptiveKLController(0.0, 0.1, 10000)
    zero.update(1.0, 1024)
    assert zero.value == 0


def test_agg_loss_table_is_what_verl_computes():
    losses = torch.tensor([[1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    rows = _rows("`loss_agg_mode`")
    assert len(rows) == 4
    for mode, _, result in rows:
        name = re.match(r"`([\w-]+)`", mode)[1]
        assert core_algos.agg_loss(losses, mask, name).item() == pytest.approx(float(result), abs=6e-4), name


def test_value_clip_example_has_no_gradient():
    vpreds = torch.tensor([[0.9]], requires_grad=True)
    loss, clipfrac = core_algos.compute_value_loss(
        vpreds, torch.ones(1, 1), torch.zeros(1, 1), torch.ones(1, 1), cliprange_value=0.5
    )
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * 0.25) and clipfrac == 1 and vpreds.grad.item() == 0


def test_value_loss_gradient_grows_with_the_number_of_micro_batches():
    """0.8.0 divides each micro-batch by its own tokens; the policy loss, told the global count, does not."""
    returns, values, mask = torch.ones(4, 3), torch.zeros(4, 3), torch.ones(4, 3)

    def gradient(rows: int) -> float:
        vpreds = torch.full((4, 3), 0.2, requires_grad=True)
        for part in vpreds.split(rows):
            k = part.shape[0]
            core_algos.compute_value_loss(part, returns[:k], values[:k], mask[:k], cliprange_value=0.5)[
                0
            ].backward()
        return vpreds.grad.abs().sum().item()

    assert gradient(2) == pytest.approx(2 * gradient(4))


def test_tool_output_is_stepped_over():
    values = torch.tensor([[0.5, 0.6, 0.0, 0.0, 0.8]])
    for mask, first_two in (([1, 1, 0, 0, 1], [0.25, 0.3]), ([1, 1, 1, 1, 1], [-0.0875, -0.375])):
        mask = torch.tensor([mask])
        _, returns = core_algos.compute_gae_advantage_return(REWARDS, values, mask, 1.0, 0.5)
        assert (returns - values)[0, :2].tolist() == pytest.approx(first_two, abs=1e-6)


def test_reward_on_a_masked_token_is_lost_to_gae_and_counted_by_grpo():
    mask = torch.tensor([[1, 1, 1, 1, 0]])
    rewarded = core_algos.compute_gae_advantage_return(REWARDS, VALUES, mask, 1.0, 1.0)[1]
    unrewarded = core_algos.compute_gae_advantage_return(torch.zeros(1, 5), VALUES, mask, 1.0, 1.0)[1]
    assert torch.equal(rewarded[:, :4], unrewarded[:, :4])
    advantages, _ = core_algos.compute_grpo_outcome_advantage(REWARDS, mask, ["a"])
    assert advantages[0, 0].item() == pytest.approx(1.0, abs=1e-5)


def test_what_whitening_leaves_under_a_zero_of_the_mask_can_be_huge():
    """Every generated token has a = 1, so the spread is 0 and the padding's a = 0 becomes (0 - 1) / 1e-4."""
    rewards, mask = torch.tensor([[0.0, 0.0, 1.0, 0.0]]), torch.tensor([[1, 1, 1, 0]])
    advantages, _ = core_algos.compute_gae_advantage_return(rewards, torch.zeros(1, 4), mask, 1.0, 1.0)
    assert advantages[0, 3].item() == pytest.approx(-10_000, rel=1e-3)


def test_gae_takes_no_bool_mask():
    with pytest.raises(RuntimeError, match="bool"):
        core_algos.compute_gae_advantage_return(REWARDS, VALUES, MASK.bool(), 1.0, 1.0)


def test_k3_is_never_negative_and_k1_can_be():
    log_prob, ref = torch.randn(1000), torch.randn(1000)
    assert core_algos.kl_penalty(log_prob, ref, "k3").min() >= 0
    assert core_algos.kl_penalty(log_prob, ref, "k1").min() < 0
    with pytest.raises(NotImplementedError):
        core_algos.kl_penalty(log_prob, ref, "full")


def test_kl_in_the_reward_carries_no_gradient_and_uses_old_log_probs():
    source = "\n".join(find_symbol("verl.trainer.ppo.ray_trainer:apply_kl_penalty").lines)
    assert 'data.batch["old_log_probs"], data.batch["ref_log_prob"]' in source
    rewards = REWARDS - 0.1 * core_algos.kl_penalty(OLD, REF, "kl")
    values = VALUES.clone().requires_grad_()
    advantages, _ = core_algos.compute_gae_advantage_return(rewards, values, MASK, 1.0, 1.0)
    assert not advantages.requires_grad
