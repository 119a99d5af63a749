"""Tables with sentences in them stand up on a phone: one card a row, each cell under its column's name.

in: a page's HTML -> out: such tables get the class `stack`, their cells a `data-label`; the rest is css.
Tables of short values (a tensor's row, a count) stay as they are and scroll sideways.
"""

import html
import re

from html_part import may_break

LONG_NAME = 30  # characters: a name in the first column with more may break at its dots
SENTENCE = 16  # characters: a cell with more is squeezed into a narrow tall column on a phone

_TABLE = re.compile(r'<table(?: class="table")?>.*?</table>', re.DOTALL)
_HEAD = re.compile(r"<thead>.*?</thead>", re.DOTALL)
_TH = re.compile(r"<th\b[^>]*>(.*?)</th>", re.DOTALL)
_CELL = re.compile(r"<(t[dh])\b([^>]*)>(.*?)(?=</t[dh]>)", re.DOTALL)
_ROW = re.compile(r"<tr\b.*?</tr>", re.DOTALL)
_LONG_CODE = re.compile(rf'(?<=<span class="pre">)[^<]{{{LONG_NAME},}}(?=</span>)')
_SPOKEN_MATH = re.compile(r'<span class="katex-mathml">.*?</math></span>', re.DOTALL)


def plain(fragment: str) -> str:
    """The words of an HTML fragment. A formula is set twice; only what is seen counts."""
    return html.unescape(re.sub(r"<[^>]+>", "", _SPOKEN_MATH.sub("", fragment))).strip()


def stand_up(table: str) -> str:
    """The table with labels in its cells, or as it was where it has no sentences or no simple head."""
    head = _HEAD.search(table)
    if not head or "colspan" in table or "rowspan" in table:
        return table
    labels = [plain(cell) for cell in _TH.findall(head[0])]
    body = table[head.end() :]
    cells = [cell for _, _, cell in _CELL.findall(body)]
    if len(labels) < 2 or max((len(plain(cell)) for cell in cells), default=0) <= SENTENCE:
        return table

    def label_row(row: re.Match) -> str:
        names = iter(labels)
        first = _CELL.search(row[0])

        def label(cell: re.Match) -> str:
            content = cell[3]
            if cell.start() == first.start():  # a long name there gives the other columns room
                content = _LONG_CODE.sub(lambda name: may_break(name[0]), content)
            return f'<{cell[1]}{cell[2]} data-label="{html.escape(next(names, ""))}">{content}'

        return _CELL.sub(label, row[0])

    start = table[: head.end()]
    start = (
        start.replace('class="table"', 'class="table stack"', 1)
        if 'class="table"' in start
        else (start.replace("<table>", '<table class="stack">', 1))
    )
    return start + _ROW.sub(label_row, body)


def on_page(app, pagename, templatename, context, doctree) -> None:
    if context.get("body"):
        context["body"] = _TABLE.sub(lambda m: stand_up(m[0]), context["body"])


def setup(app):
    app.connect("html-page-context", on_page)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
