"""The directive `{source}`: lines of verl (or minirl) beside notes that are bound to them.

in: a symbol, anchor texts, notes in Markdown -> out: a figure; the build stops when an anchor is lost.
Syntax: book/_ext/README.md. The code is read from the installed pin by its syntax tree; verl is never imported.
"""

import re
from functools import lru_cache
from html import escape
from pathlib import Path

import plain_yaml
import yaml
from docutils import nodes
from docutils.parsers.rst import directives
from excerpt import AnchorError, Drift, Excerpt, cut, drift
from html_part import part, raw
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import DiffLexer, PythonLexer
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

from minirl.pin import LATER, PIN

# The indent is padding, not spaces: a long line could otherwise break after them. copy.js puts them back.
_LEADING = re.compile(r'^((?:<span class="\w+">)?) *')
GITHUB = "https://github.com/verl-project/verl/blob/v{version}/{file}#L{first}-L{last}"


class SourceDirective(SphinxDirective):
    has_content = True
    required_arguments = 1
    final_argument_whitespace = False
    option_spec = {
        "pin": directives.unchanged,
        "from": directives.unchanged,
        "to": directives.unchanged,
        "caption": directives.unchanged,
    }

    def run(self) -> list[nodes.Node]:
        notes = self._notes()
        spec = self.arguments[0]
        version = self.options.get("pin", PIN)
        try:
            excerpt = cut(
                spec, version, self.options.get("from"), self.options.get("to"), [n["at"] for n in notes]
            )
        except AnchorError as error:
            self._stop(str(error))
        self.env.note_dependency(str(excerpt.symbol.path))
        figure = part(
            "figure",
            self._head(excerpt),
            self._rows(excerpt, [n["note"] for n in notes]),
            *self._drift(excerpt),
            self._licence(excerpt),
            class_="src",
            aria_label=f"源码：{spec}",
        )
        return [figure]

    def _stop(self, message: str):
        page = self.env.doc2path(self.env.docname, base=False)
        raise ExtensionError(f"{page}:{self.lineno}: {{source}} {message}")

    def _notes(self) -> list[dict[str, str]]:
        try:
            notes = plain_yaml.load("\n".join(self.content)) or []
        except yaml.YAMLError as error:
            self._stop(f"{self.arguments[0]}: the notes are not YAML: {error}")
        fine = isinstance(notes, list) and all(isinstance(n, dict) and set(n) == {"at", "note"} for n in notes)
        if not fine:
            self._stop(f"{self.arguments[0]}: the body must be a list of `- at: text` with `note: text`")
        return [{key: str(value) for key, value in note.items()} for note in notes]

    def _head(self, excerpt: Excerpt) -> nodes.Node:
        symbol = excerpt.symbol
        children = []
        if "caption" in self.options:
            caption = part("div", class_="src-caption")
            caption += _inline(self.parse_text_to_nodes(self.options["caption"]))
            children.append(caption)
        whole = (excerpt.first, excerpt.last) == (symbol.start, symbol.end)
        extent = f"{symbol.file} · 第 {excerpt.first}–{excerpt.last} 行" + ("" if whole else "（节选）")
        children.append(part("code", symbol.spec.partition(":")[2], class_="src-name"))
        if symbol.version:
            href = GITHUB.format(version=symbol.version, file=symbol.file, first=excerpt.first, last=excerpt.last)
            children.append(raw(f'<a class="src-where" href="{escape(href)}">{escape(extent)}</a>'))
        else:
            children.append(part("span", f"src/{extent}", class_="src-where"))
        if symbol.version == PIN:
            children.append(_badge(drift(excerpt)))
        return part("figcaption", *children, class_="src-head")

    def _rows(self, excerpt: Excerpt, notes: list[str]) -> nodes.Node:
        rendered = highlighted(excerpt.symbol.path, excerpt.symbol.path.stat().st_mtime_ns)
        plain = excerpt.lines
        filled = [line for line in plain if line.strip()]
        indent = min((len(line) - len(line.lstrip()) for line in filled), default=0)

        def code(first: int, last: int, css: str) -> nodes.Node:
            rows = []
            for number in range(first, last + 1):
                text = plain[number - excerpt.first]
                depth = max(len(text) - len(text.lstrip()) - indent, 0)
                html = _LEADING.sub(r"\1", rendered[number - 1], count=1)
                rows.append(
                    f'<span class="src-line" style="--in:{depth}" data-in="{depth}"><span class="src-no" aria-hidden="true" '
                    f'data-no="{number}"></span><code>{html or " "}</code></span>'
                )
            return raw(f'<div class="{css} highlight">{"".join(rows)}</div>')

        body = part("div", class_="src-body" if notes else "src-body src-bare", tabindex="-1")
        starts = list(excerpt.marks)
        if not starts or starts[0] > excerpt.first:
            end = (starts[0] if starts else excerpt.last + 1) - 1
            body += part("div", code(excerpt.first, end, "src-rest"), class_="src-row")
        for i, (mark, text) in enumerate(zip(starts, notes, strict=True)):
            end = (starts[i + 1] if i + 1 < len(starts) else excerpt.last + 1) - 1
            note = part("div", raw(f'<span class="src-num" aria-hidden="true">{i + 1}</span>'), class_="src-note", role="note", aria_label=f"第 {mark} 行的注释")
            note += part("div", *self.parse_text_to_nodes(text), class_="src-text")
            row = part("div", code(mark, mark, "src-mark"), note, class_="src-row src-noted")
            if end > mark:
                row += code(mark + 1, end, "src-rest")
            body += row
        return body

    def _drift(self, excerpt: Excerpt) -> list[nodes.Node]:
        if excerpt.symbol.version != PIN:
            return []
        change = drift(excerpt)
        if change.state == "changed":
            diff = highlight(change.diff, DiffLexer(), HtmlFormatter(nowrap=True))
            return [
                raw(
                    f'<details class="src-drift"><summary>{LATER} 的改动'
                    f"{'（在节选之外）' if change.excerpt_same else ''}</summary>"
                    f'<div class="highlight"><pre tabindex="0">{diff}</pre></div></details>'
                )
            ]
        if change.state == "moved":
            places = "、".join(f"<code>{escape(place)}</code>" for place in change.places)
            return [raw(f'<p class="src-moved">{LATER} 里同名的定义在 {places}</p>')]
        return []

    def _licence(self, excerpt: Excerpt) -> nodes.Node:
        if not excerpt.symbol.version:
            return part("p", "本站的 minirl，构建时取自 src/", class_="src-licence")
        return part(
            "p", f"摘自 verl {excerpt.symbol.version}，Apache-2.0 许可；构建时取自所装的包，未作改动", class_="src-licence"
        )


def _badge(change: Drift) -> nodes.Node:
    words = {"same": "未变", "changed": "已改", "moved": "已移走", "gone": "已移走"}
    text = f"{LATER} {words[change.state]}"
    if change.excerpt_same:
        text = f"{LATER} 已改（本段未变）"
    return part("span", text, class_=f"src-badge src-{change.state}")


def _inline(parsed: list[nodes.Node]) -> list[nodes.Node]:
    """The children of a single paragraph, so that a caption stays one line."""
    return parsed[0].children if len(parsed) == 1 and isinstance(parsed[0], nodes.paragraph) else parsed


@lru_cache(maxsize=64)
def highlighted(path: Path, _mtime: int) -> list[str]:
    """HTML of each line. The whole file is lexed, so an excerpt may start inside a docstring."""
    text = path.read_text(encoding="utf-8")
    lexer = PythonLexer(stripnl=False, ensurenl=True)
    return highlight(text, lexer, HtmlFormatter(nowrap=True)).split("\n")


def setup(app):
    app.setup_extension("html_part")
    app.add_directive("source", SourceDirective)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
