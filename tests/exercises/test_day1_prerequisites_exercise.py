"""The day 1 checker accepts what verl computes and names each slip."""

import json
import re
from pathlib import Path

import pytest
import torch

from minirl.core_algos.logprob import logprobs_from_logits
from minirl.exercises import day1_prerequisites as exercise


def _right(logits, input_ids, response_length):
    shifted = logits[:, -response_length - 1 : -1]
    return logprobs_from_logits(shifted, input_ids[:, -response_length:])


def test_the_reference_passes():
    assert exercise.check_token_log_probs(_right).startswith("对了")


@pytest.mark.parametrize(
    ("slip", "fn"),
    [
        ("没有移位", lambda z, ids, r: logprobs_from_logits(z[:, -r:], ids[:, -r:])),
        ("移过头", lambda z, ids, r: logprobs_from_logits(z[:, -r - 2 : -2], ids[:, -r:])),
        ("没有归一", lambda z, ids, r: z[:, -r - 1 : -1].gather(-1, ids[:, -r:, None])[..., 0]),
        ("取对数", lambda z, ids, r: _right(z, ids, r).exp()),
        ("符号反了", lambda z, ids, r: -_right(z, ids, r)),
        (
            "维度不对",
            lambda z, ids, r: z.log_softmax(1)[:, -r - 1 : -1].gather(-1, ids[:, -r:, None])[..., 0],
        ),
        ("加起来", lambda z, ids, r: _right(z, ids, r).sum(-1)),
        ("切出响应", lambda z, ids, r: logprobs_from_logits(z[:, :-1], ids[:, 1:])),
        ("gather", lambda z, ids, r: z.log_softmax(-1)[:, -r - 1 : -1]),
        ("张量", lambda z, ids, r: [0.0]),
    ],
)
def test_each_slip_is_named(slip, fn):
    with pytest.raises(ValueError, match=slip):
        exercise.check_token_log_probs(fn)


def test_the_hand_made_slips_all_differ():
    logits, input_ids, _ = exercise.small_batch()
    values = [*exercise._slips(logits, input_ids).values(), torch.tensor(exercise.ANSWER).log()]
    for i, a in enumerate(values):
        assert not any(torch.allclose(a, b, atol=1e-3) for b in values[i + 1 :])


def test_try_it_reports_without_raising(capsys):
    def stub(logits, input_ids, response_length):
        raise NotImplementedError

    exercise.try_it(stub)
    exercise.try_it(lambda z, ids, r: z[:, -r:])
    exercise.try_it(_right)
    assert [line[0] for line in capsys.readouterr().out.splitlines()] == ["…", "✘", "✔"]


def test_the_solution_folded_into_the_notebook_passes():
    notebook = Path(__file__).resolve().parents[2] / "notebooks/day1_prerequisites.ipynb"
    text = "".join("".join(cell["source"]) for cell in json.loads(notebook.read_text("utf-8"))["cells"])
    names: dict = {}
    exec(re.search(r"<details>.*?```python\n(.*?)```", text, re.S)[1], names)
    assert exercise.check_token_log_probs(names["token_log_probs"]).startswith("对了")
