"""The GAE checker passes what verl computes, and names each slip that a reader makes."""

import json
import re
from pathlib import Path

import pytest
import torch

from minirl.core_algos.masked import masked_whiten
from minirl.exercises.day3_ppo import check_gae, try_it
from minirl.pin import use_verl


def gae(
    rewards,
    values,
    mask,
    gamma,
    lam,
    *,
    carry_gamma=True,
    carry_lam=True,
    next_value=True,
    delta_gamma=True,
    gap="skip",
):
    """One thing wrong at a time. gap: skip, act (no mask), cut (a and V to 0), cut_a (a)."""
    a, columns = torch.zeros(len(values)), []
    following = torch.zeros(len(values))
    for t in reversed(range(values.shape[1])):
        m = torch.ones(len(values)) if gap == "act" else mask[:, t].float()
        delta = rewards[:, t] + (gamma if delta_gamma else 1) * following * next_value - values[:, t]
        new = delta + (gamma if carry_gamma else 1) * (lam if carry_lam else 1) * a
        a = new * m + (a * (1 - m) if gap == "skip" else 0)
        following = values[:, t] * m + (0 if gap == "cut" else following * (1 - m))
        columns.append(a)
    a = torch.stack(columns[::-1], 1)
    return masked_whiten(a, mask), a + values


def whitened_returns(rewards, values, mask, gamma, lam):
    advantages, _ = gae(rewards, values, mask, gamma, lam)
    return advantages, advantages + values


def no_whitening(rewards, values, mask, gamma, lam):
    _, returns = gae(rewards, values, mask, gamma, lam)
    return returns - values, returns


def row_by_row(rewards, values, mask, gamma, lam):
    _, returns = gae(rewards, values, mask, gamma, lam)
    rows = [masked_whiten(a[None], m[None])[0] for a, m in zip(returns - values, mask, strict=True)]
    return torch.stack(rows), returns


def biased_std(rewards, values, mask, gamma, lam):
    _, returns = gae(rewards, values, mask, gamma, lam)
    kept = (returns - values)[mask.bool()]
    return (returns - values - kept.mean()) / kept.std(correction=0), returns


def forwards(rewards, values, mask, gamma, lam):
    deltas = gae(rewards, values, mask, gamma, 0.0)[1] - values
    columns = [deltas[:, 0]]
    for t in range(1, values.shape[1]):
        columns.append(deltas[:, t] + gamma * lam * columns[-1])
    a = torch.stack(columns, 1)
    return masked_whiten(a, mask), a + values


def wrong(**slip):
    return lambda *args: gae(*args, **slip)


def test_checker_passes_verl_itself():
    use_verl()
    from verl.trainer.ppo.core_algos import compute_gae_advantage_return

    check_gae(compute_gae_advantage_return)


@pytest.mark.parametrize(
    ("fn", "named"),
    [
        (wrong(carry_lam=False), "忘了乘 λ"),
        (wrong(carry_gamma=False), "累加时忘了乘 γ"),
        (wrong(delta_gamma=False), "δ 里忘了乘 γ"),
        (wrong(next_value=False), "δ 里漏了下一个价值"),
        (wrong(gap="act"), "没有跨过掩码"),
        (wrong(gap="cut"), "Â 和价值都清零了"),
        (wrong(gap="cut_a"), "后面的功劳传不到左边"),
        (lambda r, v, m, g, lam: gae(r, v, m, g, 0.0), "只有 δ"),
        (forwards, "从左往右累加"),
        (whitened_returns, "白化**之前**"),
        (no_whitening, "优势忘了白化"),
        (biased_std, "无偏"),
        (row_by_row, "整批上做"),
        (lambda *args: gae(*args)[0], "两个张量"),
        (lambda *args: tuple(x[0] for x in gae(*args)), "形状"),
    ],
)
def test_checker_names_the_slip(fn, named):
    with pytest.raises(ValueError, match=named.replace("*", r"\*")):
        check_gae(fn)


def test_try_it_reports_without_raising(capsys):
    def unwritten(*_):
        raise NotImplementedError

    try_it(unwritten)
    try_it(no_whitening)
    try_it(gae)
    lines = capsys.readouterr().out.splitlines()
    assert [line[:2] for line in lines] == ["还没", "还不", "通过"]


def test_the_solution_folded_into_the_notebook_passes():
    path = Path(__file__).parents[2] / "notebooks" / "day3_ppo.ipynb"
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    text = next("".join(c["source"]) for c in cells if "<details>" in "".join(c["source"]))
    exercise = next("".join(c["source"]) for c in cells if "try_it(my_gae)" in "".join(c["source"]))
    names = {"torch": torch}
    exec("\n".join(line for line in exercise.splitlines() if line.startswith("from ")), names)
    exec(re.search(r"```python\n(.*?)```", text, re.S)[1], names)
    check_gae(names["my_gae"])
