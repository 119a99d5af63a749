"""The directive `{source}`: lines of verl (or minirl) beside notes that are bound to them.

in: a symbol, anchor texts, notes in Markdown -> out: a figure; the build stops when an anchor is lost.
Syntax: book/_ext/README.md. The code is read from the installed pin by its syntax tree, never imported.
"""

import re
from functools import lru_cache
from html import escape
from pathlib import Path

import plain_yaml
import yaml
from book_directive import BookDirective
from docutils import nodes
from docutils.parsers.rst import directives
from excerpt import Drift, Excerpt, cut, drift
from html_part import part, raw
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import DiffLexer, PythonLexer

from minirl.pin import LATER, PIN, Symbol

# The indent is padding, not spaces: a long line could otherwise break after them. copy.js puts them back.
_LEADING = re.compile(r'^((?:<span class="\w+">)?) *')


class SourceDirective(BookDirective):
    has_content = True
    required_arguments = 1
    final_argument_whitespace = False
    option_spec = {
        "pin": directives.unchanged,
        "from": directives.unchanged,
        "to": directives.unchanged,
        "caption": directives.unchanged,
    }

    def build(self) -> list[nodes.Node]:
        notes = self._notes()
        spec = self.arguments[0]
        version = self.options.get("pin", PIN)
        anchors = [note["at"] for note in notes]
        excerpt = cut(spec, version, self.options.get("from"), self.options.get("to"), anchors)
        self.env.note_dependency(str(excerpt.symbol.path))
        change = drift(excerpt) if version == PIN and excerpt.symbol.version else None
        figure = part("figure", class_="src", aria_label=f"源码：{spec}")
        figure += self._head(excerpt, change)
        figure += self._rows(excerpt, [note["note"] for note in notes])
        if change:
            figure += raw(_later(change))
        figure += part("p", _licence(excerpt.symbol), class_="src-licence")
        return [figure]

    def _notes(self) -> list[dict[str, str]]:
        try:
            notes = plain_yaml.load("\n".join(self.content)) or []
        except yaml.YAMLError as error:
            raise ValueError(f"{self.arguments[0]}: the notes are not YAML: {error}") from error
        entries = notes if isinstance(notes, list) else [None]
        if not all(isinstance(note, dict) and set(note) == {"at", "note"} for note in entries):
            raise ValueError(
                f"{self.arguments[0]}: the body must be a list of `- at: text` with `note: text`"
            )
        return [{key: str(value) for key, value in note.items()} for note in notes]

    def _head(self, excerpt: Excerpt, change: Drift | None) -> nodes.Node:
        symbol = excerpt.symbol
        head = part("figcaption", class_="src-head")
        if "caption" in self.options:
            head += part("div", *self.phrase(self.options["caption"]), class_="src-caption")
        head += part("code", symbol.spec.partition(":")[2], class_="src-name")
        whole = (excerpt.first, excerpt.last) == (symbol.start, symbol.end)
        lines = f"第 {excerpt.first}–{excerpt.last} 行" + ("" if whole else "（节选）")
        if symbol.version:
            href = escape(tag_link(symbol, excerpt.first, excerpt.last))
            head += raw(f'<a class="src-where" href="{href}">{escape(symbol.file)} · {lines}</a>')
        else:
            head += part("span", f"src/{symbol.file} · {lines}", class_="src-where")
        if change:
            head += _badge(change)
        return head

    def _rows(self, excerpt: Excerpt, notes: list[str]) -> nodes.Node:
        body = part("div", class_="src-body" if notes else "src-body src-bare")
        ends = [mark - 1 for mark in excerpt.marks[1:]] + [excerpt.last]
        before = excerpt.marks[0] - 1 if notes else excerpt.last
        if before >= excerpt.first:
            body += part("div", _code(excerpt, excerpt.first, before, "src-rest"), class_="src-row")
        for number, (mark, end, text) in enumerate(zip(excerpt.marks, ends, notes, strict=False), 1):
            dot = raw(f'<span class="src-num" aria-hidden="true">{number}</span>')
            note = part("div", dot, class_="src-note", role="note", aria_label=f"第 {mark} 行的注释")
            note += part("div", *self.parse_text_to_nodes(text), class_="src-text")
            row = part("div", _code(excerpt, mark, mark, "src-mark"), note, class_="src-row src-noted")
            if end > mark:
                row += _code(excerpt, mark + 1, end, "src-rest")
            body += row
        return body


def _code(excerpt: Excerpt, first: int, last: int, css: str) -> nodes.Node:
    """Lines of the file, dedented to the excerpt's own left edge."""
    rendered = highlighted(excerpt.symbol.path, excerpt.symbol.path.stat().st_mtime_ns)
    edge = min((_indent(line) for line in excerpt.lines if line.strip()), default=0)
    rows = []
    for number in range(first, last + 1):
        depth = max(_indent(excerpt.lines[number - excerpt.first]) - edge, 0)
        html = _LEADING.sub(r"\1", rendered[number - 1], count=1)
        rows.append(
            f'<span class="src-line" style="--in:{depth}" data-in="{depth}">'
            f'<span class="src-no" aria-hidden="true" data-no="{number}"></span>'
            f"<code>{html or ' '}</code></span>"
        )
    return raw(f'<div class="{css} highlight">{"".join(rows)}</div>')


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _badge(change: Drift) -> nodes.Node:
    words = {"same": "未变", "changed": "已改", "moved": "已移走", "gone": "已移走"}[change.state]
    only_outside = "（本段未变）" if change.excerpt_same else ""
    return part("span", f"{LATER} {words}{only_outside}", class_=f"src-badge is-{change.state}")


def _later(change: Drift) -> str:
    """The folded diff of a changed symbol, or where one of the same name stands now."""
    if change.state == "changed":
        diff = highlight(change.diff, DiffLexer(), HtmlFormatter(nowrap=True))
        outside = "（在节选之外）" if change.excerpt_same else ""
        return (
            f'<details class="src-drift"><summary>{LATER} 的改动{outside}</summary>'
            f'<div class="highlight"><pre tabindex="0">{diff}</pre></div></details>'
        )
    if change.state == "moved":
        places = "、".join(f"<code>{escape(place)}</code>" for place in change.places)
        return f'<p class="src-elsewhere">{LATER} 里同名的定义在 {places}</p>'
    return ""


def _licence(symbol: Symbol) -> str:
    if not symbol.version:
        return "本站的 minirl，构建时取自 src/"
    return f"摘自 verl {symbol.version}，Apache-2.0 许可；构建时取自所装的包，未作改动"


def tag_link(symbol: Symbol, first: int, last: int) -> str:
    """The lines at the tag on GitHub; a link only, no page asks for it."""
    return f"https://github.com/verl-project/verl/blob/v{symbol.version}/{symbol.file}#L{first}-L{last}"


@lru_cache(maxsize=64)
def highlighted(path: Path, _mtime: int) -> list[str]:
    """HTML of each line. The whole file is lexed, so an excerpt may start inside a docstring."""
    text = path.read_text(encoding="utf-8")
    lexer = PythonLexer(stripnl=False, ensurenl=True)
    return highlight(text, lexer, HtmlFormatter(nowrap=True)).split("\n")


def setup(app):
    app.setup_extension("html_part")
    app.setup_extension("book_directive")
    app.add_directive("source", SourceDirective)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
