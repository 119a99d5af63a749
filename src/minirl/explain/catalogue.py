"""The words of data/metrics.yml and data/config_keys.yml, looked up by the name that a log or script shows.

in: a metric's name, or an option's -> out: its row, or None.
A metric row's key may stand for several names: "critic/score/{mean,max,min}", "val-core/*/mean@*".
verl: none
"""

import re
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path

import yaml

DATA = Path(__file__).resolve().parents[3] / "data"


@lru_cache(maxsize=1)
def metric_rows() -> tuple[dict, ...]:
    """The rows of data/metrics.yml, in order."""
    return tuple(_load("metrics.yml"))


@lru_cache(maxsize=1)
def option_rows() -> dict[str, dict]:
    """The rows of data/config_keys.yml by key."""
    return {row["key"]: row for row in _load("config_keys.yml")}


def metric(name: str) -> dict | None:
    """The row of a printed metric; a row without a star wins over one with."""
    return _by_name().get(name) or next(
        (row for row in metric_rows() for key in expand(row["key"]) if "*" in key and fnmatchcase(name, key)),
        None,
    )


def expand(key: str) -> list[str]:
    """ "a/{x,y}" -> ["a/x", "a/y"]; a key without braces alone."""
    found = re.search(r"\{([^{}]*)\}", key)
    if not found:
        return [key]
    head, tail = key[: found.start()], key[found.end() :]
    return [name for part in found[1].split(",") for name in expand(head + part + tail)]


@lru_cache(maxsize=1)
def _by_name() -> dict[str, dict]:
    return {key: row for row in metric_rows() for key in expand(row["key"]) if "*" not in key}


def _load(name: str) -> list[dict]:
    return yaml.safe_load((DATA / name).read_text(encoding="utf-8"))
