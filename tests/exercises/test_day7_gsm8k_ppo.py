"""The checker of day 7 accepts the solution, names each slip, and its cases are verl's arithmetic."""

import pytest

from minirl.config import compose
from minirl.exercises.day7_gsm8k_ppo import CASES, check_arithmetic, try_it
from minirl.explain import batch_arithmetic


def solution(train_batch_size, n, ppo_mini_batch_size, ppo_epochs, micro, gpus):
    steps = train_batch_size // ppo_mini_batch_size * ppo_epochs
    rows = ppo_mini_batch_size * n // gpus
    return train_batch_size * n, steps, rows, steps * rows // micro


def test_the_solution_passes():
    check_arithmetic(solution)


@pytest.mark.parametrize(
    ("slip", "words"),
    [
        (lambda t, n, m, e, c, g: (t, *solution(t, n, m, e, c, g)[1:]), "忘了乘 n"),
        (lambda t, n, m, e, c, g: (t * n, t // m, *solution(t, n, m, e, c, g)[2:]), "忘了乘 ppo_epochs"),
        (lambda t, n, m, e, c, g: (t * n, t * n // m * e, *solution(t, n, m, e, c, g)[2:]), "n 会抵消"),
        (lambda t, n, m, e, c, g: (*solution(t, n, m, e, c, g)[:2], m // g, 16), "忘了乘 n"),
        (lambda t, n, m, e, c, g: (*solution(t, n, m, e, c, g)[:2], m * n, 16), "忘了除以卡数"),
        (
            lambda t, n, m, e, c, g: (*solution(t, n, m, e, c, g)[:3], m * n // g // c),
            "还要乘更新次数",
        ),
        (lambda t, n, m, e, c, g: (1, 2), "四个数"),
    ],
)
def test_a_slip_is_named(slip, words):
    with pytest.raises(ValueError, match=words):
        check_arithmetic(slip)


def test_try_it_reports_without_raising(capsys):
    def stub(*args):
        raise NotImplementedError

    try_it(stub)
    try_it(lambda *args: 1 / 0)
    try_it(solution)
    out = capsys.readouterr().out
    assert "还没写" in out and "ZeroDivisionError" in out and "通过" in out


@pytest.mark.parametrize("case", CASES)
def test_a_case_is_what_the_configuration_comes_to(case):
    config = compose(
        [
            f"data.train_batch_size={case.train_batch_size}",
            f"actor_rollout_ref.rollout.n={case.n}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={case.ppo_mini_batch_size}",
            f"actor_rollout_ref.actor.ppo_epochs={case.ppo_epochs}",
            f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={case.micro}",
            f"critic.ppo_micro_batch_size_per_gpu={case.micro}",
            f"trainer.n_gpus_per_node={case.gpus}",
        ]
    )
    numbers = batch_arithmetic(config)
    names = ("trajectories", "optimizer_steps", "rows_per_rank", "micro_batches")
    assert tuple(numbers[name] for name in names) == case.expected
