"""Every formula of a page, a quiz or a notebook is TeX that KaTeX can set."""

import json

import pytest
import yaml
from built_site import ROOT
from katex_math import KATEX, Katex, TexError
from markdown_it import MarkdownIt
from mdit_py_plugins.dollarmath import dollarmath_plugin

TEXTS = [
    *sorted((ROOT / "book").rglob("*.md")),
    *sorted((ROOT / "notebooks").glob("*.ipynb")),
    *sorted((ROOT / "data" / "quiz").glob("*.yml")),
]
_PARSER = (
    MarkdownIt("commonmark").use(dollarmath_plugin, allow_labels=True, double_inline=True).enable("table")
)


def texts_of(path) -> list[str]:
    if path.suffix == ".ipynb":
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    if path.suffix == ".yml":
        return list(strings(yaml.safe_load(path.read_text(encoding="utf-8"))))
    return [path.read_text(encoding="utf-8")]


def strings(value):
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)


def formulas(text: str) -> list[tuple[str, bool]]:
    """(TeX, display) of each; a directive's body is Markdown too, its fence is opened first."""
    found = []
    for token in _PARSER.parse(text):
        if token.type == "fence" and token.info.startswith("{"):
            found += formulas(token.content)
        for part in [token, *(token.children or [])]:
            if part.type in ("math_inline", "math_inline_double", "math_block", "math_block_label"):
                found.append((part.content, part.type != "math_inline"))
    return found


@pytest.fixture(scope="module")
def katex():
    started = Katex(ROOT / KATEX)
    yield started
    started.close()


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_formulas_parse(path, katex):
    wrong = []
    for text in texts_of(path):
        for tex, display in formulas(text):
            try:
                katex.render(tex, display)
            except TexError as error:
                wrong.append(f"{tex}: {error}")
    assert not wrong, "\n".join(wrong)


def test_formulas_are_found_in_prose_tables_and_directives():
    text = "a $x$\n\n|k|\n|---|\n|$y$|\n\n$$\nz\n$$\n\n```{source} a.b:c\n- at: x\n  note: $w$\n```\n"
    assert [tex.strip() for tex, _ in formulas(text)] == ["x", "y", "z", "w"]
