"""Short runs of the shipped task, shared by the tests of the trainer."""

from minirl.config import compose
from minirl.trainer import PPOTrainer

QUIET = (
    "trainer.logger=[]",
    "trainer.val_before_train=False",
    "trainer.resume_mode=disable",
)
SMALL = (
    "data.train_batch_size=4",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "critic.ppo_micro_batch_size_per_gpu=8",
)
ONLY_VERL = {"timing_s/start_profile", "timing_s/stop_profile"}  # metrics; minirl has no profiler


def small(*overrides: str, steps: int = 2):
    """Configuration of a run of `steps` steps with 4 prompts, 4 responses each and 2 mini-batches."""
    return compose([*QUIET, *SMALL, f"trainer.total_training_steps={steps}", *overrides])


def full(*overrides: str, steps: int):
    """The default batch: 16 prompts, 8 responses each, 4 mini-batches."""
    return compose([*QUIET, f"trainer.total_training_steps={steps}", *overrides])


def verl_trainer(config, **kwargs):
    """verl's own trainer on minirl's workers."""
    from minirl.verl_bridge import VerlTrainer  # imports verl: seconds, so not at collection

    return VerlTrainer(config, **kwargs)


def weights(trainer: PPOTrainer, role: str = "actor") -> list:
    worker = getattr(trainer, f"{role}_wg").workers[0]
    return [p.detach().clone() for p in worker.parameters]


def steady(history: list[dict]) -> list[dict]:
    """The metrics without clocks and memory: what two equal runs must share."""
    return [
        {k: v for k, v in step.items() if not k.startswith(("timing", "perf/")) and "/perf/" not in k}
        for step in history
    ]
