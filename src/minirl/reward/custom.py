"""Loads the user's reward function.

in: reward.custom_reward_function.{path,name,reward_kwargs} -> out: compute_score, or None.
verl: verl.trainer.ppo.reward:get_custom_reward_fn
"""

import inspect
from collections.abc import Callable
from functools import partial, update_wrapper

from omegaconf import DictConfig

from minirl.extern import load_extern_object

_KEY = "reward.custom_reward_function"


def get_custom_reward_fn(config: DictConfig) -> Callable | None:
    """The function with reward_kwargs bound; they win over what the reward manager passes.

    A coroutine function stays one. Raises ValueError as `minirl.extern.load_extern_object` does.
    verl: verl.trainer.ppo.reward:get_custom_reward_fn
    """
    section = config.reward.custom_reward_function
    if not section.path:
        return None
    function = load_extern_object(section.path, section.name, _KEY)
    if not callable(function):
        raise ValueError(f"{_KEY}.name={section.name}: is a {type(function).__name__}, not a function")
    bind = _bind_async if inspect.iscoroutinefunction(function) else _bind
    return update_wrapper(partial(bind, function, dict(section.reward_kwargs)), function)


def _bind(function: Callable, reward_kwargs: dict, *args, **kwargs):
    return function(*args, **{**kwargs, **reward_kwargs})


async def _bind_async(function: Callable, reward_kwargs: dict, *args, **kwargs):
    return await function(*args, **{**kwargs, **reward_kwargs})
