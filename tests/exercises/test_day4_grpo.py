"""The group-normalisation checker passes what verl computes, and names each slip that a reader makes."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from minirl.exercises.day4_grpo import check_group_normalisation, try_it
from minirl.pin import use_verl


def normalise(scores, uid, *, correction=1, epsilon=1e-6, divide=True, alone="score"):
    """The formula with one thing wrong at a time."""
    out = torch.zeros_like(scores)
    for label in set(uid):
        rows = torch.tensor([u == label for u in uid])
        group = scores[rows]
        if len(group) == 1 and alone != "nan":
            out[rows] = group if alone == "score" else 0.0
            continue
        out[rows] = group - group.mean()
        if divide:
            out[rows] /= group.std(correction=correction) + epsilon
    return out


def by_position(scores, uid, size):
    """Groups of `size` rows; a rest that does not fill one is a group of its own."""
    return normalise(scores, [str(i // size) for i in range(len(uid))])


def wrong(**slip):
    return lambda scores, uid: normalise(scores, uid, **slip)


def test_checker_passes_verl_itself():
    use_verl()
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    def verl(scores, uid):
        index = np.array(uid, dtype=object)
        return compute_grpo_outcome_advantage(scores[:, None], torch.ones(len(uid), 1), index)[0][:, 0]

    check_group_normalisation(verl)


@pytest.mark.parametrize(
    ("fn", "named"),
    [
        (wrong(correction=0), "无偏"),
        (wrong(divide=False), "没有除标准差"),
        (lambda s, u: (s - s.mean()) / (s.std() + 1e-6), "在整批上标准化"),
        (lambda s, u: by_position(s, u, 2), "按 uid 分组|只认 uid|手算"),
        (wrong(alone="zero"), "保留原始分数"),
        (wrong(alone="nan"), "单独一条要另外处理"),
        (wrong(epsilon=0.0), "0/0"),
        (lambda s, u: s[:, None], "形状"),
    ],
)
def test_checker_names_the_slip(fn, named):
    with pytest.raises(ValueError, match=named):
        check_group_normalisation(fn)


def test_groups_by_position_are_named_once_the_rows_are_shuffled():
    """A reader whose groups have the right size, but by position."""
    sizes = {2: 2, 8: 4, 6: 3, 4: 2}
    with pytest.raises(ValueError, match="按位置每 3 行一组"):
        check_group_normalisation(lambda s, u: by_position(s, u, sizes[len(u)]))


def test_try_it_reports_without_raising(capsys):
    def unwritten(*_):
        raise NotImplementedError

    try_it(unwritten)
    try_it(wrong(divide=False))
    try_it(normalise)
    lines = capsys.readouterr().out.splitlines()
    assert [line[:2] for line in lines] == ["还没", "还不", "通过"]


def test_the_solution_folded_into_the_notebook_passes():
    path = Path(__file__).parents[2] / "notebooks" / "day4_grpo.ipynb"
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    text = next("".join(c["source"]) for c in cells if "<details>" in "".join(c["source"]))
    names = {"torch": torch}
    exec(re.search(r"```python\n(.*?)```", text, re.S)[1], names)
    check_group_normalisation(names["my_group_normalise"])
