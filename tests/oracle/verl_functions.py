"""verl's own functions for the oracle tests: the pinned modules, and single functions of the later version.

The later version cannot be imported beside the pinned one (one name, `verl`), so the source of a function of
0.9.1 is run inside the namespace of the pinned module.
"""

import ast
from collections.abc import Callable

from minirl.pin import LATER, PIN, find_symbol, use_verl

use_verl()

import verl.trainer.ppo.core_algos as core_algos  # noqa: E402
import verl.trainer.ppo.rollout_corr_helper as rollout_corr_helper  # noqa: E402
from verl.workers.config import ActorConfig  # noqa: E402

__all__ = [
    "ALWAYS_ZERO",
    "ActorConfig",
    "actor_config",
    "core_algos",
    "later",
    "names_compared",
    "rollout_corr_helper",
]

# metrics that 0.8.0 takes from the truncated weights and 0.9.1, like us, from the raw ones
ALWAYS_ZERO = ("rollout_corr/rollout_is_seq_fraction_high", "rollout_corr/rollout_is_seq_fraction_low")


def later(module, *names: str) -> dict[str, Callable]:
    """Functions `names` of `module` as they are in the later version; they see each other, not the pinned."""
    namespace = dict(vars(module))
    for name in names:
        source = "\n".join(find_symbol(f"{module.__name__}:{name}", LATER).lines)
        tree = ast.parse(source)
        tree.body[0].decorator_list = []  # registering would overwrite the pinned function
        exec(compile(tree, f"<verl {LATER} {name}>", "exec"), namespace)
    return {name: namespace[name] for name in names}


def names_compared(module, name: str, version: str = PIN) -> set[str]:
    """The names a function of verl knows where it has no registry: the strings it compares something with."""
    source = "\n".join(find_symbol(f"{module.__name__}:{name}", version).lines)
    compares = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Compare)]
    constants = [part for node in compares for part in ast.walk(node) if isinstance(part, ast.Constant)]
    return {constant.value for constant in constants if isinstance(constant.value, str)}


def actor_config(**options) -> ActorConfig:
    """verl's ActorConfig with what it insists on, and `options`."""
    return ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **options)
