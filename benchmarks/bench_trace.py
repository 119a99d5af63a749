"""What tracing costs: seconds inside the tracer, as a share of the steps it watched. The budget is 3%.

Run: python benchmarks/bench_trace.py [grpo|gae] [steps]
"""

import sys
import time

import minirl.trace as module
from minirl.config import compose
from minirl.trainer import PPOTrainer

BUDGET = 0.03


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

    module._Visit.__enter__ = timed(module._Visit.__enter__)
    module._Visit.done = timed(module._Visit.done)
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
    with module.trace(trainer):
        history = trainer.fit()
    return spent["tracer"] - first[0], sum(entry["timing_s/step"] for entry in history[1:])


if __name__ == "__main__":
    adv_estimator = sys.argv[1] if len(sys.argv) > 1 else "grpo"
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 10
    tracer, total = measure(adv_estimator, steps)
    print(
        f"{adv_estimator}, {steps} steps: {1e3 * tracer / steps:.2f} ms of {1e3 * total / steps:.1f} ms each"
    )
    print(f"share {tracer / total:.2%}, budget {BUDGET:.0%}")
    sys.exit(tracer / total > BUDGET)
