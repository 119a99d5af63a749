"""Train: `python -m minirl.main_ppo [--preset cpu|gpu|auto] [key=value ...]`, with verl's own overrides.

in: overrides -> out: a log line per step on stdout, checkpoints if trainer.save_freq asks for them.
simplified: no Ray cluster, no task runner: the trainer runs in this process.
verl: verl.trainer.main_ppo:main
"""

import sys
from collections.abc import Sequence

from minirl import presets
from minirl.config import compose
from minirl.errors import OneLineParser, run


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 when trained, 2 for a user's error."""
    return run(_train, argv)


def _train(argv: list[str]) -> int:
    parser = OneLineParser(prog="minirl.main_ppo", description="Train with PPO, GRPO and relatives.")
    presets.add_arguments(parser)
    args = parser.parse_intermixed_args(argv)
    config = compose(presets.overrides_of(args))
    from minirl.trainer import (
        PPOTrainer,
    )  # after the configuration is known to be good: it loads transformers

    PPOTrainer(config).fit()
    return 0


if __name__ == "__main__":
    sys.exit(main())
