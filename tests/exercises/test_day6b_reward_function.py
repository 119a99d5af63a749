"""The checker accepts a right solution and names the slip of a wrong one."""

import re

import pytest

from minirl.exercises.day6b_reward_function import CASES, check_partial_credit, try_it
from minirl.reward import gsm8k

EQUATION = re.compile(r"(\d+)([+-])(\d+)=(-?\d+)")


def solution(data_source, solution_str, ground_truth, extra_info=None):
    answer = gsm8k.extract_solution(solution_str)
    if answer is None:
        return {"score": 0.0, "acc": 0.0}
    if answer == ground_truth:
        return {"score": 1.0, "acc": 1.0}
    true = [
        int(a) + (int(b) if op == "+" else -int(b)) == int(c)
        for a, op, b, c in EQUATION.findall(solution_str)
    ]
    return {"score": 0.1 + 0.3 * (sum(true) / len(true) if true else 0.0), "acc": 0.0}


def test_a_right_solution_passes(capsys):
    check_partial_credit(solution)
    try_it(solution)
    assert "通过" in capsys.readouterr().out


def test_acc_of_every_case_is_what_verl_s_gsm8k_rule_says():
    for response, score, acc, _ in CASES:
        assert gsm8k.compute_score(response, "4") == acc
        assert (score == 1.0) == (acc == 1.0)


def acc_holds_the_partial_credit(**given):
    result = solution(**given)
    return {"score": result["score"], "acc": result["score"]}


def other_keys_when_wrong(**given):
    result = solution(**given)
    return result if result["acc"] else {"score": result["score"]}


def believes_every_equation(**given):
    result = solution(**given)
    if 0 < result["score"] < 1:
        result["score"] = 0.4 if "=" in given["solution_str"] else 0.1
    return result


def divides_by_zero(**given):
    equations = EQUATION.findall(given["solution_str"])
    return solution(**given) | {"acc": len(equations) / len(equations)}


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (acc_holds_the_partial_credit, "acc 应为 0.0"),
        (other_keys_when_wrong, "同样的键"),
        (believes_every_equation, "两个等式对一个"),
    ],
)
def test_a_slip_is_named(wrong, named):
    with pytest.raises(ValueError, match=named):
        check_partial_credit(wrong)


@pytest.mark.parametrize("wrong", [divides_by_zero, lambda **_: None])
def test_try_it_reports_and_goes_on(wrong, capsys):
    try_it(wrong)
    assert "还不对" in capsys.readouterr().out


def test_an_untouched_stub_is_told_apart(capsys):
    def stub(**given):
        raise NotImplementedError

    try_it(stub)
    assert "还没写" in capsys.readouterr().out
