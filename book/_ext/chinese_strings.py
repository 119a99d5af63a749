"""Mends the strings that the themes leave in English under zh_CN.

in: the finished HTML of a page, and the one script that writes some -> out: the same with those strings in
Chinese. tests/site looks for more.
"""

import re
from pathlib import Path

# Exact text of an attribute or of an element, as the themes write it.
STRINGS = {
    "Toggle primary sidebar": "展开或收起目录",
    "Toggle secondary sidebar": "展开或收起本页目录",
    "Download notebook file": "下载笔记本",
    "Download source file": "下载源文件",
    "Download this page": "下载本页",
    "Print to PDF": "打印成 PDF",
    "Fullscreen mode": "全屏",
    "Color mode": "明暗",
    "Search": "搜索",
    "Search this book...": "搜索本站…",
    "Search the docs ...": "搜索本站…",
    "Skip to main content": "跳到正文",
    "Back to top": "回到顶部",
    "Contents": "本页",
    "Light": "浅色",
    "Dark": "深色",
    "System Settings": "跟随系统",
    "previous": "上一页",
    "next": "下一页",
    "previous page": "上一页",
    "next page": "下一页",
    "Main": "全站目录",
    "Page": "本页目录",
    "Table of Contents": "目录",
    "On this page": "本页",
    "Link to this heading": "本节的链接",
    "Permalink to this heading": "本节的链接",
    "Link to this table": "本表的链接",
    "Link to this image": "本图的链接",
    "light/dark": "明暗",
    "Toggle hidden content": "展开或收起",
}
_ATTRIBUTE = re.compile(r'\b(title|aria-label|placeholder|data-bs-title|alt)="([^"<>]+)"')
_TEXT = re.compile(r">(\s*)([A-Z][\w /.-]{2,40}?|previous|next)(\s*)<")


def mend(html: str) -> str:
    """Attributes everywhere; text only outside the article, where it is the theme's."""
    head, opened, rest = html.partition("<article")
    article, closed, tail = rest.partition("</article>")
    return _ATTRIBUTE.sub(
        _attribute, _TEXT.sub(_text, head) + opened + article + closed + _TEXT.sub(_text, tail)
    )


def _attribute(found: re.Match) -> str:
    return f'{found[1]}="{STRINGS.get(found[2].strip(), found[2])}"'


def _text(found: re.Match) -> str:
    return f">{found[1]}{STRINGS.get(found[2], found[2])}{found[3]}<"


def finish(app, exception) -> None:
    if exception or app.builder.name != "html":
        return
    written_by_script = Path(app.outdir) / "_static" / "togglebutton.js"
    for page in [*Path(app.outdir).rglob("*.html"), written_by_script]:
        html = page.read_text(encoding="utf-8")
        mended = mend(html)
        if mended != html:
            page.write_text(mended, encoding="utf-8")


def setup(app):
    app.connect("build-finished", finish)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
