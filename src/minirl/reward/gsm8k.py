"""Scores an answer to a grade-school word problem by comparing the final number, as text.

in: the decoded response, the ground truth -> out: 1.0, or 0 (no answer), or format_score (wrong answer).
verl: verl.utils.reward_score.gsm8k
"""

import re
from typing import Literal

CLIP_CHARS = 300  # only the end is searched: the answer comes last
_NUMBER = r"-?[0-9.,]+"
_STRICT = re.compile(f"#### ({_NUMBER})")
_FLEXIBLE = re.compile(_NUMBER)

Method = Literal["strict", "flexible"]


def extract_solution(solution_str: str, method: Method = "strict") -> str | None:
    """The final answer as text, or None.

    strict: what follows the last "#### ", commas removed. flexible: the last run of digits, dots and commas
    that is not just "."; a lone "." if there is nothing else.
    verl: verl.utils.reward_score.gsm8k:extract_solution
    """
    if method not in ("strict", "flexible"):
        raise ValueError(f"method={method!r}: must be strict or flexible")
    tail = solution_str[-CLIP_CHARS:]
    if method == "strict":
        found = _STRICT.findall(tail)
        return found[-1].replace(",", "") if found else None
    found = _FLEXIBLE.findall(tail)
    numbers = [text for text in found if text != "."]
    if numbers:
        return numbers[-1]
    return found[0] if found else None


def compute_score(
    solution_str: str,
    ground_truth: str,
    method: Method = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """`score` when the extracted text equals the ground truth, 0 without an answer, else `format_score`.

    The comparison is between strings: "18.0" is not "18".
    verl: verl.utils.reward_score.gsm8k:compute_score
    """
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0
    return score if answer == ground_truth else format_score
