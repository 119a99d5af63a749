"""verl's own functions for the oracle tests: the pinned modules, and those of the later version beside them.

Both versions call themselves `verl`. The pinned one stays importable as usual; modules of 0.9.1 are imported
and called inside `with verl_of(LATER)`, which exchanges the two sets of modules.
"""

import ast
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

from minirl.pin import LATER, PIN, find_symbol, use_verl, verl_root

use_verl()

import verl.trainer.ppo.core_algos as core_algos  # noqa: E402
import verl.trainer.ppo.rollout_corr_helper as rollout_corr_helper  # noqa: E402
from verl.workers.config import ActorConfig  # noqa: E402

__all__ = [
    "ALWAYS_ZERO",
    "ActorConfig",
    "Options",
    "actor_config",
    "core_algos",
    "later_module",
    "names_compared",
    "rollout_corr_helper",
    "verl_of",
]

# metrics that 0.8.0 takes from the truncated weights and 0.9.1, like us, from the raw ones
ALWAYS_ZERO = ("rollout_corr/rollout_is_seq_fraction_high", "rollout_corr/rollout_is_seq_fraction_low")

_aside: dict[str, dict[str, ModuleType]] = {LATER: {}}  # version -> its modules while they are not in use


@contextmanager
def verl_of(version: str) -> Iterator[None]:
    """Inside, `import verl` (also one in the body of a function that is called) means that version."""
    if version == PIN:
        yield
        return
    root, pinned_root = str(verl_root(version)), str(verl_root())

    def loaded() -> dict[str, ModuleType]:
        names = [name for name in sys.modules if name.split(".")[0] == "verl"]
        return {name: sys.modules.pop(name) for name in names}

    pinned = loaded()
    sys.modules.update(_aside[version])
    place = sys.path.index(pinned_root)
    sys.path[place] = root
    try:
        yield
    finally:
        sys.path[place] = pinned_root
        _aside[version] = loaded()
        sys.modules.update(pinned)


def later_module(name: str) -> ModuleType:
    """Module `name` of verl 0.9.1."""
    with verl_of(LATER):
        return importlib.import_module(name)


def names_compared(module, name: str, version: str = PIN) -> set[str]:
    """The names a function of verl knows where it has no registry: the strings it compares something with."""
    source = "\n".join(find_symbol(f"{module.__name__}:{name}", version).lines)
    compares = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Compare)]
    constants = [part for node in compares for part in ast.walk(node) if isinstance(part, ast.Constant)]
    return {constant.value for constant in constants if isinstance(constant.value, str)}


class Options(SimpleNamespace):
    """Attributes that can also be read as verl reads some of its options: `.get(name, default)`."""

    def get(self, name: str, default=None):
        return getattr(self, name, default)


def actor_config(policy_loss: dict | None = None, algos: ModuleType = core_algos, **options) -> ActorConfig:
    """The ActorConfig of this verl: what it insists on, `options`, and nothing else in its `policy_loss`."""
    config = algos.ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **options)
    if policy_loss is not None:
        object.__setattr__(config, "policy_loss", Options(**policy_loss))  # it is frozen
    return config
