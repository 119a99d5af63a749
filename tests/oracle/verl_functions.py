"""verl's own functions for the oracle tests: the pinned modules, and single functions of the later version.

The later version cannot be imported beside the pinned one (one name, `verl`), so the source of a function of
0.9.1 is run inside the namespace of the pinned module.
"""

import ast
from collections.abc import Callable

from minirl.pin import LATER, find_symbol, use_verl

use_verl()

import verl.trainer.ppo.core_algos as core_algos  # noqa: E402
import verl.trainer.ppo.rollout_corr_helper as rollout_corr_helper  # noqa: E402
from verl.workers.config import ActorConfig  # noqa: E402

__all__ = ["ActorConfig", "actor_config", "core_algos", "later", "rollout_corr_helper"]


def later(module, *names: str) -> dict[str, Callable]:
    """Functions `names` of `module` as they are in the later version; they see each other, not the pinned."""
    namespace = dict(vars(module))
    for name in names:
        source = "\n".join(find_symbol(f"{module.__name__}:{name}", LATER).lines)
        tree = ast.parse(source)
        tree.body[0].decorator_list = []  # registering would overwrite the pinned function
        exec(compile(tree, f"<verl {LATER} {name}>", "exec"), namespace)
    return {name: namespace[name] for name in names}


def actor_config(**options) -> ActorConfig:
    """verl's ActorConfig with what it insists on, and `options`."""
    return ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **options)
