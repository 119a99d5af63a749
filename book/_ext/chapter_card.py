"""The directive `{chapter}`: the card at a chapter's head, with the lifeline under it.

in: day, outcome, minutes, stations, the verl files it reads, its notebook -> out: a <section>.
A file that the pin does not have or a station that does not exist stops the build.
"""

from html import escape
from pathlib import Path

from book_directive import BookDirective
from docutils import nodes
from docutils.parsers.rst import directives
from html_part import doc_link, part, raw
from lifeline import check_stations, small_lifeline

from minirl.pin import PIN, verl_root


class ChapterDirective(BookDirective):
    option_spec = {
        name: directives.unchanged_required
        for name in ("day", "outcome", "minutes", "stations", "reads", "notebook")
    }

    def build(self) -> list[nodes.Node]:
        for name in ("outcome", "minutes", "stations"):
            if name not in self.options:
                raise ValueError(f"option :{name}: is missing")
        lit = self.options["stations"].split()
        check_stations(lit)
        card = part("section", class_="chapter-card", aria_label="本章")
        if "day" in self.options:
            card += part("p", self.options["day"], class_="chapter-day")
        outcome = part("p", part("span", "读完能做到", class_="chapter-label"), class_="chapter-outcome")
        outcome += part("span", *self.phrase(self.options["outcome"]))
        card += outcome
        facts = part("dl", class_="chapter-facts")
        facts += self._fact("用时", nodes.Text(f"约 {self.options['minutes']} 分钟"))
        if "reads" in self.options:
            facts += self._fact(f"读的源码（verl {PIN}）", *self._files())
        if "notebook" in self.options:
            facts += self._fact("笔记本", self._notebook())
        stem = Path(self.env.docname).name
        if (Path(self.env.srcdir) / "data" / "quiz" / f"{stem}.yml").is_file():
            facts += self._fact(
                "检查题", raw(f'<span class="chapter-progress" data-chapter="{stem}">见本章末尾</span>')
            )
        card += facts
        card += small_lifeline(self.env, lit)
        return [card]

    def _fact(self, term: str, *value: nodes.Node) -> nodes.Node:
        return part("div", part("dt", term), part("dd", *value))

    def _files(self) -> list[nodes.Node]:
        links = []
        for name in self.options["reads"].replace(",", " ").split():
            if not (verl_root() / name).is_file():
                raise ValueError(f":reads: {name} is not in verl {PIN}")
            href = f"https://github.com/verl-project/verl/blob/v{PIN}/{name}"
            links.append(raw(f'<a href="{escape(href)}"><code>{escape(name)}</code></a> '))
        return links

    def _notebook(self) -> nodes.Node:
        docname = f"notebooks/{self.options['notebook']}"
        if docname not in self.env.found_docs:
            if (Path(self.env.srcdir) / f"{docname}.ipynb").is_file():
                return part("span", f"{docname}.ipynb（未列入目录）")
            return part("span", "编写中")
        return doc_link(docname, f"{self.options['notebook']}.ipynb", from_doc=self.env.docname)


def setup(app):
    app.setup_extension("html_part")
    app.setup_extension("book_directive")
    app.add_directive("chapter", ChapterDirective)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
