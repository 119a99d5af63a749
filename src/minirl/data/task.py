"""The small task: word problems of two operations, in the shape of GSM8K.

In:  a seed -> Out: rows of verl's parquet schema: data_source, prompt, ability, reward_model, extra_info.
Simplified: numbers up to 20 and a fixed sentence pattern, so that a model of 100k parameters can learn it.
verl: none (verl downloads GSM8K in examples/data_preprocess/gsm8k.py)
"""

import itertools
import random
from dataclasses import dataclass

DATA_SOURCE = "openai/gsm8k"  # verl chooses the score function by this name
LARGEST = 10

PEOPLE = [("Tom", "He"), ("Sam", "He"), ("Leo", "He"), ("Ben", "He")]
PEOPLE += [("Mia", "She"), ("Amy", "She"), ("Ann", "She"), ("Lily", "She")]
THINGS = ["cards", "pens", "books", "cups", "eggs", "coins", "apples", "stamps"]
GAINS = ["buys", "finds", "gets", "wins"]
LOSSES = ["loses", "sells", "uses", "drops"]
PATTERNS = list(itertools.product("+-", "+-"))


@dataclass(frozen=True)
class Chain:
    """start (op, number) (op, number): the arithmetic of one problem."""

    start: int
    steps: tuple[tuple[str, int], tuple[str, int]]

    def results(self) -> list[int]:
        """The two running results; the last is the answer."""
        return list(
            itertools.accumulate((n if op == "+" else -n for op, n in self.steps), initial=self.start)
        )[1:]


@dataclass(frozen=True)
class Problem:
    question: str
    chain: Chain

    @property
    def ground_truth(self) -> str:
        return str(self.chain.results()[-1])

    @property
    def answer(self) -> str:
        return write_answer(self.chain)


def write_answer(chain: Chain, final: int | None = None) -> str:
    """The worked solution, one equation a line, then `#### final` (the last result if not given)."""
    lines, left = [], chain.start
    for (op, number), result in zip(chain.steps, chain.results(), strict=True):
        lines.append(f"{left}{op}{number}={result}")
        left = result
    return "\n".join([*lines, f"#### {left if final is None else final}"])


def chains_of(ops: tuple[str, str]) -> list[Chain]:
    """All chains with these operations whose operands are 1 to 9 and whose other numbers are 1 to LARGEST."""
    chains = [
        Chain(start, ((ops[0], first), (ops[1], second)))
        for start, first, second in itertools.product(range(1, LARGEST + 1), range(1, 10), range(1, 10))
    ]
    return [chain for chain in chains if all(1 <= result <= LARGEST for result in chain.results())]


def split_chains(*, seed: int, test_share: float = 0.1) -> tuple[list[list[Chain]], list[list[Chain]]]:
    """(train, test), each a list of chains per pattern of PATTERNS.

    No chain of the test split occurs in training: a right answer there is not a remembered one.
    """
    draw = random.Random(seed)
    train, test = [], []
    for ops in PATTERNS:
        chains = chains_of(ops)
        draw.shuffle(chains)
        cut = round(len(chains) * test_share)
        test.append(chains[:cut])
        train.append(chains[cut:])
    return train, test


def make_problems(patterns: list[list[Chain]], count: int, *, seed: int) -> list[Problem]:
    """`count` different questions, the patterns of operations in turn (so equally often)."""
    draw = random.Random(seed)
    problems: dict[str, Problem] = {}
    while len(problems) < count:
        chain = draw.choice(patterns[len(problems) % len(patterns)])
        question = ask(chain, draw)
        problems.setdefault(question, Problem(question, chain))
    return list(problems.values())


def ask(chain: Chain, draw: random.Random) -> str:
    name, pronoun = draw.choice(PEOPLE)
    thing = draw.choice(THINGS)
    did = [
        f"{draw.choice(GAINS)} {number} more" if op == "+" else f"{draw.choice(LOSSES)} {number}"
        for op, number in chain.steps
    ]
    return f"{name} has {chain.start} {thing}. {pronoun} {did[0]}, then {did[1]}. How many {thing} now?"


def to_row(problem: Problem, split: str, index: int) -> dict:
    """One row of verl's parquet schema."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": problem.question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": problem.ground_truth},
        "extra_info": {
            "split": split,
            "index": index,
            "answer": problem.answer,
            "question": problem.question,
        },
    }
