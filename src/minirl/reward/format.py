"""A reward of two parts: is the answer right, and is it written as asked (ending in "#### number").

in: the decoded response, the ground truth -> out: {"score", "acc", "format"}; a dict, so acc and format are
logged, can filter groups, and can be normalised apart by the gdpo estimator.
verl: none; the signature is that of verl.utils.reward_score:default_compute_score
"""

import re

from minirl.reward import gsm8k

_ENDS_AS_ASKED = re.compile(r"#### -?[0-9][0-9.,]*\s*$")


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict | None = None,
    *,
    format_weight: float = 0.1,
) -> dict[str, float]:
    """score = acc + format_weight * format, with acc and format each 0 or 1. acc takes the last number."""
    acc = gsm8k.compute_score(solution_str, ground_truth, method="flexible")
    well_formed = float(_ENDS_AS_ASKED.search(solution_str) is not None)
    return {"score": acc + format_weight * well_formed, "acc": float(acc), "format": well_formed}
