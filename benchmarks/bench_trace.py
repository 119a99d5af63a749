"""What tracing costs: seconds inside the tracer, as a share of the steps it watched. The budget is 3%.

Run: python -m benchmarks trace
"""

import sys
import time
from unittest.mock import patch

import minirl.trace as module
from minirl.config import compose
from minirl.trainer import PPOTrainer

BUDGET, STEPS = 0.03, 10


def measure(adv_estimator: str, steps: int) -> tuple[float, float]:
    """(seconds in the tracer, seconds of all steps), the first step left out as warm-up."""
    spent = {"tracer": 0.0}

    def timed(method):
        def run(*args, **kwargs):
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                spent["tracer"] += time.perf_counter() - start

        return run

    visit = module._Visit
    watched = patch.multiple(visit, __enter__=timed(visit.__enter__), done=timed(visit.done))
    config = compose(
        [
            f"algorithm.adv_estimator={adv_estimator}",
            f"trainer.total_training_steps={steps + 1}",
            "trainer.val_before_train=False",
            "trainer.test_freq=-1",
            "trainer.logger=[]",
        ]
    )
    trainer = PPOTrainer(config)
    log, first = trainer._log, []

    def note_first(metrics):
        log(metrics)
        if not first:
            first.append(spent["tracer"])

    trainer._log = note_first
    with watched, module.trace(trainer):
        history = trainer.fit()
    return spent["tracer"] - first[0], sum(entry["timing_s/step"] for entry in history[1:])


def main() -> float:
    """Prints a line for each estimator; returns the larger share."""
    shares = []
    for adv_estimator in ("grpo", "gae"):
        tracer, total = measure(adv_estimator, STEPS)
        shares.append(tracer / total)
        mine, step = 1e3 * tracer / STEPS, 1e3 * total / STEPS
        print(
            f"{adv_estimator:5s} {STEPS} steps: {mine:.2f} ms of {step:.1f} ms each, "
            f"share {shares[-1]:.2%}, budget {BUDGET:.0%}"
        )
    return max(shares)


if __name__ == "__main__":
    sys.exit(main() > BUDGET)
