"""Which overrides take effect, which only verl would read, and which are misspelt.

in: ["key=value", ...] -> out: Overrides(applied, only_in_verl, moved).
simplified: verl refuses a known key written with "+" and an AlgoConfig key written without; both work here.
verl: verl.trainer.config (key paths in verl_keys.txt, readers in consumers.yaml, effects in effects.yaml)
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

_HERE = Path(__file__).resolve().parent

# verl's own moves (verl.experimental.reward_loop.reward_loop:migrate_legacy_reward_impl)
MOVED = {
    "custom_reward_function.path": "reward.custom_reward_function.path",
    "custom_reward_function.name": "reward.custom_reward_function.name",
    "reward_model.reward_manager": "reward.reward_manager.name",
}

_BOUNDS = tuple(f"algorithm.rollout_correction.rollout_{kind}_threshold" for kind in ("is", "rs"))


@dataclass(frozen=True)
class Overrides:
    applied: list[str]  # in Hydra's grammar
    only_in_verl: dict[str, str]  # key -> the component of verl that reads it
    moved: dict[str, str]  # old key -> new key

    @property
    def notices(self) -> list[str]:
        """One line per kind of remark, none when every override takes effect."""
        lines = [f"{old} has moved: applied as {new}" for old, new in self.moved.items()]
        if self.only_in_verl:
            keys = "; ".join(
                f"{key} (read by verl's {who}{': ' + effect(key) if effect(key) else ''})"
                for key, who in self.only_in_verl.items()
            )
            lines.append(f"known to verl, not implemented in minirl, ignored: {keys}")
        return lines


def sort_overrides(overrides: Sequence[str]) -> Overrides:
    """Sort overrides into those minirl applies and those only verl knows.

    Raises ValueError for a key in neither, for a deletion ("~key") and for text that is not "key=value".
    """
    applied: list[str] = []
    only_in_verl: dict[str, str] = {}
    moved: dict[str, str] = {}
    for text in overrides:
        key, value = _parse(text)
        if key in MOVED:
            moved[key] = MOVED[key]
            key = MOVED[key]
        if _contains(key):
            applied.append(f"++{key}={value}")
        elif key in verl_keys() or _in_free_dict(key, verl_keys()):
            only_in_verl[key] = consumer(key)
        else:
            raise ValueError(_unknown(key))
    return Overrides(applied, only_in_verl, moved)


def _parse(text: str) -> tuple[str, str]:
    if text.startswith("~"):
        raise ValueError(f"{text}: a key cannot be deleted; set it to null or to another value")
    if not text.partition("=")[0].strip("+ ") or "=" not in text:
        raise ValueError(f"{text}: write an override as key=value")
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        detail = str(error).splitlines()[0]
        raise ValueError(
            f"{text}: not a valid override ({detail}); quote values with spaces or commas"
        ) from error
    if override.is_sweep_override():
        raise ValueError(
            f"{text}: one value is needed, not a sweep; a list is written [a,b], a text with commas \"'a,b'\""
        )
    key, value = override.key_or_group, text.partition("=")[2]
    if key in _BOUNDS and "_" in value and isinstance(override.value(), int | float):
        value = f"'{value}'"  # "0.5_5" is two bounds; to Hydra, and so to verl, it is the number 0.55
    return key, value


def _contains(key: str) -> bool:
    from minirl.config.compose import defaults  # compose imports this module

    node = defaults()
    *parents, last = key.split(".")
    for name in parents:
        if not isinstance(node, DictConfig) or (name not in node and not _is_free(node)):
            return False
        if name not in node:
            return True
        node = node._get_node(name)
    return isinstance(node, DictConfig) and (last in node or _is_free(node))


def _is_free(node: DictConfig) -> bool:
    return OmegaConf.get_type(node) is dict


def _in_free_dict(key: str, keys: frozenset[str]) -> bool:
    parts = key.split(".")
    return any(".".join(parts[:end]) + ".*" in keys for end in range(1, len(parts)))


@lru_cache(maxsize=1)
def verl_keys() -> frozenset[str]:
    """Every key path of the pinned verl; "a.b.*" stands for a free dict. Made by write_verl_keys.py."""
    return frozenset((_HERE / "verl_keys.txt").read_text().split())


@lru_cache(maxsize=1)
def minirl_keys() -> frozenset[str]:
    """Every key path of minirl; "a.b.*" stands for a free dict."""
    from minirl.config.compose import defaults

    return frozenset(key_paths(OmegaConf.to_container(defaults(), resolve=False)))


def key_paths(tree: dict, prefix: str = "") -> list[str]:
    """The paths of all leaves and sections of a nested dict; an empty dict gives "path.*" as well."""
    paths: list[str] = []
    for name, value in tree.items():
        path = f"{prefix}{name}"
        paths.append(path)
        if isinstance(value, dict):
            paths += key_paths(value, path + ".") if value else [path + ".*"]
    return paths


def consumer(key: str) -> str:
    """The component of verl that reads this key: the longest prefix in consumers.yaml decides."""
    table = _consumers()
    parts = key.split(".")
    for end in range(len(parts), 0, -1):
        who = table.get(".".join(parts[:end]))
        if who:
            return who
    raise AssertionError(f"consumers.yaml has no entry for the group of {key}")


def effect(key: str) -> str:
    """What the key does in verl, "" where effects.yaml does not say. A free dict speaks for what is in it."""
    table = _effects()
    parts = key.split(".")
    ends = [".".join(parts[start:]) for start in range(len(parts))]
    return next((table[name] for name in [*ends, *parts] if name in table), "")


@lru_cache(maxsize=1)
def _consumers() -> dict[str, str]:
    return OmegaConf.to_container(OmegaConf.load(_HERE / "consumers.yaml"))


@lru_cache(maxsize=1)
def _effects() -> dict[str, str]:
    return OmegaConf.to_container(OmegaConf.load(_HERE / "effects.yaml"))


def _unknown(key: str) -> str:
    if key.startswith("distillation.teacher_models."):
        return (
            f"unknown key {key}: minirl has one teacher, distillation.teacher_models.teacher_model.model_path"
        )
    mine = sorted(minirl_keys())
    last = key.rpartition(".")[2]
    near = difflib.get_close_matches(key, sorted(minirl_keys() | verl_keys()), n=1, cutoff=0.75)
    if not near:  # right name, wrong section
        near = [path for path in mine if path.rpartition(".")[2] == last][:1]
    if not near:
        names = {path.rpartition(".")[2]: path for path in mine}
        near = [names[name] for name in difflib.get_close_matches(last, sorted(names), n=1, cutoff=0.75)]
    hint = f"did you mean {near[0]}?" if near else "`python -m minirl config` prints all keys"
    return f"unknown key {key}: neither minirl nor verl has it; {hint}"
