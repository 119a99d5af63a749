"""Configurations that must be refused: the default one with overrides, and what the error has to say."""

import pytest
from omegaconf import DictConfig, OmegaConf

from minirl.config import compose, validate

DEFAULT = compose()


def changed(*overrides: str) -> DictConfig:
    """The default configuration with these overrides, without Hydra's quarter of a second."""
    return OmegaConf.merge(DEFAULT, OmegaConf.from_dotlist(list(overrides)))


def assert_refused_in_one_line(overrides: list[str], parts: list[str]) -> None:
    """`validate` raises ValueError, and its one line holds every one of `parts`."""
    with pytest.raises(ValueError) as caught:
        validate(changed(*overrides))
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message
