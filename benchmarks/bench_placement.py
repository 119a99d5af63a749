"""Ray's processes against local ranks: what starting costs and what a step costs, one run, k = 1 and 2.

Wall clock, as the work is spread over processes; where fewer cores are free than ranks, the ratio says
nothing about speed-up. start_s: building the trainer with Ray already up; ray_init_s: starting Ray itself.
"""

import statistics
import time

import torch

from benchmarks.measure import report
from minirl.config import compose
from minirl.single_controller.ray import start_ray
from minirl.trainer import PPOTrainer

STEPS = 6


def one_run(placement: str, ranks: int) -> dict:
    started = time.perf_counter()
    trainer = PPOTrainer(
        compose(
            [
                "algorithm.adv_estimator=grpo",
                f"minirl.placement={placement}",
                f"trainer.n_gpus_per_node={ranks}",
                f"trainer.total_training_steps={STEPS}",
                "trainer.val_before_train=False",
                "trainer.resume_mode=disable",
                "trainer.logger=[]",
            ]
        )
    )
    built = time.perf_counter()
    history = trainer.fit()
    trainer.actor_wg.shutdown()

    def median(key: str) -> float:
        return statistics.median(step[key] for step in history[1:])

    return {
        "placement": placement,
        "ranks": ranks,
        "start_s": built - started,
        "step_s": median("timing_s/step"),
        "gen_s": median("timing_s/gen"),
        "old_log_prob_s": median("timing_s/old_log_prob"),
        "update_actor_s": median("timing_s/update_actor"),
        "update_weights_s": median("timing_s/update_weights"),
    }


def main() -> None:
    torch.set_num_threads(1)
    one_run("local", 1)  # imports and warm-up, unmeasured
    started = time.perf_counter()
    start_ray(num_cpus=2)
    init = time.perf_counter() - started
    rows = [one_run(placement, ranks) for ranks in (1, 2) for placement in ("local", "ray")]
    local = {row["ranks"]: row["step_s"] for row in rows if row["placement"] == "local"}
    for row in rows:
        row["ratio_to_local"] = row["step_s"] / local[row["ranks"]]
        row["ray_init_s"] = init if row["placement"] == "ray" else 0.0
    report("placement", rows)


if __name__ == "__main__":
    main()
