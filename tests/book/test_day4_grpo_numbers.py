"""The hand-size numbers printed in book/week1/day4_grpo.md, recomputed with verl 0.8.0's own functions."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import full

from minirl.core_algos.advantage import compute_grpo_outcome_advantage
from minirl.pin import find_symbol, use_verl
from minirl.trace import trace
from minirl.trainer import PPOTrainer

use_verl()

from verl.trainer.ppo import core_algos  # noqa: E402
from verl.utils.groupwise import as_torch_index, group_mean_std  # noqa: E402
from verl.utils.torch_functional import masked_whiten  # noqa: E402
from verl.workers.config import ActorConfig  # noqa: E402

PAGE = Path(__file__).parents[2] / "book" / "week1" / "day4_grpo.md"
SCORES = [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
UID = list("aaaabbbb")


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


def _advantage(scores: list[float], uid: list[str], **options) -> list[float]:
    rewards = torch.tensor(scores).unsqueeze(-1)
    index = np.array(uid, dtype=object)
    return core_algos.compute_grpo_outcome_advantage(rewards, torch.ones_like(rewards), index, **options)[0][
        :, 0
    ].tolist()


def test_eight_row_table_is_what_verl_computes():
    rows = _rows("优势（不除 σ）")
    assert [row[1] for row in rows] == UID
    assert [float(row[2]) for row in rows] == SCORES
    mean, std, _ = group_mean_std(torch.tensor(SCORES), as_torch_index(np.array(UID, dtype=object)))
    assert [float(row[3]) for row in rows] == pytest.approx([mean[0].item()] * 4 + [mean[1].item()] * 4)
    assert [float(row[4]) for row in rows] == pytest.approx([std[0].item()] * 4 + [std[1].item()] * 4)
    assert [float(row[5]) for row in rows] == pytest.approx(_advantage(SCORES, UID), abs=1e-5)
    unscaled = _advantage(SCORES, UID, norm_adv_by_std_in_grpo=False)
    assert [float(row[6]) for row in rows] == pytest.approx(unscaled)


def test_bars_of_the_picture_are_the_advantages():
    figure = PAGE.read_text(encoding="utf-8").split("<figure")[1].split("</figure>")[0]
    bars = [part.split("</text>")[0] for part in figure.split('font-weight="bold">')]
    drawn = [float(text.replace("−", "-")) for text in bars if text[0] in "+−"]
    assert drawn == pytest.approx(_advantage(SCORES, UID), abs=1e-5)


def test_each_group_sums_to_zero():
    advantages = _advantage(SCORES, UID)
    assert sum(advantages[:4]) == pytest.approx(0, abs=1e-6) == pytest.approx(sum(advantages[4:]), abs=1e-6)


def test_loss_is_zero_and_no_gradient_is():
    advantages = torch.tensor(_advantage(SCORES, UID)).unsqueeze(-1).expand(8, 5).contiguous()
    log_prob = torch.randn(8, 5, requires_grad=True)
    config = ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True)
    loss, _ = core_algos.compute_policy_loss_vanilla(
        log_prob.detach(), log_prob, advantages, torch.ones(8, 5), "token-mean", config
    )
    loss.backward()
    assert abs(loss.item()) < 1e-6
    torch.testing.assert_close(log_prob.grad, -advantages / 40)


def test_normalising_over_the_whole_batch_forgets_which_question_was_hard():
    scores = torch.tensor(SCORES)
    flat = ((scores - scores.mean()) / scores.std()).tolist()
    assert flat == pytest.approx([0.935 if s else -0.935 for s in SCORES], abs=1e-3)


def test_std_table_is_what_verl_computes():
    for row in _rows("对了几条"):
        k = int(row[0])
        scores, uid = [1.0] * k + [0.0] * (8 - k), ["a"] * 8
        right, wrong = (_advantage(scores, uid)[i] for i in (0, -1))
        unscaled = [_advantage(scores, uid, norm_adv_by_std_in_grpo=False)[i] for i in (0, -1)]
        std = torch.tensor(scores).std().item()
        assert [float(cell) for cell in row[1:4]] == pytest.approx([std, right, wrong], abs=6e-4)
        assert [float(cell) for cell in row[4].split("、")] == pytest.approx(unscaled)
        assert float(row[5]) == pytest.approx(1 / std, abs=6e-3)


def test_group_of_equal_scores_is_exactly_zero_for_one_but_not_for_three_tenths():
    """In float32 the mean of eight 0.3s is off in its last place, and 3e-8 / (3e-8 + 1e-6) is not 0."""
    uid = ["a"] * 8
    assert _advantage([1.0] * 8, uid) == [0.0] * 8 == _advantage([0.0] * 8, uid)
    for score in (0.3, 0.7):
        left_over = _advantage([score] * 8, uid)
        assert len(set(left_over)) == 1 and 0 < abs(left_over[0]) < 0.1
        rewards = torch.full((8, 1), score)
        ours, _ = compute_grpo_outcome_advantage(rewards, torch.ones(8, 1), uid)
        assert not ours.any()


def test_group_of_one_keeps_its_raw_score():
    assert _advantage([0.2, 0.7], ["a", "b"]) == pytest.approx([0.2, 0.7], abs=1e-5)


def test_advantages_and_returns_are_one_tensor():
    rewards = torch.tensor(SCORES).unsqueeze(-1)
    advantages, returns = core_algos.compute_grpo_outcome_advantage(rewards, torch.ones(8, 1), UID)
    assert returns is advantages


def test_integer_labels_pass_and_strings_are_ranked():
    assert as_torch_index(torch.tensor([7, 3, 7])).tolist() == [7, 3, 7]
    assert as_torch_index(np.array(["7", "3"], dtype=object)).tolist() == [7, 3]
    assert as_torch_index(np.array(["b", "a", "b"], dtype=object)).tolist() == [1, 0, 1]
    mean, _, _ = group_mean_std(torch.tensor([1.0, 0.0, 0.0]), torch.tensor([7, 3, 7]))
    assert mean.shape == (8,)


def test_sequence_ratio_leaves_the_clip_range_where_token_ratios_stay_inside():
    assert math.exp(0.02) == pytest.approx(1.02, abs=1e-3)
    assert math.exp(20 * 0.02) == pytest.approx(1.49, abs=5e-3)


def test_grpo_is_the_mean_of_all_and_rloo_of_the_others():
    rewards, mask, uid = (
        torch.tensor(SCORES[:4]).unsqueeze(-1),
        torch.ones(4, 1),
        np.array(["a"] * 4, dtype=object),
    )
    grpo, _ = core_algos.compute_grpo_outcome_advantage(rewards, mask, uid, norm_adv_by_std_in_grpo=False)
    rloo, _ = core_algos.compute_rloo_outcome_advantage(rewards, mask, uid)
    torch.testing.assert_close(rloo, grpo * 4 / 3)


def test_mini_batch_larger_than_the_train_batch_is_refused():
    config = ActorConfig(strategy="fsdp", rollout_n=8, ppo_mini_batch_size=32, ppo_micro_batch_size_per_gpu=8)
    with pytest.raises(ValueError, match="train_batch_size"):
        config.validate(n_gpus=1, train_batch_size=16)
    config.validate(n_gpus=1, train_batch_size=32)


def test_uid_is_written_before_the_batch_is_repeated():
    fit = "\n".join(find_symbol("verl.trainer.ppo.ray_trainer:RayPPOTrainer.fit").lines)
    written = fit.index('batch.non_tensor_batch["uid"] = np.array(')
    assert written < fit.index("gen_batch_output = gen_batch.repeat(") < fit.index("batch = batch.repeat(")


def test_grpo_of_one_group_is_whitening_of_its_scores():
    """One number a response: with one token a row the two operations differ only in their epsilon."""
    scores = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0])
    whitened = masked_whiten(scores.unsqueeze(-1), torch.ones(5, 1))[:, 0]
    assert _advantage(scores.tolist(), ["a"] * 5) == pytest.approx(whitened.tolist(), abs=1e-5)
    two_tokens = masked_whiten(
        scores.unsqueeze(-1).expand(5, 2), torch.tensor([[1.0, 1.0]] + [[1.0, 0.0]] * 4)
    )
    assert abs(two_tokens[0, 0] - whitened[0]) > 0.01


def test_loss_of_unequal_lengths_is_zero_by_sequence_and_not_by_token():
    mask = (torch.arange(6) < torch.tensor([6, 5, 4, 2, 3, 6, 1, 4]).unsqueeze(-1)).float()
    advantages = torch.tensor(_advantage(SCORES, UID)).unsqueeze(-1) * mask
    config = ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True)
    log_prob = torch.randn(8, 6)
    loss = {
        mode: core_algos.compute_policy_loss_vanilla(log_prob, log_prob, advantages, mask, mode, config)[0]
        for mode in ("token-mean", "seq-mean-token-mean")
    }
    assert abs(loss["seq-mean-token-mean"].item()) < 1e-6
    assert abs(loss["token-mean"].item()) > 0.01


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_trajectory_0_of_day_3_has_one_advantage_in_grpo_and_sixteen_in_ppo(estimator):
    trainer = PPOTrainer(full(f"algorithm.adv_estimator={estimator}", steps=1))
    with trace(trainer, samples=range(8)) as t:
        trainer.fit()
    step = t.steps[0]
    mask = torch.tensor(step.row(0, "response_mask")).bool()
    words = trainer.tokenizer.decode(torch.tensor(step.row(0, "responses"))[mask], skip_special_tokens=True)
    advantages = torch.tensor(step.row(0, "advantages"))[mask]
    assert words == "3+1=4\n4+2=6\n#### 4" and len(advantages) == 16
    if estimator == "grpo":
        uid = step.row(0, "uid")
        group = [i for i in range(8) if step.row(i, "uid") == uid]
        assert sum(sum(step.row(i, "token_level_scores")) for i in group) == 6 and len(group) == 8
        assert advantages.tolist() == pytest.approx([-1.62] * 16, abs=5e-3)
        assert -0.75 / 0.4629 == pytest.approx(-1.62, abs=5e-3)
    else:
        assert -2.0 < advantages.min() < advantages.max() < -1.7
