"""A GRPO training step against TRL's GRPOTrainer: same model, data, reward, batch, optimizer steps, thread.

Reported per side: CPU seconds a step (median), samples per CPU second, and the mean reward of the last ten
steps.
"""

import statistics
import time

import pandas as pd
import torch

from benchmarks.measure import report
from benchmarks.timed_run import timed_run
from minirl.config import compose
from minirl.reward.gsm8k import compute_score

STEPS, PROMPTS, N, MINI_BATCHES = 40, 16, 8, 4


def run_minirl() -> tuple[list[float], list[float]]:
    seconds, history = timed_run(
        f"data.train_batch_size={PROMPTS}",
        f"actor_rollout_ref.rollout.n={N}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS // MINI_BATCHES}",
        steps=STEPS,
    )
    return seconds, [step["critic/score/mean"] for step in history]


def run_trl() -> tuple[list[float], list[float]]:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    cfg = compose([])
    frame = pd.read_parquet(cfg.data.train_files)
    rows = Dataset.from_list(
        [
            {"prompt": list(row.prompt), "ground_truth": row.reward_model["ground_truth"]}
            for row in frame.itertuples()
        ]
    )
    seconds, rewards = [], []

    def reward(completions, ground_truth, **_):
        scores = [compute_score(c[0]["content"], g) for c, g in zip(completions, ground_truth, strict=True)]
        rewards.append(statistics.mean(scores))
        return scores

    class Clock(TrainerCallback):
        last = time.process_time()

        def on_step_end(self, args, state, control, **_):
            now = time.process_time()
            seconds.append(now - Clock.last)
            Clock.last = now

    args = GRPOConfig(
        output_dir="outputs/bench_trl",
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=PROMPTS * N // MINI_BATCHES,
        steps_per_generation=MINI_BATCHES,
        gradient_accumulation_steps=1,
        num_generations=N,
        max_completion_length=cfg.data.max_response_length,
        max_steps=STEPS * MINI_BATCHES,
        learning_rate=cfg.actor_rollout_ref.actor.optim.lr,
        lr_scheduler_type="constant",
        weight_decay=cfg.actor_rollout_ref.actor.optim.weight_decay,
        beta=0.0,
        loss_type="dapo",
        temperature=1.0,
        max_grad_norm=cfg.actor_rollout_ref.actor.optim.clip_grad,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=cfg.actor_rollout_ref.model.path,
        reward_funcs=reward,
        args=args,
        train_dataset=rows,
        callbacks=[Clock()],
    )
    Clock.last = time.process_time()
    trainer.train()
    per_batch = [sum(seconds[i : i + MINI_BATCHES]) for i in range(0, len(seconds), MINI_BATCHES)]
    return per_batch, rewards


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for side, run in (("minirl", run_minirl), ("trl", run_trl)):
        seconds, rewards = run()
        step = statistics.median(seconds[1:])
        rows.append(
            {
                "side": side,
                "cpu_s_per_step": step,
                "samples_per_cpu_s": PROMPTS * N / step,
                "reward_first_5": statistics.mean(rewards[:5]),
                "reward_last_10": statistics.mean(rewards[-10:]),
            }
        )
    for row in rows:
        row["ratio_to_trl"] = row["samples_per_cpu_s"] / rows[-1]["samples_per_cpu_s"]
    report("training", rows)


if __name__ == "__main__":
    main()
