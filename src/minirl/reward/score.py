"""Chooses the score function by the row's data_source.

in: data_source, the decoded response, the ground truth -> out: a float, or the scorer's dict.
simplified: only the gsm8k scorer; verl also has math, code, geometry and search scorers.
verl: verl.utils.reward_score:default_compute_score
"""

from minirl.reward import gsm8k

_SCORERS = {"openai/gsm8k": gsm8k.compute_score}


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None, **kwargs
) -> float | dict:
    """The score of one response.

    Raises NotImplementedError, as verl does, for a data_source without a scorer.
    verl: verl.utils.reward_score:default_compute_score
    """
    if data_source not in _SCORERS:
        raise NotImplementedError(
            f"Reward function is not implemented for {data_source=}: minirl scores {', '.join(_SCORERS)}; "
            "set reward.custom_reward_function.path to a file with your compute_score"
        )
    result = _SCORERS[data_source](solution_str, ground_truth)
    return result if isinstance(result, dict) else float(result)
