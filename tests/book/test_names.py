"""Every name of verl and minirl that a page, a quiz or a notebook puts in backticks exists at the pin.

Looked at: `module:Qual.name`, paths under verl/ and src/, dotted option keys, DataProto keys in brackets.
"""

import json
import re
from functools import lru_cache

import pytest
from built_site import ROOT
from data_tables import defaults

from minirl.config import compose
from minirl.ledger import LEDGER
from minirl.pin import LATER, PIN, find_symbol, verl_root

TEXTS = sorted(
    [
        *(ROOT / "book").rglob("*.md"),
        *(ROOT / "notebooks").glob("*.ipynb"),
        *(ROOT / "data" / "quiz").glob("*.yml"),
    ]
)
TEXTS = [path for path in TEXTS if "_ext" not in path.parts]
ROOTS = ("data", "actor_rollout_ref", "critic", "reward", "algorithm", "trainer", "distillation")
# What stands between single backticks is code; fenced code is run or shown elsewhere and not checked here.
_CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_SYMBOL = re.compile(r"(?:verl|minirl)(?:\.\w+)*:[A-Za-z_]\w*(?:\.\w+)*")
_FILE = re.compile(r"(?:verl|src/minirl)/[\w./-]+\.(?:py|yaml)")
_OPTION = re.compile(rf"\+{{0,2}}((?:{'|'.join(ROOTS)})(?:\.[a-z_]\w*)+)(?:\s*=.*)?")
_KEY = re.compile(r"""\b(?:batch|non_tensor_batch)\[["'](\w+)["']\]""")


def prose(path) -> str:
    """The text of a page; of a notebook, its Markdown cells."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    cells = json.loads(text)["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def quoted(path) -> list[str]:
    return _CODE.findall(prose(path))


def exists(lookup) -> bool:
    try:
        lookup()
    except (KeyError, ValueError):
        return False
    return True


def test_there_are_texts_and_names_to_check():
    words = [word for path in TEXTS for word in quoted(path)]
    assert sum(bool(_OPTION.fullmatch(word)) for word in words) > 20
    assert any(_FILE.fullmatch(word) for word in words)


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_symbols_exist_at_the_pin_or_where_the_text_says(path):
    lost = []
    for word in set(quoted(path)):
        for spec in _SYMBOL.findall(word):
            if not any(exists(lambda s=spec, v=version: find_symbol(s, v)) for version in (PIN, LATER)):
                lost.append(spec)
    assert not lost, f"no such symbol: {lost}"


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_source_files_exist(path):
    lost = []
    for word in set(quoted(path)):
        for name in _FILE.findall(word):
            places = [ROOT / name, verl_root(PIN) / name, verl_root(LATER) / name]
            if not any(place.is_file() for place in places):
                lost.append(name)
    assert not lost, f"no such file: {lost}"


@lru_cache
def minirl_defaults():
    return compose([])


def is_option(key: str) -> bool:
    """A key of the expanded yaml of either version, or of minirl's own; a group of keys counts."""
    for tree in (defaults(PIN), defaults(LATER), minirl_defaults()):
        value = tree
        for name in key.split("."):
            if value is None or not hasattr(value, "keys") or name not in value:
                break
            value = value[name]
        else:
            return True
    return False


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_options_exist(path):
    lost = {
        found[1] for word in quoted(path) if (found := _OPTION.fullmatch(word)) and not is_option(found[1])
    }
    assert not lost, f"no such option at {PIN}: {sorted(lost)}"


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_batch_keys_are_in_the_ledger(path):
    lost = {key for word in quoted(path) for key in _KEY.findall(word) if key not in LEDGER}
    assert not lost, f"not in the ledger: {sorted(lost)}"
