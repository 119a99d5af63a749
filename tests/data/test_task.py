"""The word problems: right answers, a clean split, verl's schema, an annotator that slips as described."""

import random
import re

import pytest

from minirl.data.task import PATTERNS, Chain, chains_of, make_problems, split_chains, to_row, write_answer
from minirl.data.warm_start import LOSS_READ_AS_GAIN, STOPS_AT_FIRST_RESULT, sloppy_answer
from minirl.reward.gsm8k import compute_score

EQUATION = re.compile(r"(\d+)([+-])(\d+)=(\d+)")


def test_answer_of_a_chain_worked_by_hand():
    chain = Chain(5, (("+", 3), ("-", 2)))
    assert chain.results() == [8, 6]
    assert write_answer(chain) == "5+3=8\n8-2=6\n#### 6"
    assert write_answer(chain, final=8) == "5+3=8\n8-2=6\n#### 8"


@pytest.mark.parametrize("ops", PATTERNS)
def test_every_chain_stays_between_1_and_10(ops):
    chains = chains_of(ops)
    assert len(chains) == len(set(chains))
    for chain in chains:
        (op_1, first), (op_2, second) = chain.steps
        middle = eval(f"{chain.start}{op_1}{first}")
        assert (op_1, op_2) == ops
        assert chain.results() == [middle, eval(f"{middle}{op_2}{second}")]
        assert min(chain.start, *chain.results()) >= 1
        assert max(chain.start, *chain.results()) <= 10


def test_no_chain_is_in_both_splits_and_none_is_lost():
    train, test = split_chains(seed=0)
    for ops, ours, held_out in zip(PATTERNS, train, test, strict=True):
        assert not set(ours) & set(held_out)
        assert set(ours) | set(held_out) == set(chains_of(ops))
        assert len(held_out) >= 10


def test_problems_are_different_and_patterns_equally_frequent():
    problems = make_problems(split_chains(seed=0)[0], 400, seed=1)
    assert len({problem.question for problem in problems}) == 400
    seen = [tuple(op for op, _ in problem.chain.steps) for problem in problems]
    assert {ops: seen.count(ops) for ops in PATTERNS} == dict.fromkeys(PATTERNS, 100)


def test_question_states_exactly_the_numbers_of_its_chain():
    for problem in make_problems(split_chains(seed=0)[0], 50, seed=1):
        chain = problem.chain
        stated = [int(number) for number in re.findall(r"\d+", problem.question)]
        assert stated == [chain.start, *(number for _, number in chain.steps)]


def test_same_seed_same_problems():
    train, _ = split_chains(seed=0)
    assert make_problems(train, 30, seed=1) == make_problems(train, 30, seed=1)
    assert make_problems(train, 30, seed=1) != make_problems(train, 30, seed=2)


def test_row_has_the_columns_of_verls_gsm8k():
    problem = make_problems(split_chains(seed=0)[0], 1, seed=1)[0]
    row = to_row(problem, "train", 0)
    assert list(row) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    assert row["prompt"] == [{"role": "user", "content": problem.question}]
    assert row["reward_model"] == {"style": "rule", "ground_truth": problem.ground_truth}
    assert compute_score(row["extra_info"]["answer"], problem.ground_truth) == 1


def test_sloppy_annotator_slips_as_often_as_stated_and_never_miscalculates():
    draw = random.Random(0)
    chain = Chain(9, (("-", 3), ("+", 2)))
    texts = [sloppy_answer(chain, draw) for _ in range(4000)]
    flipped = stopped = 0
    for text in texts:
        equations = EQUATION.findall(text)
        for left, op, right, result in equations:
            assert eval(f"{left}{op}{right}") == int(result)
        flipped += equations[0][1] == "+"
        assert equations[1][1] == "+"  # a gain is never misread
        stopped += text.endswith(f"#### {equations[0][3]}")
    assert abs(flipped / 4000 - LOSS_READ_AS_GAIN) < 0.03
    assert abs(stopped / 4000 - STOPS_AT_FIRST_RESULT) < 0.03
