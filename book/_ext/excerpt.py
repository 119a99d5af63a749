"""An excerpt of source by symbol: which lines are shown, where the notes are bound, what 0.9.1 did to it.

in: a spec `module:Qual.name`, anchor texts -> out: an `Excerpt`, a `Drift`. No Sphinx, verl is not imported.
An anchor that does not hit exactly one line raises `AnchorError`: the page must be read again by a person.
"""

import difflib
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from minirl.pin import LATER, PIN, Symbol, find_symbol, verl_root


class AnchorError(ValueError):
    """A symbol or an anchor text is gone, stands twice, or stands in another order."""


@dataclass(frozen=True)
class Excerpt:
    symbol: Symbol
    first: int  # 1-based line numbers in the file, inclusive
    last: int
    marks: tuple[int, ...]  # line number of each note, in order

    @property
    def lines(self) -> tuple[str, ...]:
        return self.symbol.lines[self.first - self.symbol.start : self.last - self.symbol.start + 1]


@dataclass(frozen=True)
class Drift:
    """What became of a symbol at the later version. state: same | changed | moved | gone."""

    state: str
    diff: str = ""
    excerpt_same: bool = False  # the symbol changed, but none of the shown lines did
    places: tuple[str, ...] = ()  # where a symbol of the same name stands now


def cut(spec: str, version: str, start: str | None, end: str | None, anchors: list[str]) -> Excerpt:
    """Find the symbol and the lines that the anchors name.

    Raises AnchorError naming the anchor and every line it hits.
    """
    try:
        symbol = find_symbol(spec, version)
    except ValueError as error:
        raise AnchorError(str(error)) from error
    first, last = symbol.start, symbol.end
    if start:
        first = _only_line(symbol, start, first, last, "from")
    if end:
        last = _only_line(symbol, end, first, last, "to")
    marks = []
    for anchor in anchors:
        line = _only_line(symbol, anchor, first, last, "at")
        if marks and line <= marks[-1]:
            before = f"line {marks[-1]}, the one before"
            raise AnchorError(f"{spec}: `at: {anchor}` (line {line}) must stand below {before}")

        marks.append(line)
    return Excerpt(symbol, first, last, tuple(marks))


def _only_line(symbol: Symbol, text: str, first: int, last: int, role: str) -> int:
    shown = symbol.lines[first - symbol.start : last - symbol.start + 1]
    hits = [first + i for i, line in enumerate(shown) if text in line]
    if len(hits) == 1:
        return hits[0]
    found = "no line" if not hits else f"{len(hits)} lines ({', '.join(map(str, hits))})"
    where = f"{symbol.file}:{first}-{last}"
    raise AnchorError(f"{symbol.spec}: `{role}: {text}` hits {found} of {where}; it must hit one")


def drift(excerpt: Excerpt) -> Drift:
    """Compare a symbol of the pin with the later version."""
    here = excerpt.symbol
    try:
        there = find_symbol(here.spec, LATER)
    except ValueError:
        places = same_name_elsewhere(here.spec.partition(":")[2])
        return Drift("moved" if places else "gone", places=places)
    if there.lines == here.lines:
        return Drift("same")
    names = (f"verl {PIN}/{here.file}", f"verl {LATER}/{there.file}")
    diff = "\n".join(difflib.unified_diff(here.lines, there.lines, *names, n=2, lineterm=""))
    low, high = excerpt.first - here.start, excerpt.last - here.start + 1
    opcodes = difflib.SequenceMatcher(None, here.lines, there.lines, autojunk=False).get_opcodes()
    touched = any(tag != "equal" and a < high and max(b, a + 1) > low for tag, a, b, _, _ in opcodes)
    return Drift("changed", diff=diff, excerpt_same=not touched)


@lru_cache(maxsize=64)
def same_name_elsewhere(qualname: str) -> tuple[str, ...]:
    """Specs in the later version that define the same qualified name (a cheap text search first)."""
    root = verl_root(LATER)
    word = re.compile(rf"^\s*(?:async def|def|class) {re.escape(qualname.rsplit('.', 1)[-1])}\b", re.M)
    specs = []
    for path in sorted((root / "verl").rglob("*.py")):
        if not word.search(path.read_text(encoding="utf-8")):
            continue
        spec = f"{_module_name(path, root)}:{qualname}"
        try:
            find_symbol(spec, LATER)
        except ValueError:
            continue
        specs.append(spec)
    return tuple(specs)


def _module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
