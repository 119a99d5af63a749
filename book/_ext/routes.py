"""The directives `{routes}` and `{progress}`: the two routes as rows, and the reader's own progress.

in: data/routes.yml and the files that exist -> out: one card a row, with what quiz.js needs to count.
A row whose page is not in the book yet has no link and says 编写中.
"""

import json
from html import escape
from pathlib import Path

from book_directive import BookDirective
from course import Chapter, load_course
from docutils import nodes
from html_part import doc_link, part, raw
from sphinx.util.docutils import SphinxDirective


class RoutesDirective(BookDirective):
    required_arguments = 1  # week1 | week2

    def build(self) -> list[nodes.Node]:
        env = self.env
        if self.arguments[0] not in ("week1", "week2"):
            raise ValueError(f"wants week1 or week2, got {self.arguments[0]}")
        week = int(self.arguments[0][-1])
        root = Path(env.srcdir)
        env.note_dependency(str(root / "data" / "routes.yml"))
        listing = part("ol", class_=f"routes routes-{self.arguments[0]}")
        for chapter in load_course(root):
            if chapter.week == week:
                listing += self._row(chapter)
        return [listing]

    def _row(self, chapter: Chapter) -> nodes.Node:
        env = self.env
        here = chapter.page in env.found_docs
        if here:
            env.note_dependency(env.doc2path(chapter.page))
            title = doc_link(chapter.page, chapter.title, from_doc=env.docname)
        else:
            title = nodes.Text(chapter.title)
        row = part("li", class_="route" if here else "route is-pending")
        if chapter.day:
            row += part("p", chapter.day, class_="route-day")
        row += part("p", title, class_="route-title")
        row += part("p", chapter.learn, class_="route-learn")
        row += part("p", part("span", "产出", class_="route-label"), chapter.outcome, class_="route-outcome")
        foot = part("p", class_="route-foot")
        if not here:
            foot += part("span", "编写中", class_="route-pending")
        if here and chapter.minutes:
            foot += part("span", f"约 {chapter.minutes} 分钟")
        if chapter.notebook in env.found_docs:
            foot += part("span", doc_link(chapter.notebook, "笔记本", from_doc=env.docname))
        if here and chapter.quiz:
            env.note_dependency(str(chapter.quiz.path))
            hashes = json.dumps({q.id: q.digest for q in chapter.quiz.questions})
            foot += raw(
                f'<span class="route-progress" data-chapter="{chapter.stem}" '
                f'data-questions="{escape(hashes)}">检查题 {len(chapter.quiz.questions)} 道</span>'
            )
        row += foot
        return row


class ProgressDirective(SphinxDirective):
    """Export, import and reset of the answers kept in this browser; empty without scripts, so it says so."""

    def run(self) -> list[nodes.Node]:
        return [
            raw(
                '<section class="progress-panel" aria-label="学习进度">'
                '<p class="progress-note">答题记录只存在这个浏览器里。换机器之前先导出。</p>'
                "<noscript><p>浏览器没有开脚本：检查题仍可读，答案在每题下面的折叠块里，只是不记进度。</p></noscript>"
                '<p class="progress-buttons"><button type="button" class="progress-export">导出进度</button>'
                '<label class="progress-import">导入进度'
                '<input type="file" accept="application/json,.json"></label>'
                '<button type="button" class="progress-reset">清空进度</button></p>'
                '<p class="progress-status" role="status"></p></section>'
            )
        ]


def _routes_are_stale(app, env, added, changed, removed) -> list[str]:
    """The rows depend on which pages exist: read the home page again when a page comes or goes."""
    return [app.config.root_doc] if added or removed else []


def setup(app):
    app.setup_extension("html_part")
    app.setup_extension("book_directive")
    app.add_directive("routes", RoutesDirective)
    app.add_directive("progress", ProgressDirective)
    app.connect("env-get-outdated", _routes_are_stale)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
