"""The hand-worked numbers are verl's formulas, and every listed slip is named."""

import pytest
import torch

from minirl.core_algos.masked import masked_mean
from minirl.core_algos.ratio import ppo_kl
from minirl.exercises import day5_trainer_loop as exercise
from minirl.exercises.day5_trainer_loop import check_clip_ratio, check_ppo_kl, try_it
from minirl.metrics import compute_data_metrics
from minirl.protocol import DataProto


def kl(old, new, mask):
    return masked_mean(old - new, mask)


def clipped(attention_mask, responses):
    lengths = attention_mask[:, -responses.shape[1] :].sum(-1)
    return (lengths == responses.shape[1]).float().mean()


def test_right_solutions_pass(capsys):
    try_it(check_ppo_kl, kl)
    try_it(check_clip_ratio, clipped)
    assert capsys.readouterr().out.count("通过") == 2


def test_the_hand_worked_kl_is_that_of_minirl():
    assert ppo_kl(exercise.NEW - exercise.OLD, exercise.MASK) == pytest.approx(exercise.KL)


def test_the_hand_worked_clip_ratio_is_that_of_minirl():
    zeros = torch.zeros(4, 4)
    keys = ("token_level_scores", "token_level_rewards", "advantages", "returns")
    batch = DataProto.from_dict(
        {
            "prompts": torch.zeros(4, 2, dtype=torch.long),
            "responses": zeros.long(),
            "attention_mask": exercise.ATTENTION,
            "response_mask": exercise.RESPONSE,
            **dict.fromkeys(keys, zeros),
        }
    )
    assert compute_data_metrics(batch, use_critic=False)["response_length/clip_ratio"] == exercise.CLIP


KL_MISTAKES = [
    (lambda old, new, m: masked_mean(new - old, m), "符号反了"),
    (lambda old, new, m: (old - new).mean(), "把填充算了进去"),
    (lambda old, new, m: ((old - new) * m).mean(), "分母却用了全部格子"),
    (lambda old, new, m: ((old - new) * m).sum(), "只求了和"),
    (lambda old, new, m: (((old - new) * m).sum(-1) / m.sum(-1)).mean(), "先每行平均"),
    (lambda old, new, m: masked_mean((old - new).abs(), m), "绝对值"),
]
CLIP_MISTAKES = [
    (lambda a, r: (a.sum(-1) >= 2).float().mean(), "整行"),
    (lambda a, r: (a.sum(-1) == r.shape[1] + a.shape[1]).float().mean(), "没有一行"),
    (lambda a, r: a[:, 2:].float().mean(), "分母用了 token 数"),
    (lambda a, r: (a[:, 2:].sum(-1) == 4).sum() / (a[:, 2:].sum(-1) > 0).sum(), "去掉了空响应"),
]


@pytest.mark.parametrize(("fn", "named"), KL_MISTAKES)
def test_a_slip_in_ppo_kl_is_named(fn, named):
    with pytest.raises(ValueError, match=named):
        check_ppo_kl(fn)


@pytest.mark.parametrize(("fn", "named"), CLIP_MISTAKES)
def test_a_slip_in_clip_ratio_is_named(fn, named):
    with pytest.raises(ValueError, match=named):
        check_clip_ratio(fn)


def test_an_untouched_stub_and_a_crash_are_reported(capsys):
    def stub(*_):
        raise NotImplementedError

    try_it(check_ppo_kl, stub)
    try_it(check_ppo_kl, lambda *_: None)
    out = capsys.readouterr().out
    assert "还没写" in out and "还不对" in out
