"""DAPO's soft penalty for long responses.

in: the response's length -> out: a number <= 0 that is added to the score.
verl: verl.experimental.reward_loop.reward_manager.dapo:DAPORewardManager
"""


def overlong_penalty(length: int, *, max_resp_len: int, buffer_len: int, penalty_factor: float) -> float:
    """0 up to max_resp_len - buffer_len tokens, then falling linearly to -penalty_factor at max_resp_len.

    It keeps falling beyond max_resp_len, should the rollout allow longer responses.
    verl: verl.experimental.reward_loop.reward_manager.dapo:DAPORewardManager.run_single
    """
    exceed_len = length - (max_resp_len - buffer_len)
    return min(-exceed_len / buffer_len * penalty_factor, 0.0)
