"""From overrides to a typed DictConfig.

in: ["algorithm.adv_estimator=grpo", ...] -> out: the whole configuration, interpolations still lazy.
simplified: keys of verl that minirl lacks are listed and dropped, where verl would read them.
verl: verl.trainer.main_ppo:main
"""

import logging
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from minirl.config.overrides import sort_overrides
from minirl.config.schema import Config
from minirl.config.validate import validate

_HERE = Path(__file__).resolve().parent
_REPO = _HERE.parents[2]
_log = logging.getLogger("minirl.config")


def _repo_path(path: str) -> str:
    """A file that ships with the project, relative to the working directory where that is inside it."""
    target, cwd = _REPO / path, Path.cwd()
    return os.path.relpath(target, cwd) if cwd.is_relative_to(_REPO) else str(target)


OmegaConf.register_new_resolver("repo", _repo_path, replace=True)


def compose(overrides: Sequence[str] = (), *, check: bool = True) -> DictConfig:
    """The configuration with these overrides applied, later ones winning.

    Keys that verl has and minirl does not are logged in one warning, with the component that reads them.
    `check=False` leaves out the batch arithmetic of `validate`.

    Raises ValueError in one line: a key that neither has (the nearest is suggested), a value of the wrong
    type, an impossible combination.
    verl: verl.trainer.main_ppo:main
    """
    known = sort_overrides(overrides)
    for line in known.notices:
        _log.warning(line)
    try:
        with initialize_config_dir(version_base=None, config_dir=str(_HERE)):
            values = hydra_compose("ppo_trainer", overrides=known.applied)
        config = _typed(values)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(_one_line(error, known.applied)) from error
    others = [name for name in _names(config.trainer.logger) if name != "console"]
    if others:
        _log.warning(f"trainer.logger: minirl logs to the console only, ignored: {', '.join(others)}")
    _warn_of_unread_clip(config, known.applied)
    _warn_of_half_read_topk(config)
    if check:
        validate(config)
    return config


def _warn_of_unread_clip(config: DictConfig, applied: Sequence[str]) -> None:
    """verl's yaml sets clip_ratio_low and _high: there clip_ratio alone changes nothing, without a word."""
    key, actor = "actor_rollout_ref.actor.clip_ratio", config.actor_rollout_ref.actor
    given = any(item.startswith(f"++{key}=") for item in applied)
    read = (actor.clip_ratio_low, actor.clip_ratio_high)
    if given and None not in read and actor.clip_ratio not in read:
        _log.warning(
            f"{key}={actor.clip_ratio} is not read, as {key}_low={read[0]} and {key}_high={read[1]} are set: "
            "change those two"
        )


def _warn_of_half_read_topk(config: DictConfig) -> None:
    options = config.distillation.distillation_loss
    if config.distillation.enabled and options.use_policy_gradient and options.loss_mode == "forward_kl_topk":
        _log.warning(
            "distillation.distillation_loss.use_policy_gradient=true moves the sampled token only: what "
            "forward_kl_topk knows about the other tokens is lost; set it to false, or loss_mode=k1"
        )


def _names(value: str | Sequence[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def _typed(values: DictConfig) -> DictConfig:
    config = OmegaConf.merge(OmegaConf.structured(Config), values)
    assert isinstance(config, DictConfig)
    # typed nodes refuse unknown keys by themselves; free dicts (reward_kwargs, engine_kwargs) stay open
    OmegaConf.set_struct(config, None)
    OmegaConf.to_container(
        config, resolve=True
    )  # a wrong type behind an interpolation shows here, not in step 3
    return config


@lru_cache(maxsize=1)
def defaults() -> DictConfig:
    """The yaml as shipped, typed, without overrides. Do not change it."""
    return _typed(OmegaConf.load(_HERE / "ppo_trainer.yaml"))


# part of OmegaConf's message, which speaks of its classes -> what the user can do
_PLAIN = {
    "is not a ListConfig": "a list is needed, written [a,b]",
    "is not a subclass of": "this is a section of keys: set one of them",
    "is not Optional": "it cannot be null",
}


def _one_line(error: Exception, applied: Sequence[str]) -> str:
    key = getattr(error, "full_key", None)
    message = str(error).splitlines()[0]
    message = next((plain for theirs, plain in _PLAIN.items() if theirs in message), message)
    given = [item for item in applied if key and item.lstrip("+").partition("=")[0] == key]
    if given:
        return f"{given[-1].lstrip('+')}: {message}"
    return f"{key}: {message}" if key else message
