"""A launch script of verl, option by option: default at the pin, who reads it, unit, whether minirl has it.

in: the text of a script, a command line or a list of overrides -> out: a `Launch`.
simplified: one entry point a script; the values that a script computes by commands stay open ("$...").
verl: verl.trainer.main_ppo:main
"""

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from minirl.config.overrides import MOVED, consumer, minirl_keys, verl_keys
from minirl.explain.catalogue import option_rows
from minirl.explain.launch_notes import notes_on
from minirl.explain.shell_words import shell_words
from minirl.pin import PIN, verl_root

_DOTTED = re.compile(r"(\+{0,2}|~)([A-Za-z_]\w*(?:\.[\w\-]+)+)(?:=(.*))?", re.DOTALL)
_PLAIN = re.compile(r"(\+{0,2}|~)([A-Za-z_]\w*)=(.*)", re.DOTALL)
_ENTRIES = ("verl.trainer.main_ppo", "minirl.main_ppo")


@dataclass(frozen=True)
class Option:
    """One override. `default` is None for a key that the pin's yaml does not hold."""

    key: str
    value: str
    prefix: str  # "", "+", "++" or "~"
    default: str | None
    consumer: str
    unit: str
    reader: str  # `module:qualname` where the chapters name one
    note: str
    in_minirl: bool
    problem: str

    @property
    def same(self) -> bool:
        """Whether the script writes what would hold anyway."""
        return self.default is not None and _parsed(self.key, self.value) == _parsed(self.key, self.default)


@dataclass(frozen=True)
class Launch:
    module: str  # what `python -m` runs, "" where the text only lists overrides
    options: list[Option]
    config: DictConfig  # the pin's defaults with these options, interpolations lazy
    notes: list[str]

    def rows(self) -> list[dict[str, str]]:
        """One row an option, with the headings of the page, for a table."""
        return [
            {
                "配置": option.prefix + option.key,
                "脚本": option.value,
                f"默认（{PIN}）": "没有" if option.default is None else option.default,
                "谁用它": option.reader.partition(":")[2] or option.consumer,
                "单位": option.unit,
                "minirl": "有" if option.in_minirl else "没有",
                "说明": option.problem or option.note,
            }
            for option in self.options
        ]

    def text(self) -> str:
        """The same for a terminal."""
        lines = [
            f"入口：{self.module or '（只有 override）'}，{len(self.options)} 个选项，对照 verl {PIN}",
            "",
        ]
        for option in self.options:
            lines.append(f"{option.prefix}{option.key} = {option.value}")
            same = "，与默认相同" if option.same else ""
            default = "yaml 里没有这个键" if option.default is None else f"默认 {option.default}{same}"
            unit = f"；单位：{option.unit}" if option.unit else ""
            lines.append(f"    {default}；谁用它：{option.consumer}{unit}")
            lines += [f"    {option.reader}"] if option.reader else []
            lines += [f"    {option.note}"] if option.note else []
            lines += [] if option.in_minirl else ["    minirl 没有实现"]
            lines += [f"    ! {option.problem}"] if option.problem else []
        if self.notes:
            lines += ["", "要留意：", *(f"  - {note}" for note in self.notes)]
        return "\n".join(lines)

    def unknown(self) -> list[Option]:
        """Options that neither verl's yaml nor its code knows."""
        return [option for option in self.options if option.consumer == "没有人"]


def explain_launch(text: str) -> Launch:
    """Parse and explain; nothing of the text is run.

    Raises ValueError: no override in the text.
    """
    module, found = "", []
    words = list(shell_words(text))
    for i, (word, in_command) in enumerate(words):
        if word == "-m" and in_command and i + 1 < len(words):
            module = words[i + 1][0]
        elif match := (_PLAIN.fullmatch(word) if in_command else None) or _DOTTED.fullmatch(word):
            if match[3] is not None or match[1] == "~":
                found.append((match[1], match[2], match[3] or ""))
    if not found:
        raise ValueError(
            "no override of the form key.path=value in the text: is this a launch script of verl?"
        )
    engine = dict((key, value) for _, key, value in found).get("model_engine", "dp")
    options = [_option(prefix, key, value, engine) for prefix, key, value in found]
    config = _effective(options, engine)
    notes = [] if not module or module in _ENTRIES else [f"入口是 {module}，不是 {_ENTRIES[0]}：读者可能不同"]
    return Launch(module, options, config, notes + notes_on(options, config))


@lru_cache(maxsize=4)
def pin_defaults(engine: str = "dp") -> DictConfig:
    """The pin's whole configuration for an engine: dp (FSDP), megatron, veomni, torchtitan."""
    folder = verl_root() / "verl" / "trainer" / "config"
    path = folder / f"_generated_ppo_{engine}_trainer.yaml"
    return OmegaConf.load(path if path.is_file() else folder / "_generated_ppo_trainer.yaml")


def default_text(key: str, engine: str = "dp") -> str | None:
    """The default at the pin as one line, an interpolation with its value; None for no such key."""
    node = pin_defaults(engine)
    *parents, last = key.split(".")
    for name in parents:
        node = node._get_node(name) if isinstance(node, DictConfig) and name in node else None
    if not isinstance(node, DictConfig) or last not in node.keys():  # `in` would miss a "???"
        return None
    raw = OmegaConf.to_container(node, resolve=False)[last]
    if isinstance(raw, str) and "${" in raw:
        return f"{raw} = {_one_line(node[last])}"
    return _one_line(raw)


def _one_line(value: object) -> str:
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value, resolve=False)
    return "null" if value is None else str(value)


def _option(prefix: str, key: str, value: str, engine: str) -> Option:
    row = option_rows().get(key, {})
    default = default_text(key, engine)
    known = key in verl_keys() or _inside_free_dict(key) or key == "model_engine"
    mine = key in minirl_keys()
    return Option(
        key=key,
        value=value,
        prefix=prefix,
        default=default,
        consumer=consumer(key) if known else ("minirl" if mine else "没有人"),
        unit=row.get("unit", ""),
        reader=row.get("reader", "") if ":" in row.get("reader", "") else "",
        note=row.get("note", "").strip(),
        in_minirl=mine,
        problem=_problem(prefix, key, default, known, mine),
    )


def _problem(prefix: str, key: str, default: str | None, known: bool, mine: bool) -> str:
    if key in MOVED:
        return f"旧键，0.8.0 迁到 {MOVED[key]}"
    if not known and mine:
        return "这是 minirl 自己的键，verl 没有"
    if not known:
        near = nearest(key)
        hint = f"是不是想写 {near}？" if near else "也没有相近的名字"
        why = (
            "加了 + 就会进配置，但没有人读"
            if prefix.startswith("+")
            else "Hydra 会拒绝：Key is not in struct"
        )
        return f"verl {PIN} 没有这个键，{hint}{why}"
    if prefix == "+" and default is not None:
        return "这个键 yaml 里已有，去掉 +（Hydra 会拒绝）"
    if not prefix and default is None and key != "model_engine":
        return "yaml 里没有这个键，前面要加 +"
    return ""


def nearest(key: str) -> str:
    """The known key that is spelt most alike, or the one with the same last name elsewhere; "" for none."""
    keys = sorted(verl_keys())
    below = [path for path in keys if path.endswith("." + key)]
    if below:  # a section was left out at the front
        return below[0]
    near = difflib.get_close_matches(key, keys, n=1, cutoff=0.8)
    if near:
        return near[0]
    last = key.rpartition(".")[2]
    same = [path for path in keys if path.rpartition(".")[2] == last]
    return max(same, key=lambda path: difflib.SequenceMatcher(None, path, key).ratio(), default="")


def _inside_free_dict(key: str) -> bool:
    parts = key.split(".")
    return any(".".join(parts[:end]) + ".*" in verl_keys() for end in range(1, len(parts)))


def _effective(options: list[Option], engine: str) -> DictConfig:
    config = pin_defaults(engine).copy()
    for key, value in _settable(options):
        OmegaConf.update(config, MOVED.get(key, key), value, force_add=True)
    return config


def _settable(options: list[Option]) -> Iterator[tuple[str, object]]:
    for option in options:
        is_open = re.search(r"[$`]", option.value)
        if option.prefix == "~" or is_open or option.consumer == "没有人" or _is_section(option.key):
            continue
        yield option.key, _parsed(option.key, option.value)


def _is_section(key: str) -> bool:
    """Whether the key is a whole section: written alone it chooses a yaml file, it sets no value."""
    return isinstance(OmegaConf.select(pin_defaults(), key, throw_on_missing=False), DictConfig)


def _parsed(key: str, text: str) -> object:
    try:
        return OverridesParser.create().parse_override(f"{key}={text}").value()
    except (HydraException, OmegaConfBaseException):
        return text
