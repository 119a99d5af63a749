"""The directive `{field-table}`: every key of a batch, by station, as minirl.ledger has it.

in: minirl.ledger, the chapters' heads -> out: a section with a table for each station that writes something.
Writers and readers are links to the tagged source, found in the pin by their symbols.
"""

from html import escape
from pathlib import Path

from annotated_source import tag_link
from book_directive import BookDirective
from course import load_course
from docutils import nodes
from html_part import doc_link, may_break, part, raw

import minirl.ledger
from minirl.ledger import LEDGER, LETTERS, STATIONS, Field
from minirl.pin import find_symbol

_HEAD = ("键", "说明", "容器和形状", "谁写", "谁读")


class FieldTable(BookDirective):
    def build(self) -> list[nodes.Node]:
        self.env.note_dependency(minirl.ledger.__file__)
        course = load_course(Path(self.env.srcdir))
        letters = "".join(f"<li><b>{escape(k)}</b> {escape(v)}</li>" for k, v in LETTERS.items())
        shown = [raw(f'<ul class="letters">{letters}</ul>')]
        for number, station in enumerate(STATIONS, 1):
            fields = [field for field in LEDGER.values() if field.station == station.id]
            if not fields:
                continue
            title = f"第 {number} 站 {station.title_zh}"
            section = nodes.section(
                "", nodes.title(title, title), ids=[f"fields-{station.id.replace('_', '-')}"]
            )
            chapters = [c for c in course if station.id in c.stations and c.page in self.env.found_docs]
            if chapters:
                section += self._chapters(chapters)
            section += raw(_table(fields))
            shown.append(section)
        return shown

    def _chapters(self, chapters) -> nodes.Node:
        line = part("p", "讲到这一站的章节：", class_="field-chapters")
        for i, chapter in enumerate(chapters):
            line += nodes.Text("、") if i else nodes.Text("")
            line += doc_link(chapter.page, chapter.title, from_doc=self.env.docname)
        return line


def _table(fields: list[Field]) -> str:
    head = "".join(f'<th scope="col">{name}</th>' for name in _HEAD)
    rows = "".join(_row(field) for field in fields)
    return (
        '<div class="wide-table" tabindex="0" role="region" aria-label="字段表"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _row(field: Field) -> str:
    shape = f"<code>[{', '.join(field.dims.split())}]</code>" if field.dims else "一个值"
    only = '<span class="only-minirl">只在 minirl</span>' if field.minirl_only else ""
    name = f"<code>{may_break(escape(field.name), after='_')}</code>"
    words = escape(field.zh) + (f"<br><small>{escape(field.note)}</small>" if field.note else "")
    readers = "<br>".join(symbol_link(reader) for reader in field.readers) or "没有读者"
    return (
        f'<tr><th scope="row" id="field-{escape(field.name)}">{name}{only}</th><td class="plain">{words}</td>'
        f"<td><code>{field.container}</code><br>{shape} <code>{field.dtype}</code></td>"
        f"<td>{symbol_link(field.symbol)}</td><td>{readers}</td></tr>"
    )


def symbol_link(spec: str) -> str:
    """The qualified name, linked to its lines at the tag when it is verl's."""
    symbol = find_symbol(spec)
    words = may_break(escape(spec.partition(":")[2]), after="._")
    name = f'<code title="{escape(spec)}">{words}</code>'
    if not symbol.version:
        return name
    return f'<a href="{escape(tag_link(symbol, symbol.start, symbol.end))}">{name}</a>'


def setup(app):
    app.setup_extension("html_part")
    app.setup_extension("book_directive")
    app.add_directive("field-table", FieldTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
