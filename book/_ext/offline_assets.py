"""Keeps every page free of outside requests and light: KaTeX's css and fonts, the icon font, no thebe.

in: the node modules that set-up installed, the built _static folder -> out: local assets, only what is used.
Set-up: `npm install --no-package-lock --no-save --prefix .cache/node katex@0.16.22 axe-core@4.10.3`.
"""

import re
import shutil
from pathlib import Path

from fontTools import subset
from fontTools.ttLib import TTFont
from katex_math import KATEX

# The theme loads the search index on every page, for a search-as-you-type that we do not use.
_SEARCH_SCRIPT = re.compile(
    r'\s*<script src="[^"]*(?:searchindex|searchtools|language_data)\.js[^"]*"></script>'
)
# The theme's button that unfolds a chapter in the contents has an icon and no name to read out.
_TOGGLE = '<summary><span class="toctree-toggle"'
_ICON_RULE = re.compile(r'((?:\.fa-[\w-]+:before,?)+)\{content:"\\([0-9a-f]{4})"\}')
_ICON_CLASS = re.compile(r"\bfa-[a-z0-9-]+\b")
_CODEPOINT = re.compile(r'"\\([ef][0-9a-f]{3})"')
_PRIVATE = re.compile("[\ue000-\uf8ff]")


def unhook_thebe(app, config) -> None:
    """sphinx_thebe is always on in Jupyter Book 1 and throws a script error on every page."""
    for listeners in app.events.listeners.values():
        listeners[:] = [entry for entry in listeners if entry.handler.__module__ != "sphinx_thebe"]
    app.registry.css_files[:] = [entry for entry in app.registry.css_files if entry[0] != "sphinx-thebe.css"]


def finish(app, exception) -> None:
    if exception or app.builder.name != "html":
        return
    static = Path(app.outdir) / "_static"
    for page in Path(app.outdir).rglob("*.html"):
        html = page.read_text(encoding="utf-8")
        html = html.replace(_TOGGLE, _TOGGLE.replace("<summary", '<summary aria-label="展开或收起小节"'))
        page.write_text(
            html if page.name == "search.html" else _SEARCH_SCRIPT.sub("", html), encoding="utf-8"
        )
    _katex(Path(app.srcdir) / KATEX / "dist", static / "katex")
    _icons(Path(app.outdir), static)
    (static / "scripts" / "fontawesome.js").write_text("", encoding="utf-8")  # 1.5 MB; the web font does it
    for source_map in static.rglob("*.map"):
        source_map.unlink()


def _katex(dist: Path, target: Path) -> None:
    (target / "fonts").mkdir(parents=True, exist_ok=True)
    shutil.copy(dist / "katex.min.css", target)
    for font in dist.glob("fonts/*.woff2"):
        shutil.copy(font, target / "fonts")


def _icons(outdir: Path, static: Path) -> None:
    """Drop the rules of icons that no page uses, then the glyphs that no rule uses."""
    used = set()
    for page in [*outdir.rglob("*.html"), *static.glob("scripts/*theme.js"), *static.glob("*.js")]:
        used |= set(_ICON_CLASS.findall(page.read_text(encoding="utf-8")))
    css = static / "styles" / "pydata-sphinx-theme.css"

    def keep(rule: re.Match) -> str:
        names = {name[1:] for name in re.findall(r"\.fa-[\w-]+", rule[1])}
        return rule[0] if names & used else ""

    text = _ICON_RULE.sub(keep, css.read_text(encoding="utf-8"))
    text = re.sub(r"url\([^)]*\.woff2\) format\(\"woff2\"\),(url\([^)]*fa-)", r"\1", text)
    css.write_text(text, encoding="utf-8")
    codepoints = {int(code, 16) for code in _CODEPOINT.findall(text)}
    for sheet in static.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        codepoints |= {int(code, 16) for code in _CODEPOINT.findall(text)}
        codepoints |= {ord(char) for char in _PRIVATE.findall(text)}  # the icons of notes stand there as such
    folder = static / "vendor" / "fontawesome" / "webfonts"
    for font in folder.glob("*.ttf"):
        _subset(font, codepoints)
    for font in folder.glob("*.woff2"):
        font.unlink()


def _subset(path: Path, codepoints: set[int]) -> None:
    font = TTFont(path)
    options = subset.Options(drop_tables=["FFTM"], notdef_outline=True, hinting=False)
    tool = subset.Subsetter(options)
    tool.populate(unicodes=codepoints & set(font.getBestCmap()))
    tool.subset(font)
    font.save(path)


def setup(app):
    app.connect("config-inited", unhook_thebe, priority=1)
    app.connect("build-finished", finish)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
